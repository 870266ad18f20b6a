"""A streaming query on Spark whose driver is killed: every flight is in the table exactly once."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.dataset as ds
import pytest
import ray

import rayq
from rayq import Cluster, TopicPartition
from rayq.demo import FlightRecord, load_flights
from rayq.errors import RayqError
from tests.real.streaming_driver import GROUP

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java, and there is none"),
]

DRIVER = Path(__file__).with_name("streaming_driver.py")
COUNT = int(os.environ.get("RAYQ_STREAMED_FLIGHTS", "20000"))
"""A part of the flights; all flights are 336776."""
SEED = int(os.environ.get("RAYQ_STREAMING_SEED", random.randrange(10_000)))
PARTITIONS = 3
START_TIMEOUT_S = 240.0
"""A driver starts in 15 s where no other work uses the machine."""
FINISH_TIMEOUT_S = 240.0 + COUNT / 500


@pytest.fixture(scope="module")
def cluster(ray_here: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    path = tmp_path_factory.mktemp("streaming")
    made = rayq.start(
        str(path), brokers=1, name="streaming", port=19592, replicas_per_process=PARTITIONS
    )
    yield made
    made.stop()


class Driver:
    """A driver process and the lines that it printed."""

    def __init__(self, folder: Path, number: int) -> None:
        self._log = folder / f"driver-{number}.log"
        self._folder = folder
        arguments = [str(folder / name) for name in ("checkpoint", "table", "finish")]
        environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        environment["PYTHONPATH"] = str(DRIVER.parents[2])
        with self._log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(DRIVER), *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def said(self, word: str) -> list[str]:
        return [line for line in self.log.splitlines() if line.startswith(word)]

    @property
    def committed(self) -> int:
        """How many batches all drivers so far have committed."""
        names = os.listdir(self._folder / "checkpoint/commits")
        return max((int(name) + 1 for name in names if name.isdecimal()), default=0)

    def wait(self, word: str, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not self.said(word):
            assert self.process.poll() is None and time.monotonic() < deadline_s, self.log[-8000:]
            time.sleep(0.02)

    def wait_committed(self, batches: int, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while self.committed < batches:
            assert self.process.poll() is None and time.monotonic() < deadline_s, self.log[-8000:]
            time.sleep(0.02)

    def kill(self) -> None:
        """Kills the driver alone: its JVM and executors have to notice by themselves."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def clean_up(self) -> None:
        if self.process.poll() is None:
            self.kill()
        try:
            os.killpg(
                self.process.pid, signal.SIGKILL
            )  # its session: the JVM, if it is still there
        except ProcessLookupError:
            pass


class Stream:
    """Produces the flights from a thread, a few every moment, until all are sent; `hurry` shortens
    the time."""

    def __init__(self, cluster: Cluster, flights: list[FlightRecord]) -> None:
        self.sent: dict[tuple[int, int], FlightRecord] = {}
        self.failure: RayqError | None = None
        self.hurry = threading.Event()
        self._cluster = cluster
        self._flights = flights
        self._thread = threading.Thread(target=self._produce, daemon=True)
        self._thread.start()

    def _produce(self) -> None:
        try:
            with self._cluster.producer() as producer:
                deliveries = []
                for start in range(0, len(self._flights), 500):
                    part = self._flights[start : start + 500]
                    deliveries += [producer.send("flights", one.value, key=one.key) for one in part]
                    self.hurry.wait(45 / (len(self._flights) / 500))
                for one, delivery in zip(self._flights, deliveries, strict=True):
                    metadata = delivery.result(timeout=60)
                    assert metadata.offset is not None
                    self.sent[metadata.partition, metadata.offset] = one
        except RayqError as error:
            self.failure = error

    def finish(self) -> None:
        self.hurry.set()
        self._thread.join(120)
        assert not self._thread.is_alive()
        if self.failure is not None:
            raise self.failure


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_every_flight_is_there_once_although_the_driver_was_killed_twice(
    cluster: Cluster, tmp_path: Path
) -> None:
    chance = random.Random(SEED)
    sys.stdout.write(f"RAYQ_STREAMING_SEED={SEED}\n")
    flights = load_flights()[:COUNT]
    cluster.create_topic("flights", partitions=PARTITIONS, replication_factor=1)
    (tmp_path / "table").mkdir()
    stream = Stream(cluster, flights)
    ids, committed = set(), 0
    for number in range(3):
        start_s = time.monotonic()
        driver = Driver(tmp_path, number)
        try:
            driver.wait("started", START_TIMEOUT_S)
            ids.add(driver.said("started")[0])
            up_s = time.monotonic() - start_s
            if number < 2:
                driver.wait_committed(committed + chance.randrange(3), START_TIMEOUT_S)
                time.sleep(chance.random())
                driver.kill()
            else:
                stream.finish()
                (tmp_path / "finish").touch()
                driver.wait("processed", FINISH_TIMEOUT_S)
                driver.wait("stopped", START_TIMEOUT_S)
                assert driver.process.wait(60) == 0, driver.log[-8000:]
            committed = driver.committed
            written = len(os.listdir(tmp_path / "checkpoint/offsets"))
            sys.stdout.write(
                f"driver {number}: up after {up_s:.1f} s, ended after "
                f"{time.monotonic() - start_s:.1f} s, {written} batches written, "
                f"{committed} committed\n"
            )
        finally:
            driver.clean_up()

    batches = sorted(tmp_path.glob("table/batch-*"))
    table = ds.dataset([str(file) for one in batches for file in one.glob("*.parquet")]).to_table()
    rows = zip(*(table.column(name).to_pylist() for name in table.column_names), strict=True)
    assert table.num_rows == len(flights) == len(stream.sent)
    assert {(row[0], row[1]): FlightRecord(row[2], row[3]) for row in rows} == stream.sent
    assert [int(one.name[-5:]) for one in batches] == list(range(committed))
    assert len(ids) == 1, "one query, whatever the process"

    # The query has processed the records that the group shows.
    progress = cluster.admin.describe_group(GROUP)
    assert progress.lag == 0 and len(progress.partitions) == PARTITIONS
    ends = {place: one.offset for place, one in progress.partitions.items()}
    assert sum(offset or 0 for offset in ends.values()) == len(flights)
    assert TopicPartition("flights", 0) in ends
    # And the session's end does not wait for a batch that sleeps for minutes.
    assert float(driver.said("stopped")[0].split()[1]) < 60
