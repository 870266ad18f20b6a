"""Compacted topics in a whole cluster: three replicas that each clean their own log."""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayq import OffsetRange, Record
from rayq.actors.replica import produced_batch
from rayq.config import GIB, TopicConfig
from rayq.errors import NullKeyError
from rayq.runtime import cleaner_process
from rayq.storage.batch import decode_columns, encode_batch, split_batches
from rayq.storage.cleaner import CLEANING
from rayq.storage.disk import LocalDisk
from rayq.storage.log import Log
from rayq.storage.swap import SWAP
from rayq.storage.verify import verify
from rayq.testing import LocalCluster
from tests.local.support import (
    FAST,
    eventually,
    leader_of,
    log_size,
    partition_of,
    place,
    produce_raw,
    read_all,
    wait_in_sync,
)
from tests.wrong_batches import sealed

AT_ONCE = {
    "cleanup_policy": "compact",
    "segment_bytes": 4096,
    "min_cleanable_dirty_ratio": 0.0,
    "max_compaction_lag_ms": 100,
}
"""Configs of a topic whose log is compacted within moments."""


WAIT_S = 60.0
"""The limit for passes of helpers, which get little time on a busy machine."""


@pytest.fixture(autouse=True)
def helpers_get_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Helpers give up their idle priority soon: other tests may leave no time to it."""
    monkeypatch.setattr(cleaner_process, "IDLE_PATIENCE_S", 1.0)


@pytest.fixture
def eager(tmp_path: Path) -> Iterator[LocalCluster]:
    """Three brokers that look for logs to compact all the time."""
    with LocalCluster(
        brokers=3,
        data_dir=tmp_path / "data",
        compaction_check_interval_ms=100,
        compaction_bytes_per_s=GIB,
        retention_check_interval_ms=100,
        **FAST,
    ) as cluster:
        yield cluster


def state_of(records: list[Record]) -> dict[bytes, bytes]:
    state: dict[bytes, bytes] = {}
    for record in records:
        assert record.key is not None
        if record.value is None:
            state.pop(record.key, None)
        else:
            state[record.key] = record.value
    return state


def replica_records(data: str, broker: int, topic: str) -> list[tuple[int, bytes, bytes | None]]:
    """The records that the replica of a stopped broker holds."""
    path = f"{data}/broker-{broker}/{topic}-0"
    log = Log.open(LocalDisk(), path, TopicConfig(), checkpoint_bytes=GIB, now_ms=1 << 60)
    found: list[tuple[int, bytes, bytes | None]] = []
    offset = log.start_offset
    while offset < log.end_offset:
        data_read, offset = log.plan_read(offset, log.end_offset, 1 << 20).run()
        for position, header in split_batches(data_read):
            columns = decode_columns(data_read, position, header)
            for one, key, value in zip(
                columns.offsets, columns.keys or [], columns.values, strict=False
            ):
                assert key is not None
                found.append((one, key, value))
    return found


def log_sizes(cluster: LocalCluster, topic: str) -> list[int]:
    root = Path(cluster.data_dir)
    return [log_size(root / f"broker-{broker}" / f"{topic}-0") for broker in range(3)]


@pytest.mark.thorough
def test_every_replica_keeps_the_latest_record_of_each_key(eager: LocalCluster) -> None:
    eager.create_topic("state", delete_retention_ms=60_000, **AT_ONCE)
    rng = random.Random(5)
    state: dict[bytes, bytes] = {}
    sent = 0
    with eager.producer() as producer:
        for _ in range(40):
            for _ in range(100):
                key, value = b"k%d" % rng.randrange(50), b"%d" % sent
                sent += 1
                if rng.random() < 0.1:
                    producer.send("state", None, key=key)
                    state.pop(key, None)
                else:
                    producer.send("state", value, key=key)
                    state[key] = value
            producer.flush()
            assert state_of(read_all(eager, "state")) == state

    def all_are_compacted() -> bool:
        """Whether each key has one record, and nothing else takes room."""
        return len(read_all(eager, "state")) <= 50 and max(log_sizes(eager, "state")) < 9000

    eventually(all_are_compacted, "all three replicas are compacted", WAIT_S)
    records = read_all(eager, "state")
    assert state_of(records) == state
    with eager.consumer("state", auto_offset_reset="earliest") as consumer:
        ends = consumer.end_offsets([place("state")])
        assert ends == {place("state"): sent}
        found = consumer.offsets_for_times({place("state"): 0})
        assert found == {place("state"): records[0].offset}
        table_rows: list[tuple[int, bytes, bytes | None]] = []
        while consumer.position(place("state")) < sent:
            table = consumer.poll_arrow(timeout_s=1)
            columns = (table["offset"], table["key"], table["value"])
            table_rows += zip(*(column.to_pylist() for column in columns), strict=True)
        assert table_rows == [(record.offset, record.key, record.value) for record in records]
        for count in (1, 7, len(records), len(records) + 1):
            consumer.seek_to_last(count)
            assert list(consumer.until_end()) == records[-count:], "records, not offsets"
    assert eager.tail("state", 3) == records[-3:]
    with eager.consumer("state", auto_offset_reset="earliest") as consumer:
        for offset in (0, sent // 2, records[-1].offset):
            consumer.seek(place("state"), offset)
            first = consumer.poll(timeout_s=60)[0]
            assert first.offset == next(one.offset for one in records if one.offset >= offset)
    eager.stop()
    for broker in range(3):
        held = {key: value for _, key, value in replica_records(eager.data_dir, broker, "state")}
        assert {key: value for key, value in held.items() if value is not None} == state
    assert all(report.is_sound for report in verify(LocalDisk(), eager.data_dir))


def test_a_batch_that_nobody_can_read_stops_no_replica_of_a_compacted_topic(
    eager: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager.create_topic("state", **AT_ONCE)
    with monkeypatch.context() as patch:  # as a leader of an older version, which did not check
        patch.setattr(produced_batch, "check_records", lambda *_, **__: None)
        produce_raw(eager, "state", sealed({}, b"\xc1garbage"))
    with eager.producer() as producer:
        for number in range(200):
            producer.send("state", b"%d" % number + bytes(100), key=b"k%d" % (number % 3))
            if number % 10 == 9:
                producer.flush()

    def kept() -> list[float]:
        return [
            sample.value
            for sample in eager.metrics()
            if sample.name == "rayq_log_unreadable_batches"
        ]

    eventually(lambda: kept() == [1, 1, 1], "all three replicas have met it", WAIT_S)
    eventually(lambda: max(log_sizes(eager, "state")) < 9000, "all are compacted", WAIT_S)
    assert len(wait_in_sync(eager, "state").isr) == 3
    with eager.consumer(auto_offset_reset="earliest") as consumer:
        consumer.assign([place("state")])
        consumer.seek(place("state"), 1)
        last_offset = 0
        while last_offset < 200:  # A read ends with a segment.
            records = consumer.poll(timeout_s=60)
            assert records, f"nothing came after {last_offset}"
            last_offset = records[-1].offset


def test_a_record_without_a_key_is_refused_and_nothing_of_its_batch_is_written(
    eager: LocalCluster,
) -> None:
    eager.create_topic("state", **AT_ONCE)
    with pytest.raises(NullKeyError):
        produce_raw(eager, "state", encode_batch([b"1", b"2"], [b"a", None], None, 1))
    produce_raw(eager, "state", encode_batch([b"1", b"2"], [b"a", b""], None, 1))
    assert [record.key for record in read_all(eager, "state")] == [b"a", b""]


@pytest.mark.thorough
def test_a_follower_that_was_away_for_longer_than_tombstones_stay_resurrects_nothing(
    eager: LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rayq.actors.replica.follower")
    eager.create_topic("state", delete_retention_ms=200, **AT_ONCE)
    wait_in_sync(eager, "state")
    with eager.producer() as producer:
        producer.send_many("state", [b"old"] * 100, keys=[b"k%d" % n for n in range(100)])
        producer.flush()
        wait_in_sync(eager, "state")
        eager.kill_broker(2)
        producer.send_many("state", [None] * 50, keys=[b"k%d" % n for n in range(50)])
        producer.flush()

        def no_tombstone_is_left() -> bool:
            producer.send("state", b"new", key=b"k99").result(60)
            return all(record.value is not None for record in read_all(eager, "state"))

        eventually(no_tombstone_is_left, "the tombstones are gone", WAIT_S)
        eager.start_broker(2)
        wait_in_sync(eager, "state")
    assert re.search(r"log_restarted topic=state partition=0 epoch=\d+ broker=2 offset=0", caplog.text)
    expected = state_of(read_all(eager, "state"))
    assert set(expected) == {b"k%d" % n for n in range(50, 100)}
    eager.stop()
    for broker in range(3):
        # A tombstone may be left where the last pass was a while ago.
        held = {key: value for _, key, value in replica_records(eager.data_dir, broker, "state")}
        live = {key: value for key, value in held.items() if value is not None}
        assert live == expected, f"broker {broker}"


def test_a_follower_that_was_away_for_less_goes_on_where_it_was(eager: LocalCluster) -> None:
    eager.create_topic("state", delete_retention_ms=3_600_000, **AT_ONCE)
    wait_in_sync(eager, "state")
    with eager.producer() as producer:
        for number in range(50):
            producer.send("state", b"%d" % number, key=b"k%d" % (number % 10)).result(60)
        wait_in_sync(eager, "state")
        other = next(one for one in range(3) if one != leader_of(eager, "state"))
        eager.kill_broker(other)
        for number in range(300):
            producer.send("state", b"%d" % number, key=b"k%d" % (number % 10))
        producer.send("state", None, key=b"k5")
        producer.flush()
    leader = leader_of(eager, "state")
    eventually(
        lambda: log_sizes(eager, "state")[leader] < 3000, "the leader's log is compacted", WAIT_S
    )
    eager.start_broker(other)
    wait_in_sync(eager, "state")
    expected = state_of(read_all(eager, "state"))
    assert len(expected) == 9
    eager.stop()
    for broker in range(3):
        held = {key: value for _, key, value in replica_records(eager.data_dir, broker, "state")}
        assert {key: value for key, value in held.items() if value is not None} == expected


def test_after_an_unclean_election_nobody_keeps_a_log_that_lacks_what_was_superseded(
    eager: LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """The previous leader has compacted away a record that is its key's latest again once the new
    leader lacks the rest: it copies the new leader's log instead of cutting its own."""
    caplog.set_level(logging.INFO, "rayq.actors.replica.follower")
    eager.create_topic(
        "state",
        replication_factor=2,
        min_insync_replicas=1,
        unclean_leader_election=True,
        **AT_ONCE,
    )
    keys = [b"k%d" % number for number in range(10)]
    first = wait_in_sync(eager, "state", brokers=2)
    leader = leader_of(eager, "state")
    (away,) = set(first.isr) - {leader}
    with eager.producer() as producer:
        producer.send_many("state", [b"old"] * 10, keys=keys).result(60)
        eager.kill_broker(away)
        eventually(lambda: partition_of(eager, "state").isr == [leader], "the other left")
        for turn in range(20):
            producer.send_many("state", [b"new"] * 10, keys=keys)
            producer.send("state", b"%d" % turn, key=b"turn").result(60)

        def superseded_ones_are_gone() -> bool:
            producer.send("state", b"last", key=b"turn").result(60)
            return b"old" not in {record.value for record in read_all(eager, "state")}

        eventually(superseded_ones_are_gone, "the log is compacted", WAIT_S)
    eager.kill_broker(leader)
    eager.start_broker(away)
    eventually(lambda: partition_of(eager, "state").leader == away, "the remaining one leads")
    eager.start_broker(leader)
    wait_in_sync(eager, "state", brokers=2)
    restarted = rf"log_restarted topic=state partition=0 epoch=\d+ broker={leader} offset=0"
    assert re.search(restarted, caplog.text)
    state = dict.fromkeys(keys, b"old")
    assert state_of(read_all(eager, "state")) == state
    eager.stop()
    for broker in (leader, away):
        held = {key: value for _, key, value in replica_records(eager.data_dir, broker, "state")}
        assert held == state, f"broker {broker}"


def test_leaders_change_while_logs_are_compacted(eager: LocalCluster) -> None:
    eager.create_topic("state", delete_retention_ms=300, **AT_ONCE)
    wait_in_sync(eager, "state")
    state: dict[bytes, bytes] = {}
    with eager.producer(request_timeout_ms=2000) as producer:
        for turn in range(4):
            for number in range(300):
                key = b"k%d" % (number % 30)
                if number % 17 == 0:
                    producer.send("state", None, key=key)
                    state.pop(key, None)
                else:
                    state[key] = b"%d-%d" % (turn, number)
                    producer.send("state", state[key], key=key)
                if number == 150:
                    eager.kill_replica("state", 0, leader_of(eager, "state"))
            producer.flush()
            assert state_of(read_all(eager, "state")) == state
    wait_in_sync(eager, "state")
    eager.stop()
    for broker in range(3):
        found: dict[bytes, bytes] = {}
        for _, key, value in replica_records(eager.data_dir, broker, "state"):
            if value is None:
                found.pop(key, None)
            else:
                found[key] = value
        assert found == state, f"broker {broker}"
    assert all(report.is_sound for report in verify(LocalDisk(), eager.data_dir))


def cleaner_processes() -> list[int]:
    """The helper processes of this process."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            command = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"rayq.runtime.cleaner_process" in command and str(os.getpid()).encode() in command:
            found.append(int(name))
    return found


@pytest.mark.thorough
def test_a_helper_that_is_killed_costs_nothing_but_its_work(tmp_path: Path) -> None:
    with LocalCluster(
        brokers=1,
        data_dir=tmp_path / "data",
        compaction_check_interval_ms=100,
        compaction_bytes_per_s=60_000,
    ) as cluster:
        cluster.create_topic("state", replication_factor=1, **AT_ONCE)
        state = {}
        with cluster.producer(compression_type="none") as producer:
            for number in range(3000):
                state[b"k%d" % (number % 100)] = value = b"%d" % number * 10
                producer.send("state", value, key=b"k%d" % (number % 100))
            producer.flush()
        for wait_s in (0.2, 0.5, 1.0, 1.5):
            eventually(lambda: bool(cleaner_processes()), "a helper runs")
            time.sleep(wait_s)
            for pid in cleaner_processes():
                os.kill(pid, signal.SIGKILL)
            assert state_of(read_all(cluster, "state")) == state
        cluster.admin.alter_topic_config("state", max_compaction_lag_ms=None)
        (broker,) = (Path(cluster.data_dir) / "broker-0",)
        eventually(
            lambda: log_size(broker / "state-0") < 30_000,
            "it is compacted at last",
            2 * WAIT_S,
        )
        assert state_of(read_all(cluster, "state")) == state
        eventually(lambda: not cleaner_processes(), "no helper runs", WAIT_S)
        directory = broker / "state-0"
        eventually(
            lambda: not (directory / SWAP).exists() and not list((directory / CLEANING).iterdir()),
            "the swap is complete",
        )


def test_a_helper_that_hangs_or_gets_no_time_is_replaced(eager: LocalCluster) -> None:
    eager.create_topic("state", replication_factor=1, **AT_ONCE)
    with eager.producer() as producer:
        for number in range(300):
            producer.send("state", b"%d" % number, key=b"k%d" % (number % 10))
    stopped: list[int] = []

    def stop_one() -> bool:
        for pid in cleaner_processes():
            os.kill(pid, signal.SIGSTOP)
            stopped.append(pid)
        return bool(stopped)

    eventually(stop_one, "a helper runs")
    eventually(lambda: len(read_all(eager, "state")) == 10, "another has done its work", WAIT_S)
    assert not set(stopped) & set(cleaner_processes())


def test_compact_and_delete_forgets_old_keys(eager: LocalCluster) -> None:
    eager.create_topic(
        "state", **{**AT_ONCE, "cleanup_policy": "compact,delete", "retention_ms": 1500}
    )
    with eager.producer() as producer:
        ranges: list[OffsetRange] = producer.send_many(
            "state", [b"x" * 100] * 200, keys=[b"k%d" % n for n in range(200)]
        ).result(60)
        assert ranges

        def old_ones_are_gone() -> bool:
            producer.send("state", b"y", key=b"new").result(60)
            return {record.key for record in read_all(eager, "state")} == {b"new"}

        eventually(old_ones_are_gone, "retention deleted the old segments", WAIT_S)


@pytest.mark.thorough
def test_a_log_start_that_moves_during_a_pass_does_not_undo_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rayq.actors")
    with LocalCluster(
        brokers=1,
        data_dir=tmp_path / "data",
        compaction_check_interval_ms=100,
        compaction_bytes_per_s=30_000,
    ) as cluster:
        cluster.create_topic("state", replication_factor=1, **{**AT_ONCE, "cleanup_policy": "delete"})
        with cluster.producer(compression_type="none") as producer:
            for number in range(1500):
                producer.send("state", b"x" * 50, key=b"k%d" % (number % 100))
                if number % 50 == 49:
                    producer.flush()
        directory = tmp_path / "data" / "broker-0" / "state-0"
        first = directory / f"{0:020d}.log"
        assert len(list(directory.glob("*.log"))) > 20
        cluster.admin.alter_topic_config("state", cleanup_policy="compact")
        eventually(lambda: log_size(directory / CLEANING) > 0, "a pass is under way", WAIT_S)
        cluster.admin.delete_records({place("state"): 500})
        assert first.exists(), "the pass goes on with it"
        eventually(lambda: log_size(directory) < 20_000, "it is compacted", WAIT_S)
        assert [record.offset for record in read_all(cluster, "state")] == list(range(1400, 1500))
        assert "changed while it was compacted" not in caplog.text
        eventually(lambda: not cleaner_processes(), "the pass is over", WAIT_S)
        cluster.admin.delete_records({place("state"): 1500})
        assert read_all(cluster, "state") == []
        eventually(lambda: not first.exists(), "what lies below the start is removed")
    assert all(report.is_sound for report in verify(LocalDisk(), str(tmp_path)))


def test_deleting_records_of_a_compacted_topic(eager: LocalCluster) -> None:
    eager.create_topic("state", **AT_ONCE)
    with eager.producer() as producer:
        for number in range(200):
            producer.send("state", b"%d" % number, key=b"k%d" % (number % 20))
        producer.flush()
    eventually(lambda: len(read_all(eager, "state")) == 20, "it is compacted", WAIT_S)
    eager.admin.delete_records({place("state"): 190})
    assert [record.offset for record in read_all(eager, "state")] == list(range(190, 200))
