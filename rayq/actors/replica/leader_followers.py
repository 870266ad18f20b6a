"""A leader's answers to its followers: the log from where they are, or what they must do first.

See docs/protocol.md, rules 7, 9 and 14.
"""

from __future__ import annotations

from collections.abc import Callable

from rayq import messages
from rayq.actors.handlers import answers
from rayq.actors.replica.isr_proposals import IsrProposals
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.actors.replica.replica_metrics import LeaderMetrics
from rayq.actors.signal import Signal
from rayq.config import MIB
from rayq.core.partition.state import PartitionState
from rayq.errors import DivergedLogError, RemoteStorageError
from rayq.storage.log import Log

REPLICA_FETCH_BYTES_MAX = 8 * MIB


class LeaderFollowers:
    """See the module. `check()` raises when the process may no longer answer as leader;
    `remote_end()` is the committed end of the records in the object store, None without any;
    `on_progress()` is called when a follower has flushed more; `now_s()` is the time by which
    followers are judged."""

    def __init__(
        self,
        replica_log: ReplicaLog,
        state: PartitionState,
        metrics: LeaderMetrics,
        proposals: IsrProposals,
        *,
        check: Callable[[], None],
        remote_end: Callable[[], int | None],
        on_progress: Callable[[], None],
        now_s: Callable[[], float],
    ) -> None:
        self._replica_log = replica_log
        self._state = state
        self._metrics = metrics
        self._proposals = proposals
        self._check = check
        self._remote_end = remote_end
        self._on_progress = on_progress
        self._now_s = now_s
        self._clock = replica_log.environment.clock
        self._where = replica_log.where
        self.moved = Signal()
        """Notified when a follower fetched, or the role ended."""

    @answers(messages.ReplicaFetch)
    async def fetch(
        self, request: messages.ReplicaFetch
    ) -> tuple[messages.ReplicaFetchResponse, bytes]:
        """Answers a follower's fetch. See `messages.ReplicaFetch`."""
        clock = self._clock
        deadline_s = clock.monotonic() + request.wait_ms / 1000
        is_first = True
        while True:
            self._check()
            leader, log = self._state, self._replica_log.log
            if is_first:
                early = self._check_follower(leader, log, request)
                if early is not None:
                    return early, b""
                is_first = False
            horizon = log.tombstone_horizon
            if request.offset < log.local_start_offset:
                return self._fetch_answer(leader, reset_to=log.local_start_offset), b""
            if request.offset < log.end_offset:
                data, _ = await self._replica_log.read(
                    request.offset,
                    log.end_offset,
                    min(request.bytes_max, REPLICA_FETCH_BYTES_MAX),
                )
                self._check()
                if self._is_below_horizon(leader, log, request):
                    # Tombstones above the follower's end were removed while the fetch waited.
                    return self._fetch_answer(leader, reset_to=log.local_start_offset), b""
                if log.tombstone_horizon != horizon:
                    continue  # The read may be from before; the answer would name the new one.
                self._metrics.replicated(data)
                return self._fetch_answer(leader), data
            if request.log_start_offset < log.start_offset:
                return self._fetch_answer(leader), b""  # The follower moves its own.
            remaining_s = deadline_s - clock.monotonic()
            if remaining_s <= 0 or not await self._replica_log.appended.wait(remaining_s):
                return self._fetch_answer(leader), b""

    def _check_follower(
        self, leader: PartitionState, log: Log, request: messages.ReplicaFetch
    ) -> messages.ReplicaFetchResponse | None:
        """Notes a follower whose log agrees with this one; else answers what it must do."""
        leader.check_process(request.broker, request.incarnation)
        is_in_sync = (request.broker, request.incarnation) in leader.isr
        if request.offset < log.local_start_offset:
            if is_in_sync and self._replica_log.restarted_at != log.local_start_offset:
                raise DivergedLogError(
                    f"{self._where} on broker {request.broker} is in sync and yet its log ends at "
                    f"{request.offset}, below the local start {log.local_start_offset} of its "
                    "leader."
                )
            return self._fetch_answer(leader, reset_to=log.local_start_offset)
        if self._has_hole(log, request):
            if is_in_sync:
                raise RemoteStorageError(
                    f"{self._where} on broker {request.broker} begins at "
                    f"{request.local_start_offset}, and what it lacks below is not in the object "
                    "store: it is copied again once it is out of the in-sync replicas."
                )
            return self._fetch_answer(leader, reset_to=log.local_start_offset)
        if self._is_below_horizon(leader, log, request):
            return self._fetch_answer(leader, reset_to=log.local_start_offset)
        if request.last_epoch is not None:
            epoch, end = log.epochs.end_for(request.last_epoch, log.end_offset)
            if epoch != request.last_epoch or end < request.offset:
                return self._fetch_answer(leader, diverging=(epoch, end))
        elif request.offset > log.end_offset:
            return self._fetch_answer(leader, diverging=(None, log.end_offset))
        leader.follower_fetched(
            request.broker,
            request.incarnation,
            flushed=min(request.flushed, request.offset),
            log_start_offset=request.log_start_offset,
            now_s=self._now_s(),
        )
        self.moved.notify()
        self._on_progress()
        self._proposals.propose()
        return None

    def _has_hole(self, log: Log, request: messages.ReplicaFetch) -> bool:
        """Returns whether the follower lacks records that this log has and that no longer count as
        stored: it dropped them by metadata that were lost, or before the topic gave up its objects.
        """
        return request.local_start_offset > max(
            log.local_start_offset, request.log_start_offset, self._remote_end() or 0
        )

    def _is_below_horizon(
        self, leader: PartitionState, log: Log, request: messages.ReplicaFetch
    ) -> bool:
        """Returns whether the follower may hold records whose tombstones are gone here: it would
        keep them forever (docs/protocol.md, rule 14). An empty log holds none, nor does a log that
        was copied from here after they had gone: a copy that takes more than one fetch passes below
        the horizon."""
        if not request.log_start_offset < request.offset < log.tombstone_horizon:
            return False
        if request.copied_horizon >= log.tombstone_horizon:
            return False
        if (request.broker, request.incarnation) in leader.isr:
            raise DivergedLogError(
                f"{self._where} on broker {request.broker} is in sync and yet its log ends at "
                f"{request.offset}, below the tombstone horizon {log.tombstone_horizon} of its "
                "leader."
            )
        return True

    def _fetch_answer(
        self,
        leader: PartitionState,
        *,
        diverging: tuple[int | None, int] | None = None,
        reset_to: int | None = None,
    ) -> messages.ReplicaFetchResponse:
        epoch, end = (None, None) if diverging is None else diverging
        log = self._replica_log.log
        return messages.ReplicaFetchResponse(
            high_watermark=self._replica_log.high_watermark,
            log_start_offset=log.start_offset,
            epoch_start_offset=leader.epoch_start_offset,
            diverging_epoch=epoch,
            diverging_end=end,
            reset_to=reset_to,
            cleaned_offset=log.cleaned_offset,
            tombstone_horizon=log.tombstone_horizon,
        )

    @answers(messages.ReplicaFlushed)
    def flushed(self, request: messages.ReplicaFlushed) -> None:
        self._state.follower_flushed(
            request.broker,
            request.incarnation,
            flushed=min(request.flushed, self._replica_log.log.end_offset),
            now_s=self._now_s(),
        )
        self._on_progress()

    @answers(messages.ReplicaSnapshot)
    def snapshot(
        self, request: messages.ReplicaSnapshot
    ) -> tuple[messages.ReplicaSnapshotResponse, bytes]:
        """Returns producer state and epochs for a follower that restarts at the local start.

        It covers only batches below that: the rest may never be committed, and the follower learns
        it from the batches themselves.
        """
        log = self._replica_log.log
        start = log.local_start_offset
        answer = messages.ReplicaSnapshotResponse(
            log_start_offset=log.start_offset,
            epochs=[entry for entry in log.epochs.entries() if entry[1] < start],
            local_start_offset=start,
        )
        return answer, log.producer_snapshot_at(start)
