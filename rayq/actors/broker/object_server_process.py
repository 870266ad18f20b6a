"""A broker's supervision of its object server: starts it, watches it, and restarts it.

An object server does not outlive its broker's process. It holds no state that a new one would miss,
so a new broker process starts a new one at once, and stops the old one if that presents itself.
"""

from __future__ import annotations

import asyncio
import logging

from rayq import messages
from rayq.actors.hosting import HostProcess, ObjectServerSpec, Runtime
from rayq.actors.listening_clock import ListeningClock
from rayq.actors.signal import Signal
from rayq.backoff import Backoff
from rayq.config import ClusterConfig
from rayq.environment import Address, Environment
from rayq.errors import RayqError, StaleBrokerError

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.5
START_TIMEOUT_S = 60.0
SILENT_SESSIONS = 3
"""Number of sessions that it may be silent for, since it yields to every other process of the
node."""
BACKOFF_S = 0.2
BACKOFF_MAX_S = 10.0
STABLE_S = 10.0
"""Uptime after which a process that ended is started again after the shortest pause."""


class ObjectServerProcess:
    """See the module. `run` keeps one running until `stop`."""

    def __init__(
        self,
        environment: Environment,
        config: ClusterConfig,
        runtime: Runtime,
        *,
        cluster_name: str,
        broker: int,
        data_path: str,
        listening: ListeningClock,
    ) -> None:
        self._environment = environment
        self._config = config
        self._runtime = runtime
        self._cluster_name = cluster_name
        self._broker = broker
        self._data_path = data_path
        self._listening = listening
        self._incarnation: str | None = None
        """Incarnation of the process that was started last, while it lives."""
        self._process: HostProcess | None = None
        self._backoff = Backoff(environment, BACKOFF_S, BACKOFF_MAX_S)
        self._started_s = 0.0
        self._heard_s = 0.0
        self._failure = "its object server is starting"
        self._reported: str | None = None
        self._gone = Signal()
        self._is_stopping = False
        self.endpoint: Address | None = None
        """Address of its server. None until it has presented itself."""

    @property
    def trouble(self) -> str | None:
        """The reason that the object store cannot be used from this node. None: a probe was written
        and read there."""
        return self._failure if self.endpoint is None else self._reported

    async def run(self) -> None:
        while not self._is_stopping:
            if self._process is None:
                await self._start()
            if self._is_silent():
                await self._listening.read_arrived()
                self._end_silent()
            if self._process is not None:
                await self._gone.wait(CHECK_INTERVAL_S)
            if self._process is None:
                if self._environment.clock.monotonic() - self._started_s > STABLE_S:
                    self._backoff.reset()
                await asyncio.sleep(self._backoff.next_s())

    async def _start(self) -> None:
        self._incarnation = self._environment.new_id()
        self.endpoint = None
        spec = ObjectServerSpec(
            self._cluster_name, self._broker, self._incarnation, self._data_path
        )
        self._started_s = self._environment.clock.monotonic()
        self._heard_s = self._listening.now_s()
        try:
            process = await self._runtime.start_object_server(spec)
        except RayqError as error:
            self._failure = f"its object server could not be started: {error}"
            logger.error("broker %d: %s", self._broker, self._failure)
            return
        self._process = process
        if self._is_stopping:
            process.kill()
        self._environment.tasks.spawn(self._watch(process), "watch the object server")

    async def _watch(self, process: HostProcess) -> None:
        reason = await process.wait_dead()
        # A last heartbeat of it that is still in flight does not count.
        self._process = self._incarnation = self.endpoint = None
        if not self._is_stopping:
            self._failure = f"its object server ended: {reason}"
            logger.warning("broker %d: %s", self._broker, self._failure)
        self._gone.notify()

    @property
    def _silent_s(self) -> float:
        return self._listening.now_s() - self._heard_s

    def _is_silent(self) -> bool:
        session_s = self._config.session_timeout_ms / 1000
        limit_s = START_TIMEOUT_S if self.endpoint is None else SILENT_SESSIONS * session_s
        return self._process is not None and self._silent_s > limit_s

    def _end_silent(self) -> None:
        if self._process is not None and self._is_silent():
            logger.warning(
                "the object server of broker %d was silent for %.1f s: killing it",
                *(self._broker, self._silent_s),
            )
            self._process.kill()

    def attach(self, request: messages.AttachObjectServer) -> None:
        """Takes a heartbeat of the object server. Raises StaleBrokerError if it is not the wanted
        one."""
        if request.incarnation != self._incarnation or self._is_stopping:
            process = self._runtime.adopt(request.pid, request.pid_start_time)
            if process is not None:
                process.kill()
            raise StaleBrokerError(f"Broker {self._broker} has another object server.")
        self._heard_s = self._listening.now_s()
        self.endpoint = (request.host, request.port)
        self._reported = request.trouble

    def stop(self) -> None:
        """Kills it: work in progress is lost as in a crash."""
        self._is_stopping = True
        if self._process is not None:
            self._process.kill()
