"""The errors that rayq raises, all derived from `RayqError`.

An error says what was tried, why it failed and what to do next. Flags let code decide without
knowing the class:

- `retriable`: the same call may succeed later, unchanged. Clients retry these by themselves within
  the caller's timeout.
- `outcome_unknown`: the call may or may not have taken effect (a write that was sent and whose
  answer never came).
- `not_written`: this attempt at a write is known to have written nothing. (An earlier attempt at
  the same write may have.)
- `stale_metadata`: the client's picture of who leads what is out of date, and is fetched again
  before the next try.
- `breaks_sequence`: the leader cannot append a batch of an idempotent producer by its number,
  because it lacks the batches before it. The producer finds out which of them are written, or
  numbers its batches from 0.
- `ends_membership`: the member of a group that the error answers is out of its group.

Errors that only servers and rayq's own client exchange derive from `InternalError` and stand last.

Errors cross the wire as `(code, message)`, the code being the class name: `to_wire` and `from_wire`
are the only translation.
"""

from __future__ import annotations

import builtins
import copy
from typing import ClassVar, Self

from rayq.records import Record, TopicPartition


class RayqError(Exception):
    """Base of all errors of rayq.

    What differs between two errors of a class is set in `__init__`, never a default of the class:
    an error that comes out of a Ray task looks up in its cause only what its class does not have.
    """

    retriable: ClassVar[bool] = False
    outcome_unknown: ClassVar[bool] = False
    not_written: ClassVar[bool] = False
    stale_metadata: ClassVar[bool] = False
    breaks_sequence: ClassVar[bool] = False
    ends_membership: ClassVar[bool] = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message

    def with_message(self, message: str) -> Self:
        """A new error that is otherwise the same: one object is never raised twice."""
        fresh = copy.copy(self)
        fresh.message, fresh.args = message, (message,)
        return fresh


# --- the caller's mistakes ----------------------------------------------------------------------


class ConfigError(RayqError, ValueError):
    """A config key that does not exist (the nearest is suggested) or a value outside its range."""


class InvalidRequestError(RayqError, ValueError):
    """An argument that can never be right, such as a negative offset."""


class InvalidTopicError(RayqError, ValueError):
    """A topic name that is empty, too long, reserved, or has characters outside [A-Za-z0-9._-]."""


class InvalidPartitionsError(RayqError, ValueError):
    """A number of partitions that is zero, too large, or lower than the topic already has."""


class InvalidReplicationFactorError(RayqError, ValueError):
    """A replication factor below 1 or `min_insync_replicas`, or above the number of live brokers;
    or one that cannot be had now, because a partition has no leader or brokers are down."""


class ReplicaLimitError(RayqError):
    """The topic would give a broker more replicas than `max_replicas_per_broker` allows, or its
    node's memory, or the files that its process may open."""


class InvalidReassignmentError(RayqError, ValueError):
    """A move of a partition that is not possible: unknown or duplicate brokers, not as many as the
    topic's replication factor, too few of them running, or no brokers left to move to."""


class ReassignmentInProgressError(RayqError):
    """The partition is being moved already: wait for that, or cancel it."""


class NoReassignmentError(RayqError):
    """The partition is not being moved: there is nothing to cancel, or another caller cancelled
    what was waited for."""


class UnknownBrokerError(RayqError, KeyError):
    """No broker of that id belongs to the cluster."""


class BrokerInUseError(RayqError):
    """A broker cannot be removed while it runs, holds replicas, or is the last one."""


class TopicExistsError(RayqError):
    """A topic of that name exists already."""


class PrincipalExistsError(RayqError):
    """A principal of that name exists already."""


class UnknownPrincipalError(RayqError, KeyError):
    """No such principal."""


class UnknownTokenError(RayqError, KeyError):
    """The principal has no such token: it was revoked, or has another id."""


class PrincipalLimitError(RayqError):
    """The cluster has as many principals or ACLs as it may have, or the principal as many tokens.
    """


class QuotaLimitError(RayqError):
    """A principal has as many topics, partitions or connections as its quota allows."""


class UnknownTopicError(RayqError, KeyError):
    """No such topic or partition, or the topic was deleted (and perhaps created again)."""

    not_written = True
    stale_metadata = True


class RecordTooLargeError(RayqError, ValueError):
    """A record, or the batch that holds it, is larger than `max_message_bytes`."""


class InvalidRecordError(RayqError, ValueError):
    """A produced batch that no reader could read although its CRC is right (a body that is not a
    batch body, other counts than its header's), or with attributes that are not for producers to
    set."""


class InvalidTimestampError(RayqError, ValueError):
    """A record timestamp that is negative or too far in the future."""


class SerializationError(RayqError, ValueError):
    """A producer's serializer raised, or returned no bytes: nothing of that `send` (or `send_many`)
    was accepted. What it raised is the error's cause."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.topic: str | None = None
        self.index: int | None = None
        """The index of the record among those of a `send_many`."""


class NoClusterError(RayqError):
    """No cluster was given and this process has none: call `rayq.start` or `rayq.connect` first."""


class MissingExtraError(RayqError, ImportError):
    """An optional package is not installed; the message names the pip command."""


class JavaError(RayqError):
    """Spark needs a Java that is not there, or another version of it; the message names the command
    that installs it."""


class NotEnoughResourcesError(RayqError):
    """Ray has no room for what was asked of it: the message says what is needed and what is
    free."""


class SparkSessionError(RayqError):
    """A Spark session cannot be started: another one is up in this process, or RayDP failed. The
    message says which."""


class ConcurrentUseError(RayqError):
    """Two threads use one consumer at the same time: give each a consumer of its own."""


class ClosedError(RayqError):
    """The producer, consumer, cluster or connection was closed."""


# --- deliveries ---------------------------------------------------------------------------------


class DeliveryError(RayqError):
    """`flush` found records that were accepted by `send` and not delivered."""


class DeliveryTimeoutError(RayqError):
    """`delivery_timeout_ms` passed before the record could be sent. It was not written."""


class OutcomeUnknownError(RayqError):
    """The call may or may not have taken effect: it was sent, and its answer did not come in time.
    A record's future has it once `delivery_timeout_ms` has passed after the record was sent; a
    change of a group's positions, which cannot be repeated, raises it once its answer is lost."""

    outcome_unknown = True


class BufferFullError(RayqError):
    """The producer's `buffer_memory` stayed full for `max_block_ms`: the cluster takes records more
    slowly than they are sent."""

    retriable = True


# --- leaders ------------------------------------------------------------------------------------


class PartitionOfflineError(RayqError):
    """No replica may lead the partition now; the message names those it waits for."""

    retriable = True
    not_written = True
    stale_metadata = True


class ControllerUnavailableError(RayqError):
    """No controller could be reached, or it has no majority of the voters."""

    retriable = True


# --- replication --------------------------------------------------------------------------------


class NotEnoughReplicasError(RayqError):
    """Fewer in-sync replicas than `min_insync_replicas`: the write was refused before the
    append."""

    retriable = True
    not_written = True


class NotEnoughReplicasAfterAppendError(RayqError):
    """The in-sync set fell below `min_insync_replicas` after the append: the outcome is unknown."""

    retriable = True
    outcome_unknown = True


# --- offsets ------------------------------------------------------------------------------------


class OffsetOutOfRangeError(RayqError):
    """The offset is below the log start or past the log's end, and no `auto_offset_reset` says
    where to continue."""


class LogTruncatedError(RayqError):
    """The position is on a branch of the log that an unclean election cut off: records that were
    read earlier are gone. Seek to continue. (`auto_offset_reset` does not hide it.)"""


# --- idempotent producers -----------------------------------------------------------------------


class OutOfOrderSequenceError(RayqError):
    """A batch of an idempotent producer arrived ahead of its predecessor."""

    retriable = True
    not_written = True
    breaks_sequence = True


class UnknownProducerError(RayqError):
    """The partition has no state of this producer id (it expired or was never seen) and the batch
    is not its first."""

    breaks_sequence = True


class ProducerFencedError(RayqError):
    """A newer producer with the same id took over."""


# --- transactions -------------------------------------------------------------------------------


class TransactionAbortedError(RayqError):
    """The transaction was aborted, and none of it is visible to whoever reads what is committed: a
    record of it could not be written, or its `transaction_timeout_ms` was over. Run it again."""


class TransactionOutcomeUnknownError(RayqError):
    """The commit was asked for, and no answer came for `max_block_ms`, or another producer took the
    transactional id over before one came. The transaction is committed whole, or not at all."""

    outcome_unknown = True


class TransactionCommittedError(RayqError):
    """The transaction was committed before its producer asked for that, by somebody who knew its
    owner's name: whoever reads what is committed sees what was acknowledged by then, and the rest
    was not written. To run it again as it is writes the first part twice: read first what is there.
    """


class AlreadyCommittedError(RayqError):
    """A transaction with this name is committed: this one was aborted, since a name commits
    once."""


class OpenTransactionError(RayqError):
    """A range of offsets contains records of a transaction that is not decided yet; the message
    says whose. It ends with its commit or its time-out."""

    retriable = True


class TransactionLimitError(RayqError):
    """Too many transactional ids, or too many transactions open at once; the message has the
    limit."""


class RewriteMismatchError(RayqError):
    """A task of a batch write ran again and made other records, or another order of them, than its
    earlier attempt had written: neither attempt's records may be taken for the task's. Make the
    task's rows and their order repeatable (sort within partitions, persist before the write)."""


# --- groups -------------------------------------------------------------------------------------


class FencedMemberError(RayqError):
    """The member's epoch is older than the coordinator's, or another process joined under its
    `group_instance_id`: what it does is refused."""

    ends_membership = True


class CommitRefusedError(RayqError):
    """Positions were not committed: the partitions were taken from this member meanwhile, so
    another member may have continued from the last commit. The message says why and what to change.
    """


class MaxPollIntervalError(RayqError):
    """The time between two polls was longer than `max_poll_interval_ms`, so the member lost its
    partitions. Poll fewer records at a time, or raise the limit."""


class UnknownGroupError(RayqError, KeyError):
    """No such group."""


class GroupNotEmptyError(RayqError):
    """The group has members: stop them first."""


class GroupLimitError(RayqError):
    """One group, member or committed position more than a coordinator keeps; the message says which
    limit."""


class UnknownAssignorError(RayqError, ValueError):
    """No assignor of that name: `uniform`, `range`, or one of the cluster's `group_assignors`."""


class InvalidAssignmentError(RayqError):
    """A user's assignor failed, or gave a partition twice, not at all, or to no member that
    subscribes to it."""


class QueueExistsError(RayqError):
    """A queue of this name exists already."""


class UnknownQueueError(RayqError, KeyError):
    """No queue has this name, or it was deleted."""

    __str__ = RayqError.__str__


class LockLostError(RayqError):
    """The record is no longer this consumer's: its lock expired, or was released, and the message
    says who has it. It may be handled a second time."""


class TaskArgumentsError(RayqError, ValueError):
    """A record of a queue holds no arguments that its function takes. It goes to the dead letters
    at once: another attempt would not help."""


class QueueLimitError(RayqError):
    """A queue's partition holds as much as it may: settle some of it first."""

    retriable = True


class NullKeyError(RayqError, ValueError):
    """A record without a key was sent to a compacted topic, which keeps the latest of each key."""


# --- the schema registry --------------------------------------------------------------------------


class RegistryError(RayqError):
    """Base of what the schema registry refuses. `error_code` is the number that Confluent's API has
    for it; the HTTP status is its first three digits."""

    error_code: ClassVar[int]


class InvalidSchemaError(RegistryError, ValueError):
    """A schema that cannot be parsed, that its format does not allow, that has references which
    cannot be resolved, or that goes beyond a limit of its format. The message says where."""

    error_code = 42201


class SchemaTooLargeError(RegistryError, ValueError):
    """A schema whose text, or whose text with all that it refers to, is longer than allowed."""

    error_code = 42209


class IncompatibleSchemaError(RegistryError, ValueError):
    """A schema that does not fit the versions of its subject at the subject's compatibility level.
    The message names each version, and what in it does not fit."""

    error_code = 409


class SchemaCheckTimeoutError(RegistryError):
    """A schema took more time, or more memory, to check than a check may take. The same schema will
    take it again: simplify it."""

    error_code = 50002


# --- consumer pools -------------------------------------------------------------------------------


class PoolExistsError(RayqError):
    """A consumer pool of that name runs already: `cluster.consumer_pools()` has it. Stop it first,
    or give this one a name (and a group) of its own."""


class UnknownPoolError(RayqError, KeyError):
    """No consumer pool of that name runs."""


class HandlerError(RayqError, TypeError):
    """A function that rayq was given cannot be used: a call of it does nothing (a coroutine
    function where nobody awaits, a function with `yield`, a class); or, of a pool's handler, it
    does not pickle, does not unpickle where the consumers run, or its class cannot be made."""


# --- streaming queries ----------------------------------------------------------------------------


class CheckpointError(RayqError):
    """The checkpoint of a streaming query cannot be read, written or used."""


class CheckpointDamagedError(CheckpointError):
    """A file of the checkpoint is missing, does not match its CRC or contradicts another one."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """The checkpoint belongs to another cluster, or to other topics: also to one that was deleted
    and created again under the same name."""


class CheckpointInUseError(CheckpointError):
    """Another streaming query uses the checkpoint: only one at a time may."""


class StreamingQueryError(RayqError):
    """A streaming query has ended with an error, its cause: that of the user's function, or one of
    rayq's."""


# --- bytes --------------------------------------------------------------------------------------


class UnreadableRecordError(RayqError):
    """Records that a reader cannot read, however often it tries: the base of all such errors.

    They are the records of `topic_partition` from `offset` up to `next_offset` (exclusive). All
    before them were handed out first. The reader stays there, while it reads other partitions on;
    `seek(error.topic_partition, error.next_offset)` continues without them, and so does
    `on_corrupt="skip"`, but for errors that are `never_skipped`.
    """

    never_skipped: ClassVar[bool] = False
    """The reason may lie outside the record, and be gone later: so only a `seek` goes past it."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.topic_partition: TopicPartition | None = None
        self.offset: int | None = None
        self.next_offset: int | None = None


class CorruptBatchError(UnreadableRecordError):
    """Bytes of a record batch do not match their CRC or contradict themselves.

    Raised by a reader it says where. `topic_partition`, `offset` and `next_offset` are None
    elsewhere.
    """

    retriable = True

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.crc_matches = False
        """True if the bytes are as they were written: then no other copy of them is better."""


class LargeValueError(CorruptBatchError):
    """A large value cannot be put together: a chunk of it is missing or of another value, the
    topic, partition or object that has it is gone, or size or checksum of the whole are wrong.
    Nothing of it is handed out; reading continues behind it as behind other records that cannot be
    read."""

    retriable = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.crc_matches = True


class LargeValueRefusedError(UnreadableRecordError):
    """This reader does not read a large value, although it may be all right: it is larger than
    `large_value_max_bytes`, or in an object that the reader's `large_values` does not name."""


class LargeValueUnavailableError(LargeValueRefusedError):
    """This reader cannot get a large value as things are: the object store refuses its
    credentials, a package is missing here, or its memory is short. A `seek` to the error's `offset`
    tries again."""

    never_skipped = True


class BatchTooLargeError(UnreadableRecordError, RecordTooLargeError):
    """A batch of records is larger than this consumer unpacks: see `fetch_buffer_bytes`."""


class DeserializationError(UnreadableRecordError):
    """A consumer's deserializer raised; what it raised is the error's cause, and `record` is the
    record as it was sent, with key and value as bytes. Each poll tries it again."""

    never_skipped = True

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.record: Record | None = None


class StorageError(RayqError):
    """A disk failed an operation, or a file is damaged below the point known to be on disk. The
    partition's replica on that disk stops; the message names file and position."""

    retriable = True
    stale_metadata = True


class DiskFullError(StorageError):
    """No room for the append (64 MiB stay reserved for metadata). It heals when space returns."""

    not_written = True


class OpenFilesLimitError(DiskFullError):
    """The process, or its machine, may open no further file. It heals as a full disk does: nothing
    was written, and it is tried again."""


class RemoteStorageError(RayqError):
    """The object store did not do what it was asked for: it is away, slow or refuses. The servers
    try again by themselves."""

    retriable = True


class RemoteDeniedError(RemoteStorageError):
    """The object store refuses the credentials of this node, or what they may do (403)."""


class RemoteListError(RemoteStorageError):
    """The object store listed names that cannot follow what it was asked for: outside the prefix,
    not in order, twice, or not behind where the list was to continue. By such a list nothing is
    deleted, restored or adopted. The message names the store and the name that it gave."""


class RemoteSlowError(RemoteStorageError):
    """The object store did not answer in time. The read continues in the background: ask again."""


class RemoteBacklogError(RemoteStorageError):
    """Too many bytes on the broker's disk wait for an object store that takes none, or too few: a
    topic with `remote_storage` takes no records until more are stored."""

    not_written = True


class RemoteMissingError(RayqError):
    """An object that holds records of a partition is no longer in the object store. The message
    names it."""


class RemoteDamagedError(RayqError):
    """An object that holds records of a partition is not what was stored: its checksum is wrong, or
    its records are others. The message names it."""


class DirectoryInUseError(RayqError):
    """Another live process holds the lock of the data directory."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.holder_pid: int | None = None
        self.holder_start_time: int | None = None
        """The start time of the process that holds the lock, where the lock file says so."""


class WrongClusterError(RayqError):
    """The data directory, or the server that answered, belongs to another cluster or broker."""


class UnsupportedFormatError(RayqError):
    """A file was written by a newer rayq than this one."""


class UnsupportedBatchError(UnreadableRecordError, UnsupportedFormatError):
    """A batch of records was written by a newer rayq than this reader's."""


# --- the network --------------------------------------------------------------------------------


class DisconnectedError(RayqError):
    """The connection could not be made or broke. A write that was under way may have taken
    effect."""

    retriable = True
    stale_metadata = True


class TimeoutError(RayqError, builtins.TimeoutError):
    """No answer within the time allowed. A write may or may not have taken effect."""

    retriable = True
    stale_metadata = True


class AuthenticationError(RayqError):
    """The peer does not hold the cluster's secret (or presented a wrong certificate)."""


class AuthorizationError(RayqError):
    """The principal may not do this. The message names principal, operation and resource, and how a
    superuser allows it."""


class ProtocolError(RayqError):
    """The peer sent bytes that are not the protocol: garbage, an oversized frame, an unknown type.
    If they were to be an answer, the outcome of the request is unknown."""

    outcome_unknown = True


class UnsupportedVersionError(RayqError):
    """The peer speaks no protocol version that this rayq speaks."""


class OverloadedError(RayqError):
    """A limit on connections, requests in flight or pins was reached; try again later."""

    retriable = True
    not_written = True


class UnknownServerError(RayqError):
    """A server failed in a way that it did not foresee, which is a bug in rayq; or its answer is an
    error that only a newer rayq knows. The message carries the cause."""

    outcome_unknown = True


# --- inside rayq --------------------------------------------------------------------------------


class InternalError(RayqError):
    """Errors that servers exchange, and that rayq's own client handles by itself: it retries, or
    raises another error instead. No public call raises it."""


class NotLeaderError(InternalError):
    """The process asked does not lead the partition (yet, or any more)."""

    retriable = True
    not_written = True
    stale_metadata = True


class LeadershipEndedError(NotLeaderError):
    """The process led the partition when the request came, and lost it while the request waited.
    The outcome of a write is unknown."""

    not_written = False
    outcome_unknown = True


class FencedEpochError(InternalError):
    """The request carries an epoch or incarnation older than the receiver's: the sender was
    replaced."""

    retriable = True
    not_written = True
    stale_metadata = True


class UnknownEpochError(InternalError):
    """The request carries an epoch newer than the receiver's, which has yet to hear of it."""

    retriable = True
    not_written = True


class NotControllerError(InternalError):
    """The process asked is not the controller (any more)."""

    retriable = True


class StalePartitionError(InternalError):
    """A change to a partition's in-sync set was based on an older partition epoch; it was
    refused."""


class StaleBrokerError(InternalError):
    """A broker or replica process is not registered under the incarnation it names: it registers
    again."""

    retriable = True


class DivergedLogError(InternalError):
    """A follower holds committed records that its cleanly elected leader lacks; it stops. Never
    expected: it means that a disk was changed from outside or that rayq has a bug."""


class OffsetNotAvailableError(InternalError):
    """A new leader does not know its high watermark yet."""

    retriable = True


class CoordinatorLoadingError(InternalError):
    """A new coordinator (of groups or of transactions) is still reading what its predecessors
    wrote."""

    retriable = True


class QueueLoadingError(InternalError):
    """The leader of a partition is still reading what its queues have settled."""

    retriable = True


class QueueFencedError(InternalError):
    """Another leader of the data partition has taken a queue's state over, or the queue was
    deleted: nothing was written, and no repetition will be."""

    not_written = True


class QueuePartsMissingError(InternalError):
    """The coordinator of a queue lacks parts of a write, of which it got others: nothing was
    written. The leader of the data partition sends all of it again."""

    not_written = True


class TransactionEndedError(InternalError):
    """The transaction that a batch, a position or a question names has ended."""

    not_written = True


class TransactionOrderError(InternalError):
    """A batch or a marker has to wait: an older transaction of the same producer has no marker in
    this partition yet, or the coordinator has not said that the partition takes part."""

    retriable = True
    not_written = True


class OffsetPendingError(InternalError):
    """A transaction that has not ended holds positions of the group: whoever asks for them, or
    writes others, waits for its end."""

    retriable = True
    not_written = True


class UnknownMemberError(InternalError):
    """The coordinator does not know this member of the group (any more): it was silent for a
    session, or has left. It joins again, without its partitions."""

    ends_membership = True


def _tree(root: type[RayqError]) -> dict[str, type[RayqError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


_BY_CODE = _tree(RayqError)


def to_wire(error: BaseException) -> tuple[str, str]:
    """`(code, message)` of an error; one that is not rayq's becomes an `UnknownServerError`."""
    if isinstance(error, RayqError):
        return type(error).__name__, error.message
    return UnknownServerError.__name__, f"{type(error).__name__}: {error}"


def from_wire(code: str, message: str) -> RayqError:
    """The error that `to_wire` described. A code of a newer rayq becomes an `UnknownServerError`:
    this one cannot tell whether the request was carried out."""
    known = _BY_CODE.get(code)
    return UnknownServerError(f"{code}: {message}") if known is None else known(message)


# --- texts that are put together from parts -------------------------------------------------------


def sentence(text: object) -> str:
    """The text of an error within another message: it ends with one full stop, or with its own
    question mark."""
    told = str(text).rstrip(". ")
    return told if told.endswith("?") else f"{told}."


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun, such as "1 record" or "1,234 records". `plural`: where it is not the
    noun and an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
