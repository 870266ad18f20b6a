"""One replica of one partition: it takes the role that the committed metadata gives it.

`Leader`, `Follower` and `RemoteCatchUp` are the roles, `ReplicaLog` is what they share. A replica
serves only while its process holds a lease, which means that its broker was heard within the last
session.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from typing import Any, ClassVar, Protocol, cast

from rayq import messages
from rayq.actors.clock_watch import ClockWatch, DelayClock
from rayq.actors.coordinator import Coordinator
from rayq.actors.handlers import HandlerTable, answers
from rayq.actors.queues.leader import PartitionQueues
from rayq.actors.remote.catch_up import RemoteCatchUp, must_catch_up
from rayq.actors.remote.remote_log import RemoteLog
from rayq.actors.remote.uploads import waiting
from rayq.actors.replica.compactor import Compactor, cleaner_in_steps
from rayq.actors.replica.context import ReplicaContext
from rayq.actors.replica.coordinators import COORDINATORS, MAKE_COORDINATOR
from rayq.actors.replica.follower import Follower
from rayq.actors.replica.leader import Leader
from rayq.actors.replica.local_retention import LocalRetention
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.core.cluster.topic_changes import OWN_TOPICS
from rayq.errors import (
    FencedEpochError,
    InvalidRequestError,
    NotLeaderError,
    UnknownEpochError,
)
from rayq.metrics import Sample
from rayq.storage.data_directory import PartitionDirectory
from rayq.wire.handler import Result
from rayq.wire.peer import Peer

logger = logging.getLogger(__name__)

CLOCK_LOOK_INTERVAL_S = 5.0
"""Interval at which a replica looks at the clocks while nothing asks them: far below
`clock_watch.LOOK_INTERVAL_MS`, and seldom, since a process may have a thousand replicas."""


class Role(Protocol):
    """The work of a replica under one leader in one leader epoch. `end` is final."""

    def is_for(self, assignment: messages.PartitionAssignment) -> bool:
        """Returns whether this role continues under that assignment."""
        ...

    def committed(self, assignment: messages.PartitionAssignment) -> None:
        """Takes newer metadata of the partition, under which this role continues."""
        ...

    def flushed(self, flushed_offset: int) -> None:
        """Notes that this replica's disk holds everything below the offset."""
        ...

    def measure(self) -> list[Sample]:
        """Returns the metrics of this role."""
        ...

    def end(self, reason: str) -> None: ...


class Replica:
    """See the module. Call `open` first, then `apply` for each newer assignment, and finally
    `close` or `abandon`."""

    handlers: ClassVar[HandlerTable]

    def __init__(
        self, context: ReplicaContext, assignment: messages.PartitionAssignment
    ) -> None:
        self._context = context
        self._environment = environment = context.environment
        self.assignment = assignment
        self._replica_log = ReplicaLog(
            environment,
            context.config,
            assignment,
            broker=context.broker,
            incarnation=context.incarnation,
            on_flushed=self._flushed,
            on_failure=self._failed,
        )
        self.where = self._replica_log.where
        self._role: Role | None = None
        self._coordinator: Coordinator[Any, Any] | None = None
        """The coordinator of a partition of an internal topic, while this replica leads it."""
        self._queues: PartitionQueues | None = None
        """The queues of a data partition, while this replica leads it."""
        self._next_check_s = environment.clock.monotonic()
        self._next_look_s = self._next_check_s
        self._clock_watch = ClockWatch(environment.clock)
        self._delay_clock = DelayClock(environment.clock)
        self._forget_source = environment.metrics.add_source(self._measure)
        self._local_retention = LocalRetention(self._replica_log, self._clock_watch)
        self._compactor = Compactor(
            self._replica_log,
            context.run_cleaner or cleaner_in_steps(environment),
            self._clock_watch,
        )

    # --- life -------------------------------------------------------------------------------

    async def open(self, directory: PartitionDirectory) -> None:
        """Recovers the log. Raises StorageError, UnsupportedFormatError."""
        await self._replica_log.open(directory)
        self._replica_log.trouble = None
        if not self._replica_log.is_open:
            return  # The topic was deleted meanwhile.
        newest_ms = self._replica_log.log.last_append_time_ms
        if newest_ms is not None:
            self._clock_watch.doubt(newest_ms)
            self._delay_clock.begin_after(newest_ms)

    def status(self) -> messages.ReplicaStatus:
        last_epoch, flushed = self._replica_log.ends()
        return messages.ReplicaStatus(
            topic_id=self.assignment.topic_id,
            partition=self.assignment.partition,
            last_epoch=last_epoch,
            flushed=flushed,
            failure=self._replica_log.failure,
            is_damaged=self._replica_log.is_damaged,
        )

    @property
    def directory(self) -> PartitionDirectory | None:
        """The directory that the replica works in. None: it is not open."""
        return self._replica_log.directory

    def fail(self, error: BaseException, *, is_damage: bool = False) -> None:
        """Stops the replica for good: its directory cannot be used. See `ReplicaLog.fail`."""
        self._replica_log.fail(error, is_damage=is_damage)

    def note_trouble(self, error: BaseException) -> None:
        """Notes that the replica cannot continue for now; `describe` reports the reason."""
        self._replica_log.trouble = str(error)

    async def close(self) -> messages.ReplicaStatus:
        """Stops in order: no longer serves, flushes, and returns the exact end of the log."""
        self._stop("it is stopping")
        await self._replica_log.close()
        return self.status()

    def abandon(self) -> None:
        """Stops at once and leaves the disk as it is: the topic was deleted, or the process
        ends."""
        self._stop("it is gone")
        self._replica_log.abandon()

    def _stop(self, reason: str) -> None:
        self._forget_source()
        assignment = self.assignment
        self._environment.metrics.forget(
            topic=assignment.topic, partition=assignment.partition
        )
        self._end_role(reason)
        self._compactor.stop()
        self._local_retention.stop()

    def _failed(self) -> None:
        self._end_role(self._replica_log.failure or "it failed")
        self._context.on_failure()

    # --- role -------------------------------------------------------------------------------

    def apply(self, assignment: messages.PartitionAssignment) -> None:
        """Takes a committed assignment; one that is older than the last is ignored."""
        if assignment.partition_epoch < self.assignment.partition_epoch:
            return
        before, self.assignment = self.assignment, assignment
        if assignment.config != before.config:
            self._replica_log.configure(assignment.config)
        if not self._replica_log.is_open:
            return
        role = self._role
        if role is None or not role.is_for(assignment):
            leads = self._replica_log.is_led_by_us(assignment)
            self._end_role(
                f"epoch {assignment.leader_epoch} begins"
                if leads
                else f"broker {assignment.leader} leads {self.where} in epoch "
                f"{assignment.leader_epoch}"
            )
            role = self._role = self._lead(assignment) if leads else self._follow(assignment)
        elif isinstance(role, Leader) and role.remote is None:
            remote_log = self._remote_log_of(assignment)
            if remote_log is not None:
                role.begin_remote(remote_log)
        if role is not None:
            role.committed(assignment)
        if isinstance(role, Leader):
            self._serve_beside(role, assignment)

    def _follow(self, assignment: messages.PartitionAssignment) -> Follower | None:
        if assignment.leader_host is None:
            return None
        follower = Follower(self._replica_log, self._context.pool, assignment)
        follower.start()
        return follower

    def _lead(self, assignment: messages.PartitionAssignment) -> Leader | RemoteCatchUp:
        """The leader's role in this epoch, which begins once the log continues at the end of the
        list of objects."""
        remote_log = self._remote_log_of(assignment)
        if remote_log is None or not must_catch_up(self._replica_log.log, assignment):
            return self._leader_of(assignment, remote_log)
        catch_up = RemoteCatchUp(
            self._replica_log, assignment, remote_log, on_done=self._caught_up
        )
        catch_up.start()
        return catch_up

    def _caught_up(self) -> None:
        assert isinstance(self._role, RemoteCatchUp)
        self._role = leader = self._leader_of(self.assignment, self._role.remote_log)
        leader.committed(self.assignment)
        self._serve_beside(leader, self.assignment)

    def _serve_beside(self, leader: Leader, assignment: messages.PartitionAssignment) -> None:
        """Starts what stands beside a leader: a coordinator, or the queues that read this
        partition."""
        if assignment.topic in MAKE_COORDINATOR and self._coordinator is None:
            self._coordinator = MAKE_COORDINATOR[assignment.topic](
                self._context, self._replica_log, leader, assignment, self._clock_watch
            )
        if assignment.topic in OWN_TOPICS:
            return
        if self._queues is not None:
            self._queues.committed(assignment)
            return
        self._queues = PartitionQueues(
            self._replica_log,
            leader,
            assignment,
            peers=self._context.peers,
            clock_watch=self._delay_clock,
            age_watch=self._clock_watch,
            access=self._context.access,
        )

    def _leader_of(
        self, assignment: messages.PartitionAssignment, remote_log: RemoteLog | None
    ) -> Leader:
        return Leader(
            self._replica_log,
            assignment,
            propose=self._context.propose,
            has_lease=self._context.has_lease,
            now_s=self._context.listening.now_s,
            peers=self._context.peers,
            remote_log=remote_log,
        )

    def _remote_log_of(self, assignment: messages.PartitionAssignment) -> RemoteLog | None:
        if not self._replica_log.has_remote(assignment):
            return None
        return RemoteLog(
            self._replica_log,
            assignment,
            self._context.objects,
            ask_broker=self._context.ask_broker,
            has_lease=self._context.has_lease,
        )

    def _end_role(self, reason: str) -> None:
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is not None:
            coordinator.end(reason)
        queues, self._queues = self._queues, None
        if queues is not None:
            queues.end(reason)
        role, self._role = self._role, None
        if role is not None:
            role.end(reason)

    def leader(self, leader_epoch: int) -> Leader:
        """The leader's role, for a request in that epoch. Raises NotLeaderError, FencedEpochError,
        UnknownEpochError."""
        role = self._role
        if not isinstance(role, Leader):
            failure = self._replica_log.failure
            because = "" if failure is None else f" (it stopped: {failure})"
            if isinstance(role, RemoteCatchUp):
                because = f" yet ({self._replica_log.trouble or 'its log is being adopted'})"
            raise NotLeaderError(
                f"Broker {self._replica_log.broker} does not lead {self.where}{because}: ask for "
                "new metadata."
            )
        role.check()
        if leader_epoch < role.leader_epoch:
            raise FencedEpochError(
                f"{self.where} is in leader epoch {role.leader_epoch}, the request in "
                f"{leader_epoch}: ask for new metadata."
            )
        if leader_epoch > role.leader_epoch:
            raise UnknownEpochError(
                f"Broker {self._replica_log.broker} knows leader epoch {role.leader_epoch} of "
                f"{self.where}, the request is in {leader_epoch}: try again."
            )
        return role

    def queues(self, leader_epoch: int) -> PartitionQueues:
        """The queues beside the leader, for a request in that epoch. Raises the errors of `leader`,
        and InvalidRequestError for a topic that no queue can read."""
        self.leader(leader_epoch)
        if self._queues is None:
            raise InvalidRequestError(f"{self.where} is rayq's own: it has no queues.")
        return self._queues

    # --- requests ---------------------------------------------------------------------------

    def handle(
        self, peer: Peer, request: messages.ToPartition[Any], payload: memoryview
    ) -> Result | Awaitable[Result]:
        """Answers a request about this partition, in the role that the request is for. Raises the
        errors of `leader` and `queues`, InvalidRequestError for a topic whose partitions have no
        such coordinator, and the errors of the message."""
        kind = type(request)
        if kind in self.handlers:
            return self.handlers.answer(self, peer, request, payload)
        # A follower names the epoch, too.
        in_role = cast("messages.ToLeader[Any]", request)
        leader = self.leader(in_role.leader_epoch)
        coordinator = self._coordinator
        if coordinator is not None and kind in coordinator.handlers:
            return coordinator.handle(peer, request, payload)
        if kind in leader.handlers:
            return leader.handlers.answer(leader, peer, request, payload)
        if isinstance(request, messages.ToQueueLeader):
            return self.queues(request.leader_epoch).handle(peer, request)
        wanted = next(coordinator for coordinator in COORDINATORS if kind in coordinator.handlers)
        raise InvalidRequestError(
            f"{self.where} coordinates no {wanted.subject}: that is for partitions of "
            f"{wanted.topic}."
        )

    # --- what any replica answers -----------------------------------------------------------

    @answers(messages.CheckRange)
    async def check_range(self, request: messages.CheckRange) -> messages.Done:
        """Reads a range again that a reader found damaged; damage on this disk ends this
        replica."""
        role = self._role
        if self._queues is not None:
            self._queues.drop_reads()
        if isinstance(role, Leader) and await role.reads.check_range(request.offset):
            return messages.Done()
        await self._replica_log.verify(request.offset)
        return messages.Done()

    @answers(messages.DescribeReplica)
    def describe(self, _: messages.DescribeReplica) -> messages.DescribeReplicaResponse:
        log = self._replica_log.log
        return messages.DescribeReplicaResponse(
            broker=self._replica_log.broker,
            pid=self._environment.pid,
            leader_epoch=self.assignment.leader_epoch,
            is_leader=isinstance(self._role, Leader),
            log_start_offset=log.start_offset,
            high_watermark=self._replica_log.high_watermark,
            log_end_offset=log.end_offset,
            flushed_offset=log.flushed_offset,
            size_bytes=log.size_bytes,
            trouble=self._replica_log.trouble,
            disk_free_bytes=self._disk_free_bytes(),
        )

    def _disk_free_bytes(self) -> int | None:
        try:
            return self._environment.disk.free_bytes(self._replica_log.log.directory)
        except OSError:
            return None

    def _measure(self) -> list[Sample]:
        replica_log, sample = self._replica_log, self._environment.metrics.sample
        if not replica_log.is_open:
            return []
        log = replica_log.log
        at = self.assignment.labels
        samples = [
            sample("rayq_log_size_bytes", log.size_bytes, **at),
            sample("rayq_log_end_offset", log.end_offset, **at),
        ]
        if replica_log.topic_config.is_compacted:
            unreadable = self._compactor.unreadable_batches
            samples.append(sample("rayq_log_unreadable_batches", unreadable, **at))
        if self._role is not None:
            samples += self._role.measure()
        if self._queues is not None and self._context.has_lease():
            samples += self._queues.measure()
        return samples

    def remote_backlog_bytes(self) -> int:
        """Size of the records in closed segments here that are not in the object store yet."""
        replica_log = self._replica_log
        if replica_log.topic_config.remote_storage is not True or not replica_log.is_open:
            return 0
        return sum(piece.size_bytes for piece in waiting(replica_log.log, self.assignment.remote))

    # --- background -------------------------------------------------------------------------

    def _flushed(self, flushed_offset: int) -> None:
        if self._role is not None:
            self._role.flushed(flushed_offset)

    def tick(self, now_s: float) -> None:
        """Does the periodic work; the process calls it for each replica in turn. An error ends the
        replica, as in `ReplicaLog.guard`."""
        try:
            self._tick(now_s)
        except Exception as error:
            logger.exception("a background task of %s failed", self.where)
            self._replica_log.fail(error)

    def _tick(self, now_s: float) -> None:
        role = self._role
        if isinstance(role, Leader):
            role.expire_waiters(now_s)
        if self._queues is not None and self._replica_log.is_open:
            self._queues.tick()
        if now_s < self._next_check_s or not self._replica_log.is_open:
            return
        self._next_check_s = now_s + self._context.config.heartbeat_interval_ms / 1000
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + CLOCK_LOOK_INTERVAL_S
            self._clock_watch.look()
            self._delay_clock.look()
        self._compactor.tick(now_s)
        if not self.assignment.is_remote_doubted:
            self._local_retention.tick(now_s, self.assignment.remote)
        if isinstance(role, Leader):
            role.tick(now_s, self._clock_watch)


Replica.handlers = HandlerTable("replica", Replica)
