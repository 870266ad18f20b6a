"""The broker: one data directory, a copy of the metadata, a bootstrap port, and its replicas.

It registers with the controller and renews its session, answers clients' questions about metadata,
forwards changes to the controller, and, as a voter, stands in for a silent controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import ClassVar, cast

from rayq import messages
from rayq.actors.access import Access
from rayq.actors.audit.trail import AuditTrail
from rayq.actors.broker.access_answers import AccessAnswers
from rayq.actors.broker.granted_numbers import GrantedNumbers
from rayq.actors.broker.metadata_answers import MetadataAnswers
from rayq.actors.broker.object_store_access import ObjectStoreAccess
from rayq.actors.broker.quota_division import QuotaDivision
from rayq.actors.broker.replica_supervisor import ReplicaSupervisor
from rayq.actors.change_origin import with_origin
from rayq.actors.controller.controller_host import ControllerHost
from rayq.actors.handlers import HandlerTable, answers, answers_peer
from rayq.actors.hosting import Runtime
from rayq.actors.listening_clock import ListeningClock
from rayq.actors.metadata.metadata_keeper import MetadataKeeper
from rayq.actors.quotas import Quotas
from rayq.config import MIB, ClusterConfig
from rayq.core.access.shown import shown_samples
from rayq.core.cluster.quota_changes import partitions_changed
from rayq.core.cluster.records import ACCESS_RECORDS, MetadataRecord
from rayq.core.cluster.state import Topic
from rayq.core.cluster.topic_changes import AUDIT_TOPIC, offline_reason
from rayq.environment import Address, Environment
from rayq.errors import (
    ControllerUnavailableError,
    NotControllerError,
    NotLeaderError,
    ProtocolError,
    RayqError,
    StaleBrokerError,
    UnknownTopicError,
)
from rayq.metrics import Sample
from rayq.storage.data_directory import DataDirectory
from rayq.storage.metadata_log import MetadataLog
from rayq.wire.authentication import Identity
from rayq.wire.descriptors import shares
from rayq.wire.handler import Result
from rayq.wire.peer import Peer
from rayq.wire.pool import ConnectionPool
from rayq.wire.server import Server

logger = logging.getLogger(__name__)

RETRY_S = 0.1
FORWARD_TIMEOUT_S = 5.0
STOP_GRACE_S = 0.2
BYTES_PER_PROCESS = 100 * MIB
BYTES_PER_REPLICA = MIB


class Broker:
    """See the module. `start` returns when the broker listens; the broker serves until `stopped`.

    `directory` is open, and belongs to the broker: it is closed if the broker cannot be made or
    started. `peers` are the last known addresses of other brokers.
    """

    handlers: ClassVar[HandlerTable]

    def __init__(
        self,
        environment: Environment,
        config: ClusterConfig,
        runtime: Runtime,
        directory: DataDirectory,
        *,
        cluster_name: str,
        host: str,
        port: int,
        node_id: str,
        replicas_max: int,
        peers: Sequence[Address] = (),
    ) -> None:
        """Raises StorageError, UnsupportedFormatError, OSError."""
        self._environment = environment
        self._config = config
        self._directory = directory
        self._cluster_name = cluster_name
        self._node_id = node_id
        self._replicas_max = replicas_max
        self._peers = list(peers)
        self._incarnation = environment.new_id()
        self._session_s = config.session_timeout_ms / 1000
        self._listening = ListeningClock(
            environment.clock, config.heartbeat_interval_ms / 1000 / 2, environment.metrics
        )
        self._registered_epoch: int | None = None
        self._search: asyncio.Task[None] | None = None
        """The search for a controller, while one is under way."""
        self._producer_ids = GrantedNumbers(lambda: self._ask_for_block(of_families=False))
        self._families = GrantedNumbers(lambda: self._ask_for_block(of_families=True))
        self._is_stopping = False
        self.stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._listens_at = host, port
        self.endpoint: Address = host, port
        """Address at which others reach it, once it has started."""
        meta = directory.meta
        self.access = Access(environment.clock)
        """The gate: what the metadata here say of principals and ACLs."""
        with contextlib.ExitStack() as opened:
            opened.callback(directory.close)
            identity = Identity(
                role="server", key=directory.secret, cluster_id=meta.cluster_id, broker=meta.broker
            )
            self.metadata = MetadataKeeper(
                environment,
                directory,
                MetadataLog.open(environment.disk, f"{directory.path}/metadata"),
                incarnation=self._incarnation,
                snapshot_records=config.metadata_snapshot_records,
                now_s=self._listening.now_s,
                on_applied=self._on_metadata,
            )
            opened.pop_all()  # It succeeded: nothing is closed.
        unheard_s = self._listening.unheard_s
        self._pool = ConnectionPool(environment, identity, config, unheard_s=unheard_s)
        self._heartbeats = ConnectionPool(environment, identity, config, unheard_s=unheard_s)
        """The connection for heartbeats: on that of all else they would wait behind it."""
        self.audit = AuditTrail(
            environment,
            server=f"broker {meta.broker}",
            principals=lambda: self.access.principals,
            send=self._append_audit,
        )
        self.quotas = Quotas(environment)
        self._division = QuotaDivision(self.quotas, self.metadata, environment.clock)
        self._server = Server(
            environment, identity, self._handle, config, self.access, self.audit, self.quotas
        )
        self._take_access()
        self._answers = MetadataAnswers(
            self.metadata, meta.cluster_id, is_registered=lambda: self.is_registered
        )
        self._access_answers = AccessAnswers(self.metadata)
        self._objects = (
            None
            if config.remote_storage_url is None
            else ObjectStoreAccess(
                environment,
                config,
                runtime,
                directory,
                self.metadata,
                self._pool,
                cluster_name=cluster_name,
                listening=self._listening,
                ask_controller=self._ask_controller,
                is_current=lambda: self.is_registered,
            )
        )
        self._replicas = ReplicaSupervisor(
            environment,
            config,
            runtime,
            directory,
            self.metadata,
            self._pool,
            cluster_name=cluster_name,
            incarnation=self._incarnation,
            listening=self._listening,
            ask_controller=self._ask_controller,
            objects=self._objects,
            access=self.access,
            division=self._division,
        )
        self.controller_host = ControllerHost(
            environment,
            self._pool,
            config,
            cluster_id=meta.cluster_id,
            listening=self._listening,
            silent_s=lambda: self.metadata.silent_s,
            known_brokers=self._known_brokers,
            # In a new cluster only the controller's own process knows where all brokers are.
            may_host=lambda: self._is_voter() and self.metadata.has_been_led,
            is_preferred=False,
        )

    async def start(self) -> Address:
        """Listens, and starts to serve. Returns the address. Raises StorageError, OSError;
        everything is then closed, so that another object may try."""
        environment, meta = self._environment, self._directory.meta
        host, port = self._listens_at
        try:
            await self._server.start(host, port, first_free=True)
            self.endpoint = self._config.advertised_host or self._server.host, self._server.port
            self._directory.write_endpoint(self._server.host, self._server.port)
        except BaseException:
            self._release()
            raise
        environment.metrics.label(cluster=self._cluster_name, broker=meta.broker)
        environment.metrics.add_source(self._measure)
        spawn = environment.tasks.spawn
        spawn(self._listening.run(), "listening-clock")
        spawn(self._keep_session(), "broker-session")
        spawn(self._replicas.run(), "replica-supervisor")
        spawn(self.controller_host.run(self.endpoint), "controller-host")
        if self._objects is not None:
            self._objects.start()
        return self.endpoint

    async def stop(self) -> None:
        """Stops the broker in order: the replicas, the report of their ends, then this process's
        server."""
        if self._is_stopping:
            return
        self._is_stopping = True
        ends = await self._replicas.stop()
        if self._objects is not None:
            self._objects.stop()
        try:
            await self._ask_controller(
                messages.BrokerStopped(self._directory.meta.broker, self._incarnation, ends)
            )
        except RayqError as error:
            logger.warning("the ends of the logs could not be reported: %s", error)

    def close(self) -> None:
        """Releases everything; after `stop`, or if the process dies anyway."""
        if self.controller_host.controller is not None:
            self.controller_host.controller.end("its broker stops")
        self._release()
        if not self.stopped.done():
            self.stopped.set_result(None)

    def _release(self) -> None:
        self._server.close()
        self._pool.close()
        self._heartbeats.close()
        self._directory.close()

    @property
    def is_registered(self) -> bool:
        """True if the committed metadata here shows this process with a session."""
        known = self.metadata.state.brokers.get(self._directory.meta.broker)
        return (
            known is not None
            and known.live
            and known.registration.incarnation == self._incarnation
        )

    def recovering_partitions(self) -> dict[str, str]:
        """The partitions that still wait for replicas of live brokers, by name, with the reason."""
        state = self.metadata.state
        recovering = {}
        for topic, number, behind in self._recovering():
            if topic.partitions[number].value.leader is None:
                reason = offline_reason(state, topic, number)
                recovering[f"{topic.name}-{number}"] = f"is offline: it {reason}"
            else:
                recovering[f"{topic.name}-{number}"] = f"waits for brokers {behind} to catch up"
        return recovering

    def is_recovering(self) -> bool:
        """Returns whether there are such partitions. It looks no further than the first: who waits
        asks often, and a broker that starts with thousands of partitions has no time for that."""
        return next(self._recovering(), None) is not None

    def _recovering(self) -> Iterator[tuple[Topic, int, list[int]]]:
        """The partitions without a leader, or without replicas of live brokers, with these
        brokers."""
        state = self.metadata.state
        live = {number for number, broker in state.brokers.items() if broker.live}
        for topic, number, partition in state.all_partitions():
            value = partition.value
            in_sync = {member.broker for member in value.isr}
            behind = [
                broker
                for broker in value.origin or value.replicas
                if broker in live and broker not in in_sync
            ]
            if behind or value.leader is None:
                yield topic, number, behind

    def _measure(self) -> list[Sample]:
        sample = self._environment.metrics.sample
        samples = [
            sample("rayq_metadata_version", self.metadata.version),
            sample("rayq_failed_replicas", self._replicas.failed_count),
        ]
        try:
            free_bytes = self._environment.disk.free_bytes(self._directory.path)
        except OSError as error:  # An unknown figure is left out, not told as 0.
            logger.warning("the free space of %s is not known: %s", self._directory.path, error)
        else:
            samples.append(sample("rayq_disk_free_bytes", free_bytes))
        return samples

    def _on_metadata(self, records: Sequence[MetadataRecord] | None) -> None:
        if records is None or any(isinstance(record, ACCESS_RECORDS) for record in records):
            self._take_access()
            self._server.end_revoked()
            self._replicas.tell_all()
        self.access.freshness.note_applied(self.metadata.version)
        self._answers.forget(records)
        self._replicas.on_metadata(records)

    def _take_access(self) -> None:
        self.access.update(self.metadata.state, self.metadata.state)
        self.quotas.replace(self.metadata.state.quotas)

    def _known_brokers(self) -> list[Address]:
        return list(
            dict.fromkeys([self.endpoint, *self.metadata.known_brokers(), *self._peers])
        )

    def _is_voter(self) -> bool:
        meta = self._directory.meta
        return not self._is_stopping and any(
            (voter.broker, voter.directory_id) == (meta.broker, meta.directory_id)
            for voter in self.metadata.voters()
        )

    # --- the session with the controller ----------------------------------------------------

    async def _keep_session(self) -> None:
        """Renews the session forever. A heartbeat leaves in each interval, whatever became of the
        ones before: an answer that is late, or a search for the controller, holds none up."""
        interval_s = self._config.heartbeat_interval_ms / 1000
        broker = self._directory.meta.broker
        is_told = False
        while not self._is_stopping:
            trouble = self.metadata.trouble
            if trouble is not None:
                # Others take over: the replicas here would continue to lead with outdated metadata.
                if not is_told:
                    logger.error(
                        "broker %d cannot follow the metadata, and gives up its session until it "
                        "can: %s",
                        *(broker, trouble),
                    )
                is_told = True
                await asyncio.sleep(interval_s)
                continue
            is_told = False
            if self._registered_epoch is None:
                await self._try(self._register)
                if self._registered_epoch is None:
                    await self.metadata.changed.wait(RETRY_S)
                continue
            due_s = self._environment.clock.monotonic() + interval_s
            beat = self._environment.tasks.spawn(self._try(self._beat), "heartbeat")
            await asyncio.wait((beat,), timeout=interval_s)
            if beat.done() and not beat.result():
                # This broker hears of a controller that takes over by its writes.
                await self.metadata.changed.wait(RETRY_S)
            else:
                await asyncio.sleep(due_s - self._environment.clock.monotonic())

    async def _try(self, step: Callable[[], Awaitable[None]]) -> bool:
        """Returns whether a request that keeps the session succeeded. If there was no answer, looks
        for the controller meanwhile."""
        epoch = self.metadata.controller_epoch
        try:
            await step()
        except StaleBrokerError:
            self._registered_epoch = None
        except Exception as error:
            broker = self._directory.meta.broker
            if isinstance(error, RayqError):
                logger.debug("broker %d: %s", broker, error)
            else:  # A bug or a failing disk: logged as an error, but the session must be kept.
                logger.exception("broker %d could not renew its session", broker)
            if self._search is None or self._search.done():
                self._search = self._environment.tasks.spawn(
                    self._find_controller(epoch), "find-controller"
                )
            return False
        return True

    async def _beat(self) -> None:
        asked_s = self._environment.clock.monotonic()
        # No longer: a controller that does not answer may be gone, and another may be known.
        answer = await self._ask_controller(
            self._heartbeat(), self._session_s / 2, self._heartbeats
        )
        self.metadata.note_heard()
        if answer.last_index is not None:
            patience_s = self._config.access_patience_ms / 1000
            self.access.freshness.note_question(asked_s, patience_s, answer.last_index)
            self.access.freshness.note_applied(self.metadata.version)
        if self._division.take_shares(answer.quota_shares):
            self._replicas.tell_all()

    def _heartbeat(self) -> messages.BrokerHeartbeat:
        broker, objects = self._directory.meta.broker, self._objects
        demands = self._division.demands()
        if objects is None:
            return messages.BrokerHeartbeat(broker, self._incarnation, quota_demands=demands)
        return messages.BrokerHeartbeat(broker, self._incarnation, objects.trouble, demands)

    async def _register(self) -> None:
        meta = self._directory.meta
        host, port = self.endpoint
        request = messages.RegisterBroker(
            cluster_id=meta.cluster_id,
            broker=meta.broker,
            directory_id=meta.directory_id,
            start_counter=meta.start_counter,
            incarnation=self._incarnation,
            host=host,
            port=port,
            node_id=self._node_id,
            replicas_max=self._replicas_max,
            held=await self._replicas.held(),
        )
        try:
            answer = await self._ask_controller(request, self._session_s / 2)
        except StaleBrokerError as error:
            # This directory is an old copy: its promises and accepted records may be lost. Under a
            # new id it counts as empty, and has no vote until it has caught up.
            logger.error("broker %d: %s", meta.broker, error)
            self._directory.renew_directory_id()
            return
        self._registered_epoch = answer.controller_epoch

    async def _find_controller(self, epoch: int) -> None:
        """Asks the other brokers for the controller, in any order, until one of a later epoch than
        `epoch` is known here."""
        brokers = [at for at in self._known_brokers() if at != self.endpoint]
        self._environment.random.shuffle(brokers)
        for at in brokers:
            if self.metadata.controller_epoch > epoch:
                return  # It gives this broker one session to be heard.
            try:
                answer, _ = await self._pool.request(
                    *at, messages.FindController(), timeout_s=self._session_s / 2
                )
            except RayqError:
                continue
            if answer.host is not None and answer.port is not None:
                self.metadata.note_controller(answer.epoch, (answer.host, answer.port))

    async def _ask_controller(
        self,
        request: messages.Request[messages.ResponseT],
        timeout_s: float = FORWARD_TIMEOUT_S,
        pool: ConnectionPool | None = None,
    ) -> messages.ResponseT:
        """Asks the controller, over a connection of `pool` (default: that of all else). Raises
        ControllerUnavailableError if no controller is known, else the error that the controller
        answers."""
        hosted = self.controller_host.controller
        if hosted is not None:
            return cast(messages.ResponseT, await hosted.handle(request))
        controller = self.metadata.controller
        if controller is None or controller == self.endpoint:
            raise ControllerUnavailableError(
                "No controller is known at present; the voters elect one within seconds."
            )
        pool = self._pool if pool is None else pool
        answer, _ = await pool.request(*controller, request, timeout_s=timeout_s)
        return answer

    async def _append_audit(self, lines: list[bytes]) -> None:
        """Sends lines to the audit's coordinator. Raises RayqError."""
        topic = self.metadata.state.topic_named(AUDIT_TOPIC)
        if topic is None:
            raise UnknownTopicError(f"There is no topic {AUDIT_TOPIC} (yet).")
        partition = topic.partitions[0]
        value = partition.value
        leader = None if value.leader is None else partition.processes.get(value.leader)
        if leader is None:
            raise NotLeaderError(f"{AUDIT_TOPIC} has no leader now.")
        await self._pool.request(
            leader.host,
            leader.port,
            messages.AppendAudit(topic.topic_id, 0, value.leader_epoch, lines),
            timeout_s=FORWARD_TIMEOUT_S,
        )

    # --- requests ---------------------------------------------------------------------------

    def _handle(
        self, peer: Peer, request: messages.AnyRequest, payload: memoryview
    ) -> Result | Awaitable[Result]:
        if isinstance(request, messages.ToController):
            return self._forward(peer, request)
        if type(request) not in self.handlers:
            raise ProtocolError(f"A broker does not answer {type(request).__name__}.")
        return self.handlers.answer(self, peer, request, payload)

    async def _forward(self, peer: Peer, request: messages.AnyRequest) -> messages.Response:
        """Forwards a change to the controller. Only requests of clients and of this node's own
        replica processes are forwarded, so that two brokers that take each other for the controller
        cannot forward in circles. A request of a client names the client: the controller checks its
        rights again.
        """
        is_ours = peer.role == "client" or peer.broker == self._directory.meta.broker
        if self.controller_host.controller is None and not is_ours:
            raise NotControllerError(
                f"Broker {self._directory.meta.broker} does not host the controller."
            )
        units = partitions_changed(self.metadata.state, request)
        if not units or peer.throttle is None:
            return await self._forward_for(peer, request)
        # Taken before, so that of many requests at once not all go on the same savings.
        await peer.throttle.acquire("controller_mutation_rate", units)
        try:
            answer = await self._forward_for(peer, request)
        except BaseException:
            peer.throttle.use("controller_mutation_rate", -units)
            raise
        peer.throttle.use("controller_mutation_rate", 0)  # The client is told of a debt.
        return answer

    async def _forward_for(self, peer: Peer, request: messages.AnyRequest) -> messages.Response:
        try:
            return await self._ask_controller(with_origin(peer, request, self.metadata.state))
        except NotControllerError as error:
            raise ControllerUnavailableError(f"The controller is changing: {error}") from error

    @answers_peer(messages.Metadata)
    def _describe_cluster(
        self, peer: Peer, request: messages.Metadata, _: memoryview
    ) -> Awaitable[messages.MetadataResponse]:
        return self._answers.metadata(peer, request)

    @answers_peer(messages.DescribeQueues)
    def _describe_queues(
        self, peer: Peer, request: messages.DescribeQueues, _: memoryview
    ) -> Awaitable[messages.DescribeQueuesResponse]:
        return self._answers.queues(peer, request)

    @answers_peer(messages.DescribeQuotas)
    def _describe_quotas(
        self, peer: Peer, request: messages.DescribeQuotas, _: memoryview
    ) -> Awaitable[messages.DescribeQuotasResponse]:
        return self._answers.quotas(peer, request)

    @answers(messages.DescribeQuotaUse)
    def _describe_quota_use(
        self, request: messages.DescribeQuotaUse
    ) -> messages.DescribeQuotaUseResponse:
        return messages.DescribeQuotaUseResponse(self.quotas.uses_of(request.principal))

    @answers_peer(messages.DescribeObjectStore)
    def _describe_object_store(
        self, peer: Peer, _: messages.DescribeObjectStore, __: memoryview
    ) -> messages.DescribeObjectStoreResponse:
        return self._answers.object_store(peer, self._config.remote_storage_url, self._objects)

    @answers_peer(messages.DescribeMetrics)
    def _describe_metrics(
        self, peer: Peer, _: messages.DescribeMetrics, __: memoryview
    ) -> messages.DescribeMetricsResponse:
        samples = self._environment.metrics.collect()
        return messages.DescribeMetricsResponse(shown_samples(self._answers.view(peer), samples))

    @answers(messages.ReadChanges)
    def _read_changes(self, request: messages.ReadChanges) -> messages.ReadChangesResponse:
        return messages.ReadChangesResponse(
            self.metadata.state.changes_after(request.after_ms, request.changes_max)
        )

    @answers(messages.AttachObjectServer)
    def _attach_object_server(
        self, request: messages.AttachObjectServer
    ) -> messages.AttachObjectServerResponse:
        if self._objects is None:
            raise StaleBrokerError("This broker was started without remote_storage_url.")
        self._objects.attach(request)
        return messages.AttachObjectServerResponse(self.access.news(request.access_digest))

    @answers_peer(messages.AppendMetadata)
    def _append_metadata(
        self, _: Peer, request: messages.AppendMetadata, payload: memoryview
    ) -> Awaitable[messages.AppendMetadataResponse]:
        return self.metadata.append(request, payload)

    @answers_peer(messages.InstallMetadataSnapshot)
    def _install_metadata_snapshot(
        self, _: Peer, request: messages.InstallMetadataSnapshot, payload: memoryview
    ) -> Awaitable[messages.AppendMetadataResponse]:
        return self.metadata.install(request, payload)

    @answers_peer(messages.InstallMetadataSnapshotPart)
    def _install_metadata_snapshot_part(
        self, _: Peer, request: messages.InstallMetadataSnapshotPart, payload: memoryview
    ) -> Awaitable[messages.InstallMetadataSnapshotPartResponse]:
        return self.metadata.install_part(request, payload)

    @answers(messages.FindController)
    def _controller_known(self, _: messages.FindController) -> messages.FindControllerResponse:
        host, port = self.metadata.controller or (None, None)
        return messages.FindControllerResponse(
            self.metadata.controller_epoch, host, port, self.metadata.heard_ms_ago
        )

    @answers(messages.StopBroker)
    async def _stop_on_request(self, _: messages.StopBroker) -> messages.Done:
        await self.stop()

        async def close_soon() -> None:
            await asyncio.sleep(STOP_GRACE_S)  # The answer leaves first.
            self.close()

        self._environment.tasks.spawn(close_soon(), "close")
        return messages.Done()

    @answers(messages.AllocateProducerId)
    async def _allocate_producer_id(
        self, _: messages.AllocateProducerId
    ) -> messages.AllocateProducerIdResponse:
        return messages.AllocateProducerIdResponse(await self._producer_ids.draw(), 0)

    @answers(messages.DrawFamily)
    async def _draw_family(self, _: messages.DrawFamily) -> messages.DrawFamilyResponse:
        return messages.DrawFamilyResponse(await self._families.draw())

    async def _ask_for_block(self, *, of_families: bool) -> range:
        answer = await self._ask_controller(
            messages.AllocateProducerIds(
                self._directory.meta.broker, self._incarnation, of_families
            )
        )
        return range(answer.first, answer.first + answer.count)


def replicas_max(config: ClusterConfig, memory_bytes: int, *, processes_max: int) -> int:
    """Maximum number of replicas of a broker: as configured, else by its share of the node's
    memory, and by the number of files that its processes may open."""
    if config.max_replicas_per_broker is not None:
        return config.max_replicas_per_broker
    per_process = shares().replicas_max
    if config.replicas_per_process is not None:
        processes = max(1, memory_bytes // BYTES_PER_PROCESS)
        return processes * min(per_process, config.replicas_per_process)
    free_bytes = memory_bytes - processes_max * BYTES_PER_PROCESS
    return max(processes_max, min(free_bytes // BYTES_PER_REPLICA, processes_max * per_process))


Broker.handlers = HandlerTable(
    "broker",
    Broker,
    metadata=MetadataKeeper,
    _access_answers=AccessAnswers,
    _replicas=ReplicaSupervisor,
)
