"""The broker's care for its object server: started, watched, started again, and no second one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from proving.simulation import World
from rayq import messages
from rayq.actors.broker.object_server_process import (
    BACKOFF_MAX_S,
    BACKOFF_S,
    SILENT_SESSIONS,
    START_TIMEOUT_S,
    ObjectServerProcess,
)
from rayq.actors.hosting import HostProcess, ObjectServerSpec, ReplicaHostSpec
from rayq.actors.listening_clock import ListeningClock
from rayq.config import ClusterConfig
from rayq.errors import RayqError, StaleBrokerError

CONFIG = ClusterConfig(remote_storage_url="s3://bucket")
SESSION_S = CONFIG.session_timeout_ms / 1000


class FakeProcess:
    def __init__(self) -> None:
        self.dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def wait_dead(self) -> str:
        return await asyncio.shield(self.dead)

    def kill(self) -> None:
        if not self.dead.done():
            self.dead.set_result("killed")


class FakeRuntime:
    """Starts what does nothing by itself."""

    processes_max = 8

    def __init__(self) -> None:
        self.started: list[tuple[ObjectServerSpec, FakeProcess]] = []
        self.strangers: dict[int, FakeProcess] = {}
        self.refusal: str | None = None

    async def start_object_server(self, spec: ObjectServerSpec) -> HostProcess:
        if self.refusal is not None:
            raise RayqError(self.refusal)
        self.started.append((spec, FakeProcess()))
        return self.started[-1][1]

    async def start_replica_host(self, spec: ReplicaHostSpec) -> HostProcess:
        raise AssertionError(spec)

    def adopt(self, pid: int, pid_start_time: int) -> HostProcess | None:
        return self.strangers.get(pid)

    @property
    def running(self) -> list[FakeProcess]:
        return [process for _, process in self.started if not process.dead.done()]


def attach(incarnation: str, trouble: str | None = None, pid: int = 1) -> messages.AttachObjectServer:
    return messages.AttachObjectServer(incarnation, pid, 1, "host", 4000 + pid, trouble)


Test = Callable[[FakeRuntime, ObjectServerProcess], Awaitable[None]]


def play(test: Test) -> None:
    with World(1) as world:
        process = world.host("a").process("broker")
        runtime = FakeRuntime()

        async def run() -> None:
            listening = ListeningClock(process.environment.clock, 0.25)
            process.environment.tasks.spawn(listening.run(), "listening clock")
            server = ObjectServerProcess(
                process.environment, CONFIG, runtime,
                cluster_name="c", broker=0, data_path="/d", listening=listening,
            )
            process.environment.tasks.spawn(server.run(), "object server")
            await asyncio.sleep(0.01)
            await test(runtime, server)

        world.run(run())


def test_it_is_in_trouble_until_it_says_that_its_probe_succeeded() -> None:
    async def test(runtime: FakeRuntime, server: ObjectServerProcess) -> None:
        mine = runtime.started[0][0].incarnation
        assert (server.endpoint, server.trouble) == (None, "its object server is starting")
        server.attach(attach(mine, "403"))
        assert (server.endpoint, server.trouble) == (("host", 4001), "403")
        server.attach(attach(mine))
        assert server.trouble is None
        await asyncio.sleep(SILENT_SESSIONS * SESSION_S / 2)
        server.stop()
        await asyncio.sleep(1.25 * BACKOFF_MAX_S)
        assert len(runtime.started) == 1 and not runtime.running

    play(test)


def test_one_that_dies_is_replaced_ever_more_slowly() -> None:
    async def test(runtime: FakeRuntime, server: ObjectServerProcess) -> None:
        for number in range(8):
            assert len(runtime.started) == number + 1
            incarnation = runtime.started[-1][0].incarnation
            server.attach(attach(incarnation))
            runtime.running[0].kill()
            await asyncio.sleep(0.05)
            with pytest.raises(StaleBrokerError):
                server.attach(attach(incarnation))  # It was on its way.
            assert server.endpoint is None and "ended: killed" in str(server.trouble)
            assert not runtime.running
            await asyncio.sleep(1.25 * min(BACKOFF_S * 2**number, BACKOFF_MAX_S))
        assert len({spec.incarnation for spec, _ in runtime.started}) == len(runtime.started)

    play(test)


def test_one_that_is_silent_is_killed_and_replaced() -> None:
    async def test(runtime: FakeRuntime, server: ObjectServerProcess) -> None:
        server.attach(attach(runtime.started[0][0].incarnation))
        await asyncio.sleep(SILENT_SESSIONS * SESSION_S + 2)
        assert len(runtime.started) == 2 and len(runtime.running) == 1
        await asyncio.sleep(START_TIMEOUT_S + 2)  # This one never presented itself.
        assert len(runtime.started) == 3 and len(runtime.running) == 1

    play(test)


def test_one_that_cannot_be_started_is_tried_again_and_its_trouble_told() -> None:
    async def test(runtime: FakeRuntime, server: ObjectServerProcess) -> None:
        runtime.refusal = "no package obstore"
        runtime.running[0].kill()
        await asyncio.sleep(5)
        assert "no package obstore" in str(server.trouble)
        runtime.refusal = None
        await asyncio.sleep(1.25 * BACKOFF_MAX_S)
        assert len(runtime.running) == 1

    play(test)


def test_one_that_outlived_an_earlier_broker_process_is_ended() -> None:
    async def test(runtime: FakeRuntime, server: ObjectServerProcess) -> None:
        runtime.strangers[7] = FakeProcess()
        with pytest.raises(StaleBrokerError):
            server.attach(attach("of long ago", pid=7))
        with pytest.raises(StaleBrokerError):
            server.attach(attach("of long ago", pid=8))  # Gone already.
        assert runtime.strangers[7].dead.done() and len(runtime.running) == 1
        assert server.endpoint is None

    play(test)
