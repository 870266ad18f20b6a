"""The leader's view of its partition's objects, and changes of their list.

The remote pointer in the metadata is the single source of truth. A change of the list is a new
manifest, which is stored first and counts once the controller has committed its pointer
(docs/protocol.md). One change runs at a time. When an attempt fails, nothing that it stored is
deleted: it may have been committed, and a sweep of a later leader removes what was not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from rayq import messages
from rayq.actors.remote.manifests import load_manifest, store_manifest
from rayq.actors.remote.object_link import ObjectLink
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.actors.signal import Signal
from rayq.backoff import Backoff
from rayq.errors import (
    FencedEpochError,
    InvalidRequestError,
    NotLeaderError,
    RayqError,
    RemoteDamagedError,
    StalePartitionError,
    UnknownTopicError,
)
from rayq.messages.remote_names import ObjectKind, new_name, parse_name, partition_prefix
from rayq.messages.remote_pointer import RemotePointer
from rayq.storage.remote.manifest import Manifest

logger = logging.getLogger(__name__)

COMMIT_RETRY_S = 0.1
COMMIT_RETRY_MAX_S = 5.0
"""Initial and maximum backoff before an undecided commit is requested again."""


class RemoteLog:
    """See the module. It lives for one leader epoch, from before the leader appends (see
    `catch_up`) until `end`."""

    def __init__(
        self,
        replica_log: ReplicaLog,
        assignment: messages.PartitionAssignment,
        objects: ObjectLink,
        *,
        ask_broker: messages.Ask,
        has_lease: Callable[[], bool],
    ) -> None:
        self._replica_log = replica_log
        self._environment = replica_log.environment
        self._assignment = assignment
        self._ask_broker = ask_broker
        self._has_lease = has_lease
        self.objects = objects
        self.where = replica_log.where
        self.pointer = assignment.remote
        """The newest committed pointer that is known here. None: nothing is in the store."""
        self._loaded: tuple[RemotePointer, Manifest] | None = None
        self._loading = asyncio.Lock()
        self._changing = asyncio.Lock()
        self._moved = Signal()
        """Notified when the committed pointer changed, or the epoch ended."""
        self._ended: str | None = None
        self.superseded: list[tuple[float, str]] = []
        """Manifests of this epoch that later ones replaced, each with the time of that (in
        monotonic seconds)."""

    # --- what is committed ------------------------------------------------------------------

    @property
    def leader_epoch(self) -> int:
        return self._assignment.leader_epoch

    @property
    def end_offset(self) -> int | None:
        """The committed remote end: all records below it are in the object store, or below the log
        start. None: nothing was ever stored."""
        return None if self.pointer is None else self.pointer.end

    @property
    def pinned_offset(self) -> int | None:
        """The lowest pin, by the newest metadata. None: nothing is pinned."""
        return self._assignment.pinned_offset

    @property
    def prefix(self) -> str:
        """Prefix of the names of the partition's objects. A restored topic continues in the folder
        of the old one."""
        if self.pointer is not None and (name := parse_name(self.pointer.manifest)) is not None:
            return name.prefix
        assignment = self._assignment
        return partition_prefix(self.objects.cluster_id, assignment.topic_id, assignment.partition)

    def committed(self, assignment: messages.PartitionAssignment) -> None:
        """Takes the partition's committed metadata, in this epoch."""
        self._assignment = assignment
        known, told = self.pointer, assignment.remote
        # The answer to a commit may be ahead of the broker's metadata.
        if told is not None and (known is None or told.version > known.version):
            self._move(told)

    def _move(self, pointer: RemotePointer) -> None:
        self.pointer = pointer
        self._moved.notify()

    def end(self, reason: str) -> None:
        self._ended = reason
        self._moved.notify()

    def check(self) -> None:
        """Raises NotLeaderError when this process may no longer act as the leader."""
        if self._ended is not None or not self._has_lease():
            raise NotLeaderError(
                f"This process does not lead {self.where} "
                f"({self._ended or 'it lost its broker'})."
            )

    async def manifest(self) -> Manifest | None:
        """The manifest of the committed pointer, from memory or from the store; None without a
        pointer. Raises RemoteStorageError, RemoteMissingError, RemoteDamagedError."""
        while (pointer := self.pointer) is not None:
            if self._loaded is not None and self._loaded[0] == pointer:
                return self._loaded[1]
            async with self._loading:
                if self._loaded is None or self._loaded[0] != pointer:
                    try:
                        manifest = await load_manifest(self.objects, pointer.manifest)
                        _check_is_named(pointer, manifest)
                        self._loaded = pointer, manifest
                    except RayqError:
                        if self.pointer == pointer:
                            raise  # Else it was replaced meanwhile, and deleted.
        return None

    def forget_superseded(self, count: int) -> None:
        """Forgets the first `count` of `superseded`: they were deleted."""
        del self.superseded[:count]

    # --- changes ----------------------------------------------------------------------------

    async def change(self, change: Callable[[Manifest], Manifest]) -> Manifest:
        """Commits `change` of the committed manifest, and returns the manifest that is then
        committed. A change that returns the manifest that it got needs no commit. Changes wait for
        each other.

        It returns, or raises, only when its outcome is known, or this epoch has ended. Raises the
        errors of `manifest`, NotLeaderError, FencedEpochError, StalePartitionError,
        UnknownTopicError.
        """
        async with self._changing:
            before = await self.manifest() or self.empty_manifest()
            after = change(before)
            return before if after is before else await self._commit(after)

    async def adopt(self, manifest: Manifest) -> Manifest:
        """Commits another manifest in place of the committed one, which may be lost. Raises as
        `change`."""
        async with self._changing:
            return await self._commit(manifest, is_adopted=True)

    def empty_manifest(self) -> Manifest:
        """The initial manifest of a partition that has nothing in the object store."""
        assignment = self._assignment
        return Manifest(
            prefix=self.prefix,
            cluster_id=self.objects.cluster_id,
            topic=assignment.topic,
            topic_id=assignment.topic_id,
            partition=assignment.partition,
            partitions=assignment.partitions,
            config=assignment.config,
            replication_factor=assignment.replication_factor or len(assignment.replicas),
        )

    async def _commit(self, manifest: Manifest, *, is_adopted: bool = False) -> Manifest:
        """Stores the manifest as the next version, and has it committed."""
        self.check()
        assignment, base, prefix = self._assignment, self.pointer, manifest.prefix
        version, now_ms = 1 if base is None else base.version + 1, self._environment.clock.wall_ms()
        is_own = base is not None and base.leader_epoch == self.leader_epoch
        if base is not None and not is_own and base.manifest.startswith(prefix):
            # The previous leader may not know yet that it is deposed, and still answers readers.
            manifest = manifest.with_removed([base.manifest], now_ms)

        def named(kind: ObjectKind, number: int) -> str:
            return new_name(self._environment.random, prefix, kind, number, self.leader_epoch)

        paged, pages = msgspec.structs.replace(
            manifest,
            partitions=assignment.partitions,
            config=assignment.config,
            replication_factor=assignment.replication_factor or len(assignment.replicas),
            version=version,
            leader_epoch=self.leader_epoch,
            written_ms=now_ms,
        ).paged(lambda start: named(ObjectKind.PAGE, start))
        name = named(ObjectKind.MANIFEST, version)
        await store_manifest(self.objects, paged, pages, name)
        pointer = paged.pointer(name)
        await self._move_pointer(base, pointer, is_adopted=is_adopted)
        self._loaded = pointer, paged
        if base is not None and is_own:
            self.superseded.append((self._environment.clock.monotonic(), base.manifest))
        return paged

    async def _move_pointer(
        self, base: RemotePointer | None, pointer: RemotePointer, *, is_adopted: bool
    ) -> None:
        """Returns when `pointer` is committed. Without an answer the outcome is unknown, and the
        request is repeated until the metadata shows it or the epoch ends."""
        request = messages.MoveRemote(
            topic_id=self._assignment.topic_id,
            partition=self._assignment.partition,
            broker=self._replica_log.broker,
            incarnation=self._replica_log.incarnation,
            leader_epoch=self.leader_epoch,
            pointer=pointer,
            is_adopted=is_adopted,
        )
        backoff = Backoff(self._environment, COMMIT_RETRY_S, COMMIT_RETRY_MAX_S)
        while self.pointer == base:
            if self._ended is not None:
                self.check()
            try:
                await self._ask_broker(request)
            except (FencedEpochError, UnknownTopicError, InvalidRequestError):
                raise
            except RayqError as error:
                # Also if it is refused as stale: an earlier attempt may have succeeded, and then
                # the metadata that say so are on their way.
                is_refused = isinstance(error, StalePartitionError)
                level = logging.DEBUG if is_refused else logging.INFO
                logger.log(level, "the remote pointer of %s: %s", self.where, error)
                if self.pointer == base:
                    await self._moved.wait(backoff.next_s())
            else:
                if self.pointer == base:
                    self._move(pointer)
        if self.pointer != pointer:
            raise StalePartitionError(
                f"The remote pointer of {self.where} was moved by another: {self.pointer}."
            )


def _check_is_named(pointer: RemotePointer, manifest: Manifest) -> None:
    """Raises RemoteDamagedError if a manifest contradicts its pointer. The epoch of a restored
    topic's pointer is above its manifest's."""
    said = manifest.pointer(pointer.manifest)
    if msgspec.structs.replace(said, leader_epoch=pointer.leader_epoch) != pointer:
        raise RemoteDamagedError(
            f"The manifest {pointer.manifest} is not the one that was committed: its pointer is "
            f"{pointer}, and it says {said}."
        )
