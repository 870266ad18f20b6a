"""The driver of a streaming query, a process of its own, for test_spark_streaming to kill.

`python streaming_driver.py CHECKPOINT TABLE FINISH` writes each batch of the topic `flights` into a
directory of Parquet files of its own, until the file FINISH is there and all records are processed.
Then it leaves the session while a batch runs, which cancels its Spark jobs. It prints what it does.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

import rayq
import rayq.spark
from rayq.spark.streaming_query import StreamingQuery

GROUP = "table"
OFFSETS_MAX = int(os.environ.get("RAYQ_STREAMED_PER_BATCH", "2000"))


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def run_query(spark: SparkSession, checkpoint: str, table: Path, finish: Path) -> None:
    def save(df: DataFrame, batch_id: int) -> None:
        target, work = table / f"batch-{batch_id:05d}", table / f"work-{uuid.uuid4()}"
        df.select("partition", "offset", "key", "value").write.parquet(str(work))
        try:
            work.rename(target)
        except OSError:  # an earlier run of this batch came so far: it holds the same records
            shutil.rmtree(work)

    query = (
        rayq.spark.stream(
            spark,
            "flights",
            checkpoint=checkpoint,
            trigger="200 milliseconds",
            max_offsets_per_trigger=OFFSETS_MAX,
            group=GROUP,
        )
        .foreach_batch(save)
        .start()
    )
    say("started", query.id)
    while not finish.exists():
        if query.awaitTermination(0.1):
            return
    query.processAllAvailable()
    query.stop()
    say("processed", query.lastProgress)


def leave_a_job_running(spark: SparkSession, checkpoint: str) -> StreamingQuery:
    def sleep(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            time.sleep(300)
            yield batch

    running = threading.Event()

    def wait(df: DataFrame, _batch_id: int) -> None:
        running.set()
        df.select("offset").mapInArrow(sleep, "offset long").count()

    query = rayq.spark.stream(spark, "flights", checkpoint=checkpoint).foreach_batch(wait).start()
    assert running.wait(60)
    time.sleep(1)  # the job has begun by then
    return query


def main(checkpoint: str, table: str, finish: str) -> None:
    rayq.connect(name="streaming")
    with rayq.spark.session("streaming-flights", executors=1, cores=1, memory="512m") as spark:
        run_query(spark, checkpoint, Path(table), Path(finish))
        query = leave_a_job_running(spark, f"{checkpoint}-to-stop")
        start_s = time.monotonic()
    assert not query.isActive and query.exception() is None
    say("stopped", time.monotonic() - start_s)


if __name__ == "__main__":
    main(*sys.argv[1:])
