"""The leader role: append, wait for the ISR, answer; serve followers.

One object leads in one leader epoch; newer metadata ends it. `PartitionState` holds what follows
from the facts; this is the shell that feeds it and acts on it (docs/protocol.md, rules 6 to 9).
`LeaderFollowers` answers followers, `LeaderReads` answers readers, and `LeaderTransactions` handles
transactions; `IsrProposals` asks the controller for another in-sync set.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import ClassVar

from rayq import messages
from rayq.actors.clock_watch import ClockWatch
from rayq.actors.handlers import HandlerTable, answers, answers_peer
from rayq.actors.peers import Peers
from rayq.actors.purgatory import Purgatory
from rayq.actors.remote.leader_remote import LeaderRemote
from rayq.actors.remote.remote_log import RemoteLog
from rayq.actors.replica.isr_proposals import IsrProposals
from rayq.actors.replica.leader_followers import LeaderFollowers
from rayq.actors.replica.leader_reads import LeaderReads
from rayq.actors.replica.leader_transactions import LeaderTransactions
from rayq.actors.replica.log_retention import LogRetention
from rayq.actors.replica.produced_batch import check_manifest, check_produced_batch
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.actors.replica.replica_metrics import LeaderMetrics
from rayq.core.cluster.topic_changes import check_not_internal
from rayq.core.partition.state import PartitionState
from rayq.errors import (
    LeadershipEndedError,
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
    NotLeaderError,
    OffsetOutOfRangeError,
    StorageError,
    TimeoutError,
)
from rayq.logs import log_event
from rayq.messages.transaction_ids import is_transactional
from rayq.metrics import Sample
from rayq.storage.batch import BatchHeader, Marker
from rayq.wire.peer import Peer

logger = logging.getLogger(__name__)

CONFIRM_CHECK_S = 0.1


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
        now_s: Callable[[], float],
        peers: Peers,
        remote_log: RemoteLog | None = None,
    ) -> None:
        """`now_s()` is the time by which followers are judged (`ListeningClock`).
        `remote_log`: only for a topic that has or gets records in the object store."""
        self._replica_log = replica_log
        self._environment = replica_log.environment
        self._metrics = LeaderMetrics(
            replica_log.environment, assignment.topic, assignment.partition
        )
        self._assignment = assignment
        self._has_lease = has_lease
        self._now_s = now_s
        self._awaiting_commit: Purgatory[messages.ProduceResponse] = Purgatory()
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
            started_s=now_s(),
        )
        replica_log.lead(self.state)
        self._answered_offset = self.state.high_watermark
        """The high watermark up to which waiting requests were answered."""
        self.proposals = IsrProposals(
            replica_log,
            self.state,
            assignment,
            propose=propose,
            may_propose=lambda: self._ended is None and has_lease(),
            now_s=now_s,
            on_decided=self._after_progress,
        )
        self.followers = LeaderFollowers(
            replica_log,
            self.state,
            self._metrics,
            self.proposals,
            check=self.check,
            remote_end=lambda: None if self.remote is None else self.remote.log.end_offset,
            on_progress=self._after_progress,
            now_s=now_s,
        )
        self.reads = LeaderReads(
            replica_log,
            self.state,
            self._metrics,
            check=self.check,
            remote=lambda: None if self.remote is None else self.remote.reads,
        )
        self.transactions = LeaderTransactions(
            replica_log,
            assignment,
            peers,
            append_marker=self._append_marker,
            produce=self.produce,
            check=self.check,
        )
        self._retention = LogRetention(replica_log)
        self.remote: LeaderRemote | None = None
        if remote_log is not None:
            self.begin_remote(remote_log)
        log_event(
            logger,
            logging.INFO,
            "leads",
            **assignment.labels,
            epoch=assignment.leader_epoch,
            broker=replica_log.broker,
            offset=log.end_offset,
        )

    @property
    def leader_epoch(self) -> int:
        return self.state.leader_epoch

    def is_for(self, assignment: messages.PartitionAssignment) -> bool:
        """Returns whether this process leads in the same epoch."""
        is_ours = self._replica_log.is_led_by_us(assignment)
        return is_ours and assignment.leader_epoch == self.leader_epoch

    def begin_remote(self, remote_log: RemoteLog) -> None:
        """Starts remote storage: the topic's closed segments go to the object store from now on, or
        are there."""
        self.remote = LeaderRemote(self._replica_log, remote_log, self.state, self._assignment)

    def committed(self, assignment: messages.PartitionAssignment) -> None:
        """Takes the partition's committed metadata, in this epoch."""
        self._assignment = assignment
        self.transactions.committed(assignment)
        if self.remote is not None:
            self._remote_committed(self.remote, assignment)
        state = self.state
        if assignment.partition_epoch > state.partition_epoch:
            # No proposal has failed in this partition epoch.
            self.proposals.reset()
        state.committed(
            assignment.partition_epoch,
            assignment.isr,
            assignment.replicas,
            self._replica_log.topic_config.min_insync(
                assignment.replication_factor or len(assignment.replicas)
            ),
        )
        self._replica_log.flusher.wake()  # Records appended as a follower must be flushed.
        self._after_progress()
        if state.is_under_min_isr:
            self._awaiting_commit.fail(
                NotEnoughReplicasAfterAppendError(
                    f"The in-sync replicas of {self.where} fell below min_insync_replicas = "
                    f"{state.min_insync} after the record was appended: it may or may not be "
                    "written."
                )
            )
        self.proposals.propose()

    def _remote_committed(
        self, remote: LeaderRemote, assignment: messages.PartitionAssignment
    ) -> None:
        if self._replica_log.has_remote(assignment):
            remote.committed(assignment)
            return
        remote.end("the topic gave up its objects")
        self.remote = None

    def end(self, reason: str) -> None:
        """Ends this role, as another replica leads or this process stops: the requests that wait
        are told."""
        self._ended = reason
        self._replica_log.stop_leading()
        error = LeadershipEndedError(
            f"Broker {self._replica_log.broker} no longer leads {self.where} ({reason}): the "
            "record may or may not be written."
        )
        self._awaiting_commit.fail(error)
        self.transactions.end(error)
        self._retention.end()
        if self.remote is not None:
            self.remote.end(reason)
        self._replica_log.appended.notify()
        self._replica_log.committed.notify()
        self.followers.moved.notify()

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
        answer = self.produce(
            request, payload, principal=peer.principal, is_move=peer.role == "server"
        )
        throttle = peer.throttle
        if throttle is not None and throttle.limited_by:
            throttle_s = throttle.throttled_s(messages.Produce)
            if throttle_s > 0:
                self.transactions.throttled(payload, throttle_s, peer.principal)
        return answer

    @answers_peer(messages.Fetch)
    def _answer_fetch(
        self, peer: Peer, request: messages.Fetch, _: memoryview
    ) -> Awaitable[tuple[messages.FetchResponse, bytes]]:
        return self.reads.fetch(request, peer.room, peer.throttle)

    def produce(
        self,
        request: messages.Produce,
        payload: memoryview,
        *,
        principal: str | None,
        is_move: bool = False,
    ) -> messages.ProduceResponse | asyncio.Future[messages.ProduceResponse]:
        """Appends a principal's batch. See `messages.Produce` for the errors. `is_move`: a queue's
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
            is_move=is_move,
        )
        if is_transactional(header.producer_id):
            waiting = self.transactions.admit(request, payload, header, principal)
            if waiting is not None:
                return waiting
        elif header.producer_id is not None and principal is not None:
            log.producers.check_principal(header.producer_id, principal)
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
            if header.producer_id is not None:
                log.producers.wrote(header.producer_id, principal)
            self._metrics.appended(header)
        else:
            base_offset, append_time_ms = duplicate.base_offset, duplicate.append_time_ms
            next_offset = duplicate.last_offset + 1
        answer = messages.ProduceResponse(
            base_offset, append_time_ms, log.start_offset, duplicate is not None
        )
        if request.acks != -1:
            return answer
        if next_offset <= leader.high_watermark:
            return answer
        deadline_s = self._environment.clock.monotonic() + request.timeout_ms / 1000
        return self._awaiting_commit.add(next_offset, answer, deadline_s=deadline_s)

    def _append(self, append: Callable[[], BatchHeader]) -> BatchHeader:
        """Appends a batch, and has it flushed and copied. Raises StorageError."""
        log = self._replica_log.log
        try:
            stamped = append()
        except StorageError as error:
            if log.failure is not None:
                self._replica_log.fail(error)
            raise
        self.state.appended(log.end_offset, now_s=self._now_s())
        if self.state.flushed_offset != log.flushed_offset:
            self.flushed(log.flushed_offset)  # flush="os": no flusher reports it later.
        self._replica_log.flusher.wake()
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
        """Answers the requests that waited for the high watermark, if it moved."""
        high_watermark = self.state.high_watermark
        if self._ended is not None or high_watermark <= self._answered_offset:
            return
        self._answered_offset = high_watermark
        self._awaiting_commit.reached(high_watermark)
        self.transactions.reached(high_watermark)
        self._replica_log.committed.notify()

    # --- periodic work ----------------------------------------------------------------------

    def tick(self, now_s: float, clock_watch: ClockWatch) -> None:
        """Does what is due, once per heartbeat: proposes the in-sync set, asks about old
        transactions, and applies retention. Raises StorageError."""
        self.proposals.propose()
        self.transactions.tick(now_s)
        if self.remote is None:
            self._retention.tick(now_s, clock_watch, self._assignment)
        else:
            self.remote.tick(now_s, clock_watch)

    def expire_waiters(self, now_s: float) -> None:
        """Fails the requests that waited too long."""
        self.transactions.expire(now_s)
        if self._awaiting_commit.is_empty:
            return
        self._awaiting_commit.expire(
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
            await self.followers.moved.wait(min(remaining_s, CONFIRM_CHECK_S))
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


    # --- figures ----------------------------------------------------------------------------

    def measure(self) -> list[Sample]:
        """Returns the metrics; none without a lease, as another may lead by now."""
        if not self._has_lease():
            return []
        assignment, sample = self._assignment, self._environment.metrics.sample
        at = assignment.labels
        latest_offset = self._replica_log.high_watermark
        earliest_offset = self._replica_log.log.start_offset
        return [
            sample("rayq_partition_latest_offset", latest_offset, **at),
            sample("rayq_partition_earliest_offset", earliest_offset, **at),
            sample("rayq_partition_in_sync_replicas", len(self.state.isr), **at),
            sample("rayq_partition_replicas", len(assignment.replicas), **at),
            *self.transactions.measure(self._environment.clock.monotonic()),
            *([] if self.remote is None else self.remote.measure(at)),
        ]


Leader.handlers = HandlerTable(
    "leader", Leader, followers=LeaderFollowers, reads=LeaderReads, transactions=LeaderTransactions
)
