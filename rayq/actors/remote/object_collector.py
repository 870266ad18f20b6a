"""Garbage collection of a partition's objects in the store: of objects that left the committed list
long enough ago, replaced manifests, and leftovers of crashes and failed attempts."""

from __future__ import annotations

import logging

from rayq import messages
from rayq.actors.remote.object_link import list_objects
from rayq.actors.remote.remote_log import RemoteLog
from rayq.core.remote.retention import StoredObject, dated_ahead, due, sweepable
from rayq.environment import Environment
from rayq.messages.objects import OBJECT_NAMES_MAX
from rayq.messages.remote_names import ObjectKind, new_name, parse_name
from rayq.storage import checked_file
from rayq.storage.remote.manifest import Manifest

logger = logging.getLogger(__name__)

SUPERSEDED_S = 600.0
"""Time after which a replaced manifest is deleted. Only a reader that began before could miss
it."""

PROBE = checked_file.encode("remote-probe", 1, b"")
"""The content of an object that is written to learn its date."""


class ObjectCollector:
    """See the module. All methods raise RemoteStorageError and NotLeaderError."""

    def __init__(self, environment: Environment, remote_log: RemoteLog, delay_ms: int) -> None:
        """`delay_ms`: time that an object stays when nothing refers to it any more."""
        self._environment = environment
        self._remote_log = remote_log
        self._delay_ms = delay_ms
        self._ahead_since_s: dict[str, float] = {}
        """By name: time since which this leader has known an object that was removed at a time
        still to come, in monotonic seconds."""

    async def delete_removed(self, manifest: Manifest, now_ms: int) -> list[str]:
        """Deletes objects that the committed manifest has removed long enough ago; returns their
        names, which may leave its list now.

        A date that is still to come says nothing: the clock of its leader was ahead, or this one is
        behind. Such an object is deleted when this leader has known it for the whole delay."""
        now_s = self._environment.clock.monotonic()
        self._ahead_since_s = {
            name: self._ahead_since_s.get(name, now_s)
            for name in dated_ahead(manifest.removed, now_ms)
        }
        names = due(manifest.removed, now_ms, self._delay_ms)
        until_s = now_s - self._delay_ms / 1000
        names += [name for name, since_s in self._ahead_since_s.items() if since_s <= until_s]
        await self._delete(names)
        return names

    def next_superseded_s(self) -> float | None:
        """Time at which the next replaced manifest is to be deleted."""
        superseded = self._remote_log.superseded
        return superseded[0][0] + SUPERSEDED_S if superseded else None

    async def delete_superseded(self) -> None:
        """Deletes manifests that others of this epoch replaced long enough ago."""
        until_s = self._environment.clock.monotonic() - SUPERSEDED_S
        old = [name for since_s, name in self._remote_log.superseded if since_s <= until_s]
        await self._delete(old)
        self._remote_log.forget_superseded(len(old))

    async def sweep(self) -> None:
        """Deletes the partition's objects that nothing refers to: see `sweepable`."""
        remote_log = self._remote_log
        manifest = await remote_log.manifest()
        pointer, prefix = remote_log.pointer, remote_log.prefix
        before_ms = await self._store_time_ms() - self._delay_ms
        listed = await self._list(prefix)
        named, committed = set[str](), (-1, 0)
        if manifest is not None and pointer is not None:
            named = {pointer.manifest, *manifest.names()}
            committed = (pointer.leader_epoch, pointer.version)
        names = sweepable(
            listed,
            named=named,
            committed=committed,
            leader_epoch=remote_log.leader_epoch,
            before_ms=before_ms,
        )
        if names:
            logger.info(
                "%s: %d of %d objects in the store belong to nothing, and are deleted",
                *(remote_log.where, len(names), len(listed)),
            )
            await self._delete(names)

    async def _store_time_ms(self) -> int:
        """Present time of the store's clock: the date of an object that is written for it."""
        remote_log = self._remote_log
        name = new_name(
            self._environment.random, remote_log.prefix, ObjectKind.PAGE, 0, remote_log.leader_epoch
        )
        remote_log.check()
        await remote_log.objects.ask(messages.PutBlob(name), PROBE)
        answer, _ = await remote_log.objects.ask(messages.HeadObjects([name]))
        await self._delete([name])
        stored = answer.objects[0]
        return 0 if stored is None else stored[1]

    async def _list(self, prefix: str) -> list[StoredObject]:
        listed: list[StoredObject] = []
        async for page in list_objects(self._remote_log.objects, prefix):
            for text, _, modified_ms in page:
                name = parse_name(text)
                if name is not None:
                    is_manifest = name.kind is ObjectKind.MANIFEST
                    listed.append(
                        StoredObject(
                            text, is_manifest, name.number, name.leader_epoch, modified_ms
                        )
                    )
        return listed

    async def _delete(self, names: list[str]) -> None:
        for first in range(0, len(names), OBJECT_NAMES_MAX):
            self._remote_log.check()
            await self._remote_log.objects.ask(
                messages.DeleteObjects(names[first : first + OBJECT_NAMES_MAX])
            )
