"""The disks of two voters of three are full while the controller changes."""

from __future__ import annotations

import asyncio
import errno

from tests.simulated.staged import Stage, play


def test_voters_whose_disks_were_full_elect_a_controller_once_there_is_room() -> None:
    async def script(stage: Stage) -> None:
        cluster = stage.cluster
        await stage.process.run(stage.admin.create_topic("t", 1, 3))
        await stage.send("t", [b"%d" % number for number in range(20)])
        full = [
            host.disk.fail("write", "create", error=errno.ENOSPC) for host in stage.hosts[:2]
        ]
        # The controller's epoch ends, and no voter can promise another one.
        cluster.kill_controller()
        stage.hosts[2].power_loss()
        await asyncio.sleep(10)
        for fault in full:
            fault.heal()
        cluster.start_broker(2)
        cluster.start_controller()
        await stage.until(cluster.is_whole, "all to be well", limit_s=40)
        await stage.send("t", [b"more"] * 20)
        await stage.process.run(stage.admin.create_topic("other", 1, 3))

    play(script)
