"""The names behind the ids that clients send to a process of replicas.

Topics and queues that the process hosts are in its assignments. A coordinator is also told of other
topics by id, in commits for example: the broker knows their names. An id stands for one name
forever, so an answer stays true.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from rayq import messages
from rayq.core.access.rights import Names
from rayq.environment import Environment
from rayq.errors import CoordinatorLoadingError, RayqError
from rayq.wire.metadata_pages import all_pages

logger = logging.getLogger(__name__)

OTHERS_MAX = 100_000
"""Maximum number of names of other topics that are remembered."""
ASKED_AT_ONCE_MAX = 1_000
MISSING_S = 2.0
"""Time for which a topic that the broker does not know counts as one that does not exist."""


class HostedNames(Names):
    """See the module."""

    def __init__(self, environment: Environment, ask_broker: messages.Ask) -> None:
        self._environment = environment
        self._ask_broker = ask_broker
        self._topics: dict[str, str] = {}
        self._queues: dict[str, str] = {}
        self._others: dict[str, str] = {}
        self._missing_until_s: dict[str, float] = {}
        self._wanted: dict[str, None] = {}
        """Ids of topics whose names are being asked for."""

    def take(self, assignment: messages.PartitionAssignment) -> None:
        """Takes the names in an assignment, before its replica serves anybody."""
        self._topics[assignment.topic_id] = assignment.topic
        for queue in assignment.queues:
            self._queues[queue.queue_id] = queue.name

    def forget(self, topic_ids: Iterable[str]) -> None:
        """Forgets topics that were deleted."""
        for topic_id in topic_ids:
            self._topics.pop(topic_id, None)
            self._others.pop(topic_id, None)

    def topic_name(self, topic_id: str) -> str | None:
        return self._topics.get(topic_id)

    def queue_name(self, queue_id: str) -> str | None:
        return self._queues.get(queue_id)

    def topic_of_queue(self, name: str) -> str | None:
        return None  # Brokers are asked such things.

    def topic_exists(self, name: str) -> bool:
        return False

    def pinned_topic_id(self, pin_id: str) -> str | None:
        return None

    def other_topic_name(self, topic_id: str) -> str | None:
        """The name of a topic that may be hosted elsewhere. Raises CoordinatorLoadingError, which
        is retriable, while the broker is asked."""
        name = self._topics.get(topic_id) or self._others.get(topic_id)
        if name is not None:
            return name
        if self._missing_until_s.get(topic_id, 0.0) > self._environment.clock.monotonic():
            return None
        if len(self._wanted) < ASKED_AT_ONCE_MAX and topic_id not in self._wanted:
            self._wanted[topic_id] = None
            if len(self._wanted) == 1:
                self._environment.tasks.spawn(self._ask(), "names of topics")
        raise CoordinatorLoadingError(
            f"The coordinator asks for the name of the topic with id {topic_id}, to know whether "
            "you may use it: try again."
        )

    async def _ask(self) -> None:
        while self._wanted:
            ids = list(self._wanted)
            try:
                answer = await all_pages(
                    self._ask_broker, messages.Metadata([], topic_ids=ids)
                )
            except RayqError as error:  # Who needs them asks again.
                logger.debug("the broker does not tell the names of topics: %s", error)
            else:
                found = {topic.topic_id: topic.name for topic in answer.topics}
                self._others.update(found)
                while len(self._others) > OTHERS_MAX:
                    del self._others[next(iter(self._others))]
                now_s = self._environment.clock.monotonic()
                self._missing_until_s = {
                    topic_id: until_s
                    for topic_id, until_s in self._missing_until_s.items()
                    if until_s > now_s
                }
                for topic_id in ids:
                    if topic_id not in found:
                        self._missing_until_s[topic_id] = now_s + MISSING_S
            for topic_id in ids:
                self._wanted.pop(topic_id, None)
