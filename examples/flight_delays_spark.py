"""Spark over the log: the mean departure delay of each carrier in each month of 2013.

    python examples/flight_delays_spark.py [data directory]

All flights that left New York go into a topic as JSON. A Spark job on the same Ray reads it, parses
the JSON, computes the means, and writes them into a compacted topic, `delays`, keyed by carrier and
month, so it always holds the latest mean of each. Read back, the means are compared with what
pandas finds in the source. Needs the extras `spark` and `demo`, and Java 17:
pip install '.[spark,demo]'.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import tempfile
import time

import pandas as pd
import ray
from pyspark.sql import SparkSession
from pyspark.sql import functions as fn

import rayq
import rayq.spark
from rayq.demo import flights_csv

SCHEMA = "carrier string, month int, dep_delay double"
CPUS_MIN = 2

flights = pd.read_csv(io.BytesIO(flights_csv()))


def produce(cluster: rayq.Cluster) -> None:
    cluster.create_topic("flights", partitions=4)
    values = flights.to_json(orient="records", lines=True).encode().splitlines()
    keys = [tail.encode() if isinstance(tail, str) else None for tail in flights["tailnum"]]
    with cluster.producer() as producer:
        producer.send_many("flights", values, keys=keys)


def run(spark: SparkSession, cluster: rayq.Cluster) -> bool:
    produce(cluster)
    print(f"{len(flights):,} flights are in the topic `flights`")
    cluster.create_topic("delays", partitions=2, cleanup_policy="compact")

    started_s = time.perf_counter()
    read = rayq.spark.read(spark, "flights", cluster=cluster)
    parsed = rayq.spark.from_json(read, SCHEMA)
    delays = (
        parsed.rows.where("dep_delay is not null")  # the other flights were cancelled
        .groupBy("carrier", "month")
        .agg(fn.avg("dep_delay").alias("mean_delay"), fn.count("*").alias("flights"))
    )
    written = rayq.spark.write(
        delays,
        "delays",
        key=fn.format_string("%s-%02d", "carrier", "month"),
        value=fn.to_json(fn.struct("carrier", "month", "mean_delay", "flights")),
        cluster=cluster,
    )
    print(f"{written.records} means written in {time.perf_counter() - started_s:.1f} s")
    back = rayq.spark.read(spark, "delays", cluster=cluster).select("key", "value").collect()

    means = pd.DataFrame([json.loads(row.value) for row in back])
    found = means.set_index(["carrier", "month"]).sort_index()
    expected = flights.dropna(subset="dep_delay").groupby(["carrier", "month"])["dep_delay"].mean()
    same = len(found) == len(expected) and bool((found["mean_delay"] == expected).all())
    worst = found.sort_values("mean_delay").iloc[-3:]
    for (carrier, month), row in worst[::-1].iterrows():
        print(f"{carrier} in month {month:2}: {row['mean_delay']:.6f} minutes late on average")
    print("the same as pandas finds, to the last digit:", same)
    return same


def main() -> int:
    print("starting Ray, three brokers, and Spark on the same Ray")
    if not ray.is_initialized() and "RAY_ADDRESS" not in os.environ:
        cpus = max(CPUS_MIN, os.cpu_count() or 1)
        # The example has a Ray of its own, also where another Ray runs on this machine.
        ray.init(
            "local",
            num_cpus=cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    with tempfile.TemporaryDirectory() as scratch:
        # The cluster has few processes, since Spark needs the cores, too.
        path = sys.argv[1] if len(sys.argv) > 1 else scratch
        cluster = rayq.start(path, brokers=3, replicas_per_process=6)
        # Spark's default, 200 tasks after a shuffle, is for more data.
        conf = {"spark.sql.shuffle.partitions": "4"}
        try:
            with rayq.spark.session("flight-delays", executors=1, cores=2, **conf) as spark:
                return 0 if run(spark, cluster) else 1
        finally:
            cluster.stop()


if __name__ == "__main__":
    sys.exit(main())
