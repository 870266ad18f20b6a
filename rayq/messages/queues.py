"""Requests of clients to queues, and of a partition's leader to the queue state coordinator.

A queue is a named reader of a topic that settles single records. The leader of each data partition
serves a part of it (its *queue leader*). The *queue state coordinator* stores its decisions
durably: the leader of partition crc32(queue id) % partitions of `__queue_state`.

A *lock* is (holder, state epoch, offset, count): the count says how often the record was given out.
Settling names the lock, so that nobody settles somebody else's delivery, too late or otherwise.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from rayq.messages.acls import QuotaName, Right, Rights
from rayq.messages.any_broker import Change
from rayq.messages.base import (
    Bytes,
    CheckedInt,
    CheckedName,
    Counter,
    DurationMs,
    Epoch,
    Id,
    Milliseconds,
    Offset,
    Partition,
    Reason,
    Response,
    ToBroker,
    ToQueueLeader,
    ToQueueState,
)
from rayq.messages.limits import (
    KEPT_KEY_BYTES_MAX,
    ConfigOptions,
)

QUEUE_RANGES_MAX = 10_000
"""Maximum number of ranges or records that a request names."""
SETTLED_MAX = 200_000
"""Maximum number of offsets that the ranges of a Settle name, each as often as it is named."""
QUEUE_STATES_MAX = 16
"""Maximum length of a list of states; a record has fewer."""
Holder = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]

# --- metadata ------------------------------------------------------------------------------------


class CreateQueue(Change, frozen=True, kw_only=True):
    """Creates a queue, the queue of its dead letters, and its topic where `partitions` is given:
    all of it or nothing. Raises QueueExistsError, UnknownTopicError, ConfigError, and what
    `CreateTopic` raises."""

    api: ClassVar[int] = 128
    quotas: ClassVar[tuple[QuotaName, ...]] = ("controller_mutation_rate", "request_percentage")
    rights: ClassVar[Rights] = (
        Right("create", "queue", "name"),
        Right("read", "topic", "topic"),
    )
    name: CheckedName
    topic: CheckedName
    config: ConfigOptions
    partitions: CheckedInt | None = None
    """None: the topic exists."""
    replication_factor: CheckedInt | None = None
    topic_config: ConfigOptions = msgspec.field(default_factory=dict)


class AlterQueue(Change, frozen=True, kw_only=True):
    """Changes single keys of a queue's config. Raises UnknownQueueError, ConfigError."""

    api: ClassVar[int] = 129
    quotas: ClassVar[tuple[QuotaName, ...]] = ("controller_mutation_rate", "request_percentage")
    rights: ClassVar[Rights] = (Right("alter", "queue", "name"),)
    name: CheckedName
    config: ConfigOptions


class DeleteQueue(Change, frozen=True, kw_only=True):
    """Forgets a queue and what it has settled; its topic stays, and its dead letters. Raises
    UnknownQueueError, ConfigError where it has the dead letters of another queue."""

    api: ClassVar[int] = 130
    rights: ClassVar[Rights] = (Right("delete", "queue", "name"),)
    name: CheckedName


class QueueMetadata(msgspec.Struct, array_like=True, frozen=True):
    """A queue, as partition assignments name it, and brokers to clients."""

    queue_id: str
    name: str
    topic_id: str
    topic: str
    config: dict[str, Any]
    """The whole config, as `rayq.config.as_dict` gives it."""
    partitions: int
    """Number of partitions of the topic when the queue was created: `start` applies to these. Later
    partitions are read from their beginning."""


QUEUES_PAGE = 1_000
"""Maximum number of queues in an answer."""


class DescribeQueuesResponse(Response, frozen=True):
    version: int
    """Metadata version, as that of `MetadataResponse`."""
    queues: list[QueueMetadata]
    """Sorted by name."""
    next_after: str | None = None
    """Not None if one answer does not hold all queues: ask again with this as `after`."""
    denied: dict[str, str] = msgspec.field(default_factory=dict)
    """The same as in `MetadataResponse`, of the queues that were named."""


class DescribeQueues(ToBroker[DescribeQueuesResponse], frozen=True):
    """The queues that this broker knows, as far as the sender may describe both them and their
    topics. It waits up to `wait_ms` for metadata of at least `version_min`, then answers by what it
    has."""

    api: ClassVar[int] = 137
    rights: ClassVar[Rights] = ()
    ends_with_connection: ClassVar[bool] = True
    names: Annotated[list[CheckedName], msgspec.Meta(max_length=10_000)] | None = None
    """None: all queues. A name that does not exist is missing in the answer."""
    version_min: Counter = 0
    wait_ms: Milliseconds = 0
    after: CheckedName = ""
    """Only queues with names after this one."""
    queue_ids: Annotated[list[Id], msgspec.Meta(max_length=QUEUES_PAGE)] = msgspec.field(
        default_factory=list
    )
    """The queues with these ids, too."""


# --- clients to the leader of a data partition ---------------------------------------------------
# Each raises UnknownQueueError, QueueLoadingError (the state is being opened), and what `ToLeader`
# raises.


class TakeResponse(Response, frozen=True):
    """The payload holds whole record batches; `locks` says which of their records were given."""

    state_epoch: int
    locks: list[tuple[int, int, int]]
    """`(first offset, last offset, count)`, ascending."""
    ready: int
    """Number of further records that could be taken now."""
    sweep_ms: int = 1000
    """Interval at which a consumer that does not wait here asks again: it grows with the number of
    consumers, so that about 20 ask per second."""
    excused: list[tuple[int, int, int]] = msgspec.field(default_factory=list)
    """`(first offset, last offset, how many)` of these records: so many of the deliveries that are
    counted were given back unhandled, and do not count against `max_deliveries`."""
    unbegun: list[tuple[int, int]] = msgspec.field(default_factory=list)
    """`(first offset, last offset)` of these records: before a user gets one of them its consumer
    says so (`Settle.begins`), and waits for the answer. Where its lock goes before that, the
    delivery does not count."""
    wanted: int = 0
    """Number of other consumers that wait here, idle, with no records for them."""


class Take(ToQueueLeader[TakeResponse], frozen=True):
    """Locks up to `records_max` records for `holder` and returns them. The leader waits up to
    `wait_ms` for the first. The locks are durable before the answer leaves."""

    api: ClassVar[int] = 131
    quotas: ClassVar[tuple[QuotaName, ...]] = (
        "take_rate",
        "consumer_byte_rate",
        "request_percentage",
    )
    rights: ClassVar[Rights] = (
        Right("read", "queue", "queue_id"),
        Right("read", "topic", "topic_id"),
    )
    ends_with_connection: ClassVar[bool] = True
    holder: Holder
    """A name that the consumer draws; a new one after an answer to a take was lost."""
    records_max: Annotated[int, msgspec.Meta(ge=1, le=10_000)]
    bytes_max: Bytes
    wait_ms: Milliseconds
    tells_begins: bool = False
    """The consumer heeds `TakeResponse.unbegun`. Without, each delivery counts at once."""
    is_ahead: bool = False
    """The consumer has something to do: others come first."""


class SettleResponse(Response, frozen=True):
    lost: list[tuple[int, int, str]]
    """`(first offset, last offset, who has it now)`: not settled, since these locks had gone.
    Everything else is settled, durably."""
    wanted: int = 0
    """Number of waiting consumers, as in `TakeResponse`."""


class Settle(ToQueueLeader[SettleResponse], frozen=True):
    """Settles locks, each named by its holder, state epoch, offset and count. Settling again what
    is done, or below the start, is success."""

    api: ClassVar[int] = 132
    quotas: ClassVar[tuple[QuotaName, ...]] = ()
    rights: ClassVar[Rights] = (
        Right("read", "queue", "queue_id"),
        Right("read", "topic", "topic_id"),
    )
    holder: Holder
    state_epoch: Counter
    acks: Annotated[
        list[tuple[Offset, Offset, Counter]], msgspec.Meta(max_length=QUEUE_RANGES_MAX)
    ] = msgspec.field(default_factory=list)
    """`(first, last, count)`."""
    nacks: Annotated[
        list[tuple[Offset, Offset, Counter, DurationMs | None]],
        msgspec.Meta(max_length=QUEUE_RANGES_MAX),
    ] = msgspec.field(default_factory=list)
    """`(first, last, count, delay_ms)`; None: by the queue's back-off."""
    rejects: Annotated[
        list[tuple[Offset, Counter, Reason]], msgspec.Meta(max_length=QUEUE_RANGES_MAX)
    ] = msgspec.field(default_factory=list)
    """`(offset, count, reason)`: to the dead letters at once."""
    extends: Annotated[
        list[tuple[Offset, Offset, Counter, DurationMs]], msgspec.Meta(max_length=QUEUE_RANGES_MAX)
    ] = msgspec.field(default_factory=list)
    """`(first, last, count, timeout_ms from now)`."""
    releases: Annotated[
        list[tuple[Offset, Offset, Counter]], msgspec.Meta(max_length=QUEUE_RANGES_MAX)
    ] = msgspec.field(default_factory=list)
    """`(first, last, count)`: given back without having been handled. They are available at once,
    and none goes to the dead letters by it."""
    may_linger: bool = False
    """Nobody waits for the answer: what is acknowledged may wait for a few milliseconds, to be
    kept together with other decisions."""
    failures: Annotated[
        list[tuple[Offset, Counter, Reason]], msgspec.Meta(max_length=QUEUE_RANGES_MAX)
    ] = msgspec.field(default_factory=list)
    """Rejected records, as `rejects`, that failed the last delivery that their consumer grants
    them."""
    begins: Annotated[
        list[tuple[Offset, Offset, Counter]], msgspec.Meta(max_length=QUEUE_RANGES_MAX)
    ] = msgspec.field(default_factory=list)
    """`(first, last, count)`: a user gets these now, so their delivery counts. `lost` in the answer
    are also those that are settled."""


class DescribeQueueResponse(Response, frozen=True):
    start_offset: int
    """Offset below which everything is settled."""
    end_offset: int
    """The last stable offset."""
    ready: int
    locked: int
    delayed: int
    moving: int
    done: int
    """Number of offsets that are settled at or above the start."""
    dead: int
    """Number of records that were moved to the dead letters since this leader started."""
    expired: int
    """Number of records that retention removed before they were settled, since this leader
    started."""
    oldest_ready_ms: int | None
    next_due_ms: int | None
    waiting_takes: int
    trouble: str | None
    blocked: int = 0
    """Number of records that are not ready: they wait for an earlier record of their key."""
    oldest_locked_ms: int | None = None
    """Age of the oldest lock, under this leader."""
    oldest_holder: str | None = None
    """Holder of the oldest lock."""


class DescribeQueue(ToQueueLeader[DescribeQueueResponse], frozen=True):
    api: ClassVar[int] = 133
    rights: ClassVar[Rights] = (Right("describe", "queue", "queue_id"),)
    checked_when_answered: ClassVar[bool] = True


class QueueRecordState(msgspec.Struct, array_like=True, frozen=True):
    """An unsettled record of a queue."""

    offset: int
    state: str
    """`ready`, `locked`, `delayed` or `moving`."""
    count: int
    holder: str | None
    """The beginning: see `rayq.messages.secret_names`."""
    due_ms: int | None
    """End of a delay by the wall clock. For a lock: its remaining time in ms."""


class ListQueueRecordsResponse(Response, frozen=True):
    records: list[QueueRecordState]
    next_offset: int | None
    """None: there are no more."""


class ListQueueRecords(ToQueueLeader[ListQueueRecordsResponse], frozen=True):
    """The unsettled records from `offset` on, one page."""

    api: ClassVar[int] = 134
    rights: ClassVar[Rights] = (
        Right("read", "queue", "queue_id"),
        Right("read", "topic", "topic_id"),
    )
    checked_when_answered: ClassVar[bool] = True
    offset: Offset
    states: Annotated[list[CheckedName], msgspec.Meta(max_length=QUEUE_STATES_MAX)]
    """[]: all."""
    records_max: Annotated[int, msgspec.Meta(ge=1, le=10_000)]


class MoveQueueRecordsResponse(Response, frozen=True):
    moved: list[int]
    """The offsets that are settled by this, or were before."""
    refused: list[tuple[int, str]]
    """`(offset, why)`: locked just now, for example."""


class MoveQueueRecords(ToQueueLeader[MoveQueueRecordsResponse], frozen=True):
    """Moves unsettled records, each exactly once, to another topic, or discards them. A record
    whose target the sender may not write to is refused."""

    api: ClassVar[int] = 135
    rights: ClassVar[Rights] = (Right("alter", "queue", "queue_id"),)
    offsets: Annotated[list[Offset], msgspec.Meta(max_length=1000)]
    to_topic: CheckedName | None
    """None: they are discarded. "": each goes to the topic in its header `rayq.source`, which is
    data: whoever wrote the record chose it."""


class PurgeQueueResponse(Response, frozen=True):
    purged: int


class PurgeQueue(ToQueueLeader[PurgeQueueResponse], frozen=True):
    """Settles all records below the present end that are not locked."""

    api: ClassVar[int] = 136
    rights: ClassVar[Rights] = (Right("alter", "queue", "queue_id"),)


# --- queue state: leaders of data partitions to the leader of a partition of `__queue_state` ------
# Each raises QueueFencedError: a later opening took the state over, or the queue was deleted.


class OpenQueueStateResponse(Response, frozen=True):
    """The payload: the kept records of this queue's partition, as `core.queues.queue_states.pack`
    made it."""

    fence: int
    """Names this opening: writes with another one are refused. Each opening has a higher one."""
    next_after: bytes | None = None
    """Not None if there is more: ask again with this as `after`."""
    fence_min: int = 0
    """Locks that were given out under a lower state epoch are void: an unclean election of the
    coordinator may have lost what was kept of them."""


class OpenQueueState(ToQueueState[OpenQueueStateResponse], frozen=True):
    """The leader of a data partition takes the state over: from now on writes of earlier openings
    are refused, and so are openings of lower leader epochs. A repetition by the same opener
    changes nothing."""

    api: ClassVar[int] = 58
    queue_id: Id
    data_partition: Partition
    data_leader_epoch: Epoch
    opener: Id
    """A random id, for this opening alone."""
    after: Annotated[bytes, msgspec.Meta(max_length=KEPT_KEY_BYTES_MAX)] = b""


class WriteQueueStateResponse(Response, frozen=True):
    is_full: bool
    """The coordinator holds so much that no more records should be given out for now."""


class WriteQueueState(ToQueueState[WriteQueueStateResponse], frozen=True):
    """Writes kept records (the payload, made by `core.queues.queue_states.parts_of`), all or none,
    durably before the answer. Raises QueueLimitError where it `gives_out` and the coordinator is
    far over its limit; QueuePartsMissingError."""

    api: ClassVar[int] = 59
    queue_id: Id
    data_partition: Partition
    fence: Counter
    sequence: Counter
    """The number of the write, of which one is in flight at a time. A repetition has the same; a
    lower one than the last is a write that was held back, and is refused."""
    gives_out: bool = True
    """Many records are locked by it: only such a write is refused where the coordinator is full."""
    part: Counter = 0
    """A large write comes in several requests, one after the other, all with its number."""
    is_last: bool = True
    """The last part has all of it written; what came before it is only in memory."""
