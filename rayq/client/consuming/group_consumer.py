"""Group duties of a consumer inside `poll`, `commit` and `close`.

They run in the consumer's thread. Both consumers share them, though one waits by blocking and the
other by awaiting: anything that takes time or calls the user is a *step*, which a generator yields
and the consumer carries out in its own way.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

from rayq.client.arguments import as_partition
from rayq.client.client import Client, check_partition
from rayq.client.consuming.fetcher import Fetcher
from rayq.client.consuming.group_member import LEAVE_TIMEOUT_S, GroupMember
from rayq.client.consuming.group_offsets import (
    GroupOffsets,
    Position,
    Positions,
    refusal,
)
from rayq.client.consuming.member_state import Interest, Partitions
from rayq.client.consuming.subscription import Start, Stream, Subscription
from rayq.client.group_positions import GroupPositions, checked_position
from rayq.config import ConsumerConfig
from rayq.core.groups.topic_pattern import check_pattern
from rayq.errors import AuthorizationError, InvalidRequestError, RayqError
from rayq.messages import MEMBER_EPOCH_JOIN, DescribeGroup, DescribeGroupResponse
from rayq.messages.secret_names import shown_part
from rayq.records import GroupMembership, OffsetAndMetadata, TopicPartition
from rayq.user_functions import check_function

logger = logging.getLogger(__name__)

Callback = Callable[[set[TopicPartition]], Awaitable[None] | None]
"""A user's function that is called with partitions, inside `poll` or `close`. The async consumer
awaits its result."""
Offsets = Mapping[TopicPartition, int | OffsetAndMetadata]


class Call(NamedTuple):
    """A step: call the user's callback of that name (see `Callbacks`), if there is one. Only the
    consumer refers to the callbacks. The loop, which holds the objects here, must not: a callback
    may refer to the consumer, which then would never be collected."""

    callback: Literal["on_assigned", "on_revoked", "on_lost"]
    partitions: set[TopicPartition]


class WaitForNews(NamedTuple):
    """A step: wait until the fetcher has news (`Fetcher.tell`), at most `timeout_s`."""

    timeout_s: float


class Mark(NamedTuple):
    """The offset up to which the transactions of a consumer had committed a partition, or at which
    it began to read. None: it had not begun."""

    offset: int | None
    tenure: int


Step = Call | WaitForNews | Coroutine[Any, Any, None]
Steps = Generator[Step, None, None]


class Callbacks(NamedTuple):
    """The callbacks that a user gave."""

    on_assigned: Callback | None = None
    on_revoked: Callback | None = None
    on_lost: Callback | None = None

    def or_those_of(self, other: Callbacks) -> Callbacks:
        return Callbacks(*(mine or theirs for mine, theirs in zip(self, other, strict=True)))

    @property
    def given(self) -> list[Callback]:
        return [callback for callback in self if callback is not None]

    def check(self, *, is_awaited: bool) -> None:
        """Checks the callbacks. `is_awaited`: those of an async consumer. Raises HandlerError."""
        instead = (
            "The callbacks of a synchronous consumer are plain functions; async_consumer() takes "
            "coroutine functions, too."
        )
        for name, callback in self._asdict().items():
            if callback is not None:
                check_function(name, callback, is_awaited=is_awaited, instead=instead)


class Reader(Protocol):
    """The reader of the partitions that the group assigns."""

    @property
    def fetcher(self) -> Fetcher: ...
    @property
    def subscription(self) -> Subscription: ...
    def assign(
        self,
        partitions: Iterable[TopicPartition],
        start: Start = None,
        topic_ids: Mapping[TopicPartition, str] | None = None,
    ) -> object: ...
    def restart(
        self, partition: TopicPartition, start: Start, begin_otherwise: int | None = None
    ) -> object: ...
    def positions(self) -> dict[TopicPartition, tuple[int, int | None]]: ...


class GroupConsumer:
    """See the module."""

    def __init__(
        self, reader: Reader, client: Client, config: ConsumerConfig, offsets: GroupOffsets
    ) -> None:
        self.group = offsets.coordinator.group
        self.member: GroupMember | None = None
        """None while partitions are assigned by hand, or nothing is subscribed to yet."""
        self._reader = reader
        self._client = client
        self._config = config
        self._coordinator = offsets.coordinator
        self._offsets = offsets
        self._commit_due = client.now + config.auto_commit_interval_ms / 1000
        self._is_busy = False
        self._is_in_poll = False
        self._sent: dict[TopicPartition, tuple[Stream, int]] = {}
        """The positions last given to transactions. A seek begins another stream."""
        self._unsent: dict[TopicPartition, str] = {}
        """The partitions that were given up, and the reason why no transaction can take their
        positions."""
        self._denied: dict[tuple[TopicPartition, str], int] = {}
        """The positions that this consumer might not commit, by partition and topic id. A partition
        that comes back, and of which the group has committed nothing, is read on from here."""

    # --- who it is ------------------------------------------------------------------------------

    def subscribe(self, interest: Interest) -> None:
        """Changes the subscription, or joins. Called on the loop."""
        if self.member is not None:
            self.member.subscribe(interest)
            return
        self.member = self._offsets.member = GroupMember(
            self._coordinator, self._config, interest, self._reader.fetcher.tell
        )

    def membership(self) -> GroupMembership:
        instance = self._config.group_instance_id
        if self.member is None:
            return GroupMembership(self.group, "", 0, instance)
        epoch = self.member.state.epoch
        return GroupMembership(self.group, self.member.member_id, epoch, instance)

    @property
    def _generation(self) -> int:
        """The member's generation when the current partitions were assigned."""
        return 0 if self.member is None else self.member.owned.generation

    async def is_settled(self, *, timeout_s: float) -> bool:
        """Returns whether the partitions read now are this member's share: the group is not
        rebalancing, and the consumer has taken everything that the member was given. Called on the
        loop."""
        member = self.member
        if member is None:  # assigned by hand
            return True
        if member.state.epoch == MEMBER_EPOCH_JOIN or member.has_news:
            return False
        response: DescribeGroupResponse = await self._coordinator.ask(
            lambda topic, number, epoch: DescribeGroup(topic, number, epoch, self.group),
            timeout_s=timeout_s,
        )
        who = shown_part(member.member_id), member.state.epoch
        given = next(
            (m.assigned for m in response.members if (m.member, m.member_epoch) == who),
            None,
        )
        return (
            response.state == "stable"
            and given is not None
            and {TopicPartition(each.topic, each.partition) for each in given}
            == member.owned.held.keys()
        )

    async def leave(self, timeout_s: float | None = None) -> None:
        """Leaves the group. Called on the loop, after `give_up_steps`."""
        member = self.member
        if member is not None:
            try:
                await self._offsets.settle(LEAVE_TIMEOUT_S if timeout_s is None else timeout_s)
                await member.leave(timeout_s)
            finally:
                self.member = self._offsets.member = None
                member.stop()

    def close(self) -> None:
        """Ends the group duties, at the very end. Called on the loop. Without `leave` before it,
        the coordinator learns of it at the end of the session."""
        if self.member is not None:
            self.member.stop()
        self._offsets.close()

    # --- polls ----------------------------------------------------------------------------------

    def check_may_poll(self) -> None:
        """Raises InvalidRequestError in a callback."""
        if self._is_busy:
            raise InvalidRequestError("A callback of a consumer cannot poll it: commit or seek.")

    def poll_began(self) -> None:
        self.check_may_poll()
        self._is_in_poll = True
        if self.member is not None:
            self.member.poll_began()

    def poll_ended(self) -> None:
        self._is_in_poll = False
        if self.member is not None:
            self.member.poll_ended()

    @property
    def is_due(self) -> bool:
        """True if there are steps to take before records are returned."""
        member = self.member
        return (member is not None and member.has_news) or self._commit_is_due()

    def may_go_on(self) -> bool:
        """Returns whether there are no steps to take. Asked between two records of an iteration,
        which counts as a poll."""
        if self._is_busy or self._commit_is_due():
            return False
        return self.member is None or self.member.touch()

    def patience_s(self, left_s: float) -> float:
        """Maximum time a poll may wait until there may be steps again."""
        if not self._config.enable_auto_commit:
            return left_s
        return min(left_s, max(self._commit_due - self._client.now, 0.001))

    def poll_steps(self) -> Steps:
        """Gives up and takes partitions, and commits positions of earlier polls."""
        self._is_busy = True
        try:
            while self.member is not None and self.member.has_news:
                yield from self._follow(self.member)
            if self._commit_is_due():
                self._commit_due = self._client.now + self._config.auto_commit_interval_ms / 1000
                wanted = self._new_positions()
                if wanted:
                    yield self._commit_in_background(wanted, self._generation)
        finally:
            self._is_busy = False

    def _follow(self, member: GroupMember) -> Steps:
        """Follows the member's news: losses, failures, partitions to give up and to take."""
        state, owned = member.state, member.owned
        if member.missed is not None:
            yield member.check_time(member.missed)
            member.missed = None
        if (loss := owned.take_loss()) is not None:
            late = member.late_error() if loss.is_late else None  # Before a callback takes time.
            yield from self._lost(loss.partitions)
            if late is not None:
                raise late
        if (failure := state.failure) is not None:
            raise failure.with_message(failure.message)
        if state.is_away:
            yield member.come_back()
        while revoked := owned.revoked():
            places = set(revoked)
            yield from self._commit_before_revocation(places)
            try:
                yield from self._call("on_revoked", places)
            finally:
                self._forget(revoked)
                member.gave_up(revoked)
        if added := owned.take_added():
            self._take(added)
            yield from self._call("on_assigned", added)

    def _lost(self, partitions: Partitions) -> Steps:
        self._forget(partitions)
        yield from self._call("on_lost", partitions)

    def _commit_before_revocation(
        self, places: set[TopicPartition], timeout_s: float | None = None
    ) -> Steps:
        if self._config.enable_auto_commit and (wanted := self._new_positions(places)):
            yield self._commit_if_possible(wanted, self._generation, timeout_s)

    def _call(
        self,
        callback: Literal["on_assigned", "on_revoked", "on_lost"],
        places: Iterable[TopicPartition],
    ) -> Steps:
        """Calls the user's callback, whose time counts towards `max_poll_interval_ms`."""
        partitions = set(places)
        if not partitions:
            return
        if self.member is not None and self._is_in_poll:
            self.member.poll_ended()
        yield Call(callback, partitions)
        if self.member is not None and self._is_in_poll:
            self.member.poll_began()

    def _take(self, added: Partitions) -> None:
        assigned = self._reader.subscription.assigned
        for partition in added:
            self._offsets.known.pop(partition, None)
        self._reader.assign([*assigned, *added], topic_ids=added)
        for partition, topic_id in added.items():
            offset = self._denied.pop((partition, topic_id), None)
            if offset is not None:
                self._reader.restart(partition, None, offset)

    def _forget(self, partitions: Partitions) -> None:
        assigned = self._reader.subscription.assigned
        self._note_unsent(partitions)
        if any(place in assigned for place in partitions):
            self._reader.assign([place for place in assigned if place not in partitions])
        for partition in partitions:
            self._offsets.forget(partition)

    def give_up_steps(
        self, *, may_commit: bool = True, timeout_s: float | None = None
    ) -> Steps:
        """The steps before a consumer closes or assigns by hand; `leave` comes after them.
        `may_commit` allows an automatic commit, which gets `timeout_s`. Inside a callback there
        are no steps: the user is already being called."""
        if self._is_busy:
            return
        self._is_busy = True
        try:
            member = self.member
            places = set(self._reader.subscription.assigned)
            if member is not None and (loss := member.owned.take_loss()) is not None:
                yield from self._lost(loss.partitions)
                places.difference_update(loss.partitions)
            if may_commit:
                yield from self._commit_before_revocation(places, timeout_s)
            if member is not None:
                yield from self._call("on_revoked", places)
        finally:
            self._is_busy = False

    # --- commits --------------------------------------------------------------------------------

    def _commit_is_due(self) -> bool:
        return self._config.enable_auto_commit and self._client.now >= self._commit_due

    def _new_positions(self, among: Iterable[TopicPartition] | None = None) -> Positions:
        """The positions that are not committed yet."""
        known = self._offsets.known
        assigned = self._reader.subscription.assigned
        places = assigned if among is None else set(among)
        wanted: Positions = {}
        for partition, (offset, epoch) in self._reader.positions().items():
            if partition in places and known.get(partition) != offset:
                wanted[partition] = Position(
                    topic_id=assigned[partition].stream.topic_id or "",
                    offset=offset,
                    last_epoch=epoch,
                    metadata="",
                    tenure=self._offsets.tenure(partition),
                )
        return wanted

    def wanted(self, offsets: Offsets | None) -> tuple[Positions, int]:
        """The positions of a commit, and the generation that they belong to. Raises
        CommitRefusedError for partitions that this member does not own."""
        if offsets is None:
            return self._new_positions(), self._generation
        if not isinstance(offsets, Mapping):
            raise TypeError(f"commit takes {{partition: offset}}, not {offsets!r}.")
        member = self.member
        assigned = self._reader.subscription.assigned
        positions = self._reader.positions()
        refused: dict[TopicPartition, str] = {}
        wanted: Positions = {}
        for given, value in offsets.items():
            place = as_partition(given)
            offset, metadata = checked_position(value)
            topic_id = ""
            epoch: int | None = None
            if place in assigned:
                topic_id = assigned[place].stream.topic_id or ""
                known_offset, known_epoch = positions.get(place, (None, None))
                epoch = known_epoch if known_offset == offset else None
            elif member is not None:
                refused[place] = "this member does not own it"
            wanted[place] = Position(
                topic_id=topic_id,
                offset=offset,
                last_epoch=epoch,
                metadata=metadata,
                tenure=self._offsets.tenure(place),
            )
        if refused:
            raise refusal(refused)
        return wanted, self._generation

    async def commit(self, wanted: Positions, generation: int) -> None:
        """Commits these positions. Called on the loop. Raises CommitRefusedError,
        GroupNotEmptyError, AuthorizationError, TimeoutError."""
        if not wanted:
            return
        timeout_s = self._config.default_api_timeout_ms / 1000
        positions = dict(wanted)
        for place, position in wanted.items():
            if not position.topic_id:
                topic = await self._client.topic(place.topic, timeout_s=timeout_s)
                check_partition(topic, place.partition)
                positions[place] = position._replace(topic_id=topic.topic_id)
        keys = {(place, at.topic_id): at.offset for place, at in positions.items()}
        try:
            await self._offsets.submit(positions, generation)
        except AuthorizationError:
            self._denied |= keys
            raise
        for key in keys:
            self._denied.pop(key, None)

    async def _commit_if_possible(
        self, wanted: Positions, generation: int, timeout_s: float | None = None
    ) -> None:
        """Commits, or logs why that failed: without the commit records are only handled twice.
        `timeout_s` is a session by default."""
        if timeout_s is None:
            timeout_s = self._config.group_session_timeout_ms / 1000
        try:
            async with asyncio.timeout(timeout_s):
                await self.commit(wanted, generation)
        except (RayqError, TimeoutError) as error:
            logger.warning("positions in group %r were not committed: %s", self.group, error)

    async def _commit_in_background(self, wanted: Positions, generation: int) -> None:
        self._client.environment.tasks.spawn(
            self._commit_if_possible(wanted, generation), f"auto commit of group {self.group}"
        )

    # --- transactions ---------------------------------------------------------------------------

    def mark(self) -> dict[TopicPartition, Mark]:
        """Marks the positions to which the consumer goes back if the transaction that begins now
        has no effect: after everything that earlier transactions have committed, and so also before
        records polled since then. The previous transaction has committed its positions, or
        `go_back` was called."""
        self._check_commits_nothing()
        self._unsent.clear()
        marks = {}
        for place, assigned in self._reader.subscription.assigned.items():
            offset = assigned.stream.begin_offset
            stream, sent = self._sent.get(place, (None, None))
            if stream is assigned.stream:
                offset = self._offsets.known[place] = sent
            marks[place] = Mark(offset, self._tenure(place))
        return marks

    def go_back(self, mark: Mapping[TopicPartition, Mark], *, is_aborted: bool) -> None:
        """Makes the consumer read again the records of the transaction that began at `mark`, which
        has no effect. If not `is_aborted`, it is unknown whether it has, so reading continues at
        the committed offset once that is known."""
        self._unsent.clear()
        for place, assigned in list(self._reader.subscription.assigned.items()):
            found = mark.get(place)
            offset = assigned.stream.begin_offset
            if found is not None and found.tenure == self._tenure(place):
                offset = offset if found.offset is None else found.offset
            self._reader.restart(place, offset if is_aborted else None, offset)

    def positions_to_send(self, offsets: Offsets | None = None) -> GroupPositions:
        """The positions that a transaction has to commit for all records that this consumer has
        returned, or for these offsets, under its current membership. Raises CommitRefusedError if
        another member already continues with some of them, InvalidRequestError with
        enable_auto_commit."""
        self._check_commits_nothing()
        member = self.member
        epoch = 0 if member is None else member.state.epoch
        if member is not None and member.state.grant.generation != self._generation:
            self._unsent |= dict.fromkeys(member.owned.held, member.state.loss_reason)
        if self._unsent:
            unsent, self._unsent = self._unsent, {}
            raise refusal(unsent)
        assigned = self._reader.subscription.assigned
        positions, _ = self.wanted(offsets)
        wanted = {at: position for at, position in positions.items() if position.topic_id}
        for place, position in wanted.items():
            self._sent[place] = (assigned[place].stream, position.offset)
        return GroupPositions(
            self.group,
            "" if member is None else member.member_id,
            epoch,
            next(self._offsets.sequences),
            [
                (at.topic_id, place.partition, at.offset, at.last_epoch, at.metadata)
                for place, at in wanted.items()
            ],
        )

    def _check_commits_nothing(self) -> None:
        if self._config.enable_auto_commit:
            raise InvalidRequestError(
                "A consumer whose positions are committed by transactions must not commit them by "
                "itself: make it with enable_auto_commit=False."
            )

    def _tenure(self, place: TopicPartition) -> int:
        return self._offsets.tenure(place)

    def _note_unsent(self, partitions: Iterable[TopicPartition]) -> None:
        """Notes partitions that are about to be given up. A transaction that dealt with their
        records must not commit without their positions."""
        assigned = self._reader.subscription.assigned
        positions = self._reader.positions()
        for partition in partitions:
            sent = self._sent.pop(partition, None)
            if partition not in positions:
                continue
            stream, (offset, _) = assigned[partition].stream, positions[partition]
            is_known = offset == self._offsets.known.get(partition) or sent == (stream, offset)
            if stream.consumed_bytes and not is_known:
                self._unsent[partition] = "this member gave it up before its position was sent"

    async def committed(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """The offsets that the group has committed, whichever member did it. Called on the loop."""
        timeout_s = self._config.default_api_timeout_ms / 1000
        keys: dict[TopicPartition, tuple[str, int]] = {}
        for place in partitions:
            topic = await self._client.topic(place.topic, timeout_s=timeout_s)
            check_partition(topic, place.partition)
            keys[place] = (topic.topic_id, place.partition)
        found = await self._offsets.fetch(keys.values()) if keys else {}
        return {
            place: OffsetAndMetadata(found[key].offset, found[key].metadata)
            if key in found
            else None
            for place, key in keys.items()
        }


def pattern_text(pattern: str | re.Pattern[str]) -> str:
    """A pattern as the coordinator takes it. Raises TypeError, InvalidRequestError."""
    text = pattern.pattern if isinstance(pattern, re.Pattern) else pattern
    if not isinstance(text, str):
        raise TypeError(f"A pattern must be a str or re.compile(str), not {pattern!r}.")
    if isinstance(pattern, re.Pattern) and pattern.flags & ~re.UNICODE:
        raise InvalidRequestError(
            f"The pattern {text!r} has flags ({re.RegexFlag(pattern.flags & ~re.UNICODE)}), which "
            "a group's coordinator does not know: say it without, such as [Aa] for a."
        )
    check_pattern(text)
    return text
