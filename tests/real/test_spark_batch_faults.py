"""Leaders, tasks and executors that die during a batch job: it finishes, and the count is exact."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import rayq
from rayq import Cluster
from rayq.batch.task_writer import begin_write
from rayq.errors import AlreadyCommittedError
from tests.local.support import partition_of

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

RECORDS = 240_000
VALUE_BYTES = 200
CHUNK = 2_000


@pytest.fixture(scope="module")
def cluster(ray_here: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three brokers on Ray, with few processes: a killed process leads several partitions."""
    path = tmp_path_factory.mktemp("faults")
    made = rayq.start(str(path), brokers=3, port=19892, name="faults", replicas_per_process=4)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def filled(cluster: Cluster) -> str:
    """A topic of 48 MB that do not compress in one partition: more than a reader fetches ahead."""
    cluster.create_topic("filled", 1, 3)
    with cluster.producer(batch_size=256 * 1024) as producer:
        for start in range(0, RECORDS, CHUNK):
            numbers = range(start, start + CHUNK)
            rest = os.urandom(VALUE_BYTES - 8)
            values = [number.to_bytes(8, "big") + rest for number in numbers]
            producer.send_many("filled", values)
    return "filled"


def leader_pid(cluster: Cluster, topic: str, partition: int = 0) -> int:
    found = partition_of(cluster, topic, partition)
    (pid,) = [one.pid for one in found.replicas if one.broker == found.leader]
    assert pid is not None and pid != os.getpid()
    return pid


@contextmanager
def once(happens: Callable[[], bool], act: Callable[[], None]) -> Iterator[None]:
    """Calls `act` in another thread as soon as `happens()`, which has to come before the block
    ends."""
    acted, given_up = threading.Event(), threading.Event()

    def watch() -> None:
        while not given_up.is_set():
            if happens():
                act()
                acted.set()
                return
            given_up.wait(0.01)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        given_up.set()
        thread.join()
    assert acted.is_set(), "the job was over before anything was killed"


def watched(df: Any, marker: Path, pause_s: float = 0.2) -> Any:
    """The same rows; each task that has some leaves a file, then dawdles over each batch."""
    folder = str(marker)

    def through(batches: Any) -> Any:
        import os
        import time
        import uuid

        is_first = True
        for batch in batches:
            if is_first:
                # A forked Python worker is a grandchild of the executor's JVM.
                daemon = os.getppid()
                with open(f"/proc/{daemon}/stat") as file:
                    executor = file.read().rpartition(")")[2].split()[1]
                with open(os.path.join(folder, uuid.uuid4().hex), "w") as file:
                    file.write(executor)
                is_first = False
            time.sleep(pause_s)
            yield batch

    return df.mapInArrow(through, df.schema)


def source(spark: Any, rows: int, tasks: int) -> Any:
    """Rows of numbers whose values take some room, with many Arrow batches to a task."""
    from pyspark.sql import functions as fn

    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", CHUNK)
    number = fn.col("id").cast("string")
    return spark.range(0, rows, 1, tasks).select(
        number.alias("key"), fn.rpad(number, 300, ".").alias("value")
    )


def assert_each_once(spark: Any, cluster: Cluster, topic: str, rows: int) -> None:
    from pyspark.sql import functions as fn

    from rayq.spark import read

    found = (
        read(spark, topic, cluster=cluster)
        .agg(fn.count("*"), fn.countDistinct("value"), fn.max(fn.length("value")))
        .collect()[0]
    )
    assert tuple(found) == (rows, rows, 300)


@pytest.mark.thorough
def test_a_leader_killed_during_a_read_costs_no_record(
    spark: Any, cluster: Cluster, filled: str, tmp_path: Path
) -> None:
    from pyspark.sql import functions as fn

    from rayq.spark import read

    df = watched(read(spark, filled, cluster=cluster), tmp_path)
    victim = leader_pid(cluster, filled)
    with once(lambda: any(tmp_path.iterdir()), lambda: os.kill(victim, signal.SIGKILL)):
        found = df.agg(
            fn.count("*"), fn.countDistinct(fn.substring("value", 1, 8)), fn.sum("offset")
        ).collect()[0]
    assert tuple(found) == (RECORDS, RECORDS, RECORDS * (RECORDS - 1) // 2)
    assert len(list(tmp_path.iterdir())) == 1, "the task itself went on"


def test_a_leader_killed_during_a_write_costs_and_doubles_no_record(
    spark: Any, cluster: Cluster, tmp_path: Path
) -> None:
    from rayq.spark import write

    cluster.create_topic("written", 2, 3)
    df = watched(source(spark, 40_000, 4), tmp_path)
    victim = leader_pid(cluster, "written")
    with once(
        lambda: partition_of(cluster, "written").replicas[0].log_end_offset not in (None, 0),
        lambda: os.kill(victim, signal.SIGKILL),
    ):
        written = write(df, "written", key="key", cluster=cluster)
    assert written.records == 40_000
    assert_each_once(spark, cluster, "written", 40_000)


def test_a_task_that_fails_half_way_is_repeated_without_a_duplicate(
    spark: Any, cluster: Cluster
) -> None:
    from rayq.spark import write

    def fails_once(batches: Any) -> Any:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        for number, batch in enumerate(batches):
            if number == 6 and context.attemptNumber() == 0 and context.partitionId() == 1:
                raise RuntimeError("half-way")
            yield batch

    df = source(spark, 60_000, 3)
    for attempt in range(10):
        topic = f"half-{attempt}"
        cluster.create_topic(topic, 2, 3)
        written = write(df.mapInArrow(fails_once, df.schema), topic, key="key", cluster=cluster)
        assert written.records == 60_000
        assert_each_once(spark, cluster, topic, 60_000)
        # On a busy machine the task can fail before its first batch is acknowledged.
        if written.repeated:
            return
    pytest.fail("no first attempt had written anything")


@pytest.mark.thorough
def test_an_atomic_write_becomes_visible_whole_although_its_tasks_fail(
    spark: Any, cluster: Cluster
) -> None:
    from rayq.spark import write

    def fails(attempts: int) -> Callable[[Any], Any]:
        def through(batches: Any) -> Any:
            from pyspark import TaskContext

            context = TaskContext.get()
            assert context is not None
            for number, batch in enumerate(batches):
                if number == 6 and context.attemptNumber() < attempts:
                    raise RuntimeError("half-way")
                yield batch

        return through

    cluster.create_topic("atomic", 2, 3)
    df = source(spark, 60_000, 3)
    with pytest.raises(Exception, match="half-way"):
        write(df.mapInArrow(fails(99), df.schema), "atomic", key="key", cluster=cluster, atomic=True)
    job = begin_write(cluster, "atomic", transactional_id="nightly", name="monday")
    for given in (None, job):
        failing = df.mapInArrow(fails(1), df.schema)
        options = {"atomic": True} if given is None else {"job": given}
        written = write(failing, "atomic", key="key", cluster=cluster, **options)  # type: ignore[arg-type]
        assert written.records == 60_000
        if given is None:
            assert_each_once(spark, cluster, "atomic", 60_000)
    with pytest.raises(AlreadyCommittedError):
        write(df, "atomic", key="key", cluster=cluster, job=job)


@pytest.mark.thorough
def test_two_attempts_at_the_same_time_write_nothing_twice(spark: Any, cluster: Cluster) -> None:
    from rayq.spark import write

    # Spark gives a speculative copy to another host, and here is one: so the job itself runs twice.
    cluster.create_topic("twice", 2, 3)
    job = begin_write(cluster, "twice")
    df = source(spark, 60_000, 3)
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(write, df, "twice", key="key", cluster=cluster, job=job) for _ in range(2)
        ]
        first, second = (run.result() for run in runs)
    assert first.records == second.records == 60_000
    assert first.repeated + second.repeated == 60_000
    assert_each_once(spark, cluster, "twice", 60_000)


@pytest.mark.thorough
def test_an_executor_killed_during_a_write_costs_and_doubles_no_record(
    spark: Any, cluster: Cluster, tmp_path: Path
) -> None:
    from rayq.spark import write

    cluster.create_topic("executor", 2, 3)
    # The rows come from a shuffle, whose files die with the executor: all are computed again.
    df = watched(source(spark, 120_000, 4), tmp_path, pause_s=0.0).distinct()

    def kill_the_executor() -> None:
        (pid,) = {int(one.read_text()) for one in tmp_path.iterdir()}
        os.kill(pid, signal.SIGKILL)

    def something_is_written() -> bool:
        replicas = partition_of(cluster, "executor").replicas
        return replicas[0].log_end_offset not in (None, 0)

    with once(something_is_written, kill_the_executor):
        written = write(df, "executor", key="key", cluster=cluster)
    assert written.records == 120_000
    assert len({one.read_text() for one in tmp_path.iterdir()}) == 2, "another executor went on"
    assert_each_once(spark, cluster, "executor", 120_000)
