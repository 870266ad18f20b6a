"""Reading up to the current end of the log: the rest of a snapshot of end offsets."""

from __future__ import annotations

from typing import Any

from rayq.client.consuming.consumer_core import ConsumerCore
from rayq.errors import TimeoutError
from rayq.records import Record, TopicPartition

UNTIL_END_TIMEOUT_S = 60.0
"""Default of `until_end(timeout_s=...)`."""
SETTLE_PAUSE_S = 0.1
"""Interval between two requests to a coordinator whose group is rebalancing."""
SHOWN_MAX = 5


class UntilEnd:
    """The rest of one reading up to the end. Without a group the partitions and their ends are
    fixed when the reading begins. A member of a group reads its share: the end of a partition is
    fixed when the reading begins, or when the partition is assigned; the reading is over once the
    group has settled too.

    Belongs to the consumer's thread. `ask` runs on the loop while that thread waits."""

    def __init__(self, core: ConsumerCore, timeout_s: float) -> None:
        self.records: list[Record[Any, Any]] = []
        """The records that `take` took."""
        self.is_over = False
        """True if everything before the ends was returned, as of the last `ask`."""
        self._core = core
        self._timeout_s = timeout_s
        self._ends: dict[TopicPartition, int] = {}
        self._has_begun = False
        self._progress: object = None
        self._progress_at = 0.0
        core.look_for_new_partitions()

    def take(self, records_max: int) -> bool:
        """Takes records into `records`. Returns False if none have arrived, and waiting is all
        there is to do."""
        self.records = self._core.take_records(records_max, self._left())
        return bool(self.records) or self.has_question

    @property
    def has_question(self) -> bool:
        """True if `ask` has to run before records arrive."""
        return bool(self._unknown()) or not self._left()

    async def ask(self) -> None:
        """Asks for the ends that are not known yet, and determines whether this `is_over`."""
        core = self._core
        if unknown := self._unknown():
            self._ends |= await core.end_offsets(unknown, timeout_s=self._timeout_s)
        self._has_begun = True
        group = core.group
        if self._left():
            self.is_over = False
        elif group is None or await group.is_settled(timeout_s=self._timeout_s):
            self.is_over = True
        else:
            self.is_over = False
            await core.when(lambda: group.is_due, SETTLE_PAUSE_S)

    def made_progress(self) -> None:
        self._progress_at = self._core.client.now

    def patience_s(self) -> float:
        """The time for which to continue waiting. Raises TimeoutError if there was no progress for
        too long."""
        streams = [self._core.subscription.get(place).stream for place in self._left()]
        progress = [
            (stream.partition, stream.received_bytes, stream.position) for stream in streams
        ]
        if progress != self._progress:
            self._progress = progress
            self.made_progress()
        left_s = self._progress_at + self._timeout_s - self._core.client.now
        if left_s < 0:
            raise TimeoutError(
                f"Reading up to the end has come no further for {self._timeout_s:g} s: "
                f"{self._told()}."
            )
        return left_s

    def _told(self) -> str:
        left = self._left()
        if not left:
            return "the group is being rebalanced, so this consumer's share is not certain"
        told = []
        for place, end in left.items():
            stream = self._core.subscription.get(place).stream
            reason = ""
            if stream.trouble is not None:
                reason = f" ({stream.trouble})"
            elif stream.log_end is not None and stream.log_end < end:
                reason = f" (its log ends at {stream.log_end} now)"
            at = "no position yet" if stream.position is None else f"{stream.position}"
            told.append(f"{place.topic}-{place.partition} is at {at}, and its end at {end}{reason}")
        more = f"; and {len(told) - SHOWN_MAX} more" if len(told) > SHOWN_MAX else ""
        return "; ".join(told[:SHOWN_MAX]) + more

    def _unknown(self) -> list[TopicPartition]:
        """The partitions whose end has to be asked for."""
        group = self._core.group
        if self._has_begun and (group is None or group.member is None):
            return []
        assigned = self._core.subscription.assigned
        # a partition that comes back has a new end
        for place in self._ends.keys() - assigned.keys():
            del self._ends[place]
        return [place for place in assigned if place not in self._ends]

    def _left(self) -> dict[TopicPartition, int]:
        """The ends of the partitions that have records left; paused ones do not count."""
        assigned = self._core.subscription.assigned
        return {
            place: end
            for place, end in self._ends.items()
            if place in assigned
            and not assigned[place].is_paused
            and not assigned[place].stream.has_passed(end)
        }
