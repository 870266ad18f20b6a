"""Reading a topic through Spark on RayDP, beside the same job over Parquet files of its data."""

from __future__ import annotations

import os
import time
from pathlib import Path

import rayq
from benchmarks.report import Row
from rayq.errors import RayqError

RECORDS = 3_000_000
VALUE_BYTES = 100
PARTITIONS = 4
CORES = 2
REPETITIONS = 2
TARGET_RECORDS_S = 500_000.0
RECORDS_PER_CALL = 50_000
TOPIC = "read-in-bulk"


def fill(cluster: rayq.Cluster, records: int = RECORDS) -> None:
    """Fills the topic that Spark and Ray Data read, unless the other section did so."""
    if TOPIC in cluster.admin.list_topics():
        return
    cluster.create_topic(TOPIC, partitions=PARTITIONS, replication_factor=1)
    with cluster.producer(batch_size=512 * 1024) as producer:
        for start in range(0, records, RECORDS_PER_CALL):
            content = os.urandom(RECORDS_PER_CALL * VALUE_BYTES)  # which does not compress
            values = [content[i : i + VALUE_BYTES] for i in range(0, len(content), VALUE_BYTES)]
            partition = start // RECORDS_PER_CALL % PARTITIONS
            producer.send_many(TOPIC, values, partition=partition)


def spark_read(cluster: rayq.Cluster, directory: Path) -> list[Row]:
    """Counts the records and sums the lengths of their values. The first run of each kind, which
    starts Python workers and compiles, is left out."""
    try:
        from rayq.spark import read, session
    except RayqError as error:
        raise RuntimeError(f"{error} (or leave the section out)") from error
    from pyspark.sql import Column, DataFrame
    from pyspark.sql import functions as fn

    fill(cluster)
    parquet = str(directory / "parquet")

    def rates(df: DataFrame, *more: Column) -> list[float]:
        found = []
        for _ in range(1 + REPETITIONS):
            started_s = time.perf_counter()
            row = df.agg(fn.count("*"), fn.sum(fn.length("value")), *more).collect()[0]
            found.append(RECORDS / (time.perf_counter() - started_s))
            assert tuple(row)[:2] == (RECORDS, RECORDS * VALUE_BYTES)
        return found[1:]

    with session("benchmark", executors=1, cores=CORES) as spark:
        log = read(spark, TOPIC, cluster=cluster)
        from_log = rates(log)
        log.write.parquet(parquet)
        from_parquet = rates(spark.read.parquet(parquet))
        all_columns = rates(spark.read.parquet(parquet), *map(fn.max, log.columns))
    return [
        Row(
            name=f"Spark reads {RECORDS // 10**6} M 100-byte records, RF 1, warm",
            unit="records/s",
            samples=from_log,
            target=TARGET_RECORDS_S,
            note=f"{CORES} cores; count(*), sum(length(value))",
        ),
        Row(
            name="  the same job over Parquet files of the same data",
            unit="records/s",
            samples=from_parquet,
            note="which reads one column of six, in the JVM",
        ),
        Row(name="  and of all columns", unit="records/s", samples=all_columns),
    ]
