"""Committed offsets of a group: asking for them, and committing, in the order of the calls.

A consumer has one commit in flight at a time. Commits requested meanwhile are merged: the newest
position of each partition goes with the next request. So positions never overtake each other, and a
consumer that commits often sends few requests.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from rayq.client.consuming.group_member import GroupMember
from rayq.client.coordinator import GroupCoordinator
from rayq.config import ConsumerConfig
from rayq.errors import (
    ClosedError,
    CommitRefusedError,
    RayqError,
    TimeoutError,
    from_wire,
    sentence,
)
from rayq.messages import (
    POSITIONS_MAX,
    CommitOffsets,
    CommitOffsetsResponse,
    CommittedOffset,
    FetchCommitted,
    FetchCommittedResponse,
    OffsetCommit,
)
from rayq.records import TopicPartition

logger = logging.getLogger(__name__)

BACKOFF_MAX_S = 0.5
"""Maximum wait between two tries of a commit that met a rebalance."""


class Position(NamedTuple):
    """A position to commit."""

    topic_id: str
    """"" until it is looked up, for a topic that the consumer does not read."""
    offset: int
    last_epoch: int | None
    """The leader epoch of the record before, if known."""
    metadata: str
    tenure: int
    """`GroupOffsets.tenure` when the position was taken."""


Positions = dict[TopicPartition, Position]


class _CommitInFlight(NamedTuple):
    positions: Positions
    member: GroupMember | None
    generation: int
    done: asyncio.Future[None]


class _MovedOnError(CommitRefusedError):
    """Ends the attempts of a commit: the member is out of its group, or has given up some of the
    partitions."""


class GroupOffsets:
    """The committed offsets of a group. Belongs to the loop. `member` is None for a consumer whose
    partitions are assigned by hand."""

    def __init__(self, coordinator: GroupCoordinator, config: ConsumerConfig) -> None:
        self.member: GroupMember | None = None
        self.known: dict[TopicPartition, int | None] = {}
        """The committed offsets, as far as this consumer has seen. Its thread reads this too."""
        self._tenures: dict[TopicPartition, int] = {}
        self.coordinator = coordinator
        self._client = coordinator.client
        self._config = config
        self.sequences = itertools.count(1)
        """The sequence numbers of commits, including those in transactions."""
        self._waiting: deque[_CommitInFlight] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._lookups: dict[tuple[str, int], asyncio.Future[CommittedOffset | None]] = {}
        self._is_closed = False

    def close(self) -> None:
        self._is_closed = True
        if self._sender is not None:
            self._sender.cancel()
        self._fail_waiting(ClosedError("The consumer was closed before this was committed."))

    def tenure(self, place: TopicPartition) -> int:
        """The number of times the partition was given up before. A position of an earlier tenure
        must not be committed in a later one: others have continued meanwhile."""
        return self._tenures.get(place, 0)

    def forget(self, place: TopicPartition) -> None:
        """Forgets a partition that is given up or lost. Called by the consumer's thread."""
        self.known.pop(place, None)
        self._tenures[place] = self.tenure(place) + 1

    # --- committing -----------------------------------------------------------------------------

    def submit(
        self, positions: Positions, generation: int
    ) -> asyncio.Future[None]:
        """Commits after everything submitted before. `generation` is the member's when the
        positions were taken: if the member has lost its partitions since, they are refused."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._is_closed:
            done.set_exception(ClosedError("The consumer is closed: nothing was committed."))
            return done
        self._waiting.append(_CommitInFlight(positions, self.member, generation, done))
        if self._sender is None:
            self._sender = self._client.environment.tasks.spawn(
                self._send_all(), f"commit of group {self.coordinator.group}"
            )
        return done

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                first = self._waiting[0]
                together: list[_CommitInFlight] = []
                while self._waiting and self._waiting[0][1:3] == first[1:3]:
                    together.append(self._waiting.popleft())
                try:
                    await self._send(together, first.member, first.generation)
                finally:
                    for commit in together:
                        if not commit.done.done():  # we are being cancelled
                            commit.done.cancel()
        finally:
            self._sender = None

    async def settle(self, timeout_s: float) -> None:
        """Waits until no commit is in flight, for at most `timeout_s`."""
        if self._sender is not None:
            await asyncio.wait([self._sender], timeout=timeout_s)

    async def _send(
        self, commits: list[_CommitInFlight], member: GroupMember | None, generation: int
    ) -> None:
        positions: Positions = {}
        for commit in commits:
            positions.update(commit.positions)
        refused: dict[TopicPartition, str] = {}
        failure: RayqError | None = None
        try:
            refused = await self._commit(positions, member, generation)
        except RayqError as error:
            failure = error
        for commit in commits:
            of_this = {
                partition: refused[partition]
                for partition in commit.positions
                if partition in refused
            }
            if commit.done.done():
                continue
            if failure is not None:
                commit.done.set_exception(type(failure)(failure.message))
            elif of_this:
                commit.done.set_exception(refusal(of_this))
            else:
                commit.done.set_result(None)

    async def _commit(
        self,
        positions: Positions,
        member: GroupMember | None,
        generation: int,
    ) -> dict[TopicPartition, str]:
        """Commits with retries; returns the refused partitions and the reasons."""
        client = self._client
        sequence = next(self.sequences)
        timeout_s = self._config.default_api_timeout_ms / 1000
        deadline = client.now + timeout_s
        backoff = client.backoff(self._config.retry_backoff_ms / 1000, BACKOFF_MAX_S)
        left = dict(positions)
        refused: dict[TopicPartition, str] = {}
        while True:
            if member is not None and member.state.grant.generation != generation:
                return refused | dict.fromkeys(left, member.state.loss_reason)
            for place in self._given_up(left, member):
                refused[place] = "this member gave it up before it was committed"
                del left[place]
            if not left:
                return refused
            asked = dict(itertools.islice(left.items(), POSITIONS_MAX))

            def build(
                topic_id: str, partition: int, leader_epoch: int, asked: Positions = asked
            ) -> CommitOffsets:
                # Each attempt is under the member's current epoch, so it must still be about
                # partitions that the member has owned since.
                if member is not None and (
                    member.state.grant.generation != generation or self._given_up(asked, member)
                ):
                    raise _MovedOnError("The partitions were taken or given up meanwhile.")
                return CommitOffsets(
                    topic_id=topic_id,
                    partition=partition,
                    leader_epoch=leader_epoch,
                    group=self.coordinator.group,
                    member="" if member is None else member.member_id,
                    member_epoch=0 if member is None else member.state.epoch,
                    sequence=sequence,
                    offsets=[
                        OffsetCommit(
                            at.topic_id, place.partition, at.offset, at.last_epoch, at.metadata
                        )
                        for place, at in asked.items()
                    ],
                )

            try:
                response = await self.coordinator.ask(
                    build, timeout_s=max(deadline - client.now, 0.001)
                )
            except _MovedOnError:
                continue  # It is sorted out above.
            except RayqError as error:
                if not error.ends_membership:
                    raise
                if member is None or member.state.failure is not None:
                    return refused | dict.fromkeys(left, str(error))
                member.commit_failed(error, generation)
                if member.state.grant.generation != generation:
                    continue
                again: RayqError = error
            else:
                again = self._take(response, asked, left, refused)
                if not left.keys() & asked.keys():
                    continue  # with those that did not fit into this request
            wait_s = backoff.next_s()
            if client.now + wait_s >= deadline:
                raise TimeoutError(
                    f"Positions of group {self.coordinator.group!r} were not committed within "
                    f"{timeout_s:g} s (default_api_timeout_ms): {again}"
                ) from again
            await asyncio.sleep(wait_s)

    def _given_up(
        self, positions: Positions, member: GroupMember | None
    ) -> list[TopicPartition]:
        """The partitions that the member has given up since, whether it has them again or not."""
        if member is None:
            return []
        return [
            place for place, position in positions.items() if position.tenure != self.tenure(place)
        ]

    def _take(
        self,
        response: CommitOffsetsResponse,
        asked: Positions,
        left: Positions,
        refused: dict[TopicPartition, str],
    ) -> RayqError:
        """Removes committed and refused positions of `asked` from `left`. Returns the reason why
        the rest is worth another try, which comes after those not asked for yet."""
        again: RayqError = TimeoutError("no answer")
        said = {
            (topic_id, number): (code, text) for topic_id, number, code, text in response.refused
        }
        for partition, position in asked.items():
            code_and_text = said.get((position.topic_id, partition.partition))
            if code_and_text is None:
                self.known[partition] = position.offset
                del left[partition]
                continue
            error = from_wire(*code_and_text)
            if error.retriable:
                again = error
                left[partition] = left.pop(partition)
            else:
                refused[partition] = error.message
                del left[partition]
        return again

    def _fail_waiting(self, error: RayqError) -> None:
        while self._waiting:
            done = self._waiting.popleft().done
            if not done.done():
                done.set_exception(error)

    # --- asking ---------------------------------------------------------------------------------

    async def lookup(self, place: TopicPartition, topic_id: str) -> CommittedOffset | None:
        """The committed offset of one partition. Lookups made at the same moment share a request.
        Retries until a coordinator answers."""
        key = (topic_id, place.partition)
        lookup = self._lookups.get(key)
        if lookup is None:
            lookup = self._lookups[key] = asyncio.get_running_loop().create_future()
            if len(self._lookups) == 1:
                self._client.environment.tasks.spawn(self._look_up(), "look up committed offsets")
        found = await asyncio.shield(lookup)
        self.known[place] = None if found is None else found.offset
        return found

    async def _look_up(self) -> None:
        await asyncio.sleep(0)  # others that start now join in
        lookups, self._lookups = self._lookups, {}
        try:
            while not self._is_closed:
                try:
                    found = await self.fetch(list(lookups))
                    break
                except TimeoutError as error:
                    logger.warning("no committed offsets yet: %s", error)
            else:
                raise ClosedError("The consumer was closed.")
        except RayqError as error:
            for lookup in lookups.values():
                if not lookup.done():
                    lookup.set_exception(error)
                    lookup.exception()  # perhaps nobody waits any longer
        else:
            for key, lookup in lookups.items():
                if not lookup.done():
                    lookup.set_result(found.get(key))
        finally:
            for lookup in lookups.values():
                lookup.cancel()

    async def fetch(
        self, partitions: Iterable[tuple[str, int]] | None
    ) -> dict[tuple[str, int], CommittedOffset]:
        """The committed offsets of `(topic id, partition)` pairs (None: all of the group)."""
        if partitions is None:
            return await self._fetch(None)
        wanted = list(partitions)
        found: dict[tuple[str, int], CommittedOffset] = {}
        for first in range(0, len(wanted), POSITIONS_MAX):
            found |= await self._fetch(wanted[first : first + POSITIONS_MAX])
        return found

    async def _fetch(
        self, wanted: list[tuple[str, int]] | None
    ) -> dict[tuple[str, int], CommittedOffset]:
        response: FetchCommittedResponse = await self.coordinator.ask(
            lambda topic_id, partition, leader_epoch: FetchCommitted(
                topic_id=topic_id,
                partition=partition,
                leader_epoch=leader_epoch,
                group=self.coordinator.group,
                partitions=wanted,
            )
        )
        return {(commit.topic_id, commit.partition): commit for commit in response.offsets}


def refusal(refused: Mapping[TopicPartition, str]) -> CommitRefusedError:
    """The error that names partitions and reasons."""
    by_reason: dict[str, list[str]] = {}
    for (topic, partition), reason in sorted(refused.items()):
        by_reason.setdefault(reason, []).append(f"{topic}-{partition}")
    told = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())
    return CommitRefusedError(
        f"Not committed: {sentence(told)} Another member may have continued from the last commit, "
        "so records after it may be handled twice. Poll again to continue with what this member "
        "owns now."
    )
