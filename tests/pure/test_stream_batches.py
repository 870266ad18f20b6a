"""The offsets that the batches of a streaming query read, whatever the log does and wherever the
query dies."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayq.batch.offset_ranges import Split
from rayq.errors import (
    CheckpointDamagedError,
    CheckpointMismatchError,
    InvalidRequestError,
)
from rayq.records import TopicPartition
from rayq.spark.batches import (
    MicroBatch,
    QueryProgress,
    Resumption,
    after,
    next_batch,
    resume,
    with_topics,
)
from rayq.spark.trigger import Trigger, parse_trigger

TOPIC, TOPIC_ID = "flights", "a" * 32


def at(partition: int, start: int, end: int | None = None, topic_id: str = TOPIC_ID) -> Split:
    return Split(TOPIC, topic_id, partition, start, start if end is None else end)


def place(partition: int) -> TopicPartition:
    return TopicPartition(TOPIC, partition)


def decide(available: list[Split], *, batch_id: int = 0, **options: object) -> MicroBatch | None:
    progress = QueryProgress(batch_id, [one._replace(end=one.start) for one in available])
    return next_batch(progress, available, now_ms=1, **options)  # type: ignore[arg-type]


def ranges_of(batch: MicroBatch | None) -> list[tuple[int, int, int]]:
    assert batch is not None
    return [(one.partition, one.start, one.end) for one in batch.ranges]


# --- one batch ------------------------------------------------------------------------------------


def test_without_a_limit_a_batch_is_all_there_is() -> None:
    assert ranges_of(decide([at(1, 5, 9), at(0, 0, 7)])) == [(0, 0, 7), (1, 5, 9)]


def test_nothing_new_is_no_batch() -> None:
    assert decide([at(0, 7, 7), at(1, 0, 0)]) is None


def test_a_batch_names_the_partitions_it_reads_nothing_of() -> None:
    assert ranges_of(decide([at(0, 7, 7), at(1, 0, 3)])) == [(0, 7, 7), (1, 0, 3)]


def test_a_limit_is_shared_in_proportion() -> None:
    shares = ranges_of(decide([at(0, 0, 100), at(1, 50, 350)], offsets_max=40))
    assert shares == [(0, 0, 10), (1, 50, 80)]


def test_partitions_take_turns_where_the_limit_is_below_their_number() -> None:
    positions = dict.fromkeys(range(5), 0)
    for batch_id in range(5):
        available = [at(partition, start, 1_000) for partition, start in positions.items()]
        batch = decide(available, batch_id=batch_id, offsets_max=2)
        assert batch is not None and batch.offsets == 2
        positions = {one.partition: one.end for one in batch.ranges}
    assert set(positions.values()) == {2}


@given(
    sizes=st.lists(st.integers(0, 10**6), min_size=1, max_size=12),
    offsets_max=st.integers(1, 10**6),
    batch_id=st.integers(0, 10**6),
)
def test_a_limit_is_used_up_and_kept(sizes: list[int], offsets_max: int, batch_id: int) -> None:
    available = [at(number, 3, 3 + size) for number, size in enumerate(sizes)]
    batch = decide(available, batch_id=batch_id, offsets_max=offsets_max)
    assert batch == decide(available, batch_id=batch_id, offsets_max=offsets_max)
    if batch is None:
        assert sum(sizes) == 0
        return
    assert batch.offsets == min(sum(sizes), offsets_max)
    for one, whole in zip(batch.ranges, available, strict=True):
        assert whole.start == one.start <= one.end <= whole.end
    filled = sum(size > 0 for size in sizes)
    if filled <= offsets_max:
        assert sum(not one.is_empty for one in batch.ranges) == filled, "nobody starves"


def test_a_snapshot_is_not_passed_and_newer_partitions_wait() -> None:
    available = [at(0, 5, 20), at(1, 9, 30), at(2, 4, 8)]
    until = {place(0): 12, place(1): 7}
    assert ranges_of(decide(available, until=until)) == [(0, 5, 12), (1, 9, 9), (2, 4, 4)]


def test_a_log_that_ends_before_the_position_is_news() -> None:
    progress = QueryProgress(3, [at(0, 10), at(1, 4)])
    batch = next_batch(progress, [at(0, 6, 6), at(1, 4, 4)], offsets_max=5, now_ms=1)
    assert ranges_of(batch) == [(0, 6, 6), (1, 4, 4)], "so the next start knows it too"
    assert batch is not None
    assert next_batch(after(batch), [at(0, 6, 6), at(1, 4, 4)], now_ms=1) is None
    expired = [at(0, 12, 12), at(1, 4, 4)]
    assert next_batch(progress, expired, now_ms=1) is None, "nothing more can get lost"


def test_a_topic_made_again_is_refused() -> None:
    progress = QueryProgress(3, [at(0, 5)])
    with pytest.raises(CheckpointMismatchError, match="deleted and created again"):
        next_batch(progress, [at(0, 5, 9, topic_id="b" * 32)], now_ms=1)


# --- a start --------------------------------------------------------------------------------------

START = [at(0, 2), at(1, 0)]
BATCH = MicroBatch(4, 1, [at(0, 10, 20), at(1, 7, 7)])


def test_a_new_query_begins_at_its_starting_positions() -> None:
    assert resume(START, None, None) == Resumption(None, QueryProgress(0, START))


def test_a_committed_batch_is_followed_by_the_next() -> None:
    assert resume(START, BATCH, 4) == Resumption(None, QueryProgress(5, [at(0, 20), at(1, 7)]))


def test_a_batch_without_a_commit_is_run_again_as_it_stands() -> None:
    assert resume(START, BATCH, 3) == Resumption(BATCH, QueryProgress(5, [at(0, 20), at(1, 7)]))
    first = MicroBatch(0, 1, BATCH.ranges)
    assert resume(START, first, None).replay == first


def test_what_was_deleted_is_left_out_of_a_start() -> None:
    other = Split("delays", "d" * 32, 0, 3, 8)
    batch = MicroBatch(4, 1, [other, at(0, 10, 20)])
    found = resume([], batch, 3)
    assert with_topics(found, {"delays", "flights", "new"}) == found
    assert with_topics(found, {"flights"}) == Resumption(
        MicroBatch(4, 1, [at(0, 10, 20)]), QueryProgress(5, [at(0, 20)])
    )
    assert with_topics(resume([], batch, 4), {"flights"}) == Resumption(
        None, QueryProgress(5, [at(0, 20)])
    )


@pytest.mark.parametrize("written, committed", [(None, 0), (BATCH, 5), (BATCH, 2), (BATCH, None)])
def test_a_commit_that_fits_no_batch_is_damage(written: MicroBatch | None, committed: int) -> None:
    with pytest.raises(CheckpointDamagedError):
        resume(START, written, committed)


# --- a query that dies anywhere -------------------------------------------------------------------


@dataclass
class Query:
    """The state that a query leaves on disk, and what it did. It dies after any of its steps."""

    start: list[Split]
    written: MicroBatch | None = None
    committed: int | None = None
    runs: list[MicroBatch] = field(default_factory=list)

    def run(self, log: dict[int, list[int]], steps: int, offsets_max: int | None) -> None:
        """One process of the query, which ends after so many steps. `log`: partition to [start,
        end]."""
        found = resume(self.start, self.written, self.committed)
        progress = found.progress
        replay = found.replay
        while steps:
            if replay is None:
                positions = progress.offsets
                available = [
                    at(partition, positions.get(place(partition), first), end)
                    for partition, (first, end) in log.items()
                ]
                replay = next_batch(progress, available, offsets_max=offsets_max, now_ms=steps)
                if replay is None:
                    return
                self.written = replay
                progress = after(replay)
            elif self.runs and self.runs[-1] == replay and self._ran_now:
                self.committed = replay.batch_id
                replay = None
                self._ran_now = False
            else:
                self.runs.append(replay)
                self._ran_now = True
            steps -= 1
        self._ran_now = False

    _ran_now: bool = False


happenings = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 3), st.integers(1, 50)),
        st.tuples(st.just("run"), st.integers(1, 12), st.none() | st.integers(1, 30)),
        st.tuples(st.just("partition"), st.integers(0, 5), st.integers(0, 20)),
    ),
    max_size=40,
)


@settings(max_examples=150)
@given(happenings)
def test_wherever_a_query_dies_it_runs_the_same_batches_and_none_is_left_out(
    happened: list[tuple[str, int, int | None]],
) -> None:
    log = {0: [2, 10], 1: [0, 0]}
    query = Query([at(0, 2), at(1, 0)])
    for what, first, second in happened:
        if what == "append":
            log[first % len(log)][1] += second or 0
        elif what == "partition" and len(log) < 4:
            log[len(log)] = [first, first + (second or 0)]
        elif what == "run":
            query.run(log, first, second)
    query.run(log, 10_000, None)

    by_id: dict[int, MicroBatch] = {}
    for batch in query.runs:
        assert by_id.setdefault(batch.batch_id, batch) == batch, "a batch id is one set of ranges"
    ids = [batch.batch_id for batch in query.runs]
    assert ids == sorted(ids) and set(ids) == set(range(len(by_id)))
    reads: dict[int, list[tuple[int, int]]] = {partition: [] for partition in log}
    for batch_id in sorted(by_id):
        for one in by_id[batch_id].ranges:
            reads[one.partition].append((one.start, one.end))
    for partition, (first, end) in log.items():
        position = first
        for start, stop in reads[partition]:
            assert start == position, "neither a gap nor an overlap"
            position = stop
        assert position == end, "all of it"
    assert query.committed == (max(by_id) if by_id else None)
    assert all(count >= 1 for count in Counter(ids).values())


# --- triggers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, seconds",
    [
        ("5 seconds", 5),
        ("1 second", 1),
        ("500 milliseconds", 0.5),
        ("250ms", 0.25),
        ("1 minute 30 seconds", 90),
        ("2 Hours", 7200),
        ("0.5 s", 0.5),
        ("0 seconds", 0),
        ("10 min", 600),
    ],
)
def test_intervals_are_written_as_for_spark(text: str, seconds: float) -> None:
    assert parse_trigger(text) == Trigger(seconds)


def test_the_other_triggers() -> None:
    assert parse_trigger(None) == Trigger(0)
    assert parse_trigger("available_now") == Trigger(0, drains=True)


@pytest.mark.parametrize(
    "text", ["", "5", "seconds", "5 parsecs", "-1 seconds", "5 seconds ago", 5]
)
def test_what_is_no_trigger_says_what_would_be(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="5 seconds"):
        parse_trigger(text)


def test_a_trigger_looks_again_an_interval_after_the_last_look_began() -> None:
    every_5_s = Trigger(5)
    assert every_5_s.next_s(100, 101, found_any=True) == 105
    assert every_5_s.next_s(100, 112, found_any=True) == 112
    assert Trigger(0).next_s(100, 101, found_any=True) == 101
    assert Trigger(0).next_s(100, 101, found_any=False) > 101
