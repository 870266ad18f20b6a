"""The leader role: append, wait for the ISR, answer; serve followers.

One object leads in one leader epoch; newer metadata ends it. `PartitionState` holds what follows
from the facts; this is the shell that feeds it and acts on it (docs/protocol.md, rules 6 to 9).
`LeaderReads` answers readers, and `LeaderTransactions` handles transactions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import ClassVar

from rayq import messages
from rayq.actors.handlers import HandlerTable, answers, answers_peer
from rayq.actors.peers import Peers
from rayq.actors.purgatory import Purgatory
from rayq.actors.remote.leader_remote import LeaderRemote
from rayq.actors.remote.reads import RemoteReads
from rayq.actors.remote.remote_log import RemoteLog
from rayq.actors.replica.leader_reads import LeaderReads
from rayq.actors.replica.leader_transactions import LeaderTransactions
from rayq.actors.replica.produced_batch import check_manifest, check_produced_batch
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.actors.replica.replica_metrics import LeaderMetrics
from rayq.actors.signal import Signal
from rayq.backoff import Backoff
from rayq.config import MIB
from rayq.core.cluster.topic_changes import check_not_internal
from rayq.core.partition.state import Isr, PartitionState
from rayq.errors import (
    DivergedLogError,
    FencedEpochError,
    LeadershipEndedError,
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
    NotLeaderError,
    OffsetOutOfRangeError,
    RayqError,
    RemoteStorageError,
    StalePartitionError,
    StorageError,
    TimeoutError,
)
from rayq.logs import log_event
from rayq.messages.transaction_ids import is_transactional
from rayq.storage.batch import BatchHeader, Marker
from rayq.storage.log import Log
from rayq.wire.server import Peer

logger = logging.getLogger(__name__)

REPLICA_FETCH_BYTES_MAX = 8 * MIB
CONFIRM_CHECK_S = 0.1
PROPOSAL_PAUSE_S = 0.1
"""Backoff after a failed proposal: the metadata that explains it is on its way. Without the pause
each fetch of a follower would repeat the proposal, as fast as the controller answers."""
PROPOSAL_PAUSE_MAX_S = 0.8
"""Maximum backoff. It doubles with each refusal in one partition epoch: a follower whose broker
stopped has all records, and must not be in sync as long as that broker is away."""


class Leader:
    """See the module. `committed` takes each newer assignment of the same epoch; `end` is final.

    `check()` raises when the process may no longer answer as leader: it is called again after every
    wait.
    """

    handlers: ClassVar[HandlerTable]

    def __init__(
        self,
        replica_log: ReplicaLog,
        assignment: messages.PartitionAssignment,
        *,
        propose: Callable[[messages.AlterPartition], Awaitable[None]],
        has_lease: Callable[[], bool],
        peers: Peers,
        remote_log: RemoteLog | None = None,
    ) -> None:
        """`remote_log`: only for a topic that has or gets records in the object store."""
        self._replica_log = replica_log
        self._environment = replica_log.environment
        self._metrics = LeaderMetrics(
            replica_log.environment, assignment.topic, assignment.partition
        )
        self._assignment = assignment
        self._propose = propose
        self._has_lease = has_lease
        self._delayed: Purgatory[messages.ProduceResponse] = Purgatory()
        self._followers_moved = Signal()
        self._propose_from_s = 0.0
        self._refusals = Backoff(self._environment, PROPOSAL_PAUSE_S, PROPOSAL_PAUSE_MAX_S)
        self._ended: str | None = None
        self.where = replica_log.where
        log = replica_log.log
        self.state = PartitionState(
            broker=replica_log.broker,
            incarnation=replica_log.incarnation,
            leader_epoch=assignment.leader_epoch,
            epoch_start_offset=log.end_offset,
            min_insync=1,
            lag_time_max_s=replica_log.config.replica_lag_time_max_ms / 1000,
            end_offset=log.end_offset,
            flushed_offset=log.flushed_offset,
            high_watermark=min(replica_log.high_watermark, log.end_offset),
            started_s=self._environment.clock.monotonic(),
        )
        self.reads = LeaderReads(replica_log, self.state, self._metrics, check=self.check)
        self.transactions = LeaderTransactions(
            replica_log,
            assignment,
            peers,
            append_marker=self._append_marker,
            produce=self.produce,
            check=self.check,
        )
        self.remote: LeaderRemote | None = None
        if remote_log is not None:
            self.begin_remote(remote_log)
        log_event(
            logger,
            logging.INFO,
            "leads",
            topic=assignment.topic,
            partition=assignment.partition,
            epoch=assignment.leader_epoch,
            broker=replica_log.broker,
            offset=log.end_offset,
        )

    @property
    def leader_epoch(self) -> int:
        return self.state.leader_epoch

    def begin_remote(self, remote_log: RemoteLog) -> None:
        """Starts remote storage: the topic's closed segments go to the object store from now on, or
        are there."""
        self.remote = LeaderRemote(self._replica_log, remote_log, self.state, self._assignment)
        self.reads.remote = RemoteReads(self._replica_log, remote_log)

    def committed(self, assignment: messages.PartitionAssignment) -> None:
        """Takes the partition's committed metadata, in this epoch."""
        self._assignment = self.transactions.assignment = assignment
        if self.remote is not None:
            self._remote_committed(self.remote, assignment)
        state = self.state
        if assignment.partition_epoch > state.partition_epoch:
            # No proposal has failed in this partition epoch.
            self._propose_from_s = 0.0
            self._refusals.reset()
        state.committed(
            assignment.partition_epoch,
            assignment.isr,
            assignment.replicas,
            self._replica_log.topic_config.min_insync(
                assignment.replication_factor or len(assignment.replicas)
            ),
        )
        self._replica_log.wake_flusher()  # Records appended as a follower must be flushed.
        self._after_progress()
        if state.is_under_min_isr:
            self._delayed.fail(
                NotEnoughReplicasAfterAppendError(
                    f"The in-sync replicas of {self.where} fell below min_insync_replicas = "
                    f"{state.min_insync} after the record was appended: it may or may not be "
                    "written."
                )
            )
        self.propose_isr()

    def _remote_committed(
        self, remote: LeaderRemote, assignment: messages.PartitionAssignment
    ) -> None:
        if assignment.remote is not None or self._replica_log.topic_config.remote_storage:
            remote.committed(assignment)
            return
        remote.end("the topic gave up its objects")
        self.remote = self.reads.remote = None

    def end(self, reason: str) -> None:
        """Ends this role, as another replica leads or this process stops: the requests that wait
        are told."""
        self._ended = reason
        error = LeadershipEndedError(
            f"Broker {self._replica_log.broker} leads {self.where} no more ({reason}): the record "
            "may or may not be written."
        )
        self._delayed.fail(error)
        self.transactions.end(error)
        if self.remote is not None:
            self.remote.end(reason)
        self._replica_log.appended.notify()
        self._replica_log.committed.notify()
        self._followers_moved.notify()

    def check(self) -> None:
        """Raises NotLeaderError unless this still leads and the process has its broker's lease."""
        if self._ended is not None or not self._has_lease():
            raise NotLeaderError(
                f"Broker {self._replica_log.broker} does not lead {self.where} "
                f"({self._ended or 'it lost its broker'}): ask for new metadata."
            )

    def flushed(self, flushed_offset: int) -> None:
        """Notes that this replica's disk holds everything below the offset."""
        self.state.flushed(flushed_offset)
        self._after_progress()

    # --- producing --------------------------------------------------------------------------

    @answers_peer(messages.Produce)
    def _answer_produce(
        self, peer: Peer, request: messages.Produce, payload: memoryview
    ) -> messages.ProduceResponse | asyncio.Future[messages.ProduceResponse]:
        check_not_internal(self._assignment.topic)
        return self.produce(request, payload, is_move=peer.role == "server")

    @answers_peer(messages.Fetch)
    def _answer_fetch(
        self, peer: Peer, request: messages.Fetch, _: memoryview
    ) -> Awaitable[tuple[messages.FetchResponse, bytes]]:
        return self.reads.fetch(request, peer.room)

    def produce(
        self, request: messages.Produce, payload: memoryview, *, is_move: bool = False
    ) -> messages.ProduceResponse | asyncio.Future[messages.ProduceResponse]:
        """Appends the payload's batch. See `messages.Produce` for the errors. `is_move`: a queue's
        leader sends it, so the chunks of a large value may be elsewhere, and the record may be
        unreadable."""
        leader, log = self.state, self._replica_log.log
        if request.acks == -1 and leader.is_under_min_isr:
            raise NotEnoughReplicasError(
                f"{self.where} has {len(leader.isr)} in-sync replicas, acks='all' needs "
                f"min_insync_replicas = {leader.min_insync}. Nothing was written; it can be tried "
                "again when more brokers are back."
            )
        if self.remote is not None:
            self.remote.check_backlog()
        header = check_produced_batch(
            payload,
            self._replica_log.topic_config,
            topic=self._assignment.topic,
            partition=self._assignment.partition,
            now_ms=self._environment.clock.wall_ms(),
        )
        if is_transactional(header.producer_id):
            waiting = self.transactions.admit(request, payload, header)
            if waiting is not None:
                return waiting
        duplicate = log.producers.check(header)
        if duplicate is None:
            if header.is_large and not is_move:
                check_manifest(
                    payload,
                    header,
                    where=self.where,
                    log_start=log.start_offset,
                    log_end=log.end_offset,
                )
            stamped = self._append(
                lambda: log.append_as_leader(
                    payload,
                    header,
                    leader_epoch=leader.leader_epoch,
                    now_ms=self._environment.clock.wall_ms(),
                )
            )
            base_offset, append_time_ms = stamped.base_offset, stamped.append_time_ms
            next_offset = stamped.next_offset
            self._metrics.appended(header)
        else:
            base_offset, append_time_ms = duplicate.base_offset, duplicate.append_time_ms
            next_offset = duplicate.last_offset + 1
        answer = messages.ProduceResponse(
            base_offset, append_time_ms, log.start_offset, duplicate is not None
        )
        if request.acks != -1:
            return answer
        if next_offset <= self._replica_log.high_watermark:
            return answer
        deadline_s = self._environment.clock.monotonic() + request.timeout_ms / 1000
        return self._delayed.add(next_offset, answer, deadline_s=deadline_s)

    def _append(self, append: Callable[[], BatchHeader]) -> BatchHeader:
        """Appends a batch, and has it flushed and copied. Raises StorageError."""
        log = self._replica_log.log
        try:
            stamped = append()
        except StorageError as error:
            if log.failure is not None:
                self._replica_log.fail(error)
            raise
        self.state.appended(log.end_offset, now_s=self._environment.clock.monotonic())
        if self.state.flushed_offset != log.flushed_offset:
            self.flushed(log.flushed_offset)  # flush="os": no flusher reports it later.
        self._replica_log.wake_flusher()
        self._replica_log.appended.notify()
        return stamped

    def _append_marker(self, marker: Marker) -> None:
        log = self._replica_log.log
        self._append(
            lambda: log.append_marker(
                marker,
                leader_epoch=self.state.leader_epoch,
                now_ms=self._environment.clock.wall_ms(),
            )
        )

    def _after_progress(self) -> None:
        """Takes over the high watermark and answers the requests that waited for it."""
        high_watermark = self.state.high_watermark
        if self._ended is not None or high_watermark <= self._replica_log.high_watermark:
            return
        self._replica_log.high_watermark = high_watermark
        self._delayed.reached(high_watermark)
        self.transactions.reached(high_watermark)
        self._replica_log.committed.notify()

    def expire_waiters(self, now_s: float) -> None:
        """Fails the requests that waited too long."""
        self.transactions.expire(now_s)
        if self._delayed.is_empty:
            return
        self._delayed.expire(
            now_s,
            TimeoutError(
                f"The in-sync replicas of {self.where} did not confirm the record in time: it may "
                "or may not be written."
            ),
        )

    # --- the log start ----------------------------------------------------------------------

    @answers(messages.DeleteRecords)
    async def delete_records(
        self, request: messages.DeleteRecords
    ) -> messages.DeleteRecordsResponse:
        """Moves the log start; answers when each replica that may lead next has durably moved it,
        too."""
        check_not_internal(self._assignment.topic)
        clock = self._environment.clock
        deadline_s = clock.monotonic() + request.timeout_ms / 1000
        leader = self.state
        self.reads.check_serving()
        # If followers cannot copy past damage, only this lets them come back into sync.
        if leader.is_under_min_isr and not self._replica_log.serves_around_damage:
            raise NotEnoughReplicasError(
                f"{self.where} has {len(leader.isr)} in-sync replicas, delete_records needs "
                f"min_insync_replicas = {leader.min_insync}: another that leads later would have "
                "the records again. Nothing was deleted; it can be tried again when more brokers "
                "are back."
            )
        limit, before = self._replica_log.high_watermark, request.before_offset
        if before is None:
            before = self._replica_log.last_stable_offset
        if before > limit:
            raise OffsetOutOfRangeError(
                f"Offset {before} is past the high watermark {limit} of "
                f"{self.where}: only committed records can be deleted."
            )
        self.transactions.check_decided(before)
        await self._replica_log.advance_log_start(before)
        self._replica_log.appended.notify()  # Followers hear of it with their next fetch.
        while True:
            if leader.is_log_start_committed(before):
                start_offset = self._replica_log.log.start_offset
                return messages.DeleteRecordsResponse(leader.committed_log_start(start_offset))
            remaining_s = deadline_s - clock.monotonic()
            if remaining_s <= 0:
                raise TimeoutError(
                    f"The in-sync replicas of {self.where} ({len(leader.isr)}, min_insync_replicas "
                    f"= {leader.min_insync}) did not confirm in time that they start at offset "
                    f"{before}: the records below may or may not be there again under another "
                    "leader. Try again."
                )
            await self._followers_moved.wait(min(remaining_s, CONFIRM_CHECK_S))
            self.check()

    # --- the object store -------------------------------------------------------------------

    @answers(messages.DescribeRemoteStorage)
    def describe_remote_storage(
        self, _: messages.DescribeRemoteStorage
    ) -> messages.DescribeRemoteStorageResponse:
        """See `messages.DescribeRemoteStorage`; also for a topic that has nothing there."""
        if self.remote is not None:
            return self.remote.describe()
        log = self._replica_log.log
        return messages.DescribeRemoteStorageResponse(
            pointer=None,
            log_start_offset=log.start_offset,
            local_start_offset=log.local_start_offset,
            high_watermark=self._replica_log.high_watermark,
            lag_bytes=0,
            lag_ms=0,
            trouble=None,
        )

    @answers(messages.VerifyRemote)
    async def verify_remote(self, request: messages.VerifyRemote) -> messages.VerifyRemoteResponse:
        """See `messages.VerifyRemote`."""
        if self.remote is None:
            return messages.VerifyRemoteResponse(0, None, [], [])
        answer = await self.remote.verification.verify(request)
        self.check()
        return answer

    # --- followers --------------------------------------------------------------------------

    @answers(messages.ReplicaFetch)
    async def replica_fetch(
        self, request: messages.ReplicaFetch
    ) -> tuple[messages.ReplicaFetchResponse, bytes]:
        """Answers a follower's fetch. See `messages.ReplicaFetch`."""
        clock = self._environment.clock
        deadline_s = clock.monotonic() + request.wait_ms / 1000
        is_first = True
        while True:
            self.check()
            leader, log = self.state, self._replica_log.log
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
                self.check()
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
                    f"{self.where} on broker {request.broker} is in sync and yet its log ends at "
                    f"{request.offset}, below the local start {log.local_start_offset} of its "
                    "leader."
                )
            return self._fetch_answer(leader, reset_to=log.local_start_offset)
        if self._has_hole(log, request):
            if is_in_sync:
                raise RemoteStorageError(
                    f"{self.where} on broker {request.broker} begins at "
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
            now_s=self._environment.clock.monotonic(),
        )
        self._followers_moved.notify()
        self._after_progress()
        self.propose_isr()
        return None

    def _has_hole(self, log: Log, request: messages.ReplicaFetch) -> bool:
        """Returns whether the follower lacks records that this log has and that no longer count as
        stored: it dropped them by metadata that were lost, or before the topic gave up its objects.
        """
        remote_end = None if self.remote is None else self.remote.log.end_offset
        return request.local_start_offset > max(
            log.local_start_offset, request.log_start_offset, remote_end or 0
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
                f"{self.where} on broker {request.broker} is in sync and yet its log ends at "
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
    def replica_flushed(self, request: messages.ReplicaFlushed) -> None:
        self.state.follower_flushed(
            request.broker,
            request.incarnation,
            flushed=min(request.flushed, self._replica_log.log.end_offset),
            now_s=self._environment.clock.monotonic(),
        )
        self._after_progress()

    @answers(messages.ReplicaSnapshot)
    def replica_snapshot(
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

    # --- the in-sync set --------------------------------------------------------------------

    def propose_isr(self) -> None:
        leader, now_s = self.state, self._environment.clock.monotonic()
        if self._ended is not None or not self._has_lease() or now_s < self._propose_from_s:
            return
        leader.log_start_offset = self._replica_log.log.start_offset
        isr = leader.proposal(now_s)
        if isr is None:
            return
        request = messages.AlterPartition(
            topic_id=self._assignment.topic_id,
            partition=self._assignment.partition,
            broker=leader.broker,
            incarnation=leader.incarnation,
            leader_epoch=leader.leader_epoch,
            partition_epoch=leader.partition_epoch,
            isr=list(isr),
        )
        self._environment.tasks.spawn(
            self._send_proposal(isr, request), f"propose the ISR of {self.where}"
        )

    async def _send_proposal(self, isr: Isr, request: messages.AlterPartition) -> None:
        try:
            await self._propose(request)
        except (StalePartitionError, FencedEpochError) as error:
            logger.info("ISR of %s: %s", self.where, error)
            self.state.proposal_refused(isr, request.partition_epoch)
            # Under min_insync_replicas writes wait for the refused member.
            is_urgent = self.state.is_under_min_isr
            self._pause_proposals(
                request.partition_epoch, PROPOSAL_PAUSE_S if is_urgent else self._refusals.next_s()
            )
        except RayqError as error:
            logger.info("ISR of %s: %s", self.where, error)
            self.state.proposal_unknown(isr, request.partition_epoch)
            self._pause_proposals(request.partition_epoch, PROPOSAL_PAUSE_S)
        self._after_progress()

    def _pause_proposals(self, partition_epoch: int, pause_s: float) -> None:
        if partition_epoch == self.state.partition_epoch:
            self._propose_from_s = self._environment.clock.monotonic() + pause_s


Leader.handlers = HandlerTable(
    "leader", Leader, reads=LeaderReads, transactions=LeaderTransactions
)
