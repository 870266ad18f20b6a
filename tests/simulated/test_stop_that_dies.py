"""The command that stops the whole cluster dies on the way: brokers that were not stopped go on."""

from __future__ import annotations

from rayq.messages import PrepareStop
from tests.simulated.staged import Stage, play


def test_partitions_of_a_stopped_broker_get_leaders_after_a_stop_that_died() -> None:
    async def script(stage: Stage) -> None:
        cluster = stage.cluster
        await stage.process.run(stage.admin.create_topic("t", 3, 3))
        await stage.send("t", [b"%d" % number for number in range(20)])
        assert cluster.controller is not None and cluster.controller_process is not None
        controller = cluster.controller.controller_host.controller
        assert controller is not None
        await cluster.controller_process.run(controller.handle(PrepareStop()))
        # The command that was to stop the other brokers was killed after this.
        await cluster.broker_processes[0].run(cluster.brokers[0].stop())
        cluster.kill_broker(0)
        await stage.until(
            lambda: stage.value("t").leader not in (None, 0), "another to lead", limit_s=7
        )
        await stage.send("t", [b"more"] * 20)

    play(script)


def test_a_stop_that_goes_on_elects_nobody() -> None:
    async def script(stage: Stage) -> None:
        cluster = stage.cluster
        await stage.process.run(stage.admin.create_topic("t", 1, 3))
        await stage.send("t", [b"%d" % number for number in range(20)])
        assert cluster.controller is not None and cluster.controller_process is not None
        controller = cluster.controller.controller_host.controller
        assert controller is not None
        epoch = stage.value("t").leader_epoch
        await cluster.controller_process.run(controller.handle(PrepareStop()))
        for number in (0, 1):  # One after the other, as on a busy machine.
            await stage.pause(4)
            await cluster.broker_processes[number].run(cluster.brokers[number].stop())
        value = stage.value("t")
        assert value.leader is None and value.leader_epoch == epoch + 1
        assert stage.in_sync("t") == {0, 1, 2}

    play(script)


def test_a_stop_elects_nobody_where_a_broker_stands_in_for_the_controller() -> None:
    async def script(stage: Stage) -> None:
        cluster = stage.cluster
        await stage.process.run(stage.admin.create_topic("t", 1, 3))
        await stage.send("t", [b"%d" % number for number in range(20)])
        cluster.kill_controller()
        await stage.until(
            lambda: any(one.controller_host.controller for one in cluster.brokers.values()),
            "a broker to stand in",
        )
        cluster.start_controller()
        await stage.pause(1)
        assert cluster.controller is not None and cluster.controller_process is not None
        assert cluster.controller.controller_host.controller is None
        epoch = stage.value("t").leader_epoch
        await cluster.controller_process.run(cluster.controller.prepare_stop())
        for number in (0, 1, 2):
            await cluster.broker_processes[number].run(cluster.brokers[number].stop())
        value = stage.value("t")
        assert value.leader is None and value.leader_epoch == epoch + 1
        assert stage.in_sync("t") == {0, 1, 2}

    play(script)
