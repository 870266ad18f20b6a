"""Consumers in a group, against a played coordinator: what polls, commits and closing do."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from rayq.client.cluster import Cluster
from rayq.client.consuming.consumer import Consumer
from rayq.errors import (
    AuthorizationError,
    ClosedError,
    CommitRefusedError,
    ConfigError,
    CoordinatorLoadingError,
    FencedMemberError,
    GroupNotEmptyError,
    InvalidRequestError,
    LogTruncatedError,
    MaxPollIntervalError,
    NotLeaderError,
    OffsetOutOfRangeError,
    UnknownAssignorError,
    UnknownMemberError,
    UnknownServerError,
    UnknownTopicError,
)
from rayq.messages import CommitOffsets, Fetch, FetchCommitted, GroupHeartbeat
from rayq.records import OffsetAndMetadata, Record, TopicPartition
from tests.client.fake_broker import FakeCluster

Eventually = Callable[[Callable[[], bool]], None]
T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
FAST: dict[str, Any] = {
    "auto_offset_reset": "earliest",
    "group_heartbeat_interval_ms": 100,
    "group_session_timeout_ms": 20_000,
}


def numbers(first: int, last: int) -> list[bytes]:
    return [str(number).encode() for number in range(first, last)]


def read(consumer: Consumer, count: int, **options: Any) -> list[Record]:
    found: list[Record] = []
    deadline = time.monotonic() + 30
    while len(found) < count and time.monotonic() < deadline:
        found += consumer.poll(timeout_s=0.2, **options)
    assert len(found) == count
    return found


def poll_until(consumer: Consumer, holds: Callable[[], bool]) -> list[Record]:
    found: list[Record] = []
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        found += consumer.poll(timeout_s=0.02)
    return found


class Told:
    """Callbacks that note their arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[TopicPartition]]] = []

    def callbacks(self) -> dict[str, Any]:
        return {name: self._noter(name) for name in ("on_assigned", "on_revoked", "on_lost")}

    def _noter(self, name: str) -> Callable[[set[TopicPartition]], None]:
        return lambda partitions: self.calls.append((name, sorted(partitions)))


@pytest.fixture
def two(fake: FakeCluster) -> FakeCluster:
    """A topic of two partitions with ten records each."""
    fake.create_topic("t", partitions=2)
    for partition in range(2):
        fake.write("t", numbers(0, 10), partition)
    return fake


# --- resuming -------------------------------------------------------------------------------------


def test_a_member_reads_what_it_is_granted_and_goes_on_from_the_commit(
    two: FakeCluster, cluster: Cluster
) -> None:
    two.groups.commit("t", 0, 4)
    told = Told()
    with cluster.consumer("t", group="g", **told.callbacks(), **FAST) as consumer:
        assert consumer.assignment() == set()
        records = read(consumer, 16)
        assert consumer.assignment() == {T0, T1}
        assert [record.offset for record in records if record.partition == 0] == list(range(4, 10))
        assert consumer.committed([T0, T1]) == {T0: 4, T1: None}
        consumer.commit()
        assert consumer.committed([T0, T1]) == {T0: 10, T1: 10}
        assert consumer.lag() == {T0: 0, T1: 0}
        membership = consumer.group_membership()
        assert membership.member_epoch > 0 and membership.group == "g"
    assert told.calls == [("on_assigned", [T0, T1]), ("on_revoked", [T0, T1])]
    (goodbye,) = two.groups.group().left
    assert (goodbye.member_epoch, goodbye.member) == (-1, membership.member)
    # There is one lookup for both partitions, besides the lookups that the test asks for.
    assert len(two.asked(FetchCommitted)) == 3


def test_commits_that_say_nothing_new_are_not_sent(two: FakeCluster, cluster: Cluster) -> None:
    with cluster.consumer("t", group="g", **FAST) as consumer:
        consumer.commit()
        assert two.asked(CommitOffsets) == []
        read(consumer, 20)
        consumer.commit()
        consumer.commit()
        consumer.commit({})
        assert len(two.asked(CommitOffsets)) == 1


def test_a_commit_below_the_log_start_follows_auto_offset_reset(
    two: FakeCluster, cluster: Cluster
) -> None:
    two.groups.commit("t", 0, 2)
    two.delete_before("t", 0, 10)
    two.write("t", numbers(10, 12), 0)
    with cluster.consumer("t", group="g", **FAST) as consumer:
        records = read(consumer, 12)
        assert [record.offset for record in records if record.partition == 0] == [10, 11]
    options = FAST | {"auto_offset_reset": "none"}
    with (
        cluster.consumer("t", group="g", **options) as consumer,
        pytest.raises(OffsetOutOfRangeError),
    ):
        for _ in range(1000):
            consumer.poll(timeout_s=0.05)


def test_a_commit_on_a_branch_that_was_cut_off_is_noticed(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    fake.write("t", numbers(0, 10))
    fake.groups.commit("t", 0, 10, last_epoch=1)
    fake.truncate("t", 0, 0)
    with (
        cluster.consumer("t", group="g", **FAST) as consumer,
        pytest.raises(LogTruncatedError),
    ):
        for _ in range(1000):
            consumer.poll(timeout_s=0.05)
    assert {one.last_epoch for one in fake.asked(Fetch)} == {1}


def test_commits_carry_the_epoch_of_the_record_before(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    fake.write("t", numbers(0, 10))
    fake.move_leader("t", 0, 1)
    fake.write("t", numbers(10, 20))
    with cluster.consumer("t", group="g", **FAST) as consumer:
        read(consumer, 10, max_records=10)
        consumer.commit()
        read(consumer, 5, max_records=5)
        consumer.commit()
        consumer.commit({T0: 3})
    assert [(one.offsets[0].offset, one.offsets[0].last_epoch) for one in fake.asked(CommitOffsets)] == [
        (10, 1),
        (15, 2),
        (3, None),
    ]


def test_a_duration_resets_to_that_long_ago(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    now_ms = time.time_ns() // 1_000_000
    fake.write("t", [b"old"], timestamps_ms=now_ms - 7_200_000)
    fake.write("t", [b"new"], timestamps_ms=now_ms - 60_000)
    for group in ("g", None):
        options = (FAST if group else {}) | {"auto_offset_reset": timedelta(hours=1)}
        with cluster.consumer("t", group=group, **options) as consumer:
            assert [record.value for record in read(consumer, 1)] == [b"new"]
    options = FAST | {"auto_offset_reset": timedelta(seconds=1)}
    with cluster.consumer("t", group="h", **options) as consumer:
        poll_until(consumer, lambda: bool(consumer.assignment()))
        assert consumer.position(T0) == 2


def test_commit_metadata_comes_back(two: FakeCluster, cluster: Cluster) -> None:
    with cluster.consumer("t", group="g", **FAST) as consumer:
        read(consumer, 20)
        consumer.commit({T0: OffsetAndMetadata(7, "by hand"), ("t", 1): 3})
        assert consumer.committed_with_metadata([T0, T1]) == {
            T0: OffsetAndMetadata(7, "by hand"),
            T1: OffsetAndMetadata(3, ""),
        }
        for wrong in (-1, 2**62, OffsetAndMetadata(1, "x" * 5000)):
            with pytest.raises(InvalidRequestError):
                consumer.commit({T0: wrong})
        with pytest.raises(TypeError):
            consumer.commit({T0: "7"})  # type: ignore[dict-item]


# --- rebalances -----------------------------------------------------------------------------------


def test_partitions_move_inside_polls_only_and_others_keep_their_streams(
    two: FakeCluster, cluster: Cluster, eventually: Eventually
) -> None:
    told = Told()
    with cluster.consumer(
        "t", group="g", max_poll_records=1, **told.callbacks(), **FAST
    ) as consumer:
        records = read(consumer, 6)
        fetches = [one for one in two.asked(Fetch) if one.partition == 0]
        two.groups.grant(("t", 0))
        eventually(lambda: consumer._core.group.is_due)  # type: ignore[union-attr]
        assert consumer.assignment() == {T0, T1}
        consumer.commit()  # before the next poll all partitions may be committed
        assert two.groups.committed("t", 1) == sum(one.partition == 1 for one in records)
        records += poll_until(consumer, lambda: consumer.assignment() == {T0})
        eventually(lambda: two.groups.member().owned == {(two.topics["t"].topic_id, 0)})
        records += read(consumer, 10 - sum(one.partition == 0 for one in records))
        assert [record.offset for record in records if record.partition == 0] == list(range(10))
        # Fetched records were kept: nothing was fetched twice.
        offsets = [one.offset for one in two.asked(Fetch) if one.partition == 0 and one.offset < 10]
        assert len(offsets) == len(set(offsets)) == len([one for one in fetches if one.offset < 10])
    assert told.calls == [
        ("on_assigned", [T0, T1]),
        ("on_revoked", [T1]),
        ("on_revoked", [T0]),
    ]


def test_a_blocked_poll_wakes_up_when_the_assignment_changes(
    two: FakeCluster, cluster: Cluster
) -> None:
    with cluster.consumer("t", group="g", **FAST) as consumer:
        read(consumer, 20)
        two.groups.grant(("t", 0))
        poll_until(consumer, lambda: consumer.assignment() == {T0})
        timer = threading.Timer(0.2, lambda: two.groups.grant(("t", 0), ("t", 1)))
        timer.start()
        started = time.monotonic()
        assert len(consumer.poll(timeout_s=60)) == 10  # partition 1 again: nothing was committed
        assert time.monotonic() - started < 25
        timer.join()


def test_callbacks_may_commit_and_seek_but_not_poll(two: FakeCluster, cluster: Cluster) -> None:
    errors: list[Exception] = []

    def on_assigned(partitions: set[TopicPartition]) -> None:
        for one in partitions:
            consumer.seek(one, 8)
        try:
            consumer.poll()
        except InvalidRequestError as error:
            errors.append(error)

    def on_revoked(partitions: set[TopicPartition]) -> None:
        consumer.commit()

    consumer = cluster.consumer("t", group="g", on_assigned=on_assigned, **FAST)
    with consumer:
        consumer.subscribe(["t"], on_revoked=on_revoked)
        assert sorted(record.offset for record in read(consumer, 4)) == [8, 8, 9, 9]
        two.groups.grant(("t", 0))
        poll_until(consumer, lambda: consumer.assignment() == {T0})
        assert two.groups.committed("t", 1) == 10
    assert two.groups.committed("t", 0) == 10
    assert len(errors) == 1


@pytest.mark.parametrize("name", ["on_assigned", "on_revoked"])
def test_a_callback_may_close_its_consumer(
    two: FakeCluster, cluster: Cluster, name: str
) -> None:
    calls: list[int] = []

    def close(partitions: set[TopicPartition]) -> None:
        calls.append(len(partitions))
        consumer.close()

    consumer = cluster.consumer("t", group="g", **{name: close}, **FAST)
    if name == "on_revoked":
        read(consumer, 20)
        two.groups.grant(("t", 0))
    with pytest.raises(ClosedError):
        poll_until(consumer, lambda: False)
    assert len(calls) == 1
    assert len(two.groups.group().left) == 1


def test_a_callback_that_takes_too_long_costs_the_partitions(
    two: FakeCluster, cluster: Cluster
) -> None:
    told = Told()
    waits = [1.6]

    def restore(_partitions: set[TopicPartition]) -> None:
        if waits:
            time.sleep(waits.pop())

    callbacks = told.callbacks() | {"on_assigned": restore}
    options = FAST | {"max_poll_interval_ms": 1000}
    with cluster.consumer("t", group="g", **callbacks, **options) as consumer:
        with pytest.raises(MaxPollIntervalError, match=r"(1\.[6-9]|[2-9]\.\d) s passed"):
            poll_until(consumer, lambda: False)
        assert told.calls == [("on_lost", [T0, T1])]
        assert len(read(consumer, 20)) == 20


def test_what_a_callback_raises_comes_out_of_poll_and_the_partitions_still_go(
    two: FakeCluster, cluster: Cluster, eventually: Eventually
) -> None:
    def on_revoked(partitions: set[TopicPartition]) -> None:
        raise ValueError("mine")

    consumer = cluster.consumer("t", group="g", on_revoked=on_revoked, **FAST)
    read(consumer, 20)
    two.groups.grant(("t", 0))
    with pytest.raises(ValueError, match="mine"):
        poll_until(consumer, lambda: False)
    assert consumer.assignment() == {T0}
    eventually(lambda: len(two.groups.member().owned) == 1)
    with pytest.raises(ValueError, match="mine"):
        consumer.close()
    assert len(two.groups.group().left) == 1
    consumer.close()


def test_iteration_gives_up_between_records_and_keeps_the_place(
    two: FakeCluster, cluster: Cluster, eventually: Eventually
) -> None:
    with cluster.consumer("t", group="g", enable_auto_commit=True, **FAST) as consumer:
        seen = [next(consumer) for _ in range(5)]
        of_each = [sum(one.partition == number for one in seen) for number in range(2)]
        assert consumer.position(T0) == of_each[0]
        two.groups.grant(("t", 1))
        eventually(lambda: consumer._core.group.is_due)  # type: ignore[union-attr]
        rest = [next(consumer) for _ in range(10 - of_each[1])]
        assert {one.partition for one in rest} == {1}
        # Exactly the records that were yielded before the partition went are committed.
        assert two.groups.committed("t", 0) == of_each[0]
        offsets = [one.offset for one in seen + rest if one.partition == 1]
        assert offsets == list(range(10))
        consumer.commit()
        assert two.groups.committed("t", 1) == 10


def test_committing_after_each_record_of_an_iteration_commits_what_was_yielded(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    fake.write("t", numbers(0, 5))
    with cluster.consumer("t", group="g", **FAST) as consumer:
        for expected in range(1, 6):
            next(consumer)
            consumer.commit()
            assert fake.groups.committed("t", 0) == expected


def test_a_deleted_topic_is_revoked_and_raises_nothing(two: FakeCluster, cluster: Cluster) -> None:
    two.create_topic("u")
    with cluster.consumer("t", "u", group="g", **FAST) as consumer:
        poll_until(consumer, lambda: len(consumer.assignment()) == 3)
        two.delete_topic("u")
        for _ in range(5):
            consumer.poll(timeout_s=0.02)
        two.groups.grant(("t", 0), ("t", 1))
        poll_until(consumer, lambda: consumer.assignment() == {T0, T1})


def test_a_partition_that_is_granted_before_the_metadata_shows_it_is_read_once_it_does(
    two: FakeCluster, cluster: Cluster
) -> None:
    with cluster.consumer("t", group="g", **FAST) as consumer:
        read(consumer, 20)
        two.freeze_metadata(1)
        two.create_topic("u")
        two.write("u", [b"late"])
        two.groups.grant(("t", 0), ("u", 0))
        poll_until(consumer, lambda: TopicPartition("u", 0) in consumer.assignment())
        deadline = time.monotonic() + 1.5  # The fetcher has found out that there is no such topic.
        while time.monotonic() < deadline:
            assert consumer.poll(timeout_s=0.1) == []
        two.thaw_metadata(1)
        assert [record.value for record in read(consumer, 1)] == [b"late"]


def test_a_topic_made_again_is_read_from_its_own_commit(two: FakeCluster, cluster: Cluster) -> None:
    two.groups.commit("t", 0, 10)
    told = Told()
    with cluster.consumer("t", group="g", **told.callbacks(), **FAST) as consumer:
        read(consumer, 10)
        two.delete_topic("t")
        two.create_topic("t")
        two.write("t", [b"another"])
        two.groups.grant(("t", 0))
        assert [record.value for record in read(consumer, 1)] == [b"another"]
    assert told.calls == [
        ("on_assigned", [T0, T1]),
        ("on_revoked", [T0, T1]),
        ("on_assigned", [T0]),
        ("on_revoked", [T0]),
    ]


def test_patterns_go_to_the_coordinator(two: FakeCluster, cluster: Cluster) -> None:
    two.create_topic("orders-eu")
    two.write("orders-eu", [b"v"])
    for pattern in (r"orders-.*", re.compile(r"[Oo]rders-.*")):
        with cluster.consumer(group="g", pattern=pattern, **FAST) as consumer:
            assert [one.topic for one in read(consumer, 1)] == ["orders-eu"]
    for wrong in ("(", re.compile("a", re.IGNORECASE)):
        with pytest.raises(InvalidRequestError, match="pattern"):
            cluster.consumer(group="g", pattern=wrong)
    with pytest.raises(InvalidRequestError, match="needs a group"):
        cluster.consumer(pattern=".*")
    with pytest.raises(ConfigError, match="group_instance_id is for members of a group"):
        cluster.consumer("t", group_instance_id="me")
    with pytest.raises(ConfigError, match="say group="):
        cluster.consumer("t", group_id="g")
    with pytest.raises(InvalidRequestError, match="need a group"):
        cluster.consumer("t", on_lost=lambda _: None)


def test_subscribing_to_something_else_is_told_to_the_coordinator(
    two: FakeCluster, cluster: Cluster, eventually: Eventually
) -> None:
    two.create_topic("u")
    with cluster.consumer("t", group="g", **FAST) as consumer:
        read(consumer, 20)
        consumer.subscribe(["u"], pattern="v.*")
        eventually(lambda: two.groups.member().request.topics == ["u"])
        assert two.groups.member().request.pattern == "v.*"
        assert len(two.groups.group().members) == 1


# --- losing ---------------------------------------------------------------------------------------


def test_a_member_that_is_forgotten_loses_its_partitions_and_joins_again(
    two: FakeCluster, cluster: Cluster, eventually: Eventually
) -> None:
    told = Told()
    with cluster.consumer("t", group="g", **told.callbacks(), **FAST) as consumer:
        read(consumer, 20)
        two.groups.forget_member()
        eventually(lambda: len(two.groups.group().members) == 1)
        with pytest.raises(CommitRefusedError, match=r"t-0, t-1: the coordinator"):
            consumer.commit()
        assert len(read(consumer, 20)) == 20  # nothing was committed
        consumer.commit()
    assert told.calls == [
        ("on_assigned", [T0, T1]),
        ("on_lost", [T0, T1]),
        ("on_assigned", [T0, T1]),
        ("on_revoked", [T0, T1]),
    ]


def test_a_member_that_may_not_read_its_topic_for_a_while_goes_on_where_it_was(
    two: FakeCluster, cluster: Cluster
) -> None:
    told = Told()
    options = FAST | {"auto_offset_reset": "latest", "enable_auto_commit": False}
    with cluster.consumer("t", group="g", **told.callbacks(), **options) as consumer:
        poll_until(consumer, lambda: len(told.calls) == 1)
        assert {consumer.position(T0), consumer.position(T1)} == {10}
        denied = AuthorizationError("You may not read topic 't'.")
        two.fault(GroupHeartbeat, times=1_000_000, error=denied)
        with pytest.raises(AuthorizationError, match="may not read"):
            poll_until(consumer, lambda: False)
        two.write("t", [b"written meanwhile"], 0)
        two.clear_faults()
        found: list[Record] = []
        deadline = time.monotonic() + 30
        while not found and time.monotonic() < deadline:
            with contextlib.suppress(AuthorizationError):
                found += consumer.poll(timeout_s=0.1)
        assert [(record.offset, record.value) for record in found] == [(10, b"written meanwhile")]
    assert told.calls == [("on_assigned", [T0, T1]), ("on_revoked", [T0, T1])]


def test_a_member_that_may_not_join_yet_joins_once_it_may(
    two: FakeCluster, cluster: Cluster
) -> None:
    denied = AuthorizationError("You may not read group 'g'.")
    two.fault(GroupHeartbeat, times=1_000_000, error=denied)
    with cluster.consumer("t", group="g", **FAST) as consumer:
        for _ in range(2):
            with pytest.raises(AuthorizationError, match="may not read"):
                poll_until(consumer, lambda: False)
        two.clear_faults()
        found: list[Record] = []
        deadline = time.monotonic() + 30
        while len(found) < 20 and time.monotonic() < deadline:
            with contextlib.suppress(AuthorizationError):
                found += consumer.poll(timeout_s=0.1)
        assert len(found) == 20


def test_a_member_that_hears_nothing_for_a_session_gives_up_by_its_own_clock(
    two: FakeCluster, cluster: Cluster
) -> None:
    told = Told()
    options = FAST | {"group_session_timeout_ms": 2000}
    with cluster.consumer("t", group="g", **told.callbacks(), **options) as consumer:
        read(consumer, 20)
        started = time.monotonic()
        two.fault(GroupHeartbeat, times=10_000, error=CoordinatorLoadingError("not yet"))
        poll_until(consumer, lambda: len(told.calls) == 2)
        assert time.monotonic() - started > 0.5
        assert told.calls[1] == ("on_lost", [T0, T1])
        assert consumer.assignment() == set()
        two.clear_faults()
        assert len(read(consumer, 20)) == 20


def test_who_does_not_poll_loses_its_partitions_and_is_told_so_once(
    two: FakeCluster, cluster: Cluster, eventually: Eventually
) -> None:
    told = Told()
    options = FAST | {"max_poll_interval_ms": 1000}
    with cluster.consumer("t", group="g", **told.callbacks(), **options) as consumer:
        read(consumer, 20)
        eventually(lambda: len(two.groups.group().left) == 1)
        assert two.groups.group().left[0].reason == "it did not poll within max_poll_interval_ms"
        with pytest.raises(CommitRefusedError, match="raise max_poll_interval_ms"):
            consumer.commit()
        with pytest.raises(CommitRefusedError):
            consumer.commit({T0: 5})
        with pytest.raises(MaxPollIntervalError, match=r"[1-9]\d*\.\d s passed .*\(1000 ms\)"):
            consumer.poll()
        assert told.calls[-1] == ("on_lost", [T0, T1])
        assert len(read(consumer, 20)) == 20


def test_who_is_closed_before_it_could_say_that_it_is_out_says_so_all_the_same(
    two: FakeCluster, cluster: Cluster, caplog: pytest.LogCaptureFixture, eventually: Eventually
) -> None:
    """Otherwise its partitions would have no owner until its session ends."""
    consumer = cluster.consumer("t", group="g", **FAST | {"max_poll_interval_ms": 1000})
    read(consumer, 20)
    two.fault(GroupHeartbeat, times=10_000, error=CoordinatorLoadingError("the coordinator moves"))
    eventually(lambda: "did not poll" in caplog.text)
    consumer.close(0.1)
    assert not two.groups.group().left
    two.clear_faults()
    eventually(lambda: len(two.groups.group().left) == 1)
    assert two.groups.group().left[0].reason == "it did not poll within max_poll_interval_ms"


def test_waiting_in_a_poll_is_not_lateness(two: FakeCluster, cluster: Cluster) -> None:
    options = FAST | {"max_poll_interval_ms": 1000}
    with cluster.consumer("t", group="g", **options) as consumer:
        read(consumer, 20)
        assert consumer.poll(timeout_s=2.2) == []
        assert consumer.assignment() == {T0, T1}


def test_a_coordinator_that_moves_keeps_its_members(
    fake3: FakeCluster, eventually: Eventually
) -> None:
    fake3.create_topic("t", partitions=2)
    told = Told()
    with (
        fake3.cluster() as cluster,
        cluster.consumer("t", group="g", **told.callbacks(), **FAST) as consumer,
    ):
        poll_until(consumer, lambda: bool(consumer.assignment()))
        member = consumer.group_membership().member
        beats = fake3.groups.member().beats
        fake3.move_leader("__consumer_offsets", 0, 2)
        eventually(lambda: fake3.groups.member().beats > beats + 2)
        fake3.write("t", [b"v"])
        read(consumer, 1)
        consumer.commit()
        assert consumer.group_membership().member == member
        assert [name for name, _ in told.calls] == ["on_assigned"]


def test_a_static_member_that_was_replaced_says_so(two: FakeCluster, cluster: Cluster) -> None:
    with cluster.consumer("t", group="g", group_instance_id="one", **FAST) as consumer:
        read(consumer, 20)
        two.fault(GroupHeartbeat, times=1, error=FencedMemberError("another is 'one'"))
        with pytest.raises(FencedMemberError, match="another is 'one'"):
            poll_until(consumer, lambda: False)
        with pytest.raises(FencedMemberError):
            consumer.poll()
    assert two.groups.group().left == []


def test_a_commit_of_a_static_member_that_was_replaced_does_not_take_the_instance_back(
    two: FakeCluster, cluster: Cluster
) -> None:
    with cluster.consumer("t", group="g", group_instance_id="one", **FAST) as consumer:
        read(consumer, 20)
        two.fault(GroupHeartbeat, times=1000, error=FencedMemberError("another is 'one'"))
        two.fault(CommitOffsets, error=UnknownMemberError("no such member"))
        asked = len(two.asked(GroupHeartbeat))
        with pytest.raises(CommitRefusedError):
            consumer.commit()
        with pytest.raises(FencedMemberError, match="another is 'one'"):
            consumer.poll()
        assert all(one.member_epoch > 0 for one in two.asked(GroupHeartbeat)[asked:])


def test_a_static_member_leaves_its_partitions_where_they_are(
    two: FakeCluster, cluster: Cluster
) -> None:
    with cluster.consumer("t", group="g", group_instance_id="one", **FAST) as consumer:
        read(consumer, 20)
    assert [one.member_epoch for one in two.groups.group().left] == [-2]


def test_an_assignor_nobody_knows_comes_out_of_poll(two: FakeCluster, cluster: Cluster) -> None:
    two.fault(GroupHeartbeat, times=1, error=UnknownAssignorError("no assignor 'mine'"))
    with (
        cluster.consumer("t", group="g", assignor="mine", **FAST) as consumer,
        pytest.raises(UnknownAssignorError, match="mine"),
    ):
        poll_until(consumer, lambda: False)


def test_a_member_that_fails_by_a_bug_says_so(
    two: FakeCluster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: Any, **_named: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("rayq.client.consuming.group_member.GroupMember._heartbeat", fail)
    consumer = cluster.consumer("t", group="g", **FAST)
    with pytest.raises(UnknownServerError, match="a bug"):
        poll_until(consumer, lambda: False)
    monkeypatch.undo()
    consumer.close()


def test_what_cannot_be_sent_is_refused_at_once(two: FakeCluster, cluster: Cluster) -> None:
    with pytest.raises(InvalidRequestError, match="Unicode"):
        cluster.consumer("t", group="\ud800")
    with cluster.consumer("t", group="g", **FAST) as consumer:
        read(consumer, 20)
        with pytest.raises(InvalidRequestError, match="Unicode"):
            consumer.commit({T0: OffsetAndMetadata(1, "\ud800")})
        with pytest.raises(TypeError, match="partition: offset"):
            consumer.commit(5)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="send the Cluster"):
            pickle.dumps(consumer)
    for wrong in (
        {"group_session_timeout_ms": 7_200_000},
        {"group_session_timeout_ms": 50, "group_heartbeat_interval_ms": 10},
        {"group_instance_id": ""},
        {"group_instance_id": "x" * 250},
        {"assignor": ""},
        {"max_poll_interval_ms": 2**63},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            cluster.consumer("t", group="g", **wrong)


def test_topics_that_do_not_exist_are_refused_at_once(fake: FakeCluster, cluster: Cluster) -> None:
    with pytest.raises(UnknownTopicError):
        cluster.consumer("nowhere", group="g")
    for wrong in ("", "x" * 300):
        with pytest.raises(InvalidRequestError):
            cluster.consumer("t", group=wrong)


# --- commits --------------------------------------------------------------------------------------


def test_commits_are_retried_while_the_coordinator_moves_or_loads(
    two: FakeCluster, cluster: Cluster
) -> None:
    with cluster.consumer("t", group="g", **FAST) as consumer:
        read(consumer, 20)
        two.fault(CommitOffsets, times=1, error=CoordinatorLoadingError("not yet"))
        two.fault(CommitOffsets, times=1, error=NotLeaderError("not here"))
        two.fault(CommitOffsets, times=1, disconnect=True, carry_out=True)
        two.fault(CommitOffsets, times=1, error=FencedMemberError("an epoch of before"))
        consumer.commit()
        assert two.groups.committed("t", 0) == two.groups.committed("t", 1) == 10
        assert len({one.sequence for one in two.asked(CommitOffsets)}) == 1


def test_a_commit_still_under_way_when_its_partition_goes_is_not_made_when_it_comes_back(
    two: FakeCluster, cluster: Cluster
) -> None:
    with cluster.consumer("t", group="g", **FAST) as consumer:
        read(consumer, 20)
        fault = two.fault(CommitOffsets, 1000, error=FencedMemberError("an epoch of before"))
        future = consumer.commit_async({T0: 4, T1: 4})
        two.groups.grant(("t", 0))
        poll_until(consumer, lambda: consumer.assignment() == {T0})
        two.groups.commit("t", 1, 10)  # by the member that owned it meanwhile
        two.groups.grant(("t", 0), ("t", 1))
        poll_until(consumer, lambda: consumer.assignment() == {T0, T1})
        fault.times = 0
        with pytest.raises(CommitRefusedError, match="t-1: this member gave it up before"):
            future.result(30)
        assert (two.groups.committed("t", 0), two.groups.committed("t", 1)) == (4, 10)


def test_a_commit_in_doubt_is_not_tried_again_by_a_member_that_was_out_meanwhile(
    two: FakeCluster, cluster: Cluster
) -> None:
    with cluster.consumer("t", group="g", **FAST) as consumer:
        read(consumer, 20)
        # Code that only knows of leaders retries such errors.
        fault = two.fault(CommitOffsets, 1000, error=NotLeaderError("not here"))
        future = consumer.commit_async({T0: 4, T1: 4})
        epoch = consumer.group_membership().member_epoch
        two.fault(GroupHeartbeat, times=1, error=UnknownMemberError("who?"))
        poll_until(consumer, lambda: consumer.group_membership().member_epoch > epoch)
        poll_until(consumer, lambda: consumer.assignment() == {T0, T1})
        two.groups.commit("t", 1, 10)  # by the member that owned it meanwhile
        fault.times = 0
        with pytest.raises(CommitRefusedError, match="t-0, t-1"):
            future.result(30)
        assert (two.groups.committed("t", 0), two.groups.committed("t", 1)) == (None, 10)


def test_commits_of_what_another_member_owns_are_refused_by_name(
    two: FakeCluster, cluster: Cluster
) -> None:
    with cluster.consumer("t", group="g", **FAST) as consumer:
        read(consumer, 20)
        two.groups.grant(("t", 0))
        poll_until(consumer, lambda: consumer.assignment() == {T0})
        with pytest.raises(CommitRefusedError, match="t-1: this member does not own it"):
            consumer.commit({T0: 3, T1: 3})
        two.fault(CommitOffsets, times=1, error=UnknownMemberError("who?"))
        with pytest.raises(CommitRefusedError, match=r"t-0: .*who\?"):
            consumer.commit({T0: 3})


def test_a_partial_refusal_names_the_partitions_and_commits_the_rest(
    two: FakeCluster, cluster: Cluster
) -> None:
    with cluster.consumer("t", group="g", **FAST) as consumer:
        read(consumer, 20)
        topic_id = two.topics["t"].topic_id

        def refuse(response: Any, _data: bytes) -> tuple[Any, bytes]:
            return type(response)([(topic_id, 1, "CommitRefusedError", "not yours")]), b""

        two.fault(CommitOffsets, times=1, carry_out=True, change=refuse)
        with pytest.raises(CommitRefusedError, match=r"Not committed: t-1: not yours\."):
            consumer.commit()
        consumer.commit()
        assert [len(one.offsets) for one in two.asked(CommitOffsets)] == [2, 1]


def test_async_commits_keep_their_order_and_go_together(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    fake.write("t", numbers(0, 100))
    with cluster.consumer("t", group="g", max_poll_records=10, **FAST) as consumer:
        slow = fake.fault(CommitOffsets, times=1, is_held=True)
        futures = []
        for _ in range(10):
            read(consumer, 10, max_records=10)
            futures.append(consumer.commit_async())
        fake.release(slow)
        consumer.commit({T0: 50})
        for future in futures:
            assert future.result(30) is None
        assert fake.groups.committed("t", 0) == 50
        sequences = [one.sequence for one in fake.asked(CommitOffsets)]
        assert sequences == sorted(sequences) and len(sequences) < 11


def test_close_waits_for_async_commits(two: FakeCluster, cluster: Cluster) -> None:
    consumer = cluster.consumer("t", group="g", **FAST)
    read(consumer, 20)
    two.fault(CommitOffsets, times=1, delay_s=0.2)
    future = consumer.commit_async()
    consumer.close()
    assert future.result(0) is None
    assert two.groups.committed("t", 1) == 10


# --- automatic commits ----------------------------------------------------------------------------


def test_auto_commit_takes_what_earlier_polls_returned(
    two: FakeCluster, cluster: Cluster, eventually: Eventually
) -> None:
    options = FAST | {"enable_auto_commit": True, "auto_commit_interval_ms": 50}
    with cluster.consumer("t", group="g", max_poll_records=20, **options) as consumer:
        read(consumer, 20)
        time.sleep(0.1)
        assert two.groups.committed("t") in (None, 0)  # the user is still busy with these

        def write_once_it_has_committed() -> None:
            eventually(lambda: two.groups.committed("t") == 10)
            two.write("t", [b"v"])

        writer = threading.Thread(target=write_once_it_has_committed)
        writer.start()
        assert len(consumer.poll(timeout_s=30)) == 1  # while it waited, it committed
        assert two.groups.committed("t") == 10
        writer.join()
    assert two.groups.committed("t") == 11


def test_auto_commit_commits_before_partitions_go(two: FakeCluster, cluster: Cluster) -> None:
    committed: list[int | None] = []
    options = FAST | {"enable_auto_commit": True}
    with cluster.consumer(
        "t",
        group="g",
        on_revoked=lambda _: committed.append(two.groups.committed("t", 1)),
        **options,
    ) as consumer:
        read(consumer, 20)
        two.groups.grant(("t", 0))
        poll_until(consumer, lambda: consumer.assignment() == {T0})
    assert committed[0] == 10


def test_close_waits_for_its_commit_no_longer_than_it_may(
    two: FakeCluster, cluster: Cluster
) -> None:
    options = FAST | {"enable_auto_commit": True, "group_session_timeout_ms": 20_000}
    consumer = cluster.consumer("t", group="g", **options)
    read(consumer, 20)
    two.fault(CommitOffsets, times=1000, error=CoordinatorLoadingError("not yet"))
    started = time.monotonic()
    consumer.close(timeout_s=0.2)
    assert time.monotonic() - started < 15


def test_leaving_that_takes_longer_than_close_may_is_said_all_the_same(
    two: FakeCluster, cluster: Cluster, eventually: Eventually
) -> None:
    options = FAST | {"group_session_timeout_ms": 20_000}
    consumer = cluster.consumer("t", group="g", **options)
    read(consumer, 20)
    two.fault(GroupHeartbeat, times=1000, error=CoordinatorLoadingError("not yet"))
    consumer.close(timeout_s=0.1)
    assert not two.groups.group().left
    two.clear_faults()
    eventually(lambda: len(two.groups.group().left) == 1)


def test_an_exception_in_the_handler_commits_nothing_more(
    two: FakeCluster, cluster: Cluster
) -> None:
    options = FAST | {"enable_auto_commit": True}

    def handle() -> None:
        with cluster.consumer("t", group="g", **options) as consumer:
            read(consumer, 20)
            raise ValueError("the handler failed")

    with pytest.raises(ValueError, match="handler"):
        handle()
    assert two.groups.committed("t") in (None, 0)
    assert len(two.groups.group().left) == 1


# --- without membership ---------------------------------------------------------------------------


def test_partitions_assigned_by_hand_resume_and_commit_without_membership(
    two: FakeCluster, cluster: Cluster
) -> None:
    two.groups.commit("t", 1, 6)
    with cluster.consumer(group="g", **FAST) as consumer:
        consumer.assign([T1])
        assert [record.offset for record in read(consumer, 4)] == [6, 7, 8, 9]
        consumer.commit()
        consumer.commit({T0: 2})
        assert two.groups.committed("t", 1) == 10 and two.groups.committed("t", 0) == 2
        two.fault(CommitOffsets, times=1, error=GroupNotEmptyError("it has members"))
        with pytest.raises(GroupNotEmptyError):
            consumer.commit({T0: 3})
    assert two.asked(GroupHeartbeat) == []


def test_a_position_assigned_by_hand_is_none_of_a_topic_that_was_created_again(
    two: FakeCluster, cluster: Cluster
) -> None:
    with cluster.consumer(group="g", **FAST) as consumer:
        consumer.assign([T1])
        assert len(read(consumer, 10)) == 10
        two.delete_topic("t")
        two.create_topic("t", partitions=2)
        with pytest.raises(UnknownTopicError, match="deleted"):
            poll_until(consumer, lambda: False)
        consumer.commit()
        assert two.groups.committed("t", 1) is None
        consumer.assign([T1])
        two.write("t", [b"of another topic"], 1)
        assert [(one.offset, one.value) for one in read(consumer, 1)] == [(0, b"of another topic")]
        consumer.commit()
        assert two.groups.committed("t", 1) == 1


def test_assigning_by_hand_leaves_the_group(two: FakeCluster, cluster: Cluster) -> None:
    told = Told()
    with cluster.consumer("t", group="g", **told.callbacks(), **FAST) as consumer:
        read(consumer, 20)
        consumer.commit()
        consumer.assign([T0])
        assert two.groups.group().members == {}
        assert told.calls[-1] == ("on_revoked", [T0, T1])
        assert consumer.assignment() == {T0}
        consumer.subscribe(["t"])
        poll_until(consumer, lambda: consumer.assignment() == {T0, T1})


# --- asyncio --------------------------------------------------------------------------------------


def test_the_async_consumer_does_the_same_and_awaits_its_callbacks(
    two: FakeCluster, cluster: Cluster
) -> None:
    calls: list[str] = []

    async def scenario() -> None:
        async def on_revoked(partitions: set[TopicPartition]) -> None:
            await consumer.commit()
            calls.append(f"revoked {len(partitions)}")

        consumer = cluster.async_consumer(
            "t",
            group="g",
            on_assigned=lambda partitions: calls.append(f"assigned {len(partitions)}"),
            on_revoked=on_revoked,
            **FAST,
        )
        async with consumer:
            records = []
            while len(records) < 20:
                records += await consumer.poll(timeout_s=1)
            assert await consumer.lag() == {T0: 0, T1: 0}
            await consumer.commit({T0: 4})
            assert await consumer.committed([T0, T1]) == {T0: 4, T1: None}
            await asyncio.to_thread(two.groups.grant, ("t", 1))
            while await consumer.assignment() != {T1}:
                await consumer.poll(timeout_s=0.02)
            await asyncio.to_thread(two.write, "t", [b"v"], 1)
            assert (await anext(consumer)).value == b"v"
            assert (await consumer.group_membership()).member_epoch > 0

    asyncio.run(scenario())
    assert calls == ["assigned 2", "revoked 1", "revoked 1"]
    assert two.groups.committed("t", 0) == 10 and two.groups.committed("t", 1) == 11
    assert len(two.groups.group().left) == 1


def test_async_commits_of_the_async_consumer_are_waited_for_by_close(
    two: FakeCluster, cluster: Cluster
) -> None:
    async def scenario() -> None:
        async with cluster.async_consumer("t", group="g", **FAST) as consumer:
            while not await consumer.assignment():
                await consumer.poll(timeout_s=0.02)
            two.fault(CommitOffsets, times=1, delay_s=0.2)
            first = await consumer.commit_async({T0: 4})
            second = await consumer.commit_async({T0: 5, T1: 6})
            assert not first.done()
        await first
        await second

    asyncio.run(scenario())
    assert two.groups.committed("t", 0) == 5 and two.groups.committed("t", 1) == 6


def test_a_cancelled_poll_begins_its_rebalance_again(two: FakeCluster, cluster: Cluster) -> None:
    async def scenario() -> None:
        told = Told()
        options = FAST | {"enable_auto_commit": True}
        async with cluster.async_consumer(
            "t", group="g", **told.callbacks(), **options
        ) as consumer:
            count = 0
            while count < 20:
                count += len(await consumer.poll(timeout_s=1))
            slow = two.fault(CommitOffsets, times=1, is_held=True)
            await asyncio.to_thread(two.groups.grant, ("t", 1))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.4):
                    while True:
                        await consumer.poll(timeout_s=0.02)
            assert await consumer.assignment() == {T0, T1}
            two.release(slow)
            while await consumer.assignment() != {T1}:
                await consumer.poll(timeout_s=0.02)
            assert told.calls == [("on_assigned", [T0, T1]), ("on_revoked", [T0])]

    asyncio.run(scenario())


def test_a_synchronous_consumer_takes_no_coroutines_as_callbacks(cluster: Cluster) -> None:
    async def on_lost(partitions: set[TopicPartition]) -> None:
        pass

    with pytest.raises(TypeError, match="plain functions"):
        cluster.consumer(group="g", on_lost=on_lost)
