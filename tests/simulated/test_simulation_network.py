"""The simulated network: asyncio protocols over connections that delay, are cut, reset and end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proving.simulation import Host, Process, World

PORT = 9392


class Recorder(asyncio.Protocol):
    """Keeps the bytes that it gets; with `echo` it sends them back."""

    def __init__(self, echo: bool = False) -> None:
        self.echo = echo
        self.received = bytearray()
        self.chunks: list[int] = []
        self.events: list[str] = []
        self.changed = asyncio.Event()
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.chunks.append(len(data))
        self.changed.set()
        if self.echo:
            self.transport.write(data)

    def eof_received(self) -> None:
        self.events.append("eof")

    def pause_writing(self) -> None:
        self.events.append("pause")

    def resume_writing(self) -> None:
        self.events.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.events.append("lost")
        self.changed.set()
        self.lost.set_result(exc)

    async def until(self, size: int) -> bytes:
        while len(self.received) < size:
            self.changed.clear()
            await self.changed.wait()
        return bytes(self.received)


class BufferedEcho(asyncio.BufferedProtocol):
    """Reads into a buffer of 100 bytes, and echoes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.buffer = bytearray(100)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.transport.write(memoryview(self.buffer)[:nbytes])


class Pair:
    """Two hosts, a listening process on the second, a client process on the first."""

    def __init__(
        self, seed: int, factory: Callable[[], asyncio.BaseProtocol] | None = None
    ) -> None:
        self.world = World(seed)
        self.client_host, self.server_host = self.world.host("left"), self.world.host("right")
        self.client = self.client_host.process("client")
        self.server = self.server_host.process("server")
        self.accepted: list[Any] = []
        self.factory = factory or Recorder

    def accept(self, host: str, give_up: Callable[[], None]) -> asyncio.BaseProtocol:
        self.accepted.append(self.factory())
        return self.accepted[-1]

    async def listen(self) -> None:
        network = self.server.environment.network
        await self.server.run(network.listen("10.0.0.2", PORT, self.accept))

    async def connect(self) -> Recorder:
        network = self.client.environment.network
        protocol = await self.client.run(network.connect("10.0.0.2", PORT, Recorder))
        assert isinstance(protocol, Recorder)
        return protocol

    def run(self, script: Callable[[Pair], Coroutine[Any, Any, Any]], limit_s: float = 100) -> Any:
        with self.world:
            return self.world.run(script(self), limit_s=limit_s)


def echo(*_: object) -> Recorder:
    return Recorder(echo=True)


def test_an_echo_comes_back_after_a_delay() -> None:
    async def script(pair: Pair) -> None:
        await pair.listen()
        protocol = await pair.connect()
        assert protocol.transport.get_extra_info("peername") == ("10.0.0.2", PORT)
        start = pair.world.now_s
        protocol.transport.writelines([b"he", memoryview(b"llo")])
        assert await protocol.until(5) == b"hello"
        assert 0.0002 < pair.world.now_s - start < 0.2
        protocol.transport.close()
        assert protocol.transport.is_closing()
        protocol.transport.write(b"ignored")
        assert await protocol.lost is None
        assert await pair.accepted[0].lost is None
        assert pair.accepted[0].events == ["eof", "lost"]

    Pair(1, echo).run(script)


def test_names_loopback_and_free_ports() -> None:
    world = World(1)
    one, two = world.host("one").process("p"), world.host("two").process("q")

    async def script() -> None:
        network = one.environment.network
        first = await one.run(network.listen("127.0.0.1", 0, echo))
        second = await one.run(network.listen("one", 0, echo))
        assert first.port != second.port
        await one.run(network.connect("localhost", first.port, Recorder))
        await two.run(two.environment.network.connect("one", second.port, Recorder))
        with pytest.raises(OSError, match="taken"):
            await one.run(network.listen("one", first.port, echo))
        with pytest.raises(OSError, match="not an address"):
            await one.run(network.listen("two", 1, echo))
        with pytest.raises(OSError, match="not known"):
            await one.run(network.connect("three", 1, Recorder))
        first.close()
        with pytest.raises(ConnectionRefusedError):
            await one.run(network.connect("one", first.port, Recorder))

    with world:
        world.run(script())


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1_000_000),
    sizes=st.lists(st.integers(1, 50_000), min_size=1, max_size=30),
)
def test_bytes_arrive_once_and_in_order_for_any_seed(seed: int, sizes: list[int]) -> None:
    """This holds also with small buffers, cut peers, slow peers, and pauses of both processes."""
    sent = random.Random(seed).randbytes(sum(sizes))

    async def script(pair: Pair) -> None:
        await pair.listen()
        protocol = await pair.connect()
        ends = [pair.client_host], [pair.server_host]
        position = 0
        for size in sizes:
            chunk = bytearray(sent[position : position + size])
            position += size
            protocol.transport.write(chunk)
            chunk[:] = bytes(size)  # the transport has its own copy
            match pair.world.random.randrange(12):
                case 0:
                    pair.world.network.cut(*ends, both_ways=False)
                    await asyncio.sleep(pair.world.random.random())
                    pair.world.network.heal()
                case 1:
                    pair.world.network.cut(*reversed(ends), both_ways=False)
                    await asyncio.sleep(pair.world.random.random())
                    pair.world.network.heal()
                case 2:
                    pair.world.network.slow(*ends, delay_s=(0.01, 0.1), bytes_per_s=1e6)
                case 3:
                    process = pair.world.random.choice((pair.client, pair.server))
                    process.pause()
                    await asyncio.sleep(pair.world.random.random())
                    process.resume()
                case _:
                    await asyncio.sleep(0.001 * pair.world.random.random())
        assert await protocol.until(len(sent)) == sent

    Pair(seed, BufferedEcho).run(script, limit_s=200)


def test_a_stream_is_cut_into_chunks_at_random_places() -> None:
    async def script(pair: Pair) -> list[int]:
        await pair.listen()
        protocol = await pair.connect()
        for _ in range(200):
            protocol.transport.write(b"x" * 100)
            await asyncio.sleep(0.01)
        await pair.accepted[0].until(20_000)
        chunks: list[int] = pair.accepted[0].chunks
        return chunks

    chunks = [Pair(seed).run(script) for seed in range(3)]
    assert all(len(set(sizes)) > 3 for sizes in chunks)
    assert chunks[0] != chunks[1] != chunks[2]


def test_the_same_seed_gives_the_same_trace_and_another_one_does_not() -> None:
    async def script(pair: Pair) -> None:
        await pair.listen()
        protocol = await pair.connect()
        for size in range(1, 2000, 100):
            protocol.transport.write(b"x" * size)
            await asyncio.sleep(0.001)
        await protocol.until(sum(range(1, 2000, 100)))

    digests = []
    for seed in (1, 1, 2):
        pair = Pair(seed, echo)
        pair.run(script)
        digests.append(pair.world.trace.digest())
    assert digests[0] == digests[1] != digests[2]


def test_a_reader_that_stops_pauses_the_writer() -> None:
    async def script(pair: Pair) -> None:
        await pair.listen()
        protocol = await pair.connect()
        await asyncio.sleep(1)
        reader = pair.accepted[0]
        reader.transport.pause_reading()
        total = 0
        while "pause" not in protocol.events:
            protocol.transport.write(bytes(10_000))
            total += 10_000
            await asyncio.sleep(0.001)
            assert total < 2_000_000
        assert protocol.transport.get_write_buffer_size() > 64 * 1024
        await asyncio.sleep(5)
        assert not reader.received and protocol.events == ["pause"]
        reader.transport.resume_reading()
        await reader.until(total)
        assert protocol.events == ["pause", "resume"]
        assert protocol.transport.get_write_buffer_size() == 0

    Pair(3).run(script)


def test_write_buffer_limits_are_those_that_were_set() -> None:
    async def script(pair: Pair) -> None:
        await pair.listen()
        protocol = await pair.connect()
        transport = protocol.transport
        assert transport.get_write_buffer_limits() == (16 * 1024, 64 * 1024)
        transport.set_write_buffer_limits(low=10)
        assert transport.get_write_buffer_limits() == (10, 40)
        with pytest.raises(ValueError, match="must be"):
            transport.set_write_buffer_limits(high=1, low=2)
        transport.set_write_buffer_limits(high=0)
        pair.server.pause()
        transport.write(bytes(1_000_000))
        assert protocol.events == ["pause"]

    Pair(3).run(script)


def test_a_closed_transport_sends_the_rest_first() -> None:
    async def script(pair: Pair) -> None:
        await pair.listen()
        protocol = await pair.connect()
        protocol.transport.write(bytes(3_000_000))
        protocol.transport.close()
        await pair.accepted[0].lost
        assert len(pair.accepted[0].received) == 3_000_000
        assert await protocol.lost is None

    Pair(4).run(script)


def test_an_aborted_connection_is_reset() -> None:
    async def script(pair: Pair) -> None:
        await pair.listen()
        protocol = await pair.connect()
        protocol.transport.abort()
        assert await protocol.lost is None
        assert isinstance(await pair.accepted[0].lost, ConnectionResetError)

    Pair(5).run(script)


def test_the_test_resets_connections_between_hosts() -> None:
    async def script(pair: Pair) -> None:
        await pair.listen()
        protocol = await pair.connect()
        await asyncio.sleep(1)
        assert pair.world.network.reset([pair.client_host], [pair.server_host]) == 1
        assert isinstance(await protocol.lost, ConnectionResetError)
        assert isinstance(await pair.accepted[0].lost, ConnectionResetError)

    Pair(6).run(script)


def test_a_protocol_that_raises_loses_its_connection() -> None:
    class Broken(Recorder):
        def data_received(self, data: bytes) -> None:
            raise ValueError("broken")

    async def script(pair: Pair) -> None:
        await pair.listen()
        protocol = await pair.connect()
        protocol.transport.write(b"x")
        assert isinstance(await protocol.lost, ConnectionResetError)
        assert [repr(error.exception) for error in pair.world.errors] == ["ValueError('broken')"]

    Pair(7, Broken).run(script)


def test_nobody_listens_is_refused_at_once() -> None:
    async def script(pair: Pair) -> None:
        with pytest.raises(ConnectionRefusedError):
            await pair.connect()
        assert pair.world.now_s < 0.2

    Pair(8).run(script)


@pytest.mark.parametrize("how", ["there", "back", "dark"])
def test_a_connect_over_a_cut_link_times_out(how: str) -> None:
    async def script(pair: Pair) -> None:
        await pair.listen()
        ends = [pair.client_host], [pair.server_host]
        if how == "dark":
            pair.server_host.power_loss()
        else:
            order = ends if how == "there" else (ends[1], ends[0])
            pair.world.network.cut(*order, both_ways=False)
        with pytest.raises(TimeoutError) as caught:
            await pair.connect()
        assert isinstance(caught.value, OSError)
        assert 4 <= pair.world.now_s <= 10.5

    Pair(9, echo).run(script)


def test_a_connect_goes_through_when_the_cut_is_healed_in_time() -> None:
    async def script(pair: Pair) -> None:
        await pair.listen()
        pair.world.network.cut([pair.client_host], [pair.server_host])
        connecting = asyncio.ensure_future(pair.connect())
        await asyncio.sleep(2)
        pair.world.network.heal()
        await connecting
        assert 2 < pair.world.now_s < 3.5

    Pair(10, echo).run(script)


def test_a_short_cut_holds_the_bytes() -> None:
    async def script(pair: Pair) -> None:
        await pair.listen()
        protocol = await pair.connect()
        pair.world.network.cut([pair.client_host], [pair.server_host])
        protocol.transport.write(b"hello")
        await asyncio.sleep(3)
        assert not pair.accepted[0].received
        pair.world.network.heal([pair.client_host], [pair.server_host])
        assert await protocol.until(5) == b"hello"

    Pair(11, echo).run(script)


def test_a_one_way_cut_lets_the_other_way_through_for_a_while() -> None:
    async def script(pair: Pair) -> None:
        await pair.listen()
        protocol = await pair.connect()
        await asyncio.sleep(1)
        pair.world.network.cut([pair.client_host], [pair.server_host], both_ways=False)
        protocol.transport.write(b"held")
        pair.accepted[0].transport.write(b"through")
        assert await protocol.until(7) == b"through"
        pair.accepted[0].transport.write(bytes(2_000_000))
        await asyncio.sleep(2)
        assert len(protocol.received) < 1_000_000  # nothing is acknowledged, the window closes
        assert isinstance(await protocol.lost, TimeoutError)
        assert isinstance(await pair.accepted[0].lost, TimeoutError)
        assert not pair.accepted[0].received

    Pair(12).run(script)


def test_both_ends_give_up_on_a_long_cut_each_by_itself() -> None:
    async def script(pair: Pair) -> None:
        await pair.listen()
        protocol = await pair.connect()
        await asyncio.sleep(1)
        pair.world.network.cut([pair.client_host], [pair.server_host])
        times = []
        for end in (protocol, pair.accepted[0]):
            end.lost.add_done_callback(lambda _: times.append(pair.world.now_s))
        errors = await asyncio.gather(protocol.lost, pair.accepted[0].lost)
        assert [type(error) for error in errors] == [TimeoutError, TimeoutError]
        await asyncio.sleep(1)
        assert times[0] < times[1] and times[0] >= 9 and times[1] <= 21.5

    Pair(13).run(script)


def test_a_killed_process_ends_or_resets_its_connections() -> None:
    found: set[type[BaseException] | None] = set()

    async def script(pair: Pair) -> None:
        await pair.listen()
        protocol = await pair.connect()
        await asyncio.sleep(1)
        pair.server.kill()
        error = await protocol.lost
        found.add(None if error is None else type(error))
        with pytest.raises(ConnectionRefusedError):
            await pair.connect()

    for seed in range(12):
        Pair(seed).run(script)
    assert found == {None, ConnectionResetError}


def test_a_killed_writers_stream_breaks_off_anywhere() -> None:
    lengths: list[int] = []

    async def script(pair: Pair) -> None:
        await pair.listen()
        protocol = await pair.connect()
        await asyncio.sleep(1)
        protocol.transport.write(bytes(5_000_000))
        await asyncio.sleep(0.001)
        pair.client.kill()
        await pair.accepted[0].lost
        lengths.append(len(pair.accepted[0].received))

    for seed in range(20):
        Pair(seed).run(script)
    assert len(set(lengths)) > 15 and max(lengths) < 5_000_000


def test_a_host_without_power_is_silent_until_it_answers_with_a_reset() -> None:
    async def script(pair: Pair) -> None:
        await pair.listen()
        protocol = await pair.connect()
        pair.server_host.power_loss()
        await asyncio.sleep(3)
        assert not protocol.events
        pair.server_host.boot()
        protocol.transport.write(b"anyone?")
        assert isinstance(await protocol.lost, ConnectionResetError)
        assert pair.world.now_s < 5

    async def silent(pair: Pair) -> None:
        await pair.listen()
        protocol = await pair.connect()
        pair.server_host.power_loss()
        assert isinstance(await protocol.lost, TimeoutError)
        assert 8 <= pair.world.now_s <= 21

    Pair(14).run(script)
    Pair(14).run(silent)


def test_a_paused_process_accepts_no_data_until_it_resumes() -> None:
    async def script(pair: Pair) -> None:
        await pair.listen()
        pair.server.pause()
        protocol = await pair.connect()  # its kernel answers
        protocol.transport.write(b"hello")
        await asyncio.sleep(5)
        assert not pair.accepted
        pair.server.resume()
        assert await protocol.until(5) == b"hello"

    Pair(15, echo).run(script)


def test_a_connect_that_is_cancelled_leaves_no_connection() -> None:
    async def script(pair: Pair) -> None:
        await pair.listen()
        pair.world.network.link(pair.server_host, pair.client_host).delay_s = (1, 1)
        connecting = asyncio.ensure_future(pair.connect())
        network = pair.client.environment.network
        connecting.cancel()
        task = pair.client.start(network.connect("10.0.0.2", PORT, Recorder))
        await asyncio.sleep(0.5)
        task.cancel()
        await pair.accepted[-1].lost

    Pair(16).run(script)


def test_a_slow_link_takes_its_time() -> None:
    async def script(pair: Pair) -> None:
        await pair.listen()
        protocol = await pair.connect()
        ends = [pair.client_host], [pair.server_host]
        pair.world.network.slow(*ends, delay_s=(0.5, 0.5), bytes_per_s=100_000)
        start = pair.world.now_s
        protocol.transport.write(bytes(100_000))
        await pair.accepted[0].until(100_000)
        assert 1.5 <= pair.world.now_s - start <= 1.6 or pair.world.now_s > 1.6

    Pair(17).run(script)


def test_a_process_may_talk_to_itself() -> None:
    world = World(1)
    process: Process = world.host().process("p")

    async def script() -> bytes:
        network = process.environment.network
        listener = await network.listen("127.0.0.1", 0, echo)
        protocol = await network.connect("127.0.0.1", listener.port, Recorder)
        assert isinstance(protocol, Recorder)
        protocol.transport.write(b"me")
        return await protocol.until(2)

    with world:
        assert world.run(process.run(script())) == b"me"


def test_hosts_of_one_world_are_told_apart() -> None:
    world = World(1)
    hosts: list[Host] = [world.host() for _ in range(3)]
    assert [host.address for host in hosts] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    world.close()
