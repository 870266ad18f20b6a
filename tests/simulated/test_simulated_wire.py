"""The real wire code over the simulated network, with everything done to the network at once."""

from __future__ import annotations

import asyncio
import zlib
from collections import defaultdict

import pytest

from proving.simulation import ProcessDied, World
from rayq.errors import RayqError
from rayq.messages import AnyRequest, CheckRange, Done
from rayq.wire.authentication import Identity, client_key
from rayq.wire.peer import Peer
from rayq.wire.pool import ConnectionPool
from rayq.wire.server import Server

SECRET = b"s" * 32
PORT = 9392
REQUESTS = 150
TIMEOUT_S = 3.0


class ServerSide:
    """A host whose server process answers after a while, and is started again after each kill."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.host = world.host("server")
        self.arrived: dict[str, list[int]] = defaultdict(list)
        self.start()

    def start(self) -> None:
        self.process = self.host.process("server")
        identity = Identity(role="server", key=SECRET, cluster_id="c", broker=1)
        self.server = Server(self.process.environment, identity, self.handle)
        self.process.start(self.server.start("server", PORT))

    async def handle(self, peer: Peer, request: AnyRequest, payload: memoryview) -> tuple[Done, bytes]:
        assert isinstance(request, CheckRange)
        self.arrived[peer.address].append(request.offset)
        await asyncio.sleep(self.process.environment.random.random() * 0.05)
        return Done(), zlib.crc32(payload).to_bytes(4, "little") + bytes(payload[::2])


async def make_trouble(world: World, server: ServerSide) -> None:
    client = world.hosts[0]
    while True:
        await asyncio.sleep(world.random.random() * 2)
        match world.random.randrange(6):
            case 0:
                world.network.cut([client], [server.host])
            case 1:
                world.network.cut([client], [server.host], both_ways=False)
            case 2:
                world.network.cut([server.host], [client], both_ways=False)
            case 3:
                world.network.reset([client], [server.host])
            case 4:
                server.process.pause()
            case 5:
                if world.random.random() < 0.5:
                    server.process.kill()
                else:
                    server.host.power_loss()
                await asyncio.sleep(world.random.random())
                server.start()
        await asyncio.sleep(world.random.random() * 2)
        world.network.heal()
        server.process.resume()


async def script(world: World, answered: list[int], failed: list[int]) -> None:
    client_host = world.host("client")
    server = ServerSide(world)
    client = client_host.process("client")
    identity = Identity(role="client", key=client_key(SECRET), cluster_id=None, broker=None)
    pool = ConnectionPool(client.environment, identity)
    trouble = asyncio.ensure_future(make_trouble(world, server))

    async def ask(number: int) -> None:
        payload = world.random.randbytes(world.random.choice((0, 10, 3000, 200_000)))
        start = world.now_s
        request = CheckRange(topic_id="t", partition=0, offset=number)
        try:
            response, answer = await pool.request(
                "server", PORT, request, payload, timeout_s=TIMEOUT_S
            )
        except RayqError:
            failed.append(number)
        else:
            assert response == Done()
            assert answer == zlib.crc32(payload).to_bytes(4, "little") + payload[::2]
            answered.append(number)
        assert world.now_s - start < TIMEOUT_S + 0.1

    asking = []
    for number in range(REQUESTS):
        asking.append(asyncio.ensure_future(client.run(ask(number))))
        await asyncio.sleep(world.random.random() * 0.4)
    await asyncio.gather(*asking)
    trouble.cancel()
    for numbers in server.arrived.values():
        assert numbers == sorted(numbers), "frames of one connection overtook each other"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_every_request_is_answered_or_fails_in_time_whatever_happens(seed: int) -> None:
    digests = set()
    for _ in range(2):
        answered: list[int] = []
        failed: list[int] = []
        with World(seed) as world:
            world.run(script(world, answered, failed), limit_s=300)
            digests.add(world.trace.digest())
            assert len(answered) + len(failed) == REQUESTS
            assert len(answered) > REQUESTS / 4
            assert [e for e in world.errors if not isinstance(e.exception, ProcessDied)] == []
    assert len(digests) == 1


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_server_that_goes_dark_under_a_long_request_is_given_up_and_an_idle_one_is_not(
    is_cut: bool,
) -> None:
    async def hold(peer: Peer, request: AnyRequest, payload: memoryview) -> Done:
        await asyncio.sleep(40.0)
        return Done()

    async def ask(world: World) -> tuple[str, float]:
        hosts = [world.host("server"), world.host("follower")]
        process = hosts[0].process("server")
        identity = Identity(role="server", key=SECRET, cluster_id="c", broker=1)
        server = Server(process.environment, identity, hold)
        process.start(server.start("server", PORT))
        follower = hosts[1].process("follower")
        pool = ConnectionPool(follower.environment, identity, keeps_alive=True)

        async def request() -> str:
            connection = await pool.get("server", PORT)
            answer = connection.request(CheckRange("t", 0, 0), timeout_s=60.0)
            if is_cut:
                world.network.cut([hosts[1]], [hosts[0]])
            try:
                await answer
            except RayqError as error:
                return type(error).__name__
            return "answered"

        await asyncio.sleep(1.0)
        start_s = world.loop.time()
        outcome = await follower.start(request())
        return outcome, world.loop.time() - start_s

    with World(3) as world:
        outcome, took_s = world.run(ask(world))
    if is_cut:
        assert outcome == "DisconnectedError" and took_s < 8
    else:
        assert outcome == "answered" and took_s < 42
