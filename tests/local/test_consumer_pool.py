"""Consumer pools on a cluster in this process: what becomes of every record."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

import rayq
from rayq import ConsumerPool, PoolStatus, Record, TopicPartition
from rayq.actors.replica import produced_batch
from rayq.pools import pool_member, running_pool
from rayq.testing import LocalCluster
from tests.local.support import eventually, produce_raw, read_all
from tests.wrong_batches import sealed

NewTopic = Callable[..., str]
_groups = itertools.count(1)
SOON: dict[str, Any] = {"cool_down_s": 0.25, "retry_backoff_ms": 5}

pytestmark = pytest.mark.usefixtures("pools_are_twenty_times_as_fast")


@pytest.fixture
def group() -> str:
    return f"pool-{next(_groups)}"


class Seen:
    """A handler that keeps accounts."""

    def __init__(self) -> None:
        self.values: Counter[bytes] = Counter()
        self.order: dict[int, list[int]] = {}
        self._lock = threading.Lock()

    def __call__(self, records: list[Record]) -> None:
        with self._lock:
            for record in records:
                assert record.value is not None
                self.values[record.value] += 1
                self.order.setdefault(record.partition, []).append(record.offset)


def fill(cluster: LocalCluster, topic: str, partitions: int, each: int, first: int = 0) -> None:
    with cluster.producer() as producer:
        for number in range(first, first + each):
            for partition in range(partitions):
                producer.send(topic, b"%d/%d" % (partition, number), partition=partition)


def expected(partitions: int, each: int) -> Counter[bytes]:
    return Counter(b"%d/%d" % (p, n) for p in range(partitions) for n in range(each))


def wait(pool: ConsumerPool, holds: Callable[[PoolStatus], bool], what: str) -> PoolStatus:
    found: list[PoolStatus] = []

    def look() -> bool:
        found[:] = [pool.status()]
        return holds(found[0])

    eventually(look, what)
    return found[0]


def test_a_pool_wakes_for_records_handles_each_once_and_sleeps_again(
    cluster: LocalCluster, new_topic: NewTopic, group: str
) -> None:
    topic, seen = new_topic(partitions=3), Seen()
    with cluster.consumer_pool(topic, group, seen, **SOON) as pool:
        assert pool.status().wanted == 0 and pool.status().lag == 0
        fill(cluster, topic, 3, 400)
        status = pool.wait_idle(60)
        assert seen.values == expected(3, 400)
        assert all(order == list(range(400)) for order in seen.order.values())
        assert status.records == 1200 and status.problem is None
        # The pool shrinks to none, and the next records wake it again.
        wait(pool, lambda one: one.wanted == 0 and not one.consumers, "it sleeps")
        assert cluster.admin.describe_group(group).members == []
        fill(cluster, topic, 3, 10, first=400)
        pool.wait_idle(60)
        assert seen.values == expected(3, 410)
        assert cluster.consumer_pools().keys() == {group}
    assert cluster.consumer_pools() == {}
    with pytest.raises(rayq.errors.UnknownPoolError):
        pool.status()
    pool.stop()


def test_slow_handlers_bring_more_consumers_up_to_the_partitions(
    cluster: LocalCluster, new_topic: NewTopic, group: str
) -> None:
    topic, seen = new_topic(partitions=3), Seen()

    def slow(records: list[Record]) -> None:
        time.sleep(0.005 * len(records))
        seen(records)

    fill(cluster, topic, 3, 800)
    pool = cluster.consumer_pool(
        topic, group, slow, target_lag_s=0.5, max_records=20, **SOON
    )
    with pool:
        status = wait(pool, lambda one: one.running == 3, "three run")
        assert status.wanted == 3 and "no more partitions" in status.reason
        assert status.capacity_per_s is not None and 20 < status.capacity_per_s < 200
        wait(
            pool,
            lambda one: [len(c.partitions) for c in one.consumers] == [1, 1, 1],
            "one partition each",
        )
        pool.wait_idle(60)
        assert seen.values.keys() == expected(3, 800).keys()
        # No record comes again where partitions move between living consumers.
        assert max(seen.values.values()) == 1


def test_stopping_finishes_the_batch_and_commits_it(
    cluster: LocalCluster, new_topic: NewTopic, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, seen = new_topic(), Seen()
    at_work, go_on = threading.Event(), threading.Event()

    def waits(records: list[Record]) -> None:
        seen(records)
        at_work.set()
        assert go_on.wait(60)

    drain, is_drained = pool_member.PoolMember.drain, threading.Event()

    def drain_and_tell(member: pool_member.PoolMember) -> None:
        drain(member)
        is_drained.set()

    monkeypatch.setattr(pool_member.PoolMember, "drain", drain_and_tell)
    fill(cluster, topic, 1, 100)
    pool = cluster.consumer_pool(topic, group, waits, max_records=10, **SOON)
    assert at_work.wait(60)
    stopping = threading.Thread(target=pool.stop)
    stopping.start()
    assert is_drained.wait(60)
    go_on.set()
    stopping.join(60)
    handled = sum(seen.values.values())
    info = cluster.admin.describe_group(group)
    assert info.members == []
    assert info.partitions[TopicPartition(topic, 0)].offset == handled < 100
    with cluster.consumer_pool(topic, group, seen, **SOON) as again:
        again.wait_idle(60)
    assert seen.values == expected(1, 100)


def test_what_a_handler_keeps_refusing_goes_to_the_dead_letters_with_the_reason(
    cluster: LocalCluster, new_topic: NewTopic, group: str
) -> None:
    topic, dead, seen = new_topic(partitions=2), new_topic(), Seen()
    bad = {b"0/7", b"1/40"}

    def handler(records: list[Record]) -> None:
        if any(record.value in bad for record in records):
            raise ValueError("no such carrier: ÄÖ")
        seen(records)

    with cluster.producer() as producer:
        for number in range(50):
            for partition in range(2):
                producer.send(
                    topic,
                    b"%d/%d" % (partition, number),
                    key=b"k%d" % number,
                    headers=[("trace", b"t")],
                    partition=partition,
                    timestamp_ms=1_000 + number,
                )
    pool = cluster.consumer_pool(
        topic, group, handler, retries=2, dead_letter_topic=dead, **SOON
    )
    with pool:
        status = pool.wait_idle(60)
        assert status.dead_letters == 2 and status.retries >= 2 and status.records == 100
        assert status.problem is None
    assert set(seen.values) == set(expected(2, 50)) - bad
    letters = {record.value: record for record in read_all(cluster, dead)}
    assert letters.keys() == bad
    letter = letters[b"0/7"]
    assert letter.key == b"k7" and letter.timestamp_ms == 1_007
    assert letter.headers == [
        ("trace", b"t"),
        ("rayq.error.class", b"ValueError"),
        ("rayq.error.message", "no such carrier: ÄÖ".encode()),
        ("rayq.source", f"{topic}/0/7".encode()),
    ]


def fill_with_a_batch_that_nobody_can_read(
    cluster: LocalCluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Puts a batch at offset 5 of 0 to 9 in partition 0, as a leader of an older version let it
    in."""
    fill(cluster, topic, 1, 5)
    with monkeypatch.context() as patch:
        patch.setattr(produced_batch, "check_records", lambda *_, **__: None)
        produce_raw(cluster, topic, sealed({}, b"\xc1garbage"))
    fill(cluster, topic, 1, 4, first=5)


def test_a_batch_that_nobody_can_read_becomes_a_dead_letter_and_the_pool_goes_on(
    cluster: LocalCluster,
    new_topic: NewTopic,
    group: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic, dead, seen = new_topic(), new_topic(), Seen()
    fill_with_a_batch_that_nobody_can_read(cluster, topic, monkeypatch)
    with cluster.consumer_pool(topic, group, seen, dead_letter_topic=dead, **SOON) as pool:
        status = pool.wait_idle(60)
        assert (status.dead_letters, status.records, status.lag) == (1, 9, 0)
    assert seen.values == expected(1, 9)
    (letter,) = read_all(cluster, dead)
    assert (letter.key, letter.value) == (None, None)
    headers = dict(letter.headers)
    assert headers["rayq.error.class"] == b"CorruptBatchError"
    assert headers["rayq.source"] == f"{topic}/0/5".encode()


def test_without_a_dead_letter_topic_a_pool_waits_before_it_and_does_not_spin(
    cluster: LocalCluster,
    new_topic: NewTopic,
    group: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic, seen = new_topic(), Seen()
    monkeypatch.setattr(pool_member, "FAILED_POLL_PAUSE_S", 0.1)
    notes: list[str] = []
    monkeypatch.setattr(
        pool_member.PoolMember, "_note", lambda _self, problem: notes.append(problem)
    )
    fill_with_a_batch_that_nobody_can_read(cluster, topic, monkeypatch)
    with cluster.consumer_pool(topic, group, seen, **SOON) as pool:
        eventually(lambda: len(notes) >= 3, "it has tried thrice")
        began_s, before = time.monotonic(), len(notes)
        eventually(lambda: len(notes) >= before + 3, "it tries on")
        assert time.monotonic() - began_s > 0.25
        assert "dead_letter_topic" in notes[-1] and "Offsets 5 to 5" in notes[-1]
        # The records before the batch are handled and committed.
        eventually(lambda: pool.status().lag == 5, "lag of what follows")
    assert seen.values == expected(1, 5)


def test_a_failure_that_passes_is_tried_again_and_nothing_is_a_dead_letter(
    cluster: LocalCluster, new_topic: NewTopic, group: str
) -> None:
    topic, dead, seen = new_topic(), new_topic(), Seen()
    failures = iter(range(3))

    def flaky(records: list[Record]) -> None:
        if next(failures, None) is not None:
            raise ConnectionError("the database is away")
        seen(records)

    fill(cluster, topic, 1, 30)
    with cluster.consumer_pool(topic, group, flaky, dead_letter_topic=dead, **SOON) as pool:
        status = pool.wait_idle(60)
    assert status.dead_letters == 0 and status.retries == 3
    assert seen.values == expected(1, 30)


def test_without_a_dead_letter_topic_a_refused_record_waits_and_the_status_says_why(
    cluster: LocalCluster, new_topic: NewTopic, group: str
) -> None:
    topic, seen = new_topic(), Seen()
    is_broken = threading.Event()
    is_broken.set()

    def handler(records: list[Record]) -> None:
        if is_broken.is_set():
            raise KeyError("tail number")
        seen(records)

    fill(cluster, topic, 1, 5)
    with cluster.consumer_pool(
        topic, group, handler, retries=0, retry_backoff_max_ms=50, **SOON
    ) as pool:
        status = wait(pool, lambda one: one.retries >= 8, "it is tried again and again")
        assert "KeyError" in (status.problem or "") and status.lag == 5
        with pytest.raises(rayq.TimeoutError, match="KeyError"):
            pool.wait_idle(0.1)
        is_broken.clear()
        assert pool.wait_idle(60).problem is None
    assert seen.values == expected(1, 5)


def test_while_a_batch_waits_partitions_move_to_others_and_come_once(
    cluster: LocalCluster, new_topic: NewTopic, group: str
) -> None:
    topic, seen = new_topic(partitions=2), Seen()
    is_broken = threading.Event()
    is_broken.set()

    def handler(records: list[Record]) -> None:
        if is_broken.is_set():
            raise RuntimeError("not yet")
        seen(records)

    fill(cluster, topic, 2, 20)
    with cluster.consumer_pool(topic, group, handler, retry_backoff_max_ms=50, **SOON) as pool:
        wait(pool, lambda one: one.retries >= 2, "one fails")
        # Another member of the group, that is no consumer of the pool, takes one partition.
        with cluster.consumer(topic, group=group, auto_offset_reset="earliest") as other:
            mine: list[Record] = []

            def turn() -> bool:
                mine.extend(other.poll(0.05))
                return len(mine) == 20

            eventually(turn, "the other has a partition of its own")
            other.commit()
            assert {one.offset for one in mine} == set(range(20))
            is_broken.clear()
            pool.wait_idle(60)
        assert sum(seen.values.values()) == 20
        assert not set(seen.values) & {one.value for one in mine}


def test_arrow_tables_for_whoever_wants_them(
    cluster: LocalCluster, new_topic: NewTopic, group: str
) -> None:
    topic, dead = new_topic(partitions=2), new_topic()
    tables: list[pa.Table] = []

    def handler(table: pa.Table) -> None:
        if b"1/13" in table.column("value").to_pylist():
            raise OverflowError("too late")
        tables.append(table)

    fill(cluster, topic, 2, 100)
    pool = cluster.consumer_pool(
        topic, group, handler, batch="arrow", retries=0, dead_letter_topic=dead, **SOON
    )
    with pool:
        assert pool.wait_idle(60).dead_letters == 1
    values = Counter(pa.concat_tables(tables).column("value").to_pylist())
    assert values == expected(2, 100) - Counter([b"1/13"])
    (letter,) = read_all(cluster, dead)
    assert letter.value == b"1/13"
    assert ("rayq.source", f"{topic}/1/13".encode()) in letter.headers
    assert cluster.admin.describe_group(group).lag == 0


def test_coroutine_functions_and_classes_are_handlers_too(
    cluster: LocalCluster, new_topic: NewTopic, group: str
) -> None:
    topic, seen = new_topic(), Seen()
    closed: list[bool] = []
    threads: set[int] = set()

    async def in_turn(records: list[Record]) -> None:
        await asyncio.sleep(0.001)
        seen(records)

    class Connected:
        def __init__(self) -> None:
            self.seen = Seen()
            threads.add(threading.get_ident())

        def __call__(self, records: list[Record]) -> None:
            threads.add(threading.get_ident())
            self.seen(records)
            seen(records)

        def close(self) -> None:
            threads.add(threading.get_ident())
            closed.append(self.seen.values == expected(1, 10))

    fill(cluster, topic, 1, 10)
    with cluster.consumer_pool(topic, f"{group}-a", in_turn, **SOON) as pool:
        pool.wait_idle(60)
    assert seen.values == expected(1, 10)
    with cluster.consumer_pool(topic, f"{group}-b", Connected, min_consumers=1, **SOON) as pool:
        pool.wait_idle(60)
    assert closed == [True]
    assert len(threads) == 1  # as a connection to SQLite wants it


def test_latest_begins_where_the_topic_ended_when_the_pool_started(
    cluster: LocalCluster, new_topic: NewTopic, group: str
) -> None:
    topic, seen = new_topic(partitions=2), Seen()
    fill(cluster, topic, 2, 50)
    with cluster.consumer_pool(topic, group, seen, auto_offset_reset="latest", **SOON) as pool:
        assert pool.status().lag == 0
        # No consumer runs yet: these records must not be taken for old ones.
        fill(cluster, topic, 2, 10, first=50)
        pool.wait_idle(60)
    assert set(seen.values) == set(expected(2, 60)) - set(expected(2, 50))


def test_records_that_retention_deleted_do_not_keep_a_pool_awake(
    cluster: LocalCluster, new_topic: NewTopic, group: str
) -> None:
    topic, seen = new_topic(), Seen()
    fill(cluster, topic, 1, 50)
    cluster.admin.delete_records({TopicPartition(topic, 0): 50})
    with cluster.consumer_pool(topic, group, seen, **SOON) as pool:
        assert pool.wait_idle(60).lag == 0
        assert pool.status().wanted == 0
    assert not seen.values


def test_partitions_that_are_added_are_handled(
    cluster: LocalCluster, new_topic: NewTopic, group: str
) -> None:
    topic, seen = new_topic(), Seen()
    with cluster.consumer_pool(topic, group, seen, **SOON) as pool:
        cluster.admin.create_partitions(topic, 3)
        fill(cluster, topic, 3, 10)
        assert pool.wait_idle(60).partitions == 3
    assert seen.values == expected(3, 10)


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, says",
    [
        ({"target_lag": 5}, "Did you mean 'target_lag_s'"),
        ({"min_consumer": 5}, "Did you mean 'min_consumers'"),
        ({"max_consumers": 0}, "must be positive"),
        ({"min_consumers": 3, "max_consumers": 2}, "at least min_consumers"),
        ({"target_lag_s": 0}, "must be positive"),
        ({"batch": "rows"}, "batch cannot be 'rows'"),
        ({"resources": {"CPU": 1}}, "Did you mean 'num_cpus'"),
        ({"resources": {"num_cpu": 1}}, "Did you mean 'num_cpus'"),
        ({"resources": {"num_cpus": -1}}, "at least 0"),
        ({"retries": -1}, "at least 0"),
        ({"group_session_timeout_ms": 50}, "from 100"),
        ({"drain_timeout_s": math.inf}, "above 0 to 86,400"),
    ],
)
def test_a_config_that_cannot_be_is_refused(
    cluster: LocalCluster, topic: str, config: dict[str, Any], says: str
) -> None:
    with pytest.raises(rayq.ConfigError, match=says):
        cluster.consumer_pool(topic, "never", print, **config)


def yielding(records: list[Record]) -> Iterator[bytes | None]:
    for record in records:
        yield record.value


class Yielding:
    async def __call__(self, records: list[Record]) -> AsyncIterator[bytes | None]:
        for record in records:
            yield record.value


def test_topics_handlers_and_names_are_checked_before_anything_starts(
    cluster: LocalCluster, topic: str, group: str
) -> None:
    with pytest.raises(rayq.UnknownTopicError):
        cluster.consumer_pool("no-such-topic", group, print)
    with pytest.raises(rayq.UnknownTopicError):
        cluster.consumer_pool(topic, group, print, dead_letter_topic="no-such-topic")
    with pytest.raises(rayq.ConfigError, match="itself"):
        cluster.consumer_pool(topic, group, print, dead_letter_topic=topic)
    with pytest.raises(rayq.errors.HandlerError, match="cannot be called"):
        cluster.consumer_pool(topic, group, "print")  # type: ignore[arg-type]
    with pytest.raises(rayq.errors.HandlerError, match="Seen cannot be called"):
        cluster.consumer_pool(topic, group, type("Seen", (), {}))
    for yields in (yielding, Yielding, Yielding()):
        with pytest.raises(rayq.errors.HandlerError, match="generator"):
            cluster.consumer_pool(topic, group, yields)
    with pytest.raises(rayq.errors.InvalidRequestError):
        cluster.consumer_pool(topic, "", print)
    with cluster.consumer_pool(topic, group, print):
        with pytest.raises(rayq.errors.PoolExistsError):
            cluster.consumer_pool(topic, group, print)
    with rayq.connect(cluster.addresses[0], token=cluster.token) as outside:
        with pytest.raises(rayq.errors.InvalidRequestError, match="run on Ray"):
            outside.consumer_pool(topic, group, print)
    cluster.make_current()


def test_a_handler_class_that_cannot_be_made_is_told_and_not_started_again_at_once(
    cluster: LocalCluster, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_pool, "RESTART_PAUSE_S", 0.1)
    made: list[float] = []

    class Broken:
        def __init__(self) -> None:
            made.append(time.monotonic())
            raise OSError("no route to the database")

        def __call__(self, records: list[Record]) -> None: ...

    with cluster.consumer_pool(topic, group, Broken, min_consumers=1, **SOON) as pool:
        status = wait(pool, lambda one: len(made) >= 3, "it is tried again")
        assert "no route to the database" in (status.problem or "")
    gaps = [later - sooner for sooner, later in itertools.pairwise(made)]
    assert gaps[-1] > 0.18


def test_a_call_that_takes_longer_than_allowed_costs_its_consumer_its_place(
    cluster: LocalCluster, new_topic: NewTopic, group: str
) -> None:
    topic, seen = new_topic(), Seen()
    hangs, is_first = threading.Event(), itertools.count()

    def handler(records: list[Record]) -> None:
        if next(is_first) == 0:
            hangs.wait(60)
        seen(records)

    fill(cluster, topic, 1, 5)
    with cluster.consumer_pool(
        topic, group, handler, max_poll_interval_ms=1000, **SOON
    ) as pool:
        status = wait(pool, lambda one: one.problem is not None, "it is noticed")
        assert "max_poll_interval_ms" in (status.problem or "")
        pool.wait_idle(60)
        assert set(seen.values) == set(expected(1, 5))
        hangs.set()


# --- servers die ----------------------------------------------------------------------------------


def test_a_broker_dies_and_nothing_is_left_out(fragile: LocalCluster, group: str) -> None:
    fragile.create_topic("t", partitions=3)
    seen = Seen()
    with (
        fragile.consumer_pool(
            "t", group, seen, min_consumers=2, group_session_timeout_ms=3000, **SOON
        ) as pool,
        fragile.producer() as producer,
    ):
        wait(pool, lambda one: one.running == 2, "two run")
        for number in range(600):
            producer.send("t", b"%d/%d" % (number % 3, number // 3), partition=number % 3)
            if number == 300:
                # The coordinator of the group and a leader of the topic go with it.
                leader = fragile.admin.describe_topic("__consumer_offsets").partitions[0].leader
                assert leader is not None
                fragile.kill_broker(leader)
        producer.flush(60)
        pool.wait_idle(60)
        assert set(seen.values) == set(expected(3, 200))
        wait(pool, lambda one: one.problem is None and one.running == 2, "all is well again")
