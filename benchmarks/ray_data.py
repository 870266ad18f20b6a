"""Reading a topic through Ray Data into Arrow, beside the same job over Parquet files."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import ray

import rayq
from benchmarks.report import Row
from benchmarks.spark import RECORDS, REPETITIONS, TOPIC, fill
from rayq.batch.offset_ranges import snapshot
from rayq.batch.range_reader import read_range
from rayq.data import read_topic

TARGET_RECORDS_S = 1_000_000.0


def ray_data_read(cluster: rayq.Cluster, directory: Path) -> list[Row]:
    """Reads all columns of all records as Arrow blocks into Ray's object store. The first run of
    each kind, which starts Ray's workers, is left out."""
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    fill(cluster)
    parquet = str(directory / "parquet-of-ray-data")

    def rates(read: Callable[[], ray.data.Dataset]) -> list[float]:
        found = []
        for _ in range(1 + REPETITIONS):
            started_s = time.perf_counter()
            blocks = read().materialize()
            found.append(RECORDS / (time.perf_counter() - started_s))
            assert blocks.count() == RECORDS
            del blocks  # otherwise the object store holds several copies
        return found[1:]

    def alone() -> list[float]:
        found = []
        for _ in range(1 + REPETITIONS):
            started_s = time.perf_counter()
            ranges = snapshot(cluster, TOPIC)
            count = sum(batch.num_rows for one in ranges for batch in read_range(cluster, one))
            found.append(count / (time.perf_counter() - started_s))
            assert count == RECORDS
        return found[1:]

    in_this_process = alone()
    from_log = rates(lambda: read_topic(TOPIC, cluster=cluster))
    read_topic(TOPIC, cluster=cluster).write_parquet(parquet)
    from_parquet = rates(lambda: ray.data.read_parquet(parquet))
    return [
        Row(
            name=f"Ray Data reads {RECORDS // 10**6} M 100-byte records, RF 1, warm",
            unit="records/s",
            samples=from_log,
            target=TARGET_RECORDS_S,
            note="into Arrow blocks: read_topic(...).materialize()",
        ),
        Row(
            name="  the same job over Parquet files of the same data",
            unit="records/s",
            samples=from_parquet,
            note="which Ray Data wrote, snappy",
        ),
        Row(
            name="  without Ray Data",
            unit="records/s",
            samples=in_this_process,
            note="read_range in one process, one partition after the other",
        ),
    ]
