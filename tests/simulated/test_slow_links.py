"""A follower behind a slow link catches up: it waits for answers that take long."""

from __future__ import annotations

from random import Random

import pytest

from proving.simulation.network import OTHER_HOST_S
from tests.simulated.staged import Stage, play

BYTES_PER_S = 100_000


def catches_up(partitions: int, batches: int, batch_bytes: int) -> None:
    async def script(stage: Stage) -> None:
        topics = []
        while len(topics) < partitions:
            topic = f"t{stage.world.next_pid()}"
            await stage.process.run(stage.admin.create_topic(topic, 1, 3))
            if stage.value(topic).leader != 2:
                topics.append(topic)
        noise = Random(1)  # noise cannot be compressed
        behind = stage.hosts[2]
        others = [host for host in stage.hosts if host is not behind]
        stage.network.cut([behind], others)
        for topic in topics:
            for _ in range(batches):
                await stage.send(topic, [noise.randbytes(batch_bytes)])
            assert 2 not in stage.in_sync(topic), "it left, so that the first write was acknowledged"
        stage.network.heal()
        stage.network.slow([behind], others, delay_s=OTHER_HOST_S, bytes_per_s=BYTES_PER_S)
        needed_s = partitions * batches * batch_bytes / BYTES_PER_S
        await stage.until(
            lambda: all(2 in stage.in_sync(topic) for topic in topics),
            "it to be in sync",
            limit_s=20 + 2 * needed_s,
        )

    play(script, limit_s=900)


def test_a_batch_that_takes_longer_than_the_fetch_timeout_arrives() -> None:
    catches_up(partitions=1, batches=3, batch_bytes=500_000)


@pytest.mark.slow
def test_many_partitions_share_a_slow_link() -> None:
    catches_up(partitions=6, batches=20, batch_bytes=20_000)
