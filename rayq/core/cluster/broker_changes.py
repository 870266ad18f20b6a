"""The controller's decisions when brokers and replica processes come, go and report.

Each function reads the state and returns a decision, or its records; it changes nothing. Without
records there is nothing to do, so every request may be repeated. Errors are those of `rayq.errors`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from rayq import messages
from rayq.core.cluster import election
from rayq.core.cluster.facts import ClusterDecision, Facts, changed
from rayq.core.cluster.records import (
    BrokerFenced,
    BrokerRegistered,
    BrokerUnfenced,
    Member,
    MetadataRecord,
    PartitionChanged,
    PartitionValue,
    ProducerIdsAllocated,
    ReplicaGone,
    ReplicaRegistered,
    Voter,
    VotersChanged,
)
from rayq.core.cluster.state import ClusterState, Partition, Topic, find_led_partition
from rayq.core.decision import Decision
from rayq.errors import (
    RayqError,
    StaleBrokerError,
    StalePartitionError,
    WrongClusterError,
    to_wire,
)
from rayq.records import TopicIdPartition

PRODUCER_ID_BLOCK = 1000
VOTERS_MAX = 3


def is_plausible(report: messages.ReplicaRegistration) -> bool:
    """Returns whether a log can end so. An implausible report is ignored, and the others of its
    broker count."""
    epoch = report.last_epoch
    return (epoch is None or 0 <= epoch <= election.HELD_EPOCH_MAX) and report.flushed >= 0


def register_broker(
    state: ClusterState,
    registration: BrokerRegistered,
    held: Collection[tuple[str, int]],
    heard: Collection[int],
) -> list[MetadataRecord]:
    """Registers a broker process. `held` are the partitions, as (topic id, partition), whose
    directories are held by replica processes that outlived the broker's previous process; all other
    replica processes are gone. `heard`: see `_BrokerDraft`. Raises StaleBrokerError for an old copy
    of a directory, WrongClusterError if another directory serves under the same broker id."""
    known = state.brokers.get(registration.broker)
    if known is not None:
        before = known.registration
        if before.incarnation == registration.incarnation:
            return hear_broker(state, registration.broker, heard)
        if before.directory_id == registration.directory_id:
            if registration.start_counter <= before.start_counter:
                raise StaleBrokerError(
                    f"The data directory of broker {registration.broker} is an old copy: it was "
                    f"started {registration.start_counter} times, the cluster has seen start "
                    f"{before.start_counter}. It takes a new identity and catches up as an empty "
                    "replica."
                )
        elif known.live and registration.broker in heard:
            raise WrongClusterError(
                f"Broker {registration.broker} is running with another data directory "
                f"(at {before.host}:{before.port}). Stop that one, or give this directory to a "
                "broker with another id."
            )
    broker = registration.broker
    after = _BrokerDraft(state, heard, became_live={broker})
    records: list[MetadataRecord] = [registration]
    if known is not None:
        is_same_disk = known.registration.directory_id == registration.directory_id
        for topic, number, partition in state.replicas_on(broker):
            process = partition.processes.get(broker)
            lives = is_same_disk and (topic.topic_id, number) in held
            if process is not None and not lives:
                records.append(
                    ReplicaGone(topic.topic_id, number, broker, process.incarnation)
                )
                after.lose(topic.topic_id, number, broker)
    return [*records, *after.settle_all(state.replicas_on(broker))]


def hear_broker(
    state: ClusterState, broker: int, heard: Collection[int]
) -> list[MetadataRecord]:
    """Takes a heartbeat of a broker that was fenced, or not yet heard in this controller epoch: its
    replicas are live, and decisions that waited for it are made."""
    known = state.brokers[broker]
    after = _BrokerDraft(state, heard, became_live={broker})
    records: list[MetadataRecord] = []
    if not known.live:
        records.append(BrokerUnfenced(broker, known.registration.incarnation))
    return [*records, *after.settle_all(state.replicas_on(broker))]


def fence_broker(
    state: ClusterState, broker: int, heard: Collection[int]
) -> list[MetadataRecord]:
    """Ends a broker's session: its replicas count as gone until it is heard again."""
    known = state.brokers[broker]
    if not known.live:
        return []
    after = _BrokerDraft(state, heard, became_fenced={broker})
    return [
        BrokerFenced(broker, known.registration.incarnation),
        *after.settle_all(state.replicas_on(broker)),
    ]


def check_broker(state: ClusterState, broker: int, incarnation: str) -> None:
    """Raises StaleBrokerError unless this very process of the broker is registered."""
    known = state.brokers.get(broker)
    if known is None or known.registration.incarnation != incarnation:
        raise StaleBrokerError(
            f"This process of broker {broker} is not registered with the controller: register "
            "first."
        )


def register_replicas(
    state: ClusterState,
    broker: int,
    reports: Iterable[messages.ReplicaRegistration],
    heard: Collection[int],
) -> list[MetadataRecord]:
    """Registers new replica processes of a broker. `heard`: see `_BrokerDraft`."""
    directory_id = state.brokers[broker].registration.directory_id
    after = _BrokerDraft(state, heard)
    records: list[MetadataRecord] = []
    for report in reports:
        partition = state.partition(report.topic_id, report.partition)
        if partition is None or broker not in partition.value.replicas:
            continue
        if not is_plausible(report):
            continue
        if report.partition_epoch < partition.value.placed_epoch:
            continue  # The broker may mean, and remove, a log from before a move.
        known = partition.processes.get(broker)
        if known is not None and known.incarnation == report.incarnation:
            continue
        process = ReplicaRegistered(
            topic_id=report.topic_id,
            partition=report.partition,
            broker=broker,
            directory_id=directory_id,
            incarnation=report.incarnation,
            host=report.host,
            port=report.port,
            last_epoch=report.last_epoch,
            flushed=report.flushed,
        )
        records.append(process)
        value = election.readmit(partition.value, process)
        processes = {**partition.processes, broker: process}
        topic = state.topics[report.topic_id]
        records.extend(
            after.settle(topic, report.partition, partition, value=value, processes=processes)
        )
    return records


def fail_replicas(
    state: ClusterState,
    broker: int,
    failed: Iterable[tuple[str, int, str]],
    heard: Collection[int],
) -> list[MetadataRecord]:
    """Takes note that replica processes, given as (topic id, partition, incarnation), are gone.
    `heard`: see `_BrokerDraft`."""
    after = _BrokerDraft(state, heard)
    records: list[MetadataRecord] = []
    for topic_id, number, incarnation in failed:
        partition = state.partition(topic_id, number)
        if partition is None:
            continue
        known = partition.processes.get(broker)
        if known is None or known.incarnation != incarnation:
            continue
        records.append(ReplicaGone(topic_id, number, broker, incarnation))
        processes = {at: process for at, process in partition.processes.items() if at != broker}
        topic = state.topics[topic_id]
        records.extend(after.settle(topic, number, partition, processes=processes))
    return records


def stop_broker(
    state: ClusterState,
    broker: int,
    ends: Iterable[messages.ReplicaRegistration],
    heard: Collection[int],
    *,
    cluster_stops: bool,
) -> list[MetadataRecord]:
    """Stops a broker in order: each replica's log ended exactly as `ends` says.

    While the whole cluster stops no other replica is elected: all members keep their place, and
    members that return with these very logs are in sync at once.
    """
    known = state.brokers[broker]
    stopped = {(end.topic_id, end.partition): end for end in ends if is_plausible(end)}
    after = _BrokerDraft(state, heard, became_fenced={broker})
    records: list[MetadataRecord] = [BrokerFenced(broker, known.registration.incarnation)]
    for topic, number, partition in state.replicas_on(broker):
        value = partition.value
        end = stopped.get((topic.topic_id, number))
        if end is not None:
            records.append(ReplicaGone(topic.topic_id, number, broker, end.incarnation))
            value = msgspec.structs.replace(
                value,
                isr=tuple(_stopped(member, broker, end) for member in value.isr),
                elr=tuple(_stopped(member, broker, end) for member in value.elr),
            )
        if not cluster_stops:
            records.extend(after.settle(topic, number, partition, value=value))
            continue
        if value.leader == broker:
            value = msgspec.structs.replace(
                value,
                leader=None,
                leader_incarnation=None,
                leader_epoch=value.leader_epoch + 1,
            )
        if value != partition.value:
            value = msgspec.structs.replace(value, partition_epoch=value.partition_epoch + 1)
            records.append(PartitionChanged(topic.topic_id, number, value))
    return records


def alter_partition(
    state: ClusterState, request: messages.AlterPartition
) -> list[MetadataRecord]:
    """Decides on a leader's proposed ISR, by compare-and-swap on the partition epoch.

    Raises UnknownTopicError, FencedEpochError (not the leader of this epoch), StalePartitionError
    (the partition epoch moved on, or a member does not run under the incarnation named).
    """
    topic, known = find_led_partition(state, request)
    value, where = known.value, f"{topic.name}-{request.partition}"
    if value.partition_epoch != request.partition_epoch:
        raise StalePartitionError(
            f"The in-sync set of {where} was proposed on top of partition epoch "
            f"{request.partition_epoch}, which is now {value.partition_epoch}."
        )
    live = state.live_processes(known)
    members: list[Member] = []
    for member_broker, member_incarnation in request.isr:
        process = live.get(member_broker) if member_broker in value.replicas else None
        if process is None or process.incarnation != member_incarnation:
            raise StalePartitionError(
                f"Broker {member_broker} cannot be in sync for {where}: its process with "
                f"incarnation {member_incarnation} is not live."
            )
        members.append(election.as_member(process))
    if request.broker not in {member.broker for member in members}:
        raise StalePartitionError(
            f"The leader {request.broker} of {where} proposed to leave its own ISR."
        )
    members.sort(key=lambda member: value.replicas.index(member.broker))
    altered = election.with_isr(value, tuple(members), min_insync=topic.min_insync(value))
    return [PartitionChanged(request.topic_id, request.partition, altered)]


def alter_partitions(
    state: ClusterState, proposals: Sequence[messages.AlterPartition]
) -> tuple[list[MetadataRecord], list[tuple[str, int, str, str]]]:
    """Decides on the ISRs that several leaders propose, each by itself. Returns the records, and
    the refusals as `messages.AlterPartitionsResponse` has them."""
    records: list[MetadataRecord] = []
    refused: list[tuple[str, int, str, str]] = []
    seen: set[TopicIdPartition] = set()
    for proposal in proposals:
        key = (proposal.topic_id, proposal.partition)
        try:
            if key in seen:  # It does not build on what was decided just before.
                raise StalePartitionError(f"Partition {key} is in this request twice.")
            records += alter_partition(state, proposal)
            seen.add(key)
        except RayqError as error:
            refused.append((*key, *to_wire(error)))
    return records, refused


def allocate_producer_ids(
    state: ClusterState, request: messages.AllocateProducerIds, _: Facts
) -> ClusterDecision:
    """Allocates a block of `PRODUCER_ID_BLOCK` ids, or of as many families. Raises
    StaleBrokerError."""
    check_broker(state, request.broker, request.incarnation)
    next_id, next_family = state.next_producer_id, state.next_family or state.next_producer_id
    if request.of_families:
        first, record = next_family, ProducerIdsAllocated(next_id, next_family + PRODUCER_ID_BLOCK)
    else:
        first, record = next_id, ProducerIdsAllocated(next_id + PRODUCER_ID_BLOCK)
    return Decision(
        [record], lambda: messages.AllocateProducerIdsResponse(first, PRODUCER_ID_BLOCK)
    )


def confirm_metadata(
    state: ClusterState, _request: messages.ConfirmMetadata, _: Facts
) -> ClusterDecision:
    """Changes nothing by a record, whose commit proves that no newer controller had started."""
    return changed([ProducerIdsAllocated(state.next_producer_id)])


def settle_topic(
    state: ClusterState, topic: Topic, heard: Collection[int]
) -> list[MetadataRecord]:
    """Settles a topic's partitions after a change of config that elections depend on."""
    after = _BrokerDraft(state, heard)
    return after.settle_all(
        (topic, number, partition) for number, partition in topic.partitions.items()
    )


def settle_everything(state: ClusterState, heard: Collection[int]) -> list[MetadataRecord]:
    """Holds the elections that were postponed while the whole cluster was about to stop."""
    return _BrokerDraft(state, heard).settle_all(state.all_partitions())


def found_partition(
    state: ClusterState, topic: Topic, number: int, heard: Collection[int]
) -> list[MetadataRecord]:
    """Gives a new partition a leader and the replicas that did start: the others may have an
    unusable disk. They join when they can."""
    after = _BrokerDraft(state, heard, founds=True)
    return after.settle_all([(topic, number, topic.partitions[number])])


def balance_leaders(state: ClusterState, heard_lately: Collection[int]) -> list[MetadataRecord]:
    """Moves leadership back to the preferred replicas that are in sync.

    It waits while a broker of the ISR is missing in `heard_lately`: a replica learns its leader
    from its broker, so every write would wait until that broker has started again.
    """
    records: list[MetadataRecord] = []
    for topic, number, partition in state.found(state.index.led_by_another):
        elected = election.elect_preferred(
            partition.value, state.live_processes(partition)
        )
        if elected is not None and all(member.broker in heard_lately for member in elected.isr):
            records.append(PartitionChanged(topic.topic_id, number, elected))
    return records


def next_voters(state: ClusterState, heard: Collection[int]) -> list[MetadataRecord]:
    """Returns the next single step towards a full set of voters, or nothing.

    A voter whose broker lives with another data directory is dropped (its log is gone), then live
    brokers join, up to three (one where there are fewer than three brokers). A cordoned voter is
    replaced where another broker can take its place: first the other broker joins. The last voter
    is never dropped. Only brokers in `heard` live for certain: what the log says of other brokers
    may be from before all of them were lost, and a voter that never comes would stop everything.
    """
    directories = {
        number: broker.registration.directory_id
        for number, broker in state.brokers.items()
        if broker.live and number in heard
    }
    wanted = VOTERS_MAX if len(state.brokers) >= VOTERS_MAX else 1
    for voter in state.voters:
        replaced = directories.get(voter.broker, voter.directory_id) != voter.directory_id
        if replaced and len(state.voters) > 1:
            return [VotersChanged(tuple(kept for kept in state.voters if kept != voter))]
    taken = {voter.broker for voter in state.voters}
    joiners = [
        broker
        for broker in sorted(directories)
        if broker not in taken and not state.brokers[broker].cordoned
    ]
    leavers = [
        voter
        for voter in state.voters
        if voter.broker in state.brokers and state.brokers[voter.broker].cordoned
    ]
    if joiners and len(state.voters) < wanted + bool(leavers):
        joiner = joiners[0]
        return [VotersChanged((*state.voters, Voter(joiner, directories[joiner])))]
    # A set that is larger than wanted is not always cut: at the first start of a cluster there are
    # three voters before there are three registered brokers.
    if len(state.voters) > VOTERS_MAX or (len(state.voters) == 2 and wanted == 1):
        leaver = min(
            reversed(state.voters),
            key=lambda voter: (voter not in leavers, voter.broker in directories),
        )
        return [VotersChanged(tuple(voter for voter in state.voters if voter != leaver))]
    return []


class _BrokerDraft:
    """Settles partitions as if some brokers' sessions had changed already.

    `heard` are the brokers that the controller has heard in its epoch. A partition with a member on
    a broker that counts as live and has not been heard is not settled: after a loss of power
    everywhere the metadata still shows processes that are dead, and members that return first would
    be dropped from the in-sync set as if the dead ones continued without them. The partition is
    settled when the broker is heard, or its session ends.
    """

    def __init__(
        self,
        state: ClusterState,
        heard: Collection[int],
        *,
        became_live: Collection[int] = (),
        became_fenced: Collection[int] = (),
        founds: bool = False,
    ) -> None:
        self._state = state
        self._heard = heard
        self._became_live = became_live
        self._became_fenced = became_fenced
        self._founds = founds
        self._lost: set[tuple[str, int, int]] = set()

    def lose(self, topic_id: str, partition: int, broker: int) -> None:
        """Notes that the registered process of that replica is gone."""
        self._lost.add((topic_id, partition, broker))

    def settle_all(
        self, partitions: Iterable[tuple[Topic, int, Partition]]
    ) -> list[MetadataRecord]:
        records: list[MetadataRecord] = []
        for topic, number, partition in partitions:
            records.extend(self.settle(topic, number, partition))
        return records

    def settle(
        self,
        topic: Topic,
        number: int,
        partition: Partition,
        *,
        value: PartitionValue | None = None,
        processes: Mapping[int, ReplicaRegistered] | None = None,
    ) -> list[MetadataRecord]:
        """The records that settle a partition. If `value` or `processes` are given, they replace
        the partition's own."""
        before = partition.value
        value = before if value is None else value
        processes = partition.processes if processes is None else processes
        live = {
            broker: process
            for broker, process in processes.items()
            if self._is_live(broker) and (topic.topic_id, number, broker) not in self._lost
        }
        is_starting = value.leader_epoch == 0 and any(
            self._is_live(broker) and broker not in live for broker in value.replicas
        )
        settled = None
        # A new partition is founded by all that can found it: wait for those still starting.
        if not (is_starting and not self._founds) and not self._waits_for(value):
            settled = election.settle(
                value,
                live,
                min_insync=topic.min_insync(value),
                unclean=topic.config.unclean_leader_election,
            )
        after = settled or value
        if after == before:
            return []
        if after.partition_epoch == before.partition_epoch:
            after = msgspec.structs.replace(after, partition_epoch=before.partition_epoch + 1)
        return [PartitionChanged(topic.topic_id, number, after)]

    def _waits_for(self, value: PartitionValue) -> bool:
        """Returns whether the fate of a member is not known yet."""
        return any(
            self._is_live(member.broker)
            and member.broker not in self._heard
            and member.broker not in self._became_live
            for member in (*value.isr, *value.elr)
        )

    def _is_live(self, broker: int) -> bool:
        if broker in self._became_live:
            return True
        return broker not in self._became_fenced and self._state.is_live(broker)


def _stopped(member: Member, broker: int, end: messages.ReplicaRegistration) -> Member:
    if member.broker != broker or member.incarnation != end.incarnation:
        return member
    return msgspec.structs.replace(member, stopped_at=(end.last_epoch, end.flushed))
