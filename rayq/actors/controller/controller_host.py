"""The host of the controller: its own process by preference, else the process of a voter."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from rayq.actors.controller.controller import SILENT_HEARTBEATS, Controller
from rayq.actors.listening_clock import ListeningClock
from rayq.config import ClusterConfig
from rayq.environment import Address, Environment
from rayq.errors import RayqError
from rayq.metrics import Sample
from rayq.wire.pool import ConnectionPool

logger = logging.getLogger(__name__)


class ControllerHost:
    """Hosts a controller in this process whenever the cluster needs one (docs/protocol.md, rule 5).

    `silent_s()` is the time since a controller was heard, by the clock `listening`. The preferred
    host does not wait at its start (the voters do: see `Quorum.take_over`); a stand-in waits
    `controller_patience_ms` plus up to half of it at random, so that stand-ins seldom race each
    other.
    """

    def __init__(
        self,
        environment: Environment,
        pool: ConnectionPool,
        config: ClusterConfig,
        *,
        cluster_id: str,
        listening: ListeningClock,
        silent_s: Callable[[], float],
        known_brokers: Callable[[], Sequence[Address]],
        may_host: Callable[[], bool],
        is_preferred: bool,
    ) -> None:
        self._environment = environment
        self._pool = pool
        self._config = config
        self._cluster_id = cluster_id
        self._listening = listening
        self._silent_s = silent_s
        self._known_brokers = known_brokers
        self._may_host = may_host
        self._is_preferred = is_preferred
        self.controller: Controller | None = None

    async def run(self, endpoint: Address) -> None:
        """Waits for silence, takes over, and hosts until the epoch ends; forever. This process
        listens at `endpoint`."""
        self._environment.metrics.add_source(self._measure)
        patience_s = 0.0 if self._is_preferred else self._patience_s()
        while True:
            if not self._is_wanted(patience_s):
                await asyncio.sleep(self._config.heartbeat_interval_ms / 1000 / 2)
                continue
            await self._listening.read_arrived()
            if not self._is_wanted(patience_s):
                continue
            controller = Controller(
                self._environment,
                self._pool,
                self._config,
                cluster_id=self._cluster_id,
                endpoint=endpoint,
                listening=self._listening,
            )
            try:
                await controller.take_over(self._known_brokers())
            except Exception as error:
                controller.end(f"could not take over: {error}")
                if isinstance(error, RayqError):
                    logger.info("controller: %s", error)
                else:  # A bug of ours: it is logged, but the cluster must not lose its stand-ins.
                    logger.exception("the controller could not start")
                # Short and random: two hosts that race must not collide repeatedly.
                await asyncio.sleep(self._environment.random.uniform(0.05, 0.5))
                if self._is_preferred:
                    patience_s = SILENT_HEARTBEATS * self._config.heartbeat_interval_ms / 1000
                continue
            self.controller = controller
            await controller.ended
            self.controller = None
            patience_s = self._patience_s()

    def _is_wanted(self, patience_s: float) -> bool:
        """Returns whether this process should host a controller, as none was heard for so long."""
        return patience_s == 0 or (self._may_host() and self._silent_s() >= patience_s)

    def _measure(self) -> list[Sample]:
        is_here = self.controller is not None
        return [self._environment.metrics.sample("rayq_active_controller", int(is_here))]

    def _patience_s(self) -> float:
        patience_s = self._config.controller_patience_ms / 1000
        return patience_s + self._environment.random.uniform(0, patience_s / 2)
