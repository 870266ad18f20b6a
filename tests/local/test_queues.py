"""Queues as programs use them: every record is handled, and settled once."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import rayq
from rayq import LockLostError, Queue, QueueTask
from rayq.client import consumer_pool as pool_handle
from rayq.client.queues import queue_core
from rayq.errors import (
    ClosedError,
    InvalidRequestError,
    InvalidTopicError,
    SerializationError,
    UnknownQueueError,
)
from rayq.pools import queue_member, running_pool
from rayq.testing import LocalCluster
from tests.local.support import eventually

NewQueue = Callable[..., Queue]
_numbers = itertools.count(1)
PATIENCE_S = 60.0


@pytest.fixture
def new_queue(cluster: LocalCluster) -> Iterator[NewQueue]:
    """`new_queue(partitions=2, ...)` makes a queue of its own topic."""
    made: list[Queue] = []

    def make(**options: Any) -> Queue:
        made.append(cluster.create_queue(f"queue-{next(_numbers)}", **options))
        return made[-1]

    yield make
    for queue in made:
        queue.close()


def take_one(queue: Queue) -> QueueTask:
    [task] = queue.take(1, PATIENCE_S)
    return task


def take_all(queue: Queue, count: int) -> list[QueueTask]:
    found: list[QueueTask] = []
    while len(found) < count:
        more = queue.take(count - len(found), PATIENCE_S)
        assert more, f"{len(found)} of {count} came"
        found += more
    return found


def other(cluster: LocalCluster, queue: Queue, **options: Any) -> Queue:
    """Another consumer of the same queue."""
    return cluster.queue(queue.name, **options)


# --- put, take, settle ----------------------------------------------------------------------------


def test_what_is_put_is_taken_once_and_stays_settled(
    cluster: LocalCluster, new_queue: NewQueue
) -> None:
    queue = new_queue(partitions=3)
    queue.put(b"first", key=b"k", headers=[("h", b"1")])
    queue.put_many([b"%d" % n for n in range(500)])
    found = take_all(queue, 501)
    [first] = [task for task in found if task.value == b"first"]
    assert (first.key, first.headers, first.delivery_count) == (b"k", [("h", b"1")], 1)
    assert (first.queue, first.topic) == (queue.name, queue.name)
    for task in found:
        task.ack()
        task.ack()  # A second time is no error.
    queue.flush()
    assert queue.take(1, 0.0) == []
    info = cluster.admin.describe_queue(queue.name)
    assert sum(part.start_offset or 0 for part in info.partitions) == 501


def test_a_take_without_records_ends_in_time(new_queue: NewQueue) -> None:
    queue = new_queue()
    began_s = time.monotonic()
    assert queue.take(5, 0.2) == []
    assert time.monotonic() - began_s < 5


def test_a_take_that_waits_gets_what_comes(new_queue: NewQueue) -> None:
    queue = new_queue(partitions=4)
    timer = threading.Timer(0.2, lambda: queue.put(b"late"))
    timer.start()
    assert take_one(queue).value == b"late"
    timer.join()


def test_a_record_that_is_given_back_comes_again_and_at_last_is_a_dead_letter(
    cluster: LocalCluster, new_queue: NewQueue
) -> None:
    queue = new_queue(max_deliveries=2)
    queue.put(b"poison", key=b"k")
    for delivery in (1, 2):
        task = take_one(queue)
        assert task.delivery_count == delivery
        if delivery == 1:
            task.nack(0)
            continue
        with pytest.raises(ValueError, match="no good"), task:
            raise ValueError("no good")
        assert task.was_rejected
    dead = cluster.queue(f"{queue.name}.dead")
    letter = take_one(dead)
    headers = dict(letter.headers)
    assert (letter.value, letter.key) == (b"poison", b"k")
    assert b"no good" in headers["rayq.error"]
    letter.ack()
    dead.close()
    queue.flush()
    assert queue.take(1, 0.0) == []


def test_a_dead_letter_that_a_worker_rejects_stays(
    cluster: LocalCluster, new_queue: NewQueue
) -> None:
    queue = new_queue()
    queue.put(b"x")
    take_one(queue).reject("no good")
    dead = cluster.queue(f"{queue.name}.dead")
    take_one(dead).reject("not to be read")
    dead.flush()
    [found] = cluster.admin.describe_queue(dead.name).partitions
    assert (found.start_offset, found.end_offset, found.delayed, found.dead) == (0, 1, 1, 0)
    dead.close()


def test_an_error_in_the_block_gives_the_record_back_and_goes_on(new_queue: NewQueue) -> None:
    queue = new_queue(backoff_s=0)
    queue.put(b"x")
    with pytest.raises(KeyError), take_one(queue):
        raise KeyError("later")
    with take_one(queue) as task:
        assert task.delivery_count == 2
    assert task.is_settled


def test_nothing_is_given_out_before_it_is_due(new_queue: NewQueue) -> None:
    queue = new_queue()
    due_ms = time.time_ns() // 1_000_000 + 700
    queue.put(b"later", delay_s=0.7)
    queue.put_many([b"too"], deliver_at=datetime.now(UTC) + timedelta(seconds=0.7))
    queue.put(b"now")
    with take_one(queue) as task:
        assert task.value == b"now"
    later = take_all(queue, 2)
    assert {task.value for task in later} == {b"later", b"too"}
    assert time.time_ns() // 1_000_000 >= due_ms
    take_time_s = time.monotonic()
    later[0].nack(delay_s=0.4)
    with take_one(queue) as again:
        assert again.value == later[0].value
    assert time.monotonic() - take_time_s >= 0.35


def test_settling_twice_otherwise_is_refused(new_queue: NewQueue) -> None:
    queue = new_queue()
    queue.put(b"x")
    task = take_one(queue)
    task.ack()
    with pytest.raises(InvalidRequestError, match="settled before, by ack"):
        task.nack()
    with pytest.raises(InvalidRequestError, match="settled before, by ack"):
        task.reject("no")
    with pytest.raises(InvalidRequestError, match="settled before, by ack"):
        task.extend(1)


def test_a_record_that_nobody_has_can_be_cancelled_by_its_offset(
    cluster: LocalCluster, new_queue: NewQueue
) -> None:
    queue = new_queue()
    sent = queue.put(b"too early", delay_s=3600)
    place = rayq.TopicPartition(sent.topic, sent.partition)
    for _ in range(2):  # Nobody has taken from the queue yet; and settled already is success.
        answer = cluster.admin.discard_queue_records(queue.name, {place: [sent.offset]})
        assert answer[place].moved == [sent.offset]
    assert cluster.admin.list_queue_records(queue.name) == []


# --- locks ----------------------------------------------------------------------------------------


def test_a_lock_is_extended_while_its_record_is_handled(
    cluster: LocalCluster, new_queue: NewQueue
) -> None:
    queue = new_queue(visibility_timeout_s=2)
    queue.put(b"slow")
    task = take_one(queue)
    with other(cluster, queue) as second:
        assert second.take(1, 2.6) == []
        task.ack()
        queue.flush()
        assert second.take(1, 0.0) == []


def test_an_ack_after_the_lock_has_gone_tells_so(
    cluster: LocalCluster, new_queue: NewQueue
) -> None:
    queue = new_queue(visibility_timeout_s=1, max_handling_s=1, backoff_s=0)
    queue.put(b"hung")
    task = take_one(queue)
    with pytest.raises(InvalidRequestError, match="max_handling_s"):
        task.extend(30)
    with other(cluster, queue) as second:
        again = take_one(second)
        assert again.delivery_count == 2
        with pytest.raises(LockLostError, match="not this consumer's any more"):
            task.ack()
            queue.flush()
        assert task.lost is not None
        again.ack()
        second.flush()


def test_a_record_that_is_dropped_unsettled_is_given_back(new_queue: NewQueue) -> None:
    queue = new_queue(backoff_s=0)
    queue.put(b"x")
    assert take_one(queue).delivery_count == 1
    assert take_one(queue).delivery_count == 2


def test_what_a_closed_queue_held_goes_to_others(
    cluster: LocalCluster, new_queue: NewQueue
) -> None:
    queue = new_queue(partitions=2)
    queue.put_many([b"%d" % n for n in range(40)])
    first = other(cluster, queue)
    held = first.take(3, PATIENCE_S)
    first.close()
    with pytest.raises(ClosedError):
        held[0].ack()
    with pytest.raises(ClosedError):
        first.take()
    again = take_all(queue, 40)
    assert len({task.value for task in again}) == 40


def test_what_was_locked_ahead_counts_for_nothing(
    cluster: LocalCluster, new_queue: NewQueue
) -> None:
    """Records that nobody was given do not come nearer to the dead letters."""
    queue = new_queue(max_deliveries=2, backoff_s=0)
    queue.put_many([b"%d" % n for n in range(20)])
    first = other(cluster, queue)
    for _ in "ab":  # The second take has more locked ahead.
        take_all(first, 1)[0].ack()
        first.flush()
    first.close()
    for delivery in (1, 2):
        tasks = take_all(queue, 18)
        assert {task.delivery_count for task in tasks} == {delivery}
        for task in tasks:
            task.fail(ValueError("no"))
            assert task.was_rejected == (delivery == 2)


def test_of_each_key_one_record_is_handled_at_a_time(
    cluster: LocalCluster, new_queue: NewQueue
) -> None:
    queue = new_queue(partitions=2, ordered_by_key=True, backoff_s=0)
    keys = (b"a", b"b", b"c")
    for number in range(6):
        queue.put_many([b"%d" % number] * 3, keys=keys)
    seen: dict[bytes, list[int]] = {key: [] for key in keys}
    has_failed = False
    with other(cluster, queue) as second:
        consumers = itertools.cycle((queue, second))
        while sum(map(len, seen.values())) < 18:
            tasks = next(consumers).take(10, 0.5)
            assert len({task.key for task in tasks}) == len(tasks)
            for task in tasks:
                assert task.key is not None and task.value is not None
                if task.key == b"b" and int(task.value) == 2 and not has_failed:
                    has_failed = True
                    task.nack(0)
                    continue
                seen[task.key].append(int(task.value))
                task.ack()
    assert seen == {key: list(range(6)) for key in keys}


# --- several queues -------------------------------------------------------------------------------


def test_several_queues_give_records_by_their_weights(
    cluster: LocalCluster, new_queue: NewQueue
) -> None:
    urgent, bulk = new_queue(), new_queue()
    for queue in (urgent, bulk):
        queue.put_many([b"x"] * 200)
    with cluster.queue([urgent.name, bulk.name], weights=[8, 1]) as both:
        counts: list[str] = []
        while len(counts) < 90:
            for task in both.take(5, PATIENCE_S):
                counts.append(task.queue)
                task.ack()
        for start in range(18, 72):
            window = Counter(counts[start : start + 18])
            assert window[bulk.name] >= 1 and window[urgent.name] >= 8
        with pytest.raises(InvalidRequestError, match="several queues"):
            both.put(b"where?")


# --- tasks and workers ----------------------------------------------------------------------------


def test_functions_run_as_tasks_with_the_arguments_they_ask_for(new_queue: NewQueue) -> None:
    queue = new_queue(partitions=2, max_deliveries=3, backoff_s=0)
    done: list[Any] = []
    tries = itertools.count(1)

    @queue.task(retries=5)
    def resize(path: str, *, width: int, at: datetime | None = None) -> None:
        if width == 0 and next(tries) < 3:
            raise ValueError("not yet")
        done.append((path, width, at))
        if len(done) == 3:
            queue.stop()

    now = datetime.now(UTC)
    resize.delay("a.png", width=90)
    resize.put(("b.png",), {"width": 7, "at": now}, key=b"k")
    resize.delay("c.png", width=0)
    with pytest.raises(TypeError):
        resize.delay("d.png")  # type: ignore[call-arg]
    with pytest.raises(SerializationError):
        resize.delay(object(), width=1)  # type: ignore[arg-type]
    queue.work(concurrency=3)
    assert sorted(done) == [("a.png", 90, None), ("b.png", 7, now), ("c.png", 0, None)]


def test_a_record_that_no_function_takes_is_a_dead_letter_at_once(
    cluster: LocalCluster, new_queue: NewQueue
) -> None:
    queue = new_queue()

    @queue.task(name="double")
    def double(number: int) -> int:
        return 2 * number

    assert double(4) == 8
    for value in (b"not json", b'[["x"], {}]', b"[[], {}]", b"[[" * 5000):
        queue.put(value, headers=[("rayq.task", b"double")])
    queue.work(stop_when_idle_s=0.5)
    with cluster.queue(f"{queue.name}.dead") as dead:
        for letter in take_all(dead, 4):
            assert b"not a call of double" in dict(letter.headers)["rayq.error"]
            letter.ack()


def test_a_worker_handles_what_handlers_do(new_queue: NewQueue) -> None:
    queue = new_queue(max_deliveries=2, backoff_s=0)
    seen: Counter[bytes] = Counter()

    def handle(task: QueueTask) -> None:
        assert task.value is not None
        seen[task.value] += 1
        if task.value == b"exit":
            raise SystemExit(1)
        if task.value == b"own":
            task.reject("by itself")

    for value in (b"exit", b"own", b"good"):
        queue.put(value)
    queue.work(handle, concurrency=2, stop_when_idle_s=0.5)
    assert seen == {b"exit": 2, b"own": 1, b"good": 1}


def test_a_worker_that_is_stopped_finishes_what_it_is_at(
    cluster: LocalCluster, new_queue: NewQueue
) -> None:
    queue = new_queue()
    queue.put_many([b"%d" % n for n in range(10)])
    is_busy, may_end = threading.Event(), threading.Event()

    def handle(task: QueueTask) -> None:
        is_busy.set()
        assert may_end.wait(PATIENCE_S)

    worker = threading.Thread(target=lambda: queue.work(handle))
    worker.start()
    assert is_busy.wait(PATIENCE_S)
    queue.stop()
    may_end.set()
    worker.join(PATIENCE_S)
    assert not worker.is_alive()
    with other(cluster, queue) as second:
        assert len(take_all(second, 9)) == 9, "what waited there is given to others at once"


def test_many_threads_share_a_queue(new_queue: NewQueue) -> None:
    queue = new_queue(partitions=3)
    seen: Counter[bytes] = Counter()
    lock = threading.Lock()

    def run() -> None:
        while sum(seen.values()) < 300:
            for task in queue.take(7, 0.1):
                with lock:
                    assert task.value is not None
                    seen[task.value] += 1
                task.ack()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    queue.put_many([b"%d" % n for n in range(300)])
    for thread in threads:
        thread.join(PATIENCE_S)
    assert seen == dict.fromkeys((b"%d" % n for n in range(300)), 1)


def test_an_async_queue_does_the_same(cluster: LocalCluster, new_queue: NewQueue) -> None:
    name = new_queue(partitions=2).name

    async def play() -> list[int]:
        done: list[int] = []
        async with cluster.async_queue(name) as queue:
            await queue.put(b"x", key=b"k")
            [task] = await queue.take(1, PATIENCE_S)
            async with task:
                assert task.value == b"x"
            await queue.flush()

            @queue.task
            async def add(number: int) -> None:
                await asyncio.sleep(0)
                done.append(number)
                if len(done) == 5:
                    queue.stop()

            for number in range(5):
                await add.delay(number)
            await queue.work(concurrency=2)
        return sorted(done)

    assert asyncio.run(play()) == list(range(5))


def test_a_queue_that_was_deleted_says_so(cluster: LocalCluster, new_queue: NewQueue) -> None:
    queue = new_queue()
    cluster.admin.delete_queue(queue.name)
    with pytest.raises(rayq.UnknownQueueError, match="deleted"):
        for _ in range(100):
            queue.take(1, 0.5)
    with pytest.raises(rayq.UnknownQueueError, match="no queue"):
        cluster.queue("nothing")


# --- pools ----------------------------------------------------------------------------------------


def test_a_pool_works_a_queue_off_and_goes(
    cluster: LocalCluster, new_queue: NewQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name, value in (
        (running_pool, "LOOK_INTERVAL_S", 0.05),
        (pool_handle, "IDLE_CHECK_S", 0.01),
        (queue_member, "POLL_S", 0.05),
        (queue_core, "TICK_S", 0.02),
    ):
        monkeypatch.setattr(module, name, value)
    queue = new_queue(partitions=2, max_deliveries=2, backoff_s=0)
    seen: Counter[bytes] = Counter()

    def handle(task: QueueTask) -> None:
        assert task.value is not None
        seen[task.value] += 1
        if task.value == b"7":
            raise ValueError("no good")

    queue.put_many([b"%d" % n for n in range(100)])
    with cluster.queue_pool(queue.name, handle, max_consumers=3, cool_down_s=0.2) as pool:
        eventually(lambda: len(seen) == 100 and seen[b"7"] == 2, "all was handled")
        status = pool.wait_idle(PATIENCE_S)
        assert (status.topic, status.group, status.partitions) == (queue.name, queue.name, 2)
        eventually(lambda: pool.status().wanted == 0, "the pool went to sleep")
        assert pool.status().dead_letters == 1
    assert sum(seen.values()) == 101


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("", "cannot be empty"),
        ("q" * 300, "at most 200"),
        ("a/b", "'a/b' is not a legal"),
        ("__q", "rayq's own"),
    ],
)
def test_a_name_that_no_queue_can_have_is_told_what_is_wrong(
    cluster: LocalCluster, name: str, told: str
) -> None:
    with pytest.raises(InvalidTopicError, match=told):
        cluster.create_queue(name)


def test_there_is_no_queue_without_a_name(cluster: LocalCluster) -> None:
    for use in (cluster.queue, cluster.admin.describe_queue, cluster.admin.delete_queue):
        with pytest.raises(UnknownQueueError, match="no queue ''"):
            use("")
