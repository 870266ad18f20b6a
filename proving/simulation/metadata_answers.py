"""Judgement of what voters, controllers and brokers answer about the metadata.

An answer is a promise, and each one is compared with the logs at the moment in which it leaves:

- an index that a voter confirms: its log holds there, and below, what that controller has; all of
  it would survive a power loss; the voter has promised no higher controller epoch;
- an index that a controller calls committed: a majority of its voters has confirmed it in this
  controller epoch, and no controller ever has another record there;
- a controller's answer, also a refusal or the answer to a repeated change: all that it is based on
  is committed, except for a heartbeat, whose answer says only that the controller lives; a change
  is done once, however often it is repeated;
- a controller that takes over has all that was ever called committed;
- a snapshot, taken or sent, is the state that the records up to its index make;
- the voters that a voter names to a candidate are the last ones that its log names;
- what a broker tells clients, of topics and of queues, is what its committed metadata says, not
  what it said before.

The judge wraps methods of the servers while a seed runs. It changes nothing and takes no virtual
time. A fault is kept until the observer of the loop raises it: an error that is raised inside a
server would only be an answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from proving.simulation.patches import applied
from proving.simulation.server_view import (
    directory_of_metadata,
    disk_of_metadata,
    entries_from,
    epoch_at,
    first_index_of,
    fresh_answers,
    metadata_log_of,
    metadata_of,
    quorum_of,
)
from rayq import messages
from rayq.actors.broker.metadata_answers import MetadataAnswers
from rayq.actors.controller.controller import Controller
from rayq.actors.metadata.metadata_keeper import MetadataKeeper
from rayq.actors.metadata.quorum import Quorum, decode_entries
from rayq.core.access.rights import View
from rayq.core.cluster.audited_changes import done_id
from rayq.core.cluster.records import (
    MetadataRecord,
    RequestDone,
    VotersChanged,
    decode_entry,
    decode_records,
)
from rayq.core.cluster.state import ClusterState
from rayq.errors import NotControllerError, RayqError
from rayq.storage.metadata_log import ENTRIES, PROMISE, SNAPSHOT, MetadataLog
from rayq.wire.codec import DECODERS, ENCODER
from rayq.wire.peer import Peer

Installed = messages.AppendMetadataResponse | messages.InstallMetadataSnapshotPartResponse
"""An answer that confirms that a snapshot is on a broker's disk."""
State = tuple[str, ...]
"""All that a state holds, in an order that does not depend on how it came to be."""


class MetadataJudge:
    """See the module. `judging` wraps the servers' methods; `fault` is what was found first."""

    def __init__(self) -> None:
        self.fault: str | None = None
        self._is_judging = False
        self.committed: dict[int, bytes] = {}
        """Every record that a controller called committed, or a broker applied, by index, with its
        controller epoch in front."""
        self._committed_in: dict[int, int] = {}
        """The highest index that the controller of each epoch has called committed."""
        self._quorums: dict[int, Quorum] = {}
        self._seen_commit_index: dict[Quorum, int] = {}
        self._confirmed: dict[tuple[int, str], int] = defaultdict(int)
        """The highest index that a directory confirmed in a controller epoch."""
        self._promised: dict[str, int] = defaultdict(int)
        """The highest controller epoch that a directory promised or took records of."""
        self._states: dict[int, State] = {}
        """The states that committed records make, by version."""
        self._early_states: dict[int, list[tuple[str, State]]] = defaultdict(list)
        """Snapshots of versions that no broker has applied yet, and who took each."""
        self._done_at: dict[str, int] = {}
        """The index at which each repeatable change was committed."""
        self._answered_at: dict[str, int] = {}

    # --- what the invariants tell -----------------------------------------------------------------

    def note_committed(self, index: int, encoded: bytes) -> None:
        """Takes note of a committed record, its controller epoch in front."""
        known = self.committed.setdefault(index, encoded)
        if known != encoded:
            self._found(
                f"record {index} of the metadata differs: {_told(encoded)} here, {_told(known)} "
                "was called committed elsewhere"
            )

    def note_state(self, version: int, state: ClusterState) -> None:
        """Takes note of the state that the committed records up to `version` make."""
        told = self._states[version] = _state(state)
        for who, early in self._early_states.pop(version, ()):
            self._compare_states(who, version, early, told)

    def note_done(self, index: int, record: RequestDone) -> None:
        """Takes note of a change that is committed."""
        before = self._done_at.setdefault(record.request_id, index)
        if before != index:
            self._found(f"the change {record.request_id} was done twice: at {before} and {index}")
        answered = self._answered_at.get(record.request_id)
        if answered is not None and answered < index:
            self._found(
                f"the change {record.request_id} was answered at {answered}, and done at {index}"
            )

    def note_controller(self, controller: Controller) -> None:
        """Looks at what a controller calls committed."""
        if not self._is_judging:
            return
        quorum = quorum_of(controller)
        seen = self._seen_commit_index.get(quorum, 0)
        if quorum.commit_index == seen:
            return
        self._seen_commit_index[quorum] = quorum.commit_index
        if epoch_at(quorum, quorum.commit_index) != quorum.epoch:
            # Raft 5.4.2: a later controller may still cut what only earlier epochs have written.
            of = epoch_at(quorum, quorum.commit_index)
            self._found(
                f"controller epoch {quorum.epoch} calls record {quorum.commit_index} of epoch {of} "
                "committed"
            )
        confirmed = [
            self._confirmed[quorum.epoch, voter.directory_id] >= quorum.commit_index
            for voter in quorum.voters
        ]
        if sum(confirmed) <= len(confirmed) // 2:
            self._found(
                f"controller epoch {quorum.epoch} calls {quorum.commit_index} committed, which "
                f"{sum(confirmed)} of {len(confirmed)} voters confirmed"
            )
        self._committed_in[quorum.epoch] = quorum.commit_index
        for index, epoch, data in entries_from(quorum, max(seen + 1, first_index_of(quorum))):
            if index > quorum.commit_index:
                break
            self.note_committed(index, _encoded(epoch, data))

    # --- the servers' methods ---------------------------------------------------------------------

    @contextlib.contextmanager
    def judging(self) -> Iterator[None]:
        """Wraps the methods whose answers are judged, for the length of a `with` block."""
        wrappers: tuple[tuple[type, str, Callable[[Any], Any]], ...] = (
            (MetadataKeeper, "prepare", self._around_prepare),
            (MetadataKeeper, "append", self._around_append),
            (MetadataKeeper, "install", self._around_install),
            (MetadataKeeper, "install_part", self._around_install_part),
            (MetadataLog, "compact", self._around_compact),
            (Quorum, "append", self._around_quorum_append),
            (Quorum, "compact", self._around_quorum_compact),
            (Controller, "handle", self._around_handle),
            (MetadataAnswers, "_page", self._around_page),
            (MetadataAnswers, "queues", self._around_queues),
        )
        with applied(
            (owner, method, around(getattr(owner, method))) for owner, method, around in wrappers
        ):
            self._is_judging = True
            yield

    def _around_prepare(self, prepare: Any) -> Any:
        async def judged(keeper: MetadataKeeper, request: messages.Prepare) -> Any:
            answer = await prepare(keeper, request)
            self.judge_voters(keeper, answer.voters)
            if not request.is_probe:
                self._judge_epoch(keeper, answer.promised_epoch)
                self._judge_disk(keeper)
            return answer

        return judged

    def _around_append(self, append: Any) -> Any:
        async def judged(
            keeper: MetadataKeeper, request: messages.AppendMetadata, payload: memoryview
        ) -> Any:
            sent = decode_entries(payload)
            answer = await append(keeper, request, payload)
            self._judge_epoch(keeper, request.epoch)
            self._judge_confirmed(keeper, request.epoch, answer)
            log = metadata_log_of(keeper)
            for entry in sent:
                if entry[0] >= log.first_index and log.read(entry[0], 1)[:1] != [entry]:
                    self._found(f"{_who(keeper)} confirms {answer.last_index}, without {entry[:2]}")
            if sent:
                self._judge_disk(keeper)
            return answer

        return judged

    def _around_install(self, install: Any) -> Any:
        async def judged(
            keeper: MetadataKeeper, request: messages.InstallMetadataSnapshot, payload: memoryview
        ) -> Any:
            data = bytes(payload)
            answer = await install(keeper, request, payload)
            self._judge_snapshot(f"the snapshot for {_who(keeper)}", request.last_index, data)
            self._judge_installed(keeper, request.epoch, answer)
            return answer

        return judged

    def _around_install_part(self, install_part: Any) -> Any:
        async def judged(
            keeper: MetadataKeeper,
            request: messages.InstallMetadataSnapshotPart,
            payload: memoryview,
        ) -> Any:
            answer = await install_part(keeper, request, payload)
            self._judge_epoch(keeper, request.epoch)
            if answer.received_bytes == request.snapshot_bytes:
                self._judge_installed(keeper, request.epoch, answer)
            elif answer.last_index:
                self._found(f"{_who(keeper)} confirms a snapshot of which parts are missing")
            return answer

        return judged

    def _judge_installed(self, keeper: MetadataKeeper, epoch: int, answer: Installed) -> None:
        """Judges a broker that has answered that a snapshot has replaced its log."""
        self._judge_epoch(keeper, epoch)
        self._judge_confirmed(keeper, epoch, answer)
        self._judge_disk(keeper)
        told = [(voter.broker, voter.directory_id) for voter in keeper.voters()]
        self.judge_voters(keeper, told)
        if keeper.version == answer.last_index:
            taken = _state(keeper.state)
            self._judge_state(f"{_who(keeper)} after a snapshot", keeper.version, taken)

    def _around_compact(self, compact: Any) -> Any:
        def judged(log: MetadataLog, index: int, epoch: int, data: bytes) -> None:
            compact(log, index, epoch, data)
            self._judge_snapshot("the snapshot of a voter", index, data)

        return judged

    def _around_quorum_append(self, append: Any) -> Any:
        def judged(
            quorum: Quorum, records: Sequence[MetadataRecord], *, together: bool = False
        ) -> Any:
            known = self._quorums.setdefault(quorum.epoch, quorum)
            if known is not quorum:
                self._found(f"two controllers write in epoch {quorum.epoch}")
            if quorum not in self._seen_commit_index:
                self._seen_commit_index[quorum] = 0
                self._judge_take_over(quorum)
            return append(quorum, records, together=together)

        return judged

    def _around_quorum_compact(self, compact: Any) -> Any:
        def judged(quorum: Quorum, snapshot: bytes) -> None:
            compact(quorum, snapshot)
            self._judge_snapshot("the snapshot of the controller", quorum.last_index, snapshot)

        return judged

    def _around_handle(self, handle: Any) -> Any:
        async def judged(controller: Controller, request: messages.AnyRequest) -> Any:
            quorum = quorum_of(controller)
            # It decides before it waits for the first time, so on all that is there now.
            needed = quorum.last_index
            forward = request if isinstance(request, messages.Forward) else None
            asked = request
            if forward is not None:
                asked = DECODERS[messages.REQUESTS[forward.kind]].decode(forward.request)
            name = type(asked).__name__
            try:
                answer = await handle(controller, request)
            except NotControllerError:
                raise
            except RayqError:
                self._judge_answer(quorum, needed, f"the refusal of {name}")
                raise
            if isinstance(answer, messages.BrokerHeartbeatResponse):
                return answer  # It says that the controller lives, and nothing of the metadata.
            if isinstance(answer, messages.ChangeResponse):
                needed = max(needed, answer.version)
            if isinstance(asked, messages.Change) and asked.request_id is not None:
                self._judge_done(done_id(asked.request_id, forward), needed)
            self._judge_answer(quorum, needed, f"the answer to {name}")
            return answer

        return judged

    def _around_page(self, page: Any) -> Any:
        def judged(
            answers: MetadataAnswers,
            asked: set[str] | None,
            request: messages.Metadata,
            view: View | None,
        ) -> Any:
            names = None if asked is None else set(asked)
            answer = page(answers, asked, request, view)
            fresh = page(fresh_answers(answers), names, request, view)
            if ENCODER.encode(answer) != ENCODER.encode(fresh):
                self._found(f"{_who(metadata_of(answers))} tells clients what is no longer so")
            return answer

        return judged

    def _around_queues(self, queues: Any) -> Any:
        async def judged(
            answers: MetadataAnswers, peer: Peer, request: messages.DescribeQueues
        ) -> Any:
            answer = await queues(answers, peer, request)
            metadata = metadata_of(answers)
            # A named principal is told of what it may describe, and of nothing else.
            if answer.version == metadata.version and peer.principal is None:
                self.judge_queues(metadata, request, answer)
            return answer

        return judged

    # --- judging ----------------------------------------------------------------------------------

    def _judge_epoch(self, keeper: MetadataKeeper, epoch: int) -> None:
        directory = directory_of_metadata(keeper).meta.directory_id
        promised = self._promised[directory]
        if epoch < promised:
            self._found(f"{_who(keeper)} promised epoch {promised}, and follows {epoch}")
        self._promised[directory] = max(promised, epoch)

    def judge_voters(self, keeper: MetadataKeeper, told: Sequence[tuple[int, str]]) -> None:
        """The newest set in the log counts, committed or not."""
        log = metadata_log_of(keeper)
        if log.failure is not None:
            return  # It is opened again before anything else is promised.
        records = decode_records(log.snapshot_data) if log.snapshot_data else []
        for _, _, data in log.read(log.first_index, 1 << 30):
            records += decode_entry(data)
        sets = [record.voters for record in records if isinstance(record, VotersChanged)]
        named = [(voter.broker, voter.directory_id) for voter in sets[-1]] if sets else []
        if list(told) != named:
            self._found(f"{_who(keeper)} names the voters {list(told)}, its log {named}")

    def judge_queues(
        self,
        keeper: MetadataKeeper,
        request: messages.DescribeQueues,
        answer: messages.DescribeQueuesResponse,
    ) -> None:
        known = {
            queue.name: queue.queue_id
            for queue in keeper.state.queues.values()
            if queue.name > request.after
            and (
                request.names is None
                or queue.name in request.names
                or queue.queue_id in request.queue_ids
            )
        }
        told = {queue.name: queue.queue_id for queue in answer.queues}
        expected = {name: known[name] for name in sorted(known)[: len(told)]}
        is_cut = answer.next_after is None and len(told) < len(known)
        if told != expected or is_cut:
            self._found(f"{_who(keeper)} tells of the queues {told}, and knows {known}")

    def _judge_confirmed(
        self, keeper: MetadataKeeper, epoch: int, answer: Installed
    ) -> None:
        index, log, quorum = answer.last_index, metadata_log_of(keeper), self._quorums[epoch]
        key = (epoch, answer.directory_id)
        self._confirmed[key] = max(self._confirmed[key], index)
        if index > max(log.last_index, log.snapshot_index or 0):
            self._found(f"{_who(keeper)} confirms {index}, and its log ends at {log.last_index}")
        elif index > quorum.last_index:
            self._found(
                f"{_who(keeper)} confirms {index}, and controller epoch {epoch} has written up to "
                f"{quorum.last_index}"
            )
        elif index >= first_index_of(quorum) and index >= log.first_index:
            here, there = log.epoch_at(index), epoch_at(quorum, index)
            if here != there:
                self._found(
                    f"{_who(keeper)} confirms {index} in controller epoch {epoch}: its record is "
                    f"of epoch {here}, the controller's of epoch {there}"
                )

    def _judge_disk(self, keeper: MetadataKeeper) -> None:
        """Checks that whatever was promised or confirmed would survive a power loss now."""
        disk = disk_of_metadata(keeper).disk
        for name in (ENTRIES, SNAPSHOT, PROMISE):
            path = f"{directory_of_metadata(keeper).path}/metadata/{name}"
            if disk.find(path) is None:
                continue
            length = len(disk.find_file(path).current)
            if not disk.is_durable(path, 0, length):
                self._found(f"{_who(keeper)} answers; a power loss now could cost {path}")

    def _judge_take_over(self, quorum: Quorum) -> None:
        """The log that a controller begins with has all that earlier ones called committed. (It may
        learn of its promises when a later one is there already.)"""
        earlier = [at for epoch, at in self._committed_in.items() if epoch < quorum.epoch]
        last = max(earlier, default=0)
        if last not in self.committed:
            return
        epoch = int.from_bytes(self.committed[last][:8], "big")
        if quorum.last_index < last:
            self._found(
                f"controller epoch {quorum.epoch} begins with records up to {quorum.last_index}; "
                f"{last} is committed"
            )
        elif last >= first_index_of(quorum) - 1 and epoch_at(quorum, last) != epoch:
            self._found(
                f"controller epoch {quorum.epoch} begins with another record {last}: of epoch "
                f"{epoch_at(quorum, last)}, not {epoch}"
            )

    def _judge_answer(self, quorum: Quorum, needed: int, what: str) -> None:
        if needed > quorum.commit_index:
            self._found(
                f"{what} rests on record {needed} of controller epoch {quorum.epoch}, which has "
                f"committed up to {quorum.commit_index}"
            )

    def _judge_done(self, request_id: str, index: int) -> None:
        answered = self._answered_at.setdefault(request_id, index)
        done = self._done_at.get(request_id)
        if done is not None and done > max(answered, index):
            self._found(f"the change {request_id} was answered at {index}, and done at {done}")

    def _judge_snapshot(self, who: str, index: int, data: bytes) -> None:
        state = ClusterState()
        for record in decode_records(data):
            state.replay(record)
        self._judge_state(who, index, _state(state))

    def _judge_state(self, who: str, version: int, state: State) -> None:
        known = self._states.get(version)
        if known is None:
            self._early_states[version].append((who, state))
        else:
            self._compare_states(who, version, state, known)

    def _compare_states(self, who: str, version: int, found: State, known: State) -> None:
        if found != known:
            odd = sorted(set(found) ^ set(known))
            self._found(f"{who} is not the state of version {version}: {odd}"[:2000])

    def _found(self, fault: str) -> None:
        if self.fault is None:
            self.fault = fault


def _state(state: ClusterState) -> State:
    """Looks at the attributes, not at `ClusterState.snapshot`, which may leave something out."""
    return tuple(f"{name}: {_plain(value)}" for name, value in sorted(vars(state).items()))


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return repr(sorted((repr(key), _plain(item)) for key, item in value.items()))
    if isinstance(value, set | frozenset):
        return repr(sorted(map(repr, value)))
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return repr([(field.name, _plain(getattr(value, field.name))) for field in fields])
    return repr(value)


def _encoded(epoch: int, data: bytes) -> bytes:
    return epoch.to_bytes(8, "big") + data


def _told(encoded: bytes) -> str:
    return f"{decode_entry(encoded[8:])} of epoch {int.from_bytes(encoded[:8], 'big')}"


def _who(keeper: MetadataKeeper) -> str:
    return f"broker {directory_of_metadata(keeper).meta.broker}"
