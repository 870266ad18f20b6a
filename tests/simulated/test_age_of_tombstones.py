"""A tombstone stays for delete_retention_ms after it was compacted, also where the broker was away."""

from __future__ import annotations

from rayq.client.producing.producer import AsyncProducer
from rayq.config import ClusterConfig, ProducerConfig
from rayq.storage.batch import decode_columns, split_batches
from tests.simulated.staged import Stage, play

AWAY_S = 120.0
RETENTION_S = 30.0


def test_a_broker_that_was_away_for_long_does_not_drop_a_tombstone_too_soon() -> None:
    async def script(stage: Stage) -> None:
        await stage.process.run(
            stage.admin.create_topic(
                "t",
                1,
                1,
                cleanup_policy="compact",
                segment_bytes=1024,
                min_cleanable_dirty_ratio=0.01,
                min_compaction_lag_ms=20_000,
                delete_retention_ms=int(RETENTION_S * 1000),
            )
        )
        await stage.process.run(write(stage))
        [broker] = stage.in_sync("t")
        assert has_tombstone(stage, broker)
        # The broker is away before a pass of the cleaner is due, and for longer than tombstones
        # stay.
        stage.hosts[broker].power_loss()
        await stage.pause(AWAY_S)
        stage.cluster.start_broker(broker)
        await stage.until(lambda: stage.log("t", broker) is not None, "the broker is back")
        back_s = stage.world.now_s

        def is_compacted() -> bool:
            held = stage.log("t", broker)
            return held is not None and held.log.cleaned_offset > 0

        await stage.until(is_compacted, "the log is compacted")
        await stage.until(lambda: not has_tombstone(stage, broker), "it goes", limit_s=120)
        assert stage.world.now_s - back_s >= RETENTION_S

    play(script, config=ClusterConfig(compaction_check_interval_ms=500, flush_checkpoint_bytes=1))


async def write(stage: Stage) -> None:
    producer = AsyncProducer(
        stage.client, ProducerConfig(batch_size=256, compression_type="none")
    )
    await producer.send("t", b"value", key=b"gone")
    await producer.send("t", None, key=b"gone")
    for number in range(60):
        await producer.send("t", b"." * 40, key=b"%d" % number)
    await producer.close()


def has_tombstone(stage: Stage, broker: int) -> bool:
    held = stage.log("t", broker)
    assert held is not None
    log = held.log
    plan = log.plan_read(0, log.end_offset, 1 << 20)
    data, _ = plan.run()
    for position, header in split_batches(data):
        columns = decode_columns(data, position, header)
        keys = columns.keys or []
        if any(key == b"gone" and columns.values[at] is None for at, key in enumerate(keys)):
            return True
    return False
