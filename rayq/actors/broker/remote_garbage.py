"""Deletion of the objects that deleted topics have left in the object store.

One broker does it: the live broker with the lowest id. It removes everything after
`remote_delete_delay_ms`, so that a topic that was deleted by mistake can be restored until then. It
sweeps once more a day later, because a leader that did not know of the deletion yet may have stored
something meanwhile.

The broker lists a page of objects, the controller confirms that they are garbage, and only then are
they deleted. The controller commits its first confirmation: from then on nobody can restore the
topic. A topic that was restored before is no longer garbage, whatever the metadata here say.
Objects that are stored later, for a topic that came back to the object store, are not on a list
from before. So it does not matter how late a sweep is, or how many run.
"""

from __future__ import annotations

import asyncio
import logging

from rayq import messages
from rayq.actors.broker.store_ownership import StoreOwnership
from rayq.actors.clock_watch import ClockWatch
from rayq.actors.metadata.metadata_keeper import MetadataKeeper
from rayq.actors.remote.object_link import ObjectLink, list_objects
from rayq.config import DAY_MS, ClusterConfig
from rayq.core.cluster.records import RemoteGarbage
from rayq.environment import Environment
from rayq.errors import RayqError, RemoteStorageError
from rayq.logs import log_event
from rayq.messages.remote_names import parse_folder, parse_name

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 60.0
CLOCK_LOOK_S = 5.0
"""Interval at which a leap of the wall clock is noticed."""
LATE_PUTS_MS = DAY_MS


class RemoteGarbageSweep:
    """See the module. `ask_controller` sends a request to the controller; it raises RayqError."""

    def __init__(
        self,
        environment: Environment,
        config: ClusterConfig,
        metadata: MetadataKeeper,
        objects: ObjectLink,
        ownership: StoreOwnership,
        *,
        broker: int,
        ask_controller: messages.Ask,
    ) -> None:
        self._environment = environment
        self._clock_watch = ClockWatch(environment.clock)
        self._delay_ms = config.remote_delete_delay_ms
        self._metadata = metadata
        self._objects = objects
        self._ownership = ownership
        self._broker = broker
        self._ask_controller = ask_controller
        self._swept_once: set[str] = set()
        """The topics, by id, whose objects were removed for the first time."""
        self._known_since_s: dict[tuple[str, int], float] = {}
        """By id and date of a deleted topic: time since which this broker has known of it, in
        monotonic seconds."""

    async def run(self) -> None:
        clock = self._environment.clock
        while True:
            next_check_s = clock.monotonic() + CHECK_INTERVAL_S
            while (left_s := next_check_s - clock.monotonic()) > 0:
                await asyncio.sleep(min(left_s, CLOCK_LOOK_S))
                self._look_at_clock()
            live = [broker for broker, known in self._metadata.state.brokers.items() if known.live]
            if self._broker != min(live, default=None):
                continue
            self._swept_once.intersection_update(self._metadata.state.garbage)
            for garbage in list(self._metadata.state.garbage.values()):
                try:
                    await self._look_at(garbage)
                except RayqError as error:  # The next check tries again.
                    logger.warning(
                        "what topic %s left in the object store is not removed yet: %s",
                        *(garbage.name, error),
                    )

    def _look_at_clock(self) -> None:
        """Doubts the age of newly deleted topics. Only the wall clock says how long ago a topic was
        deleted, and it may be wrong just now: until it has been right for long enough, a deletion
        counts as no older than this process knows."""
        now_s = self._environment.clock.monotonic()
        known_since_s = {
            (garbage.topic_id, garbage.deleted_ms): now_s
            for garbage in self._metadata.state.garbage.values()
        }
        for _, deleted_ms in known_since_s.keys() - self._known_since_s.keys():
            self._clock_watch.doubt(deleted_ms)
        self._known_since_s = {
            key: self._known_since_s.get(key, since_s) for key, since_s in known_since_s.items()
        }
        self._clock_watch.look()

    def _age_ms(self, garbage: RemoteGarbage) -> float:
        """The age of a deletion by its date, or the time for which this broker has known of it: the
        controller's clock may have been ahead, and garbage must not stay for as long as that."""
        now_s = self._environment.clock.monotonic()
        since_s = self._known_since_s.get((garbage.topic_id, garbage.deleted_ms), now_s)
        return max(self._clock_watch.now_ms() - garbage.deleted_ms, (now_s - since_s) * 1000)

    async def _look_at(self, garbage: RemoteGarbage) -> None:
        age_ms = self._age_ms(garbage)
        is_last = age_ms >= self._delay_ms + LATE_PUTS_MS
        is_first = age_ms >= self._delay_ms and garbage.topic_id not in self._swept_once
        if not is_first and not is_last:
            return
        await self._look_for_others()
        await self._ask_controller(messages.BeginRemoval(garbage.topic_id, garbage.deleted_ms))
        removed = 0
        for prefix in garbage.prefixes:
            if parse_folder(prefix) is None:
                logger.error("%r is not a folder of rayq's, and stays in the object store", prefix)
            else:
                removed += await self._remove(garbage, prefix)
        self._swept_once.add(garbage.topic_id)
        log_event(
            logger, logging.INFO, "remote_garbage_removed", topic=garbage.name, objects=removed
        )
        if is_last:
            await self._ask_controller(
                messages.RemoveGarbage(garbage.topic_id, garbage.deleted_ms)
            )

    async def _look_for_others(self) -> None:
        """Raises RemoteStorageError if another cluster uses this cluster's folder."""
        await self._ownership.check()
        if self._ownership.halt is not None:
            raise RemoteStorageError(self._ownership.halt)

    async def _remove(self, garbage: RemoteGarbage, prefix: str) -> int:
        """Deletes the objects whose names begin with `prefix`. Returns their number."""
        removed, passed = 0, 0
        async for page in list_objects(self._objects, prefix):
            names = [name for name, _, _ in page if parse_name(name) is not None]
            passed += len(page) - len(names)
            if not names:
                continue
            await self._ask_controller(
                messages.BeginRemoval(garbage.topic_id, garbage.deleted_ms)
            )
            # The cluster that they were taken over from may have been told to continue.
            await self._look_for_others()
            await self._objects.ask(messages.DeleteObjects(names))
            removed += len(names)
        if passed:
            logger.warning("%d objects below %s are not rayq's, and stay", passed, prefix)
        return removed
