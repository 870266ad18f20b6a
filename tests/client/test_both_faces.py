"""What holds of a class for threads holds of its async twin: each test runs over both."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rayq import (
    Admin,
    AsyncAdmin,
    AsyncConsumer,
    AsyncProducer,
    AsyncQueue,
    AsyncTransaction,
    Consumer,
    Producer,
    Queue,
    QueueTask,
    TopicPartition,
    Transaction,
)
from rayq.client.cluster import Cluster
from rayq.client.queues.workers import AsyncWorker, ThreadWorker
from rayq.errors import (
    ClosedError,
    ConcurrentUseError,
    InvalidRequestError,
    OutcomeUnknownError,
    RayqError,
    TimeoutError,
    UnknownQueueError,
    UnknownTopicError,
)
from rayq.messages import Produce, Settle
from rayq.storage.batch import due_header, due_ms_of
from tests.client.faces import Faces, wait
from tests.client.fake_broker import FakeCluster


@pytest.fixture(params=["threads", "async"])
def faces(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Faces]:
    made = Faces(cluster, is_async=request.param == "async")
    yield made
    made.close()


# --- the end of a producer ------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_s", [0, 0.1])
def test_close_says_of_each_record_whether_it_may_be_written(
    faces: Faces, fake: FakeCluster, timeout_s: float
) -> None:
    fake.create_topic("t", partitions=2)
    fake.move_leader("t", 1, None)
    producer = faces.make("producer", max_in_flight_requests_per_connection=1)
    wait(producer.send("t", b"warm", partition=0), faces)
    fake.fault(Produce, times=1000, is_lost=True)
    sent = [producer.send_many("t", [b"v"] * 2, partition=0)]
    unsent = [producer.send("t", b"v", partition=1) for _ in range(3)]
    with pytest.raises(TimeoutError) as told:
        producer.close(timeout_s)
    assert "close: 5 records were not delivered" in str(told.value)
    assert "Not written: 3. Sent: 2, which may" in str(told.value)
    assert "flush" not in str(told.value)
    for future in sent:
        with pytest.raises(OutcomeUnknownError, match="may or may not be written") as unknown:
            wait(future, faces)
        assert "not written" not in str(unknown.value)
    for future in unsent:
        with pytest.raises(ClosedError, match="It was not written"):
            wait(future, faces)
    producer.close()


@pytest.mark.parametrize("timeout_s", [0, 0.1])
def test_a_queue_that_is_closed_too_soon_says_what_may_come_again(
    faces: Faces, fake: FakeCluster, timeout_s: float
) -> None:
    fake.queues.create("q")
    fake.write("q", [b"1"])
    queue = faces.make("queue", "q", prefetch=0)
    [task] = queue.take(1, 30)
    fake.fault(Settle, times=1000, is_lost=True)
    task.ack()
    with pytest.raises(TimeoutError, match="^close: .* may be redelivered") as told:
        queue.close(timeout_s)
    assert "flush" not in str(told.value)
    queue.close()


# --- the same names, arguments and defaults -------------------------------------------------------

PAIRS = [
    (Producer, AsyncProducer),
    (Consumer, AsyncConsumer),
    (Queue, AsyncQueue),
    (Transaction, AsyncTransaction),
    (Admin, AsyncAdmin),
    (ThreadWorker, AsyncWorker),
]
OF_ONE_FACE = {
    "closing",  # of a cluster that closes several producers at once
    "abandon",  # ends what another thread uses, or what nobody waits for
    "load_topic",  # what servers' producers need
    "core",
    "config",
}
PLAIN = {"transaction", "until_end", "stop", "task", "abandon", "core", "config"}
"""What an async class does without awaiting: it makes something, or only says something."""
OTHER_TYPES = [
    ("AsyncIterator", "Iterator"),
    ("asyncio.Future", "concurrent.futures.Future"),
    ("AsyncReading", "Reading"),
    ("AsyncTransaction", "Transaction"),
    ("OnAsyncDelivery", "OnDelivery"),
    ("Coroutine[Any, Any, RecordMetadata]", "RecordMetadata"),
]


def public(kind: type) -> dict[str, Any]:
    return {name: getattr(kind, name) for name in dir(kind) if not name.startswith("_")}


def as_of_threads(annotation: object) -> str:
    text = str(annotation)
    for its_name, name in OTHER_TYPES:
        text = text.replace(its_name, name)
    return text


@pytest.mark.parametrize(
    ("plain", "twin"), PAIRS, ids=lambda kind: kind.__name__ if isinstance(kind, type) else None
)
def test_an_async_twin_has_the_same_methods_with_the_same_arguments(
    plain: type, twin: type
) -> None:
    methods, twins = public(plain), public(twin)
    of_one = {"close"} if plain is Admin else set()
    assert methods.keys() ^ twins.keys() <= OF_ONE_FACE | of_one
    for name in methods.keys() & twins.keys() - {"core", "config", "name"}:
        method, its_twin = methods[name], twins[name]
        expected, found = inspect.signature(method), inspect.signature(its_twin)
        assert [(one.name, one.kind, one.default) for one in found.parameters.values()] == [
            (one.name, one.kind, one.default) for one in expected.parameters.values()
        ], name
        for one in expected.parameters.values():
            annotation = found.parameters[one.name].annotation
            assert as_of_threads(annotation) == str(one.annotation), f"{name}({one.name})"
        assert as_of_threads(found.return_annotation) == str(expected.return_annotation), name
        assert not inspect.iscoroutinefunction(method), name
        if name not in PLAIN:
            assert inspect.iscoroutinefunction(inspect.unwrap(its_twin)), name
        if plain is not Admin:  # whose methods are made of the other's
            checks = [hasattr(one, "__wrapped__") for one in (method, its_twin)]
            assert checks[0] == checks[1], f"{name} checks timeout_s on one face only"


def test_the_methods_of_a_cluster_that_make_them_take_the_same() -> None:
    for name in ("producer", "consumer", "queue"):
        expected = inspect.signature(getattr(Cluster, name)).parameters
        assert inspect.signature(getattr(Cluster, f"async_{name}")).parameters == expected, name


# --- the same effects and errors ------------------------------------------------------------------


def closed(thing: Any) -> Any:
    thing.close()
    return thing


def sent_in_a_block(faces: Faces, *, fails: bool) -> None:
    producer = faces.make("producer", transactional_id="tx")
    with producer.transaction(name="one") as transaction:
        transaction.send("t", b"in it")
        if fails:
            raise ZeroDivisionError
    producer.close()


def polled(faces: Faces, count: int, **options: Any) -> list[bytes | None]:
    with faces.make("consumer", "t", auto_offset_reset="earliest", **options) as consumer:
        found: list[bytes | None] = []
        while len(found) < count:
            found += [record.value for record in consumer.poll(0.1)]
        return found


def poll_in_a_callback(faces: Faces) -> list[str]:
    told: list[str] = []

    def on_assigned(_places: object) -> Any:
        if faces.is_async:
            return poll()
        told.append(raised_by(lambda: consumer.poll(0.01)))
        return None

    async def poll() -> None:
        try:
            await consumer.inner.poll(0.01)
        except RayqError as error:
            told.append(type(error).__name__)

    with faces.make("consumer", "t", group="g", on_assigned=on_assigned) as consumer:
        while not told:
            consumer.poll(0.05)
    return told


def raised_by(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - of several kinds
        return type(error).__name__
    return "nothing"


def worked(faces: Faces, **options: Any) -> list[bytes | None]:
    seen: list[bytes | None] = []
    with faces.make("queue", "q", prefetch=0) as queue:

        def handler(task: QueueTask) -> None:
            seen.append(task.value)
            if task.value == b"stop":
                (queue.inner if faces.is_async else queue).stop()

        queue.put_many([b"1", b"stop", b"3"])
        queue.work(handler, **options)
    return seen


def settled(faces: Faces, how: str, *arguments: Any) -> tuple[bool, str]:
    with faces.make("queue", "q", prefetch=0) as queue:
        queue.put(b"v")
        [task] = queue.take(1, 30)
        getattr(task, how)(*arguments)
        queue.flush()
        return task.was_rejected, raised_by(task.ack)


def offsets(faces: Faces) -> list[Any]:
    place = TopicPartition("t", 0)
    with faces.make("consumer", auto_offset_reset="earliest") as consumer:
        consumer.assign([place])
        consumer.seek(place, 1)
        at = consumer.position(place)
        consumer.pause(place)
        nothing = consumer.poll(0.01)
        consumer.resume(place)
        return [
            at,
            nothing,
            [record.value for record in consumer.until_end()],
            consumer.lag(),
            consumer.end_offsets([place]),
            consumer.beginning_offsets([place]),
            consumer.assignment() == {place},
        ]


T0 = TopicPartition("t", 0)
ROWS: dict[str, tuple[Callable[[Faces], Any], Any]] = {
    "send": (lambda of: wait(of.make("producer").send("t", b"v"), of).offset, 2),
    "send_and_wait": (lambda of: of.make("producer").send_and_wait("t", b"v").offset, 2),
    "send_many": (
        lambda of: wait(of.make("producer").send_many("t", [b"v"] * 3), of),
        [("t", 0, 2, 5)],
    ),
    "send text": (lambda of: of.make("producer").send("t", "v"), TypeError),
    "send nowhere": (
        lambda of: of.make("producer", max_block_ms=200).send("nowhere", b"v"),
        UnknownTopicError,
    ),
    "send past": (lambda of: of.make("producer").send("t", b"v", partition=7), InvalidRequestError),
    "send closed": (lambda of: closed(of.make("producer")).send("t", b"v"), ClosedError),
    "send_many closed": (lambda of: closed(of.make("producer")).send_many("t", [b"v"]), ClosedError),
    "close twice": (lambda of: closed(closed(of.make("producer"))) and None, None),
    "flush timeout": (lambda of: of.make("producer").flush(-1), InvalidRequestError),
    "block": (lambda of: sent_in_a_block(of, fails=False), None),
    "block fails": (lambda of: sent_in_a_block(of, fails=True), ZeroDivisionError),
    "no transactional id": (lambda of: of.make("producer").transaction(), InvalidRequestError),
    "none begun": (lambda of: of.make("producer").commit_transaction(), InvalidRequestError),
    "poll": (lambda of: polled(of, 2), [b"a", b"b"]),
    "poll in a group": (lambda of: polled(of, 2, group="g"), [b"a", b"b"]),
    "poll in a callback": (poll_in_a_callback, ["InvalidRequestError"]),
    "poll closed": (lambda of: closed(of.make("consumer", "t")).poll(0.01), ClosedError),
    "assign closed": (lambda of: closed(of.make("consumer", group="g")).assign([T0]), ClosedError),
    "seek text": (lambda of: of.make("consumer", "t").seek(T0, "1"), TypeError),
    "commit alone": (lambda of: of.make("consumer", "t").commit(), InvalidRequestError),
    "offsets": (offsets, [1, [], [b"b"], {T0: 0}, {T0: 2}, {T0: 0}, True]),
    "work": (worked, [b"1", b"stop"]),
    "work with none": (lambda of: worked(of, concurrency=0), InvalidRequestError),
    "ack": (lambda of: settled(of, "ack"), (False, "nothing")),
    "reject": (lambda of: settled(of, "reject", "no"), (True, "InvalidRequestError")),
    "nack": (lambda of: settled(of, "nack", 0), (False, "InvalidRequestError")),
    "take closed": (lambda of: closed(of.make("queue", "q")).take(), ClosedError),
    "put closed": (lambda of: closed(of.make("queue", "q")).put(b"v"), ClosedError),
    "work closed": (lambda of: closed(of.make("queue", "q")).work(print), ClosedError),
    "flush closed": (lambda of: closed(of.make("queue", "q")).flush(), ClosedError),
    "take none": (lambda of: of.make("queue", "q").take(0), InvalidRequestError),
    "put late": (lambda of: of.make("queue", "q").put(b"v", delay_s=-1), InvalidRequestError),
    "work for a text": (lambda of: worked(of, stop_when_idle_s="1"), TypeError),
    "work for no time": (lambda of: worked(of, stop_when_idle_s=math.nan), InvalidRequestError),
    "work, idle since before": (lambda of: worked(of, stop_when_idle_s=-1), InvalidRequestError),
    "work without an end": (
        lambda of: worked(of, stop_timeout_s=math.inf, stop_when_idle_s=math.inf),
        [b"1", b"stop"],
    ),
    "work and stop never": (lambda of: worked(of, stop_timeout_s=None), TypeError),
    "work and stop before": (lambda of: worked(of, stop_timeout_s=-1), InvalidRequestError),
    "put letters": (lambda of: of.make("queue", "q").put_many("ab"), TypeError),
    "put letters late": (lambda of: of.make("queue", "q").put_many(b"ab", delay_s=1), TypeError),
    "put what comes, late": (
        lambda of: of.make("queue", "q").put_many(iter([b"a", b"b"]), delay_s=1),
        None,
    ),
    "send letters": (
        lambda of: of.make("producer", value_serializer=str.encode).send_many("t", "ab"),
        TypeError,
    ),
    "send letters as keys": (
        lambda of: of.make("producer", key_serializer=str.encode).send_many("t", [b"v"], keys="k"),
        TypeError,
    ),
    "send a mapping": (
        lambda of: of.make("producer", value_serializer=str.encode).send_many("t", {"a": 1}),
        TypeError,
    ),
    "no such queue": (lambda of: of.make("queue", "nosuch").take(1, 0.1), UnknownQueueError),
    "topics": (lambda of: of.admin().list_topics(), ["q", "t"]),
    "no such topic": (lambda of: of.admin().describe_topic("nosuch"), UnknownTopicError),
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("name", ROWS)
def test_a_call_does_the_same_on_both_faces(faces: Faces, fake: FakeCluster, name: str) -> None:
    fake.create_topic("t")
    fake.write("t", [b"a", b"b"])
    fake.queues.create("q")
    act, expected = ROWS[name]
    if isinstance(expected, type):
        with pytest.raises(expected):
            act(faces)
    else:
        assert act(faces) == expected


@pytest.mark.parametrize("name_and_due", [tuple, list])
def test_a_delay_counts_though_the_headers_of_a_delayed_record_come_along(
    faces: Faces, fake: FakeCluster, name_and_due: Callable[[Any], Any]
) -> None:
    fake.queues.create("q")
    before: list[Any] = [name_and_due(due_header(1)), ("other", b"x")]
    with faces.make("queue", "q") as queue:
        queue.put(b"v", headers=before, delay_s=60)
    with faces.make("consumer", "q", auto_offset_reset="earliest") as consumer:
        while not (records := consumer.poll(0.1)):
            pass
    headers = records[0].headers
    assert [name for name, _ in headers] == ["other", "rayq.due"]
    assert (due_ms_of(headers) or 0) > time.time() * 1000


def test_a_consumer_that_is_polled_twice_at_once_says_so(faces: Faces, fake: FakeCluster) -> None:
    fake.create_topic("t")
    with faces.make("consumer", "t") as consumer:
        if faces.is_async:

            async def twice() -> list[Any]:
                polls = [consumer.inner.poll(0.3), consumer.inner.__anext__()]
                return await asyncio.gather(*polls, return_exceptions=True)

            first, second = faces.runner.run(twice())
        else:
            thread = threading.Thread(target=lambda: consumer.poll(0.3))
            thread.start()
            time.sleep(0.05)
            first, second = [], ConcurrentUseError(raised_by(lambda: next(consumer)))
            assert str(second) == "ConcurrentUseError"
            thread.join()
    assert first == [] and isinstance(second, ConcurrentUseError)
