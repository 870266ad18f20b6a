"""A client whose requests cost a server much waits for others, and is served all the same."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from rayq.environment import SystemClock
from rayq.messages import Produce, ProduceResponse
from rayq.wire.accepted_connection import REQUESTS_PER_TURN
from rayq.wire.codec import encode_request
from rayq.wire.server import Server
from rayq.wire.turns import SLICE_S, TURN_S

CHEAP, COSTLY = 0, 1


class Workshop:
    """A server whose requests to partition `COSTLY` seem to take its loop's time: the clock goes
    on. `served` has the base offsets of the answers in the order in which they were worked out."""

    def __init__(self, wire: Any, how: str, cost_s: float) -> None:
        self._wire, self._how, self._cost_s = wire, how, cost_s
        self._clock = SystemClock()
        self._ahead_s = 0.0
        self.served: list[tuple[int, int]] = []
        loop = asyncio.get_running_loop()
        self.release: asyncio.Future[None] = loop.create_future()
        self.began: asyncio.Future[None] = loop.create_future()
        """Done when the first costly request is served."""

    def monotonic(self) -> float:
        return self._clock.monotonic() + self._ahead_s

    def wall_ms(self) -> int:
        return self._clock.wall_ms()

    async def open(self) -> Server:
        environment = dataclasses.replace(self._wire.environment(), clock=self)
        server = Server(environment, self._wire.server_identity(), self.handle)
        await server.start("127.0.0.1", 0)
        self._wire.keep(server)
        return server

    def handle(self, peer: Any, request: Any, payload: memoryview) -> Any:
        if request.partition == CHEAP or self._how == "at once":
            return self._work(request)
        if self._how == "before a future":
            answer = asyncio.get_running_loop().create_future()
            answer.set_result(self._work(request))
            return answer
        return self._later(request)

    async def _later(self, request: Produce) -> ProduceResponse:
        if self._how == "in a task that waited":
            await asyncio.shield(self.release)
        return self._work(request)

    def _work(self, request: Produce) -> ProduceResponse:
        if request.partition == COSTLY:
            self._ahead_s += self._cost_s
            if not self.began.done():
                self.began.set_result(None)
        self.served.append((request.partition, request.leader_epoch))
        return ProduceResponse(request.leader_epoch, 0, 0)


def request(partition: int, number: int) -> Produce:
    return Produce("topic", partition, number, -1, 1000)


def fire(client: Any, count: int) -> None:
    for number in range(count):
        client.write_request(Produce.api, number + 1, encode_request(request(COSTLY, number)))


HOWS = ["at once", "before a future", "in a task", "in a task that waited"]


@pytest.mark.parametrize("how", HOWS)
def test_costly_requests_of_one_connection_delay_another_by_few_of_them(
    run: Callable[..., None], wire: Any, how: str
) -> None:
    async def scenario() -> None:
        shop = Workshop(wire, how, 1.5 * SLICE_S)
        server = await shop.open()
        other = await wire.connect(server)
        attacker = await wire.raw_authenticated(server)
        fire(attacker, REQUESTS_PER_TURN)
        asyncio.get_running_loop().call_later(0.05, shop.release.set_result, None)
        await shop.began
        await other.request(request(CHEAP, 0), timeout_s=60)
        assert shop.served.index((CHEAP, 0)) <= 8
        answered = [(await attacker.read_frame()).correlation for _ in range(REQUESTS_PER_TURN)]
        assert sorted(answered) == list(range(1, REQUESTS_PER_TURN + 1))
        costly = [number for partition, number in shop.served if partition == COSTLY]
        if how == "in a task that waited":  # Some may have come when the others went on.
            costly.sort()
        assert costly == list(range(REQUESTS_PER_TURN))

    run(scenario)


@pytest.mark.parametrize("how", HOWS)
def test_many_clients_together_do_not_delay_a_server(
    run: Callable[..., None], wire: Any, how: str
) -> None:
    async def scenario() -> None:
        shop = Workshop(wire, how, 0.9 * SLICE_S)
        server = await shop.open()
        broker = await wire.connect(server, wire.server_identity(broker=2))
        clients = [await wire.raw_authenticated(server) for _ in range(20)]
        for client in clients:
            fire(client, 8)
        asyncio.get_running_loop().call_later(0.05, shop.release.set_result, None)
        await shop.began
        await broker.request(request(CHEAP, 0), timeout_s=60)
        turn = TURN_S / (0.9 * SLICE_S)
        assert shop.served.index((CHEAP, 0)) <= 10 * turn
        for client in clients:
            for _ in range(8):
                await client.read_frame()

    run(scenario)


def test_requests_of_servers_wait_for_no_turn(run: Callable[..., None], wire: Any) -> None:
    async def scenario() -> None:
        shop = Workshop(wire, "in a task", 1.5 * SLICE_S)
        server = await shop.open()
        broker = await wire.connect(server, wire.server_identity(broker=2))
        await asyncio.gather(
            *(broker.request(request(COSTLY, number), timeout_s=60) for number in range(10)),
            broker.request(request(CHEAP, 10), timeout_s=60),
        )
        assert shop.served[0] == (CHEAP, 10)  # Of one turn: the others are tasks of it.

    run(scenario)


@pytest.mark.parametrize("how", HOWS)
def test_a_client_that_goes_while_its_requests_wait_leaves_nothing_behind(
    run: Callable[..., None], wire: Any, eventually: Any, how: str
) -> None:
    async def scenario() -> None:
        shop = Workshop(wire, how, 1.5 * SLICE_S)
        server = await shop.open()
        attacker = await wire.raw_authenticated(server)
        fire(attacker, 20)
        shop.release.set_result(None)
        await shop.began
        attacker.close()
        other = await wire.connect(server)
        for number in range(5):
            await other.request(request(CHEAP, number), timeout_s=60)
        tasks: Any = server.environment.tasks
        await eventually(lambda: not tasks._tasks)

    run(scenario)
