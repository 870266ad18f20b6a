"""The load of a cluster from its metrics at two moments, and what a byte costs by it."""

from __future__ import annotations

import pytest

from rayq.core.capacity.measured_costs import COUNTED_ON, measured_costs
from rayq.core.capacity.measured_load import Growth, measured_load
from rayq.core.capacity.plan import Costs, Load, plan
from rayq.errors import DisconnectedError
from rayq.metrics import CATALOGUE, SECONDS_BOUNDS, Sample
from rayq.records import TopicPartition

GB = 1e9


def sample(name: str, value: float, **labels: object) -> Sample:
    known = CATALOGUE[name].labels
    assert set(labels) | {"cluster"} == set(known), name
    return Sample(name, {"cluster": "main", **{key: str(of) for key, of in labels.items()}}, value)


def servers(*up: int, down: int | None = None) -> list[Sample]:
    found = [sample("rayq_process_up", 1.0, process=f"h:{port}") for port in up]
    return found if down is None else [*found, sample("rayq_process_up", 0.0, process=f"h:{down}")]


def of_topic(topic: str, written: float, read: float, copies: int = 3) -> list[Sample]:
    """A partition on brokers 0 to `copies` - 1, led by 0."""
    at = {"topic": topic, "partition": 0}
    followers = range(1, copies)
    return [
        sample("rayq_bytes_in_total", written, broker=0, **at),
        sample("rayq_bytes_out_total", read, broker=0, **at),
        sample("rayq_replication_bytes_out_total", written * (copies - 1), broker=0, **at),
        *(sample("rayq_replication_bytes_in_total", written, broker=of, **at) for of in followers),
        *(sample("rayq_log_size_bytes", written, broker=of, **at) for of in range(copies)),
        *(sample("rayq_log_end_offset", 9, broker=of, **at) for of in range(copies)),
        sample("rayq_partition_replicas", copies, **at),
    ]


def of_brokers(cpu_s: float, count: int = 3) -> list[Sample]:
    found = [sample("rayq_fenced_brokers", 0)]
    for broker in range(count):
        found += [
            sample("rayq_metadata_version", 7, broker=broker),
            sample("rayq_disk_free_bytes", 100 * GB, broker=broker),
            sample("rayq_process_cpu_seconds_total", cpu_s, broker=broker),
            sample("rayq_process_resident_memory_bytes", GB, broker=broker),
        ]
    found.append(sample("rayq_process_cpu_seconds_total", 0.0, broker="controller"))
    return found


def test_rates_are_those_between_the_two_moments() -> None:
    before = [*servers(1, 2), *of_brokers(5), *of_topic("orders", 10 * GB, 20 * GB)]
    after = [
        *servers(1, 2),
        *of_brokers(10),
        *of_topic("orders", 11 * GB, 22 * GB),
        *of_topic("__queue_state", 0.1 * GB, 0),
    ]
    found = measured_load(before, after, 10)
    assert found.written_bytes_per_s == pytest.approx(0.11 * GB)
    assert found.read_bytes_per_s == pytest.approx(0.2 * GB)
    assert found.busiest_partition == TopicPartition("orders", 0)
    assert found.busiest_bytes_per_s == pytest.approx(0.1 * GB)
    assert (found.partitions, found.brokers_away) == (1, 0)
    leader, follower, _ = found.brokers
    assert [broker.broker for broker in found.brokers] == ["0", "1", "2"]
    assert leader.received_bytes_per_s == follower.received_bytes_per_s == pytest.approx(0.11 * GB)
    assert leader.sent_bytes_per_s == pytest.approx((2 + 2) * 0.1 * GB + 0.02 * GB)
    assert follower.sent_bytes_per_s == 0
    assert (leader.cores, leader.memory_bytes, leader.replicas) == (0.5, GB, 2)
    assert (leader.log_bytes, leader.free_bytes) == (11.1 * GB, 100 * GB)


def test_a_counter_that_began_again_has_grown_from_0() -> None:
    before = [*servers(1), *of_topic("orders", 10, 10)]
    after = [*servers(1), *of_topic("orders", 4, 10)]
    assert measured_load(before, after, 1).written_bytes_per_s == 4


def test_an_idle_cluster_has_no_busiest_partition() -> None:
    idle = [*servers(1), *of_topic("orders", 10, 10)]
    found = measured_load(idle, idle, 1)
    assert found.busiest_partition is None
    assert found.brokers == ()


def test_servers_that_do_not_tell_are_told_apart_from_idle_ones() -> None:
    some = [*servers(1), sample("rayq_metadata_version", 7, broker=0)]
    (broker,) = measured_load(some, some, 1).brokers
    assert (broker.cores, broker.memory_bytes, broker.free_bytes) == (None, None, None)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (servers(1, 2), servers(1)),
        (servers(1), servers(1, down=2)),
        (servers(1, 2), servers(1, down=2)),
        (servers(1, down=2), servers(1, 2)),
    ],
    ids=["ended", "new and silent", "silent", "silent before"],
)
def test_a_server_that_ended_or_was_silent_makes_the_measurement_void(
    before: list[Sample], after: list[Sample]
) -> None:
    with pytest.raises(DisconnectedError, match="1 server ended .* h:2"):
        Growth(before, after, 1)
    Growth(servers(1), servers(1, 2), 1)  # A server that begins is no harm.


# --- costs ----------------------------------------------------------------------------------------


def flushes(quick: int, slow: int) -> Sample:
    """Flushes of 1 ms and of 40 ms."""
    buckets = [0 if bound < 0.001 else quick if bound < 0.05 else quick + slow for bound in SECONDS_BOUNDS]
    labels = {"cluster": "main", "broker": "0"}
    return Sample("rayq_log_flush_seconds", labels, 1.0 * quick, quick + slow, buckets)


def grown(seconds: float, cpu_s: float, written: float, read: float, other: float = 0) -> Growth:
    before = [*servers(1), *of_brokers(100), *of_topic("rayq-bench", 0, 0), *of_topic("b", 0, 0)]
    after = [
        *servers(1),
        *of_brokers(100 + cpu_s / 3),
        *of_topic("rayq-bench", written, read),
        *of_topic("b", other, 0),
        flushes(98, 2),
    ]
    return Growth(before, after, seconds)


def test_what_servers_take_at_rest_is_no_cost_of_a_byte() -> None:
    found = measured_costs(
        "rayq-bench",
        3,
        idle=grown(10, 1, 0, 0),
        writing=grown(30, 12, 2 * GB, 0),
        reading=grown(20, 10, 0, 4 * GB),
    )
    assert found.acknowledged_bytes_per_s == pytest.approx(2 * GB / 30)
    assert found.read_bytes_per_s == pytest.approx(4 * GB / 20)
    assert found.write_cpu_s_per_byte == pytest.approx((12 - 3) / (3 * 2 * GB))
    assert found.read_cpu_s_per_byte == pytest.approx((10 - 2) / (4 * GB))
    assert found.replication_bytes_per_s == pytest.approx(2 * 2 * GB / 30)
    assert found.fdatasync_p50_s is not None and 0.0005 <= found.fdatasync_p50_s <= 0.001
    assert found.fdatasync_p99_s is not None and 0.025 <= found.fdatasync_p99_s <= 0.05
    assert found.others_bytes_per_s == 0
    assert found.costs["partition_write_bytes_per_s"] == pytest.approx(
        COUNTED_ON * 2 * GB / 30, rel=1e-3
    )
    plan(Load(records_per_s=1e5, record_bytes=1000, retention_s=86_400), costs=Costs(**found.costs))


def test_what_others_do_meanwhile_is_told_and_not_counted_in() -> None:
    found = measured_costs(
        "rayq-bench",
        3,
        idle=grown(10, 1, 0, 0),
        writing=grown(10, 5, GB, 0, other=GB / 2),
        reading=grown(10, 5, 0, GB),
    )
    assert found.acknowledged_bytes_per_s == pytest.approx(GB / 10)
    assert found.others_bytes_per_s == pytest.approx(GB / 20)


def test_what_was_not_measured_or_makes_no_sense_is_no_cost() -> None:
    busy = grown(10, 50, GB, GB)
    noisy = measured_costs(
        "rayq-bench", 3, idle=busy, writing=grown(10, 1, GB, 0), reading=grown(10, 50, 0, 0)
    )
    assert noisy.write_cpu_s_per_byte is not None and noisy.write_cpu_s_per_byte < 0
    assert noisy.read_cpu_s_per_byte is None
    assert list(noisy.costs) == ["partition_write_bytes_per_s"]
    silent = Growth(servers(1), [*servers(1), *of_topic("rayq-bench", GB, GB)], 10)
    found = measured_costs("rayq-bench", 3, idle=silent, writing=silent, reading=silent)
    assert (found.write_cpu_s_per_byte, found.fdatasync_p50_s) == (None, None)
    assert list(found.costs) == ["partition_write_bytes_per_s", "consumer_read_bytes_per_s"]
