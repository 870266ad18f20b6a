"""A broker's care for the replica processes of its node.

It starts a process for each replica that the metadata places here, hands each its assignments, and
watches them: a process that ends is noticed at once, one that is silent for a session is killed.
What it sees, it reports to the controller until the committed metadata shows it. These are rules 12
and 13 of docs/protocol.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rayq.actors.hosting import HostProcess, ReplicaHostSpec, Runtime
from rayq.actors.metadata.metadata_keeper import MetadataKeeper
from rayq.actors.signal import Signal
from rayq.config import ClusterConfig
from rayq.core.cluster_state import Partition, Topic
from rayq.core.metadata_records import (
    MetadataRecord,
    PartitionChanged,
    ReplicaGone,
    ReplicaRegistered,
    TopicConfigChanged,
    TopicDeleted,
)
from rayq.environment import Environment
from rayq.errors import (
    ControllerUnavailableError,
    RayqError,
    StaleBrokerError,
    StorageError,
)
from rayq.records import TopicIdPartition
from rayq.storage.data_directory import DataDirectory
from rayq.wire import messages
from rayq.wire.pool import ConnectionPool

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
STARTS_AT_ONCE_PER_NODE = 2
BACKOFF_S = 0.2
BACKOFF_MAX_S = 10.0
STABLE_S = 10.0
REPORT_INTERVAL_S = 0.1
TIDY_INTERVAL_S = 1.0
"""Looking through all directories costs too much to do at each report: it is done when something
happened after which one may go, and this often besides."""
STOP_TIMEOUT_S = 15.0
COPIES_MIN = 2
"""In-sync replicas elsewhere, before a log that is damaged is given up for a new copy."""



@dataclass(slots=True)
class _Host:
    """A replica process, from its start until it is known to be gone."""

    incarnation: str
    keys: set[TopicIdPartition]
    started_s: float
    process: HostProcess | None = None
    endpoint: tuple[str, int] | None = None
    """None until it has presented itself."""
    statuses: dict[TopicIdPartition, messages.ReplicaStatus] = field(default_factory=dict)
    let_go: set[TopicIdPartition] = field(default_factory=set)
    """What it was told to close. It never hosts these again: its incarnation stands for a log whose
    directory may be gone since."""
    heard_s: float = 0.0
    changed: Signal = field(default_factory=Signal)


class ReplicaSupervisor:
    """See the module. `ask_controller` sends a request to the controller; it raises RayqError."""

    def __init__(
        self,
        environment: Environment,
        config: ClusterConfig,
        runtime: Runtime,
        directory: DataDirectory,
        metadata: MetadataKeeper,
        pool: ConnectionPool,
        *,
        cluster_name: str,
        incarnation: str,
        ask_controller: messages.Ask,
    ) -> None:
        self._environment = environment
        self._config = config
        self._runtime = runtime
        self._directory = directory
        self._metadata = metadata
        self._pool = pool
        self._cluster_name = cluster_name
        self._incarnation = incarnation
        self._ask_controller = ask_controller
        self._broker = directory.meta.broker
        self._hosts: dict[str, _Host] = {}
        self._changed_at: dict[TopicIdPartition, int] = {}
        self._known_since = metadata.version
        """Whatever a process has not seen since may have changed: we do not know when."""
        self._failed: dict[TopicIdPartition, str] = {}
        """Replicas that stopped on a disk error: not started again by this broker process."""
        self._damaged: dict[TopicIdPartition, str] = {}
        """Those of them that start again because only their logs are damaged, by the incarnation
        that found it."""
        self._copy_anew_from_s: dict[TopicIdPartition, float] = {}
        """Of those that started again as they are, because the others did not have all: when it is
        looked at anew whether they have."""
        self._not_before_s: dict[TopicIdPartition, float] = {}
        self._backoff_s: dict[TopicIdPartition, float] = {}
        self._starting = 0
        self._tidy_from_s = environment.clock.monotonic()
        self._wake = Signal()
        self._is_stopping = False
        self._started_s = environment.clock.monotonic()

    async def run(self) -> None:
        """Reconciles for ever: processes against metadata, metadata against processes."""
        for path in self._directory.leftovers():
            self._environment.tasks.spawn(self._remove(path), f"remove {path}")
        interval_s = REPORT_INTERVAL_S
        last_s = self._environment.clock.monotonic()
        while not self._is_stopping:
            try:
                self._check_sessions(last_s)
                last_s = self._environment.clock.monotonic()
                if self._metadata.version > 0:
                    self._remove_unplaced()
                    self._start_missing()
                    await self._report()
                    await self._start_damaged_again()
            except RayqError as error:
                logger.debug("broker %d: %s", self._broker, error)
            except OSError as error:
                # One partition's directory fails: its replica says so itself, the others go on.
                logger.warning("broker %d cannot look at its disk: %s", self._broker, error)
            await self._wake.wait(interval_s)

    def wake(self) -> None:
        self._wake.notify()

    @property
    def failed_count(self) -> int:
        """Replicas that stopped on a disk error."""
        return len(self._failed)

    def on_metadata(self, records: Sequence[MetadataRecord] | None) -> None:
        """Committed records were applied (None: a snapshot was)."""
        version = self._metadata.version
        touched: set[TopicIdPartition] = set()
        if records is None:
            touched.update(self._placed())
        for record in records or ():
            match record:
                case PartitionChanged() | ReplicaRegistered() | ReplicaGone():
                    touched.add((record.topic_id, record.partition))
                case TopicConfigChanged():
                    touched.update(key for key in self._placed() if key[0] == record.topic_id)
                case TopicDeleted():
                    touched.update(
                        key for host in self._hosts.values() for key in host.keys
                        if key[0] == record.topic_id
                    )
        for key in touched:
            self._changed_at[key] = version
        for host in self._hosts.values():
            if host.keys & touched:
                host.changed.notify()
        self._tidy_soon()
        self._wake.notify()

    def _tidy_soon(self) -> None:
        self._tidy_from_s = self._environment.clock.monotonic()

    def held(self) -> list[TopicIdPartition]:
        """The partitions whose directories replica processes hold: they outlived the broker's
        process before."""
        held = []
        for meta, path in self._directory.partitions():
            if DataDirectory.partition_holder(self._environment.disk, path) is not None:
                held.append((meta.topic_id, meta.partition))
        return held

    # --- what processes ask -----------------------------------------------------------------

    def attach(self, request: messages.AttachReplicaHost) -> messages.AttachReplicaHostResponse:
        """A replica process presents itself: one that we started, or that outlived the broker
        process before us."""
        host = self._hosts.get(request.incarnation)
        now_s = self._environment.clock.monotonic()
        if host is None:
            process = self._runtime.adopt(request.pid, request.pid_start_time)
            if process is None or self._is_stopping:
                raise StaleBrokerError(f"No process {request.pid} runs on this node.")
            keys = {(status.topic_id, status.partition) for status in request.replicas}
            if any(keys & one.keys for one in self._hosts.values()):
                process.kill()  # It held no directory when its successor was started.
                raise StaleBrokerError("Another process was started for these partitions.")
            host = _Host(request.incarnation, keys, now_s, process)
            self._hosts[request.incarnation] = host
            self._watch(host)
        elif host.process is None:
            host.process = self._runtime.adopt(request.pid, request.pid_start_time)
        if host.endpoint is None:
            self._starting = max(0, self._starting - 1)
        host.endpoint = (request.host, request.port)
        host.let_go.update(request.let_go)
        self._note(host, request.replicas)
        self._wake.notify()
        return messages.AttachReplicaHostResponse(self._directory.meta.cluster_id)

    async def heartbeat(
        self, request: messages.ReplicaHostHeartbeat
    ) -> messages.ReplicaHostHeartbeatResponse:
        """Held until an assignment changes, at most `wait_ms`. Raises StaleBrokerError, and
        StorageError while this broker cannot follow the metadata: then nobody gets a lease."""
        host = self._hosts.get(request.incarnation)
        if host is None or host.endpoint is None:
            raise StaleBrokerError("This broker process does not know you: present yourself.")
        if self._note(host, request.replicas):
            self._wake.notify()
        known = {(status.topic_id, status.partition) for status in request.replicas}
        deadline_s = self._environment.clock.monotonic() + request.wait_ms / 1000
        while True:
            # A broker that was just started may know less than its processes do: it waits.
            version = self._metadata.version
            assignments: list[messages.PartitionAssignment] = []
            removed: list[TopicIdPartition] = []
            if version >= request.version:
                for key in host.keys | known:
                    changed_at = self._changed_at.get(key, self._known_since)
                    is_new = key not in known or changed_at > request.version
                    is_hosted = key in host.keys and key not in host.let_go
                    found = self._find(key) if is_hosted else None
                    if found is None:
                        if key in known:
                            removed.append(key)
                            host.let_go.add(key)
                    elif is_new:
                        assignments.append(self._assignment(key[1], *found))
            remaining_s = deadline_s - self._environment.clock.monotonic()
            if assignments or removed or remaining_s <= 0:
                break
            await host.changed.wait(remaining_s)
        host.heard_s = self._environment.clock.monotonic()
        if self._metadata.trouble is not None:
            raise StorageError(
                f"Broker {self._broker} cannot follow the metadata: {self._metadata.trouble}"
            )
        return messages.ReplicaHostHeartbeatResponse(
            max(version, request.version), assignments, removed
        )

    def _note(self, host: _Host, statuses: Sequence[messages.ReplicaStatus]) -> bool:
        """Whether something is new."""
        host.heard_s = self._environment.clock.monotonic()
        before = host.statuses
        host.statuses = {(status.topic_id, status.partition): status for status in statuses}
        is_new = before.keys() != host.statuses.keys()
        for key, status in host.statuses.items():
            known = before.get(key)
            is_open = status.flushed >= 0
            if known is None or (known.flushed >= 0) != is_open:
                is_new = True
            if status.failure is not None and key not in self._failed:
                logger.error("replica %s of broker %d: %s", key, self._broker, status.failure)
                self._failed[key] = status.failure
                if status.is_damaged:
                    self._damaged[key] = host.incarnation
                is_new = True
        if is_new:
            self._tidy_soon()
        return is_new

    # --- metadata against processes ---------------------------------------------------------

    def _placed(self) -> Iterator[TopicIdPartition]:
        for topic, number, _ in self._metadata.state.replicas_on(self._broker):
            yield topic.topic_id, number

    def _find(self, key: TopicIdPartition) -> tuple[Topic, Partition] | None:
        topic = self._metadata.state.topics.get(key[0])
        partition = None if topic is None else topic.partitions.get(key[1])
        if topic is None or partition is None or self._broker not in partition.value.replicas:
            return None
        return topic, partition

    def _assignment(
        self, number: int, topic: Topic, partition: Partition
    ) -> messages.PartitionAssignment:
        value = partition.value
        leader = None if value.leader is None else partition.processes.get(value.leader)
        return messages.PartitionAssignment(
            topic.name,
            topic.topic_id,
            number,
            topic.whole_config,
            value.leader,
            value.leader_incarnation,
            None if leader is None else leader.host,
            None if leader is None else leader.port,
            value.leader_epoch,
            value.partition_epoch,
            value.last_unclean_epoch,
            [(member.broker, member.incarnation) for member in value.isr],
            [
                (
                    broker,
                    None
                    if broker not in partition.processes
                    else partition.processes[broker].incarnation,
                )
                for broker in value.replicas
            ],
            value.replication_factor,
            value.throttle_bytes_per_s if self._broker in value.adding else None,
        )

    def _start_missing(self) -> None:
        now_s = self._environment.clock.monotonic()
        hosted = {key for host in self._hosts.values() for key in host.keys}
        nodes = {
            number: one.registration.node_id
            for number, one in self._metadata.state.brokers.items()
            if one.live
        }
        neighbours = sum(node == nodes.get(self._broker) for node in nodes.values())
        starts_max = max(1, STARTS_AT_ONCE_PER_NODE // max(1, neighbours))
        for key in self._placed():
            if key in hosted or key in self._failed or self._not_before_s.get(key, 0.0) > now_s:
                continue
            if not self._is_free(key, now_s):
                continue
            shared = self._host_with_room(key)
            if shared is not None:
                shared.keys.add(key)
                shared.changed.notify()
                continue
            if self._starting >= starts_max:
                return
            self._start_host(key, now_s)

    def _host_with_room(self, key: TopicIdPartition) -> _Host | None:
        for host in self._hosts.values():
            if len(host.keys) < self._config.replicas_per_process and key not in host.let_go:
                return host
        return None

    def _is_free(self, key: TopicIdPartition, now_s: float) -> bool:
        """Whether no process holds the partition's directory. One that an earlier broker process
        started has a session to present itself, then it is killed."""
        found = self._find(key)
        assert found is not None
        path = self._directory.partition_path(found[0].name, key[1])
        holder = DataDirectory.partition_holder(self._environment.disk, path)
        if holder is None:
            owner = DataDirectory.partition_topic_id(self._environment.disk, path)
            if owner is None or owner == key[0]:
                return True
            if owner in self._metadata.state.topics or self._is_hosted((owner, key[1])):
                return False
            # Of a deleted topic of this name.
            self._directory.quarantine(path)
            return True
        if holder.incarnation in self._hosts:
            return False  # It was told to let go, and does when its last flush ends.
        if now_s - self._started_s > self._config.session_timeout_ms / 1000:
            assert holder.start_time is not None, holder
            process = self._runtime.adopt(holder.pid, holder.start_time)
            if process is not None:
                logger.warning("process %d holds %s and is silent: killing it", holder.pid, path)
                process.kill()
                self._not_before_s[key] = now_s + BACKOFF_S  # It needs a moment to go.
        return False

    def _is_hosted(self, key: TopicIdPartition) -> bool:
        """Whether a process has the partition, or was not yet heard to have let go of it: it may
        be about to open the directory."""
        return any(key in host.keys for host in self._hosts.values())

    def _start_host(self, key: TopicIdPartition, now_s: float) -> None:
        found = self._find(key)
        assert found is not None
        spec = ReplicaHostSpec(
            self._cluster_name,
            self._broker,
            self._environment.new_id(),
            self._directory.path,
            (f"{found[0].name}-{key[1]}",),
        )
        host = _Host(spec.incarnation, {key}, now_s, heard_s=now_s)
        self._hosts[spec.incarnation] = host
        self._starting += 1
        self._environment.tasks.spawn(self._start(host, spec), f"start {spec.names[0]}")

    async def _start(self, host: _Host, spec: ReplicaHostSpec) -> None:
        try:
            host.process = await self._runtime.start_replica_host(spec)
        except RayqError as error:
            logger.error("a process for %s could not be started: %s", spec.names, error)
            self._gone(host, str(error))
            return
        self._watch(host)

    def _watch(self, host: _Host) -> None:
        async def watch() -> None:
            assert host.process is not None
            self._gone(host, await host.process.wait_dead())

        self._environment.tasks.spawn(watch(), f"watch {host.incarnation[:8]}")

    def _gone(self, host: _Host, reason: str) -> None:
        if self._hosts.get(host.incarnation) is not host:
            return
        del self._hosts[host.incarnation]
        if host.endpoint is None:
            self._starting = max(0, self._starting - 1)
        if self._is_stopping:
            return
        now_s = self._environment.clock.monotonic()
        for key in host.keys:
            was_stable = now_s - host.started_s > STABLE_S
            backoff_s = 0.0 if was_stable else min(
                BACKOFF_MAX_S, max(BACKOFF_S, 2 * self._backoff_s.get(key, 0.0))
            )
            self._backoff_s[key] = backoff_s
            self._not_before_s[key] = now_s + backoff_s
        if host.keys:
            logger.warning("replica process of broker %d is gone: %s", self._broker, reason)
        host.changed.notify()
        self._tidy_soon()
        self._wake.notify()

    def _check_sessions(self, last_s: float) -> None:
        """Kills what is silent. If this process itself was late, everyone gets that much longer."""
        now_s = self._environment.clock.monotonic()
        late_s = max(0.0, now_s - last_s - REPORT_INTERVAL_S)
        session_s = self._config.session_timeout_ms / 1000
        for host in list(self._hosts.values()):
            if late_s > REPORT_INTERVAL_S:
                host.heard_s += late_s
            limit_s = START_TIMEOUT_S if host.endpoint is None else session_s
            if now_s - host.heard_s > limit_s and host.process is not None:
                logger.warning(
                    "replica process %s of broker %d was silent for %.1f s: killing it",
                    host.incarnation[:8],
                    self._broker,
                    now_s - host.heard_s,
                )
                host.process.kill()

    def _remove_unplaced(self) -> None:
        """Lets go of the replicas of deleted topics and of those that were moved away, then removes
        their files."""
        for host in list(self._hosts.values()):
            unplaced = [key for key in host.keys if key in host.let_go or self._find(key) is None]
            for key in unplaced:
                if key not in host.statuses:
                    host.keys.discard(key)
                else:
                    host.changed.notify()
            if not host.keys and host.process is not None:
                host.process.kill()
        now_s = self._environment.clock.monotonic()
        if now_s < self._tidy_from_s or not self._may_tidy():
            return
        self._tidy_from_s = now_s + TIDY_INTERVAL_S
        for meta, path in self._directory.partitions():
            key = (meta.topic_id, meta.partition)
            if self._find(key) is not None or self._is_hosted(key):
                continue
            if DataDirectory.partition_holder(self._environment.disk, path) is not None:
                continue
            if self._may_remove(key):
                logger.info("broker %d removes %s, which is not placed here", self._broker, path)
                aside = self._directory.quarantine(path, to_remove=True)
                self._changed_at.pop(key, None)
                self._failed.pop(key, None)
                self._backoff_s.pop(key, None)
                self._environment.tasks.spawn(self._remove(aside), f"remove {aside}")
            elif key[0] not in self._metadata.state.topics:
                logger.warning("%s belongs to no topic of this cluster: put aside", path)
                self._directory.quarantine(path)

    def _may_remove(self, key: TopicIdPartition) -> bool:
        """Whether the files of a partition that is not placed here may go: its topic was deleted
        before our eyes, or it was moved away and has what it needs elsewhere.

        Only asked when `_may_tidy`: metadata from before this process started may show a placement
        of long ago. Metadata that is behind does no harm then: should the partition be placed here
        again by now, nobody counts on what is here before this process says so, on newer metadata
        (`placed_epoch`), of a process that it starts after this.
        """
        topic = self._metadata.state.topics.get(key[0])
        if topic is None:
            return key in self._changed_at
        partition = topic.partitions.get(key[1])
        return (
            partition is not None
            and partition.value.leader is not None
            and len(partition.value.isr) >= topic.min_insync(partition.value)
        )

    async def _remove(self, path: str) -> None:
        try:
            await self._environment.threads.run(self._environment.disk.remove_tree, path)
        except OSError as error:  # The next start tries again.
            logger.warning("%s could not be removed: %s", path, error)

    def _may_tidy(self) -> bool:
        """Whether the metadata here is known to be current: it holds our registration."""
        known = self._metadata.state.brokers.get(self._broker)
        return known is not None and known.registration.incarnation == self._incarnation

    # --- processes against metadata ---------------------------------------------------------

    async def _report(self) -> None:
        """Tells the controller what the metadata does not show yet."""
        if not self._may_tidy():
            return
        register: list[messages.ReplicaRegistration] = []
        failed: list[tuple[str, int, str]] = []
        by_key = {
            key: host
            for host in self._hosts.values()
            for key in host.statuses
            if key not in host.let_go
        }
        for topic, number, partition in self._metadata.state.replicas_on(self._broker):
            key = (topic.topic_id, number)
            known = partition.processes.get(self._broker)
            host = by_key.get(key)
            status = None if host is None else host.statuses[key]
            if known is not None and self._is_gone(key, known.incarnation):
                failed.append((*key, known.incarnation))
            if (
                host is not None
                and host.endpoint is not None
                and status is not None
                and status.failure is None
                and status.flushed >= 0
                and (known is None or known.incarnation != host.incarnation)
            ):
                register.append(
                    messages.ReplicaRegistration(
                        topic.topic_id,
                        number,
                        host.incarnation,
                        *host.endpoint,
                        status.last_epoch,
                        status.flushed,
                        partition.value.partition_epoch,
                    )
                )
        if failed:
            await self._tell(
                messages.ReplicasFailed(
                    self._broker, self._incarnation, failed, "the process or its disk failed"
                )
            )
        if register:
            await self._tell(
                messages.RegisterReplicas(self._broker, self._incarnation, register)
            )

    def _is_gone(self, key: TopicIdPartition, incarnation: str) -> bool:
        """Whether a registered process is known not to serve this partition any more."""
        host = self._hosts.get(incarnation)
        if host is not None:
            return key in self._failed or key in host.let_go
        found = self._find(key)
        assert found is not None
        path = self._directory.partition_path(found[0].name, key[1])
        if DataDirectory.partition_holder(self._environment.disk, path) is None:
            return True
        # Someone holds the directory: a process of ours that replaced it, or one still to come.
        return any(key in one.keys for one in self._hosts.values())

    async def _start_damaged_again(self) -> None:
        """A replica whose log is damaged is copied anew from the others, where they have all of it.
        Where they may not, it starts again as it is: most of it is sound, and what is damaged in
        the others' logs may be sound here."""
        now_s = self._environment.clock.monotonic()
        self._give_up_damaged(now_s)
        for key, incarnation in list(self._damaged.items()):
            host = self._hosts.get(incarnation)
            if host is not None and key in host.keys and key not in host.let_go:
                host.let_go.add(key)
                host.changed.notify()
            if self._is_hosted(key) or self._not_before_s.get(key, 0.0) > now_s:
                continue
            # From now on nobody counts on that log: see `_may_copy_anew`.
            await self._tell(
                messages.ReplicasFailed(
                    self._broker, self._incarnation, [(*key, incarnation)], "its log is damaged"
                )
            )
            backoff_s = min(BACKOFF_MAX_S, max(BACKOFF_S, 2 * self._backoff_s.get(key, 0.0)))
            found = self._find(key)
            if found is not None:
                path = self._directory.partition_path(found[0].name, key[1])
                disk = self._environment.disk
                if DataDirectory.partition_holder(disk, path) is not None:
                    continue
                if self._may_copy_anew(*found) and (
                    DataDirectory.partition_topic_id(disk, path) in (None, key[0])
                ):
                    logger.warning("%s is damaged: it is copied anew from its leader", path)
                    aside = self._directory.quarantine(path, to_remove=True)
                    self._environment.tasks.spawn(self._remove(aside), f"remove {aside}")
                else:
                    # At another moment on each broker: two that let go at once would both be
                    # refused.
                    spread = 2 + 2 * self._environment.random.random()
                    self._copy_anew_from_s[key] = now_s + spread * backoff_s
            del self._damaged[key]
            self._failed.pop(key, None)
            self._backoff_s[key] = backoff_s
            self._not_before_s[key] = now_s + backoff_s

    def _give_up_damaged(self, now_s: float) -> None:
        """A log that is known to be damaged, but had to start again as it is, is given up for a new
        copy as soon as the others have all of it. It may take long until somebody reads just there
        and finds the damage anew."""
        for key, from_s in list(self._copy_anew_from_s.items()):
            found = self._find(key)
            if found is None or key in self._damaged:
                del self._copy_anew_from_s[key]
            elif now_s >= from_s and self._have_others_all(*found):
                process = found[1].processes.get(self._broker)
                if process is not None and process.incarnation in self._hosts:
                    del self._copy_anew_from_s[key]
                    self._damaged[key] = process.incarnation
                    self._failed[key] = "its log is damaged"

    def _have_others_all(self, topic: Topic, partition: Partition) -> bool:
        """Whether enough replicas of other brokers are in sync for one here to be copied anew."""
        value = partition.value
        others = sum(member.broker != self._broker for member in value.isr)
        return value.leader is not None and others >= max(topic.min_insync(value), COPIES_MIN)

    def _may_copy_anew(self, topic: Topic, partition: Partition) -> bool:
        """Whether a log that is damaged here may go: it counts for nothing in metadata from after
        the controller was told that its replica is gone, and two others at least have all that was
        acknowledged. (What one of these has damaged, the other has.)"""
        value = partition.value
        return (
            self._have_others_all(topic, partition)
            and self._broker not in partition.processes
            and all(one.broker != self._broker for one in (*value.isr, *value.elr))
        )

    async def _tell(self, request: messages.AnyRequest) -> None:
        """Returns when the metadata here shows the change. Raises RayqError."""
        answer = await self._ask_controller(request)
        is_shown = await self._metadata.changed.wait_until(
            lambda: self._metadata.version >= answer.version,
            self._config.session_timeout_ms / 1000,
        )
        if not is_shown:
            raise ControllerUnavailableError(
                f"Version {answer.version} of the metadata has not come yet."
            )

    # --- stopping ---------------------------------------------------------------------------

    async def stop(self) -> list[messages.ReplicaRegistration]:
        """Stops every replica process and returns where each log ended."""
        self._is_stopping = True
        self._wake.notify()
        hosts = list(self._hosts.values())
        ends = await asyncio.gather(*(self._stop_host(host) for host in hosts))
        return [end for some in ends for end in some]

    async def _stop_host(self, host: _Host) -> list[messages.ReplicaRegistration]:
        endpoint = host.endpoint
        ends: list[messages.ReplicaRegistration] = []
        # One that hosts nothing any more has no ends to tell; it was killed a moment ago.
        if endpoint is not None and host.keys:
            try:
                answer, _ = await self._pool.request(
                    *endpoint, messages.StopReplicaHost(), timeout_s=STOP_TIMEOUT_S
                )
            except RayqError as error:
                logger.warning("a replica process did not stop by itself: %s", error)
            else:
                ends = [
                    messages.ReplicaRegistration(
                        status.topic_id,
                        status.partition,
                        host.incarnation,
                        *endpoint,
                        status.last_epoch,
                        status.flushed,
                    )
                    for status in answer.replicas
                    if status.failure is None and status.flushed >= 0
                ]
                if host.process is not None:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(host.process.wait_dead(), STOP_TIMEOUT_S)
        if host.process is not None:  # One that was not asked has no open log.
            host.process.kill()
        return ends
