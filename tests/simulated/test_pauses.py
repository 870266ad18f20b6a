"""How long writes pause where the controller falls silent, together with or besides a broker."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from proving.simulation import Process
from rayq.client.producing.producer import AsyncProducer
from rayq.config import ClusterConfig, ProducerConfig
from rayq.records import RecordMetadata
from tests.simulated.staged import Stage, play

PARTITIONS = 3
RESTART_S = 1.5
"""How long a broker's process that was killed is away."""
NODE_LIMIT_S = 5.0
CONTROLLER_NODE_LIMIT_S = 9.0
"""See "When something fails" in docs/architecture.md."""
FAULT_S = 15.0


class Writes:
    """Writes to all partitions of the topic `t`, 20 records a second each."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._acknowledged_s: list[list[float]] = [[] for _ in range(PARTITIONS)]

    async def start(self) -> None:
        await self._stage.process.run(self._stage.admin.create_topic("t", PARTITIONS, 3))
        self._stage.process.start(self._write(), "writes")

    async def _write(self) -> None:
        producer = AsyncProducer(self._stage.client, ProducerConfig())
        while True:
            for partition in range(PARTITIONS):
                await producer.send("t", b"x", partition=partition, on_delivery=self._note)
            await asyncio.sleep(0.05)

    def _note(self, metadata: RecordMetadata | None, error: BaseException | None) -> None:
        if metadata is not None:
            self._acknowledged_s[metadata.partition].append(self._stage.world.now_s)

    def longest_pause_s(self, from_s: float) -> float:
        """The longest time since `from_s` in which a partition acknowledged nothing."""
        until_s = self._stage.world.now_s
        return max(
            later - sooner
            for all_s in self._acknowledged_s
            for sooner, later in pairwise([from_s, *(at for at in all_s if at > from_s), until_s])
        )


@pytest.mark.slow
@pytest.mark.parametrize("gap_s", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("is_dark", [False, True])
def test_a_broker_that_starts_again_adds_nothing_to_the_loss_of_the_controllers_node(
    gap_s: float, is_dark: bool
) -> None:
    """`gap_s` lies between the two faults. The sockets of a dark node are not closed."""

    async def script(stage: Stage) -> None:
        cluster = stage.cluster
        writes = Writes(stage)
        await writes.start()
        await stage.pause(5)
        cluster.kill_broker(1)
        started = asyncio.ensure_future(_start_again(stage, 1))
        await stage.pause(gap_s)
        lost_s = stage.world.now_s
        for host in (cluster.hosts[0], cluster.controller_host):
            if is_dark:
                host.power_loss()
            for process in list(host.processes):
                process.kill()
        await stage.pause(FAULT_S)
        await started
        assert writes.longest_pause_s(lost_s) < CONTROLLER_NODE_LIMIT_S
        assert stage.in_sync("t") == {1, 2}

    play(script, seed=9)


@pytest.mark.slow
def test_brokers_that_wait_for_a_hung_controller_keep_their_sessions_with_the_next() -> None:
    """The preferred host takes over from a stand-in after one second, and ends sessions after three
    more."""

    async def script(stage: Stage) -> None:
        cluster = stage.cluster
        writes = Writes(stage)
        await writes.start()
        cluster.kill_controller()
        await stage.until(lambda: _stand_in(stage) is not None, "a broker to stand in")
        cluster.start_controller()
        await stage.pause(11)  # The leaders are balanced.
        hung = _stand_in(stage)
        assert hung is not None
        hung_s = stage.world.now_s
        processes = list(cluster.hosts[hung].processes)
        for process in processes:
            process.pause()
        others = {0, 1, 2} - {hung}
        while stage.world.now_s < hung_s + FAULT_S:
            for broker in others:
                state = cluster.brokers[broker].metadata.state
                assert all(state.is_live(one) for one in others)
            await stage.pause(0.1)
        assert writes.longest_pause_s(hung_s) < NODE_LIMIT_S
        for process in processes:
            process.resume()
        await stage.until(cluster.is_whole, "the broker to be back")

    play(script)


@pytest.mark.slow
def test_time_in_which_the_whole_machine_stands_still_comes_on_top() -> None:
    async def script(stage: Stage) -> None:
        cluster = stage.cluster
        writes = Writes(stage)
        await writes.start()
        await stage.pause(5)
        lost_s = stage.world.now_s
        for host in (cluster.hosts[0], cluster.controller_host):
            for process in list(host.processes):
                process.kill()
        await stage.until(lambda: _stand_in(stage) is not None, "a broker to stand in")
        everything = [process for host in stage.world.hosts for process in host.processes]
        await _stand_still(stage, everything, 3)
        await stage.pause(FAULT_S)
        assert 9 < writes.longest_pause_s(lost_s) < CONTROLLER_NODE_LIMIT_S + 3
        assert stage.in_sync("t") == {1, 2}

    play(script)


def test_a_controller_that_stood_still_does_not_take_itself_for_cut_off() -> None:
    """The voters answer it a moment later than it hears of its own standstill."""

    async def script(stage: Stage) -> None:
        cluster = stage.cluster
        controller = cluster.controller_process
        assert controller is not None
        await stage.pause(5)
        voters = list(cluster.broker_processes.values())
        standstill = asyncio.ensure_future(_stand_still(stage, voters, 3.5))
        await _stand_still(stage, [controller], 3)
        await standstill
        await stage.pause(5)
        assert cluster.controller is not None
        hosted = cluster.controller.controller_host.controller
        assert hosted is not None and hosted.epoch == 1

    # The voters would stand in for it by themselves sooner.
    play(script, config=ClusterConfig(controller_patience_ms=10_000))


async def _start_again(stage: Stage, broker: int) -> None:
    await stage.pause(RESTART_S)
    stage.cluster.start_broker(broker)


async def _stand_still(stage: Stage, processes: list[Process], seconds: float) -> None:
    for process in processes:
        process.pause()
    await stage.pause(seconds)
    for process in processes:
        process.resume()


def _stand_in(stage: Stage) -> int | None:
    for number, broker in stage.cluster.brokers.items():
        if (
            stage.cluster.broker_processes[number].alive
            and broker.controller_host.controller is not None
        ):
            return number
    return None
