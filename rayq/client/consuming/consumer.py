"""`Consumer`, a consumer for threads.

Fetching and the heartbeats of a group's member run ahead on the client's loop. The thread that
polls decodes records, and takes and gives up partitions.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import re
from collections.abc import Coroutine, Generator, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from rayq.client.arguments import as_partitions, by_partition
from rayq.client.background import BackgroundLoop
from rayq.client.callbacks import call_callback
from rayq.client.consuming import polling
from rayq.client.consuming.arrow import ARROW_RECORDS_MAX, load_pyarrow, table_of
from rayq.client.consuming.consumer_core import ConsumerCore
from rayq.client.consuming.group_consumer import (
    Call,
    Callback,
    Callbacks,
    Offsets,
    Step,
    WaitForNews,
)
from rayq.client.consuming.one_thread import OneThread, concurrent_use_error
from rayq.client.consuming.until_end import UNTIL_END_TIMEOUT_S, UntilEnd
from rayq.client.group_positions import GroupPositions
from rayq.client.timeouts import takes_timeout
from rayq.client.user_objects import no_pickle_error
from rayq.client.wakeup import Wakeup
from rayq.errors import InvalidRequestError
from rayq.messages import EARLIEST, LATEST
from rayq.records import (
    GroupMembership,
    KeyT_co,
    OffsetAndMetadata,
    OfValueAndKey,
    Record,
    TopicPartition,
    ValueT_co,
)
from rayq.user_functions import check_ran

T = TypeVar("T")


class Consumer(OfValueAndKey, Generic[ValueT_co, KeyT_co]):
    """A consumer for one thread at a time, made by `cluster.consumer(*topics, group=...,
    **config)`. A second thread gets ConcurrentUseError meanwhile, except from the methods that only
    ask (`assignment`, `committed`, `beginning_offsets`, `end_offsets`, `offsets_for_times`,
    `group_membership`).

    In a group it shares the partitions of its topics with the group's other members: each partition
    is read by one of them, from the last commit on. Partitions are assigned and revoked only inside
    `poll` (iterating polls) and `close`. Without a group it reads every partition of its topics (or
    those of `assign`), and keeps its positions itself. Iterating yields records forever.

    `Consumer[Order, str]` has deserializers that make an `Order` of each value and a str of each
    key; without type arguments they are bytes (or None).
    """

    def __init__(
        self, core: ConsumerCore, background: BackgroundLoop, callbacks: Callbacks
    ) -> None:
        self.config = core.config
        self._callbacks = callbacks
        self._core = core
        self._background = background
        self._use = OneThread()
        self._is_polling = False
        self._news = Wakeup()
        core.fetcher.add_listener(self._news.set)
        background.on_fork(self._forked)

    def __repr__(self) -> str:
        return f"<Consumer {self._core.describe()}>"

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._background.run(work)

    def subscribe(
        self,
        topics: str | Iterable[str] = (),
        *,
        pattern: str | re.Pattern[str] | None = None,
        on_assigned: Callback | None = None,
        on_revoked: Callback | None = None,
        on_lost: Callback | None = None,
    ) -> None:
        """Replaces the topics that are read by these, including partitions that are added later.

        In a group the consumer reads its share of them, and of all topics whose whole name matches
        `pattern`, now or later. The callbacks are called inside `poll` and `close` with a set of
        partitions: `on_assigned` before their first record (`seek` works there), `on_revoked` while
        they can still be committed, `on_lost` when it is too late for that, because the member was
        out of its group. A callback that is not given stays as it was.

        Without a group the consumer reads all partitions of the topics (added ones from their
        beginning). Raises UnknownTopicError, InvalidRequestError, HandlerError (for example, a
        callback is a coroutine function).
        """
        callbacks = Callbacks(on_assigned, on_revoked, on_lost)
        callbacks.check(is_awaited=False)
        with self._use:
            self._core.check_callbacks(callbacks)
            self._callbacks = callbacks.or_those_of(self._callbacks)
            self._run(self._core.subscribe(topics, pattern))

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Reads exactly these partitions; those that were read before keep their position. With a
        group, it starts at the group's commits, and commits without being a member, as long as the
        group has no members. Raises UnknownTopicError, InvalidRequestError (no such partition)."""
        wanted = as_partitions(partitions)
        with self._use:
            self._core.check_open()
            if self._core.group is not None:
                self._carry_out(self._core.group.give_up_steps())
            self._run(self._core.assign_by_hand(wanted))

    def assignment(self) -> set[TopicPartition]:
        """The partitions that are read now."""
        self._core.check_open()
        with self._use.if_free() as is_free:
            if is_free:  # otherwise the thread that polls looks for them
                self._core.look_for_new_partitions()
        return set(self._core.subscription.assigned)

    def group_membership(self) -> GroupMembership:
        """The membership of this consumer in its group: member id and epoch. Raises
        InvalidRequestError without a group."""
        return self._core.committing_group().membership()

    def _carry_out(self, steps: Generator[Step, None, T]) -> T:
        with contextlib.closing(steps):
            while True:
                try:
                    step = next(steps)
                except StopIteration as end:
                    result: T = end.value
                    return result
                if isinstance(step, Call):
                    if (callback := getattr(self._callbacks, step.callback)) is not None:
                        result = call_callback(step.callback, callback, step.partitions)
                        check_ran(step.callback, result, may_go_on=True)
                elif isinstance(step, WaitForNews):
                    self._news.wait(step.timeout_s)
                else:
                    self._run(step)

    def _poll(self, steps: Generator[Step, None, T]) -> T:
        """Carries out the steps of a poll; only one poll may run at a time."""
        with self._use:
            self._background.check_callable()
            if self._is_polling:
                raise InvalidRequestError(
                    "This consumer is polled already, further up in this thread: a callback, or a "
                    "signal handler that interrupted poll, cannot poll it too. Commit, seek or "
                    "close there."
                )
            self._is_polling = True
            try:
                return self._carry_out(steps)
            finally:
                self._is_polling = False

    @takes_timeout
    def poll(
        self, timeout_s: float = 1.0, max_records: int | None = None
    ) -> list[Record[ValueT_co, KeyT_co]]:
        """Returns the next records as soon as there is one; [] after `timeout_s` seconds without
        any.

        Returns at most `max_records` (default `max_poll_records`). Raises OffsetOutOfRangeError
        (the position is not in the log, or there is none, and auto_offset_reset is "none"),
        LogTruncatedError (records read before are gone: seek to continue), UnknownTopicError (the
        topic was deleted: subscribe or assign again), AuthorizationError (the principal may not
        read the topic; once it may, reading continues), UnreadableRecordError (records that cannot
        be read, with `offset` and `next_offset`: seek there to continue, or consume with
        on_corrupt="skip"; its subclass DeserializationError means that a deserializer raised, and
        has the record as it was sent), ClosedError. Each error stands for one partition, whose
        position stays, while the others are read. If polling continues, the error is raised again
        after a second, or when `timeout_s` has passed. In a group it also raises
        MaxPollIntervalError (too long since the last poll; the next one continues),
        FencedMemberError (another process took over the `group_instance_id`), UnknownAssignorError,
        and the errors of a callback (HandlerError if, for example, it has not run or raised
        StopIteration). Raises ConcurrentUseError while another thread uses the consumer;
        InvalidRequestError in a callback, or in a signal handler that interrupted a poll.
        """
        core = self._core
        records_max = core.records_max(max_records)
        return self._poll(polling.poll(core, lambda: core.take_records(records_max), timeout_s))

    @takes_timeout
    def poll_arrow(self, timeout_s: float = 1.0, max_records: int = ARROW_RECORDS_MAX) -> Any:
        """Does the same as `poll`, but returns a `pyarrow.Table` with the columns topic
        (dictionary), partition (int32), offset (int64), timestamp (milliseconds, UTC), key, value
        (binary: deserializers are not called), headers (list of name and value). Raises
        MissingExtraError without pyarrow."""
        load_pyarrow()
        core = self._core
        records_max = core.records_max(max_records)
        table = self._poll(polling.poll(core, lambda: core.take_table(records_max), timeout_s))
        return table_of([], []) if table is None else table

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Record[ValueT_co, KeyT_co]:
        """Waits for the next record, forever. `position` counts only yielded records."""
        record = self._next(None)
        assert record is not None, "without an end there is a next one"
        return record

    @takes_timeout
    def until_end(
        self, timeout_s: float = UNTIL_END_TIMEOUT_S
    ) -> Iterator[Record[ValueT_co, KeyT_co]]:
        """Yields every record that is there now, starting at the current positions, and then ends.

        "Now" means the ends of all partitions that are read, asked for when the iteration begins.
        For a partition that a group assigns later, it is the end at that time. Nothing before these
        ends is left out, and nothing after them is yielded: the next poll, or `until_end`,
        continues there. A new consumer begins as `auto_offset_reset` says, and with "latest" there
        is nothing to yield: use "earliest", or seek first. `position` and `commit` count only
        yielded records. Paused partitions are left out.

        In a group it reads this member's share, and ends once the group is not rebalancing; a
        member that joins later takes over partitions as in `poll`. Raises TimeoutError if it made
        no progress for `timeout_s` seconds (`math.inf`: never), such as while a partition has no
        leader, and the errors of `poll`: it has ended only when the loop ends without an error.
        """
        return self._until_end(timeout_s)

    def _until_end(self, timeout_s: float) -> Iterator[Record[ValueT_co, KeyT_co]]:
        until = self.begin_until_end(timeout_s)
        while (record := self._next(until)) is not None:
            yield record

    @takes_timeout
    def begin_until_end(self, timeout_s: float = UNTIL_END_TIMEOUT_S) -> UntilEnd:
        """Begins an iteration like that of `until_end`, for `poll_until`. Nothing is asked for
        yet."""
        with self._use:
            return UntilEnd(self._core, timeout_s)

    def poll_until(
        self, until: UntilEnd, max_records: int | None = None
    ) -> list[Record[ValueT_co, KeyT_co]]:
        """The next records of an iteration, at most `max_records` (default `max_poll_records`); []
        when all were read. Raises the errors of `until_end`."""
        records_max = self._core.records_max(max_records)
        return self._poll(polling.poll_until(self._core, until, records_max))

    def _next(self, until: UntilEnd | None) -> Record[ValueT_co, KeyT_co] | None:
        """The next record; None at the end."""
        core = self._core
        if not core.is_ahead(until) and not self._poll(polling.fill_ahead(core, until)):
            return None
        try:
            return core.ahead.popleft()
        except IndexError:
            raise concurrent_use_error() from None

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Sets the offset at which the next poll of the partition begins. If the log does not hold
        it, `auto_offset_reset` decides. An offset equal to the log end is valid and waits. Raises
        InvalidRequestError."""
        with self._use:
            self._core.seek(partition, offset)

    def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        """Makes the next poll begin at the log start of these partitions, or of all if none are
        given."""
        with self._use:
            self._core.seek_to(partitions, EARLIEST)

    def seek_to_end(self, *partitions: TopicPartition) -> None:
        """Makes the next poll begin at the current end of these partitions, or of all if none are
        given."""
        with self._use:
            self._run(self._core.resolved(self._core.seek_to(partitions, LATEST)))

    def seek_to_last(self, count: int, *partitions: TopicPartition) -> None:
        """Makes the next poll begin at the last `count` records of each of these partitions, or of
        all if none are given. Records are counted, not offsets, also where offsets have gaps: in a
        compacted topic, and among transactions. A partition with fewer records is read from its log
        start. Raises InvalidRequestError, TimeoutError."""
        with self._use:
            self._run(self._core.seek_to_last(count, partitions))

    def position(self, partition: TopicPartition) -> int:
        """The offset of the next record. Raises InvalidRequestError (not assigned),
        OffsetOutOfRangeError (there is none, and auto_offset_reset is "none"), TimeoutError."""
        with self._use:
            return self._run(self._core.position(partition))

    def commit(self, offsets: Offsets | None = None) -> None:
        """Commits the offsets at which the group resumes after this consumer: the given offsets (of
        the *next* record; `OffsetAndMetadata(offset, metadata)` keeps a text with it), or by
        default the positions of all its partitions, which follow the last record that `poll`
        returned (or that iteration yielded). It is not checked that the log holds them: a reader
        that starts there follows its `auto_offset_reset` if it does not. Returns once they are on
        the disks of the in-sync replicas; at once if there is nothing new.

        Retries while the group's coordinator moves, up to `default_api_timeout_ms`, then raises
        TimeoutError. Raises CommitRefusedError (partitions are no longer this member's: another may
        have resumed from the last commit), GroupNotEmptyError (partitions assigned by hand, and the
        group has members), InvalidRequestError (no group).
        """
        with self._use:
            group = self._core.committing_group()
            wanted, generation = group.wanted(offsets)
            if wanted:
                self._run(group.commit(wanted, generation))

    def commit_async(self, offsets: Offsets | None = None) -> concurrent.futures.Future[None]:
        """Commits as `commit` does, without waiting: the future raises the errors of `commit`.
        Commits take effect in the order of the calls. `close` waits for them."""
        with self._use:
            group = self._core.committing_group()
            return self._background.submit(group.commit(*group.wanted(offsets)))

    def positions_to_send(self, offsets: Offsets | None = None) -> GroupPositions:
        """The positions for `transaction.send_offsets(consumer)`: those that follow the last record
        that `poll` returned (or that iteration yielded), or these offsets, and the member they
        belong to. Raises CommitRefusedError (partitions were given up, and nobody has committed the
        records read from them), InvalidRequestError (no group, or enable_auto_commit)."""
        with self._use:
            return self._core.committing_group().positions_to_send(offsets)

    def mark_positions(self) -> object:
        """Marks the positions up to which transactions have committed, for
        `producer.transaction(reads=consumer)`. Raises InvalidRequestError (no group, or
        enable_auto_commit)."""
        with self._use:
            return self._core.committing_group().mark()

    def go_back(self, mark: Any, *, is_aborted: bool) -> None:
        """Makes the consumer read again everything that is not committed, for
        `producer.transaction(reads=consumer)`. If the transaction `is_aborted`, it starts at the
        positions from `mark_positions`, else at the group's commit, once that is known."""
        with self._use:
            if not self._core.is_closed:
                self._core.committing_group().go_back(mark, is_aborted=is_aborted)

    def committed(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int | None]:
        """The offsets that the group has committed, whichever member did it: the offset of the next
        record, None without a commit. Raises InvalidRequestError without a group."""
        found = self.committed_with_metadata(partitions)
        return {
            partition: None if commit is None else commit.offset
            for partition, commit in found.items()
        }

    def committed_with_metadata(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """Does the same as `committed`, with the text that was committed with each offset."""
        wanted = as_partitions(partitions)
        return self._run(self._core.committing_group().committed(wanted))

    def pause(self, *partitions: TopicPartition) -> None:
        """Makes polls return nothing from these partitions until `resume`; fetched records are
        kept."""
        with self._use:
            self._core.set_paused(partitions, True)

    def resume(self, *partitions: TopicPartition) -> None:
        """Ends `pause`."""
        with self._use:
            self._core.set_paused(partitions, False)

    def lag(self) -> dict[TopicPartition, int]:
        """The lag of each assigned partition: its number of offsets up to the end."""
        with self._use:
            return self._run(self._core.lag())

    def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The log start of each partition."""
        return self._run(self._core.beginning_offsets(as_partitions(partitions)))

    def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The end offset of each partition, after the last record that may be read: the high
        watermark. With isolation_level="read_committed", the default, it is the offset of the first
        undecided transaction, if there is one."""
        return self._run(self._core.end_offsets(as_partitions(partitions)))

    def offsets_for_times(
        self, times: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, int | None]:
        """The first offset of each partition whose record is at or after a time (Unix,
        milliseconds); None if no record is that late."""
        return self._run(self._core.offsets(by_partition(times, "a time"), by_time=True))

    @takes_timeout
    def close(self, timeout_s: float | None = None) -> None:
        """Stops reading. Idempotent. In a group it first commits with `enable_auto_commit` (but not
        when an exception ends a `with` block, because it is unknown which records were handled),
        calls `on_revoked`, and leaves at once, so that others continue (a static member keeps its
        partitions until its session ends). The commit may take `timeout_s` (default:
        group_session_timeout_ms), and so may telling the coordinator (default: 5 s). If the
        coordinator has not confirmed by then, the client keeps trying in the background while the
        cluster is open here. The coordinator learns of it at the latest at the end of the
        session."""
        self._close(timeout_s, may_commit=True)

    def _close(self, timeout_s: float | None, *, may_commit: bool) -> None:
        if self._core.is_closed:
            return
        with self._use:
            self._background.check_callable()
            try:
                if self._core.group is not None:
                    self._carry_out(
                        self._core.group.give_up_steps(may_commit=may_commit, timeout_s=timeout_s)
                    )
            finally:
                self._run(self._core.leave(timeout_s))

    def abandon(self) -> None:
        """Ends the consumer from any thread, even while another thread polls it, which then raises
        ClosedError. It commits nothing and calls no callbacks; the group is told."""
        if not self._core.is_closed:
            self._run(self._core.leave(None))

    def _forked(self) -> None:
        self._core.is_closed = True
        self._use = OneThread()  # A thread that is not in this process may hold the old one.

    def __reduce__(self) -> str:
        raise no_pickle_error(self, "a consumer")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._close(None, may_commit=kind is None)
