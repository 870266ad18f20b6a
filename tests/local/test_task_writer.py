"""Batch writes: a task that runs again, or twice at once, does not write its rows again."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from rayq import OffsetRange, TopicPartition
from rayq.actors.replica.leader_transactions import LeaderTransactions
from rayq.batch import job_transaction
from rayq.batch.offset_ranges import snapshot
from rayq.batch.task_writer import (
    TaskWritten,
    begin_write,
    finish_write,
    job_for,
    write_task,
    writing,
)
from rayq.batch.write_job import WriteJob
from rayq.client.producing.partitioner import partition_of_key
from rayq.config import HOUR_MS
from rayq.errors import (
    AlreadyCommittedError,
    InvalidRequestError,
    NullKeyError,
    PartitionOfflineError,
    RecordTooLargeError,
    RewriteMismatchError,
    TransactionAbortedError,
    TransactionCommittedError,
    TransactionOutcomeUnknownError,
    UnknownTopicError,
)
from rayq.messages import SealPartition, SealPartitionResponse
from rayq.testing import LocalCluster
from tests.local.support import eventually, leader_of, read_all, values

NewTopic = Callable[..., str]


def numbered(count: int, first: int = 0, size: int = 100) -> pa.Table:
    """Rows `first` to `first + count`, each of about `size` bytes."""
    padding = b" " + b"x" * size
    return pa.table({"value": [b"%d" % number + padding for number in range(first, first + count)]})


def numbers(cluster: LocalCluster, topic: str) -> list[int]:
    return [int((value or b"").split(b" ")[0]) for value in values(read_all(cluster, topic))]


def test_rows_are_written_with_key_partition_time_and_headers(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    topic = new_topic(partitions=3)
    at = datetime(2026, 5, 1, tzinfo=UTC)
    headers = [("a", b"1"), ("b", b"2"), ("a", b"")]
    rows = pa.table(
        {
            "key": ["k", "k", None],
            "value": ["in", None, "zero"],
            "partition": pa.array([None, 2, 0], pa.int32()),
            "timestamp": pa.array([at, None, at], pa.timestamp("us", tz="UTC")),
            "headers": pa.array(
                [[{"name": name, "value": value} for name, value in headers], None, []],
                pa.list_(pa.struct([("name", pa.string()), ("value", pa.binary())])),
            ),
        }
    )
    job = begin_write(cluster, topic)
    written = write_task(cluster, job, 0, [rows])
    assert (written.records, written.repeated) == (3, 0)
    found = {(record.value, record.key): record for record in read_all(cluster, topic)}
    first = found[b"in", b"k"]
    assert first.partition == partition_of_key(b"k", 3), "as a producer chooses"
    assert (first.headers, first.timestamp_ms) == (headers, int(at.timestamp() * 1000))
    assert found[None, b"k"].partition == 2
    assert found[None, b"k"].timestamp_ms == job.timestamp_ms
    assert found[b"zero", None].partition == 0
    assert sum(one.end - one.start for one in written.ranges) == 3


def test_rows_without_a_key_spread_over_the_partitions_in_runs(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    topic = new_topic(partitions=2)
    write_task(None, begin_write(None, topic), 0, [numbered(10_000, size=10)])
    records = read_all(cluster, topic)
    assert sorted(numbers(cluster, topic)) == list(range(10_000))
    shares = [sum(record.partition == one for record in records) for one in (0, 1)]
    assert min(shares) > 4000


def test_a_task_that_runs_again_writes_nothing_again(cluster: LocalCluster, topic: str) -> None:
    job = begin_write(cluster, topic)
    first = write_task(cluster, job, 3, [numbered(50_000)])
    again = write_task(cluster, job, 3, [numbered(50_000)])
    assert (first.repeated, again.repeated) == (0, 50_000)
    assert first.ranges == again.ranges == [OffsetRange(topic, 0, 0, 50_000)]
    assert numbers(cluster, topic) == list(range(50_000))


def test_it_does_not_matter_how_the_rows_arrive(cluster: LocalCluster, topic: str) -> None:
    job = WriteJob(*json.loads(json.dumps(begin_write(cluster, topic))))
    rows = numbered(20_000)
    write_task(cluster, job, 0, [rows.slice(0, 7), rows.slice(7, 12_000), rows.slice(12_007)])
    again = write_task(cluster, job, 0, rows.to_batches(max_chunksize=333))
    assert again.repeated == 20_000
    assert numbers(cluster, topic) == list(range(20_000))


@pytest.mark.parametrize("fails_after", [1, 10_000, 49_999])
def test_an_attempt_that_failed_half_way_is_completed_by_the_next(
    cluster: LocalCluster, topic: str, fails_after: int
) -> None:
    def failing() -> Iterator[pa.Table]:
        yield numbered(fails_after)
        raise ZeroDivisionError

    job = begin_write(cluster, topic)
    with pytest.raises(ZeroDivisionError):
        write_task(cluster, job, 0, failing())
    write_task(cluster, job, 0, [numbered(50_000)])
    assert numbers(cluster, topic) == list(range(50_000))


def test_two_attempts_at_the_same_time_write_the_rows_once(
    cluster: LocalCluster, topic: str
) -> None:
    job = begin_write(cluster, topic)
    results: list[Any] = []

    def attempt(pieces: int) -> None:
        results.append(write_task(cluster, job, 0, numbered(60_000).to_batches(pieces)))

    threads = [threading.Thread(target=attempt, args=(size,)) for size in (60_000, 5_000, 700)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    assert sum(one.repeated for one in results) >= 2 * 60_000
    assert numbers(cluster, topic) == list(range(60_000))


def test_tasks_of_a_job_and_jobs_do_not_get_in_each_others_way(
    cluster: LocalCluster, topic: str
) -> None:
    for job in (begin_write(cluster, topic), begin_write(cluster, topic)):
        for task in (0, 1):
            write_task(cluster, job, task, [numbered(10)])
    assert numbers(cluster, topic) == [*range(10)] * 4, "another job is another write"


@pytest.mark.parametrize("different_from", [0, 15_000, 49_999])
def test_an_attempt_that_makes_other_rows_is_told_and_writes_none_of_them(
    cluster: LocalCluster, topic: str, different_from: int
) -> None:
    job = begin_write(cluster, topic)
    write_task(cluster, job, 0, [numbered(50_000)])
    other = [numbered(different_from), numbered(50_000 - different_from, first=100_000)]
    with pytest.raises(RewriteMismatchError, match=f"{topic}-0"):
        write_task(cluster, job, 0, other)
    assert numbers(cluster, topic) == list(range(50_000))


def test_an_attempt_with_fewer_or_more_rows_is_told_too(cluster: LocalCluster, topic: str) -> None:
    job = begin_write(cluster, topic)
    write_task(cluster, job, 0, [numbered(30_000)])
    for count in (10_001, 40_000):
        with pytest.raises(RewriteMismatchError):
            write_task(cluster, job, 0, [numbered(count)])
    assert numbers(cluster, topic) == list(range(30_000))


@pytest.mark.parametrize("count", [40, 98])
def test_an_attempt_that_ends_where_a_batch_of_the_earlier_one_ended_is_told(
    cluster: LocalCluster, topic: str, count: int
) -> None:
    job = begin_write(cluster, topic)._replace(batch_bytes=1)  # each row is a batch
    write_task(cluster, job, 0, [numbered(100)])
    write_task(cluster, job, 1, [numbered(1)])
    with pytest.raises(RewriteMismatchError, match=f"record {count} "):
        write_task(cluster, job, 0, [numbered(count)])


def test_an_old_job_is_looked_for_in_the_log_before_anything_is_sent(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    topic = new_topic(segment_bytes=100_000)
    job = begin_write(cluster, topic)
    old = job._replace(timestamp_ms=job.timestamp_ms - 2 * HOUR_MS)
    write_task(cluster, old, 0, [numbered(10_000)])
    assert write_task(cluster, old, 0, [numbered(10_000)]).repeated == 10_000
    assert numbers(cluster, topic) == list(range(10_000))


def test_what_expired_meanwhile_is_not_written_again(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    topic = new_topic()
    job = begin_write(cluster, topic)
    write_task(cluster, job, 0, [numbered(50_000)])
    cluster.admin.delete_records({TopicPartition(topic, 0): 40_000})
    assert write_task(cluster, job, 0, [numbered(50_000)]).repeated == 50_000
    assert numbers(cluster, topic) == list(range(40_000, 50_000))


def test_records_with_the_leaders_time_are_recognised(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    topic = new_topic(message_timestamp_type="append")
    job = begin_write(cluster, topic)
    for _ in range(2):
        write_task(cluster, job, 0, [numbered(100)])
    assert numbers(cluster, topic) == list(range(100))


def test_an_empty_task_writes_nothing(cluster: LocalCluster, topic: str) -> None:
    job = begin_write(cluster, topic)
    assert write_task(cluster, job, 0, []).ranges == []
    assert write_task(cluster, job, 1, [numbered(0)]).records == 0


@pytest.mark.parametrize(
    "rows",
    [
        pa.table({"key": [b"k"]}),
        pa.table({"value": [b"v"], "offset": [1]}),
        pa.table({"value": [1]}),
        pa.table({"value": [b"v"], "partition": ["0"]}),
        pa.table({"value": [b"v"], "partition": [7]}),
        pa.table({"value": [b"v"], "timestamp": ["now"]}),
        pa.table({"value": [b"v"], "timestamp": [-1]}),
        pa.table({"value": [b"v"], "headers": ["a"]}),
        pa.table({"value": [b"v"], "headers": [[{"name": "a", "value": None}]]}),
        b"v",
    ],
)
def test_rows_that_cannot_be_written_are_refused(
    cluster: LocalCluster, topic: str, rows: Any
) -> None:
    with pytest.raises(InvalidRequestError):
        write_task(cluster, begin_write(cluster, topic), 0, [rows])
    assert read_all(cluster, topic) == []


def test_a_task_number_below_zero_or_far_too_large_is_refused(
    cluster: LocalCluster, topic: str
) -> None:
    job = begin_write(cluster, topic)
    for task in (-1, 2**20, True, None):
        with pytest.raises(InvalidRequestError, match="numbered"):
            write_task(cluster, job, task, [])  # type: ignore[arg-type]


def test_what_a_leader_refuses_is_raised(cluster: LocalCluster, new_topic: NewTopic) -> None:
    compacted = new_topic(cleanup_policy="compact")
    with pytest.raises(NullKeyError):
        write_task(cluster, begin_write(cluster, compacted), 0, [numbered(5)])
    small = new_topic(max_message_bytes=1000)
    noise = pa.table({"value": [random.Random(1).randbytes(2000)]})
    with pytest.raises(RecordTooLargeError):
        write_task(cluster, begin_write(cluster, small), 0, [noise])
    with pytest.raises(UnknownTopicError):
        begin_write(cluster, "nosuch")


def test_a_topic_created_again_is_not_written_to_in_place_of_the_old_one(
    cluster: LocalCluster, topic: str
) -> None:
    job = begin_write(cluster, topic)
    cluster.admin.delete_topic(topic)
    with pytest.raises(UnknownTopicError):
        write_task(cluster, job, 0, [numbered(5)])
    cluster.create_topic(topic)
    with pytest.raises(UnknownTopicError):
        write_task(cluster, job, 0, [numbered(5)])
    assert read_all(cluster, topic) == []


def test_a_leader_that_dies_during_a_write_loses_and_doubles_nothing(fragile: LocalCluster) -> None:
    fragile.create_topic("t")
    job = begin_write(fragile, "t")

    def rows() -> Iterator[pa.Table]:
        for first in range(0, 100_000, 5_000):
            yield numbered(5_000, first)
            if first == 40_000:
                fragile.kill_broker(leader_of(fragile, "t"))

    write_task(fragile, job, 0, rows())
    assert numbers(fragile, "t") == list(range(100_000))


def test_a_partition_that_stays_offline_is_an_error_and_the_task_can_be_run_again(
    fragile: LocalCluster,
) -> None:
    fragile.create_topic("t", replication_factor=1)
    job = begin_write(fragile, "t")
    leader = leader_of(fragile, "t")
    fragile.kill_broker(leader)
    eventually(lambda: leader_is_gone(fragile), "the partition is offline")
    with pytest.raises(PartitionOfflineError, match="t-0"):
        write_task(fragile, job, 0, [numbered(100)], timeout_s=3)
    fragile.start_broker(leader)
    write_task(fragile, job, 0, [numbered(100)], timeout_s=60.0)
    assert numbers(fragile, "t") == list(range(100))


def leader_is_gone(cluster: LocalCluster) -> bool:
    return cluster.admin.describe_topic("t").partitions[0].leader is None


# --- the end of a job -----------------------------------------------------------------------------


def to_partition(partition: int, count: int = 3) -> pa.Table:
    return pa.table({"value": [b"v"] * count, "partition": pa.array([partition] * count)})


def finish(cluster: LocalCluster, job: WriteJob, *written: TaskWritten) -> None:
    finish_write(cluster, job, ((one.task, one.partitions) for one in written))


def test_a_job_whose_tasks_ran_again_ends_well(cluster: LocalCluster, new_topic: NewTopic) -> None:
    job = begin_write(cluster, new_topic(partitions=3))
    for _ in range(2):
        tasks = [write_task(cluster, job, task, [to_partition(task)]) for task in range(3)]
        finish(cluster, job, *tasks, write_task(cluster, job, 3, []))
    assert [one.repeated for one in tasks] == [3, 3, 3]
    assert len(read_all(cluster, job.topic)) == 9


def test_an_attempt_that_wrote_to_another_partition_is_told_at_the_end(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    job = begin_write(cluster, new_topic(partitions=3))
    write_task(cluster, job, 0, [to_partition(0)])
    again = write_task(cluster, job, 0, [to_partition(1)])
    with pytest.raises(RewriteMismatchError, match=rf"task 0 of this job wrote to {job.topic}-0"):
        finish(cluster, job, again)


def test_a_job_that_is_divided_into_fewer_tasks_is_told_at_the_end(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    job = begin_write(cluster, new_topic(partitions=1))
    for task in range(2):
        write_task(cluster, job, task, [to_partition(0)])
    again = begin_write(cluster, job.topic)  # another job must not matter
    finish(cluster, again, write_task(cluster, again, 0, [to_partition(0)]))
    with pytest.raises(RewriteMismatchError, match="task 1 of this job"):
        finish(cluster, job, write_task(cluster, job, 0, [to_partition(0)]))


def test_headers_that_are_all_empty_are_none(cluster: LocalCluster, topic: str) -> None:
    rows = pa.table({"value": [b"a", b"b"], "headers": pa.array([[], []])})
    write_task(cluster, begin_write(cluster, topic), 0, [rows])
    assert [record.headers for record in read_all(cluster, topic)] == [[], []]


# --- jobs that are transactions -------------------------------------------------------------------


def begin_atomic(cluster: LocalCluster, topic: str, name: str | None = None) -> WriteJob:
    return begin_write(cluster, topic, transactional_id=f"job of {topic}", name=name)


def test_all_rows_of_a_transaction_become_visible_at_its_end(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    topic = new_topic(partitions=3)
    job = WriteJob(*json.loads(json.dumps(begin_atomic(cluster, topic))))
    with writing(cluster, job):
        tasks = [write_task(cluster, job, task, [to_partition(task % 3)]) for task in range(7)]
        assert read_all(cluster, topic) == []
        finish(cluster, job, *tasks, write_task(cluster, job, 7, []))
    assert len(read_all(cluster, topic)) == 21
    ends = [one.end for one in snapshot(cluster, topic, ending_offsets="latest")]
    assert sum(ends) == 21 + 3, "one marker in each partition, however many tasks"


def test_a_transaction_without_rows_commits(cluster: LocalCluster, topic: str) -> None:
    job = begin_atomic(cluster, topic, "n")
    with writing(cluster, job):
        finish(cluster, job, write_task(cluster, job, 0, []))
    with pytest.raises(AlreadyCommittedError):
        begin_atomic(cluster, topic, "n")


def test_attempts_of_a_transaction_write_their_rows_once(cluster: LocalCluster, topic: str) -> None:
    job = begin_atomic(cluster, topic)

    def failing() -> Iterator[pa.Table]:
        yield numbered(30_000)
        raise ZeroDivisionError

    with writing(cluster, job):
        with pytest.raises(ZeroDivisionError):
            write_task(cluster, job, 0, failing())
        write_task(cluster, job, 0, [numbered(50_000)])
        again = write_task(cluster, job, 0, [numbered(50_000)])
        assert again.repeated == 50_000
        finish(cluster, job, again)
    assert numbers(cluster, topic) == list(range(50_000))


def test_an_exception_in_a_transaction_leaves_nothing_visible(
    cluster: LocalCluster, topic: str
) -> None:
    job = begin_atomic(cluster, topic)
    with pytest.raises(ZeroDivisionError), writing(cluster, job):
        write_task(cluster, job, 0, [numbered(10)])
        raise ZeroDivisionError
    assert read_all(cluster, topic) == []

    def is_refused() -> bool:
        try:
            write_task(cluster, job, 0, [numbered(10)])
        except TransactionAbortedError:
            return True
        return False

    # Until the marker is in the partition, its leader takes these batches for repeated ones.
    eventually(is_refused, "the task is refused")
    with pytest.raises(TransactionAbortedError):
        finish(cluster, job)


def test_what_the_tasks_did_not_report_keeps_a_transaction_from_committing(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    topic = new_topic(partitions=2)
    reports: list[Callable[[WriteJob], list[TaskWritten]]] = [
        lambda job: [write_task(cluster, job, 1, [to_partition(1)])],  # Task 0 is forgotten.
        lambda job: [write_task(cluster, job, 0, [to_partition(1)])],  # It wrote elsewhere before.
        lambda job: [
            write_task(cluster, job, 0, [to_partition(0)])._replace(partitions={0: 4}),
        ],
    ]
    for report in reports:
        job = begin_atomic(cluster, topic)
        with pytest.raises(RewriteMismatchError, match="Task 0"), writing(cluster, job):
            write_task(cluster, job, 0, [to_partition(0)])
            finish(cluster, job, *report(job))
    assert read_all(cluster, topic) == []


def test_a_task_that_outlives_its_transaction_adds_nothing(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    topic = new_topic(partitions=2)
    job = begin_atomic(cluster, topic)
    client, background = cluster.shared_client()
    transaction = job.transaction(client, 60.0)
    assert transaction is not None
    with writing(cluster, job):
        task = write_task(cluster, job, 0, [to_partition(0)])
        assert background.run(transaction.seal(topic)) == {0: {0: 3}}
        for partition in range(2):  # One has joined, the other never did.
            with pytest.raises(TransactionOutcomeUnknownError, match="driver ends it just now"):
                write_task(cluster, job, 1, [to_partition(partition)])
        finish(cluster, job, task)
    with pytest.raises(TransactionCommittedError, match="a late copy of a task"):
        write_task(cluster, job, 1, [to_partition(1)])
    with pytest.raises(TransactionCommittedError), writing(cluster, job):
        raise ValueError("the driver fails after its job")
    assert len(read_all(cluster, topic)) == 3


def test_a_seal_outlives_the_leader_of_a_partition(fragile: LocalCluster) -> None:
    fragile.create_topic("t")
    job = begin_atomic(fragile, "t")
    client, background = fragile.shared_client()
    transaction = job.transaction(client, 60.0)
    assert transaction is not None
    with writing(fragile, job):
        task = write_task(fragile, job, 0, [to_partition(0)])
        assert background.run(transaction.seal("t")) == {0: {0: 3}}
        fragile.kill_broker(leader_of(fragile, "t"))
        with pytest.raises(TransactionOutcomeUnknownError):
            write_task(fragile, job, 1, [to_partition(0)])
        finish(fragile, job, task)
    assert len(read_all(fragile, "t")) == 3


def test_what_a_leader_says_that_was_replaced_does_not_count(
    cluster: LocalCluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[SealPartition] = []
    seal = LeaderTransactions.seal

    def with_an_older_first(leader: LeaderTransactions, request: SealPartition) -> Any:
        asked.append(request)
        if len(asked) == 1:  # It lacks what its successor has.
            return SealPartitionResponse([], request.leader_epoch - 1)
        return seal(leader, request)

    monkeypatch.setattr(LeaderTransactions, "seal", with_an_older_first)
    job = begin_atomic(cluster, topic)
    with writing(cluster, job):
        finish(cluster, job, write_task(cluster, job, 0, [numbered(10)]))
    assert len(asked) == 2
    assert numbers(cluster, topic) == list(range(10))


def test_a_job_with_a_name_commits_once(cluster: LocalCluster, topic: str) -> None:
    kept = begin_atomic(cluster, topic, "monday")
    for _ in range(2):  # The first run dies.
        job = job_for(cluster, topic, kept, atomic=True, timeout_s=60.0)
        task = write_task(cluster, job, 0, [numbered(10)])
    with pytest.raises(TransactionAbortedError):
        finish(cluster, kept)
    finish(cluster, job, task)
    assert numbers(cluster, topic) == list(range(10))
    with pytest.raises(AlreadyCommittedError):
        job_for(cluster, topic, kept, atomic=False, timeout_s=60.0)
    with pytest.raises(AlreadyCommittedError):
        begin_atomic(cluster, topic, "monday")
    begin_atomic(cluster, topic, "tuesday")


def test_jobs_that_are_no_transactions_are_not_taken_for_some(
    cluster: LocalCluster, topic: str
) -> None:
    with pytest.raises(InvalidRequestError, match="not a transaction"):
        job_for(cluster, topic, begin_write(cluster, topic), atomic=True, timeout_s=60.0)
    with pytest.raises(InvalidRequestError, match="transactional_id"):
        begin_write(cluster, topic, name="n")
    for wrong in ({"transactional_id": ""}, {"transactional_id": "i", "name": "x" * 257}):
        with pytest.raises(InvalidRequestError, match="256 characters"):
            begin_write(cluster, topic, **wrong)


def test_a_transaction_is_kept_open_while_its_driver_lives(
    cluster: LocalCluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_transaction, "TRANSACTION_TIMEOUT_MS", 1000)
    monkeypatch.setattr(job_transaction, "TOUCH_INTERVAL_S", 0.1)
    left = begin_write(cluster, topic, transactional_id=f"left of {topic}")
    write_task(cluster, left, 0, [numbered(10)])
    job = begin_atomic(cluster, topic)
    with writing(cluster, job):
        task = write_task(cluster, job, 0, [numbered(10)])
        # What nobody keeps open ends after its second, which has begun before that of the job.
        eventually(lambda: state_of(cluster, left) == "ready", "the other is aborted")
        assert state_of(cluster, job) == "open"
        finish(cluster, job, task)
    assert numbers(cluster, topic) == list(range(10))


def state_of(cluster: LocalCluster, job: WriteJob) -> str:
    assert job.transactional_id is not None
    return cluster.admin.describe_transaction(job.transactional_id).transactions[0].state
