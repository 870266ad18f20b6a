"""Moves that copy no more bytes a second than they may."""

from __future__ import annotations

import asyncio
from random import Random

from rayq.records import TopicPartition
from tests.simulated.staged import Stage, play

THROTTLE_BYTES_PER_S = 3_000
PLACE = TopicPartition("t", 0)


def test_a_move_of_less_than_what_is_written_ends_once_its_throttle_is_lifted() -> None:
    async def script(stage: Stage) -> None:
        run, noise = stage.process.run, Random(1)  # noise cannot be compressed
        await run(stage.admin.create_topic("t", 1, 3))
        before = [member.broker for member in stage.value("t").isr]
        (added,) = {0, 1, 2, 3}.difference(before)
        target = [*before[:2], added]

        async def write() -> None:
            """Four times as many bytes a second as the move may copy."""
            while True:
                await stage.send("t", [noise.randbytes(4 * THROTTLE_BYTES_PER_S)])
                await asyncio.sleep(1)

        async def move(throttle: int | None) -> None:
            await run(
                stage.admin.reassign_partitions(
                    {PLACE: target}, throttle_bytes_per_s=throttle, wait=False
                )
            )

        writing = asyncio.ensure_future(write())
        await stage.pause(5)
        began_s = stage.world.now_s
        await move(THROTTLE_BYTES_PER_S)
        await stage.until(lambda: stage.log("t", added) is not None, "a new replica")
        copy = stage.log("t", added)
        assert copy is not None
        for _ in range(2):
            here = copy.log.size_bytes
            await stage.pause(12)
            assert here < copy.log.size_bytes, "it goes on"
            most = (stage.world.now_s - began_s + 10) * THROTTLE_BYTES_PER_S
            assert copy.log.size_bytes < most
            assert added not in stage.in_sync("t")
        await move(None)
        await stage.until(lambda: set(target) == set(stage.value("t").replicas), "its end")
        writing.cancel()

    play(script, brokers=4)
