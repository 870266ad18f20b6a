"""Catch-up of a new leader with the remote log, before it appends: its own log must continue where
the committed list of objects ends (docs/protocol.md).

It restarts its log at that end if it lacks the last of these records or has a different one at that
offset: after an unclean election, or after a power loss took what was never synced. Otherwise there
would be two histories, one here and one in the store. If metadata were lost, it first finds the
newest manifest that can be trusted, and has it committed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rayq import messages
from rayq.actors.remote.manifests import load_manifest
from rayq.actors.remote.object_link import list_objects
from rayq.actors.remote.remote_log import RemoteLog
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.backoff import Backoff
from rayq.errors import (
    InvalidRequestError,
    RayqError,
    RemoteDamagedError,
    RemoteMissingError,
)
from rayq.logs import log_event
from rayq.messages.remote_names import ObjectKind, parse_name
from rayq.messages.remote_pointer import RemotePointer
from rayq.metrics import Sample
from rayq.storage.epochs import EpochCache
from rayq.storage.log import Log
from rayq.storage.remote.manifest import Manifest

logger = logging.getLogger(__name__)

LISTING_DELAY_S = 60.0
"""Time before another manifest than the committed one is looked for: some stores list new objects
late, and a failed read may succeed later."""
DAMAGED_READS = 3
"""Number of failed reads after which a manifest counts as damaged."""
RETRY_S = 0.2
RETRY_MAX_S = 10.0


def must_catch_up(log: Log, assignment: messages.PartitionAssignment) -> bool:
    """Returns whether the leader of this assignment must catch up with the remote log before it
    appends."""
    pointer = assignment.remote
    return (
        assignment.is_remote_doubted
        or _reaches_above(log, pointer)
        or (pointer is not None and (not _holds(log, pointer) or _lacks_epochs(log, pointer)))
    )


def _reaches_above(log: Log, pointer: RemotePointer | None) -> bool:
    """Returns whether this disk dropped records that are missing in the committed list: there was
    another list."""
    remote_end = 0 if pointer is None else pointer.end
    return log.local_start_offset > max(log.start_offset, remote_end)


def _holds(log: Log, pointer: RemotePointer) -> bool:
    """Returns whether the log continues from the last record in the store."""
    if pointer.end == 0 or pointer.end_epoch is None:
        return True
    return log.end_offset >= pointer.end and _agree(log, pointer.end, pointer.end_epoch)


def _agree(log: Log, end: int, end_epoch: int) -> bool:
    """Returns whether the record at `end - 1` has this epoch in the log, too. If the log no longer
    knows, because that is far below its start, only an epoch that has gone back is a
    contradiction."""
    epoch = log.epochs.epoch_of(end - 1)
    if epoch is not None:
        return epoch == end_epoch
    entries = log.epochs.entries()
    return not entries or entries[0][0] >= end_epoch


def _lacks_epochs(log: Log, pointer: RemotePointer) -> bool:
    """Returns whether the file with the leader epochs was lost, and the log could rebuild only
    those of its own batches."""
    entries = log.epochs.entries()
    first = entries[0][1] if entries else log.end_offset
    return log.start_offset < min(first, pointer.end)


class RemoteCatchUp:
    """The role of a replica that is about to lead. It retries until it is done, or until `end`;
    then it calls `on_done`."""

    def __init__(
        self,
        replica_log: ReplicaLog,
        assignment: messages.PartitionAssignment,
        remote_log: RemoteLog,
        *,
        on_done: Callable[[], None],
    ) -> None:
        self._replica_log = replica_log
        self._environment = replica_log.environment
        self._assignment = assignment
        self.remote_log = remote_log
        self._on_done = on_done
        self._began_s = self._environment.clock.monotonic()
        self._task: asyncio.Task[None] | None = None
        self.leader_epoch = assignment.leader_epoch

    def start(self) -> None:
        pointer, log = self.remote_log.pointer, self._replica_log.log
        log_event(
            logger,
            logging.INFO,
            "adoption_begins",
            **self._assignment.labels,
            epoch=self.leader_epoch,
            local_start_offset=log.local_start_offset,
            offset=log.end_offset,
            remote_end_offset=None if pointer is None else pointer.end,
            is_doubted=self._assignment.is_remote_doubted,
        )
        self._task = self._environment.tasks.spawn(
            self._replica_log.guard(self._adopt_until_done), f"adopt {self._replica_log.where}"
        )

    def is_for(self, assignment: messages.PartitionAssignment) -> bool:
        """Returns whether this process is to lead in the same epoch, with records in the store."""
        return (
            self._replica_log.is_led_by_us(assignment)
            and assignment.leader_epoch == self.leader_epoch
            and self._replica_log.has_remote(assignment)
        )

    def committed(self, assignment: messages.PartitionAssignment) -> None:
        """Takes the partition's committed metadata, in this epoch."""
        self._assignment = assignment
        self.remote_log.committed(assignment)

    def end(self, reason: str) -> None:
        self.remote_log.end(reason)
        if self._task is not None:
            self._task.cancel()

    def flushed(self, flushed_offset: int) -> None:
        """Does nothing: nobody waits for a flush yet."""

    def measure(self) -> list[Sample]:
        """Returns no metrics: it neither leads nor follows yet."""
        return []

    async def _adopt_until_done(self) -> None:
        replica = self._replica_log
        backoff = Backoff(self._environment, RETRY_S, RETRY_MAX_S)
        while True:
            try:
                await self._adopt()
                break
            except RayqError as error:
                if replica.log.failure is not None:  # As does a replica that failed meanwhile,
                    raise  # an error of this replica's disk ends the replica.
                told = (
                    f"{replica.where} is offline until this broker has read from the object store "
                    f"how its log continues: {error}"
                )
                if told != replica.trouble:
                    logger.warning("%s", told)
                replica.trouble = told
                await asyncio.sleep(backoff.next_s())
        replica.trouble = None
        self._on_done()

    async def _adopt(self) -> None:
        remote_log, log = self.remote_log, self._replica_log.log
        if self._assignment.is_remote_doubted or _reaches_above(log, remote_log.pointer):
            await self._adopt_newest()
        pointer = remote_log.pointer
        if pointer is None:
            return
        if not _holds(log, pointer):
            await self._restart(pointer)
        elif _lacks_epochs(log, pointer):
            log.learn_epochs((await self._manifest(pointer)).epochs)

    async def _adopt_newest(self) -> None:
        """Commits the newest manifest that can be trusted, in this epoch: then the pointer is no
        longer in doubt."""
        remote_log, log = self.remote_log, self._replica_log.log
        await asyncio.sleep(self._listing_wait_s)
        newest = await self._newest()
        if newest is None:
            newest = await remote_log.manifest() or remote_log.empty_manifest()
        if log.local_start_offset > max(log.start_offset, newest.end):
            raise RemoteMissingError(
                f"Records below {log.local_start_offset} left this disk for the object store, and "
                f"no manifest below {remote_log.prefix} has them whose objects all exist. Bring "
                "them back, or give up what was stored: remote_storage=False with delete_remote."
            )
        await remote_log.adopt(newest)

    @property
    def _listing_wait_s(self) -> float:
        waited_s = self._environment.clock.monotonic() - self._began_s
        return max(0.0, LISTING_DELAY_S - waited_s)

    async def _manifest(self, pointer: RemotePointer) -> Manifest:
        """Returns the manifest of the committed pointer. If it is lost, commits the newest of the
        others in its place, and raises an error that says to look again."""
        try:
            manifest = await self.remote_log.manifest()
        except (RemoteMissingError, RemoteDamagedError):
            if self._listing_wait_s > 0 or (newest := await self._newest()) is None:
                raise
            manifest = await self.remote_log.adopt(newest)
        assert manifest is not None
        if self.remote_log.pointer is None or self.remote_log.pointer.end != pointer.end:
            raise RemoteMissingError(
                f"The manifest {pointer.manifest} was lost, and another took its place."
            )
        return manifest

    async def _restart(self, pointer: RemotePointer) -> None:
        """Empties the log, which continues at the end of the list. Records here above it, or in
        another history, that were not stored are lost: the election discarded them."""
        replica = self._replica_log
        manifest = await self._manifest(pointer)
        async with replica.files_lock, replica.flush_lock:
            log = replica.log
            own_start = log.start_offset if _agrees(log, manifest) else 0
            log_start = min(max(own_start, manifest.log_start, manifest.start), manifest.end)
            log_event(
                logger,
                logging.WARNING,
                "log_restarted_from_remote",
                **self._assignment.labels,
                epoch=self.leader_epoch,
                broker=replica.broker,
                from_offset=log.end_offset,
                offset=manifest.end,
            )
            replica.restart(
                manifest.end,
                manifest.epochs,
                manifest.producer_snapshot,
                log_start=log_start,
                is_from_remote=True,
            )

    # --- metadata that were lost ------------------------------------------------------------

    async def _newest(self) -> Manifest | None:
        """Finds the newest manifest whose objects all exist and that belongs to this log's history,
        or to a later one."""
        names = []
        for name in await self._listed():
            parsed = parse_name(name)
            if parsed is not None and parsed.kind is ObjectKind.MANIFEST:
                names.append((parsed.leader_epoch, parsed.number, name))
        for _, _, name in sorted(names, reverse=True):
            manifest = await self._loaded(name)
            if manifest is None:
                continue
            if not _agrees(self._replica_log.log, manifest):
                logger.info("%s is passed over: it is of another history", name)
            elif not await self._is_whole(manifest):
                logger.info("%s is passed over: some of its objects are gone", name)
            else:
                return manifest
        return None

    async def _loaded(self, name: str) -> Manifest | None:
        """Loads a manifest. None: it is gone or damaged."""
        for attempt in range(1, DAMAGED_READS + 1):
            try:
                return await load_manifest(self.remote_log.objects, name)
            except (RemoteMissingError, RemoteDamagedError) as error:
                if isinstance(error, RemoteMissingError) or attempt == DAMAGED_READS:
                    logger.info("%s is passed over: %s", name, error)
                    return None
        return None

    async def _listed(self) -> list[str]:
        names: list[str] = []
        prefix = f"{self.remote_log.prefix}{ObjectKind.MANIFEST}/"
        async for page in list_objects(self.remote_log.objects, prefix):
            names += [name for name, _, _ in page]
        return names

    async def _is_whole(self, manifest: Manifest) -> bool:
        objects, at_once = manifest.objects, messages.OBJECT_NAMES_MAX
        for first in range(0, len(objects), at_once):
            page = objects[first : first + at_once]
            answer, _ = await self.remote_log.objects.ask(
                messages.HeadObjects([remote.name for remote in page])
            )
            if len(answer.objects) != len(page):
                raise InvalidRequestError("The object server answered for other objects.")
            for listed, stored in zip(page, answer.objects, strict=True):
                if stored is None or stored[0] != listed.object_bytes:
                    return False
        return True


def _agrees(log: Log, manifest: Manifest) -> bool:
    """Returns whether a manifest is of the same history as the log, or of one that continued after
    the log's last record."""
    last_epoch = log.last_epoch
    if last_epoch is None or manifest.leader_epoch > last_epoch:
        return True
    end = min(manifest.end, log.end_offset)
    epoch = EpochCache(manifest.epochs).epoch_of(end - 1)
    return epoch is None or _agree(log, end, epoch)
