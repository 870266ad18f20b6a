"""Consumer pools with exactly_once: whatever dies, each record has its effects once."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

import rayq
from rayq import Outgoing, Record
from rayq.client.background import background_loop
from rayq.pools import pool_member, transactions
from rayq.testing import LocalCluster
from tests.local.support import eventually, read_all

NewTopic = Callable[..., str]
_groups = itertools.count(1)
SOON: dict[str, Any] = {"cool_down_s": 0.25, "retry_backoff_ms": 5, "exactly_once": True}


@pytest.fixture(autouse=True)
def pools_try_again_soon(
    pools_are_twenty_times_as_fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_member, "FAILED_POLL_PAUSE_S", 0.02)


@pytest.fixture
def group() -> str:
    return f"once-{next(_groups)}"


def fill(cluster: LocalCluster, topic: str, partitions: int, each: int) -> list[bytes]:
    values = [b"%d/%d" % (at, number) for number in range(each) for at in range(partitions)]
    with cluster.producer() as producer:
        for value in values:
            producer.send(topic, value, partition=int(value.split(b"/")[0]))
    return sorted(values)


def values_of(cluster: LocalCluster, topic: str) -> list[bytes]:
    return sorted(record.value or b"" for record in read_all(cluster, topic))


def test_what_the_handler_returns_is_sent_once_however_the_handler_is_made(
    cluster: LocalCluster, new_topic: NewTopic, group: str
) -> None:
    topic, out = new_topic(partitions=2), new_topic(partitions=2)
    sent = fill(cluster, topic, 2, 20)

    def one(records: list[Record]) -> Outgoing:
        (record,) = records
        return Outgoing(out, record.value, key=b"k", headers=[("h", b"1")], partition=1)

    async def several(records: list[Record]) -> Iterator[Outgoing]:
        return (Outgoing(out, record.value) for record in records)

    def arrow(table: pa.Table) -> list[Outgoing]:
        return [Outgoing(out, value) for value in table.column("value").to_pylist()]

    for number, (handler, config) in enumerate(
        [(one, {"max_records": 1}), (several, {}), (arrow, {"batch": "arrow"})], start=1
    ):
        name = f"{group}-{number}"
        with cluster.consumer_pool(topic, name, handler, **SOON, **config) as pool:
            assert pool.wait_idle(60).problem is None
        assert values_of(cluster, out) == sorted(sent * number)
    first = [record for record in read_all(cluster, out) if record.key == b"k"]
    assert {record.partition for record in first} == {1}
    assert all(record.headers == [("h", b"1")] for record in first)


def test_a_handler_that_keeps_raising_has_its_dead_letters_in_the_transaction(
    cluster: LocalCluster, new_topic: NewTopic, group: str
) -> None:
    topic, out, dead = new_topic(partitions=2), new_topic(), new_topic()
    sent = fill(cluster, topic, 2, 30)
    bad, calls = [b"0/7", b"1/20"], Counter[bytes]()

    def handler(records: list[Record]) -> list[Outgoing]:
        calls.update(record.value for record in records if record.value)
        if any(record.value in bad for record in records):
            raise ValueError("no such carrier")
        return [Outgoing(out, record.value) for record in records]

    pool = cluster.consumer_pool(topic, group, handler, retries=1, dead_letter_topic=dead, **SOON)
    with pool:
        pool.wait_idle(60)
        eventually(lambda: pool.status().problem is None, "no problem is left")
        assert pool.status().dead_letters == 2 and pool.status().records == 60
    assert min(calls[value] for value in bad) >= 3
    assert values_of(cluster, out) == sorted(set(sent) - set(bad))
    letters = read_all(cluster, dead)
    assert sorted(one.value or b"" for one in letters) == bad
    assert all(("rayq.error.class", b"ValueError") in one.headers for one in letters)


@pytest.mark.parametrize("bad", ["topic", "compacted", "type", "partition"])
def test_what_cannot_be_sent_is_an_error_of_the_handler(
    cluster: LocalCluster,
    new_topic: NewTopic,
    group: str,
    bad: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transactions, "TIMEOUT_MS", 1_000)
    topic, out, dead = new_topic(), new_topic(), new_topic()
    sent = fill(cluster, topic, 1, 10)
    wrong: dict[str, Any] = {
        "topic": Outgoing("no-such-topic", b""),
        "compacted": Outgoing(new_topic(cleanup_policy="compact"), b"it has no key"),
        "type": Outgoing(out, 5),  # type: ignore[arg-type]
        "partition": Outgoing(out, b"", partition=9),
    }

    def handler(records: list[Record]) -> list[Outgoing]:
        return [wrong[bad] if one.value == b"0/4" else Outgoing(out, one.value) for one in records]

    pool = cluster.consumer_pool(topic, group, handler, retries=0, dead_letter_topic=dead, **SOON)
    with pool:
        pool.wait_idle(60)
        eventually(lambda: pool.status().dead_letters == 1, "one is a dead letter")
    assert values_of(cluster, out) == [value for value in sent if value != b"0/4"]
    assert values_of(cluster, dead) == [b"0/4"]


def test_what_a_pool_without_exactly_once_would_not_send_is_an_error_that_says_so(
    cluster: LocalCluster, new_topic: NewTopic, group: str
) -> None:
    topic, dead = new_topic(), new_topic()
    fill(cluster, topic, 1, 1)
    plain = SOON | {"exactly_once": False}

    def handler(records: list[Record]) -> list[Outgoing]:
        return [Outgoing(topic, record.value) for record in records]

    pool = cluster.consumer_pool(topic, group, handler, retries=0, dead_letter_topic=dead, **plain)
    with pool:
        pool.wait_idle(60)
    (letter,) = read_all(cluster, dead)
    assert b"exactly_once=True" in dict(letter.headers)["rayq.error.message"]


def test_a_handler_that_returns_something_else_is_told_what_to_return(
    cluster: LocalCluster, new_topic: NewTopic, group: str
) -> None:
    topic, dead = new_topic(), new_topic()
    fill(cluster, topic, 1, 1)
    pool = cluster.consumer_pool(
        topic, group, lambda records: len(records), retries=0, dead_letter_topic=dead, **SOON
    )
    with pool:
        pool.wait_idle(60)
    (letter,) = read_all(cluster, dead)
    assert b"not int" in dict(letter.headers)["rayq.error.message"]


def test_a_transaction_that_is_aborted_has_its_batch_handled_again(
    cluster: LocalCluster, new_topic: NewTopic, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, out = new_topic(), new_topic()
    sent = fill(cluster, topic, 1, 20)
    write, failures = transactions.PoolTransactions.write, iter([0, 1])
    problems: list[str] = []
    note = pool_member.PoolMember._note

    async def fails(self: Any, consumer: Any, ends: Any, outgoing: Any) -> Any:
        for _ in failures:
            later = itertools.chain(outgoing, _raising())
            return await write(self, consumer, ends, later)  # type: ignore[arg-type]
        return await write(self, consumer, ends, outgoing)

    def _raising() -> Iterator[Outgoing]:
        raise rayq.TransactionAbortedError("a leader was away")
        yield

    def noting(self: Any, problem: str) -> None:
        problems.append(problem)
        note(self, problem)

    monkeypatch.setattr(transactions.PoolTransactions, "write", fails)
    monkeypatch.setattr(pool_member.PoolMember, "_note", noting)
    pool = cluster.consumer_pool(
        topic, group, lambda records: [Outgoing(out, record.value) for record in records], **SOON
    )
    with pool:
        pool.wait_idle(60)
        assert pool.status().dead_letters == 0
    assert len([one for one in problems if "handled again" in one]) == 2
    assert values_of(cluster, out) == sent


@pytest.mark.thorough
@pytest.mark.parametrize(
    "batch", ["records", pytest.param("arrow", marks=pytest.mark.thorough)]
)
def test_consumers_that_are_killed_at_random_leave_each_effect_once(
    cluster: LocalCluster,
    new_topic: NewTopic,
    group: str,
    batch: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic, out, dead = new_topic(partitions=4), new_topic(partitions=3), new_topic()
    chance = random.Random(7)
    consumers: list[asyncio.Task[Any]] = []
    run = pool_member.PoolMember.run

    async def run_and_tell(self: pool_member.PoolMember) -> None:
        task = asyncio.current_task()
        assert task is not None
        consumers.append(task)
        await run(self)

    monkeypatch.setattr(pool_member.PoolMember, "run", run_and_tell)

    def handler(given: Any) -> list[Outgoing]:
        values = (
            given.column("value").to_pylist()
            if batch == "arrow"
            else [one.value for one in given]
        )
        time.sleep(0.0005 * len(values))
        if b"2/77" in values:
            raise ValueError("never")
        return [Outgoing(out, value, key=value[-1:]) for value in values]

    sent = fill(cluster, topic, 4, 400)
    killed = 0
    pool = cluster.consumer_pool(
        topic,
        group,
        handler,
        batch=batch,
        min_consumers=3,
        max_records=25,
        retries=1,
        dead_letter_topic=dead,
        **SOON,
    )
    with pool:
        while pool.status().lag != 0:
            time.sleep(chance.uniform(0.02, 0.25))
            alive = [one for one in consumers if not one.done()]
            if killed < 15 and alive:
                background_loop().call_soon(chance.choice(alive).cancel)
                killed += 1
        pool.wait_idle(60)
    assert killed >= 5
    assert values_of(cluster, out) == [value for value in sent if value != b"2/77"]
    assert values_of(cluster, dead) == [b"2/77"]
