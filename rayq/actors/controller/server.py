"""The controller's own process: the preferred host of the controller (`rayq:<name>:controller`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence

from rayq import messages
from rayq.actors.access import Access
from rayq.actors.controller.controller_host import ControllerHost
from rayq.actors.listening_clock import ListeningClock
from rayq.config import ClusterConfig
from rayq.environment import Address, Environment
from rayq.errors import (
    ControllerUnavailableError,
    InvalidRequestError,
    NotControllerError,
    RayqError,
)
from rayq.wire.authentication import Identity
from rayq.wire.handler import Result
from rayq.wire.peer import Peer
from rayq.wire.pool import ConnectionPool
from rayq.wire.server import Server

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 5.0


class ControllerServer:
    """Serves the controller while it is hosted here, and watches for silence while it is not.

    It has no disk: the log is on the voters. `brokers` are addresses where they can be found.
    """

    def __init__(
        self,
        environment: Environment,
        config: ClusterConfig,
        *,
        cluster_id: str,
        secret: bytes,
        host: str,
        brokers: Sequence[Address],
    ) -> None:
        environment.metrics.label(broker="controller")
        self._environment = environment
        self._config = config
        self._host = host
        self._brokers = list(brokers)
        identity = Identity(role="server", key=secret, cluster_id=cluster_id, broker=None)
        self._listening = ListeningClock(
            environment.clock, config.heartbeat_interval_ms / 1000 / 2, environment.metrics
        )
        self._pool = ConnectionPool(
            environment, identity, config, unheard_s=self._listening.unheard_s
        )
        self._access = Access(environment.clock)
        self._server = Server(environment, identity, self._handle, config, self._access)
        self._heard_s = self._listening.now_s()
        self.endpoint: Address = (host, 0)
        """Address at which others reach it, once it has started."""
        self.controller_host = ControllerHost(
            environment,
            self._pool,
            config,
            cluster_id=cluster_id,
            listening=self._listening,
            silent_s=lambda: self._listening.now_s() - self._heard_s,
            known_brokers=lambda: self._brokers,
            may_host=lambda: True,
            is_preferred=True,
        )

    async def start(self) -> Address:
        await self._server.start(self._host, 0)
        self.endpoint = self._config.advertised_host or self._server.host, self._server.port
        self._environment.tasks.spawn(self._listening.run(), "listening-clock")
        self._environment.tasks.spawn(self.controller_host.run(self.endpoint), "controller-host")
        self._environment.tasks.spawn(self._listen_for_another(), "listen-for-another")
        return self.endpoint

    async def broker_nodes(self) -> dict[int, str]:
        """The node of each broker, from its last registration. Raises
        ControllerUnavailableError."""
        controller = self.controller_host.controller
        if controller is not None:
            known = controller.state.brokers
            return {number: broker.registration.node_id for number, broker in known.items()}
        for at in self._brokers:
            try:
                answer, _ = await self._pool.request(
                    *at, messages.Metadata(topics=[]), timeout_s=ASK_TIMEOUT_S
                )
            except RayqError:
                continue
            return {broker.broker: broker.node_id for broker in answer.brokers}
        raise ControllerUnavailableError("No broker answers, and the controller is not here.")

    async def prepare_stop(self) -> None:
        """Tells the controller, wherever it runs, that the whole cluster is about to stop: see
        `messages.PrepareStop`. Raises ControllerUnavailableError."""
        controller = self.controller_host.controller
        if controller is not None:
            await controller.handle(messages.PrepareStop())
            return

        async def is_told(at: Address) -> bool:
            try:
                await self._pool.request(*at, messages.PrepareStop(), timeout_s=ASK_TIMEOUT_S)
            except RayqError:  # Most of them do not host it.
                return False
            return True

        if not any(await asyncio.gather(*map(is_told, self._brokers))):
            raise ControllerUnavailableError("No broker hosts the controller, nor is it here.")

    def close(self) -> None:
        if self.controller_host.controller is not None:
            self.controller_host.controller.end("its process stops")
        self._environment.tasks.cancel_all()
        self._server.close()
        self._pool.close()

    def _handle(
        self, peer: Peer, request: messages.AnyRequest, payload: memoryview
    ) -> Result | Awaitable[Result]:
        if isinstance(request, messages.DescribeMetrics):
            return messages.DescribeMetricsResponse(self._environment.metrics.collect())
        if peer.role == "client":  # Quotas and their waits are at the brokers.
            raise InvalidRequestError(
                f"The controller answers brokers: send {type(request).__name__} to any broker, "
                "which forwards it."
            )
        controller = self.controller_host.controller
        if controller is None:
            raise NotControllerError("The controller is not hosted in this process now.")
        return controller.handle(request)

    async def _listen_for_another(self) -> None:
        """Keeps the brokers' addresses up to date, and asks the brokers whether they hear a
        controller."""
        interval_s = self._config.heartbeat_interval_ms / 1000
        while True:
            await asyncio.sleep(interval_s)
            controller = self.controller_host.controller
            if controller is not None:
                self._heard_s = self._listening.now_s()
                # Elsewhere the controller would know more: then principals are refused here.
                self._access.update(controller.state, controller.state)
                now_s = self._environment.clock.monotonic()
                self._access.freshness.note(now_s, 2 * interval_s)
                self._server.end_revoked()
                known = [
                    (broker.registration.host, broker.registration.port)
                    for broker in controller.state.brokers.values()
                ]
                self._brokers = list(dict.fromkeys([*known, *self._brokers]))[:1000]
                continue
            for at in self._brokers:
                try:
                    answer, _ = await self._pool.request(
                        *at, messages.FindController(), timeout_s=interval_s
                    )
                except RayqError:
                    continue
                if answer.heard_ms_ago is not None:
                    heard_s = self._listening.now_s() - answer.heard_ms_ago / 1000
                    self._heard_s = max(self._heard_s, heard_s)
