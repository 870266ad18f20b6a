"""Operators that send dead letters back, and what stands where they were sent in the end."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

from proving.simulation.invariants_queues import QueueInvariants, is_done
from rayq.client.client import Client
from rayq.client.metadata import LeaderAndEpoch
from rayq.core.queues.records import Kept
from rayq.messages import ListQueueRecords, MoveQueueRecords, Request
from rayq.records import Record
from rayq.testing.checker.recorder import as_text

DROPPED_SHARE = 0.1


class Redrives:
    """The dead letters of some queues. Those of `own`, a queue with a topic of its own, go back to
    it, the others to the topic `aside`, which gets nothing else."""

    def __init__(
        self, queues: Iterable[str], invariants: QueueInvariants, *, own: str, aside: str
    ) -> None:
        self.topics = [f"{name}.dead" for name in queues]
        self.queue_ids: dict[str, str] = {}
        """By the name of each of these topics, to be set before anything else."""
        self._invariants = invariants
        self._own, self._aside = own, aside
        self._moved: set[tuple[str, int]] = set()
        """The dead letters that a leader says it moved, by topic and offset."""
        self._dropped: set[tuple[str, int]] = set()
        """The letters that an operator asked to drop."""

    async def redrive_some(self, client: Client, rng: random.Random) -> None:
        """Raises RayqError."""
        topic = rng.choice(self.topics)
        queue_id = self.queue_ids[topic]

        def list_them(topic_id: str, leader: LeaderAndEpoch) -> Request[Any]:
            return ListQueueRecords(
                topic_id=topic_id,
                partition=0,
                leader_epoch=leader.epoch,
                queue_id=queue_id,
                offset=0,
                states=[],
                records_max=rng.choice((2, 100)),
            )

        found = await client.ask_leader(topic, 0, list_them, timeout_s=8, attempt_timeout_s=4)
        offsets = [record.offset for record in found.records if rng.random() < 0.8]
        if not offsets:
            return
        target = "" if topic == f"{self._own}.dead" else self._aside
        is_dropped = rng.random() < DROPPED_SHARE
        if is_dropped:
            self._dropped |= {(topic, offset) for offset in offsets}

        def move(topic_id: str, leader: LeaderAndEpoch) -> Request[Any]:
            return MoveQueueRecords(
                topic_id=topic_id,
                partition=0,
                leader_epoch=leader.epoch,
                queue_id=queue_id,
                offsets=offsets,
                to_topic=None if is_dropped else target,
            )

        answer = await client.ask_leader(topic, 0, move, timeout_s=12, attempt_timeout_s=6)
        self._moved |= {(topic, record) for record in answer.moved}

    # --- the end ----------------------------------------------------------------------------------

    def kept(self) -> dict[str, Kept]:
        """The state that is kept now of the queue of each topic."""
        return {topic: self._invariants.kept(self.queue_ids[topic], 0) for topic in self.topics}

    def problems(
        self, records: list[Record], before: dict[str, Kept], after: dict[str, Kept]
    ) -> list[str]:
        """Each dead letter that is settled stands once where it was sent, unless an operator asked
        to drop it; a letter that is not settled stands there only while its move lasts. `records`
        are those of all topics; `before` they were read that was kept, `after` this."""
        stands = Counter((record.topic, as_text(record.value or b"")) for record in records)
        least: Counter[tuple[str, str]] = Counter()
        most: Counter[tuple[str, str]] = Counter()
        problems = []
        for record in records:
            if record.topic not in before:
                continue
            target = self._own if record.topic == f"{self._own}.dead" else self._aside
            value = as_text(record.value or b"")
            is_settled = is_done(before[record.topic], record.offset)
            moves = after[record.topic].moves.values()
            may_be_there = is_done(after[record.topic], record.offset) or any(
                record.offset == record.offset for move in moves for record in move.records
            )
            least[target, value] += (
                is_settled and (record.topic, record.offset) not in self._dropped
            )
            most[target, value] += may_be_there
            if (record.topic, record.offset) in self._moved and not is_settled:
                problems.append(
                    f"{record.topic}@{record.offset} {value!r} was told to be moved, "
                    "and is unsettled"
                )
        for target, value in most.keys() | {
            record for record in stands if record[0] == self._aside
        }:
            there = stands[target, value] - (target == self._own)
            if not least[target, value] <= there <= most[target, value]:
                problems.append(
                    f"{there} copies of {value!r} are in {target}: between {least[target, value]} "
                    f"and {most[target, value]} dead letters were moved there"
                )
        return problems
