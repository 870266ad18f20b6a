"""Who is behind judges nobody: sessions count only time in which the judge could have heard."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from proving.simulation import Process
from rayq.config import ClusterConfig
from tests.simulated.staged import Stage, play

SESSION_S = ClusterConfig().session_timeout_ms / 1000
BUSY_S = 30.0
TURN_S = 0.0002
"""What a busy process does of its other work between two long pieces."""


def _all_processes(stage: Stage) -> list[Process]:
    hosts = (stage.cluster.controller_host, *stage.hosts)
    return [process for host in hosts for process in host.processes]


async def _are_busy(stage: Stage, processes: Sequence[Process], piece_s: float) -> None:
    """Their loops hardly come to anything but long pieces of work, for a while."""
    until_s = stage.world.now_s + BUSY_S
    while stage.world.now_s < until_s:
        for process in processes:
            process.pause()
        await stage.pause(piece_s)
        for process in processes:
            process.resume()
        await stage.pause(TURN_S)


@pytest.mark.slow
@pytest.mark.parametrize("piece_s", [0.1, 0.24, 0.45])
def test_processes_that_are_all_busy_end_no_session_of_each_other(piece_s: float) -> None:
    async def script(stage: Stage) -> None:
        cluster = stage.cluster
        await stage.process.run(stage.admin.create_topic("t", 3, 3))
        await stage.pause(2)
        processes = _all_processes(stage)
        epochs = _leader_epochs(stage)
        await _are_busy(stage, processes, piece_s)
        assert all(process.alive for process in processes)
        await stage.pause(1)
        assert cluster.is_whole()
        assert _leader_epochs(stage) == epochs, "nobody was elected"

    play(script)


@pytest.mark.slow
def test_a_broker_that_dies_is_noticed_in_its_time_by_a_controller_that_was_busy_before() -> None:
    async def script(stage: Stage) -> None:
        cluster = stage.cluster
        controller = cluster.controller_process
        assert controller is not None
        await _are_busy(stage, [controller], 0.45)
        await stage.pause(1)
        cluster.hosts[2].power_loss()
        for process in list(cluster.hosts[2].processes):
            process.kill()
        state = cluster.brokers[0].metadata.state
        began_s = stage.world.now_s
        await stage.until(lambda: not state.is_live(2), "the session to end")
        assert stage.world.now_s - began_s < SESSION_S + 0.5

    play(script)


def _leader_epochs(stage: Stage) -> list[int]:
    state = stage.cluster.brokers[0].metadata.state
    return [partition.value.leader_epoch for _, _, partition in state.all_partitions()]
