"""The bases of all messages, and the types of their fields."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Annotated, Any, ClassVar, Generic, Literal, Protocol, TypeVar, get_args

import msgspec

from rayq.messages.acls import QuotaName, Rights
from rayq.messages.transaction_ids import EPOCH_MAX, TRANSACTIONAL_IDS_END, TRANSACTIONAL_IDS_START

# Every number, str and bytes of a request has a range or a length. What is out of range is refused
# before a handler sees it, by a ProtocolError for that request alone (tests/pure/test_ranges.py).

TIMESTAMP_MS_MAX = 1 << 62
Offset = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
"""An offset, or the end of a log."""
Epoch = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
"""An epoch of a leader, a partition or a controller. A batch has 32 bits for it."""
HeldEpoch = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
"""The epoch of a batch on somebody's disk, which may be damaged: a server that names it must be
able to continue."""
Counter = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
"""A version, an index, a sequence, a size: any number that begins at 0 and grows."""
BrokerId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
ProducerId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Family = Annotated[int, msgspec.Meta(ge=TRANSACTIONAL_IDS_START, lt=TRANSACTIONAL_IDS_END)]
TransactionEpoch = Annotated[int, msgspec.Meta(ge=0, le=EPOCH_MAX)]
MemberEpoch = Annotated[int, msgspec.Meta(ge=-2, le=(1 << 31) - 1)]
DurationMs = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
HostName = Annotated[str, msgspec.Meta(max_length=1024)]
FilePath = Annotated[str, msgspec.Meta(max_length=4096)]
Reason = Annotated[str, msgspec.Meta(max_length=4096)]
Text = Annotated[str, msgspec.Meta(max_length=1 << 20)]
"""Text for people, such as the reason of a failure; or a pattern, which its handler checks."""
CheckedInt = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]
"""A number that the handler checks, and refuses by an error that says more; or one of many in a
report, where a wrong one must not stop the others."""
CheckedName = Annotated[str, msgspec.Meta(max_length=65_536)]
"""A name that the handler checks, likewise."""
Id = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=249)]
GroupName = Annotated[str, msgspec.Meta(min_length=1, max_length=249)]
CommitMetadata = Annotated[str, msgspec.Meta(max_length=4096)]
Partition = Annotated[int, msgspec.Meta(ge=0, lt=1_000_000)]
MILLISECONDS_MAX = 3_600_000
"""Maximum wait that a request may ask for."""
Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=MILLISECONDS_MAX)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]


Answerer = Literal[
    "broker",
    "controller",
    "replica host",
    "replica",
    "leader",
    "queue leader",
    "group coordinator",
    "transaction coordinator",
    "queue state coordinator",
    "audit coordinator",
    "object server",
]
"""The server that answers a request. A process of replicas has the replicas, and what lives beside
a leader."""


class Response(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of the answers."""


ResponseT_co = TypeVar("ResponseT_co", bound=Response, covariant=True)
ResponseT = TypeVar("ResponseT", bound=Response)
"""Type variable of functions that send a request: they take a `Request[ResponseT]` and return a
`ResponseT`."""


REQUESTS: dict[int, type[Request[Any]]] = {}
"""Every class of requests by its number. Its declaration puts it here."""


class Request(msgspec.Struct, Generic[ResponseT_co], array_like=True, frozen=True, gc=False):
    """Base of the requests. Each request is a subclass of one of the bases below, which says who
    answers it."""

    api: ClassVar[int]
    """The number of this request on the wire, which no other has."""
    response: ClassVar[type[Response]]
    answered_by: ClassVar[tuple[Answerer, ...]]
    """Each of them has a handler for it (`rayq.actors.handlers`)."""
    rights: ClassVar[Rights] = None
    """The rights that a client needs who is not a superuser, beside those that
    `rayq.core.access.rights` finds in the request's content. () says that each client may send it.
    None: only servers send it."""
    sent_by_clients: ClassVar[bool] = False
    """True if `rights` are declared."""
    reads_internal_topics: ClassVar[bool] = False
    """True if a client may send it for a partition of rayq's internal topics. Such an answer leaves
    out everything that would let one client act as another; the records themselves do not."""
    quotas: ClassVar[tuple[QuotaName, ...]] = ("request_percentage",)
    """The quotas that may make it wait. (): no quota delays it, since it keeps a place, a lock or a
    promise, or ends what others wait for."""
    ends_with_connection: ClassVar[bool] = False
    """True if it only reads or waits: then the end of the connection cancels its work."""
    checked_when_answered: ClassVar[bool] = False
    """True if it changes nothing that its sender has to know of, as with all that
    `ends_with_connection`. Then the rights of a principal are checked again when an answer comes
    later: they may have gone meanwhile."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for base in getattr(cls, "__orig_bases__", ()):
            for argument in get_args(base):
                if isinstance(argument, type) and issubclass(argument, Response):
                    cls.response = argument
        cls.sent_by_clients = cls.rights is not None
        cls.checked_when_answered |= cls.ends_with_connection
        if "api" in vars(cls):
            assert cls.api not in REQUESTS, f"{cls.__name__} and {REQUESTS[cls.api].__name__}"
            REQUESTS[cls.api] = cls


AnyRequest = Request[Any]


class Ask(Protocol):
    """Sends a request to where it is answered, and returns the answer. Raises RayqError."""

    def __call__(self, request: Request[ResponseT]) -> Awaitable[ResponseT]: ...


class ToBroker(Request[ResponseT_co], frozen=True):
    """Base of the requests that a broker answers by itself."""

    answered_by: ClassVar[tuple[Answerer, ...]] = ("broker",)


class ToController(Request[ResponseT_co], frozen=True):
    """Base of the requests that the controller answers. Any broker forwards them there."""

    answered_by: ClassVar[tuple[Answerer, ...]] = ("controller",)


class ToReplicaHost(Request[ResponseT_co], frozen=True):
    """Base of the requests that a process of replicas answers, whatever it hosts."""

    answered_by: ClassVar[tuple[Answerer, ...]] = ("replica host",)


class ToObjectServer(Request[ResponseT_co], frozen=True):
    """Base of the requests that a broker's object server answers."""

    answered_by: ClassVar[tuple[Answerer, ...]] = ("object server",)


class ToPartition(Request[ResponseT_co], frozen=True):
    """Base of the requests that the process of a partition's replica answers."""

    answered_by: ClassVar[tuple[Answerer, ...]] = ("replica",)
    topic_id: Id
    partition: Partition


class ToLeader(ToPartition[ResponseT_co], frozen=True):
    """Base of the requests that the leader of a partition answers. Raises NotLeaderError, and
    FencedEpochError or UnknownEpochError if it leads in another epoch."""

    answered_by: ClassVar[tuple[Answerer, ...]] = ("leader",)
    leader_epoch: Epoch
    """The epoch that the client knows."""


class ToQueueLeader(ToLeader[ResponseT_co], frozen=True):
    """Base of the requests that a queue answers beside the leader of a data partition. Raises
    UnknownQueueError and QueueLoadingError."""

    answered_by: ClassVar[tuple[Answerer, ...]] = ("queue leader",)
    queue_id: Id


class ToCoordinator(ToLeader[ResponseT_co], frozen=True):
    """Base of the requests that a coordinator answers. It lives with the leader of a partition of
    an internal topic. Raises CoordinatorLoadingError, and NotEnoughReplicasError where it would
    have to write."""

    reads_internal_topics: ClassVar[bool] = True


class ToGroupCoordinator(ToCoordinator[ResponseT_co], frozen=True):
    """Base of the requests to a partition of `__consumer_offsets`."""

    answered_by: ClassVar[tuple[Answerer, ...]] = ("group coordinator",)


class ToTransactionCoordinator(ToCoordinator[ResponseT_co], frozen=True):
    """Base of the requests to a partition of `__transaction_state`."""

    answered_by: ClassVar[tuple[Answerer, ...]] = ("transaction coordinator",)


class ToQueueState(ToCoordinator[ResponseT_co], frozen=True):
    """Base of the requests to a partition of `__queue_state`."""

    answered_by: ClassVar[tuple[Answerer, ...]] = ("queue state coordinator",)


class ToAuditCoordinator(ToCoordinator[ResponseT_co], frozen=True):
    """Base of the requests to the partition of `__audit`."""

    answered_by: ClassVar[tuple[Answerer, ...]] = ("audit coordinator",)


class Done(Response, frozen=True):
    """An answer that carries nothing."""


class Ping(Request[Done], frozen=True):
    """A sign of life, from any server to a server. No handler sees it."""

    api: ClassVar[int] = 53
    quotas: ClassVar[tuple[QuotaName, ...]] = ()
    answered_by: ClassVar[tuple[Answerer, ...]] = ()
