"""Offset ranges that a batch job reads, fixed once on the driver and cut into splits.

A job that looks for "latest" in each of its tasks reads a state that the log never had. Here
`snapshot` asks for every bound once and returns plain values, so that tasks, retries of tasks and a
checkpoint all mean the same records. `rayq.batch.transaction_cut` says which transactions they
leave out.
"""

from __future__ import annotations

import heapq
import logging
import operator
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, Literal, NamedTuple, SupportsIndex, TypeVar

from rayq.batch.job_partition import JobPartition
from rayq.batch.taking_cuts import take_cut, together
from rayq.batch.transaction_cut import Cut
from rayq.client.client import Client
from rayq.client.cluster import Cluster
from rayq.client.consuming.group_consumer import pattern_text
from rayq.client.timeouts import seconds
from rayq.core.groups import topic_pattern
from rayq.errors import (
    InvalidRequestError,
    OffsetOutOfRangeError,
    UnknownTopicError,
)
from rayq.messages import EARLIEST, DescribeOpenTransactionsResponse
from rayq.records import OffsetRange, TopicPartition

logger = logging.getLogger(__name__)
T = TypeVar("T")

PartitionOffset = int | Literal["earliest", "latest", "last_stable"]
Offsets = (
    Literal["earliest", "latest", "last_stable"]
    | Mapping[TopicPartition, PartitionOffset]
    | Mapping[str, Mapping[int, PartitionOffset] | Mapping[str, PartitionOffset]]
)
"""A bound: one word for all partitions, or a value for each, by `TopicPartition` or nested as
`{topic: {partition: value}}`. Partitions may be decimal strings, as in JSON."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
Time = int | datetime
"""Unix time in milliseconds, or a datetime with a time zone."""
Times = Mapping[TopicPartition, Time] | Mapping[str, Mapping[int, Time] | Mapping[str, Time]]

_DIGITS = re.compile("[0-9]{1,9}")


class Split(NamedTuple):
    """The records of one partition with offsets `start <= offset < end`, of the topic with this id:
    a topic that was deleted and created again under the same name is another one."""

    topic: str
    topic_id: str
    partition: int
    start: int
    end: int
    without: tuple[tuple[int, int], ...] | None = None
    """`(family, epoch)` of the transactions whose records are left out, whatever their outcome.
    None: reading waits until every transaction with records in the range is decided."""

    @property
    def place(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)

    @property
    def range(self) -> OffsetRange:
        return OffsetRange(self.topic, self.partition, self.start, self.end)

    @property
    def offsets(self) -> int:
        """The number of offsets. In a compacted log fewer of them may hold a record."""
        return self.end - self.start

    @property
    def is_empty(self) -> bool:
        return self.start >= self.end


# --- the snapshot ---------------------------------------------------------------------------------


def snapshot(
    cluster: Cluster | None,
    topics: str | Iterable[str] = (),
    *,
    pattern: str | re.Pattern[str] | None = None,
    starting_offsets: Offsets = "earliest",
    ending_offsets: Offsets = "latest",
    starting_timestamp: Time | None = None,
    starting_timestamps: Times | None = None,
    ending_timestamp: Time | None = None,
    ending_timestamps: Times | None = None,
    new_partitions: Literal["error", "earliest"] = "error",
    fail_on_data_loss: bool = True,
    timeout_s: float = 60.0,
) -> list[Split]:
    """Returns the present ranges to read: one `Split` for every partition of the topics (for an
    empty one `start == end`), sorted by topic and partition. Call it once for each job, on the
    driver.

    Give `topics` by name, or a `pattern` that their whole names match (see `Consumer.subscribe`).
    "latest" is the current high watermark; of each transaction all records are read, or none: a
    transaction that is not decided by then is left out. To continue where a job ended, end each job
    at "last_stable", which is below the first undecided transaction. A mapping of offsets or times
    has to name every partition; with `new_partitions="earliest"` those missing in
    `starting_offsets` begin at their log start. A time stands for the first record at or after it,
    and for the end if no record is that late. A start by time and an end by offset (or the other
    way round) that cross are an empty range. Below an end by offset or time, readers wait for
    undecided transactions. `cluster`: None means the process's current one.

    An offset below the log start (expired, or deleted) or above the end raises
    `OffsetOutOfRangeError`; with `fail_on_data_loss=False` it is logged, and the rest is read.

    Raises InvalidRequestError (nothing to read from, two kinds of start or end, an end before its
    start, a partition that is missing in a mapping or does not exist), UnknownTopicError (also for
    a pattern that matches nothing), PartitionOfflineError and TimeoutError (a leader could not be
    asked for `timeout_s` seconds), TransactionLimitError.
    """
    if new_partitions not in ("error", "earliest"):
        raise InvalidRequestError(
            f'new_partitions is "error" or "earliest", not {new_partitions!r}.'
        )
    if type(fail_on_data_loss) is not bool:  # "false" would count as True
        raise InvalidRequestError(f"fail_on_data_loss must be a bool, not {fail_on_data_loss!r}.")
    if type(timeout_s) not in (int, float) or not timeout_s > 0:
        raise InvalidRequestError(
            f"timeout_s must be a number of seconds above 0, not {timeout_s!r}."
        )
    timeout_s = seconds(timeout_s)
    names = [topics] if isinstance(topics, str) else list(topics)
    if bool(names) == (pattern is not None):
        raise InvalidRequestError("Give the topics to read by name, or a pattern; one of the two.")
    start = _Bound(
        "starting", starting_offsets, "earliest", starting_timestamp, starting_timestamps
    )
    end = _Bound("ending", ending_offsets, "latest", ending_timestamp, ending_timestamps)
    client, background = (cluster or Cluster.current()).shared_client()
    return background.run(
        _snapshot(
            client,
            names,
            None if pattern is None else pattern_text(pattern),
            start=start,
            end=end,
            new_from_start=new_partitions == "earliest",
            fail_on_data_loss=fail_on_data_loss,
            timeout_s=timeout_s,
        )
    )


class _At(NamedTuple):
    """One bound of one partition: an offset, "earliest" or "latest", or a time."""

    offset: PartitionOffset | None
    timestamp_ms: int | None = None

    def __str__(self) -> str:
        if self.timestamp_ms is not None:
            return f"time {self.timestamp_ms} ms"
        return f"offset {self.offset}" if isinstance(self.offset, int) else repr(self.offset)


class _Bound:
    """The start or the end of ranges, as the caller gave it."""

    def __init__(
        self,
        side: str,
        offsets: Offsets,
        default: str,
        timestamp: Time | None,
        timestamps: Times | None,
    ) -> None:
        given = [offsets != default, timestamp is not None, timestamps is not None]
        if sum(given) > 1:
            raise InvalidRequestError(
                f"Give one of {side}_offsets, {side}_timestamp and {side}_timestamps."
            )
        self.side = side
        self._everywhere: _At | None = None
        self._values: dict[TopicPartition, _At] | None = None
        if timestamp is not None:
            self._everywhere = _At(None, _time_ms(f"{side}_timestamp", timestamp))
        elif timestamps is not None:
            what = f"{side}_timestamps"
            self._values = {
                place: _At(None, _time_ms(what, value))
                for place, value in _flat(what, timestamps).items()
            }
        elif isinstance(offsets, str):
            self._everywhere = self._at(offsets)
        else:
            flat = _flat(f"{side}_offsets", offsets)
            self._values = {place: self._at(value) for place, value in flat.items()}

    def _at(self, value: Any) -> _At:
        words = ("earliest" if self.side == "starting" else "last_stable", "latest")
        if value in words or (type(value) is int and 0 <= value < 2**62):
            return _At(value)
        raise InvalidRequestError(
            f"{self.side}_offsets takes {' or '.join(map(repr, words))} or offsets from 0, not "
            f"{value!r}."
        )

    def of(
        self, places: Sequence[TopicPartition], default: _At | None = None
    ) -> dict[TopicPartition, _At]:
        """The bound of each partition; `default` for partitions that a mapping leaves out. Raises
        InvalidRequestError."""
        if self._everywhere is not None:
            return dict.fromkeys(places, self._everywhere)
        assert self._values is not None
        unknown = sorted(self._values.keys() - set(places))
        if unknown:
            raise InvalidRequestError(
                f"The {self.side} bounds name {_names(unknown)}, which the topics to read do not "
                "have."
            )
        missing = [place for place in places if place not in self._values]
        if missing and default is None:
            hint = ""
            if self.side == "starting":
                hint = ', or say new_partitions="earliest" to read those from their start'
            raise InvalidRequestError(
                f"The {self.side} bounds leave out {_names(missing)}: name every partition{hint}."
            )
        return {place: self._values.get(place, default) for place in places}  # type: ignore[misc]


def _flat(what: str, given: object) -> dict[TopicPartition, Any]:
    """A `{TopicPartition: value}` mapping, from either kind of mapping."""
    found: dict[TopicPartition, Any] = {}
    if not isinstance(given, Mapping):
        raise InvalidRequestError(f"{what} cannot be {given!r}.")

    def add(topic: str, partition: object, value: object) -> None:
        place = TopicPartition(topic, _partition(what, partition))
        if place in found:
            raise InvalidRequestError(f"{what} names {_names([place])} twice.")
        found[place] = value

    for key, value in given.items():
        if isinstance(key, str) and isinstance(value, Mapping):
            for partition, bound in value.items():
                add(key, partition, bound)
        elif isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], str):
            add(*key, value)
        else:
            raise InvalidRequestError(
                f"{what} maps TopicPartition(topic, partition) to a value, or a topic to a mapping "
                f"of its partitions; {key!r} is neither."
            )
    return found


def _partition(what: str, given: object) -> int:
    """A partition's number, from an int (of any kind) or the digits of a JSON key."""
    if isinstance(given, str) and _DIGITS.fullmatch(given):
        return int(given)
    if isinstance(given, SupportsIndex) and not isinstance(given, bool):
        number = operator.index(given)
        if number >= 0:
            return number
    raise InvalidRequestError(
        f"{what} names partitions by numbers from 0, or by their digits, not by {given!r}."
    )


def _time_ms(what: str, value: object) -> int:
    if isinstance(value, datetime) and value.tzinfo is not None:
        value = (value - _EPOCH) // timedelta(milliseconds=1)
    if type(value) is not int or value < 0:
        raise InvalidRequestError(
            f"{what} takes Unix time in milliseconds or a datetime with a time zone, not {value!r}."
        )
    return value


def _names(places: Iterable[TopicPartition], shown_max: int = 10) -> str:
    shown = [f"{topic}-{partition}" for topic, partition in places]
    more = f" and {len(shown) - shown_max} more" if len(shown) > shown_max else ""
    return ", ".join(shown[:shown_max]) + more


async def _snapshot(
    client: Client,
    names: list[str],
    pattern: str | None,
    *,
    start: _Bound,
    end: _Bound,
    new_from_start: bool,
    fail_on_data_loss: bool,
    timeout_s: float,
) -> list[Split]:
    if pattern is not None:
        names = await _names_matching(client, pattern, timeout_s)
    found = {
        name: await client.topic(name, timeout_s=timeout_s, age_max_s=0.0)
        for name in sorted(set(names))
    }
    places = [
        TopicPartition(name, number)
        for name, topic in found.items()
        for number in range(len(topic.partitions))
    ]
    starts = start.of(places, _At("earliest") if new_from_start else None)
    ends = end.of(places)
    for place in places:
        _check_order(place, starts[place], ends[place])
    partitions = [
        JobPartition(client, place, found[place.topic].topic_id, timeout_s) for place in places
    ]
    logs = await together(_log_of(partition) for partition in partitions)
    first = [log for _, log in logs]
    cut: Cut | None = None
    if any(end.offset == "latest" or end.timestamp_ms is not None for end in ends.values()):
        cut = await take_cut(client, partitions, first, timeout_s)
    highs = [log.high_watermark for log in first] if cut is None else cut.ends
    without = None if cut is None else cut.without
    return await together(
        _resolve(
            partition,
            starts[partition.place],
            ends[partition.place],
            _LogBounds(partition.place, low, high, log.last_stable_offset, fail_on_data_loss),
            without,
        )
        for partition, (low, log), high in zip(partitions, logs, highs, strict=True)
    )


async def _log_of(partition: JobPartition) -> tuple[int, DescribeOpenTransactionsResponse]:
    """The log start, and the state of the log's end and transactions."""
    low = await partition.offset(EARLIEST)
    assert low is not None, "a log has a beginning"
    return low, await partition.open_transactions()


def _check_order(place: TopicPartition, start: _At, end: _At) -> None:
    """Raises InvalidRequestError for bounds that are wrong whatever the log holds."""
    pairs = ((start.offset, end.offset), (start.timestamp_ms, end.timestamp_ms))
    for first, last in pairs:
        if isinstance(first, int) and isinstance(last, int) and last < first:
            raise InvalidRequestError(
                f"The range of {place.topic}-{place.partition} ends before it starts: from {start} "
                f"to {end}."
            )


async def _resolve(
    partition: JobPartition,
    start: _At,
    end: _At,
    log: _LogBounds,
    without: tuple[tuple[int, int], ...] | None,
) -> Split:
    """The range of one partition; `without` are the transactions that are left out below
    "latest"."""
    place, high = partition.place, log.high
    if start.timestamp_ms is not None:
        found = await partition.offset(start.timestamp_ms)
        first = high if found is None else found
    elif start.offset == "latest" and end.offset == "last_stable":
        first = log.stable  # A transaction that is open now is read whole, later.
    else:
        first = log.offset_of(start, "starts at")
    ends_at_high = end.offset == "latest"
    if end.timestamp_ms is not None:
        found = await partition.offset(end.timestamp_ms)
        ends_at_high = found is None or found >= high
        last = high if found is None else found
    else:
        last = log.offset_of(end, "ends at")
    first, last = min(first, high), min(last, high)  # records appended meanwhile are not part of it
    if last < first and start.offset == "latest":
        raise InvalidRequestError(
            f"The range of {partition} ends before it starts: from 'latest', which is offset "
            f"{first} now, to {end}."
        )
    return Split(
        topic=place.topic,
        topic_id=partition.topic_id,
        partition=place.partition,
        start=first,
        end=max(first, last),
        without=without if ends_at_high else None,
    )


class _LogBounds(NamedTuple):
    place: TopicPartition
    low: int
    high: int
    stable: int
    """The offset below which every transaction is decided."""
    fail_on_data_loss: bool

    def offset_of(self, at: _At, side: str) -> int:
        """The offset of the bound. If the log does not hold it, raises OffsetOutOfRangeError, or
        with `fail_on_data_loss=False` returns the nearest offset that the log holds."""
        if at.offset == "earliest":
            return self.low
        if at.offset == "latest":
            return self.high
        if at.offset == "last_stable":
            return self.stable
        assert isinstance(at.offset, int)
        if self.low <= at.offset <= self.high:
            return at.offset
        name = f"{self.place.topic}-{self.place.partition}"
        if at.offset < self.low:
            reason = (
                f"below the log start {self.low}: retention, or delete_records, removed the records"
            )
        else:
            reason = (
                f"past the end {self.high}: it was never there, or the topic is another one by now"
            )
        message = f"The range of {name} {side} offset {at.offset}, {reason}."
        if self.fail_on_data_loss:
            raise OffsetOutOfRangeError(
                f"{message} Give offsets from {self.low} to {self.high}, or "
                "fail_on_data_loss=False to read what is left."
            )
        logger.warning("%s Reading what is left (fail_on_data_loss=False).", message)
        return min(max(at.offset, self.low), self.high)


async def _names_matching(client: Client, pattern: str, timeout_s: float) -> list[str]:
    response = await client.fetch_all(timeout_s=timeout_s)
    names = topic_pattern.matches(pattern, [topic.name for topic in response.topics])
    if not names:
        raise UnknownTopicError(
            f"No topic's name matches the pattern {pattern!r}. It has to match the whole name."
        )
    return sorted(names)


# --- arithmetic of ranges -------------------------------------------------------------------------


def start_offsets(ranges: Iterable[Split]) -> dict[TopicPartition, int]:
    return {split.place: split.start for split in ranges}


def end_offsets(ranges: Iterable[Split]) -> dict[TopicPartition, int]:
    """The offsets at which to continue: `starting_offsets` of the next snapshot. Raises
    InvalidRequestError for ranges that leave out transactions: the next snapshot would never read
    their records."""
    ends = {}
    for split in ranges:
        if split.without:
            raise InvalidRequestError(
                f"The range of {split.topic}-{split.partition} leaves out {len(split.without)} "
                "transactions that were not decided when it was taken, so nothing can continue at "
                "its "
                'end. Take it with ending_offsets="last_stable", the next ones too.'
            )
        ends[split.place] = split.end
    return ends


def split_ranges(
    ranges: Iterable[Split],
    min_partitions: int | None = None,
    cuts: Mapping[TopicPartition, Sequence[int]] | None = None,
) -> list[Split]:
    """The ranges that are not empty, in their order. With `min_partitions` the largest ranges are
    cut into parts of equally many offsets, until there are that many ranges (or each has one
    offset). A cut moves to the nearest offset in `cuts` (sorted) if that is near enough. Raises
    InvalidRequestError."""
    if min_partitions is not None and (type(min_partitions) is not int or min_partitions < 1):
        raise InvalidRequestError(
            f"min_partitions has to be a positive int or None, not {min_partitions!r}."
        )
    filled = [split for split in ranges if not split.is_empty]
    parts = [1] * len(filled)
    # The largest part first; those that cannot be cut further leave the heap.
    heap: list[tuple[float, int]] = [
        (-split.offsets, index) for index, split in enumerate(filled) if split.offsets > 1
    ]
    heapq.heapify(heap)
    for _ in range(len(filled), min_partitions or 0):
        if not heap:
            break
        _, index = heapq.heappop(heap)
        parts[index] += 1
        if parts[index] < filled[index].offsets:
            heapq.heappush(heap, (-filled[index].offsets / parts[index], index))
    return [
        split._replace(start=start, end=end)
        for split, count in zip(filled, parts, strict=True)
        for start, end in pairwise(_points(split, count, (cuts or {}).get(split.place, ())))
    ]


def _points(split: Split, count: int, cuts: Sequence[int]) -> list[int]:
    """The start of a range, the points that cut it into `count` parts, and its end."""
    points = [split.start + split.offsets * part // count for part in range(count + 1)]
    # Nearer than half a part, so that no two points meet.
    near = (split.offsets // count - 1) // 2
    for number in range(1, count):
        nearest = _nearest(cuts, points[number])
        if nearest is not None and abs(nearest - points[number]) <= near:
            points[number] = nearest
    return points


def _nearest(cuts: Sequence[int], offset: int) -> int | None:
    at = bisect_left(cuts, offset)
    return min(cuts[max(at - 1, 0) : at + 1], key=lambda cut: abs(cut - offset), default=None)


def limit_ranges(ranges: Iterable[Split], offsets_max: int) -> list[Split]:
    """The same ranges, cut at their ends so that they hold at most `offsets_max` offsets together.
    Each gets a share in proportion to its size, and each that is not empty gets at least one
    offset, the largest first, as far as that goes."""
    if type(offsets_max) is not int or offsets_max < 1:
        raise InvalidRequestError(f"offsets_max has to be a positive int, not {offsets_max!r}.")
    given = list(ranges)
    total = sum(split.offsets for split in given)
    if total <= offsets_max:
        return given
    shares = [max(offsets_max * split.offsets // total, min(split.offsets, 1)) for split in given]
    by_size = sorted(range(len(given)), key=lambda index: -given[index].offsets)
    excess = sum(shares) - offsets_max
    for least in (1, 0):  # Take from single-offset ranges last, smallest first.
        for index in by_size if least else reversed(by_size):
            taken = min(max(shares[index] - least, 0), max(excess, 0))
            shares[index] -= taken
            excess -= taken
    for index in by_size:  # Rounding down left less than one offset for each.
        if excess < 0 and shares[index] < given[index].offsets:
            shares[index] += 1
            excess += 1
    return [
        split._replace(end=split.start + share) for split, share in zip(given, shares, strict=True)
    ]
