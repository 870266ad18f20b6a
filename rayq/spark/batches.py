"""Offsets of micro-batches of a streaming query. The decision is pure: the checkpoint and the log
come in as values.

A batch is decided once, and written ahead under its id. From then on the written batch counts:
after a crash the batch without a commit is run again as it was written, whatever the log holds by
then. So a sink that keeps one result for each batch id has every record once.

A batch has a range for each partition of the query, even for partitions of which it reads nothing.
The next batch needs nothing else to continue: batches follow each other without a gap and without
an overlap. There are two exceptions, for which `fail_on_data_loss=False` is needed. If the log has
lost records, the next batch begins where the log starts, or where it ends. And a start leaves
deleted topics out of the batch that it runs again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from rayq.batch.offset_ranges import Split, limit_ranges
from rayq.errors import CheckpointDamagedError, CheckpointMismatchError
from rayq.records import TopicPartition


class MicroBatch(msgspec.Struct, frozen=True):
    """A micro-batch as it is written ahead: one range for every partition of the query, sorted by
    topic and partition. Some ranges may be empty. All are empty only where the log ended before the
    query's position: so the query also reads, after a restart too, what is appended there later."""

    batch_id: int
    timestamp_ms: int
    """The time of the decision."""
    ranges: list[Split]

    @property
    def offsets(self) -> int:
        """The number of offsets. In a compacted log some of them have no record."""
        return sum(split.offsets for split in self.ranges)


class QueryProgress(msgspec.Struct, frozen=True):
    """The position of a query: where the batch `next_id` begins, as empty ranges."""

    next_id: int
    positions: list[Split]

    @property
    def offsets(self) -> dict[TopicPartition, int]:
        return {split.place: split.start for split in self.positions}


class Resumption(msgspec.Struct, frozen=True):
    """The state at a start: the batch to run again, if one has no commit, and the position at which
    to continue."""

    replay: MicroBatch | None
    progress: QueryProgress


def resume(start: Sequence[Split], written: MicroBatch | None, committed: int | None) -> Resumption:
    """The resumption of a query from its starting positions `start`, its last written batch, and
    the id of its last committed batch. Raises CheckpointDamagedError if these contradict each
    other."""
    if written is None:
        if committed is not None:
            raise CheckpointDamagedError(
                f"Batch {committed} is committed, but no offsets of any batch are there."
            )
        return Resumption(None, QueryProgress(0, _ends(start)))
    if committed not in (written.batch_id, written.batch_id - 1 if written.batch_id else None):
        last = "none" if committed is None else f"batch {committed}"
        raise CheckpointDamagedError(
            f"The last offsets are those of batch {written.batch_id}, the last commit is {last}: "
            "the commit has to be of the same batch or of the one before."
        )
    replay = None if committed == written.batch_id else written
    return Resumption(replay, after(written))


def after(batch: MicroBatch) -> QueryProgress:
    """The position after a batch."""
    return QueryProgress(batch.batch_id + 1, _ends(batch.ranges))


def _ends(ranges: Iterable[Split]) -> list[Split]:
    return [split._replace(start=split.end) for split in ranges]


def with_topics(found: Resumption, topics: Collection[str]) -> Resumption:
    """The resumption without the topics that are not in `topics`."""

    def left(ranges: Iterable[Split]) -> list[Split]:
        return [split for split in ranges if split.topic in topics]

    replay, progress = found.replay, found.progress
    return Resumption(
        None
        if replay is None
        else MicroBatch(replay.batch_id, replay.timestamp_ms, left(replay.ranges)),
        QueryProgress(progress.next_id, left(progress.positions)),
    )


def next_batch(
    progress: QueryProgress,
    available: Sequence[Split],
    *,
    offsets_max: int | None = None,
    until: Mapping[TopicPartition, int] | None = None,
    now_ms: int,
) -> MicroBatch | None:
    """The next batch. None while there is nothing new: no offsets to read, and no log that ends
    before the query's position.

    `available` has for every partition of the present topics the range from the query's position
    to the end; the range of a new partition begins at the log's start. The batch does not pass the
    ends in `until`, and reads nothing of a partition without an end there. `offsets_max` offsets
    are shared out in proportion to the ranges, at least one to each partition; where there are too
    few offsets for that, the partitions take turns.
    """
    check_same_topics(progress.positions, available)
    ranges = sorted(available)
    if until is not None:
        ranges = [_until(split, until.get(split.place)) for split in ranges]
    if offsets_max is not None:
        ranges = _share(ranges, offsets_max, progress.next_id)
    positions = progress.offsets
    moved_back = any(split.start < positions.get(split.place, split.start) for split in ranges)
    if all(split.is_empty for split in ranges) and not moved_back:
        return None
    return MicroBatch(progress.next_id, now_ms, ranges)


def _until(split: Split, end: int | None) -> Split:
    return split._replace(end=split.start if end is None else max(split.start, min(split.end, end)))


def _share(ranges: list[Split], offsets_max: int, batch_id: int) -> list[Split]:
    """The ranges, cut to `offsets_max` in all. The same arguments give the same ranges."""
    filled = [split for split in ranges if not split.is_empty]
    if len(filled) <= offsets_max:
        return limit_ranges(ranges, offsets_max)
    first = batch_id * offsets_max
    turn = {filled[(first + number) % len(filled)].place for number in range(offsets_max)}
    return [split._replace(end=split.start + (split.place in turn)) for split in ranges]


def check_same_topics(known: Iterable[Split], found: Iterable[Split]) -> None:
    """Raises CheckpointMismatchError if a topic of the query was deleted and created again."""
    ids = {split.topic: split.topic_id for split in known}
    for split in found:
        expected = ids.get(split.topic, split.topic_id)
        if expected != split.topic_id:
            raise CheckpointMismatchError(
                f"Topic {split.topic!r} was deleted and created again: the checkpoint is of the "
                f"topic with id {expected}, now there is {split.topic_id}. Read the new one with a "
                "new checkpoint."
            )
