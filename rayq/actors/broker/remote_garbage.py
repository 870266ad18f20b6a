"""Removes from the object store what deleted topics have left there.

One broker does it: the lowest that lives. It removes everything after `remote_delete_delay_ms`, so
that a topic that was deleted by mistake can be restored until then, and once more a day later: a
leader that did not know of the deletion yet may have stored something meanwhile.
"""

from __future__ import annotations

import asyncio
import logging

from rayq.actors.broker.store_ownership import StoreOwnership
from rayq.actors.metadata.metadata_keeper import MetadataKeeper
from rayq.actors.remote.object_link import ObjectLink
from rayq.config import DAY_MS, ClusterConfig
from rayq.core.metadata_records import RemoteGarbage
from rayq.environment import Environment
from rayq.errors import RayqError
from rayq.logs import log_event
from rayq.wire import messages

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 60.0
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
        self._delay_ms = config.remote_delete_delay_ms
        self._metadata = metadata
        self._objects = objects
        self._ownership = ownership
        self._broker = broker
        self._ask_controller = ask_controller
        self._swept_once: set[str] = set()
        """The topics, by id, whose objects were removed for the first time."""

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            live = [one for one, known in self._metadata.state.brokers.items() if known.live]
            if self._broker != min(live, default=None):
                continue
            for garbage in list(self._metadata.state.garbage.values()):
                try:
                    await self._look_at(garbage)
                except RayqError as error:  # The next look tries again.
                    logger.warning(
                        "what topic %s left in the object store is not removed yet: %s",
                        *(garbage.name, error),
                    )

    async def _look_at(self, garbage: RemoteGarbage) -> None:
        age_ms = self._environment.clock.wall_ms() - garbage.deleted_ms
        is_last = age_ms >= self._delay_ms + LATE_PUTS_MS
        is_first = age_ms >= self._delay_ms and garbage.topic_id not in self._swept_once
        if not is_first and not is_last:
            return
        await self._ownership.look()
        if self._ownership.halt is not None:
            return
        removed = 0
        for prefix in garbage.prefixes:
            removed += await self._remove(garbage, prefix)
        self._swept_once.add(garbage.topic_id)
        log_event(
            logger, logging.INFO, "remote_garbage_removed", topic=garbage.name, objects=removed
        )
        if is_last:
            await self._ask_controller(messages.RemoveGarbage(garbage.topic_id))

    async def _remove(self, garbage: RemoteGarbage, prefix: str) -> int:
        """Deletes the objects whose names begin with `prefix`. Returns how many there were."""
        removed = 0
        after: str | None = ""
        while after is not None:
            answer, _ = await self._objects.ask(messages.ListObjects(prefix, after))
            after = answer.next_after
            if self._metadata.state.garbage.get(garbage.topic_id) != garbage:
                return removed  # It was restored meanwhile.
            found = [name for name, _, _ in answer.objects]
            if found:
                await self._objects.ask(messages.DeleteObjects(found))
                removed += len(found)
        return removed
