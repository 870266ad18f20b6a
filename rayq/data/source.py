"""Topics as a source of Ray Data."""

from __future__ import annotations

import logging
import math
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import ray
from ray.data import Dataset, Datasource, read_datasource
from ray.data.block import BlockMetadata
from ray.data.datasource import ReadTask

from rayq.batch import offset_ranges
from rayq.batch.offset_ranges import Split, split_ranges
from rayq.batch.pins import pin_ranges
from rayq.batch.range_reader import COLUMNS, read_range, read_schema
from rayq.batch.stored_ranges import object_starts
from rayq.client.cluster import Cluster
from rayq.config import MIB, ConsumerConfig, OnCorrupt, check_values_url
from rayq.errors import InvalidRequestError, RayqError
from rayq.records import TopicPartition
from rayq.runtime.ray.connecting import ray_for

logger = logging.getLogger(__name__)

ALL_COLUMNS = (*COLUMNS, "headers")
TASK_BYTES = 32 * MIB
"""A read task has about this much Arrow data."""
TASK_OFFSETS_MIN = 10_000
"""A task has at least this many offsets, even where some CPUs then have no task."""
BLOCK_BYTES = 64 * MIB
"""A larger read task hands its records to Ray Data in several blocks."""
RECORD_BYTES_UNKNOWN = 1024
"""The size of a record where no sample could be read."""
SAMPLE_RECORDS = 1000
SAMPLE_TIMEOUT_S = 5.0


class Snapshot(NamedTuple):
    """The ranges of offsets to read, the same for every task, retry and later use. It is a plain
    value, which can be pickled."""

    ranges: list[Split]

    @property
    def start_offsets(self) -> dict[TopicPartition, int]:
        return offset_ranges.start_offsets(self.ranges)

    @property
    def end_offsets(self) -> dict[TopicPartition, int]:
        """The `starting_offsets` of the next job. Raises InvalidRequestError if this snapshot
        leaves out transactions: take it with ending_offsets="last_stable"."""
        return offset_ranges.end_offsets(self.ranges)


def snapshot(
    topics: str | Iterable[str] = (), *, cluster: Cluster | None = None, **bounds: Any
) -> Snapshot:
    """Takes the present ranges of `topics`, or of the topics that `pattern` matches, for
    `read_topic`.

    `bounds` are the keywords of `rayq.batch.offset_ranges.snapshot`, with the meanings that users
    of Spark's Kafka source know: pattern, starting_offsets ("earliest"), ending_offsets ("latest",
    the current end, without undecided transactions; "last_stable", below the first of these),
    starting_timestamp(s), ending_timestamp(s), new_partitions, fail_on_data_loss (True), timeout_s
    (60). `cluster`: None means the process's current cluster. Raises the errors of that function.
    """
    return Snapshot(offset_ranges.snapshot(cluster, topics, **bounds))


def read_topic(
    topics: str | Iterable[str] | Snapshot = (),
    *,
    cluster: Cluster | None = None,
    columns: Sequence[str] = ALL_COLUMNS,
    pattern: str | re.Pattern[str] | None = None,
    min_partitions: int | None = None,
    fail_on_data_loss: bool = True,
    large_values: str | None = None,
    on_corrupt: OnCorrupt = "raise",
    timeout_s: float = 60.0,
    ray_remote_args: dict[str, Any] | None = None,
    **bounds: Any,
) -> Dataset:
    """Reads the records of topics, by name or by `pattern`, or of a `Snapshot` taken before, as a
    Dataset with the columns key, value (binary), topic (string), partition (int32), offset (int64),
    timestamp (microseconds, UTC) and headers (a list of structs of key and value, which keeps order
    and duplicates).

    The ends are fixed here, once, so reading again gives the same records. Take the `Snapshot`
    yourself to know where the next job continues::

        taken = rayq.data.snapshot("flights", ending_offsets="last_stable")
        dataset = rayq.data.read_topic(taken)
        ...
        more = rayq.data.read_topic("flights", starting_offsets=taken.end_offsets)

    Partitions are read in parallel, and cut by offsets where that helps: there is a read task for
    about 32 MiB, or for each CPU, and there are at least `min_partitions`. Fewer `columns` are
    faster to read. `ray_remote_args` are options of the read tasks; other keywords are the bounds
    of `snapshot`. `cluster`: None means the process's current cluster, else the one that
    `rayq.connect()` finds. Ray is the one that this process is connected to, else that of
    RAY_ADDRESS, else the cluster's, else a local one.

    A read is exact, or it fails. While a leader cannot be reached, the task tries again; without
    any progress for `timeout_s` seconds the job raises PartitionOfflineError or TimeoutError.
    Records that expired since the snapshot raise OffsetOutOfRangeError; with
    `fail_on_data_loss=False` they are logged and left out. (Ray Data's own `max_errored_blocks`
    leaves out failed tasks: keep it at 0.) Tasks read records of a topic with `remote_storage` from
    the object store if they are there; retention leaves them while this process has the dataset. A
    topic that was deleted meanwhile raises UnknownTopicError. Records that cannot be read raise an
    UnreadableRecordError with their offsets; with `on_corrupt="skip"` they are logged and left out.
    Large values arrive whole: chunked ones always, and objects if `large_values` is the URL of
    their producers, with the credentials of the nodes. Raises the errors of `snapshot`.
    """
    check_values_url(large_values)
    found = cluster or Cluster.current()
    ray_for(found)
    if isinstance(topics, Snapshot):
        if bounds or pattern is not None:
            raise InvalidRequestError(
                f"A snapshot has its bounds already: {', '.join(bounds) or 'pattern'} belongs to "
                "rayq.data.snapshot()."
            )
        taken = topics
    else:
        taken = snapshot(
            topics,
            cluster=found,
            pattern=pattern,
            fail_on_data_loss=fail_on_data_loss,
            timeout_s=timeout_s,
            **bounds,
        )
    source = TopicDatasource(
        taken,
        cluster=found,
        columns=columns,
        fail_on_data_loss=fail_on_data_loss,
        large_values=large_values,
        on_corrupt=on_corrupt,
        timeout_s=timeout_s,
    )
    tasks = source.task_count(min_partitions)
    dataset: Dataset = read_datasource(
        source, override_num_blocks=tasks, ray_remote_args=ray_remote_args or {}
    )
    return dataset


class TopicDatasource(Datasource):
    """Reads a `Snapshot`, for `ray.data.read_datasource`, which `read_topic` calls."""

    def __init__(
        self,
        taken: Snapshot,
        *,
        cluster: Cluster,
        columns: Sequence[str] = ALL_COLUMNS,
        fail_on_data_loss: bool = True,
        large_values: str | None = None,
        on_corrupt: OnCorrupt = "raise",
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._taken = taken
        self._cluster = cluster
        self._columns = tuple(columns)
        self._schema = read_schema(columns)
        self._fail_on_data_loss = fail_on_data_loss
        ConsumerConfig(on_corrupt=on_corrupt)  # This checks it.
        self._large_values = large_values
        self._on_corrupt = on_corrupt
        self._timeout_s = timeout_s
        self._record_bytes: dict[str, float] | None = None
        self._cuts = object_starts(cluster, taken.ranges, timeout_s=timeout_s)
        # A copy that is unpickled in another process pins nothing.
        release = pin_ranges(cluster, taken.ranges, timeout_s=timeout_s)
        weakref.finalize(self, release).atexit = False

    def get_name(self) -> str:
        return "Topic"

    def estimate_inmemory_data_size(self) -> int:
        """The size in Arrow: a topic's offsets times the size of a record in a sample."""
        return sum(map(self._size_of, self._taken.ranges))

    def task_count(self, min_partitions: int | None) -> int:
        """The number of read tasks. An empty topic has one task, which gives the schema."""
        ranges = self._taken.ranges
        split_ranges(ranges, min_partitions)  # This checks min_partitions.
        offsets = sum(split.offsets for split in ranges)
        cpus = int(ray.cluster_resources().get("CPU", 1))  # type: ignore[no-untyped-call]
        by_size = math.ceil(self.estimate_inmemory_data_size() / TASK_BYTES)
        wanted = max(by_size, min(cpus, offsets // TASK_OFFSETS_MIN), min_partitions or 1)
        return max(len(self._split(ranges, wanted)), 1)

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: Any = None,
    ) -> list[ReadTask]:
        splits = self._split(self._taken.ranges, max(parallelism, 1))
        if not splits:
            nothing = [self._schema.empty_table()]
            return [self._task(lambda: nothing, 0, 0, "nothing", per_task_row_limit)]
        return [
            self._task(
                _reading(
                    self._cluster,
                    self._split([split], math.ceil(self._size_of(split) / BLOCK_BYTES) or 1),
                    self._columns,
                    self._fail_on_data_loss,
                    self._large_values,
                    self._on_corrupt,
                    self._timeout_s,
                ),
                # The number of records is not known: compaction leaves offsets without a record.
                None,
                self._size_of(split),
                f"rayq://{split.topic}/{split.partition}/{split.start}-{split.end}",
                per_task_row_limit,
            )
            for split in splits
        ]

    def _split(self, ranges: Sequence[Split], min_partitions: int) -> list[Split]:
        return split_ranges(ranges, min_partitions, self._cuts)

    def _task(
        self,
        read: Callable[[], Iterable[pa.Table]],
        rows: int | None,
        size_bytes: int,
        name: str,
        row_limit: int | None,
    ) -> ReadTask:
        metadata = BlockMetadata(
            num_rows=rows, size_bytes=size_bytes, exec_stats=None, input_files=(name,)
        )
        return ReadTask(read, metadata, self._schema, row_limit)

    def _size_of(self, split: Split) -> int:
        if self._record_bytes is None:
            self._record_bytes = self._sampled()
        return int(self._record_bytes.get(split.topic, RECORD_BYTES_UNKNOWN) * split.offsets)

    def _sampled(self) -> dict[str, float]:
        """The bytes of Arrow data for an offset of each topic, from a sample of its largest range.
        A topic without a sample is left out: the estimate only decides the number of tasks."""
        largest: dict[str, Split] = {}
        for split in self._taken.ranges:
            if not split.is_empty and split.offsets > largest.get(split.topic, split).offsets - 1:
                largest[split.topic] = split
        found: dict[str, float] = {}
        for topic, split in largest.items():
            sample = split._replace(end=min(split.end, split.start + SAMPLE_RECORDS))
            try:
                batches = read_range(
                    self._cluster,
                    sample,
                    columns=self._columns,
                    fail_on_data_loss=False,
                    large_values=self._large_values,
                    on_corrupt="skip",
                    timeout_s=min(SAMPLE_TIMEOUT_S, self._timeout_s),
                )
                found[topic] = sum(batch.nbytes for batch in batches) / sample.offsets
            except RayqError as error:
                logger.info("no sample of %s: %s", topic, error)
        return found


def _reading(
    cluster: Cluster,
    blocks: list[Split],
    columns: tuple[str, ...],
    fail_on_data_loss: bool,
    large_values: str | None,
    on_corrupt: OnCorrupt,
    timeout_s: float,
) -> Callable[[], Iterator[pa.Table]]:
    """The function of a read task, for any process. The offsets of each block are decided before:
    Ray may run a task again for one lost block, and then takes the block of the same number."""

    def read() -> Iterator[pa.Table]:
        for block in blocks:
            batches = read_range(
                cluster,
                block,
                columns=columns,
                fail_on_data_loss=fail_on_data_loss,
                large_values=large_values,
                on_corrupt=on_corrupt,
                timeout_s=timeout_s,
            )
            yield pa.Table.from_batches(list(batches), schema=read_schema(columns))

    return read
