"""Check that no other cluster uses this cluster's folder in the object store.

A copy of a cluster's disks has the same cluster id. A second cluster that starts from it would
store and delete objects in the same folder, each cluster by its own metadata. Therefore each
controller epoch leaves a mark there, under a random id that the metadata know. A later mark that
they do not know belongs to another cluster; from then on neither cluster stores or deletes objects.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rayq import messages
from rayq.actors.metadata.metadata_keeper import MetadataKeeper
from rayq.actors.remote.object_link import ObjectLink, list_objects
from rayq.backoff import Backoff
from rayq.core.cluster.remote_changes import unknown_marks
from rayq.environment import Environment
from rayq.errors import RayqError, RemoteStorageError
from rayq.messages import remote_names as names
from rayq.storage import checked_file

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 3600.0
BACKOFF_S = 0.5
BACKOFF_MAX_S = 60.0
MARK_VERSION = 1
NOT_CHECKED = "the marks in the object store were not looked at yet"


class StoreOwnership:
    """See the module. `halt` says why objects may neither be stored nor deleted; None: they may."""

    def __init__(
        self,
        environment: Environment,
        metadata: MetadataKeeper,
        objects: ObjectLink,
        *,
        is_current: Callable[[], bool],
    ) -> None:
        """`is_current()` says whether the metadata here are known to be current: by outdated
        metadata, marks of this very cluster would look like another's."""
        self._environment = environment
        self._metadata = metadata
        self._objects = objects
        self._is_current = is_current
        self._checked_epoch = 0
        """The controller epoch in which the marks were last checked."""
        self.halt: str | None = NOT_CHECKED

    async def run(self) -> None:
        backoff = Backoff(self._environment, BACKOFF_S, BACKOFF_MAX_S)
        while True:
            await self._metadata.changed.wait_until(self._is_current, CHECK_INTERVAL_S)
            try:
                await self.check()
            except RayqError as error:
                logger.debug("the marks in the object store: %s", error)
                if self.halt is not None and self.halt.startswith(NOT_CHECKED):
                    self.halt = f"{NOT_CHECKED}: {error}"
                await asyncio.sleep(backoff.next_s())
            else:
                backoff.reset()
                await self._metadata.changed.wait_until(self._is_of_old, CHECK_INTERVAL_S)

    async def check(self) -> None:
        """Leaves the mark of this controller epoch, and looks for those of others. Raises
        RemoteStorageError, RemoteDeniedError; `halt` is then as before."""
        if not self._is_current():
            raise RemoteStorageError("This broker's metadata is too old.")
        state = self._metadata.state
        epoch = state.controller_epoch
        mark = state.marks.get(epoch)
        if mark is not None:
            content = repr(state.controller).encode()  # For people who wonder whose it is.
            await self._objects.ask(
                messages.PutBlob(names.owner_mark(self._objects.cluster_id, epoch, mark)),
                checked_file.encode("owner", MARK_VERSION, content),
            )
        marks: list[tuple[int, str]] = []
        prefix = names.owners_prefix(self._objects.cluster_id)
        async for page in list_objects(self._objects, prefix):
            marks.extend(names.parse_owner_mark(name) for name, _, _ in page)
        self._checked_epoch = epoch
        unknown = unknown_marks(self._metadata.state, marks)
        before, self.halt = self.halt, None
        if unknown:
            self.halt = (
                f"another cluster uses the object store under this cluster's id: {prefix} has its "
                f"marks of the controller epochs {unknown}. It runs on a copy of this cluster's "
                "disks, or took over its topics. Stop one of the two, then delete the marks that "
                "it left"
            )
            if before != self.halt:
                logger.error("no objects are stored or deleted: %s", self.halt)

    def _is_of_old(self) -> bool:
        """Returns whether a controller has started since: its mark may have been taken for another
        cluster's."""
        return self._metadata.state.controller_epoch != self._checked_epoch
