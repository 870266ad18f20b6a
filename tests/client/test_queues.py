"""A queue's consumer against leaders that a test plays: lost answers, lost locks, many partitions."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from rayq import messages as m
from rayq.client.cluster import Cluster
from rayq.client.large.reader import LargeValues
from rayq.client.queues import acknowledger, partition_consumer
from rayq.client.queues.ack_batch import AckBatch, runs_of
from rayq.client.queues.queue import Queue
from rayq.client.queues.round_robin import DeficitRoundRobin
from rayq.client.queues.task import QueueTask
from rayq.client.queues.throughput import ThroughputEstimator
from rayq.errors import (
    ClosedError,
    DisconnectedError,
    InvalidRequestError,
    LockLostError,
    NotLeaderError,
    ProtocolError,
    RemoteStorageError,
    UnknownQueueError,
)
from tests.client.fake_broker import FakeCluster

Eventually = Callable[[Callable[[], bool]], None]
OpenQueue = Callable[..., Queue]
PATIENCE_S = 30.0
EMPTY = m.TakeResponse(1, [], 5, sweep_ms=0)


@pytest.fixture
def open_queue(cluster: Cluster) -> Iterator[OpenQueue]:
    made: list[Queue] = []

    def make(name: str, **options: Any) -> Queue:
        made.append(cluster.queue(name, **options))
        return made[-1]

    yield make
    for queue in made:
        queue.close()


def take_all(queue: Queue, count: int) -> list[QueueTask]:
    found: list[QueueTask] = []
    while len(found) < count:
        more = queue.take(count - len(found), PATIENCE_S)
        assert more, f"{len(found)} of {count} came"
        found += more
    return found


def test_acks_return_at_once_and_go_together(fake: FakeCluster, open_queue: OpenQueue) -> None:
    played = fake.queues.create("q")
    fake.write("q", [b"%d" % n for n in range(200)])
    queue = open_queue("q")
    for task in take_all(queue, 200):
        task.ack()
    queue.flush()
    assert len(played.done) == 200
    settled = fake.asked(m.Settle)
    assert len(settled) <= 20
    assert sum(last - first + 1 for one in settled for first, last, _ in one.acks) == 200


def test_a_consumer_takes_another_name_when_an_answer_was_lost(
    fake: FakeCluster, open_queue: OpenQueue
) -> None:
    """What the lost answer gave is freed under the old name, and comes again under the new one."""
    played = fake.queues.create("q")
    fake.write("q", [b"a", b"b"])
    fake.fault(m.Take, carry_out=True, error=NotLeaderError("The answer was lost."))
    queue = open_queue("q")
    assert queue.take(2, 0.5) == []
    first = fake.asked(m.Take)[0].holder
    assert {holder for holder, _ in played.locks.values()} == {first}
    assert first not in {one.holder for one in fake.asked(m.Take)[1:]}
    fake.queues.free(played, first)
    assert [task.delivery_count for task in take_all(queue, 2)] == [2, 2]


def test_after_a_lost_connection_what_is_in_hand_is_named_again_at_once(
    fake: FakeCluster, open_queue: OpenQueue, eventually: Eventually
) -> None:
    """A leader frees within a second what a connection that has gone had held."""
    fake.queues.create("q")
    fake.write("q", [b"a"])
    queue = open_queue("q", prefetch=0)
    [task] = queue.take(1, PATIENCE_S)
    holder = fake.asked(m.Take)[0].holder
    task.extend(300)
    queue.flush()
    began_s = time.monotonic()
    fake.call(fake.brokers[1].drop_connections)
    eventually(lambda: len([one for one in fake.asked(m.Settle) if one.extends]) == 2)
    assert time.monotonic() - began_s < 8, "a third of the timeout"
    [_, again] = [one for one in fake.asked(m.Settle) if one.extends]
    assert again.holder == holder and again.extends[0][:3] == (0, 0, 1)
    task.ack()
    queue.flush()


@pytest.mark.parametrize("carry_out", [False, True])
def test_what_was_decided_is_told_until_the_leader_confirms_it(
    fake: FakeCluster, open_queue: OpenQueue, carry_out: bool
) -> None:
    played = fake.queues.create("q")
    fake.write("q", [b"a", b"b", b"c"])
    queue = open_queue("q")
    one, two, three = take_all(queue, 3)
    fake.fault(m.Settle, times=2, carry_out=carry_out, error=DisconnectedError("gone"))
    one.ack()
    two.reject("no good" + "x" * 5000)
    three.nack(0)
    queue.flush()
    assert played.done == {(0, 0), (0, 1)}
    assert len(played.rejected[0, 1]) == 1000
    [again] = queue.take(1, PATIENCE_S)
    assert (again.offset, again.delivery_count) == (2, 2)


def test_another_leader_is_told(fake3: FakeCluster) -> None:
    played = fake3.queues.create("q")
    fake3.write("q", [b"a"])
    with fake3.cluster() as cluster:
        queue = cluster.queue("q")
        [task] = queue.take(1, PATIENCE_S)
        fake3.move_leader("q", 0, 2)
        task.ack()
        queue.close()
    assert played.done == {(0, 0)}


def test_an_ack_that_came_too_late_says_who_has_the_record(
    fake: FakeCluster, open_queue: OpenQueue
) -> None:
    played = fake.queues.create("q")
    fake.write("q", [b"a", b"b"])
    queue = open_queue("q", prefetch=0)  # Else it may be given them again, and know it at once.
    one, two = take_all(queue, 2)
    fake.queues.free(played)
    one.ack()
    with pytest.raises(LockLostError, match="another consumer has it"):
        queue.flush()
    assert one.lost is not None
    queue.flush()  # Each is told of once.
    with pytest.raises(LockLostError), two:
        two.extend(60)
        fake.queues.free(played)
        queue.flush()


def test_locks_are_extended_at_a_third_of_the_timeout_and_what_waits_is_given_back(
    fake: FakeCluster,
    open_queue: OpenQueue,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ThroughputEstimator, "ahead", lambda _estimator, _most: 1)
    played = fake.queues.create("q", visibility_timeout_s=2, max_handling_s=4)
    fake.write("q", [b"a", b"b"])
    queue = open_queue("q")
    began_s = time.monotonic()
    [task] = queue.take(1, PATIENCE_S)
    eventually(lambda: sum(bool(one.extends) for one in fake.asked(m.Settle)) >= 2)
    assert time.monotonic() - began_s < 3.5, "two timeouts are over after four seconds"
    assert {one.extends[0][:3] for one in fake.asked(m.Settle) if one.extends} == {(0, 0, 1)}
    released = [one.releases for one in fake.asked(m.Settle) if one.releases]
    assert released[:1] == [[(1, 1, 1)]], "nobody came for what was locked ahead"
    with pytest.raises(InvalidRequestError, match="max_handling_s"):
        task.extend(5)
    eventually(lambda: task.lost is not None)
    assert time.monotonic() - began_s > 3.5
    with pytest.raises(LockLostError, match="handled for more than 4 s"):
        task.ack()
    assert played.done == set()


def test_of_one_key_nothing_is_handed_out_behind_a_record_that_failed(
    fake: FakeCluster, open_queue: OpenQueue
) -> None:
    played = fake.queues.create("q", ordered_by_key=True)
    fake.write("q", [b"1", b"2", b"3", b"4"], keys=[b"a", b"a", b"b", None])
    queue = open_queue("q")
    first = take_all(queue, 3)
    assert [task.value for task in first] == [b"1", b"3", b"4"]
    first[0].nack(0)  # Its leader frees both records of the key.
    queue.flush()
    fake.call(lambda: played.locks.pop((0, 1), None))
    [again] = queue.take(10, PATIENCE_S)
    assert (again.value, again.delivery_count) == (b"1", 2)
    again.ack()
    [later] = queue.take(10, PATIENCE_S)
    assert later.value == b"2"


def test_what_was_taken_ahead_is_handed_out_once_to_whichever_thread_asks(
    fake: FakeCluster, open_queue: OpenQueue
) -> None:
    played = fake.queues.create("q")
    fake.write("q", [b"%d" % n for n in range(1000)])
    queue = open_queue("q")
    found: list[int] = []

    def work() -> None:
        while tasks := queue.take(1, 0.5):
            found.append(tasks[0].offset)
            tasks[0].ack()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    queue.flush()
    assert sorted(found) == list(range(1000))
    assert len(played.done) == 1000 and not played.locks


def test_what_is_at_hand_is_given_back_at_the_end_and_not_given_out_once_it_is_lost(
    fake: FakeCluster, open_queue: OpenQueue, eventually: Eventually
) -> None:
    """A thread takes it without the loop."""
    played = fake.queues.create("q")
    fake.write("q", [b"%d" % n for n in range(20)])
    queue = open_queue("q")
    take_all(queue, 20)[0].ack()  # From now on more is taken ahead; the rest is given back.
    queue.flush()
    eventually(lambda: queue.take(1, PATIENCE_S) != [] and len(queue.core.queues[0].prefetched) > 1)
    [consumer] = queue.core.queues

    def lose_all() -> None:
        for partition in consumer.partitions:
            for batch in partition.batches:
                for offset in list(batch.open):
                    partition.acknowledger.lose(batch, offset, "the test says so")

    fake.call(lose_all)
    assert queue.core.at_hand(1) == []
    fake.queues.free(played)
    eventually(lambda: queue.take(1, PATIENCE_S) != [] and len(consumer.prefetched) > 1)
    assert len(played.locks) > 1
    queue.close()
    assert not played.locks


def test_a_task_that_is_handled_for_long_is_told_of_once(
    fake: FakeCluster,
    open_queue: OpenQueue,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An operator who looks for a worker that hangs finds its host and process."""
    monkeypatch.setattr("rayq.client.queues.acknowledger.LONG_TIMEOUTS", 0.1)
    played = fake.queues.create("q", visibility_timeout_s=1)
    fake.write("q", [b"a"])
    queue = open_queue("q")
    [task] = queue.take(1, PATIENCE_S)
    [(holder, _)] = played.locks.values()
    assert f":{os.getpid()}/" in holder
    eventually(lambda: "offset 0 of q-0 has been handled for" in caplog.text)
    extends = len([one for one in fake.asked(m.Settle) if one.extends])
    eventually(lambda: len([one for one in fake.asked(m.Settle) if one.extends]) > extends)
    assert caplog.text.count("has been handled for") == 1
    task.ack()


def test_at_many_partitions_eight_takes_wait_and_the_others_are_swept(
    fake: FakeCluster, open_queue: OpenQueue
) -> None:
    played = fake.queues.create("q", partitions=20)
    queue = open_queue("q", prefetch=100)
    assert queue.take(1, 0.3) == []
    for partition in range(20):
        fake.write("q", [b"%d" % partition], partition)
    assert {task.partition for task in take_all(queue, 20)} == set(range(20))
    assert played.most_waiting <= 8


def test_swept_partitions_whose_leaders_have_to_read_first_are_asked_with_time_for_it(
    fake: FakeCluster, open_queue: OpenQueue
) -> None:
    played = fake.queues.create("q", partitions=20)
    played.has_to_read = True
    for partition in range(20):
        fake.write("q", [b"%d" % partition] * 2, partition)
    queue = open_queue("q")
    taken = [(task.partition, task.offset) for task in take_all(queue, 40)]
    assert sorted(taken) == [(partition, offset) for partition in range(20) for offset in (0, 1)]


def test_what_is_taken_ahead_comes_in_few_takes_though_records_are_asked_for_one_by_one(
    fake: FakeCluster, open_queue: OpenQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.queues.create("q", partitions=6)
    for partition in range(6):
        fake.write("q", [b"v"] * 500, partition)
    sizes: list[int] = []
    take = fake.queues.take

    async def slow_take(broker: int, request: m.Take) -> Any:
        sizes.append(request.records_max)
        await asyncio.sleep(0.02)  # Other takes are asked for meanwhile.
        return await take(broker, request)

    monkeypatch.setattr(fake.queues, "take", slow_take)
    queue = open_queue("q", prefetch=300)
    for _ in range(600):
        queue.take(1, PATIENCE_S)[0].ack()
    sizes.clear()
    for _ in range(1500):
        queue.take(1, PATIENCE_S)[0].ack()
    # Half of 300 at a time makes ten takes. With a small take in each turn there were thirty.
    assert len(sizes) <= 20, sizes


def test_what_takes_long_is_not_locked_ahead() -> None:
    throughput = ThroughputEstimator()
    assert throughput.ahead(32) == 0, "nothing is known"
    throughput.began(0.0)
    throughput.settled(1, 4.0, is_idle=True)
    assert throughput.ahead(32) == 0, "one record has taken four seconds"
    for step in range(400):
        throughput.began(4 + step / 100)
        throughput.settled(1, 4 + (step + 1) / 100, is_idle=True)
    assert throughput.ahead(16) == 16
    assert 16 < throughput.ahead(500) <= 20
    throughput.began(8.0)
    for _ in range(5):
        throughput.tick()
    assert throughput.ahead(500) == 0, "one record takes far longer than those before"


def test_a_round_gives_each_queue_its_weight() -> None:
    round_robin = DeficitRoundRobin([3, 1])
    full = [100, 100]
    assert [round_robin.next(full, [True, True]) for _ in range(8)] == [0, 0, 0, 1] * 2
    assert [round_robin.next([100, 0], [True, False]) for _ in range(5)] == [0] * 5
    turns = [round_robin.next([100, 0], [True, True]) for _ in range(3)]
    assert turns[-1] is None, "what is on its way comes first"
    assert round_robin.next([0, 0], [False, False]) is None


def test_runs_and_parts_of_a_settlement(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(runs_of([(3, 1), (1, 1), (2, 1), (4, 2), (9, 2)])) == [
        (1, 3, 1),
        (4, 4, 2),
        (9, 9, 2),
    ]
    assert list(runs_of([])) == []
    ack_batch = AckBatch("h", 0)
    for offset in range(25_000):
        ack_batch.acks[offset] = 1, None  # type: ignore[assignment]
    parts = list(ack_batch.parts())
    assert [len(part.acks) for part in parts] == [10_000, 10_000, 5_000]
    assert parts[1].fields()["acks"] == [(10_000, 19_999, 1)]


def test_many_rejects_with_long_reasons_are_told(fake: FakeCluster, open_queue: OpenQueue) -> None:
    played = fake.queues.create("q")
    fake.write("q", [b"%d" % n for n in range(3000)])
    queue = open_queue("q")
    for task in take_all(queue, 3000):
        task.reject("\N{SNOWMAN}" * 1000)
    queue.flush()
    assert len(played.rejected) == 3000


def test_what_a_newer_server_knows_of_a_queue_is_passed_over(
    fake: FakeCluster, open_queue: OpenQueue
) -> None:
    fake.queues.create("q")
    fake.queues.newer = {"not_known_yet": 1}
    fake.write("q", [b"a"])
    [task] = open_queue("q").take(1, PATIENCE_S)
    task.ack()


def test_each_record_is_kept_for_as_long_as_was_asked(
    fake: FakeCluster, open_queue: OpenQueue
) -> None:
    fake.queues.create("q")
    fake.write("q", [b"a", b"b"])
    queue = open_queue("q")
    one, two = take_all(queue, 2)
    for task, seconds in ((one, 600), (two, 300)):
        task.extend(seconds)
        queue.flush()
    extends = [run for settled in fake.asked(m.Settle) for run in settled.extends]
    assert [(first, round(ms, -3)) for first, _, _, ms in extends] == [(0, 600_000), (1, 300_000)]


def test_a_failure_while_settling_is_told_to_who_waits_for_it(
    fake: FakeCluster, open_queue: OpenQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.queues.create("q")
    fake.write("q", [b"a"])
    queue = open_queue("q")
    [task] = queue.take(1, PATIENCE_S)
    monkeypatch.setattr(AckBatch, "fields", lambda self: {}["a bug"])
    task.ack()
    with pytest.raises(LockLostError, match="a bug"):
        queue.flush()
    monkeypatch.undo()


def test_a_worker_whose_take_fails_unexpectedly_raises_it(
    fake: FakeCluster, open_queue: OpenQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.queues.create("q")
    queue = open_queue("q")
    monkeypatch.setattr(queue, "take", lambda count, timeout_s: {}["a bug"])
    with pytest.raises(KeyError, match="a bug"):
        queue.work(lambda task: None, concurrency=2)


def test_a_queue_that_is_gone_is_an_error_of_take(
    fake: FakeCluster, open_queue: OpenQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayq.client.admin.queues.UNKNOWN_QUEUE_PATIENCE_S", 0.1)
    monkeypatch.setattr(acknowledger, "PATIENCE_S", 0.5)
    fake.queues.create("q")
    fake.write("q", [b"a"])
    queue = open_queue("q")
    [task] = queue.take(1, PATIENCE_S)
    fake.call(lambda: fake.queues.queues.pop("q"))
    with pytest.raises(UnknownQueueError, match="deleted"):
        for _ in range(200):
            queue.take(1, 0.1)
    task.ack()
    with pytest.raises(LockLostError, match="could not be told"):
        queue.flush()


def test_a_close_says_that_the_queue_of_what_was_settled_is_gone(
    fake: FakeCluster, open_queue: OpenQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayq.client.admin.queues.UNKNOWN_QUEUE_PATIENCE_S", 0.1)
    fake.queues.create("q")
    fake.write("q", [b"a"])
    queue = open_queue("q", prefetch=0)
    [task] = queue.take(1, PATIENCE_S)
    fake.call(lambda: fake.queues.queues.pop("q"))
    task.ack()
    with pytest.raises(LockLostError, match="could not be told"):
        queue.close()


def test_a_flush_waits_for_what_was_settled_of_a_queue_that_was_created_again(
    fake: FakeCluster, open_queue: OpenQueue
) -> None:
    played = fake.queues.create("q")
    fake.write("q", [b"a"])
    queue = open_queue("q", prefetch=0)
    [old] = queue.take(1, PATIENCE_S)

    def create_again() -> None:
        played.queue_id = "another id"
        played.locks.clear()

    fake.call(create_again)
    [new] = take_all(queue, 1)
    old.ack()
    with pytest.raises(LockLostError, match="could not be told"):
        queue.flush()
    new.ack()
    queue.flush()
    assert played.done == {(0, 0)}


def test_wrong_arguments_are_refused(fake: FakeCluster, cluster: Cluster, open_queue: OpenQueue) -> None:
    fake.queues.create("q")
    queue = open_queue("q")
    fake.write("q", [b"a"])
    [task] = queue.take(1, PATIENCE_S)
    refused: list[Callable[[], object]] = [
        lambda: queue.take(0),
        lambda: queue.take(20_000),
        lambda: queue.put(b"x", delay_s=-1),
        lambda: queue.put(b"x", delay_s=1, deliver_at=1),  # type: ignore[arg-type]
        lambda: queue.work(concurrency=0),
        lambda: cluster.queue(["q", "q"]),
        lambda: cluster.queue([]),
        lambda: cluster.queue(["q"], weights=[1, 2]),
        lambda: cluster.queue("q", weights=[0]),
        lambda: cluster.queue("q", prefetch=-1),
        lambda: task.nack(-1),
        lambda: queue.task(retries=-1)(print),
    ]
    for call in refused:
        with pytest.raises(InvalidRequestError):
            call()
    mistyped: list[Callable[[], object]] = [
        lambda: queue.take("1"),  # type: ignore[arg-type]
        lambda: queue.put(b"x", deliver_at=5),  # type: ignore[arg-type]
        lambda: cluster.queue(5),  # type: ignore[arg-type]
        lambda: task.reject(b"no"),  # type: ignore[arg-type]
        lambda: task.extend("1"),  # type: ignore[arg-type]
        lambda: queue.task(5),  # type: ignore[call-overload]
    ]
    for call in mistyped:
        with pytest.raises(TypeError):
            call()


def test_a_forked_child_can_not_use_the_queue_and_leaves_the_parents_alone(
    fake: FakeCluster, open_queue: OpenQueue
) -> None:
    played = fake.queues.create("q")
    fake.write("q", [b"a"])
    queue = open_queue("q")
    [task] = queue.take(1, PATIENCE_S)
    child = os.fork()
    if child == 0:
        outcome = 1
        try:
            task.ack()
        except ClosedError:
            outcome = 0
        finally:
            os._exit(outcome)
    assert os.waitpid(child, 0)[1] == 0
    task.ack()
    queue.flush()
    assert played.done == {(0, 0)}


def test_a_queue_that_is_dropped_gives_back_what_it_holds(
    fake: FakeCluster, cluster: Cluster, eventually: Eventually
) -> None:
    played = fake.queues.create("q")
    fake.write("q", [b"a", b"b"])
    queue = cluster.queue("q")
    task = queue.take(1, PATIENCE_S)[0]
    task.ack()
    with pytest.warns(ResourceWarning, match="A queue of 'q' was dropped"):
        del queue
    eventually(lambda: not played.locks and played.done == {(0, 0)})


@pytest.fixture
def interrupts() -> Iterator[Callable[[float], None]]:
    """`interrupts(after_s)` is a Ctrl+C; also where the tests' shell makes them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timers: list[threading.Timer] = []
    main = threading.main_thread().ident or 0

    def interrupt(after_s: float) -> None:
        timers.append(threading.Timer(after_s, lambda: signal.pthread_kill(main, signal.SIGINT)))
        timers[-1].start()

    yield interrupt
    for timer in timers:
        timer.join()
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_take_loses_nothing(
    fake: FakeCluster, open_queue: OpenQueue, interrupts: Callable[[float], None]
) -> None:
    fake.queues.create("q")
    queue = open_queue("q")
    interrupts(0.1)
    with pytest.raises(KeyboardInterrupt):
        queue.take(1, PATIENCE_S)
    fake.write("q", [b"a"])
    [task] = queue.take(1, PATIENCE_S)
    task.ack()


def test_an_interrupted_worker_finishes_what_it_is_at(
    fake: FakeCluster, open_queue: OpenQueue, interrupts: Callable[[float], None]
) -> None:
    played = fake.queues.create("q")
    fake.write("q", [b"%d" % n for n in range(5)])
    queue = open_queue("q", prefetch=4)
    may_end = threading.Event()

    def handle(task: QueueTask) -> None:
        interrupts(0.0)
        threading.Timer(0.2, may_end.set).start()
        assert may_end.wait(PATIENCE_S)

    with pytest.raises(KeyboardInterrupt):
        queue.work(handle)
    assert played.done == {(0, 0)}
    assert not played.locks, "what waited is given back"


def test_a_broker_with_old_metadata_does_not_take_a_queue_away(
    fake: FakeCluster, open_queue: OpenQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayq.client.admin.queues.UNKNOWN_QUEUE_PATIENCE_S", 0.1)
    played = fake.queues.create("q")
    fake.version = 5
    queue = open_queue("q")
    assert queue.take(1, 0.1) == []

    def forget() -> None:
        fake.version = 1
        del fake.queues.queues["q"]

    fake.call(forget)
    assert queue.take(1, 1.0) == []
    fake.version = 5
    fake.queues.queues["q"] = played
    fake.write("q", [b"a"])
    [task] = queue.take(1, PATIENCE_S)
    task.ack()


def test_a_worker_reports_a_queue_that_is_gone(
    fake: FakeCluster, open_queue: OpenQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayq.client.admin.queues.UNKNOWN_QUEUE_PATIENCE_S", 0.1)
    fake.queues.create("q")
    queue = open_queue("q")
    fake.call(lambda: fake.queues.queues.pop("q"))
    with pytest.raises(UnknownQueueError, match="deleted"):
        queue.work(print, concurrency=2)


def test_the_clients_own_thread_cannot_wait(fake: FakeCluster, open_queue: OpenQueue) -> None:
    fake.queues.create("q")
    queue = open_queue("q")
    raised: list[BaseException] = []
    is_done = threading.Event()

    def on_delivery(_metadata: object, _error: object) -> None:
        try:
            queue.take(1, 1.0)
        except InvalidRequestError as error:
            raised.append(error)
        is_done.set()

    queue.send(b"x").call_on_delivery(on_delivery)
    assert is_done.wait(PATIENCE_S)
    assert "client's own thread" in str(raised[0])


def test_a_queue_that_is_closed_ends_its_worker(fake: FakeCluster, open_queue: OpenQueue) -> None:
    fake.queues.create("q")
    queue = open_queue("q")
    timer = threading.Timer(0.2, queue.close)
    timer.start()
    queue.work(print, concurrency=2)
    timer.join()


def test_a_record_that_arrives_damaged_comes_again_and_its_neighbours_come_at_once(
    fake: FakeCluster, open_queue: OpenQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition_consumer, "BACKOFF_MAX_S", 0.05)
    fake.queues.create("q")
    for value in (b"0", b"1", b"2"):
        fake.write("q", [value])

    def damage(answer: Any, payload: bytes) -> tuple[Any, list[bytes]]:
        batch = len(payload) // 3
        return answer, [payload[: 2 * batch - 1] + b"?" + payload[2 * batch :]]

    fake.fault(m.Take, times=1, carry_out=True, change=damage)
    queue = open_queue("q")
    found = take_all(queue, 3)
    assert sorted(task.value or b"" for task in found) == [b"0", b"1", b"2"]
    assert (found[2].value, found[2].delivery_count) == (b"1", 2)
    assert [one.offset for one in fake.asked(m.CheckRange)] == [1]


def test_a_large_value_that_cannot_be_had_for_now_keeps_none_behind_it_waiting(
    fake: FakeCluster, open_queue: OpenQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_away = True

    async def value(_reader: Any, _place: Any, _id: str, offset: int, manifest: bytes) -> bytes:
        if is_away and offset == 0:
            raise RemoteStorageError("The store is slow.")
        return b"large " + manifest

    monkeypatch.setattr(LargeValues, "value", value)
    fake.queues.create("q")
    for number in range(3):
        fake.write("q", [b"%d" % number], is_large=True)
    queue = open_queue("q")
    assert {task.value for task in take_all(queue, 2)} == {b"large 1", b"large 2"}
    is_away = False
    assert [task.value for task in take_all(queue, 1)] == [b"large 0"]


def test_no_manifest_is_handed_out_while_a_leader_is_asked_about_damage(
    fake: FakeCluster, open_queue: OpenQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition_consumer, "BACKOFF_MAX_S", 0.05)
    reading = threading.Event()

    async def value(_reader: Any, _place: Any, _id: str, _offset: int, manifest: bytes) -> bytes:
        await asyncio.to_thread(reading.wait, PATIENCE_S)
        return b"large " + manifest

    monkeypatch.setattr(LargeValues, "value", value)
    fake.queues.create("q")
    fake.write("q", [b"0"])
    fake.write("q", [b"1"])
    fake.write("q", [b"2"], is_large=True)

    def damage(answer: Any, payload: bytes) -> tuple[Any, list[bytes]]:
        batch = len(payload) // 3
        return answer, [payload[: 2 * batch - 1] + b"?" + payload[2 * batch :]]

    fake.fault(m.Take, times=1, carry_out=True, change=damage)
    held = fake.fault(m.CheckRange, times=1, carry_out=True, is_held=True)
    queue = open_queue("q")
    first = queue.take(10, PATIENCE_S)
    assert [task.value for task in first] == [b"0"]
    assert queue.take(10, 0.1) == []
    reading.set()
    fake.release(held)
    assert {task.value for task in take_all(queue, 2)} == {b"1", b"large 2"}


@pytest.mark.parametrize("field", ["locks", "excused", "unbegun"])
def test_an_answer_about_more_records_than_there_can_be_is_refused_at_once(
    fake: FakeCluster, open_queue: OpenQueue, field: str
) -> None:
    fake.queues.create("q")
    fake.write("q", [b"v"])
    endless = (0, 1 << 60) if field == "unbegun" else (0, 1 << 60, 1)

    def lie(answer: Any, payload: bytes) -> Any:
        return msgspec.structs.replace(answer, **{field: [endless]}), payload

    fake.fault(m.Take, times=100, change=lie)
    with pytest.raises(ProtocolError, match="more than 10000 records"):
        take_all(open_queue("q"), 1)


def test_a_leader_that_has_records_and_gives_none_is_asked_now_and_then(
    fake: FakeCluster, open_queue: OpenQueue
) -> None:
    fake.queues.create("q")
    fake.write("q", [b"v"])
    fake.fault(m.Take, times=10**6, error=None, change=lambda answer, payload: (EMPTY, b""))
    assert open_queue("q").take(1, timeout_s=1.0) == []
    assert len(fake.asked(m.Take)) < 60
