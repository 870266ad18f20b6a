"""Heartbeats do not wait behind work: neither on their way nor for their answers."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from itertools import pairwise
from typing import Any
from unittest import mock

from rayq import messages
from rayq.actors.controller.controller import Controller
from rayq.actors.controller.server import ControllerServer
from rayq.actors.replica.replica_host import ReplicaHost
from rayq.client.consuming.async_consumer import AsyncConsumer
from rayq.config import ClusterConfig, ConsumerConfig
from rayq.errors import StaleBrokerError
from rayq.wire.authentication import Identity
from rayq.wire.peer import Peer
from rayq.wire.pool import ConnectionPool
from tests.simulated.staged import Stage, play

INTERVAL_S = ClusterConfig().heartbeat_interval_ms / 1000


def test_a_heartbeat_is_answered_at_once_while_changes_wait_for_their_commit() -> None:
    async def script(stage: Stage) -> None:
        cluster = stage.cluster
        controller = cluster.controller
        assert controller is not None
        await stage.pause(2)
        for host in stage.hosts[:2]:
            host.disk.stall(2.0)
        creating = stage.process.start(stage.admin.create_topic("t", 1, 3))
        await stage.pause(0.2)
        incarnation = cluster.brokers[2].metadata.state.brokers[2].registration.incarnation
        identity = Identity(
            role="server", key=cluster.secret, cluster_id=cluster.cluster_id, broker=2
        )
        pool = ConnectionPool(stage.process.environment, identity)
        request = messages.BrokerHeartbeat(2, incarnation)
        await stage.process.run(pool.request(*controller.endpoint, request, timeout_s=0.2))
        assert not creating.done()
        await stage.until(creating.done, "the topic")
        pool.close()

    play(script)


def test_a_heartbeat_leaves_in_each_interval_whatever_became_of_those_before() -> None:
    heard_s: dict[int, list[float]] = defaultdict(list)
    handle = Controller.handle

    async def script(stage: Stage) -> None:
        async def answers_no_heartbeat(self: Controller, request: messages.AnyRequest) -> Any:
            if isinstance(request, messages.BrokerHeartbeat):
                heard_s[request.broker].append(stage.world.now_s)
                await asyncio.get_running_loop().create_future()
            return await handle(self, request)

        await stage.pause(2)
        with mock.patch.object(Controller, "handle", answers_no_heartbeat):
            await stage.pause(20)

    play(script)
    assert set(heard_s) == {0, 1, 2}
    for times_s in heard_s.values():
        assert max(later - sooner for sooner, later in pairwise(times_s)) < INTERVAL_S + 0.1


def test_a_broker_that_is_never_let_in_asks_now_and_then() -> None:
    asked: list[int] = []
    handle = Controller.handle

    async def script(stage: Stage) -> None:
        async def lets_nobody_in(self: Controller, request: messages.AnyRequest) -> Any:
            if isinstance(request, (messages.BrokerHeartbeat, messages.RegisterBroker)):
                asked.append(request.broker)
                raise StaleBrokerError("It is an old copy.")
            return await handle(self, request)

        await stage.pause(2)
        with mock.patch.object(Controller, "handle", lets_nobody_in):
            await stage.pause(5)

    play(script)
    # Without a pause they were 260, until the controller had lost its voters.
    assert 3 < len(asked) < 100, len(asked)


def test_a_brokers_heartbeats_do_not_share_a_connection_with_its_other_requests() -> None:
    """Thousands of replicas that are registered at once, or in-sync sets that are proposed, would
    be read before them."""
    heartbeats: set[str] = set()
    others: set[str] = set()
    handle = ControllerServer._handle

    def noted(self: ControllerServer, peer: Peer, request: messages.AnyRequest, data: Any) -> Any:
        is_heartbeat = isinstance(request, messages.BrokerHeartbeat)
        (heartbeats if is_heartbeat else others).add(peer.address)
        return handle(self, peer, request, data)

    async def script(stage: Stage) -> None:
        await stage.process.run(stage.admin.create_topic("t", 2, 3))
        await stage.pause(2)

    with mock.patch.object(ControllerServer, "_handle", noted):
        play(script)
    assert heartbeats and others and not heartbeats & others


def test_a_members_heartbeats_do_not_share_a_connection_with_its_records() -> None:
    of_group: set[str] = set()
    others: set[str] = set()
    handle = ReplicaHost._handle

    def noted(self: ReplicaHost, peer: Peer, request: messages.AnyRequest, data: Any) -> Any:
        if peer.role == "client":
            is_of_group = isinstance(request, messages.ToGroupCoordinator)
            (of_group if is_of_group else others).add(peer.address)
        return handle(self, peer, request, data)

    async def script(stage: Stage) -> None:
        async def consume() -> None:
            consumer = AsyncConsumer(stage.client, ConsumerConfig(), ["t"], group="g")
            while True:
                await consumer.poll(1.0)

        await stage.process.run(stage.admin.create_topic("t", 2, 3))
        await stage.send("t", [b"x", b"y"])
        stage.process.start(consume())
        await stage.until(lambda: bool(of_group), "heartbeats")
        await stage.pause(3)

    with mock.patch.object(ReplicaHost, "_handle", noted):
        play(script)
    assert of_group and others and not of_group & others
