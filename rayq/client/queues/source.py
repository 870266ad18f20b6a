"""Source of a consumer's records: one of its queues, with a lane to each partition."""

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
"""Maximum number of partitions at which takes wait for records; the others are swept."""
TAKE_WAIT_MS = 500
"""Maximum time a leader holds a take that finds nothing."""
READY_WAIT_MS = 20
"""The same, if there were records a moment ago, and the consumer takes nothing ahead: another may
have them by now."""
COMING_S = 0.2
"""Maximum time other queues wait for records that were asked for."""


class Source:
    """One queue of a consumer. Belongs to the loop; `name`, `topic` and `config` are read by other
    threads."""

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
        """Some of the waiting records, for users' threads."""
        self.failure: UnknownQueueError | None = None
        """Set when the queue was deleted."""
        self._waiting_lanes: dict[Lane, None] = {}
        client.add_interest(self.topic)
        self.look_for_partitions()

    def look_for_partitions(self) -> None:
        """Adds lanes to new partitions."""
        topic = self._client.metadata.topics.get(self.topic)
        if topic is None or topic.topic_id != self.topic_id:
            return
        for number in range(len(self.lanes), len(topic.partitions)):
            self.lanes.append(Lane(self._client, self._owner, self, number))
        random = self._client.environment.random
        candidates = [lane for lane in self.lanes if lane not in self._waiting_lanes]
        random.shuffle(candidates)
        for lane in candidates[: WAITING_LANES_MAX - len(self._waiting_lanes)]:
            self._waiting_lanes[lane] = None

    def is_now(self, found: QueueMetadata) -> bool:
        """Takes over a newer config. Returns False if it is another queue of this name."""
        if (found.queue_id, found.topic_id) != (self.queue_id, self.topic_id):
            return False
        self.config = parse_stored(QueueConfig, found.config)
        return True

    def close(self) -> None:
        """Stops asking and reporting."""
        self._client.drop_interest(self.topic)
        for lane in self.lanes:
            lane.is_closed = True

    # --- how much there is ----------------------------------------------------------------------

    @property
    def available(self) -> int:
        """The number of records here that may be handed out now."""
        return sum(lane.available() for lane in self.lanes) + len(self.shelf)

    @property
    def out(self) -> int:
        """The approximate number of records that users hold."""
        return max(sum(lane.out for lane in self.lanes) - len(self.shelf), 0)

    def is_coming(self, now_s: float) -> bool:
        """Returns whether records that are known to be ready were just asked for."""
        return any(
            lane.asked and lane.ready and now_s - lane.asked_at_s < COMING_S for lane in self.lanes
        )

    # --- handing out ----------------------------------------------------------------------------

    def hand_out(
        self, count: int, *, is_at_once: bool = False
    ) -> list[tuple[Taken, list[Row]]]:
        """Hands out up to `count` waiting records, those taken first. See `Lane`."""
        found: list[tuple[Taken, list[Row]]] = []
        lanes = [lane for lane in self.lanes if lane.takens]
        for lane in sorted(lanes, key=lambda lane: lane.takens[0].taken_at_s):
            if count <= 0:
                break
            parts = lane.hand_out(count, is_at_once=is_at_once)
            count -= sum(len(rows) for _, rows in parts)
            found += parts
        return found

    def fill_shelf(self, decisions: Decisions, asked: int) -> None:
        """Fills the shelf after a thread got the records that it asked for, so that the next calls
        need not ask the loop."""
        if self.config.ordered_by_key or asked * SHELF_SHARE > SHELF_MAX:
            return
        parts = self.hand_out(SHELF_MAX, is_at_once=True)
        if sum(len(row.value or b"") for _, rows in parts for row in rows) > SHELF_BYTES_MAX:
            _put_back(parts)  # That many bytes are counted where they wait.
        else:
            self.shelf.put(parts, decisions)

    def clear_shelf(self) -> None:
        """Puts all waiting records back into the lanes."""
        _put_back(self.shelf.take_back())

    # --- giving back ----------------------------------------------------------------------------

    def give_back(self, count: int) -> None:
        """Gives back `count` of the waiting records, those taken last."""
        lanes = [lane for lane in self.lanes if lane.takens]
        for lane in sorted(lanes, key=lambda lane: -lane.takens[-1].taken_at_s):
            given = min(count, lane.waiting)
            if given > 0:
                lane.give_back(given)
                count -= given

    # --- asking ---------------------------------------------------------------------------------
    # A lane is *known* if its leader has reported since `known_s` how many more records there are.
    # While the leader holds a take, there are none.

    def expected(self, now_s: float) -> int:
        """The number of records that will probably arrive."""
        return sum(lane.expected(now_s) for lane in self.lanes)

    def may_have(self, known_s: float, now_s: float) -> bool:
        """Returns whether there may be records at a leader that can be asked now."""
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
        """Asks for `budget` records where there may be some: first where more are known to be, then
        where nothing is known, at few leaders at a time. So no more are locked than asked for."""
        free = sorted(
            (lane for lane in self.lanes if lane.may_ask(now_s)), key=lambda lane: lane.asked_at_s
        )
        even = -(-budget // max(len(free), 1))
        for lane in [lane for lane in free if lane.ready]:
            if budget <= 0:
                return
            # Others may have arrived since; they would need one more take.
            count = min(budget, max(lane.ready, even), TAKE_RECORDS_MAX)
            lane.take(count, ready_wait_ms, is_ahead=is_ahead)
            budget -= count
        unknown = [
            lane for lane in free if not lane.asked and self._is_unknown(lane, known_s, now_s)
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
        """Sends takes that wait for `budget` records at some leaders that have none. If the
        consumer `is_idle`, for at least one at each: records that arrive from several leaders at
        once are given back."""
        free = [lane for lane in self._waiting_lanes if lane.may_ask(now_s)]
        random = self._client.environment.random
        for index, lane in enumerate(free):
            count = -(-budget // (len(free) - index))
            if count <= 0 and not is_idle:
                return
            count = max(count, 1)
            # The takes of one consumer should not be the first everywhere.
            lane_wait_ms = round(wait_ms * random.uniform(0.5, 1.0))
            lane.take(min(count, TAKE_RECORDS_MAX), lane_wait_ms, is_ahead=is_ahead, waits=True)
            budget -= count

    def arrived(self, lane: Lane) -> None:
        """Moves waiting takes to the lanes where records were found last."""
        if lane.ready and lane not in self._waiting_lanes:
            oldest = min(self._waiting_lanes, key=lambda lane: lane.found_at_s)
            if oldest.found_at_s < lane.found_at_s:
                del self._waiting_lanes[oldest]
                self._waiting_lanes[lane] = None


def _put_back(parts: list[tuple[Taken, list[Row]]]) -> None:
    for taken, rows in parts:
        taken.put_back(rows)
