"""The situations of the protocol that a run has met: coverage of states, not of lines.

A seed that never truncates a log says nothing about truncation, however many records it reads. Each
probe stands around one method of the real code, looks at the state before and after the call, and
notes the situations that it sees; it changes nothing. `python -m proving.simulation --situations`
prints how many seeds met each one, and those that no seed has met.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from typing import Any

from proving.simulation.patches import applied
from rayq import messages
from rayq.actors.coordinator_log import CoordinatorLog
from rayq.actors.groups.group_coordinator import GroupCoordinator
from rayq.actors.metadata import snapshot_parts
from rayq.actors.metadata.quorum import Quorum
from rayq.actors.metadata.snapshot_parts import SnapshotParts
from rayq.actors.replica.follower import Follower
from rayq.actors.replica.leader import Leader
from rayq.actors.replica.leader_followers import LeaderFollowers
from rayq.actors.replica.leader_reads import LeaderReads
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.core.partition.state import PartitionState
from rayq.errors import RayqError
from rayq.storage import log as log_module
from rayq.storage import recovery
from rayq.storage.log import Log
from rayq.storage.metadata_log import MetadataLog
from rayq.storage.producer_state import ProducerState, snapshot_offsets

Probe = Callable[..., Generator[None, Any, None]]
"""Called with the arguments of the method. The probe yields once and is sent the result. Where the
call fails, its error is raised at the yield."""

SITUATIONS: dict[str, str] = {
    # The in-sync set
    "isr-in-doubt": "nobody knows whether a proposed in-sync set was accepted",
    "isr-in-doubt-settled": "newer metadata settles a proposal that was in doubt",
    "isr-two-proposals": "two proposals are undecided at once",
    "isr-refused-while-in-doubt": "a set is refused, and an earlier copy of it may still arrive",
    "isr-below-min": "fewer replicas are in sync than a write needs",
    "isr-below-min-waiters": "writes wait when the in-sync set falls below its minimum",
    "flush-notice-first": "a notice of a flush comes before the first fetch of its process",
    "fetch-of-another-process": "a fetch of a process that is not the registered one",
    "deposed-with-waiters": "a leader is deposed while writes wait for its followers",
    "serving-too-early": "a reader asks a new leader that does not know its high watermark",
    # Truncation
    "truncation": "a follower cuts what its leader does not have",
    "truncation-of-epochs": "a truncation takes whole leader epochs away",
    "truncation-of-segments": "a truncation takes whole segments away",
    "truncation-to-nothing": "a truncation leaves no batch",
    "truncation-below-snapshot": "a truncation removes producer snapshots above the cut",
    "truncation-above-snapshot": "after a truncation producers are read from an older snapshot",
    "truncation-above-state": "after a truncation producers are read from a state in memory",
    "truncation-below-checkpoint": "a truncation cuts below the recovery point",
    "truncation-in-two-rounds": "the leader does not know the epoch that the follower names",
    "truncation-during-flush": "a truncation waits for a flush that is under way",
    "truncation-of-unsynced": "a truncation meets segments that were never synced",
    "truncation-of-producers": "a truncation changes what is known of producers",
    "reset-below-start": "a follower ends below the log start of its leader",
    "reset-below-horizon": "a follower ends below the tombstone horizon of its leader",
    "copy-of-a-whole-log": "an empty log is copied from its leader",
    # Producers
    "duplicate-committed": "a batch comes again that is committed",
    "duplicate-waits": "a batch comes again that is not committed yet",
    "sequence-refused": "a batch is refused for its sequence or its epoch",
    "producers-from-snapshot": "recovery begins at a producer snapshot",
    "producers-from-older-snapshot": "recovery has a snapshot, and batches above it",
    # Recovery
    "recovery-of-a-torn-tail": "recovery cuts a torn tail",
    "recovery-of-a-tail": "recovery takes batches above the recovery point",
    "recovery-over-segments": "recovery continues into a segment that no checkpoint knew",
    "recovery-cuts-segments": "recovery removes a segment that nothing leads to",
    "recovery-of-a-reset": "a reset that a crash cut short is finished",
    "recovery-of-a-swap": "a swap of compacted segments that a crash cut short is finished",
    "recovery-without-checkpoint-of-start": "segments were removed, and no checkpoint followed",
    # Compaction and retention
    "cleaning-outlived": "a cleaning ends when its log has become another one",
    "swap": "compacted segments take the place of others",
    "learned-cleaned-offset": "a follower learns how far its leader has compacted",
    "start-moved": "the log start moves on",
    "start-moved-in-segment": "the log start moves into the middle of a segment",
    # Metadata
    "metadata-adopted": "a controller takes over the log of another voter",
    "metadata-adopted-snapshot": "it takes over a snapshot",
    "metadata-of-an-old-epoch": "it takes over a last record that may never have been committed",
    "metadata-truncated": "a voter cuts records that contradict its controller",
    "metadata-snapshot-over-records": "a voter takes a snapshot in place of its own records",
    "metadata-snapshot-of-parts": "a broker takes a snapshot that came in several parts",
    "metadata-parts-in-vain": "it forgets parts of a snapshot, as another one comes instead",
    "metadata-adopted-parts": "a controller takes over a snapshot in several parts",
    "metadata-snapshot-compacted": "a voter compacts its own records",
    "metadata-fenced": "a voter refuses an older epoch",
    "metadata-in-doubt": "a controller ends while a record is not committed",
    # Groups
    "commit-refused": "a commit of a member that may not commit is refused",
    "coordinator-ended-with-waiters": "a coordinator ends while decisions are not committed",
    "heartbeat-held": "a heartbeat waits for news",
    "replay-after-failure": "a coordinator's log continues below decisions that were never written",
}

reached: Counter[str] = Counter()
"""The number of times that each situation was met since the counter was cleared."""

_probes: list[tuple[object, str, Probe]] = []


def _around(owner: object, method: str) -> Callable[[Probe], Probe]:
    def note(probe: Probe) -> Probe:
        _probes.append((owner, method, probe))
        return probe

    return note


def _note(name: str, when: bool = True) -> None:
    assert name in SITUATIONS, name
    if when:
        reached[name] += 1


@contextlib.contextmanager
def watched() -> Iterator[Counter[str]]:
    """Counts situations within the block, from zero."""
    reached.clear()
    with applied(
        (owner, method, _probed(inspect.getattr_static(owner, method), probe))
        for owner, method, probe in _probes
    ):
        yield reached


def _probed(method: Any, probe: Probe) -> Any:
    function = method.__func__ if isinstance(method, staticmethod | classmethod) else method
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def asynchronous(*arguments: Any, **keywords: Any) -> Any:
            looking = _begin(probe, arguments, keywords)
            try:
                result = await function(*arguments, **keywords)
            except Exception as error:
                _fail(looking, error)
                raise
            _end(looking, result)
            return result

        return asynchronous

    @functools.wraps(function)
    def synchronous(*arguments: Any, **keywords: Any) -> Any:
        looking = _begin(probe, arguments, keywords)
        try:
            result = function(*arguments, **keywords)
        except Exception as error:
            _fail(looking, error)
            raise
        _end(looking, result)
        return result

    return type(method)(synchronous) if function is not method else synchronous


def _begin(
    probe: Probe, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Generator[None, Any, None]:
    looking = probe(*arguments, **keywords)
    next(looking)
    return looking


def _end(looking: Generator[None, Any, None], result: Any) -> None:
    with contextlib.suppress(StopIteration):
        looking.send(result)


def _fail(looking: Generator[None, Any, None], error: Exception) -> None:
    with contextlib.suppress(StopIteration, type(error)):
        looking.throw(error)


# --- the in-sync set ------------------------------------------------------------------------------


@_around(PartitionState, "proposal_unknown")
def _proposal_unknown(
    self: PartitionState, proposed: object, partition_epoch: int
) -> Generator[None, Any, None]:
    _note("isr-in-doubt", partition_epoch == self.partition_epoch)
    yield


@_around(PartitionState, "proposal_refused")
def _proposal_refused(
    self: PartitionState, proposed: object, partition_epoch: int
) -> Generator[None, Any, None]:
    is_current = partition_epoch == self.partition_epoch
    _note("isr-refused-while-in-doubt", is_current and proposed in self._maybe_under_way)
    yield


@_around(PartitionState, "proposal")
def _proposal(self: PartitionState, now_s: float) -> Generator[None, Any, None]:
    proposed = yield
    _note("isr-two-proposals", proposed is not None and len(self.undecided) > 1)


@_around(PartitionState, "committed")
def _state_committed(
    self: PartitionState, partition_epoch: int, *others: object
) -> Generator[None, Any, None]:
    is_newer = partition_epoch > self.partition_epoch
    _note("isr-in-doubt-settled", is_newer and bool(self._maybe_under_way))
    yield
    _note("isr-below-min", is_newer and self.is_under_min_isr)


@_around(PartitionState, "follower_flushed")
def _follower_flushed(
    self: PartitionState, broker: int, incarnation: str, **others: object
) -> Generator[None, Any, None]:
    follower = self._followers.get(broker)
    if follower is not None and follower.incarnation == incarnation:
        _note("flush-notice-first", not follower.is_heard)
    else:
        _note("fetch-of-another-process")
    yield


@_around(Leader, "committed")
def _leader_committed(self: Leader, assignment: object) -> Generator[None, Any, None]:
    waiting = len(self._awaiting_commit._waiters)
    yield
    _note("isr-below-min-waiters", waiting > 0 and self.state.is_under_min_isr)


@_around(Leader, "end")
def _leader_end(self: Leader, reason: str) -> Generator[None, Any, None]:
    _note("deposed-with-waiters", bool(self._awaiting_commit._waiters))
    yield


@_around(LeaderReads, "_fetch_limit")
def _fetch_limit(self: LeaderReads, request: messages.Fetch) -> Generator[None, Any, None]:
    _note("serving-too-early", not self._state.may_serve)
    yield


# --- truncation -----------------------------------------------------------------------------------


@_around(Log, "_truncate")
def _log_truncate(self: Log, offset: int) -> Generator[None, Any, None]:
    _note("truncation")
    epochs, segments = self.epochs.entries(), len(self._segments)
    recovery_point, unsynced = self._checkpoint.recovery_point, len(self._unsynced)
    snapshots = snapshot_offsets(self._disk, self.directory)
    producers = self.producers.snapshot()
    yield
    _note("truncation-of-epochs", len(self.epochs.entries()) < len(epochs))
    _note("truncation-of-segments", len(self._segments) < segments)
    _note("truncation-to-nothing", self._size_bytes == 0)
    _note("truncation-below-snapshot", any(snapshot > self._end for snapshot in snapshots))
    _note("truncation-below-checkpoint", recovery_point > self._end)
    _note("truncation-of-unsynced", unsynced > 1)
    _note("truncation-of-producers", producers != self.producers.snapshot())


@_around(Follower, "_truncate")
def _follower_truncate(
    self: Follower, epoch: int | None, end_offset: int
) -> Generator[None, Any, None]:
    _note("truncation-during-flush", self._replica_log.flush_lock.locked())
    _note("truncation-in-two-rounds", epoch != self._replica_log.log.last_epoch)
    yield


@_around(LeaderFollowers, "_check_follower")
def _check_follower(
    self: LeaderFollowers, leader: PartitionState, log: Log, request: messages.ReplicaFetch
) -> Generator[None, Any, None]:
    early = yield
    if early is not None and early.reset_to is not None:
        is_below = request.offset < log.start_offset
        _note("reset-below-start" if is_below else "reset-below-horizon")
    elif request.offset == 0 and log.end_offset > 0:
        _note("copy-of-a-whole-log")


# --- producers ------------------------------------------------------------------------------------


@_around(Leader, "produce")
def _produce(
    self: Leader,
    request: messages.Produce,
    payload: memoryview,
    *,
    principal: str | None,
    is_move: bool = False,
) -> Generator[None, Any, None]:
    before = self.state.end_offset
    answer = yield
    if self.state.end_offset == before:
        is_answered = isinstance(answer, messages.ProduceResponse)
        _note("duplicate-committed" if is_answered else "duplicate-waits")


@_around(ProducerState, "check")
def _check_producer(self: ProducerState, header: object) -> Generator[None, Any, None]:
    try:
        yield
    except RayqError:
        _note("sequence-refused")


# --- recovery -------------------------------------------------------------------------------------


@_around(recovery, "load_producers")
def _load_producers(
    disk: Any, directory: str, segments: Any, end_offset: int, *others: object
) -> Generator[None, Any, None]:
    snapshots = [offset for offset in snapshot_offsets(disk, directory) if offset <= end_offset]
    _note("producers-from-snapshot", bool(snapshots))
    _note("producers-from-older-snapshot", bool(snapshots) and snapshots[-1] < end_offset)
    yield


@_around(log_module, "load_producers")
def _load_producers_again(
    disk: Any,
    directory: str,
    segments: Any,
    end_offset: int,
    clean_until: int = 0,
    recent: Any = None,
) -> Generator[None, Any, None]:
    snapshots = [offset for offset in snapshot_offsets(disk, directory) if offset < end_offset]
    is_newer = recent is not None and (not snapshots or snapshots[-1] < recent.offset)
    _note("truncation-above-state", is_newer)
    _note("truncation-above-snapshot", bool(snapshots) and not is_newer)
    yield


@_around(recovery._Recovery, "_read_segment")
def _read_segment(self: recovery._Recovery, segment: Any) -> Generator[None, Any, None]:
    before = segment.next_offset
    is_whole = yield
    _note("recovery-of-a-torn-tail", not is_whole)
    _note("recovery-of-a-tail", segment.next_offset > before)


@_around(recovery._Recovery, "_read_tail")
def _read_tail(self: recovery._Recovery, beyond: list[int]) -> Generator[None, Any, None]:
    known, expected = len(self._segments), len(beyond)
    yield
    found = len(self._segments) - known
    _note("recovery-over-segments", found > 0)
    _note("recovery-cuts-segments", found < expected)


@_around(recovery, "_finish_reset")
def _finish_reset(disk: Any, directory: str) -> Generator[None, Any, None]:
    _note("recovery-of-a-reset", "reset" in disk.list(directory))
    yield


@_around(recovery, "finish_swap")
def _finish_swap(disk: Any, directory: str) -> Generator[None, Any, None]:
    _note("recovery-of-a-swap", "swap" in disk.list(directory))
    yield


@_around(recovery, "_log_start")
def _log_start(directory: str, bases: list[int], checkpoint: Any) -> Generator[None, Any, None]:
    start = yield
    _note("recovery-without-checkpoint-of-start", start > checkpoint.log_start)


# --- compaction and retention ---------------------------------------------------------------------


@_around(ReplicaLog, "swap")
def _swap(self: ReplicaLog, *others: object) -> Generator[None, Any, None]:
    is_done = yield
    _note("swap" if is_done else "cleaning-outlived")


@_around(Log, "learned")
def _learned(self: Log, state: Any) -> Generator[None, Any, None]:
    _note("learned-cleaned-offset")
    yield


@_around(Log, "advance_start")
def _advance_start(self: Log, offset: int, **others: object) -> Generator[None, Any, None]:
    before = self._start
    yield
    _note("start-moved", self._start > before)
    bases = [segment.base_offset for segment in self._segments]
    _note("start-moved-in-segment", self._start > before and self._start not in bases)


# --- the metadata ---------------------------------------------------------------------------------


@_around(Quorum, "_adopt")
def _adopt(self: Quorum, at: object) -> Generator[None, Any, None]:
    yield
    _note("metadata-adopted", bool(self._entries))
    snapshot = self._snapshot
    _note("metadata-adopted-snapshot", snapshot is not None)
    part_bytes_max = snapshot_parts.PART_BYTES_MAX
    is_in_parts = snapshot is not None and len(snapshot[2]) > part_bytes_max
    _note("metadata-adopted-parts", is_in_parts)
    # Records that were appended last in an epoch before this one are committed only together with
    # the first record of this epoch.
    _note("metadata-of-an-old-epoch", bool(self._entries) and self._entries[-1][1] < self.epoch - 1)


@_around(Quorum, "end")
def _quorum_end(self: Quorum, reason: str) -> Generator[None, Any, None]:
    _note("metadata-in-doubt", self._ended is None and self.commit_index < self.last_index)
    yield


@_around(MetadataLog, "_rewrite")
def _rewrite(self: MetadataLog, entries: Any) -> Generator[None, Any, None]:
    last = entries[-1][0] if entries else 0
    is_a_cut = bool(entries) and self.epoch_at(last) not in (None, entries[-1][1])
    _note("metadata-truncated", is_a_cut or 0 < last < self.last_index)
    yield


@_around(MetadataLog, "install_snapshot")
def _install_snapshot(
    self: MetadataLog, index: int, epoch: int, data: bytes
) -> Generator[None, Any, None]:
    _note("metadata-snapshot-over-records", self.last_index >= self.first_index)
    yield


@_around(SnapshotParts, "whole")
def _whole(self: SnapshotParts) -> Generator[None, Any, None]:
    _note("metadata-snapshot-of-parts", len(self._data) > snapshot_parts.PART_BYTES_MAX)
    yield


@_around(SnapshotParts, "drop")
def _drop_parts(self: SnapshotParts) -> Generator[None, Any, None]:
    _note("metadata-parts-in-vain", self._of is not None and len(self._data) < self._of[-1])
    yield


@_around(MetadataLog, "compact")
def _compact(self: MetadataLog, index: int, *others: object) -> Generator[None, Any, None]:
    _note("metadata-snapshot-compacted", self.snapshot_index is None or index > self.snapshot_index)
    yield


@_around(MetadataLog, "promise")
def _promise(self: MetadataLog, epoch: int) -> Generator[None, Any, None]:
    _note("metadata-fenced", epoch < self.promised_epoch)
    yield


# --- groups ---------------------------------------------------------------------------------------


@_around(GroupCoordinator, "commit")
def _commit(self: GroupCoordinator, *request: object) -> Generator[None, Any, None]:
    try:
        yield
    except RayqError as error:
        _note("commit-refused", not error.retriable)


@_around(CoordinatorLog, "drop")
def _drop(self: CoordinatorLog[Any], error: RayqError) -> Generator[None, Any, None]:
    _note("coordinator-ended-with-waiters", bool(self._waiting._waiters))
    yield


@_around(GroupCoordinator, "_reset")
def _coordinator_reset(self: GroupCoordinator, error: RayqError) -> Generator[None, Any, None]:
    _note("replay-after-failure")
    yield


@_around(GroupCoordinator, "_hold")
def _hold(self: GroupCoordinator, *others: object) -> Generator[None, Any, None]:
    _note("heartbeat-held")
    yield
