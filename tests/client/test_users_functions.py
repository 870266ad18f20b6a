"""Functions that users give to queues, consumers, producers and admins, on both faces: what never
ran does not count as done, and what they raise is theirs."""

from __future__ import annotations

import asyncio
import functools
import logging
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from rayq import messages as m
from rayq.client.cluster import Cluster
from rayq.client.queues import workers
from rayq.errors import (
    DeserializationError,
    HandlerError,
    SerializationError,
    TaskArgumentsError,
    UnknownBrokerError,
    UnknownQueueError,
)
from rayq.records import TopicPartition
from tests.client.faces import Faces, as_coroutine_function, wait
from tests.client.fake_broker import FakeCluster


@pytest.fixture(params=["threads", "async"])
def faces(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Faces]:
    made = Faces(cluster, is_async=request.param == "async")
    yield made
    made.close()


@pytest.fixture(autouse=True)
def workers_look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "WATCH_S", 0.01)
    monkeypatch.setattr(workers, "TAKE_S", 0.05)


@pytest.fixture(autouse=True)
def python_s_own_signal_handlers() -> Iterator[None]:
    """Spark puts a SIGINT handler of its own into the process, and leaves it there."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def work_until(faces: Faces, queue: Any, holds: Callable[[], bool], *given: Any, **config: Any) -> None:
    """`queue.work`, stopped once something holds."""
    stop = (queue.inner if faces.is_async else queue).stop
    is_over = threading.Event()

    def watch() -> None:
        deadline_s = time.monotonic() + 30
        while not holds() and time.monotonic() < deadline_s and not is_over.wait(0.002):
            pass
        stop()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        queue.work(*given, **config)
    finally:
        is_over.set()
        watcher.join()


class Done:
    """Handlers of every kind, which note what they have handled."""

    def __init__(self) -> None:
        self.values: list[bytes | None] = []

    def plain(self, task: Any) -> None:
        self.values.append(task.value)

    async def coroutine(self, task: Any) -> None:
        await asyncio.sleep(0)
        self.values.append(task.value)

    def decorated(self, task: Any) -> Any:
        return self.coroutine(task)

    def in_thread(self, task: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        return self.coroutine(task)

    def twice(self, task: Any) -> Any:
        async def outer() -> Any:
            return self.coroutine(task)

        return outer()

    def generator(self, task: Any) -> Iterator[None]:
        self.plain(task)
        yield

    async def async_generator(self, task: Any) -> AsyncIterator[None]:
        self.plain(task)
        yield

    def lazy(self, task: Any) -> Any:
        return map(self.plain, [task])


class Plain(Done):
    def __call__(self, task: Any) -> None:
        self.plain(task)


class Async(Done):
    async def __call__(self, task: Any) -> None:
        await self.coroutine(task)


class Decorated(Done):
    def __call__(self, task: Any) -> Any:
        return self.coroutine(task)


class Yields(Done):
    def __call__(self, task: Any) -> Iterator[None]:
        yield from self.generator(task)


HANDLERS: dict[str, tuple[Callable[[], tuple[Done, Any]], str, str]] = {
    # How it is made, and what becomes of it: for threads, and on an event loop.
    "plain": (lambda: (d := Done(), d.plain), "runs", "runs"),
    "partial": (lambda: (d := Done(), functools.partial(d.plain)), "runs", "runs"),
    "object": (lambda: (d := Plain(), d), "runs", "runs"),
    "coroutine": (lambda: (d := Done(), d.coroutine), "refused", "runs"),
    "partial coroutine": (lambda: (d := Done(), functools.partial(d.coroutine)), "refused", "runs"),
    "async object": (lambda: (d := Async(), d), "refused", "runs"),
    "lambda": (lambda: (d := Done(), lambda task: d.coroutine(task)), "fails", "runs"),
    "decorated": (lambda: (d := Done(), d.decorated), "fails", "runs"),
    "decorated, in a thread": (lambda: (d := Done(), d.in_thread), "fails", "runs"),
    "decorated object": (lambda: (d := Decorated(), d), "fails", "runs"),
    "coroutine of a coroutine": (lambda: (d := Done(), d.twice), "fails", "fails"),
    "generator": (lambda: (d := Done(), d.generator), "refused", "refused"),
    "async generator": (lambda: (d := Done(), d.async_generator), "refused", "refused"),
    "yielding object": (lambda: (d := Yields(), d), "refused", "refused"),
    "lambda of a generator": (lambda: (d := Done(), lambda t: d.generator(t)), "fails", "fails"),
    "lambda of an async one": (
        lambda: (d := Done(), lambda t: d.async_generator(t)),
        "fails",
        "fails",
    ),
    "lazy": (lambda: (d := Done(), d.lazy), "fails", "fails"),
    "list of coroutines": (lambda: (d := Done(), lambda t: [d.coroutine(t)]), "fails", "fails"),
    "function that comes back": (lambda: (d := Done(), lambda _: d.plain), "fails", "fails"),
    "class": (lambda: (Done(), Plain), "refused", "refused"),
}


@pytest.mark.parametrize("kind", HANDLERS)
def test_a_handler_that_never_ran_has_handled_nothing(
    faces: Faces, fake: FakeCluster, kind: str
) -> None:
    make, for_threads, on_loop = HANDLERS[kind]
    expected = on_loop if faces.is_async else for_threads
    done, handler = make()
    played = fake.queues.create("q", max_deliveries=2, backoff_s=0)
    fake.write("q", [b"1"])
    with faces.make("queue", "q") as queue:
        if expected == "refused":
            with pytest.raises(HandlerError, match="^The handler "):
                queue.work(handler)
            assert not played.counts, "nothing was taken"
            return
        work_until(faces, queue, lambda: bool(played.done), handler)
    if expected == "runs":
        assert done.values == [b"1"]
        assert played.done == {(0, 0)} and not played.rejected and played.counts == {(0, 0): 1}
    else:
        assert done.values == []
        assert "returned a" in played.rejected[0, 0] and played.counts == {(0, 0): 2}


@pytest.mark.parametrize("kind", HANDLERS)
def test_a_task_that_never_ran_is_not_done(faces: Faces, fake: FakeCluster, kind: str) -> None:
    make, for_threads, on_loop = HANDLERS[kind]
    expected = on_loop if faces.is_async else for_threads
    done, function = make()
    played = fake.queues.create("q", max_deliveries=2, backoff_s=0)

    class Given:
        value = b"1"

    def handle(text: str) -> Any:
        return function(Given())

    with faces.make("queue", "q") as queue:
        if expected == "refused":
            with pytest.raises(HandlerError, match="Task|task"):
                queue.task(function, name="f")
                queue.work()
            return
        if on_loop == for_threads == "runs":
            task = queue.task(handle, name="f")
        else:
            task = queue.task(lambda text: function(Given()), name="f")
        faces.runner.run(task.delay("1")) if faces.is_async else task.delay("1")
        work_until(faces, queue, lambda: bool(played.done))
    if expected == "runs":
        assert done.values == [b"1"] and played.done == {(0, 0)} and not played.rejected
    else:
        assert done.values == [] and "returned a" in played.rejected[0, 0]


def test_a_task_may_have_parameters_of_any_name(faces: Faces, fake: FakeCluster) -> None:
    played = fake.queues.create("q")
    called: list[Any] = []

    def handle(self: int, args: int = 0, function: int = 0) -> None:
        called.append((self, args, function))

    with faces.make("queue", "q") as queue:
        task = queue.task(handle, name="f")
        sent = task.delay(self=1, args=2, function=3)
        faces.runner.run(sent) if faces.is_async else None
        work_until(faces, queue, lambda: bool(played.done))
    assert called == [(1, 2, 3)]


@pytest.mark.parametrize("args", ["ab", b"ab", {"a": 1, "b": 2}, {1, 2}, iter([1, 2]), 5])
def test_what_put_takes_for_arguments_is_no_text_that_comes_apart(
    faces: Faces, fake: FakeCluster, args: Any
) -> None:
    fake.queues.create("q")
    with faces.make("queue", "q") as queue:
        task = queue.task(lambda *given, **named: None, name="f")
        with pytest.raises(TypeError, match="a list or a tuple, not "):
            task.put(args)
        with pytest.raises(TypeError, match="kwargs must be a dict"):
            task.put([], [("a", 1)])
    assert fake.values("q") == []


def test_a_builtin_that_does_not_say_what_it_takes_is_no_task(
    faces: Faces, fake: FakeCluster
) -> None:
    fake.queues.create("q")
    with faces.make("queue", "q") as queue, pytest.raises(HandlerError, match="of task 'm'"):
        queue.task(max, name="m")


# --- what handlers raise --------------------------------------------------------------------------


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class WorseError(UnprintableError):
    def __str__(self) -> str:
        raise SystemExit("in __str__")

    __repr__ = __str__

    def __reduce__(self) -> Any:
        raise RuntimeError("no pickle")


class FalseError(Exception):
    def __bool__(self) -> bool:
        return False


RAISED: dict[str, BaseException] = {
    type(error).__name__: error
    for error in (
        asyncio.CancelledError("mine"),
        StopIteration(),
        StopAsyncIteration(),
        GeneratorExit(),
        KeyboardInterrupt(),
        SystemExit(0),
        BaseExceptionGroup("several", [KeyboardInterrupt(), SystemExit(1)]),
        asyncio.TimeoutError(),
        UnprintableError(),
        WorseError(),
        FalseError(),
        UnknownQueueError("another queue"),
        TaskArgumentsError("of another function"),
    )
}
"""By name: pytest prints the arguments of a test, and not all of these can be printed."""
ENDS_PROGRAM = ("KeyboardInterrupt", "SystemExit")


@pytest.mark.parametrize("is_coroutine", [False, True])
@pytest.mark.parametrize("name", RAISED)
def test_what_a_handler_raises_is_its_failure_and_ends_no_worker(
    faces: Faces, fake: FakeCluster, name: str, is_coroutine: bool
) -> None:
    error = RAISED[name]
    if is_coroutine and not faces.is_async:
        pytest.skip("of these there are none for threads")
    played = fake.queues.create("q", max_deliveries=2, backoff_s=0)
    fake.write("q", [b"bad", b"good"])
    handled: list[bytes | None] = []

    def handler(task: Any) -> None:
        if task.value == b"bad":
            raise error
        handled.append(task.value)

    chosen = as_coroutine_function(handler) if is_coroutine else handler
    with faces.make("queue", "q") as queue:
        work_until(faces, queue, lambda: len(played.done) == 2, chosen, concurrency=2)
    assert handled == [b"good"]
    told = "RuntimeError" if is_coroutine and name == "StopIteration" else name
    assert played.rejected[0, 0].startswith(told) and played.counts[0, 0] == 2


def test_a_handler_that_cancels_itself_has_failed(fake: FakeCluster, cluster: Cluster) -> None:
    played = fake.queues.create("q", max_deliveries=1)
    fake.write("q", [b"1"])

    async def handler(_task: Any) -> None:
        current = asyncio.current_task()
        assert current is not None
        current.cancel()
        await asyncio.sleep(30)

    async def scenario() -> None:
        async with cluster.async_queue("q") as queue:
            work = asyncio.ensure_future(queue.work(handler))
            while not played.done:  # noqa: ASYNC110 - it comes from another thread
                await asyncio.sleep(0.002)
            queue.stop()
            await work

    asyncio.run(scenario())
    assert played.rejected == {(0, 0): "CancelledError."}


@pytest.mark.parametrize("is_stubborn", [False, True])
def test_cancelling_the_worker_gives_its_records_back_and_is_no_failure(
    fake: FakeCluster, cluster: Cluster, is_stubborn: bool
) -> None:
    played = fake.queues.create("q", max_deliveries=1)
    fake.write("q", [b"1", b"2"])

    async def scenario() -> None:
        at_work = asyncio.Event()

        async def handler(_task: Any) -> None:
            at_work.set()
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                if not is_stubborn:
                    raise

        async with cluster.async_queue("q") as queue:
            work = asyncio.ensure_future(queue.work(handler, concurrency=2))
            await at_work.wait()
            work.cancel()
            await asyncio.wait([work], timeout=30)
            assert work.cancelled()

    asyncio.run(scenario())
    assert not played.rejected and not played.done and not played.locks


def test_of_two_failures_of_a_worker_one_is_raised_and_the_other_is_logged(
    faces: Faces, fake: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    fake.queues.create("q")

    errors = [ZeroDivisionError("first"), KeyError("second")]
    together = threading.Barrier(2)

    class Broken:
        def take(self, _count: int = 1, _timeout_s: float = 1.0) -> list[Any]:
            together.wait(30)
            raise errors.pop(0)

    class AsyncBroken:
        async def take(self, _count: int = 1, _timeout_s: float = 1.0) -> list[Any]:
            raise errors.pop(0)

    functions: workers.Functions[Any] = workers.Functions()
    with pytest.raises(ZeroDivisionError, match="first"):
        if faces.is_async:

            async def run() -> None:
                await workers.AsyncWorker(AsyncBroken().take, print, functions).run(2, None, 5.0)

            faces.runner.run(run())
        else:
            workers.ThreadWorker(Broken().take, print, functions).run(2, None, 5.0)
    assert "second" in caplog.text


def test_concurrency_is_how_many_plain_functions_run_at_once(
    faces: Faces, fake: FakeCluster
) -> None:
    played = fake.queues.create("q")
    fake.write("q", [b"%d" % n for n in range(20)])
    together = threading.Barrier(20)
    with faces.make("queue", "q") as queue:
        work_until(
            faces,
            queue,
            lambda: len(played.done) == 20,
            lambda _: together.wait(30) and None,
            concurrency=20,
        )
    assert len(played.done) == 20


def test_sigterm_lets_a_worker_finish_what_it_is_at(faces: Faces, fake: FakeCluster) -> None:
    played = fake.queues.create("q")
    fake.write("q", [b"1", b"2"])
    handled: list[Any] = []

    def handler(task: Any) -> None:
        signal.raise_signal(signal.SIGTERM) if not handled else None
        time.sleep(0.05)
        handled.append(task.value)

    with faces.make("queue", "q", prefetch=0) as queue:
        queue.work(handler)
    assert handled == [b"1"] and played.done == {(0, 0)}
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_stops_all_workers_of_an_event_loop(fake: FakeCluster, cluster: Cluster) -> None:
    fake.queues.create("q")
    fake.queues.create("p")

    async def scenario() -> None:
        async with cluster.async_queue("q") as q, cluster.async_queue("p") as p:
            asyncio.get_running_loop().call_later(0.1, signal.raise_signal, signal.SIGTERM)
            await asyncio.wait_for(asyncio.gather(q.work(print), p.work(print)), 30)

    asyncio.run(scenario())
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_interrupted_event_loop_ends_by_the_interrupt_and_gives_back(
    fake: FakeCluster, cluster: Cluster
) -> None:
    played = fake.queues.create("q", max_deliveries=1)
    fake.write("q", [b"1"])

    async def handler(_task: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(30)

    async def scenario() -> None:
        async with cluster.async_queue("q") as queue:
            await queue.work(handler)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(scenario())
    assert not played.rejected and not played.done and not played.locks


def test_what_a_signal_handler_raises_in_a_handler_ends_the_program(
    fake: FakeCluster, cluster: Cluster
) -> None:
    played = fake.queues.create("q", max_deliveries=1)
    fake.write("q", [b"1"])

    def ends(_number: int, _frame: object) -> None:
        raise SystemExit(7)

    async def handler(_task: Any) -> None:
        signal.raise_signal(signal.SIGUSR1)

    async def scenario() -> None:
        async with cluster.async_queue("q") as queue:
            await queue.work(handler)

    before = signal.signal(signal.SIGUSR1, ends)
    try:
        with pytest.raises(SystemExit, match="7"):
            asyncio.run(scenario())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not played.rejected and not played.done


# --- callbacks of consumers -----------------------------------------------------------------------

FAST: dict[str, Any] = {"auto_offset_reset": "earliest", "group_heartbeat_interval_ms": 100}


def poll_until_it_raises(consumer: Any) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        consumer.poll(0.05)


@pytest.mark.parametrize("name", ["on_assigned", "on_revoked", "on_lost"])
@pytest.mark.parametrize("kind", ["coroutine", "generator", "async_generator", "class"])
def test_callbacks_that_would_not_run_are_refused(
    faces: Faces, fake: FakeCluster, name: str, kind: str
) -> None:
    fake.create_topic("t")
    callback = Plain if kind == "class" else getattr(Done(), kind)
    if kind == "coroutine" and faces.is_async:
        faces.make("consumer", "t", group="g", **{name: callback}).close()
        return
    with pytest.raises(HandlerError, match=f"^{name} "):
        faces.make("consumer", "t", group="g", **{name: callback})
    with faces.make("consumer", group="g") as consumer, pytest.raises(HandlerError, match=name):
        consumer.subscribe("t", **{name: callback})


def test_a_callback_that_returns_a_coroutine_is_awaited_or_an_error_of_the_poll(
    faces: Faces, fake: FakeCluster
) -> None:
    fake.create_topic("t")
    ran: list[set[TopicPartition]] = []

    async def later(places: set[TopicPartition]) -> None:
        await asyncio.sleep(0)
        ran.append(places)

    with faces.make("consumer", "t", group="g", on_assigned=lambda p: later(p), **FAST) as consumer:
        if faces.is_async:
            while not ran:
                consumer.poll(0.05)
        else:
            with pytest.raises(HandlerError, match="on_assigned returned an awaitable"):
                poll_until_it_raises(consumer)


def test_a_callback_may_return_what_it_likes(faces: Faces, fake: FakeCluster) -> None:
    fake.create_topic("t")
    fake.write("t", [b"1"])
    with faces.make("consumer", "t", group="g", on_assigned=lambda p: [1], **FAST) as consumer:
        deadline = time.monotonic() + 30
        while not consumer.poll(0.05):
            assert time.monotonic() < deadline


@pytest.mark.parametrize(
    "error",
    [StopIteration(), StopAsyncIteration(), GeneratorExit(), asyncio.CancelledError()],
    ids=lambda error: type(error).__name__,
)
def test_what_a_callback_raises_ends_no_iteration_and_cancels_nobody(
    faces: Faces, fake: FakeCluster, error: BaseException
) -> None:
    fake.create_topic("t")

    def fails(_places: set[TopicPartition]) -> None:
        raise error

    callback = as_coroutine_function(fails) if faces.is_async else fails
    for chosen in (fails, callback):
        with faces.make("consumer", "t", group="g", on_assigned=chosen, **FAST) as consumer:
            step = consumer.__anext__ if faces.is_async else consumer.__next__
            with pytest.raises((HandlerError, RuntimeError), match=type(error).__name__):
                step()
        with faces.make("consumer", "t", group="g", on_assigned=chosen, **FAST) as consumer:
            with pytest.raises((HandlerError, RuntimeError), match=type(error).__name__):
                poll_until_it_raises(consumer)


# --- delivery callbacks ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["coroutine", "generator", "async_generator", "class"])
def test_delivery_callbacks_that_would_not_run_are_refused(
    faces: Faces, fake: FakeCluster, kind: str
) -> None:
    fake.create_topic("t")
    callback: Any = Plain if kind == "class" else getattr(Done(), kind)
    with faces.make("producer") as producer:
        if kind != "coroutine" or not faces.is_async:
            with pytest.raises(HandlerError, match="^on_delivery "):
                producer.send("t", b"v", on_delivery=callback)
            assert fake.values("t") == []
        future = producer.send("t", b"v")
        with pytest.raises(HandlerError, match="^A callback "):
            future.add_done_callback(callback)
        wait(future, faces)


def test_delivery_callbacks_that_return_a_coroutine_are_awaited_or_logged(
    faces: Faces, fake: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    fake.create_topic("t")
    ran: list[Any] = []

    async def later(metadata: Any, error: Any) -> None:
        await asyncio.sleep(0.05)
        ran.append((metadata.offset, error))

    with faces.make("producer") as producer:
        producer.send("t", b"v", on_delivery=lambda metadata, error: later(metadata, error))
        producer.flush()
    if faces.is_async:
        assert ran == [(0, None)], "flush waits for it"
    else:
        assert "on_delivery returned an awaitable" in caplog.text


def test_a_callback_may_return_a_future_which_goes_on_by_itself(
    faces: Faces, fake: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    fake.create_topic("t")
    with faces.make("producer") as producer:
        sender = producer.inner if faces.is_async else producer
        first = producer.send("t", b"1", on_delivery=lambda *_: sender.send("t", b"2"))
        first.add_done_callback(lambda future: future)
        wait(first, faces)
        producer.flush()
    assert sorted(fake.values("t")) == [b"1", b"2"]
    assert "callback failed" not in caplog.text


def test_a_handler_that_returns_a_future_has_handled_nothing_until_that_is_done(
    faces: Faces, fake: FakeCluster
) -> None:
    played = fake.queues.create("q", max_deliveries=1)
    fake.create_topic("t")
    fake.write("q", [b"1"])
    with faces.make("producer") as producer, faces.make("queue", "q") as queue:
        sender = producer.inner if faces.is_async else producer
        work_until(
            faces,
            queue,
            lambda: bool(played.done),
            lambda task: sender.send("t", task.value),
        )
    if not faces.is_async:
        assert "DeliveryFuture" in played.rejected[0, 0]


def test_a_delivery_callback_that_closes_its_producer_waits_for_no_callback(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")

    async def scenario() -> None:
        closed = asyncio.Event()
        producer = cluster.async_producer()

        async def close(_metadata: Any, _error: Any) -> None:
            await producer.flush()
            await producer.close()
            closed.set()

        for _ in range(2):
            await producer.send("t", b"v", on_delivery=close)
        await asyncio.wait_for(closed.wait(), 30)

    asyncio.run(scenario())


@pytest.mark.parametrize("name", RAISED)
def test_what_a_delivery_callback_raises_is_logged_and_stops_nothing(
    faces: Faces,
    fake: FakeCluster,
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    error = RAISED[name]
    caplog.set_level(logging.ERROR)
    fake.create_topic("t")

    def fails(_metadata: Any, _error: Any) -> None:
        raise error

    with faces.make("producer") as producer:
        producer.send("t", b"1", on_delivery=fails)
        if faces.is_async:
            producer.send("t", b"2", on_delivery=as_coroutine_function(fails))
        wait(producer.send("t", b"3"), faces)
        producer.flush()
    assert caplog.text.count("a delivery callback") == (2 if faces.is_async else 1)
    assert fake.values("t")[-1] == b"3"


@pytest.mark.parametrize("name", RAISED)
def test_what_serializers_and_partitioners_raise_is_an_error_of_the_send(
    faces: Faces, fake: FakeCluster, name: str
) -> None:
    error = RAISED[name]
    if name in ENDS_PROGRAM:
        pytest.skip("they come to the caller as they are")
    fake.create_topic("t")

    def fails(*_: object) -> Any:
        raise error

    for config in ({"value_serializer": fails}, {"partitioner": fails}):
        with faces.make("producer", **config) as producer:
            raised: BaseException | None = None
            try:
                producer.send("t", b"v")
            except BaseException as caught:  # noqa: BLE001 - of several kinds
                raised = caught
            assert type(raised) in (SerializationError, HandlerError, type(error))
            assert not isinstance(raised, asyncio.CancelledError | StopIteration | GeneratorExit)
        assert fake.asked(m.Produce) == []


@pytest.mark.parametrize("name", RAISED)
def test_what_a_deserializer_raises_is_an_error_of_the_poll(
    faces: Faces, fake: FakeCluster, name: str
) -> None:
    error = RAISED[name]
    if name in ENDS_PROGRAM:
        pytest.skip("they come to the caller as they are")
    fake.create_topic("t")
    fake.write("t", [b"1"])

    def fails(_data: bytes) -> Any:
        raise error

    with faces.make(
        "consumer", "t", auto_offset_reset="earliest", value_deserializer=fails
    ) as consumer:
        with pytest.raises(DeserializationError, match=name):
            poll_until_it_raises(consumer)


# --- the progress of a drain ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["coroutine", "generator", "async_generator"])
def test_a_function_for_progress_that_would_not_run_is_refused(
    faces: Faces, fake: FakeCluster, kind: str
) -> None:
    expected = UnknownBrokerError if kind == "coroutine" and faces.is_async else HandlerError
    admin = faces.admin()
    with pytest.raises(expected):
        admin.drain_broker(99, on_progress=getattr(Done(), kind))
    if faces.is_async:
        admin.close()


# --- the end of a worker --------------------------------------------------------------------------


def test_a_worker_waits_for_a_handler_no_longer_than_it_may(
    faces: Faces, fake: FakeCluster
) -> None:
    played = fake.queues.create("q")
    fake.write("q", [b"1"])
    is_stuck, may_end = threading.Event(), threading.Event()

    def handler(_task: Any) -> None:
        is_stuck.set()
        may_end.wait(30)

    with faces.make("queue", "q") as queue:
        work_until(faces, queue, is_stuck.is_set, handler, stop_timeout_s=0.05)
        assert not played.done
    may_end.set()
    assert not played.done and not played.locks, "it was released"
