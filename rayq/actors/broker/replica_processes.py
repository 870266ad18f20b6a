"""The replica processes of a broker's node: started, watched, and stopped.

A process that exits is noticed at once; one that is silent for a session is killed
(docs/protocol.md, rule 13). `ReplicaSupervisor` decides which replicas they host.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rayq import messages
from rayq.actors.hosting import HostProcess, ReplicaHostSpec, Runtime
from rayq.actors.listening_clock import ListeningClock
from rayq.actors.signal import Signal
from rayq.backoff import Backoff
from rayq.config import ClusterConfig
from rayq.environment import Address, Environment
from rayq.errors import RayqError, StaleBrokerError
from rayq.records import TopicIdPartition
from rayq.wire.pool import ConnectionPool

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
BACKOFF_S = 0.2
BACKOFF_MAX_S = 10.0
STABLE_S = 10.0
"""Uptime after which a process that ended may be started again at once."""
STOP_TIMEOUT_S = 15.0


@dataclass(slots=True)
class ReplicaProcess:
    """A replica process, from the moment it is wanted until it is known to be gone."""

    incarnation: str
    started_s: float
    keys: set[TopicIdPartition] = field(default_factory=set)
    """The partitions that it has, or has not yet confirmed that it let go of. `ReplicaProcesses`
    changes them, since it has an index."""
    names: list[str] = field(default_factory=list)
    """The partitions that it starts with, for operators that look at the processes."""
    process: HostProcess | None = None
    endpoint: Address | None = None
    """None until it has presented itself."""
    statuses: dict[TopicIdPartition, messages.ReplicaStatus] = field(default_factory=dict)
    session: int = 0
    """Number of times that it has presented itself to this broker process."""
    let_go: set[TopicIdPartition] = field(default_factory=set)
    """Partitions that it was told to close. It never hosts these again: its incarnation stands for
    a log whose directory may be gone since."""
    told_to_open: set[TopicIdPartition] = field(default_factory=set)
    """Partitions that it was told to open after it had sent its last report: it may have them."""
    told_to_close: set[TopicIdPartition] = field(default_factory=set)
    """Partitions that it was told to close and still has: a thread of it works on the directory."""
    remote_backlog_bytes: int = 0
    """Bytes on its disk that wait to be uploaded to the object store."""
    heard_s: float = 0.0
    changed: Signal = field(default_factory=Signal)

    def may_have(self, key: TopicIdPartition) -> bool:
        """Returns whether the process may have the partition now, or get it any moment."""
        return key in self.statuses or key in self.told_to_open

    def forget_deleted(self, topics: Container[str]) -> list[str]:
        """Forgets the partitions it let go of topics that are no longer among `topics`: their ids
        do not come again. Without this a process would remember every topic that ever existed.
        Returns the ids."""
        gone = {topic_id for topic_id, _ in self.let_go if topic_id not in topics}
        if gone:
            self.let_go = {key for key in self.let_go if key[0] not in gone}
        return sorted(gone)

    def registration(
        self, endpoint: Address, status: messages.ReplicaStatus, partition_epoch: int = 0
    ) -> messages.ReplicaRegistration:
        """The registration of one of the process's replicas with the controller."""
        return messages.ReplicaRegistration(
            topic_id=status.topic_id,
            partition=status.partition,
            incarnation=self.incarnation,
            host=endpoint[0],
            port=endpoint[1],
            last_epoch=status.last_epoch,
            flushed=status.flushed,
            partition_epoch=partition_epoch,
        )


class ReplicaProcesses:
    """See the module. `on_gone(partitions)` is called when a process with these has ended."""

    def __init__(
        self,
        environment: Environment,
        config: ClusterConfig,
        runtime: Runtime,
        pool: ConnectionPool,
        *,
        cluster_name: str,
        broker: int,
        data_path: str,
        listening: ListeningClock,
        on_gone: Callable[[Iterable[TopicIdPartition]], None],
    ) -> None:
        self._environment = environment
        self._config = config
        self._runtime = runtime
        self._pool = pool
        self._cluster_name = cluster_name
        self._broker = broker
        self._data_path = data_path
        self._listening = listening
        self._on_gone = on_gone
        self._hosts: dict[str, ReplicaProcess] = {}
        self._by_key: dict[TopicIdPartition, list[ReplicaProcess]] = {}
        """The processes that have each partition: there may be as many processes as partitions, so
        nothing that is done for each partition walks over all processes."""
        self.remote_backlog_bytes = 0
        """Bytes on this node's disks that wait to be uploaded to the object store."""
        self._waiting: list[ReplicaProcess] = []
        """Processes among them that are not being started yet."""
        self._not_before_s: dict[TopicIdPartition, float] = {}
        self._backoffs: dict[TopicIdPartition, Backoff] = {}
        self.starting = 0
        """Number of processes that were started and have not presented themselves yet."""
        self._is_stopping = False

    @property
    def count(self) -> int:
        """Number of processes."""
        return len(self._hosts)

    def __iter__(self) -> Iterator[ReplicaProcess]:
        return iter(list(self._hosts.values()))

    def __contains__(self, incarnation: str | None) -> bool:
        return incarnation in self._hosts

    def get(self, incarnation: str) -> ReplicaProcess | None:
        return self._hosts.get(incarnation)

    def hosting(self, key: TopicIdPartition) -> Sequence[ReplicaProcess]:
        """The processes that have the partition, or have not yet confirmed that they let go of it:
        they may be about to open the directory."""
        return tuple(self._by_key.get(key, ()))

    def is_hosted(self, key: TopicIdPartition) -> bool:
        """Returns whether there is a process with the partition: see `hosting`."""
        return key in self._by_key

    def serving(self, key: TopicIdPartition) -> ReplicaProcess | None:
        """The process that said last that it has the partition, unless it was told to let go."""
        found = None
        for host in self.hosting(key):
            if key in host.statuses and key not in host.let_go:
                found = host
        return found

    def take_away(self, host: ReplicaProcess, key: TopicIdPartition) -> None:
        """Takes note that the process does not have the partition any more."""
        host.keys.discard(key)
        self._unindex(host, key)

    def _unindex(self, host: ReplicaProcess, key: TopicIdPartition) -> None:
        hosts = self._by_key[key]
        hosts.remove(host)
        if not hosts:
            del self._by_key[key]

    def note_remote_backlog(self, host: ReplicaProcess, backlog_bytes: int) -> None:
        """Takes note of how much of a process's logs waits to be uploaded."""
        self.remote_backlog_bytes += backlog_bytes - host.remote_backlog_bytes
        host.remote_backlog_bytes = backlog_bytes

    # --- starting ---------------------------------------------------------------------------

    def assign(self, partitions: Mapping[TopicIdPartition, str]) -> None:
        """Gives each partition to a process that has room for it, or else to a new one, which
        `start_waiting` starts. Their names are for operators that look at the processes."""
        of_topic = {
            host.incarnation: Counter(topic_id for topic_id, _ in host.keys) for host in self
        }
        per_process = self._config.replicas_per_process
        candidates = [
            host for host in self if per_process is None or len(host.keys) < per_process
        ]
        for key, name in partitions.items():
            host = self._with_room(key, candidates, of_topic)
            if host is None:
                now_s = self._environment.clock.monotonic()
                host = ReplicaProcess(self._environment.new_id(), now_s)
                self._hosts[host.incarnation] = host
                self._waiting.append(host)
                candidates.append(host)
                of_topic[host.incarnation] = Counter()
            host.keys.add(key)
            self._by_key.setdefault(key, []).append(host)
            if len(host.keys) == per_process:
                candidates.remove(host)
            of_topic[host.incarnation][key[0]] += 1
            if host.endpoint is None:
                host.names.append(name)
            host.changed.notify()

    def _with_room(
        self,
        key: TopicIdPartition,
        candidates: Sequence[ReplicaProcess],
        of_topic: Mapping[str, Counter[str]],
    ) -> ReplicaProcess | None:
        """One of the processes that may host one more partition, and never hosted this one. Unless
        the config says otherwise, each of the first partitions gets its own process, and a further
        one joins the process that has the fewest of its topic, and the fewest in total: a process
        that dies should take few leaders of a topic along. `of_topic` counts the partitions of each
        process."""
        may_host = (host for host in candidates if key not in host.let_go)
        if self._config.replicas_per_process is not None:
            return next(may_host, None)
        hosts = list(may_host)
        if len(hosts) < self._runtime.processes_max:
            return None
        return min(
            hosts, key=lambda host: (of_topic[host.incarnation][key[0]], len(host.keys))
        )

    def start_waiting(self, starting_max: int) -> None:
        """Starts the processes that are wanted, `starting_max` at a time."""
        while self._waiting and self.starting < starting_max:
            host = self._waiting.pop(0)
            if not host.keys:  # Its topic was deleted meanwhile.
                del self._hosts[host.incarnation]
                continue
            spec = ReplicaHostSpec(
                cluster_name=self._cluster_name,
                broker=self._broker,
                incarnation=host.incarnation,
                data_path=self._data_path,
                names=tuple(host.names),
            )
            host.started_s = self._environment.clock.monotonic()
            host.heard_s = self._listening.now_s()
            self.starting += 1
            self._environment.tasks.spawn(self._start(host, spec), f"start {spec.names[0]}")

    async def _start(self, host: ReplicaProcess, spec: ReplicaHostSpec) -> None:
        try:
            host.process = await self._runtime.start_replica_host(spec)
        except RayqError as error:
            logger.error("a process for %s could not be started: %s", spec.names, error)
            self._gone(host, str(error))
            return
        self._watch(host)

    def attach(self, request: messages.AttachReplicaHost) -> ReplicaProcess:
        """Takes a process that presents itself: one that was started here, or that outlived the
        previous broker process. Raises StaleBrokerError."""
        host = self._hosts.get(request.incarnation)
        if host is None:
            process = self._runtime.adopt(request.pid, request.pid_start_time)
            if process is None or self._is_stopping:
                raise StaleBrokerError(f"No process {request.pid} runs on this node.")
            keys = {(status.topic_id, status.partition) for status in request.replicas}
            if not keys.isdisjoint(self._by_key):
                process.kill()  # It held no directory when the other process was started.
                raise StaleBrokerError("Another process was started for these partitions.")
            now_s = self._environment.clock.monotonic()
            host = ReplicaProcess(request.incarnation, now_s, keys, process=process)
            self._hosts[request.incarnation] = host
            for key in keys:
                self._by_key[key] = [host]
            self._watch(host)
        elif host.process is None:
            host.process = self._runtime.adopt(request.pid, request.pid_start_time)
        if host.endpoint is None:
            self.starting = max(0, self.starting - 1)
        host.session += 1
        host.endpoint = (request.host, request.port)
        host.let_go.update(request.let_go)
        host.told_to_open.clear()
        host.told_to_close.clear()
        return host

    # --- watching ---------------------------------------------------------------------------

    def _watch(self, host: ReplicaProcess) -> None:
        async def watch() -> None:
            assert host.process is not None
            self._gone(host, await host.process.wait_dead())

        self._environment.tasks.spawn(watch(), f"watch {host.incarnation[:8]}")

    def _gone(self, host: ReplicaProcess, reason: str) -> None:
        if self._hosts.get(host.incarnation) is not host:
            return
        del self._hosts[host.incarnation]
        for key in host.keys:
            self._unindex(host, key)
        self.note_remote_backlog(host, 0)
        if host.endpoint is None:
            self.starting = max(0, self.starting - 1)
        if self._is_stopping:
            return
        now_s = self._environment.clock.monotonic()
        was_stable = now_s - host.started_s > STABLE_S
        for key in host.keys:
            if was_stable:
                self.forget(key)
            else:
                self.back_off(key, now_s)
        if host.keys:
            logger.warning("replica process of broker %d is gone: %s", self._broker, reason)
        host.changed.notify()
        self._on_gone(sorted(host.keys))

    async def end_silent(self) -> None:
        """Kills the processes that were silent for a session, once all that has arrived is read."""
        if self._silent():
            await self._listening.read_arrived()
        for host, process, silent_s in self._silent():
            logger.warning(
                "replica process %s of broker %d was silent for %.1f s: killing it",
                *(host.incarnation[:8], self._broker, silent_s),
            )
            process.kill()

    def _silent(self) -> list[tuple[ReplicaProcess, HostProcess, float]]:
        """The processes that were silent for too long, each with that time in seconds."""
        now_s = self._listening.now_s()
        session_s = self._config.session_timeout_ms / 1000
        silent = []
        for host in self._hosts.values():
            limit_s = START_TIMEOUT_S if host.endpoint is None else session_s
            if host.process is not None and now_s - host.heard_s > limit_s:
                silent.append((host, host.process, now_s - host.heard_s))
        return silent

    # --- backing off ------------------------------------------------------------------------

    def may_start(self, key: TopicIdPartition, now_s: float) -> bool:
        """Returns whether the partition's process ended long enough ago."""
        return self._not_before_s.get(key, 0.0) <= now_s

    def back_off(self, key: TopicIdPartition, now_s: float) -> float:
        """Pauses before the next start of the partition's process. Returns the pause, in
        seconds."""
        if key not in self._backoffs:
            self._backoffs[key] = Backoff(self._environment, BACKOFF_S, BACKOFF_MAX_S)
        backoff_s = self._backoffs[key].next_s()
        self._not_before_s[key] = now_s + backoff_s
        return backoff_s

    def forget(self, key: TopicIdPartition) -> None:
        """Forgets earlier ends of the partition's process: its files are gone, or it ran long
        enough."""
        self._backoffs.pop(key, None)
        self._not_before_s.pop(key, None)

    def kill_holder(self, key: TopicIdPartition, pid: int, start_time: int, now_s: float) -> bool:
        """Kills the process that holds a partition's directory and did not present itself for a
        session. False: that process is gone already."""
        process = self._runtime.adopt(pid, start_time)
        if process is None:
            return False
        process.kill()
        self._not_before_s[key] = now_s + BACKOFF_S  # It needs a moment to exit.
        return True

    # --- stopping ---------------------------------------------------------------------------

    async def stop(self) -> list[messages.ReplicaRegistration]:
        """Stops every process and returns where each log ended."""
        self._is_stopping = True
        ends = await asyncio.gather(*(self._stop_host(host) for host in self))
        return [end for host_ends in ends for end in host_ends]

    async def _stop_host(self, host: ReplicaProcess) -> list[messages.ReplicaRegistration]:
        endpoint = host.endpoint
        ends: list[messages.ReplicaRegistration] = []
        # A process that no longer hosts anything has no ends to report; it was killed a moment ago.
        if endpoint is not None and host.keys:
            try:
                answer, _ = await self._pool.request(
                    *endpoint, messages.StopReplicaHost(), timeout_s=STOP_TIMEOUT_S
                )
            except RayqError as error:
                logger.warning("a replica process did not stop by itself: %s", error)
            else:
                ends = [
                    host.registration(endpoint, status)
                    for status in answer.replicas
                    if status.failure is None and status.flushed >= 0
                ]
                if host.process is not None:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(host.process.wait_dead(), STOP_TIMEOUT_S)
        if host.process is not None:  # A process that was not asked has no open log.
            host.process.kill()
        return ends
