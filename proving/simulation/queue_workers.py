"""Consumers of a queue that speak to its leaders in single messages, and handle records badly.

One takes from each partition in turn: it acknowledges most records, and gives back, rejects,
extends, forgets or settles too late some others. It notes all that in the history. Records of one
key it settles in order, as a consumer must; but after it gave the first one back it may try to
settle a later one, which must fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Literal, NamedTuple

from rayq.client.client import Client
from rayq.client.metadata import LeaderAndEpoch
from rayq.errors import RayqError
from rayq.messages import Request, Settle, SettleResponse, Take, TakeResponse
from rayq.storage.batch import decode_columns, split_batches
from rayq.testing.checker import Recorder

SETTLE_TIMEOUT_S = 6.0
ATTEMPT_S = 3.0
NEW_PARTITION_LOOK_S = 0.5
HOLD_SHARE, HOLD_MAX = 0.3, 0.7
"""Probability that a worker holds records for a while before it settles any, and how long at most,
as a part of the queue's timeout."""
LOST_SHARE = 0.1
"""Probability that a worker forgets at once what a take brought."""
What = Literal["ack", "nack", "reject", "extend"]


class QueuePlan(NamedTuple):
    """A queue of the run."""

    name: str
    topic: str
    timeout_s: float
    ordered: bool
    is_loose: bool = False

    def noted_as(self, queue_id: str) -> str:
        """Name in the history. A loose queue may be deleted and created again."""
        return f"{self.name} {queue_id}" if self.is_loose else self.name


class _Taken(NamedTuple):
    offset: int
    delivery: int
    value: bytes
    key: bytes | None


class _Delivery(NamedTuple):
    """The answer to one take."""

    queue_id: str
    holder: str
    state_epoch: int
    records: list[_Taken]


class RawWorker:
    """See the module. `queue_id` answers that of the queue, `partition_count` how many partitions
    its topic has now."""

    def __init__(
        self,
        name: str,
        client: Client,
        rng: random.Random,
        plan: QueuePlan,
        queue_id: Callable[[], str],
        partition_count: Callable[[], int],
        recorder: Recorder,
        now_s: Callable[[], float],
        problems: list[str],
    ) -> None:
        self._name = name
        self._client = client
        self._rng = rng
        self._plan = plan
        self._queue_id = queue_id
        self._partition_count = partition_count
        self._recorder = recorder
        self._now_s = now_s
        self._problems = problems
        self._holders = 0
        self._late: set[asyncio.Task[None]] = set()

    async def work(self, goes_on: Callable[[], bool], is_wild: Callable[[], bool]) -> None:
        async with asyncio.TaskGroup() as serving:
            served = 0
            while goes_on():
                for number in range(served, self._partition_count()):
                    serving.create_task(self._serve(number, goes_on, is_wild))
                    served += 1
                await asyncio.sleep(NEW_PARTITION_LOOK_S)
        if self._late:
            await asyncio.wait(self._late)

    async def _serve(
        self, partition: int, goes_on: Callable[[], bool], is_wild: Callable[[], bool]
    ) -> None:
        while goes_on():
            try:
                taken = await self._take(partition, is_wild())
            except RayqError:
                await asyncio.sleep(self._rng.uniform(0.05, 0.5))
                continue
            if taken.records:
                await self._handle(partition, taken, is_wild())

    # --- taking -----------------------------------------------------------------------------------

    async def _take(self, partition: int, is_wild: bool) -> _Delivery:
        holder, asked_s = "", 0.0
        queue_id = self._queue_id()
        wait_ms = self._rng.choice((0, 300, 2_000))
        records_max = self._rng.choice((1, 5, 30, 500)) if is_wild else 500
        bytes_max = self._rng.choice((200, 1 << 20)) if is_wild else 1 << 20

        def build(topic_id: str, leader: LeaderAndEpoch) -> Request[TakeResponse]:
            nonlocal holder, asked_s
            # The answer to the attempt before may be lost: what it gave has another holder.
            self._holders += 1
            holder, asked_s = f"{self._name}-{self._holders}", self._now_s()
            return Take(
                topic_id=topic_id,
                partition=partition,
                leader_epoch=leader.epoch,
                queue_id=queue_id,
                holder=holder,
                records_max=records_max,
                bytes_max=bytes_max,
                wait_ms=wait_ms,
                tells_begins=True,
            )

        answer, payload = await self._client.exchange_with_leader(
            self._plan.topic,
            partition,
            build,
            timeout_s=2 * ATTEMPT_S,
            attempt_timeout_s=wait_ms / 1000 + ATTEMPT_S,
        )
        if is_wild and self._rng.random() < LOST_SHARE:
            return _Delivery(queue_id, holder, answer.state_epoch, [])  # Nobody sees them.
        records = self._records(partition, answer, payload)
        if answer.unbegun:
            taken = _Delivery(queue_id, holder, answer.state_epoch, records)
            unbegun = {
                offset for first, last in answer.unbegun for offset in range(first, last + 1)
            }
            records = await self._begin(partition, taken, unbegun)
        if records:
            self._recorder.took(
                self._plan.noted_as(queue_id),
                self._name,
                partition,
                records,
                asked_s=asked_s,
                at_s=self._now_s(),
                state_epoch=answer.state_epoch,
            )
        return _Delivery(queue_id, holder, answer.state_epoch, records)

    async def _begin(
        self, partition: int, taken: _Delivery, unbegun: set[int]
    ) -> list[_Taken]:
        """The records that are the worker's, once the leader knows what it begins."""
        begins = [record for record in taken.records if record.offset in unbegun]
        noted_as = self._plan.noted_as(taken.queue_id)
        self._recorder.begun(noted_as, [begin.value for begin in begins])
        ranges = _merged([(begin.offset, begin.offset, begin.delivery) for begin in begins])

        def build(topic_id: str, leader: LeaderAndEpoch) -> Request[SettleResponse]:
            return Settle(
                topic_id=topic_id,
                partition=partition,
                leader_epoch=leader.epoch,
                queue_id=taken.queue_id,
                holder=taken.holder,
                state_epoch=taken.state_epoch,
                begins=ranges,
            )

        not_begun = unbegun
        with contextlib.suppress(RayqError):  # They come again.
            answer = await self._client.ask_leader(
                self._plan.topic,
                partition,
                build,
                timeout_s=SETTLE_TIMEOUT_S,
                attempt_timeout_s=ATTEMPT_S,
            )
            not_begun = {
                offset for first, last, _ in answer.lost for offset in range(first, last + 1)
            }
        # Later records of their keys come again after them.
        first_lost: dict[bytes | None, int] = {}
        for record in taken.records:
            if record.offset in not_begun:
                first_lost.setdefault(record.key if self._plan.ordered else None, record.offset)
        return [
            record
            for record in taken.records
            if record.offset not in not_begun
            and (
                record.key is None or record.offset < first_lost.get(record.key, record.offset + 1)
            )
        ]

    def _records(self, partition: int, answer: TakeResponse, payload: memoryview) -> list[_Taken]:
        found: dict[int, tuple[bytes, bytes | None]] = {}
        for position, header in split_batches(payload):
            if header.is_control:
                continue
            columns = decode_columns(payload, position, header)
            keys = columns.keys or [None] * len(columns.values)
            for offset, value, key in zip(columns.offsets, columns.values, keys, strict=True):
                found[offset] = (bytes(value or b""), None if key is None else bytes(key))
        taken = []
        for first, last, count in answer.locks:
            for offset in range(first, last + 1):
                if offset in found:
                    taken.append(_Taken(offset, count, *found[offset]))
                else:
                    self._problems.append(
                        f"{self._plan.name}, partition {partition}: an answer locks {offset} for "
                        f"{self._name} and does not bring it"
                    )
        return taken

    # --- handling ---------------------------------------------------------------------------------

    async def _handle(self, partition: int, taken: _Delivery, is_wild: bool) -> None:
        rng = self._rng
        lazy = rng.random()
        given_up: set[bytes] = set()
        acks: list[_Taken] = []
        if is_wild and rng.random() < HOLD_SHARE:
            await asyncio.sleep(rng.uniform(0, HOLD_MAX * self._plan.timeout_s))
        for record in taken.records:
            if self._plan.ordered and record.key in given_up:
                continue
            what = "ack"
            if is_wild:
                what = rng.choices(
                    ("ack", "nack", "reject", "forget", "slow", "late"), (90, 4, 1, 1, 1, 1)
                )[0]
            if what == "ack":
                acks.append(record)
                if is_wild and rng.random() < 0.1 * lazy:
                    await self._settle(partition, taken, "ack", acks)
                    acks = []
                    await asyncio.sleep(rng.uniform(0, 0.1))
            elif what == "slow":
                await self._settle(partition, taken, "ack", acks)
                seconds = rng.uniform(0.5, 3.0)
                await self._settle(partition, taken, "extend", [record], seconds=seconds)
                await asyncio.sleep(seconds * rng.uniform(0.2, 1.1))
                acks = [record]
            else:
                if record.key is not None:
                    given_up.add(record.key)
                if what in ("nack", "reject"):
                    await self._settle(partition, taken, "ack", acks)
                    acks = []
                    await self._give_back(partition, taken, what, record)
                elif what == "late":
                    self._settle_late(partition, taken, record)
        await self._settle(partition, taken, "ack", acks)

    async def _give_back(
        self, partition: int, taken: _Delivery, what: str, record: _Taken
    ) -> None:
        rng = self._rng
        is_heard = await self._settle(
            partition,
            taken,
            "reject" if what == "reject" else "nack",
            [record],
            seconds=rng.choice((None, 0.0, 0.3, 1.5)) if what == "nack" else None,
        )
        later = [other for other in taken.records if other.offset > record.offset]
        mine = [other for other in later if other.key is not None and other.key == record.key]
        if what == "nack" and is_heard and mine and self._plan.ordered:
            await self._settle(partition, taken, "ack", mine[:1])

    def _settle_late(self, partition: int, taken: _Delivery, record: _Taken) -> None:
        async def settle() -> None:
            await asyncio.sleep(self._plan.timeout_s * self._rng.uniform(0.9, 2.0))
            await self._settle(partition, taken, "ack", [record])

        task = self._client.environment.tasks.spawn(settle(), f"{self._name} settles late")
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def _settle(
        self,
        partition: int,
        taken: _Delivery,
        what: What,
        records: list[_Taken],
        *,
        seconds: float | None = None,
    ) -> bool:
        """Returns whether the leader answered."""
        if not records:
            return True
        number = self._recorder.settling(
            self._plan.noted_as(taken.queue_id),
            self._name,
            partition,
            what,
            [(record.offset, record.delivery) for record in records],
            at_s=self._now_s(),
            state_epoch=taken.state_epoch,
            seconds=seconds,
        )
        ranges = [(record.offset, record.offset, record.delivery) for record in records]
        milliseconds = None if seconds is None else round(seconds * 1000)

        def build(topic_id: str, leader: LeaderAndEpoch) -> Request[SettleResponse]:
            return Settle(
                topic_id=topic_id,
                partition=partition,
                leader_epoch=leader.epoch,
                queue_id=taken.queue_id,
                holder=taken.holder,
                state_epoch=taken.state_epoch,
                acks=_merged(ranges) if what == "ack" else [],
                nacks=[(*span, milliseconds) for span in ranges] if what == "nack" else [],
                rejects=[(record.offset, record.delivery, "unwanted") for record in records]
                if what == "reject"
                else [],
                extends=[(*span, milliseconds or 0) for span in ranges] if what == "extend" else [],
                may_linger=number % 2 == 0,
            )

        try:
            answer = await self._client.ask_leader(
                self._plan.topic,
                partition,
                build,
                timeout_s=SETTLE_TIMEOUT_S,
                attempt_timeout_s=ATTEMPT_S,
            )
        except RayqError as error:
            self._recorder.not_settled(self._name, number, error, at_s=self._now_s())
            return False
        lost = [offset for first, last, _ in answer.lost for offset in range(first, last + 1)]
        self._recorder.settled(self._name, number, at_s=self._now_s(), lost=lost)
        return True


def _merged(ranges: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Neighbours of one count as one range."""
    merged: list[tuple[int, int, int]] = []
    for first, last, count in sorted(ranges):
        if merged and merged[-1][1] + 1 == first and merged[-1][2] == count:
            merged[-1] = (merged[-1][0], last, count)
        else:
            merged.append((first, last, count))
    return merged
