"""A replica process: a server, a lease from its broker, and the replicas it hosts.

The broker of the same node tells the process by heartbeat which replicas to host, and what the
metadata says of them. Without a broker for a session the process stops serving, and resumes when a
broker is back; the replicas keep their logs open meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import Any, ClassVar

from rayq import messages
from rayq.actors.access import Access
from rayq.actors.audit.trail import AuditTrail
from rayq.actors.handlers import HandlerTable, answers, answers_peer
from rayq.actors.hosting import ReplicaHostSpec, RunCleaner
from rayq.actors.listening_clock import ListeningClock
from rayq.actors.peers import Peers
from rayq.actors.quotas import Quotas
from rayq.actors.remote.object_link import ObjectLink
from rayq.actors.replica.context import ReplicaContext
from rayq.actors.replica.hosted_names import HostedNames
from rayq.actors.replica.proposal_batches import ProposalBatches
from rayq.actors.replica.replica import Replica
from rayq.actors.signal import Signal
from rayq.backoff import Backoff
from rayq.config import ClusterConfig
from rayq.core.access.shown import shown_samples
from rayq.core.access.unknown import unknown_partition
from rayq.core.cluster.topic_changes import check_not_internal
from rayq.environment import Disk, Environment
from rayq.errors import (
    DirectoryInUseError,
    DiskFullError,
    InvalidRequestError,
    OpenFilesLimitError,
    ProtocolError,
    RayqError,
    StaleBrokerError,
    StorageError,
)
from rayq.records import TopicIdPartition
from rayq.storage.data_directory import DataDirectory, PartitionDirectory, read_meta, read_secret
from rayq.wire.authentication import Identity
from rayq.wire.connection import Connection
from rayq.wire.handler import Result
from rayq.wire.peer import Peer
from rayq.wire.pool import ConnectionPool
from rayq.wire.server import Server

logger = logging.getLogger(__name__)

RETRY_S = 0.05
RETRY_MAX_S = 0.25
DISK_FULL_RETRY_S = 1.0
FAILURE_RETRY_S = 0.5
STOP_GRACE_S = 0.2
OPENED_AT_ONCE_MAX = 16
"""Maximum number of replicas that are opened in parallel. While thousands are opened, heartbeats
must continue."""
ASSIGNED_AT_ONCE_MAX = 50
TICKED_AT_ONCE_MAX = 100
BROKER_TIMEOUT_S = 5.0
"""Timeout of a request that the broker may hold for a while."""


class ReplicaHost:
    """See the module. `run` serves until it is stopped, then returns."""

    handlers: ClassVar[HandlerTable]

    def __init__(
        self,
        environment: Environment,
        config: ClusterConfig,
        spec: ReplicaHostSpec,
        *,
        host: str,
        pid_start_time: int,
        run_cleaner: RunCleaner | None = None,
    ) -> None:
        self._environment = environment
        self._config = config
        self._spec = spec
        self._pid_start_time = pid_start_time
        environment.metrics.label(cluster=spec.cluster_name, broker=spec.broker)
        meta = read_meta(environment.disk, spec.data_path)
        assert meta is not None, spec.data_path
        secret = read_secret(environment.disk, spec.data_path)
        identity = Identity(
            role="server", key=secret, cluster_id=meta.cluster_id, broker=spec.broker
        )
        self._tick_interval_s = config.heartbeat_interval_ms / 1000 / 2
        self._listening = ListeningClock(
            environment.clock, self._tick_interval_s, environment.metrics
        )
        unheard_s = self._listening.unheard_s
        self._pool = ConnectionPool(
            environment, identity, config, keeps_alive=True, unheard_s=unheard_s
        )
        self._heartbeats = ConnectionPool(environment, identity, config, unheard_s=unheard_s)
        """The connection for heartbeats: on that of all else they would wait behind it."""
        self._objects = ObjectLink(self._pool, meta.cluster_id)
        self._urgent = Signal()
        self._access = Access(environment.clock)
        self._names = HostedNames(environment, self._ask_broker)
        peers = Peers(environment, self._pool, ask_broker=self._ask_broker)
        self.audit = AuditTrail(
            environment,
            server=f"broker {spec.broker}",
            principals=lambda: self._access.principals,
            send=peers.append_audit,
        )
        self._context = ReplicaContext(
            environment=environment,
            config=config,
            pool=self._pool,
            broker=spec.broker,
            incarnation=spec.incarnation,
            listening=self._listening,
            has_lease=self.has_lease,
            propose=ProposalBatches(environment, self._propose).propose,
            on_failure=self._urgent.notify,
            ask_broker=self._ask_broker,
            metadata_version=lambda: self._version,
            peers=peers,
            objects=self._objects,
            access=self._access,
            run_cleaner=run_cleaner,
        )
        self._quotas = Quotas(environment)
        self._server = Server(
            environment,
            identity,
            self._handle,
            config,
            self._access,
            self.audit,
            throttles=self._quotas,
        )
        self._host = host
        self._replicas: dict[TopicIdPartition, Replica] = {}
        self._openers = asyncio.Semaphore(OPENED_AT_ONCE_MAX)
        self._opening: dict[TopicIdPartition, Replica] = {}
        """Replicas that are being opened, even if they were closed meanwhile: a thread may be about
        to make the directory. The broker hears of the end of a replica after that, so that it finds
        the directory if there is one."""
        self._let_go: set[TopicIdPartition] = set()
        """The partitions that the broker told it to close: their directories may be removed and
        created again, and this incarnation stands for the earlier contents."""
        self._version = 0
        self._broker_session = 0
        self._reported: dict[TopicIdPartition, messages.ReplicaStatus] | None = None
        """The replicas as the broker knows them over this connection. None: it may know none, or
        takes no changes, so the next heartbeat names all."""
        self._lease_until_s = 0.0
        self._stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        await self._server.start(self._host, 0)
        heartbeats = self._environment.tasks.spawn(self._heartbeat_forever(), "replica-heartbeat")
        ticks = self._environment.tasks.spawn(self._tick_forever(), "replica-ticks")
        checks = self._environment.tasks.spawn(
            self._check_directories_forever(), "replica-directories"
        )
        await self._stopped
        heartbeats.cancel()
        ticks.cancel()
        checks.cancel()
        await asyncio.sleep(STOP_GRACE_S)  # The answer to the stop request leaves first.
        self._server.close()
        self._pool.close()
        self._heartbeats.close()

    def abort(self) -> None:
        """Drops everything at once, as the end of the process would."""
        for replica in self.replicas:
            replica.abandon()
        self._server.close()
        self._pool.close()
        self._heartbeats.close()

    @property
    def replicas(self) -> list[Replica]:
        return list(self._replicas.values())

    def has_lease(self) -> bool:
        return self._environment.clock.monotonic() < self._lease_until_s

    # --- the broker -------------------------------------------------------------------------

    async def _heartbeat_forever(self) -> None:
        is_attached = False
        connection: Connection | None = None
        backoff = Backoff(self._environment, RETRY_S, RETRY_MAX_S)
        while not self._stopped.done():
            try:
                if connection is None or connection.closed:
                    is_attached = False
                    connection = await self._connect(self._heartbeats)
                wait_ms = self._config.heartbeat_interval_ms
                if not is_attached:
                    await self._attach(connection)
                    is_attached = True
                    wait_ms = 0  # The lease from the previous broker process is about to end.
                await self._heartbeat(connection, wait_ms)
                backoff.reset()
            except StaleBrokerError:
                is_attached = False  # A new broker process does not know this one yet.
                await asyncio.sleep(backoff.next_s())
            except RayqError as error:
                logger.debug("replica process of broker %d: %s", self._spec.broker, error)
                await asyncio.sleep(backoff.next_s())
            except Exception:
                # Lack of descriptors, a disk, a bug: nothing may end this loop, or its replicas
                # would serve nobody forever.
                logger.exception("replica process of broker %d: no heartbeat", self._spec.broker)
                await asyncio.sleep(FAILURE_RETRY_S)

    async def _connect(self, pool: ConnectionPool) -> Connection:
        endpoint = DataDirectory.read_endpoint(self._environment.disk, self._spec.data_path)
        if endpoint is None:
            raise StaleBrokerError(f"Broker {self._spec.broker} has not said where it listens.")
        return await pool.get(*endpoint)

    async def _attach(self, connection: Connection) -> None:
        statuses = self._statuses()
        answer, _ = await connection.request(
            messages.AttachReplicaHost(
                incarnation=self._spec.incarnation,
                pid=self._environment.pid,
                pid_start_time=self._pid_start_time,
                host=self._server.host,
                port=self._server.port,
                replicas=list(statuses.values()),
                let_go=sorted(self._let_go),
            ),
            timeout_s=self._session_s,
        )
        self._broker_session = answer.session
        self._reported = statuses if answer.session else None

    async def _heartbeat(self, connection: Connection, wait_ms: int) -> None:
        """Sends one heartbeat, which the broker may hold for `wait_ms`: it renews the lease, and
        brings assignments. Raises RayqError."""
        try:
            answer, sent_s = await self._ask(connection, wait_ms)
        except BaseException:
            self._reported = None  # Nobody knows what the broker has taken note of.
            raise
        self._lease_until_s = max(self._lease_until_s, sent_s + self._session_s)
        if self._access.take(answer.access, sent_s, self._names):
            self._quotas.replace(self._access.quotas)
            self._server.end_revoked()
        self._quotas.set_shares(answer.quota_part, answer.quota_shares)
        for topic_id, partition in answer.removed:
            self._let_go.add((topic_id, partition))
            replica = self._replicas.pop((topic_id, partition), None)
            if replica is not None:
                replica.abandon()
        if answer.deleted:
            self._let_go = {key for key in self._let_go if key[0] not in answer.deleted}
            self._names.forget(answer.deleted)
        for number, assignment in enumerate(answer.assignments, 1):
            if number % ASSIGNED_AT_ONCE_MAX == 0:
                await asyncio.sleep(0)  # Requests to other replicas get their turn.
            try:
                self._apply(assignment)
            except RayqError as error:  # Only of this partition: the others must not wait for it.
                logger.error("assignment of %s: %s", assignment.topic, error)
        self._objects.update(answer.object_server, answer.remote_halt, answer.remote_backlog_bytes)
        self._version = max(self._version, answer.version)

    async def _ask(
        self, connection: Connection, wait_ms: int
    ) -> tuple[messages.ReplicaHostHeartbeatResponse, float]:
        """Returns the answer to a heartbeat, and the time at which that was sent."""
        sent_s = self._environment.clock.monotonic()
        answer_task = connection.request(self._report(wait_ms), timeout_s=self._session_s)
        # Something here may change while the broker holds the request: then report it at once.
        urgent = asyncio.ensure_future(self._urgent.wait(self._session_s))
        try:
            waiting: set[asyncio.Future[Any]] = {answer_task, urgent}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not answer_task.done():
                await connection.request(self._report(wait_ms=0), timeout_s=self._session_s)
            answer, _ = await answer_task
        finally:
            urgent.cancel()
            answer_task.cancel()
        return answer, sent_s

    def _report(self, wait_ms: int) -> messages.ReplicaHostHeartbeat:
        """Returns the next heartbeat. Requests of one connection are handled in their order."""
        statuses, known = self._statuses(), self._reported
        changed = list(statuses.values())
        closed: list[TopicIdPartition] = []
        if known is not None:
            changed = [status for key, status in statuses.items() if known.get(key) != status]
            closed = sorted(known.keys() - statuses.keys())
        if self._broker_session:
            self._reported = statuses
        return messages.ReplicaHostHeartbeat(
            self._spec.incarnation,
            self._version,
            changed,
            wait_ms,
            remote_backlog_bytes=sum(replica.remote_backlog_bytes() for replica in self.replicas),
            access_digest=self._access.digest,
            has_all=known is None,
            closed=closed,
            session=self._broker_session,
            quota_demands=self._quotas.demands(),
        )

    @property
    def _session_s(self) -> float:
        return self._config.session_timeout_ms / 1000

    def _statuses(self) -> dict[TopicIdPartition, messages.ReplicaStatus]:
        return {
            key: replica.status() for key, replica in (self._opening | self._replicas).items()
        }

    # --- replicas ---------------------------------------------------------------------------

    async def _tick_forever(self) -> None:
        """Ticks all replicas by one timer: with a timer for each, many idle ones would keep a core
        busy."""
        clock = self._environment.clock
        while True:
            await asyncio.sleep(self._tick_interval_s)
            if self._listening.look() > 0:
                await self._listening.read_arrived()
            now_s = clock.monotonic()
            for number, replica in enumerate(self.replicas, 1):
                if number % TICKED_AT_ONCE_MAX == 0:
                    await asyncio.sleep(0)  # Heartbeats and requests get their turn.
                replica.tick(now_s)

    async def _check_directories_forever(self) -> None:
        """Ends replicas whose directories were removed or replaced. It asks the disk in a thread,
        once for all of them: a disk that is busy may take long for each answer."""
        while True:
            await asyncio.sleep(self._config.heartbeat_interval_ms / 1000)
            held = [
                (replica, directory)
                for replica in self._replicas.values()
                if (directory := replica.directory) is not None
            ]
            gone = await self._environment.threads.run(_find_gone, self._environment.disk, held)
            for replica, directory, error in gone:
                if replica.directory is directory:  # It was not closed meanwhile.
                    logger.error("the directory of %s: %s", replica.where, error)
                    replica.fail(error)

    def _apply(self, assignment: messages.PartitionAssignment) -> None:
        key = (assignment.topic_id, assignment.partition)
        self._names.take(assignment)
        replica = self._replicas.get(key)
        if replica is not None:
            replica.apply(assignment)
            return
        if key in self._let_go:
            raise InvalidRequestError("it was closed for good in this process.")
        replica = Replica(self._context, assignment)
        self._replicas[key] = replica
        self._environment.tasks.spawn(self._open(replica), f"open {replica.where}")

    async def _open(self, replica: Replica) -> None:
        key = (replica.assignment.topic_id, replica.assignment.partition)
        is_open = False
        while not is_open:
            try:
                async with self._openers:
                    if self._replicas.get(key) is not replica:
                        return  # The topic was deleted meanwhile, or the replica moved away.
                    self._opening[key] = replica
                    try:
                        directory = await self._locked_directory(replica.assignment)
                        if self._replicas.get(key) is not replica:
                            directory.close()
                            return
                        await replica.open(directory)
                        is_open = True
                    finally:
                        del self._opening[key]
                        if key not in self._replicas:
                            self._urgent.notify()
            except DirectoryInUseError as error:
                # The previous process holds it, which the broker has killed or is about to kill.
                logger.info("%s", error)
                await asyncio.sleep(RETRY_S)
            except DiskFullError as error:  # It heals when space returns.
                logger.warning("%s", error)
                replica.note_trouble(error)
                await asyncio.sleep(DISK_FULL_RETRY_S)
            except (RayqError, OSError) as error:
                # A failing disk has an OSError as the cause; otherwise the contents of the disk are
                # wrong.
                is_damage = isinstance(error, StorageError) and not isinstance(
                    error.__cause__, OSError
                )
                replica.fail(error, is_damage=is_damage)
                return
        replica.apply(replica.assignment)
        self._urgent.notify()

    async def _locked_directory(
        self, assignment: messages.PartitionAssignment
    ) -> PartitionDirectory:
        """Locks a directory, in a thread: it makes files, and a disk that is busy with syncs may
        take long for each. Raises OpenFilesLimitError if clients could no longer connect."""
        if not self._environment.has_descriptors_for_replica():
            raise OpenFilesLimitError(
                f"{assignment.topic}-{assignment.partition} is not opened: what is left of the "
                "files and connections that this process may have is for clients. Raise the limit "
                "(ulimit -n), or host fewer replicas in it; it will be retried."
            )

        def lock() -> PartitionDirectory:
            return PartitionDirectory.open(
                self._environment,
                DataDirectory.path_of_partition(
                    self._spec.data_path, assignment.topic, assignment.partition
                ),
                topic=assignment.topic,
                topic_id=assignment.topic_id,
                partition=assignment.partition,
                incarnation=self._spec.incarnation,
                pid_start_time=self._pid_start_time,
            )

        locking = asyncio.ensure_future(self._environment.threads.run(lock))
        try:
            return await asyncio.shield(locking)
        except asyncio.CancelledError:
            locking.add_done_callback(_let_go)
            raise

    async def _propose(
        self, request: messages.Request[messages.ResponseT]
    ) -> messages.ResponseT:
        connection = await self._connect(self._pool)
        response, _ = await connection.request(request, timeout_s=self._session_s)
        return response

    async def _ask_broker(
        self, request: messages.Request[messages.ResponseT]
    ) -> messages.ResponseT:
        connection = await self._connect(self._pool)
        response, _ = await connection.request(request, timeout_s=BROKER_TIMEOUT_S)
        return response

    # --- requests ---------------------------------------------------------------------------

    def _handle(self, peer: Peer, request: messages.AnyRequest, payload: memoryview) -> Result | (
        Awaitable[Result]
    ):
        if not isinstance(request, messages.ToPartition):
            if type(request) not in self.handlers:
                raise ProtocolError(
                    f"A replica process does not answer {type(request).__name__}."
                )
            return self.handlers.answer(self, peer, request, payload)
        replica = self._replica(request.topic_id, request.partition)
        if peer.role == "client" and not request.reads_internal_topics:
            check_not_internal(replica.assignment.topic)
        return replica.handle(peer, request, payload)

    @answers_peer(messages.DescribeMetrics)
    def _describe_metrics(
        self, peer: Peer, _: messages.DescribeMetrics, __: memoryview
    ) -> messages.DescribeMetricsResponse:
        samples = self._environment.metrics.collect()
        return messages.DescribeMetricsResponse(shown_samples(self._access.view(peer), samples))

    @answers(messages.DescribeQuotaUse)
    def _describe_quota_use(
        self, request: messages.DescribeQuotaUse
    ) -> messages.DescribeQuotaUseResponse:
        return messages.DescribeQuotaUseResponse(self._quotas.uses_of(request.principal))

    def _replica(self, topic_id: str, partition: int) -> Replica:
        replica = self._replicas.get((topic_id, partition))
        if replica is None:
            raise unknown_partition(topic_id, partition)
        return replica

    @answers(messages.StopReplicaHost)
    async def _stop(self, _: messages.StopReplicaHost) -> messages.StopReplicaHostResponse:
        async def close(replica: Replica) -> messages.ReplicaStatus:
            async with self._openers:
                return await replica.close()

        statuses = await asyncio.gather(*(close(replica) for replica in self.replicas))
        if not self._stopped.done():
            self._stopped.set_result(None)
        return messages.StopReplicaHostResponse(statuses)


def _find_gone(
    disk: Disk, held: Sequence[tuple[Replica, PartitionDirectory]]
) -> list[tuple[Replica, PartitionDirectory, Exception]]:
    """The replicas whose directories are no longer at their paths, each with the reason."""
    gone: list[tuple[Replica, PartitionDirectory, Exception]] = []
    for replica, directory in held:
        try:
            directory.check_here(disk)
        except Exception as error:  # noqa: BLE001 - it ends this replica, not the check of others
            gone.append((replica, directory, error))
    return gone


def _let_go(locking: asyncio.Future[PartitionDirectory]) -> None:
    """Unlocks a directory that nobody waits for any more."""
    if not locking.cancelled() and locking.exception() is None:
        locking.result().close()


ReplicaHost.handlers = HandlerTable("replica host", ReplicaHost)
