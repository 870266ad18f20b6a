"""Batch reads and writes through Spark, on one session. Without Java they are skipped."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayq import Cluster, TopicPartition
from rayq.batch.task_writer import begin_write
from rayq.errors import (
    ConfigError,
    InvalidRequestError,
    JavaError,
    NotEnoughResourcesError,
    OffsetOutOfRangeError,
    PartitionOfflineError,
    RayqError,
    SparkSessionError,
    StreamingQueryError,
    UnknownTopicError,
)
from rayq.testing import LocalCluster
from tests.local import unreadable
from tests.local.support import FAST, read_all

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A cluster in this process: Spark's workers reach it over sockets like any other."""
    with LocalCluster(brokers=1, data_dir=str(tmp_path_factory.mktemp("local")), **FAST) as made:
        yield made


def fill(cluster: Cluster, topic: str, partitions: int = 2, records: int = 10) -> None:
    """Writes the values 0, 1, ... one after another over the partitions, with timestamps 1,000 ms
    apart."""
    cluster.create_topic(topic, partitions)
    with cluster.producer() as producer:
        for number in range(records):
            producer.send(
                topic,
                b"%d" % number,
                key=b"k%d" % number,
                partition=number % partitions,
                timestamp_ms=1_000_000 + number * 1000,
                headers=[("n", b"%d" % number), ("n", b"again")] if number % 2 else None,
            )


def numbers(df: Any) -> list[int]:
    return sorted(int(row.value) for row in df.select("value").collect())


def task_error(action: Any) -> str:
    """The error of an action, as the user reads it."""
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException) as caught:
        action()
    return str(caught.value)


# --- the session ----------------------------------------------------------------------------------


def test_a_second_session_is_refused_while_one_is_up(spark: Any) -> None:
    from rayq.spark import session

    with pytest.raises(SparkSessionError, match="'tests'") as caught:
        with session("another"):
            pass
    assert "with rayq.spark.session" in str(caught.value)


def test_more_cpus_than_ray_has_are_refused_instead_of_waited_for(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rayq.spark import session

    module = importlib.import_module("rayq.spark.session")  # the package has a function of the name
    monkeypatch.setattr(module, "_check_no_other", lambda: None)
    monkeypatch.setattr(module, "PATIENCE_S", 1.0)
    started_s = time.monotonic()
    with pytest.raises(NotEnoughResourcesError, match="3 Spark executor.*64 CPU.*num_cpus"):
        with session("too large", executors=3, cores=64):
            pass
    assert time.monotonic() - started_s < 60


@pytest.mark.parametrize(
    "options",
    [
        {"executors": 0},
        {"cores": 1.5},
        {"memory": "much"},
        {"memory": 1024},
        {"memory": "0g"},
        {"memory": "-1g"},
        {"memory": "1"},
        {"memory": "449m"},
        {"shuffle_partitions": 4},
    ],
)
def test_wrong_options_of_a_session_are_refused(options: dict[str, Any]) -> None:
    pytest.importorskip("raydp")
    from rayq.spark import session

    with pytest.raises(ConfigError):
        with session("wrong", **options):
            pass


def test_ctrl_c_while_queries_are_stopped_still_stops_spark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("raydp")
    from rayq.spark import session

    module = importlib.import_module("rayq.spark.session")
    done: list[str] = []

    def interrupted() -> None:
        raise KeyboardInterrupt

    for name in (
        "_check_no_other",
        "check_java",
        "ray_for",
        "_reserve",
        "_check_nodes",
        "_start",
    ):
        monkeypatch.setattr(module, name, lambda *_: None)
    monkeypatch.setattr(module, "_environment", contextlib.nullcontext)
    monkeypatch.setattr(module, "stop_active_queries", interrupted)
    monkeypatch.setattr(module.raydp, "stop_spark", lambda: done.append("spark"))
    monkeypatch.setattr(
        module.ray.util, "remove_placement_group", lambda _: done.append("placement group")
    )
    with pytest.raises(KeyboardInterrupt):
        with session("interrupted"):
            pass
    assert done == ["spark", "placement group"]


def test_without_java_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("raydp")
    from rayq.spark.session import check_java

    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(JavaError, match="apt-get install -y openjdk-17"):
        check_java()


@pytest.mark.parametrize(
    ("banner", "wrong"),
    [
        ('openjdk version "1.8.0_392"', "Java 8, which is too old"),
        ('openjdk version "11.0.21" 2023-10-17', "Java 11, which is too old"),
        ('openjdk version "25" 2025-09-16', "Java 25, which is newer"),
        ("Segmentation fault", "-version failed"),
    ],
)
def test_a_java_of_another_version_is_refused(
    banner: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("raydp")
    from rayq.spark.session import check_java

    java = tmp_path / "java"
    java.write_text(f"#!/bin/sh\necho '{banner}' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(JavaError, match=re.escape(wrong)) as caught:
        check_java()
    assert "openjdk-17" in str(caught.value)


# --- reading --------------------------------------------------------------------------------------


def test_a_topic_has_the_columns_of_sparks_kafka_source(spark: Any, cluster: Cluster) -> None:
    from rayq.spark import read

    fill(cluster, "columns")
    with cluster.producer() as producer:
        producer.send("columns", None, partition=0, timestamp_ms=5_000_000)
    df = read(spark, "columns", cluster=cluster, include_headers=True)
    assert df.dtypes == [
        ("key", "binary"),
        ("value", "binary"),
        ("topic", "string"),
        ("partition", "int"),
        ("offset", "bigint"),
        ("timestamp", "timestamp"),
        ("headers", "array<struct<key:string,value:binary>>"),
    ]
    rows = {(row.partition, row.offset): row for row in df.collect()}
    assert len(rows) == 11
    row = rows[1, 1]
    assert (bytes(row.key), bytes(row.value), row.topic) == (b"k3", b"3", "columns")
    assert row.timestamp == datetime.datetime.fromtimestamp(1003)
    assert [(one.key, bytes(one.value)) for one in row.headers] == [("n", b"3"), ("n", b"again")]
    assert rows[0, 0].headers == []
    assert (rows[0, 5].key, rows[0, 5].value) == (None, None)
    assert "headers" not in read(spark, "columns", cluster=cluster).columns


@pytest.mark.thorough
def test_what_is_appended_after_the_call_is_not_part_of_it(spark: Any, cluster: Cluster) -> None:
    from rayq.spark import read

    fill(cluster, "snapshot")
    df = read(spark, "snapshot", cluster=cluster)
    with cluster.producer() as producer:
        producer.send("snapshot", b"late", partition=0)
    assert numbers(df) == list(range(10))
    assert df.count() == 10
    assert read(spark, "snapshot", cluster=cluster).count() == 11


@pytest.mark.thorough
def test_ranges_are_given_by_offset_and_by_time(spark: Any, cluster: Cluster) -> None:
    from rayq.spark import read

    fill(cluster, "ranges")  # evens in partition 0, odds in 1

    def found(**options: Any) -> list[int]:
        return numbers(read(spark, "ranges", cluster=cluster, **options))

    assert found(starting_offsets={"ranges": {0: 3, 1: "latest"}}) == [6, 8]
    ends = {TopicPartition("ranges", 0): 1, TopicPartition("ranges", 1): 2}
    assert found(ending_offsets=ends) == [0, 1, 3]
    assert found(starting_timestamp=1_004_500) == [5, 6, 7, 8, 9]
    assert found(ending_timestamps={"ranges": {0: 1_002_000, 1: 1_001_000}}) == [0]
    at = datetime.datetime.fromtimestamp(1008, datetime.UTC)
    assert found(starting_timestamp=at) == [8, 9]
    assert found(starting_offsets="latest") == []
    assert found(starting_timestamp=2_000_000) == []  # where Spark's Kafka source raises
    ended = {"ranges": {0: 4}}  # of a job before partition 1 was added
    assert found(starting_offsets=ended, new_partitions="earliest") == [1, 3, 5, 7, 8, 9]


@pytest.mark.thorough
def test_min_partitions_cuts_partitions_by_offset(spark: Any, cluster: Cluster) -> None:
    from rayq.spark import read

    fill(cluster, "cut", partitions=2, records=100)
    whole = read(spark, "cut", cluster=cluster)
    assert whole.rdd.getNumPartitions() == 2
    df = read(spark, "cut", cluster=cluster, min_partitions=7)
    assert df.rdd.getNumPartitions() >= 7
    assert numbers(df) == list(range(100))


@pytest.mark.thorough
def test_several_topics_or_a_pattern_are_one_dataframe(spark: Any, cluster: Cluster) -> None:
    from rayq.spark import read

    fill(cluster, "many-a", records=4)
    fill(cluster, "many-b", records=6)
    by_name = read(spark, ["many-a", "many-b"], cluster=cluster).groupBy("topic").count().collect()
    assert {row.topic: row["count"] for row in by_name} == {"many-a": 4, "many-b": 6}
    assert read(spark, pattern="many-.*", cluster=cluster).count() == 10


@pytest.mark.thorough
def test_the_process_s_current_cluster_is_the_default(spark: Any, cluster: Cluster) -> None:
    from rayq.spark import read

    fill(cluster, "current", records=3)
    cluster.make_current()
    assert read(spark, "current").count() == 3


def test_an_empty_topic_is_an_empty_dataframe(spark: Any, cluster: Cluster) -> None:
    from rayq.spark import read

    cluster.create_topic("empty", 3)
    df = read(spark, "empty", cluster=cluster)
    assert df.count() == 0
    assert df.columns == ["key", "value", "topic", "partition", "offset", "timestamp"]


def test_what_a_task_gets_is_small() -> None:
    pytest.importorskip("raydp")
    from pyspark.cloudpickle import dumps

    from rayq.batch.offset_ranges import Split
    from rayq.spark.read import _fetcher

    cluster = Cluster([f"10.0.0.{n}:9392" for n in range(9)], bytes(32))
    splits = [Split("flights", "0" * 32, number, 0, 10**9) for number in range(100)]
    assert len(dumps(_fetcher(cluster, splits, ("key", "value"), True, None, "raise", 60.0))) < 10_000


# --- bad input of reads ---------------------------------------------------------------------------


def test_wrong_reads_are_refused_on_the_driver(spark: Any, cluster: Cluster) -> None:
    from rayq.spark import read

    fill(cluster, "wrong")
    with pytest.raises(UnknownTopicError, match="no topic 'nowhere'"):
        read(spark, "nowhere", cluster=cluster)
    with pytest.raises(InvalidRequestError, match="ends before it starts"):
        read(
            spark,
            "wrong",
            cluster=cluster,
            starting_offsets={"wrong": {0: 4, 1: 4}},
            ending_offsets={"wrong": {0: 2, 1: 4}},
        )
    with pytest.raises(OffsetOutOfRangeError, match="past the end 5"):
        read(spark, "wrong", cluster=cluster, ending_offsets={"wrong": {0: 99, 1: 5}})
    df = read(
        spark,
        "wrong",
        cluster=cluster,
        ending_offsets={"wrong": {0: 99, 1: 1}},
        fail_on_data_loss=False,
    )
    assert numbers(df) == [0, 1, 2, 4, 6, 8]


@pytest.mark.thorough
def test_records_that_expire_before_they_are_read_fail_the_job_or_are_left_out(
    spark: Any, cluster: Cluster
) -> None:
    from rayq.spark import read

    fill(cluster, "expired")
    strict = read(spark, "expired", cluster=cluster)
    lenient = read(spark, "expired", cluster=cluster, fail_on_data_loss=False)
    cluster.admin.delete_records({TopicPartition("expired", 0): 3})
    assert "OffsetOutOfRangeError" in task_error(strict.collect)
    assert numbers(lenient) == [1, 3, 5, 6, 7, 8, 9]
    from_the_start = {"expired": {0: 0, 1: 0}}
    with pytest.raises(OffsetOutOfRangeError, match="below the log start 3"):
        read(spark, "expired", cluster=cluster, starting_offsets=from_the_start)


@pytest.mark.thorough
def test_a_topic_deleted_meanwhile_fails_the_job(spark: Any, cluster: Cluster) -> None:
    from rayq.spark import read

    fill(cluster, "deleted")
    df = read(spark, "deleted", cluster=cluster)
    cluster.admin.delete_topic("deleted")
    assert "UnknownTopicError" in task_error(df.collect)
    fill(cluster, "deleted")  # another topic, though of the same name
    assert "UnknownTopicError" in task_error(df.collect)


@pytest.mark.thorough
@pytest.mark.thorough
def test_records_that_cannot_be_read_fail_a_job_and_a_query_or_are_left_out(
    spark: Any, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import rayq.spark

    cluster.create_topic("bad")
    log = unreadable.fill(cluster, "bad", tmp_path / "values", monkeypatch)
    offset, next_offset = next(iter(log.bad.items()))
    told = f"offset {offset} of bad-0 cannot be read.*Seek to {next_offset}"
    options: dict[str, Any] = {"cluster": cluster, "large_values": f"file://{tmp_path}/values"}
    assert re.search(told, task_error(rayq.spark.read(spark, "bad", **options).collect))
    df = rayq.spark.read(spark, "bad", on_corrupt="skip", **options)
    assert [bytes(row.value) for row in df.select("value").collect()] == log.good
    # A query that ended there goes on behind them, as its start says.
    found: list[bytes] = []
    options |= {"checkpoint": tmp_path / "checkpoint", "trigger": "available_now"}

    def query(**more: Any) -> Any:
        stream = rayq.spark.stream(spark, "bad", **options, **more)
        return stream.foreach_batch(
            lambda df, _: found.extend(bytes(row.value) for row in df.collect())
        ).start()

    with pytest.raises(StreamingQueryError, match=told):
        query().awaitTermination()
    assert found == []
    query(on_corrupt="skip").awaitTermination()
    assert found == log.good


def test_a_partition_that_is_offline_fails_the_job_after_the_timeout(
    spark: Any, tmp_path: Path
) -> None:
    from rayq.spark import read

    with LocalCluster(brokers=3, data_dir=str(tmp_path), **FAST) as cluster:
        cluster.create_topic("offline", 1, 1)
        with cluster.producer() as producer:
            producer.send("offline", b"0").result(timeout=60)
        df = read(spark, "offline", cluster=cluster, timeout_s=2)
        leader = cluster.admin.describe_topic("offline").partitions[0].leader
        assert leader is not None
        cluster.kill_broker(leader)
        assert "PartitionOfflineError" in task_error(df.collect)
        with pytest.raises((PartitionOfflineError, RayqError), match="offline-0"):
            read(spark, "offline", cluster=cluster, timeout_s=2)
        cluster.start_broker(leader)
        assert numbers(df) == [0]


# --- writing --------------------------------------------------------------------------------------


def test_rows_become_records(spark: Any, cluster: Cluster) -> None:
    from pyspark.sql import functions as fn

    from rayq.spark import write

    cluster.create_topic("rows", 3)
    df = spark.range(9).select(
        fn.concat(fn.lit("k"), "id").alias("name"),
        fn.when(fn.col("id") != 8, fn.col("id").cast("string")).alias("text"),
        (fn.col("id") % 3).cast("int").alias("place"),
        fn.timestamp_seconds(fn.lit(1000) + fn.col("id")).alias("at"),
        fn.array(
            fn.struct(fn.lit("n").alias("key"), fn.lit(b"1").alias("value")),
            fn.struct(fn.lit("n").alias("key"), fn.lit(b"2").alias("value")),
        ).alias("pairs"),
    )
    written = write(
        df,
        "rows",
        key="name",
        value="text",
        partition="place",
        timestamp="at",
        headers="pairs",
        cluster=cluster,
    )
    assert written == (9, 0)
    records = sorted(read_all(cluster, "rows"), key=lambda one: one.timestamp_ms)
    assert [record.key for record in records] == [b"k%d" % n for n in range(9)]
    assert [record.value for record in records] == [b"%d" % n for n in range(8)] + [None]
    assert [one.partition for one in records] == [0, 1, 2] * 3
    assert [one.timestamp_ms for one in records] == [1_000_000 + 1000 * n for n in range(9)]
    assert records[0].headers == [("n", b"1"), ("n", b"2")]


def test_keys_choose_the_partition_that_a_producer_would_choose(
    spark: Any, cluster: Cluster
) -> None:
    from pyspark.sql import functions as fn

    from rayq.spark import write

    cluster.create_topic("keyed", 5)
    keys = [b"k%d" % n for n in range(50)]
    with cluster.producer() as producer:
        producer.send_many("keyed", keys, keys=keys)
    write(spark.range(50).select(fn.concat(fn.lit("k"), "id").alias("value")), "keyed",
          key="value", cluster=cluster)  # fmt: skip
    places: dict[bytes | None, set[int]] = {}
    for record in read_all(cluster, "keyed"):
        places.setdefault(record.key, set()).add(record.partition)
    assert len(places) == 50
    assert all(len(found) == 1 for found in places.values())


@pytest.mark.thorough
def test_wrong_writes_are_refused(spark: Any, cluster: Cluster) -> None:
    from pyspark.sql import functions as fn

    from rayq.spark import write

    cluster.create_topic("refused", 2)
    df = spark.range(4).withColumn("value", fn.lit("v"))
    with pytest.raises(InvalidRequestError, match="value of a record cannot be bigint.*to_json"):
        write(df, "refused", value="id", cluster=cluster)
    with pytest.raises(InvalidRequestError, match="partition of a record cannot be string"):
        write(df, "refused", partition="value", cluster=cluster)
    with pytest.raises(InvalidRequestError, match="headers of a record cannot be"):
        write(df, "refused", headers="value", cluster=cluster)
    with pytest.raises(UnknownTopicError):
        write(df, "nowhere", cluster=cluster)
    cluster.create_topic("another", 1)
    with pytest.raises(InvalidRequestError, match="job is one of topic 'another', not 'refused'"):
        write(df, "refused", cluster=cluster, job=begin_write(cluster, "another"))
    assert "partitions 0 to 1" in task_error(
        lambda: write(df, "refused", partition=fn.col("id") + 5, cluster=cluster)
    )
    assert read_all(cluster, "refused") == []


@pytest.mark.thorough
def test_only_rows_of_an_aggregation_are_sorted(spark: Any, cluster: Cluster) -> None:
    from rayq.spark import write
    from rayq.spark.write import _ordered

    df = spark.range(20).selectExpr("cast(id as string) value")
    backwards = df.orderBy(df.value.desc())
    for as_it_is in (df, df.repartition(2), backwards, backwards.coalesce(1), df.union(df)):
        assert _ordered(as_it_is) is as_it_is
    for aggregated in (df.distinct(), df.groupBy("value").count().where("count > 0")):
        assert _ordered(aggregated) is not aggregated

    cluster.create_topic("ordered", 1)
    assert write(backwards.coalesce(1), "ordered", cluster=cluster).records == 20
    found = [record.value for record in read_all(cluster, "ordered")]
    assert found == sorted((b"%d" % n for n in range(20)), reverse=True)


@pytest.mark.thorough
def test_an_empty_dataframe_writes_nothing(spark: Any, cluster: Cluster) -> None:
    from rayq.spark import write

    cluster.create_topic("nothing")
    assert write(spark.createDataFrame([], "value string"), "nothing", cluster=cluster) == (0, 0)


@pytest.mark.thorough
def test_a_stream_writes_a_topic_once_over_a_restart(
    spark: Any, cluster: Cluster, tmp_path: Path
) -> None:
    from pyspark.sql import functions as fn

    from rayq.spark import stream

    fill(cluster, "raw", records=50)
    cluster.create_topic("cooked", 2)

    def cook(df: Any) -> Any:
        if fails:
            df = df.withColumn("value", fn.raise_error(fn.lit("burnt")).cast("string"))
        return df.withColumn("value", fn.concat(fn.lit("0"), fn.col("value").cast("string")))

    def run() -> Any:
        reading = stream(
            spark, "raw", checkpoint=tmp_path, trigger="available_now", cluster=cluster,
            max_offsets_per_trigger=20,
        )
        query = reading.to_topic("cooked", cook, key="key").start()
        query.awaitTermination()
        return query

    fails = True
    with pytest.raises(StreamingQueryError, match="burnt"):
        run()
    assert read_all(cluster, "cooked") == []
    fails = False
    run()
    (tmp_path / "commits" / "2").unlink()  # The driver died before it wrote this.
    with cluster.producer() as producer:
        producer.send("raw", b"50", key=b"k50")
    query = run()
    assert query.lastProgress["batchId"] == 3
    found = sorted((int(record.value or b""), record.key) for record in read_all(cluster, "cooked"))
    assert found == [(number, b"k%d" % number) for number in range(51)]


# --- JSON -----------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_json_becomes_columns_and_what_does_not_parse_a_dead_letter(
    spark: Any, cluster: Cluster
) -> None:
    from rayq.spark import from_json, read, write

    cluster.create_topic("json", 1)
    cluster.create_topic("json-dead", 1)
    good = [
        b'{"n": 1, "s": "a"}',
        b' {"n": 2, "extra": [1]}',
        b'{"s": null}',
        b"{}",
        b'\r\n\t{"n": 3, "s": 7}\n',
        '{"s": "\ufffd\u00e4"}'.encode(),
    ]
    bad = [b"", b"{", b"null", b"7", b'"text"', b'[{"n": 1}]', b'{"n": "x"}', b"\xff\xfe"]
    bad += [b'{"n": 1}{"n": 2}', b'{"n": 1}\n{"n": 2}', b'{"n": 1}, {"n": 2}', b'{"n": 1} garbage']
    bad += [b'{"n": 1}}', b'{"n": 1}]}', b'{"n": 1}],"x":[{"n": 2}', b"{'n': 1}", b'{"n": 1,}']
    bad += [b'{"s": "\xff"}', b'{"extra": "\xff"}', b'{"n": 3000000000}', None]
    with cluster.producer() as producer:
        producer.send_many("json", [*good, *bad])
    df = read(spark, "json", cluster=cluster)
    parsed = from_json(df, "n int, s string", keep=("offset",))
    assert parsed.rows.dtypes == [("offset", "bigint"), ("n", "int"), ("s", "string")]
    assert [tuple(row) for row in parsed.rows.orderBy("offset").collect()] == [
        (0, 1, "a"),
        (1, 2, None),
        (2, None, None),
        (3, None, None),
        (4, 3, "7"),
        (5, None, "\ufffd\u00e4"),
    ]
    assert parsed.dead_letters.columns == [*df.columns, "error"]
    again = from_json(parsed.dead_letters, "n string").dead_letters
    assert again.columns == [*df.columns, "error"]
    written = write(
        parsed.dead_letters.orderBy("offset"), "json-dead", key="error", cluster=cluster
    )
    assert written.records == len(bad)
    assert [record.value for record in read_all(cluster, "json-dead")] == bad
    assert read_all(cluster, "json-dead")[-1].key == b"the value is null"


def test_wrong_schemas_are_refused(spark: Any) -> None:
    from rayq.spark import from_json

    df = spark.createDataFrame([(json.dumps({"a": 1}), 1)], "value string, a int")
    with pytest.raises(InvalidRequestError, match="not a schema"):
        from_json(df, "a strange int schema (")
    with pytest.raises(InvalidRequestError, match="twice"):
        from_json(df, "a int", keep=("a",))
    with pytest.raises(InvalidRequestError, match="no column 'payload'"):
        from_json(df, "a int", column="payload")


def test_the_check_says_whether_spark_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("raydp")
    from rayq.spark.__main__ import main

    has_java = shutil.which("java") is not None
    assert (main() == 0) == has_java
    assert ("Java" in capsys.readouterr().out) or not has_java
