"""Calls from places where no code may wait: delivery callbacks, signal handlers, finalizers, forked
children, the end of the program. Each call is served or refused at once, and none blocks the
client's loop."""

from __future__ import annotations

import atexit
import contextlib
import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rayq import Cluster
from rayq.client.consuming.member_state import OwnedPartitions
from rayq.client.producing.futures import DeliveryFuture
from rayq.client.producing.producer import Producer
from rayq.errors import BufferFullError, ClosedError, InvalidRequestError, TimeoutError
from rayq.messages import Produce
from rayq.records import TopicPartition
from tests.client.fake_broker import FakeCluster
from tests.conftest import ray_runs_here
from tests.programs import run_to_its_end


def told_by_a_callback(producer: Producer, act: Callable[[], object]) -> BaseException | None:
    """The error that `act` raises in a delivery callback, or None."""
    told: list[BaseException | None] = []
    over = threading.Event()

    def on_delivery(_metadata: object, _error: object) -> None:
        try:
            act()
        except BaseException as error:
            told.append(error)
            if not isinstance(error, Exception):
                raise
        else:
            told.append(None)
        finally:
            over.set()

    producer.send("t", b"v", on_delivery=on_delivery)
    assert over.wait(30), "the callback never came back"
    return told[0]


def works(cluster: Cluster, producer: Producer) -> None:
    assert cluster.admin.list_topics(timeout_s=30) == ["t"]
    producer.send("t", b"after").result(30)


# --- delivery callbacks ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "what",
    [
        "flush",
        "close",
        "close the cluster",
        "admin",
        "make a producer",
        "make a cluster",
        "result",
        "result of many",
        "send and wait",
        "poll",
        "iterate",
        "end_offsets",
        "close the consumer",
    ],
)
def test_a_call_that_waits_is_refused_in_a_delivery_callback(
    fake: FakeCluster, cluster: Cluster, what: str
) -> None:
    fake.create_topic("t")
    with cluster.producer() as producer, cluster.consumer("t") as consumer:
        acts: dict[str, Callable[[], object]] = {
            "flush": producer.flush,
            "close": producer.close,
            "close the cluster": cluster.close,
            "admin": cluster.admin.list_topics,
            "make a producer": cluster.producer,
            "make a cluster": lambda: fake.cluster().producer(),
            "result": lambda: producer.send("t", b"w").result(),
            "result of many": lambda: producer.send_many("t", [b"w"] * 5).result(30),
            "send and wait": lambda: producer.send_and_wait("t", b"w"),
            "poll": lambda: consumer.poll(30),
            "iterate": lambda: next(consumer),
            "end_offsets": lambda: consumer.end_offsets([("t", 0)]),  # type: ignore[list-item]
            "close the consumer": consumer.close,
        }
        error = told_by_a_callback(producer, acts[what])
        assert isinstance(error, InvalidRequestError)
        assert "callback" in str(error)
        works(cluster, producer)


def test_a_delivery_callback_may_send_but_not_wait_for_room(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    with cluster.producer(batch_size=1000, buffer_memory=2000) as producer:
        assert told_by_a_callback(producer, lambda: producer.send("t", b"from it")) is None
        producer.flush(30)
        assert b"from it" in fake.values("t")
        fake.fault(Produce, times=1000, delay_s=0.3)

        def fill() -> None:
            for _ in range(10):
                producer.send("t", bytes(900))

        assert isinstance(told_by_a_callback(producer, fill), BufferFullError)
        fake.clear_faults()
        works(cluster, producer)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_callback_cannot_end_the_clients_loop(
    fake: FakeCluster, cluster: Cluster, kind: type[BaseException]
) -> None:
    fake.create_topic("t")

    def end(*_: object) -> None:
        raise kind

    with cluster.producer() as producer:
        assert isinstance(told_by_a_callback(producer, end), kind)
        works(cluster, producer)
        others: list[object] = []
        future = producer.send("t", b"v")
        future.add_done_callback(end)
        future.add_done_callback(others.append)
        future.result(30)
        works(cluster, producer)
        assert others == [future]
        _, background = cluster.shared_client()
        background.call_soon(end)
        works(cluster, producer)


# --- signals and finalizers -----------------------------------------------------------------------


@contextlib.contextmanager
def alarms(handler: Callable[[], object], every_s: float) -> Iterator[None]:
    """Interrupts this thread again and again, and now and then within the handler too: not more
    deeply, or a slow machine comes to no end."""
    depth = 0

    def handle(_number: int, _frame: object) -> None:
        nonlocal depth
        if depth < 2:
            depth += 1
            try:
                handler()
            finally:
                depth -= 1

    over = threading.Event()
    this_thread = threading.get_ident()

    def kill() -> None:
        while not over.wait(every_s):
            signal.pthread_kill(this_thread, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handle)
    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.slow
def test_a_signal_handler_may_send_in_the_middle_of_a_send(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t", partitions=2)
    futures: dict[bytes, DeliveryFuture] = {}
    numbers = itertools.count()
    with cluster.producer(batch_size=300, linger_ms=0) as producer:

        def send(kind: str) -> None:
            value = b"%s %d" % (kind.encode(), next(numbers))
            futures[value] = producer.send("t", value)

        with alarms(lambda: send("handler"), 0.0003):
            for _ in range(20_000):
                send("main")
        producer.flush(100)
        at = {
            (partition, offset): value
            for partition in (0, 1)
            for offset, value in fake.records("t", partition)
        }
        for value, future in futures.items():
            found = future.result(0)
            assert found.offset is not None
            assert at[found.partition, found.offset] == value
    assert len(at) == len(futures)
    assert any(value.startswith(b"handler") for value in futures)


@pytest.mark.parametrize("what", ["flush", "result", "admin", "close"])
def test_a_signal_handler_may_wait_in_the_middle_of_a_send(
    fake: FakeCluster, cluster: Cluster, what: str
) -> None:
    fake.create_topic("t")
    with cluster.producer(batch_size=300, linger_ms=60_000) as producer:
        producer.send("t", b"first").result(30)
        other = cluster.producer()
        acts: dict[str, Callable[[], object]] = {
            "flush": lambda: producer.flush(30),
            "result": lambda: producer.send("t", b"handler").result(30),
            "admin": lambda: cluster.admin.list_topics(timeout_s=30),
            "close": lambda: other.close(),
        }
        calls = 0

        def act() -> None:
            nonlocal calls
            calls += 1
            acts[what]()

        started = time.monotonic()
        with alarms(act, 0.002):
            while calls < 40:
                producer.send("t", b"main")
                assert time.monotonic() - started < 100
        other.close()


@pytest.mark.parametrize("what", ["send", "flush", "result"])
@pytest.mark.parametrize("where", ["_now", "_on_work"])
def test_a_signal_in_the_middle_of_a_send_may_send_and_wait(
    fake: FakeCluster,
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    what: str,
) -> None:
    fake.create_topic("t")
    with cluster.producer(linger_ms=60_000) as producer:
        producer.send("t", b"first").result(30)
        acts: dict[str, Callable[[], object]] = {
            "send": lambda: producer.send("t", b"handler"),
            "flush": lambda: (producer.send("t", b"handler"), producer.flush(30)),
            "result": lambda: producer.send("t", b"handler").result(30),
        }
        before = signal.signal(signal.SIGUSR1, lambda *_: acts[what]())
        accumulator = producer._core.accumulator
        called = getattr(accumulator, where)
        interrupts = 0

        def interrupted(*arguments: object) -> object:
            nonlocal interrupts
            interrupts += 1
            if interrupts == 1:
                signal.raise_signal(signal.SIGUSR1)
            return called(*arguments)

        monkeypatch.setattr(accumulator, where, interrupted)
        try:
            producer.send("t", b"main")
        finally:
            signal.signal(signal.SIGUSR1, before)
        producer.flush(30)
    assert sorted(filter(None, fake.values("t"))) == [b"first", b"handler", b"main"]


def test_a_handler_that_stops_the_holder_of_the_lock_does_not_stop_the_loop(
    fake: FakeCluster, cluster: Cluster
) -> None:
    """As if Python interrupted the thread while it holds the lock."""
    fake.create_topic("t", partitions=2)
    with cluster.producer() as producer:
        producer.send("t", b"warm", partition=0).result(30)
        future = producer.send("t", b"other")
        with producer._core.accumulator._lock:
            producer.send("t", b"open", partition=0)
            assert cluster.admin.list_topics(timeout_s=30) == ["t"]
            producer.flush(30)
            assert future.done()


@pytest.mark.parametrize("group", [None, "g"])
def test_a_signal_handler_may_wait_in_the_middle_of_a_poll(
    fake: FakeCluster, cluster: Cluster, group: str | None
) -> None:
    fake.create_topic("t")
    numbers = itertools.count()
    sent: set[bytes] = set()
    with cluster.producer() as producer, cluster.consumer("t", group=group) as consumer:

        def act() -> None:
            value = b"%d" % next(numbers)
            producer.send("t", value).result(30)
            sent.add(value)

        seen: list[bytes | None] = []
        started = time.monotonic()
        with alarms(act, 0.002):
            while len(sent) < 60:
                seen += [record.value for record in consumer.poll(0.001)]
                assert time.monotonic() - started < 100
        if group is None:
            while len(seen) < len(sent):
                seen += [record.value for record in consumer.poll(30)]
            assert len(seen) == len(sent) and set(seen) == sent


@pytest.mark.parametrize("where", ["take_loss", "revoked", "gave_up", "take_added"])
def test_a_signal_in_the_middle_of_a_rebalance_may_subscribe_and_wait(
    fake: FakeCluster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The loop goes on with the member meanwhile, whatever its consumer was doing."""
    fake.create_topic("t", partitions=2)
    fake.create_topic("u")
    with cluster.producer() as producer, cluster.consumer("t", group="g") as consumer:
        asked: list[str] = []

        def act() -> None:
            consumer.subscribe("u")
            producer.send("u", b"v").result(30)
            asked.append(where)

        def interrupted(owned: OwnedPartitions, *arguments: Any) -> Any:
            if not asked:
                signal.raise_signal(signal.SIGUSR1)
            return called(owned, *arguments)

        while not consumer.assignment():
            consumer.poll(0.05)
        called = getattr(OwnedPartitions, where)
        monkeypatch.setattr(OwnedPartitions, where, interrupted)
        before = signal.signal(signal.SIGUSR1, lambda *_: act())
        try:
            fake.groups.grant(("u", 0))
            started = time.monotonic()
            while not (asked and consumer.assignment() == {TopicPartition("u", 0)}):
                consumer.poll(0.05)
                assert time.monotonic() - started < 60
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert fake.groups.member().request.topics == ["u"]
        assert cluster.admin.list_topics(timeout_s=30) == ["t", "u"]


def test_a_signal_handler_cannot_poll_in_the_middle_of_a_poll(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    with cluster.consumer("t") as consumer:
        with alarms(lambda: consumer.poll(0), 0.1), pytest.raises(InvalidRequestError):
            consumer.poll(30)
        fake.write("t", [b"v"])
        assert [record.value for record in consumer.poll(30)] == [b"v"]


def test_a_finalizer_may_send_wherever_the_collector_runs(
    fake: FakeCluster, cluster: Cluster, eventually: Callable[[Callable[[], bool]], None]
) -> None:
    fake.create_topic("t")
    sent = 0
    with cluster.producer(batch_size=300) as producer:
        producer.send("t", b"first").result(30)

        class Told:
            def __init__(self) -> None:
                self.itself = self

            def __del__(self) -> None:
                nonlocal sent
                sent += 1
                producer.send("t", b"finalizer")

        before = gc.get_threshold()
        gc.set_threshold(7, 2, 2)
        try:
            for _ in range(3000):
                Told()
                producer.send("t", b"main")
        finally:
            gc.set_threshold(*before)
        # While another thread is in the middle of a collection, this one does nothing.
        eventually(lambda: gc.collect() >= 0 and sent == 3000)
        producer.flush(100)
    values = fake.values("t")
    assert sent == 3000 == values.count(b"finalizer") == values.count(b"main")


# --- forks and the end of the program -------------------------------------------------------------


def _exit_code(pid: int, timeout_s: float = 60.0) -> int | None:
    """The exit code; None where the process hangs."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _fork(act: Callable[[], object]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        act()
        code = 0
    finally:
        os._exit(code)


@pytest.mark.slow
def test_a_child_forked_while_another_thread_sends_neither_hangs_nor_waits(
    fake: FakeCluster, cluster: Cluster
) -> None:
    if ray_runs_here():
        pytest.skip("Ray's exit handlers do not end in a forked child.")
    fake.create_topic("t")
    fake.fault(Produce, times=1, delay_s=1.0)
    producer = cluster.producer(linger_ms=60_000)
    future = producer.send("t", b"under way")
    many = producer.send_many("t", [b"under way"] * 3)
    called: list[object] = []
    future.add_done_callback(called.append)

    def child() -> None:
        for wait in (future.result, many.result, producer.flush, producer.close):
            try:
                wait()
            except ClosedError as error:
                assert "fork" in str(error)
        gc.collect()
        atexit._run_exitfuncs()
        assert not called

    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with producer._core.accumulator._lock:
            held.set()
            go_on.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        assert _exit_code(_fork(child)) == 0
    finally:
        go_on.set()
        thread.join()
    producer.close()
    assert called == [future]
    assert len(fake.values("t")) == 4


def test_a_child_forked_by_a_handler_while_its_thread_waits_is_told(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    fake.fault(Produce, times=1000, is_lost=True)
    producer = cluster.producer()
    producer.send("t", b"v")
    begun: list[bool] = []
    pids: list[int] = []

    def fork() -> None:
        if not begun:  # The next alarm may come before the fork has ended.
            begun.append(True)
            pids.append(os.fork())

    try:
        with alarms(fork, 0.1), pytest.raises((ClosedError, TimeoutError)) as told:
            producer.flush(4)
    finally:
        if pids == [0]:
            os._exit(7 if "fork" in str(told.value) else 1)
    assert _exit_code(pids[0]) == 7
    with contextlib.suppress(Exception):
        producer.close(0.01)


AT_THE_END = """
import sys, threading, time
from tests.client.fake_broker import FakeCluster
from rayq.errors import ClosedError

fake = FakeCluster().__enter__()
fake.create_topic("t")
cluster = fake.cluster()

class Holder:
    def __init__(self):
        self.producer = cluster.producer()
        self.close = {close}
        self.itself = self

    def __del__(self, refused=ClosedError, write=sys.stderr.write):
        try:
            self.close()
        except refused as error:
            write(f"refused: {{error}}")

sys.modules["kept"] = Holder()
sys.modules["kept"].producer.send("t", b"v").result(30)
"""


@pytest.mark.slow
@pytest.mark.parametrize("close", ["self.producer.close", "cluster.close", "cluster.admin.list_topics"])
def test_a_finalizer_at_the_end_of_the_interpreter_is_refused(close: str) -> None:
    ended = run_to_its_end(AT_THE_END.format(close=close))
    assert ended.exit_code == 0, ended.stderr
    assert "Error" not in ended.stderr, ended.stderr
