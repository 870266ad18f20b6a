"""The catalogue of metrics, the instruments, and log lines with fields."""

from __future__ import annotations

import logging
import sys
from typing import Any

import msgspec
import pytest

from rayq.logs import log_event
from rayq.metrics import CATALOGUE, SECONDS_BOUNDS, Metrics, Sample, merged


def test_names_carry_their_unit_and_kind_as_prometheus_has_it() -> None:
    for metric in CATALOGUE.values():
        assert metric.name.startswith("rayq_")
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        if metric.kind == "histogram":
            assert metric.name.endswith("_seconds")
        assert metric.help.endswith(".")
        assert metric.labels[0] == "cluster"
        assert len(set(metric.labels)) == len(metric.labels)


def test_a_counter_is_the_same_object_for_the_same_labels() -> None:
    metrics = Metrics()
    counter = metrics.counter("rayq_bytes_in_total", topic="orders", partition=0)
    counter.value += 5
    metrics.counter("rayq_bytes_in_total", topic="orders", partition=0).value += 2
    metrics.counter("rayq_bytes_in_total", topic="orders", partition=1).value += 1
    assert [sample.value for sample in metrics.collect()] == [7, 1]


def test_labels_of_the_process_go_to_the_metrics_that_have_them() -> None:
    metrics = Metrics()
    metrics.counter("rayq_leader_elections_total").value += 1
    metrics.counter("rayq_bytes_in_total", topic="orders", partition=3).value += 1
    metrics.label(cluster="main", broker=2)
    elections, bytes_in = metrics.collect()
    assert elections.labels == {"cluster": "main"}
    assert bytes_in.labels == {
        "cluster": "main",
        "broker": "2",
        "topic": "orders",
        "partition": "3",
    }


def test_an_unknown_name_or_label_is_a_bug() -> None:
    with pytest.raises(KeyError):
        Metrics().counter("rayq_bytes_im_total")
    with pytest.raises(AssertionError):
        Metrics().counter("rayq_bytes_in_total", group="delays")


def test_what_a_partition_counted_goes_with_it() -> None:
    metrics = Metrics()
    for partition in (0, 1):
        metrics.counter("rayq_bytes_in_total", topic="orders", partition=partition).value += 1
    metrics.forget(topic="orders", partition=0)
    assert [sample.labels["partition"] for sample in metrics.collect()] == ["1"]


def test_a_source_is_asked_until_it_is_removed() -> None:
    metrics = Metrics()
    remove = metrics.add_source(lambda: [metrics.sample("rayq_connections", 4)])
    assert [sample.value for sample in metrics.collect()] == [4]
    remove()
    remove()
    assert metrics.collect() == []


def test_a_histogram_counts_by_upper_bounds_inclusive() -> None:
    metrics = Metrics()
    histogram = metrics.histogram("rayq_log_flush_seconds")
    for seconds in (0.0001, 0.0005, 0.0006, 1000.0):
        histogram.observe(seconds)
    (sample,) = metrics.collect()
    assert sample.count == 4
    assert sample.buckets is not None
    assert sample.buckets[:2] == [2, 3] and sample.buckets[-1] == 3
    assert sample.value == pytest.approx(1000.0012)
    assert sample.mean == pytest.approx(250.0003)


def test_quantiles_lie_inside_their_bucket() -> None:
    histogram = Metrics().histogram("rayq_log_flush_seconds")
    for _ in range(90):
        histogram.observe(0.002)
    for _ in range(10):
        histogram.observe(0.3)
    buckets, total = [], 0
    for count in histogram.counts[:-1]:
        total += count
        buckets.append(total)
    sample = Sample("rayq_log_flush_seconds", {}, histogram.sum, 100, buckets)
    median, p95 = sample.quantile(0.5), sample.quantile(0.95)
    assert median is not None and 0.001 <= median <= 0.0025
    assert p95 is not None and 0.25 <= p95 <= 0.5
    assert Sample("rayq_log_flush_seconds", {}, 0.0, 0, buckets).quantile(0.5) is None
    far = Sample("rayq_log_flush_seconds", {}, 1e9, 1, [0] * len(SECONDS_BOUNDS))
    assert far.quantile(0.99) == SECONDS_BOUNDS[-1]


def test_samples_of_equal_labels_are_added_up() -> None:
    at = {"cluster": "main", "broker": "0"}
    flush = "rayq_log_flush_seconds"
    (connections, flushes) = merged(
        [
            Sample(flush, at, 0.5, 2, [1, 2]),
            Sample("rayq_connections", at, 3),
            Sample("rayq_connections", dict(reversed(at.items())), 4),
            Sample(flush, at, 0.25, 1, [0, 1]),
        ]
    )
    assert connections.value == 7
    assert (flushes.value, flushes.count, flushes.buckets) == (0.75, 3, [1, 3])


def test_what_two_processes_tell_of_one_thing_is_not_added_up() -> None:
    """For a moment an old leader and a new one both believe that they lead."""
    of_partition = {"cluster": "main", "topic": "orders", "partition": "0"}
    found = merged(
        [
            Sample("rayq_partition_latest_offset", of_partition, 1000),
            Sample("rayq_partition_latest_offset", of_partition, 1010),
            Sample("rayq_active_brokers", {"cluster": "main"}, 3),
            Sample("rayq_active_brokers", {"cluster": "main"}, 3),
            # Each host of the controller counts its own decisions.
            Sample("rayq_leader_elections_total", {"cluster": "main"}, 4),
            Sample("rayq_leader_elections_total", {"cluster": "main"}, 2),
        ]
    )
    assert {sample.name: sample.value for sample in found} == {
        "rayq_partition_latest_offset": 1010,
        "rayq_active_brokers": 3,
        "rayq_leader_elections_total": 6,
    }


def test_samples_of_a_newer_server_are_put_together_too() -> None:
    (sample,) = merged([Sample("rayq_of_the_future", {}, 1), Sample("rayq_of_the_future", {}, 1)])
    assert sample.value == 2


def test_a_sample_travels() -> None:
    sample = Sample("rayq_connections", {"cluster": "main", "broker": "0"}, 3.0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sample), type=Sample) == sample


def test_a_log_line_has_fields_for_people_and_for_programs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    logger = logging.getLogger("rayq.test")
    log_event(
        logger, logging.INFO, "leader_elected", topic="orders", isr=[0, 2], was=None,
        reason='broker 1 was "silent"', took_s=0.25,
    )  # fmt: skip
    log_event(logger, logging.DEBUG, "not_wanted")
    (record,) = caplog.records
    assert record.getMessage() == (
        'leader_elected topic=orders isr=0,2 was=none reason="broker 1 was \\"silent\\"" '
        "took_s=0.250"
    )
    assert record.__dict__["rayq_event"] == "leader_elected"
    assert record.__dict__["rayq_fields"]["isr"] == [0, 2]
    assert record.funcName == "test_a_log_line_has_fields_for_people_and_for_programs"


def test_no_text_of_a_client_ends_a_log_line_or_speaks_to_a_terminal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log_event(
        logging.getLogger("rayq.test"), logging.WARNING, "group_rebalanced", group="a\rb\x1b[2Jc\u2028d",
        members=["e f", 'g"\n'], none=[], path="C:\\x", name="Zürich",
    )  # fmt: skip
    (record,) = caplog.records
    assert record.getMessage() == (
        r'group_rebalanced group="a\rb\x1b[2Jc\u2028d" members="e f,g\"\n" none=none path=C:\x '
        "name=Zürich"
    )


def test_forgetting_a_partition_costs_no_more_than_its_own_metrics() -> None:
    """A process that stops forgets each of its thousands of replicas."""

    def lines_of_a_stop(partitions: int) -> int:
        metrics, lines = Metrics(), 0
        for number in range(partitions):
            metrics.counter("rayq_bytes_in_total", topic="t", partition=number)

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal lines
            lines += event == "line"
            return trace

        sys.settrace(trace)
        try:
            for number in range(partitions):
                metrics.forget(topic="t", partition=number)
        finally:
            sys.settrace(None)
        assert not metrics.collect()
        return lines

    assert lines_of_a_stop(400) < 5 * lines_of_a_stop(100)
