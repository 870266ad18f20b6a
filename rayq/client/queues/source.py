"""One of the queues that a consumer takes from: a lane at each of its partitions."""

from __future__ import annotations

from rayq.client.client import Client
from rayq.client.queues.lane import Lane, Owner
from rayq.config import QueueConfig, parse_stored
from rayq.errors import UnknownQueueError
from rayq.wire.messages import QueueMetadata

WAITING_LANES_MAX = 8
"""At so many partitions takes wait for records; the others are swept."""
TAKE_WAIT_MS = 500
"""How long a leader holds a take that finds nothing."""
TURN_WAIT_MS = 50
"""The same where fewer takes may be under way than there are partitions."""
TAKE_RECORDS_MAX = 10_000
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
        return sum(lane.available() for lane in self.lanes)

    @property
    def out(self) -> int:
        return sum(lane.out for lane in self.lanes)

    @property
    def is_asking(self) -> bool:
        return any(lane.asked for lane in self.lanes)

    def is_coming(self, now_s: float) -> bool:
        """Whether records that are known to be there were just asked for."""
        return any(
            lane.asked and lane.ready and now_s - lane.asked_at_s < COMING_S for lane in self.lanes
        )

    # --- asking ---------------------------------------------------------------------------------

    def ask(self, demand: int, ahead: int, now_s: float, wait_ms: int) -> None:
        """Has takes under way for the records that users wait for, and for so many ahead, those
        that wait here included. At first where more is known to be, then evenly. Each take costs
        its leader two writes: what is ahead is filled up once half of it is gone."""
        waiting = self.available
        budget = demand + ahead - waiting - sum(lane.asked for lane in self.lanes)
        is_enough = waiting >= demand and 2 * budget < ahead
        if budget <= 0 or is_enough or self.failure is not None:
            return
        free = sorted(
            (lane for lane in self.lanes if lane.may_ask(now_s)), key=lambda lane: lane.asked_at_s
        )
        for lane in [one for one in free if one.ready]:
            if budget <= 0:
                return
            count = min(budget, lane.ready, TAKE_RECORDS_MAX)
            lane.take(count, wait_ms)
            budget -= count
        free = [lane for lane in free if not lane.asked]
        for lane in [one for one in free if one not in self._waiting_lanes]:
            if budget > 0 and now_s >= lane.next_sweep_s:
                lane.take(1, 0)
                budget -= 1
        free = [lane for lane in free if lane in self._waiting_lanes]
        if len(free) > budget:
            wait_ms = min(wait_ms, TURN_WAIT_MS)
        for index, lane in enumerate(free):
            if budget <= 0:
                return
            count = min(-(-budget // (len(free) - index)), TAKE_RECORDS_MAX)
            lane.take(count, wait_ms)
            budget -= count

    def arrived(self, lane: Lane) -> None:
        """Takes wait where something was found last."""
        if lane.ready and lane not in self._waiting_lanes:
            oldest = min(self._waiting_lanes, key=lambda one: one.found_at_s)
            if oldest.found_at_s < lane.found_at_s:
                del self._waiting_lanes[oldest]
                self._waiting_lanes[lane] = None
