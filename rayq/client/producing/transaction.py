"""Transactions for users: `Transaction` for threads, `AsyncTransaction` on an event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self

from rayq.client.arguments import by_partition, shown
from rayq.client.background import BackgroundLoop
from rayq.client.client import check_partition
from rayq.client.group_positions import GroupPositions, check_group, checked_position
from rayq.client.producing.futures import DeliveryFuture, ManyDeliveryFuture, OnDelivery
from rayq.client.producing.producer_core import ProducerCore
from rayq.client.producing.transaction_core import TransactionCore
from rayq.client.user_objects import closing_after, no_pickle_error
from rayq.config import is_unicode
from rayq.errors import (
    CommitRefusedError,
    InvalidRequestError,
    RayqError,
    TransactionAbortedError,
    TransactionCommittedError,
    TransactionOutcomeUnknownError,
)
from rayq.records import OffsetAndMetadata, TopicPartition
from rayq.user_functions import is_coroutine_function

if TYPE_CHECKING:  # Only Python 3.13 has defaults for type variables; type checkers know them.
    from typing_extensions import TypeVar

    ValueT_contra = TypeVar("ValueT_contra", default=bytes, contravariant=True)
    KeyT_contra = TypeVar("KeyT_contra", default=bytes, contravariant=True)
else:
    from typing import TypeVar

    ValueT_contra = TypeVar("ValueT_contra", contravariant=True)
    KeyT_contra = TypeVar("KeyT_contra", contravariant=True)

NAME_CHARACTERS_MAX = 256

Offsets = Mapping[TopicPartition, int | OffsetAndMetadata]


class Reading(Protocol):
    """The consumer interface that a transaction needs."""

    def positions_to_send(self) -> GroupPositions:
        """The positions at which its group resumes after all records that it has returned, and its
        membership. Raises InvalidRequestError without a group, and with enable_auto_commit."""
        ...

    def mark_positions(self) -> object:
        """Marks the positions up to which its transactions have committed."""
        ...

    def go_back(self, mark: Any, *, is_aborted: bool) -> None:
        """Makes the consumer read everything again that is not committed. If not `is_aborted`, it
        is not known yet what is committed."""
        ...


class AsyncReading(Protocol):
    """The same as `Reading`, on an event loop."""

    async def positions_to_send(self) -> GroupPositions: ...

    async def mark_positions(self) -> object: ...

    async def go_back(self, mark: Any, *, is_aborted: bool) -> None: ...


def _run_again(error: CommitRefusedError) -> TransactionAbortedError:
    """The error that the end of a block raises after a rebalance: the block is run again, with the
    partitions that the consumer has now, as after any other abort."""
    return TransactionAbortedError(f"The transaction is aborted, run it again: {error}")


class Transaction(Generic[ValueT_contra, KeyT_contra]):
    """Records, and positions of groups, that become visible together, or not at all; made by
    `producer.transaction()`.

    The end of the block commits: it waits until everything sent is delivered, and returns once the
    commit is decided and readers see it (after at most `commit_wait_ms`, and at once if they do not
    see the previous commit yet, because some partition cannot be reached). An exception in the
    block aborts, and propagates. Any number of threads may send within the block; they must have
    returned from `send` when it ends.

    The end raises TransactionAbortedError if the block can be run again, because nothing of it took
    effect: a record was not delivered, or `transaction_timeout_ms` had passed.
    TransactionOutcomeUnknownError: the commit was requested, and no answer came within
    `max_block_ms`; the next transaction of the producer first determines the outcome.
    TransactionCommittedError: somebody else committed the part of it that existed, even if the
    block was to be undone. AlreadyCommittedError: the name is committed. ProducerFencedError:
    another producer has the transactional id, and this one can no longer write.
    """

    def __init__(
        self,
        core: ProducerCore,
        background: BackgroundLoop,
        send: Callable[..., DeliveryFuture],
        send_many: Callable[..., ManyDeliveryFuture],
        began: Callable[[Transaction[ValueT_contra, KeyT_contra]], None],
        name: str | None,
        reads: Reading | None,
    ) -> None:
        """`began` is called when the transaction is open."""
        self._core = core
        self._transactions = _transactions_of(core)
        self._background = background
        self._send = send
        self._send_many = send_many
        self._began = began
        self._name = check_name(name)
        if reads is not None:
            _check_reading(reads, None, is_async=False)
        self._reads = reads
        self._mark: object = None
        self._token = object()

    def __repr__(self) -> str:
        return f"<Transaction of {self._core.config.transactional_id!r}>"

    def send(
        self,
        topic: str,
        value: ValueT_contra | None,
        *,
        key: KeyT_contra | None = None,
        headers: Iterable[tuple[str, bytes]] | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> DeliveryFuture:
        """Sends as `Producer.send` does. The future tells that the record is appended, not that it
        is committed. Also raises InvalidRequestError once the transaction ends, and
        TransactionAbortedError once a part of it failed."""
        self._transactions.check_open(self._token)
        return self._send(
            topic,
            value,
            key=key,
            headers=headers,
            partition=partition,
            timestamp_ms=timestamp_ms,
            on_delivery=on_delivery,
        )

    def send_many(
        self,
        topic: str,
        values: Sequence[ValueT_contra | None],
        *,
        keys: Sequence[KeyT_contra | None] | None = None,
        partition: int | None = None,
    ) -> ManyDeliveryFuture:
        """Sends as `Producer.send_many` does, under the rules of `Transaction.send`."""
        self._transactions.check_open(self._token)
        return self._send_many(topic, values, keys=keys, partition=partition)

    def send_offsets(self, offsets: Reading | Offsets, *, group: str | None = None) -> None:
        """Makes the transaction commit the positions of a group. `offsets` is a consumer of the
        group, whose positions follow the last record that it returned; or, with `group`, the
        offsets of the next records, for a group without members. They take effect with the records
        of the transaction, or not at all; until it has ended, anyone who asks for them waits.

        Raises CommitRefusedError (partitions are no longer the consumer's), GroupNotEmptyError (a
        group that is given by its name has members), TimeoutError after `max_block_ms`; these make
        the transaction fail. Also raises InvalidRequestError, TypeError, UnknownTopicError (offsets
        that can never be right)."""
        self._transactions.check_open(self._token)
        if isinstance(offsets, Mapping):
            positions = self._background.run(_positions_of_group(self._core, group, offsets))
        else:
            _check_reading(offsets, group, is_async=False)
            try:
                positions = offsets.positions_to_send()
            except CommitRefusedError as error:
                self._background.call_soon(self._transactions.failed, error)
                raise
        self._background.run(self._transactions.send_offsets(self._token, positions))

    # --- its life, for the producer -------------------------------------------------------------

    def begin(self) -> None:
        """Begins the transaction. Raises as `Producer.begin_transaction` does."""
        self._core.check_open()
        if self._reads is not None:
            self._mark = self._reads.mark_positions()
        with self._withdrawn_if_interrupted():
            self._background.run(self._transactions.begin(self._token, self._name))
            self._began(self)

    def commit(self) -> None:
        """Commits the transaction. Raises as the end of the block does."""
        self._transactions.check_open(self._token)
        if self._reads is not None:
            try:
                self.send_offsets(self._reads)
            except BaseException as error:
                with closing_after(error):
                    self.abort()
                if isinstance(error, CommitRefusedError):
                    raise _run_again(error) from error
                raise
        try:
            self._end(is_commit=True)
        except BaseException as error:
            with closing_after(error):
                self._go_back(is_aborted=isinstance(error, TransactionAbortedError))
            raise

    def abort(self) -> None:
        """Aborts the transaction. Raises InvalidRequestError, ProducerFencedError, TimeoutError; if
        the transaction ended before, and cannot be aborted, TransactionCommittedError or
        TransactionOutcomeUnknownError."""
        self._transactions.check_open(self._token)
        is_aborted = True
        try:
            self._end(is_commit=False)
        except (TransactionCommittedError, TransactionOutcomeUnknownError):
            is_aborted = False
            raise
        finally:
            self._go_back(is_aborted=is_aborted)

    def _end(self, *, is_commit: bool) -> None:
        self._background.check_callable()
        with self._withdrawn_if_interrupted():
            self._transactions.shut()
            self._background.run(self._transactions.end(self._token, is_commit=is_commit))

    @contextmanager
    def _withdrawn_if_interrupted(self) -> Iterator[None]:
        """Withdraws the transaction if the thread is interrupted: the thread does not come back to
        end it, so the loop does."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, RayqError):
                self._background.call_soon(self._transactions.withdraw, self._token)
            raise

    def _go_back(self, *, is_aborted: bool) -> None:
        if self._reads is not None:
            self._reads.go_back(self._mark, is_aborted=is_aborted)

    def __reduce__(self) -> str:
        raise no_pickle_error(self, "a transaction")

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.commit()
            return
        with closing_after(error):
            self.abort()


class AsyncTransaction(Generic[ValueT_contra, KeyT_contra]):
    """A `Transaction` on an event loop; made by `producer.transaction()` of an `AsyncProducer`, for
    `async with`. If its end is cancelled, the transaction ends all the same: by an abort, unless
    the commit was already requested."""

    def __init__(
        self,
        core: ProducerCore,
        send: Callable[..., Awaitable[DeliveryFuture]],
        send_many: Callable[..., Awaitable[ManyDeliveryFuture]],
        began: Callable[[AsyncTransaction[ValueT_contra, KeyT_contra]], None],
        name: str | None,
        reads: AsyncReading | None,
    ) -> None:
        self._core = core
        self._transactions = _transactions_of(core)
        self._send = send
        self._send_many = send_many
        self._began = began
        self._name = check_name(name)
        if reads is not None:
            _check_reading(reads, None, is_async=True)
        self._reads = reads
        self._mark: object = None
        self._token = object()

    def __repr__(self) -> str:
        return f"<AsyncTransaction of {self._core.config.transactional_id!r}>"

    async def send(
        self,
        topic: str,
        value: ValueT_contra | None,
        *,
        key: KeyT_contra | None = None,
        headers: Iterable[tuple[str, bytes]] | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> DeliveryFuture:
        """Sends as `Transaction.send` does, and returns once the record is accepted."""
        self._transactions.check_open(self._token)
        return await self._send(
            topic,
            value,
            key=key,
            headers=headers,
            partition=partition,
            timestamp_ms=timestamp_ms,
            on_delivery=on_delivery,
        )

    async def send_many(
        self,
        topic: str,
        values: Sequence[ValueT_contra | None],
        *,
        keys: Sequence[KeyT_contra | None] | None = None,
        partition: int | None = None,
    ) -> ManyDeliveryFuture:
        """Sends as `Transaction.send_many` does, and returns once all records are accepted."""
        self._transactions.check_open(self._token)
        return await self._send_many(topic, values, keys=keys, partition=partition)

    async def send_offsets(
        self, offsets: AsyncReading | Offsets, *, group: str | None = None
    ) -> None:
        """Commits positions as `Transaction.send_offsets` does."""
        self._transactions.check_open(self._token)
        if isinstance(offsets, Mapping):
            positions = await _positions_of_group(self._core, group, offsets)
        else:
            _check_reading(offsets, group, is_async=True)
            try:
                positions = await offsets.positions_to_send()
            except CommitRefusedError as error:
                self._transactions.failed(error)
                raise
        await self._transactions.send_offsets(self._token, positions)

    # --- its life, for the producer -------------------------------------------------------------

    async def begin(self) -> None:
        self._core.check_open()
        if self._reads is not None:
            self._mark = await self._reads.mark_positions()
        await self._transactions.begin(self._token, self._name)
        self._began(self)

    async def commit(self) -> None:
        self._transactions.check_open(self._token)
        if self._reads is not None:
            try:
                await self.send_offsets(self._reads)
            except BaseException as error:
                with closing_after(error):
                    await self.abort()
                if isinstance(error, CommitRefusedError):
                    raise _run_again(error) from error
                raise
        try:
            await self._end(is_commit=True)
        except BaseException as error:
            with closing_after(error):
                await self._go_back(is_aborted=isinstance(error, TransactionAbortedError))
            raise

    async def abort(self) -> None:
        self._transactions.check_open(self._token)
        is_aborted = True
        try:
            await self._end(is_commit=False)
        except (TransactionCommittedError, TransactionOutcomeUnknownError):
            is_aborted = False
            raise
        finally:
            await self._go_back(is_aborted=is_aborted)

    async def _end(self, *, is_commit: bool) -> None:
        self._transactions.shut()
        await self._transactions.end(self._token, is_commit=is_commit)

    async def _go_back(self, *, is_aborted: bool) -> None:
        if self._reads is not None:
            await self._reads.go_back(self._mark, is_aborted=is_aborted)

    def __reduce__(self) -> str:
        raise no_pickle_error(self, "a transaction")

    async def __aenter__(self) -> Self:
        await self.begin()
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if error is None:
            await self.commit()
            return
        with closing_after(error):
            await self.abort()


def _check_reading(reads: object, group: str | None, *, is_async: bool) -> None:
    """Raises TypeError if `reads` is not a consumer of the right kind, or `group` is given."""
    methods = [
        getattr(reads, name, None) for name in ("positions_to_send", "mark_positions", "go_back")
    ]
    if any(
        not callable(method) or is_coroutine_function(method) is not is_async for method in methods
    ):
        kind = "cluster.async_consumer: an AsyncConsumer" if is_async else "cluster.consumer"
        raise TypeError(
            f"Positions come from a consumer (made by {kind}) or, of send_offsets, from a mapping "
            f"of partitions to offsets with group=..., not from {shown(reads)}."
        )
    if group is not None:
        raise TypeError("A consumer's positions are those of its own group: leave out group=...")


async def _positions_of_group(
    core: ProducerCore, group: str | None, offsets: Offsets
) -> GroupPositions:
    """The positions of a group that were given as a mapping. Raises TypeError, InvalidRequestError,
    UnknownTopicError."""
    group = check_group(group)
    timeout_s = core.config.max_block_ms / 1000
    found: list[tuple[str, int, int, int | None, str]] = []
    for partition, value in by_partition(offsets, "an offset").items():
        position = checked_position(value)
        topic = await core.client.topic(partition.topic, timeout_s=timeout_s)
        check_partition(topic, partition.partition)
        found.append(
            (topic.topic_id, partition.partition, position.offset, None, position.metadata)
        )
    return GroupPositions(group, "", 0, next(_transactions_of(core).sequences), found)


def _transactions_of(core: ProducerCore) -> TransactionCore:
    if core.transactions is None:
        raise InvalidRequestError(
            "This producer has no transactional_id, which transactions need: make it with "
            "cluster.producer(transactional_id=...), a name that stays over restarts and that no "
            "other producer has."
        )
    return core.transactions


def none_begun_error() -> InvalidRequestError:
    return InvalidRequestError(
        "This producer has not begun a transaction: begin_transaction() does, and so does a `with` "
        "block of transaction()."
    )


def check_name(name: object) -> str | None:
    """Checks the name of a transaction. Raises TypeError, InvalidRequestError."""
    if name is None:
        return None
    if not isinstance(name, str):
        raise TypeError(f"The name of a transaction must be a str, not {shown(name)}.")
    if not 1 <= len(name) <= NAME_CHARACTERS_MAX or not is_unicode(name):
        raise InvalidRequestError(
            f"The name of a transaction has 1 to {NAME_CHARACTERS_MAX} characters of Unicode, not "
            f"{shown(name)}."
        )
    return name
