"""Requests of clients to the leader of a partition, and two requests that any replica answers."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from rayq.messages.acls import QuotaName, Right, Rights
from rayq.messages.base import (
    TIMESTAMP_MS_MAX,
    Answerer,
    Bytes,
    Done,
    Family,
    HeldEpoch,
    Milliseconds,
    Offset,
    ProducerId,
    Response,
    ToLeader,
    ToPartition,
    TransactionEpoch,
)

EARLIEST = -2
"""`ListOffsets.timestamp_ms` for the log start (the value that Kafka uses)."""
LATEST = -1
"""`ListOffsets.timestamp_ms` for the end of what the isolation lets a reader see (the value that
Kafka uses)."""

ISOLATION_NONE = 0
"""The client is older than transactions: it is refused where a partition has any."""
READ_UNCOMMITTED = 1
"""Reads up to the high watermark, regardless of the outcome of transactions."""
READ_COMMITTED = 2
"""Reads up to the last stable offset, with the keys of aborted transactions."""
Isolation = Annotated[int, msgspec.Meta(ge=0, le=2)]


class ProduceResponse(Response, frozen=True):
    base_offset: int
    append_time_ms: int
    """The leader's clock at the append. For a repeated batch, at the first append."""
    log_start_offset: int
    is_repeat: bool = False
    """True if the log already had the batch, under the same sequences of the same producer."""


class Produce(ToLeader[ProduceResponse], frozen=True):
    """Appends the one record batch that is the payload.

    Under `acks` 0 the leader answers nothing but errors (the frame is marked one-way), under 1 it
    answers after its own append, under -1 ("all") once the high watermark has passed the batch.
    Raises NotLeader, LeadershipEnded, FencedEpoch, UnknownTopic, CorruptBatch, RecordTooLarge,
    InvalidRecord, InvalidTimestamp, NotEnoughReplicas(AfterAppend), OutOfOrderSequence,
    UnknownProducer, ProducerFenced, TransactionEnded, TransactionLimit, Storage, DiskFull, Timeout
    errors.
    """

    api: ClassVar[int] = 20
    quotas: ClassVar[tuple[QuotaName, ...]] = ("producer_byte_rate", "request_percentage")
    rights: ClassVar[Rights] = (Right("write", "topic", "topic_id"),)
    acks: Annotated[int, msgspec.Meta(ge=-1, le=1)]
    timeout_ms: Milliseconds


class FetchResponse(Response, frozen=True):
    """The payload holds whole record batches. The first may begin below the offset asked for."""

    high_watermark: int
    log_start_offset: int
    cleaned_offset: int
    """Below it compaction may have left gaps between offsets."""
    next_offset: int
    """Next offset to fetch: the end of the last batch, or `offset` without a batch."""
    last_stable_offset: int | None = None
    """Below it all transactions are decided. None: from a leader that knows of no transactions."""
    aborted: list[tuple[int, int]] = msgspec.field(default_factory=list)
    """`(family, epoch)` of each aborted transaction that may have batches in the payload, wherever
    its marker is. READ_UNCOMMITTED brings them too: a batch job reads past the last stable offset,
    and leaves out what was not decided when its range was fixed."""


class Fetch(ToLeader[FetchResponse], frozen=True):
    """Reads committed batches from `offset` on. The leader waits up to `wait_ms` for the first.

    `last_epoch` is the leader epoch of the last batch that the client read (None at first): where
    the log was truncated since, the answer is LogTruncatedError. Raises NotLeader, FencedEpoch,
    UnknownEpoch, UnknownTopic, OffsetOutOfRange (below the log start, or past the end),
    OffsetNotAvailable, LogTruncated, Storage errors; where the records are only in the object
    store, RemoteStorage, RemoteSlow, RemoteMissing, RemoteDamaged errors.
    """

    api: ClassVar[int] = 21
    quotas: ClassVar[tuple[QuotaName, ...]] = ("consumer_byte_rate", "request_percentage")
    rights: ClassVar[Rights] = (Right("read", "topic", "topic_id"),)
    ends_with_connection: ClassVar[bool] = True
    offset: Offset
    last_epoch: HeldEpoch | None
    bytes_max: Bytes
    wait_ms: Milliseconds
    isolation: Isolation = ISOLATION_NONE


class ListOffsetsResponse(Response, frozen=True):
    offset: int | None
    """None: every record is older."""
    timestamp_ms: int | None
    last_epoch: int | None = None
    """With LATEST, the leader epoch of the last batch below `offset`; None where there is none, and
    from an older leader."""


class ListOffsets(ToLeader[ListOffsetsResponse], frozen=True):
    """The first offset whose record has a timestamp >= `timestamp_ms`, or EARLIEST, or LATEST."""

    api: ClassVar[int] = 22
    rights: ClassVar[Rights] = (Right("read", "topic", "topic_id"),)
    checked_when_answered: ClassVar[bool] = True
    timestamp_ms: Annotated[int, msgspec.Meta(ge=-2, le=TIMESTAMP_MS_MAX)]
    isolation: Isolation = READ_UNCOMMITTED


class DeleteRecordsResponse(Response, frozen=True):
    log_start_offset: int
    """No replica that may lead next begins below it."""


class DeleteRecords(ToLeader[DeleteRecordsResponse], frozen=True):
    """Moves the log start up to `before_offset` (None: the high watermark). The leader answers once
    every replica that may lead next has moved it. Raises NotEnoughReplicasError while fewer than
    `min_insync_replicas` are in sync."""

    api: ClassVar[int] = 23
    rights: ClassVar[Rights] = (Right("delete", "topic", "topic_id"),)
    before_offset: Offset | None
    timeout_ms: Milliseconds


class DescribeReplicaResponse(Response, frozen=True):
    broker: int
    pid: int
    leader_epoch: int
    is_leader: bool
    log_start_offset: int
    high_watermark: int
    log_end_offset: int
    flushed_offset: int
    size_bytes: int
    trouble: str | None = None
    """The reason that a follower cannot copy, such as a full disk. None: it knows of no trouble."""
    disk_free_bytes: int | None = None
    """The free bytes of the log's file system."""


class DescribeReplica(ToPartition[DescribeReplicaResponse], frozen=True):
    """The state of one replica. Any replica answers, leader or not."""

    api: ClassVar[int] = 24
    rights: ClassVar[Rights] = (Right("describe", "topic", "topic_id"),)
    checked_when_answered: ClassVar[bool] = True
    reads_internal_topics: ClassVar[bool] = True


class CheckRange(ToPartition[Done], frozen=True):
    """Reports that a reader found a wrong CRC in the answer to a fetch from `offset`. The replica
    reads that range again from its disk, and stops if its own disk is damaged. Records that are
    only in the object store are loaded again by the leader with the next read."""

    api: ClassVar[int] = 25
    rights: ClassVar[Rights] = (Right("read", "topic", "topic_id"),)
    checked_when_answered: ClassVar[bool] = True
    offset: Offset


class DescribeOffsetResponse(Response, frozen=True):
    """The time of the batch that holds the record. Both are None from the last stable offset on,
    where readers of what is committed find no record yet."""

    append_time_ms: int | None
    age_ms: int | None
    """Age by the leader's clock."""


class DescribeOffset(ToLeader[DescribeOffsetResponse], frozen=True):
    """Append time of the record at `offset`. If that record is gone, the answer is about the oldest
    record that is left; if it is only in the object store, about the first record of its object.
    Raises NotLeader, FencedEpoch, UnknownEpoch, UnknownTopic, OffsetNotAvailable, Storage,
    RemoteStorage, RemoteMissing errors."""

    api: ClassVar[int] = 26
    rights: ClassVar[Rights] = (Right("read", "topic", "topic_id"),)
    checked_when_answered: ClassVar[bool] = True
    offset: Offset


class DescribeProducersResponse(Response, frozen=True):
    producer_ids: list[int]


class DescribeProducers(ToLeader[DescribeProducersResponse], frozen=True):
    """The producers in a range of ids of which the leader remembers a batch (after KIP-664)."""

    api: ClassVar[int] = 27
    rights: ClassVar[Rights] = (Right("read", "topic", "topic_id"),)
    checked_when_answered: ClassVar[bool] = True
    first_producer_id: ProducerId
    producer_id_count: Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]


class DescribeOpenTransactionsResponse(Response, frozen=True):
    """One partition's part of a cut over many: see `rayq.batch.offset_ranges`."""

    high_watermark: int
    last_stable_offset: int
    open: list[tuple[int, int, int]]
    """`(family, epoch, first offset)` of each transaction that is not decided below the high
    watermark."""
    ended: list[tuple[int, int]] | None
    """`(family, epoch)` of each transaction whose marker lies between `since_offset` and the high
    watermark. None: compaction may have removed some, so the cut starts over. [] without
    `since_offset`."""
    is_used: bool = True
    """False: the log holds nothing of any transaction. Where that is so in all partitions, one
    question to each is a cut."""
    leader_epoch: int = 0
    """Epoch in which this process leads, as far as it knows."""


class DescribeOpenTransactions(ToLeader[DescribeOpenTransactionsResponse], frozen=True):
    """Lists the undecided transactions of this partition, and those decided from `since_offset` on
    (None: not requested). Raises NotLeader, FencedEpoch, UnknownEpoch, UnknownTopic,
    OffsetNotAvailable, Storage errors."""

    api: ClassVar[int] = 28
    answered_by: ClassVar[tuple[Answerer, ...]] = ("leader", "group coordinator")
    rights: ClassVar[Rights] = (Right("describe", "topic", "topic_id"),)
    checked_when_answered: ClassVar[bool] = True
    reads_internal_topics: ClassVar[bool] = True
    since_offset: Offset | None


class AbortUnknownTransaction(ToLeader[Done], frozen=True):
    """Ends a transaction that is open in this partition (in one of `__consumer_offsets`: that holds
    positions of groups there) and that its coordinator does not end: the
    leader asks the coordinator. Where that still knows how it ended, it ends so here, too; else it
    is aborted here. Answers once the marker is committed. Nothing is done where it is not open.
    Raises InvalidRequest (the coordinator ends it), NotLeader, FencedEpoch, UnknownEpoch,
    UnknownTopic, Timeout, Storage errors."""

    api: ClassVar[int] = 29
    answered_by: ClassVar[tuple[Answerer, ...]] = ("leader", "group coordinator")
    rights: ClassVar[Rights] = (Right("alter", "cluster"),)
    reads_internal_topics: ClassVar[bool] = True
    family: Family
    epoch: TransactionEpoch
