"""Health of a cluster, and the next step for each problem: a function over descriptions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal

import msgspec

from rayq.config import DAY_MS, HOUR_MS, MIB, QueueConfig, parse_stored
from rayq.core.cluster.queue_changes import DEAD
from rayq.core.cluster.topic_changes import (
    AUDIT_TOPIC,
    DEFAULT_REPLICATION_FACTOR,
    OFFSETS_TOPIC,
    OWN_TOPICS,
    QUEUES_TOPIC,
    TRANSACTIONS_TOPIC,
)
from rayq.core.queues.lock_times import LONG_TIMEOUTS
from rayq.errors import counted
from rayq.records import (
    BrokerInfo,
    ClusterInfo,
    GroupInfo,
    HangingTransaction,
    ObjectStoreInfo,
    PartitionInfo,
    PrincipalInfo,
    QueueInfo,
    Reassignment,
    RemotePartitionInfo,
    TopicInfo,
    TransactionListing,
)

Severity = Literal["error", "warning", "notice"]

DISK_LOW_BYTES = 1024 * MIB
DISK_FULL_BYTES = 128 * MIB
"""Free space below which a disk counts as full. Appends are refused a little below it (64 MiB are
reserved)."""
UPLOAD_LATE_MS = HOUR_MS
"""Maximum delay of uploads to the object store without a warning."""
UNTAKEN_MS = 5 * 60_000
"""Time after which a record that is ready, while nobody takes any, is noted."""
TOKEN_WARNING_MS = 7 * DAY_MS
"""Time before and after the end of a principal's last token in which that end is a problem: later
the principal counts as given up."""
NAMED_MAX = 8
"""Maximum number of partitions that a problem names; the rest are counted."""

PartitionState = Literal["in sync", "under-replicated", "under min ISR", "offline"]


class Problem(msgspec.Struct, frozen=True):
    """A problem of the cluster. `error`: some records cannot be written or read. `warning`: one
    more failure may lead to that. `notice`: the cluster is well, and this is worth knowing."""

    severity: Severity
    what: str
    why: str
    next_command: str
    """The next command to run; text in capitals stands for values that only the reader knows."""


def is_healthy(problems: Iterable[Problem]) -> bool:
    """Returns whether there is no error and no warning."""
    return all(problem.severity == "notice" for problem in problems)


def find_problems(
    cluster: ClusterInfo,
    topics: Iterable[TopicInfo],
    groups: Iterable[GroupInfo] = (),
    moves: Iterable[Reassignment] = (),
    silent: Collection[int] = (),
    transactions: Iterable[TransactionListing] = (),
    hanging: Iterable[HangingTransaction] = (),
    store: ObjectStoreInfo | None = None,
    remote: Iterable[RemotePartitionInfo] = (),
    queues: Iterable[QueueInfo] = (),
    troubles: Mapping[int, str] = {},
    principals: Iterable[PrincipalInfo] = (),
    now_ms: int = 0,
) -> list[Problem]:
    """Finds all problems, the worst first; [] if there are none. `silent` are the brokers that
    count as live and do not answer; `troubles` gives the reasons why brokers have given up their
    sessions. `now_ms` is the time by which tokens of `principals` expire."""
    # rayq's own topics come last: an operator should hear of the users' topics first.
    listed = sorted(topics, key=lambda topic: topic.name.startswith("__"))
    problems = [
        *_controller_problems(cluster, silent),
        *_broker_problems(cluster, troubles),
        *_silence_problems(cluster, listed, silent),
        *_partition_problems(listed),
        *_disk_problems(listed),
        *_leadership_problems(listed),
        *_own_topics_problems(cluster, listed),
        *_group_problems(groups),
        *_move_problems(moves),
        *_transaction_problems(transactions),
        *_unknown_transaction_problems(hanging),
        *_remote_problems(store, list(remote)),
        *_queue_problems(list(queues)),
        *_token_problems(principals, now_ms),
    ]
    order: Mapping[Severity, int] = {"error": 0, "warning": 1, "notice": 2}
    return sorted(problems, key=lambda problem: order[problem.severity])


def partition_state(partition: PartitionInfo, min_insync: int) -> PartitionState:
    """The state of a partition in a word; `min_insync` as in `min_insync_of`."""
    if partition.leader is None:
        return "offline"
    if len(partition.isr) < min_insync:
        return "under min ISR"
    if partition.target:  # Added replicas that still copy the log are not a problem.
        is_whole = len(partition.isr) >= min(len(partition.origin), len(partition.target))
    else:
        is_whole = _wanted(partition) <= set(partition.isr)
    return "in sync" if is_whole else "under-replicated"


def min_insync_of(topic: TopicInfo, partition: PartitionInfo) -> int:
    """The minimum number of in-sync replicas for a write with acks="all": as configured, or the
    majority."""
    configured = topic.config.get("min_insync_replicas")
    factor = len(partition.origin or partition.replicas)
    return configured if isinstance(configured, int) else factor // 2 + 1


def _wanted(partition: PartitionInfo) -> set[int]:
    """The brokers that hold the partition once a move in progress is done."""
    return set(partition.target) or {replica.broker for replica in partition.replicas}


# --- the parts ------------------------------------------------------------------------------------


def _controller_problems(cluster: ClusterInfo, silent: Collection[int]) -> Iterable[Problem]:
    live = {broker.broker for broker in cluster.brokers if broker.live} - set(silent)
    voters = set(cluster.voters)
    gone = sorted(voters - live)
    if cluster.controller is None or 2 * len(voters & live) <= len(voters):
        missing = f", of which {_listed(gone)} cannot be reached" if gone else ""
        yield Problem(
            "error",
            "No controller acts",
            "without one nothing is elected or changed; it takes a majority of the voters, brokers "
            f"{_listed(sorted(voters))}{missing}",
            (f"start the nodes of {_listed(gone)} again, then " if gone else "")
            + "rayq cluster health, after a few seconds; rayq cluster recover-quorum --from DIR "
            "where a majority of the voters' directories is lost",
        )
    elif gone and 2 * len(voters - live) >= len(voters) - 1 > 0:
        yield Problem(
            "warning",
            "The controller's quorum bears no further loss",
            f"of the voters {_listed(sorted(voters))} broker {_listed(gone)} is down",
            f"start the node of broker {gone[0]} again, then rayq cluster health",
        )


def _broker_problems(cluster: ClusterInfo, troubles: Mapping[int, str]) -> Iterable[Problem]:
    for broker in cluster.brokers:
        trouble = troubles.get(broker.broker)
        if trouble is not None:
            yield Problem(
                "warning",
                f"Broker {broker.broker} cannot use its disk",
                f"{trouble}; it has given up its session, so that others lead",
                f"once that is fixed it continues by itself, see its node ({_node(broker)}); where "
                f"the disk or the directory is lost: rayq cluster replace-disk {broker.broker}",
            )
        elif not broker.live:
            yield Problem(
                "warning",
                f"Broker {broker.broker} is down",
                f"{broker.host}:{broker.port} has no session with the controller",
                f"start its node again ({_node(broker)}); where its disk is lost: rayq cluster "
                f"replace-disk {broker.broker}; for good without it: rayq cluster drain "
                f"{broker.broker}",
            )


def _silence_problems(
    cluster: ClusterInfo, topics: list[TopicInfo], silent: Collection[int]
) -> Iterable[Problem]:
    for broker in cluster.brokers:
        if broker.broker not in silent:
            continue
        led = sum(p.leader == broker.broker for topic in topics for p in topic.partitions)
        yield Problem(
            "error" if led else "warning",
            f"Broker {broker.broker} does not answer",
            f"{broker.host}:{broker.port} cannot be reached from here, and its session with the "
            f"controller has not ended; it leads {_count(led, 'partition', 'partitions')}",
            f"rayq cluster health, after a few seconds; else see to its node ({_node(broker)})",
        )


def _node(broker: BrokerInfo) -> str:
    return f"node {broker.node_id[:12]}" if broker.node_id else broker.host


def _partition_problems(topics: list[TopicInfo]) -> Iterable[Problem]:
    found: dict[PartitionState, list[str]] = {}
    reasons: dict[PartitionState, list[str]] = {}
    for topic in topics:
        for partition in topic.partitions:
            minimum = min_insync_of(topic, partition)
            state = partition_state(partition, minimum)
            if state != "in sync":
                found.setdefault(state, []).append(f"{topic.name}-{partition.partition}")
                reasons.setdefault(state, []).append(_reason(partition, state, minimum))
    for state, names in found.items():
        topic_name = names[0].rpartition("-")[0]
        next_command = f"rayq topic describe {topic_name}"
        if state == "offline":
            next_command += (
                f"; where no in-sync replica will ever return, at the price of records: rayq "
                f"cluster elect-leaders {topic_name} --unclean"
            )
        yield Problem(
            "warning" if state == "under-replicated" else "error",
            _count(len(names), f"partition is {state}", f"partitions are {state}")
            + f": {_named(names)}",
            "; ".join(dict.fromkeys(reasons[state][:NAMED_MAX])),
            next_command,
        )


def _reason(partition: PartitionInfo, state: PartitionState, minimum: int) -> str:
    missing = sorted(_wanted(partition) - set(partition.isr))
    if state == "offline":
        return partition.offline_reason or "no replica may lead"
    if state == "under min ISR":
        return (
            f"{len(partition.isr)} of the {minimum} in-sync replicas that a write needs; broker "
            f"{_listed(missing)} is not in sync, and writes with acks=all are refused"
        )
    told = [
        f"{replica.trouble}"
        for replica in partition.replicas
        if replica.trouble and replica.broker in missing
    ]
    return f"broker {_listed(missing)} is not in sync" + (f" ({told[0]})" if told else "")


def _disk_problems(topics: list[TopicInfo]) -> Iterable[Problem]:
    for broker, free_bytes in sorted(disk_free(topics).items()):
        if free_bytes >= DISK_LOW_BYTES:
            continue
        is_full = free_bytes < DISK_FULL_BYTES
        yield Problem(
            "error" if is_full else "warning",
            f"The disk of broker {broker} is {'full' if is_full else 'nearly full'}",
            f"{free_bytes // MIB} MiB are free, and 64 MiB are kept back for metadata",
            f"rayq topic alter TOPIC -c retention_bytes=SIZE, or rayq cluster drain {broker}",
        )


def disk_free(topics: Iterable[TopicInfo]) -> dict[int, int]:
    """The free bytes of each broker's disk, as its replicas reported them."""
    return {
        replica.broker: replica.disk_free_bytes
        for topic in topics
        for partition in topic.partitions
        for replica in partition.replicas
        if replica.disk_free_bytes is not None
    }


def disk_used(topics: Iterable[TopicInfo]) -> dict[int, int]:
    """The bytes that the logs of each broker take, as its replicas reported them."""
    used: dict[int, int] = {}
    for topic in topics:
        for partition in topic.partitions:
            for replica in partition.replicas:
                if replica.size_bytes is not None:
                    used[replica.broker] = used.get(replica.broker, 0) + replica.size_bytes
    return used


def _leadership_problems(topics: list[TopicInfo]) -> Iterable[Problem]:
    elsewhere = [
        f"{topic.name}-{partition.partition}"
        for topic in topics
        for partition in topic.partitions
        if partition.leader is not None
        and partition.replicas
        and partition.leader != partition.replicas[0].broker
        and partition.replicas[0].broker in partition.isr
    ]
    if elsewhere:
        yield Problem(
            "notice",
            _count(
                len(elsewhere),
                "partition is not led by its first replica",
                "partitions are not led by their first replica",
            )
            + f": {_named(elsewhere)}",
            "after failures the load of leading may lie on few brokers",
            "rayq cluster elect-leaders",
        )


_KEPT = {
    OFFSETS_TOPIC: "how far groups have read",
    TRANSACTIONS_TOPIC: "which transactions are open or committed",
    QUEUES_TOPIC: "what queues have settled",
    AUDIT_TOPIC: "who changed what, logged in, or was denied",
}


def _own_topics_problems(cluster: ClusterInfo, topics: list[TopicInfo]) -> Iterable[Problem]:
    """Finds internal topics with few replicas: groups, transactions or queues were used before
    there were enough brokers."""
    takers = sum(not broker.cordoned for broker in cluster.brokers)
    wanted = min(DEFAULT_REPLICATION_FACTOR, takers)
    for topic in topics:
        factor = min((len(_wanted(partition)) for partition in topic.partitions), default=wanted)
        if topic.name in OWN_TOPICS and factor < wanted:
            yield Problem(
                "notice",
                f"{topic.name} has {_count(factor, 'replica', 'replicas')} of each partition, and "
                f"there are {takers} brokers",
                f"it is from when there were fewer: a lost disk may take {_KEPT[topic.name]}",
                f"rayq topic set-replication-factor {topic.name} -r {wanted}",
            )


def _group_problems(groups: Iterable[GroupInfo]) -> Iterable[Problem]:
    for group in groups:
        if group.lag and not group.members:
            yield Problem(
                "notice",
                f"Group {group.group} has a lag of {counted(group.lag, 'record')} and no members",
                "no member reads its topics",
                f"rayq group describe {group.group}",
            )


def _move_problems(moves: Iterable[Reassignment]) -> Iterable[Problem]:
    waiting = [move for move in moves if move.waits_for is not None]
    if waiting:
        names = [
            f"{move.topic_partition.topic}-{move.topic_partition.partition}" for move in waiting
        ]
        yield Problem(
            "notice",
            _count(len(waiting), "partition is", "partitions are") + f" moving: {_named(names)}",
            f"{names[0]} waits for {waiting[0].waits_for}",
            "rayq cluster reassign --list; to take moves back: rayq cluster reassign --cancel",
        )


def _transaction_problems(transactions: Iterable[TransactionListing]) -> Iterable[Problem]:
    late = [listing for listing in transactions if listing.is_hanging]
    if not late:
        return
    first = late[0]
    assert first.age_ms is not None
    if first.state in ("open", "sealed"):
        reason, then = "its coordinator has not ended it", "rayq transactions abort"
    else:
        reason, then = "a partition does not take its marker", "rayq transactions describe"
    yield Problem(
        "warning",
        _count(len(late), "transaction hangs", "transactions hang")
        + f": {_named([listing.transactional_id for listing in late])}",
        f"{first.transactional_id} is {first.state} since {first.age_ms // 1000:,} s, and its "
        f"time-out is {first.transaction_timeout_ms // 1000:,} s: {reason}, and readers of what is "
        "committed wait in its partitions",
        f"{then} {first.transactional_id}",
    )


def _unknown_transaction_problems(hanging: Iterable[HangingTransaction]) -> Iterable[Problem]:
    found = list(hanging)
    if found:
        place = found[0].topic_partition
        names = [f"{h.topic_partition.topic}-{h.topic_partition.partition}" for h in found]
        yield Problem(
            "error",
            f"{_count(len(found), 'transaction', 'transactions')} in "
            f"{_named(list(dict.fromkeys(names)))} will never end",
            "no coordinator knows of it, as after the loss of __transaction_state: readers of what "
            f"is committed wait at offset {found[0].first_offset} of {names[0]}",
            f"rayq transactions find-hanging {place.topic}; docs/operations.md says when to abort",
        )


def _remote_problems(
    store: ObjectStoreInfo | None, partitions: list[RemotePartitionInfo]
) -> Iterable[Problem]:
    told = [partition for partition in partitions if partition.log_start_offset is not None]
    is_needed = any(
        (partition.local_start_offset or 0) > (partition.log_start_offset or 0)
        for partition in told
    )
    for broker, trouble in sorted(store.troubles.items()) if store is not None else ():
        yield Problem(
            # Old records of the partitions that it leads cannot be read.
            "error" if is_needed else "warning",
            f"Broker {broker} does not reach the object store",
            trouble,
            "rayq storage status; docs/tiered-storage.md says what a broker needs",
        )
    stuck = [partition for partition in told if partition.trouble is not None]
    if stuck:
        yield Problem(
            "warning",
            _count(len(stuck), "partition gets", "partitions get")
            + f" nothing into the object store: {_places(stuck)}",
            f"{stuck[0].trouble}; nothing is lost, and the brokers' disks fill",
            "rayq storage status",
        )
    late = [
        partition
        for partition in told
        if partition.trouble is None and (partition.lag_ms or 0) > UPLOAD_LATE_MS
    ]
    if late:
        yield Problem(
            "warning",
            _count(len(late), "partition is", "partitions are")
            + f" late in the object store: {_places(late)}",
            f"{_places(late[:1])} has {(late[0].lag_bytes or 0) // MIB:,} MiB that wait for "
            f"{(late[0].lag_ms or 0) // 1000:,} s",
            "rayq storage status; it may be that remote_upload_bytes_per_s is too low",
        )


def _places(partitions: Iterable[RemotePartitionInfo]) -> str:
    places = [partition.topic_partition for partition in partitions]
    return _named([f"{place.topic}-{place.partition}" for place in places])


def _queue_problems(queues: list[QueueInfo]) -> Iterable[Problem]:
    dead_queues = {f"{queue.name}{DEAD}" for queue in queues}
    for queue in queues:
        name, partitions = queue.name, queue.partitions
        stuck = [partition for partition in partitions if partition.trouble is not None]
        if stuck:
            places = _named([f"{queue.topic}-{partition.partition}" for partition in stuck])
            yield Problem(
                "warning",
                f"Queue {name} does not work in {places}",
                f"{stuck[0].trouble}; what it holds is kept",
                f"rayq queue describe {name}",
            )
        if expired := sum(partition.expired or 0 for partition in partitions):
            yield Problem(
                "warning",
                f"Queue {name} lost {_count(expired, 'record', 'records')} to retention",
                f"the retention of topic {queue.topic} took them before anybody settled them",
                f"rayq queue alter {name} -c retention=hold, or a longer retention_ms of the topic",
            )
        yield from _long_locks(queue)
        ready = sum(partition.ready or 0 for partition in partitions)
        letters = ready + sum(partition.delayed or 0 for partition in partitions)
        if letters and name in dead_queues:
            yield Problem(
                "notice",
                f"Queue {name} has {_count(letters, 'dead letter', 'dead letters')}",
                "they failed for good, or were rejected; each says why in its headers",
                f"rayq dead-letters list {name.removesuffix(DEAD)}",
            )
        elif (oldest_ms := _untaken_ms(queue)) > UNTAKEN_MS:
            yield Problem(
                "notice",
                f"No consumer takes from queue {name}",
                f"{_count(ready, 'record waits', 'records wait')}, the oldest for "
                f"{oldest_ms // 1000:,} s, and no consumer holds any",
                f"rayq queue describe {name}; rayq queue delete {name} if it is not needed",
            )


def _long_locks(queue: QueueInfo) -> Iterable[Problem]:
    """Finds tasks handled for very long: a worker that hangs extends its lock like one that
    works."""
    config = parse_stored(QueueConfig, queue.config)
    limit_ms = LONG_TIMEOUTS * 1000 * config.visibility_timeout_s
    late = [
        partition for partition in queue.partitions if (partition.oldest_locked_ms or 0) > limit_ms
    ]
    if late:
        oldest = max(late, key=lambda partition: partition.oldest_locked_ms or 0)
        yield Problem(
            "notice",
            f"A task of queue {queue.name} has been handled for "
            f"{(oldest.oldest_locked_ms or 0) // 1000:,} s",
            f"{oldest.oldest_holder} has it, in partition {oldest.partition}; it is another's "
            f"after {config.max_handling_s:,g} s (max_handling_s)",
            f"rayq queue peek {queue.name} --in-flight",
        )


def _untaken_ms(queue: QueueInfo) -> int:
    """The waiting time of its oldest record if no consumer holds or awaits any; 0 otherwise."""
    if any(partition.locked or partition.waiting_takes for partition in queue.partitions):
        return 0
    return max((partition.oldest_ready_ms or 0 for partition in queue.partitions), default=0)


# --- words ----------------------------------------------------------------------------------------


def _token_problems(principals: Iterable[PrincipalInfo], now_ms: int) -> Iterable[Problem]:
    for principal in principals:
        ends_ms = principal.tokens_end_ms
        if ends_ms is None or abs(ends_ms - now_ms) >= TOKEN_WARNING_MS:
            continue
        hours = f"{abs(ends_ms - now_ms) / HOUR_MS:.0f} h"
        when = f"expired {hours} ago" if ends_ms <= now_ms else f"expires in {hours}"
        yield Problem(
            "warning",
            f"The last token of principal {principal.name!r} {when}",
            "its programs lose their connections then, and cannot log in again",
            f"rayq token rotate {principal.name}",
        )


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


def _named(names: list[str]) -> str:
    more = len(names) - NAMED_MAX
    return ", ".join(names[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


def _count(number: int, singular: str, plural: str) -> str:
    return f"{number} {singular if number == 1 else plural}"
