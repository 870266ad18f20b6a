"""One of the queues that a consumer takes from: a lane at each of its partitions."""

from __future__ import annotations

from rayq.client.client import Client
from rayq.client.queues.lane import TAKE_RECORDS_MAX, Lane, Owner
from rayq.client.queues.shelf import SHELF_BYTES_MAX, SHELF_MAX, SHELF_SHARE, Shelf
from rayq.client.queues.taken import Row, Taken
from rayq.client.queues.task import Decisions
from rayq.config import QueueConfig, parse_stored
from rayq.errors import UnknownQueueError
from rayq.messages import QueueMetadata

WAITING_LANES_MAX = 8
"""At so many partitions takes wait for records; the others are swept."""
TAKE_WAIT_MS = 500
"""How long a leader holds a take that finds nothing."""
READY_WAIT_MS = 20
"""The same where there was something a moment ago, and the consumer takes nothing ahead: another
may have it by now."""
COMING_S = 0.2
"""How long other queues wait for records that were asked for."""


class Source:
    """Belongs to the loop; `name`, `topic` and `config` are read by other threads."""

    def __init__(self, client: Client, owner: Owner, found: QueueMetadata) -> None:
        self._client = client
        self._owner = owner
        self.name = found.name
        self.topic = found.topic
        self.topic_id = found.topic_id
        self.queue_id = found.queue_id
        self.config = parse_stored(QueueConfig, found.config)
        self.lanes: list[Lane] = []
        self.shelf = Shelf()
        """Some of what waits, for users' threads."""
        self.failure: UnknownQueueError | None = None
        """It was deleted."""
        self._waiting_lanes: dict[Lane, None] = {}
        client.add_interest(self.topic)
        self.look_for_partitions()

    def look_for_partitions(self) -> None:
        """Adds lanes at partitions that are new."""
        topic = self._client.metadata.topics.get(self.topic)
        if topic is None or topic.topic_id != self.topic_id:
            return
        for number in range(len(self.lanes), len(topic.partitions)):
            self.lanes.append(Lane(self._client, self._owner, self, number))
        random = self._client.environment.random
        others = [lane for lane in self.lanes if lane not in self._waiting_lanes]
        random.shuffle(others)
        for lane in others[: WAITING_LANES_MAX - len(self._waiting_lanes)]:
            self._waiting_lanes[lane] = None

    def is_now(self, found: QueueMetadata) -> bool:
        """Takes a newer config over. False: it is another queue of this name."""
        if (found.queue_id, found.topic_id) != (self.queue_id, self.topic_id):
            return False
        self.config = parse_stored(QueueConfig, found.config)
        return True

    def close(self) -> None:
        """Nothing more is asked or told."""
        self._client.drop_interest(self.topic)
        for lane in self.lanes:
            lane.is_closed = True

    # --- how much there is ----------------------------------------------------------------------

    @property
    def available(self) -> int:
        """How many records are here that may be handed out now."""
        return sum(lane.available() for lane in self.lanes) + len(self.shelf)

    @property
    def out(self) -> int:
        """How many records users have in hand, about."""
        return max(sum(lane.out for lane in self.lanes) - len(self.shelf), 0)

    def is_coming(self, now_s: float) -> bool:
        """Whether records that are known to be there were just asked for."""
        return any(
            lane.asked and lane.ready and now_s - lane.asked_at_s < COMING_S for lane in self.lanes
        )

    # --- handing out ----------------------------------------------------------------------------

    def hand_out(
        self, count: int, *, is_at_once: bool = False
    ) -> list[tuple[Taken, list[Row]]]:
        """Up to `count` records that are here, those that were taken first. See `Lane`."""
        found: list[tuple[Taken, list[Row]]] = []
        lanes = [lane for lane in self.lanes if lane.takens]
        for lane in sorted(lanes, key=lambda one: one.takens[0].taken_at_s):
            if count <= 0:
                break
            parts = lane.hand_out(count, is_at_once=is_at_once)
            count -= sum(len(rows) for _, rows in parts)
            found += parts
        return found

    def fill_shelf(self, decisions: Decisions, asked: int) -> None:
        """After a thread was handed out what it had asked for: the next ones need not ask."""
        if self.config.ordered_by_key or asked * SHELF_SHARE > SHELF_MAX:
            return
        parts = self.hand_out(SHELF_MAX, is_at_once=True)
        if sum(len(row.value or b"") for _, rows in parts for row in rows) > SHELF_BYTES_MAX:
            _put_back(parts)  # So much is counted where it waits.
        else:
            self.shelf.put(parts, decisions)

    def clear_shelf(self) -> None:
        """All that waits is with the lanes."""
        _put_back(self.shelf.take_back())

    # --- giving back ----------------------------------------------------------------------------

    def give_back(self, count: int) -> None:
        """Gives so many back of those that wait here, those that were taken last."""
        lanes = [lane for lane in self.lanes if lane.takens]
        for lane in sorted(lanes, key=lambda one: -one.takens[-1].taken_at_s):
            some = min(count, lane.waiting)
            if some > 0:
                lane.give_back(some)
                count -= some

    # --- asking ---------------------------------------------------------------------------------
    # A lane is *known* where its leader has told since `known_s` what more there is. Where it holds
    # a take there is nothing.

    def expected(self, now_s: float) -> int:
        """How many records are on their way, most likely."""
        return sum(lane.expected(now_s) for lane in self.lanes)

    def may_have(self, known_s: float, now_s: float) -> bool:
        """Whether there may be records at a leader that can be asked now."""
        return any(
            lane.ready or self._is_unknown(lane, known_s, now_s)
            for lane in self.lanes
            if lane.may_ask(now_s)
        )

    def _is_unknown(self, lane: Lane, known_s: float, now_s: float) -> bool:
        if lane in self._waiting_lanes:
            return lane.known_at_s < known_s
        return now_s >= lane.next_sweep_s

    def look(
        self, budget: int, known_s: float, now_s: float, ready_wait_ms: int, *, is_ahead: bool
    ) -> None:
        """Asks for so many records where there may be some: where more is known to be, then where
        nothing is known, at few leaders at a time. So no more are locked than were asked for."""
        free = sorted(
            (lane for lane in self.lanes if lane.may_ask(now_s)), key=lambda lane: lane.asked_at_s
        )
        even = -(-budget // max(len(free), 1))
        for lane in [one for one in free if one.ready]:
            if budget <= 0:
                return
            # Others may have come since: those would wait for one more take.
            count = min(budget, max(lane.ready, even), TAKE_RECORDS_MAX)
            lane.take(count, ready_wait_ms, is_ahead=is_ahead)
            budget -= count
        unknown = [
            one for one in free if not one.asked and self._is_unknown(one, known_s, now_s)
        ]
        width = max(budget, -(-len(unknown) // WAITING_LANES_MAX)) if budget > 0 else 0
        unknown = unknown[:width]
        for index, lane in enumerate(unknown):
            count = max(1, -(-budget // (len(unknown) - index)))
            lane.take(min(count, TAKE_RECORDS_MAX), 0, is_ahead=is_ahead)
            budget -= count

    def wait(
        self, budget: int, wait_ms: int, now_s: float, *, is_ahead: bool, is_idle: bool
    ) -> None:
        """Has takes wait for so many records at some leaders, of which none has any. Where the
        consumer `is_idle`, for at least one at each: what comes at several at once is given back.
        """
        free = [lane for lane in self._waiting_lanes if lane.may_ask(now_s)]
        random = self._client.environment.random
        for index, lane in enumerate(free):
            count = -(-budget // (len(free) - index))
            if count <= 0 and not is_idle:
                return
            count = max(count, 1)
            # Takes of one consumer are not the first ones everywhere.
            lane_wait_ms = round(wait_ms * random.uniform(0.5, 1.0))
            lane.take(min(count, TAKE_RECORDS_MAX), lane_wait_ms, is_ahead=is_ahead, waits=True)
            budget -= count

    def arrived(self, lane: Lane) -> None:
        """Takes wait where something was found last."""
        if lane.ready and lane not in self._waiting_lanes:
            oldest = min(self._waiting_lanes, key=lambda one: one.found_at_s)
            if oldest.found_at_s < lane.found_at_s:
                del self._waiting_lanes[oldest]
                self._waiting_lanes[lane] = None


def _put_back(parts: list[tuple[Taken, list[Row]]]) -> None:
    for taken, rows in parts:
        taken.put_back(rows)
