"""A broker's copy of the metadata log: it promises, accepts, and applies what is committed.

Every broker keeps the log; only the voters' copies count for the majority. Nothing is acted upon
before it is committed: `state` holds committed records only, and `version` is the commit index that
was applied.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from rayq import messages
from rayq.actors.handlers import answers
from rayq.actors.metadata.quorum import Entry, decode_entries, encode_entries
from rayq.actors.metadata.snapshot_parts import SnapshotParts
from rayq.actors.signal import Signal
from rayq.core.cluster.records import (
    BrokerRegistered,
    MetadataRecord,
    Voter,
    VotersChanged,
    decode_entry,
    decode_in_steps,
    decode_records,
    encode_records,
)
from rayq.core.cluster.state import ClusterState
from rayq.environment import Address, Environment
from rayq.errors import FencedEpochError, StalePartitionError, StorageError, WrongClusterError
from rayq.storage.data_directory import DataDirectory
from rayq.storage.metadata_log import MetadataLog

logger = logging.getLogger(__name__)

REOPEN_INTERVAL_S = 1.0
"""Interval at which a failed log is opened again: that reads and writes all of it."""
WRITE_PATIENCE_S = 3.0
"""Time after which a write counts as hanging. A slow disk takes less, even under load."""


class MetadataKeeper:
    """See the module. `on_applied(records)` is called after each batch of committed records;
    None stands for "everything may have changed" (a snapshot)."""

    def __init__(
        self,
        environment: Environment,
        directory: DataDirectory,
        log: MetadataLog,
        *,
        incarnation: str,
        snapshot_records: int,
        now_s: Callable[[], float],
        on_applied: Callable[[Sequence[MetadataRecord] | None], None],
    ) -> None:
        """`now_s()` is the time by which the silence of controllers, and of the disk, is measured
        (`ListeningClock`)."""
        self._environment = environment
        self._now_s = now_s
        self._directory = directory
        self._log = log
        self._incarnation = incarnation
        self._snapshot_records = snapshot_records
        self._on_applied = on_applied
        # The log's methods block on the disk, so they run in threads, one at a time.
        self._lock = asyncio.Lock()
        self._reopen_from_s = 0.0
        self._writing_since_s: float | None = None
        self._failure: str | None = None
        """The reason that the last write failed. Each message of a controller tries again."""
        self.state = ClusterState()
        self.version = 0
        self.changed = Signal()
        self.controller: Address | None = None
        self.controller_epoch = 0
        self._started_s = now_s()
        self._heard_s: float | None = None
        self._tail: deque[tuple[int, list[MetadataRecord]]] = deque()
        """The log's entries that are not applied yet, decoded, with their indexes."""
        self._voters: tuple[Voter, ...] = ()
        self._hints: dict[int, Address] = {}
        self._parts = SnapshotParts()
        self._take_up()

    def known_brokers(self) -> list[Address]:
        """The last known addresses of brokers: hints, committed or not."""
        known = {
            number: (broker.registration.host, broker.registration.port)
            for number, broker in self.state.brokers.items()
        }
        return list((known or self._hints).values())

    @property
    def trouble(self) -> str | None:
        """The reason that the last records, or an epoch, could not be taken: the metadata here get
        outdated."""
        since_s = self._writing_since_s
        if since_s is not None:
            writing_s = self._now_s() - since_s
            if writing_s > WRITE_PATIENCE_S:
                return f"a write to {self._directory.path} has not ended for {writing_s:.1f} s"
        return self._directory.trouble or self._failure

    async def wait_for_version(self, version_min: int, wait_ms: int) -> None:
        """Returns once the state is of at least this version, or that time has passed."""
        if self.version < version_min and wait_ms:
            await self.changed.wait(wait_ms / 1000, holds=lambda: self.version >= version_min)

    def note_heard(self) -> None:
        """Notes that the controller answered."""
        self._heard_s = self._now_s()

    @property
    def heard_ms_ago(self) -> int | None:
        """Time since a controller was heard; None: not since this broker started."""
        if self._heard_s is None:
            return None
        return int((self._now_s() - self._heard_s) * 1000)

    @property
    def silent_s(self) -> float:
        """Time since a controller was heard, at most since the start."""
        since_s = self._started_s if self._heard_s is None else self._heard_s
        return self._now_s() - since_s

    @property
    def has_been_led(self) -> bool:
        """Returns whether any controller ever asked this voter for its promise."""
        return self._log.promised_epoch > 0

    def note_controller(self, epoch: int, controller: Address) -> None:
        """Notes the controller's address that another broker named."""
        if epoch >= self.controller_epoch:
            self.controller_epoch, self.controller = epoch, controller

    def voters(self) -> tuple[Voter, ...]:
        """The last voter set in this log, committed or not (as in Raft, the newest counts)."""
        return self._voters

    def _take_up(self) -> None:
        """Continues from the log on disk. A snapshot there may be newer than the state here: it is
        of committed records."""
        index = self._log.snapshot_index
        if index is not None and index > self.version:
            self._restore(index, self._log.snapshot_data or b"")
        self._look_at_tail()

    def _look_at_tail(self) -> None:
        """Decodes the entries of the log that are not applied yet."""
        self._voters = self.state.voters
        self._tail.clear()
        self._note(self._log.read(max(self.version + 1, self._log.first_index), 1 << 30))

    def _follow(self, new: Sequence[Entry]) -> None:
        """Takes note of what the log holds after a write of these entries: they follow on what is
        known here, unless the log held some of them already, or others in their place."""
        known_index = self._tail[-1][0] if self._tail else self.version
        if new and (new[0][0], new[-1][0]) == (known_index + 1, self._log.last_index):
            self._note(new)
        elif new or known_index != self._log.last_index:
            self._look_at_tail()

    def _note(self, entries: Iterable[Entry]) -> None:
        """Takes note of further entries of the log. Voters and addresses count before they are
        committed. They are kept aside, because a thread may be using the log when they are
        needed."""
        for index, _, data in entries:
            records = decode_entry(data)
            for record in records:
                if isinstance(record, VotersChanged):
                    self._voters = record.voters
                elif isinstance(record, BrokerRegistered):
                    self._hints[record.broker] = (record.host, record.port)
            self._tail.append((index, records))

    # --- requests of controllers ------------------------------------------------------------

    @answers(messages.Prepare)
    async def prepare(self, request: messages.Prepare) -> messages.PrepareResponse:
        """See `messages.Prepare`. Raises WrongClusterError, FencedEpochError."""
        meta = self._directory.meta
        if request.cluster_id != meta.cluster_id:
            raise WrongClusterError(
                f"Broker {meta.broker} belongs to cluster {meta.cluster_id}, not to "
                f"{request.cluster_id}."
            )
        async with self._lock:
            if not request.is_probe:
                if request.epoch <= self._log.promised_epoch:
                    raise self._fenced(request.epoch)
                await self._write(lambda log: log.promise(request.epoch))
            voters = [(voter.broker, voter.directory_id) for voter in self.voters()]
            return messages.PrepareResponse(
                broker=meta.broker,
                directory_id=meta.directory_id,
                start_counter=meta.start_counter,
                incarnation=self._incarnation,
                promised_epoch=self._log.promised_epoch,
                last_epoch=self._log.last_epoch,
                last_index=self._log.last_index,
                voters=voters,
                heard_ms_ago=self.heard_ms_ago,
            )

    @answers(messages.ReadMetadataLog)
    async def read(
        self, request: messages.ReadMetadataLog
    ) -> tuple[messages.ReadMetadataLogResponse, bytes]:
        """Returns a part of the log. Raises FencedEpochError."""
        async with self._lock:
            if request.epoch != self._log.promised_epoch:
                raise self._fenced(request.epoch)
            first_index = request.first_index
            entries: list[Entry] = []
            snapshot_index = snapshot_epoch = None
            if self._log.snapshot_index is not None and first_index <= self._log.snapshot_index:
                snapshot_index, snapshot_epoch = self._log.snapshot_index, self._log.snapshot_epoch
                assert snapshot_epoch is not None
                data, position = self._log.snapshot_data or b"", request.snapshot_position
                if position is not None:
                    end = position + max(1, request.bytes_max)
                    part = (snapshot_index, snapshot_epoch, data[position:end])
                    is_last = end >= len(data) and snapshot_index == self._log.last_index
                    return messages.ReadMetadataLogResponse(
                        snapshot_index, snapshot_epoch, is_last, len(data)
                    ), encode_entries([part])
                entries.append((snapshot_index, snapshot_epoch, data))
                first_index = snapshot_index + 1
            entries.extend(self._log.read(first_index, request.bytes_max))
            last_index = entries[-1][0] if entries else self._log.last_index
            answer = messages.ReadMetadataLogResponse(
                snapshot_index, snapshot_epoch, last_index >= self._log.last_index
            )
            return answer, encode_entries(entries)

    async def append(
        self, request: messages.AppendMetadata, payload: memoryview
    ) -> messages.AppendMetadataResponse:
        """Appends records. Raises FencedEpochError, StalePartitionError (the previous record is
        missing), StorageError."""
        entries = decode_entries(payload)
        async with self._lock, self._noting_trouble():
            await self._accept_epoch(request.epoch)
            self.note_heard()
            self.note_controller(request.epoch, (request.host, request.port))
            snapshot_index = self._log.snapshot_index or 0
            if request.previous_index >= snapshot_index:
                held = 0 if request.previous_index == 0 else self._epoch_at(request.previous_index)
                if held != request.previous_epoch:
                    raise StalePartitionError(
                        f"The metadata log of broker {self._directory.meta.broker} does not hold "
                        f"record {request.previous_index} of epoch {request.previous_epoch}."
                    )
            new = [entry for entry in entries if entry[0] > snapshot_index]
            if new:
                await self._write(lambda log: log.append(new))
            self._follow(new)
            self._parts.drop()
            agreed_index = max(
                request.previous_index + len(entries), min(snapshot_index, self.version)
            )
            await self._apply(min(request.commit_index, agreed_index))
        return messages.AppendMetadataResponse(self._directory.meta.directory_id, agreed_index)

    async def install(
        self, request: messages.InstallMetadataSnapshot, payload: memoryview
    ) -> messages.AppendMetadataResponse:
        """Replaces the log by a snapshot. Raises FencedEpochError, StorageError."""
        async with self._lock, self._noting_trouble():
            await self._accept_epoch(request.epoch)
            self.note_heard()
            await self._replace(request.last_index, request.last_epoch, bytes(payload))
        return messages.AppendMetadataResponse(
            self._directory.meta.directory_id, request.last_index
        )

    async def install_part(
        self, request: messages.InstallMetadataSnapshotPart, payload: memoryview
    ) -> messages.InstallMetadataSnapshotPartResponse:
        """Takes a part of a snapshot, which replaces the log once all parts are there. Raises
        FencedEpochError, StorageError."""
        async with self._lock, self._noting_trouble():
            await self._accept_epoch(request.epoch)
            self.note_heard()
            self.note_controller(request.epoch, (request.host, request.port))
            received_bytes = request.snapshot_bytes
            if request.last_index > self.version:
                received_bytes = self._parts.take(request, payload)
            is_whole = received_bytes == request.snapshot_bytes
            if is_whole:
                # Where the write fails the parts stay, and the next request tries it again.
                await self._replace(request.last_index, request.last_epoch, self._parts.whole())
                self._parts.drop()
        return messages.InstallMetadataSnapshotPartResponse(
            self._directory.meta.directory_id,
            received_bytes,
            request.last_index if is_whole else 0,
        )

    # --- inside -----------------------------------------------------------------------------

    async def _replace(self, index: int, epoch: int, data: bytes) -> None:
        """Replaces the log by a snapshot, unless this broker is that far. Raises StorageError."""
        if index > self.version:
            await self._write(lambda log: log.install_snapshot(index, epoch, data))
        if index > self.version:  # Not if the disk had a newer one.
            state = ClusterState()
            for records in decode_in_steps(data):
                for record in records:
                    state.replay(record)
                await asyncio.sleep(0)
            self.state, self.version = state, index
            self._on_applied(None)
            self.changed.notify()
        self._look_at_tail()

    async def _write(self, job: Callable[[MetadataLog], None]) -> None:
        """Changes the log. A log that ended with a failed write is opened again first: then the
        contents of the disk count, whatever became of that write. Raises StorageError."""
        # A write to files that were removed would succeed, and count for the majority.
        if (trouble := self._directory.trouble) is not None:
            raise StorageError(trouble)
        now_s = self._environment.clock.monotonic()
        if self._log.failure is not None and now_s < self._reopen_from_s:
            raise StorageError(self._log.failure)
        self._writing_since_s = self._now_s()
        try:
            if self._log.failure is not None:
                self._reopen_from_s = now_s + REOPEN_INTERVAL_S
                path = f"{self._directory.path}/metadata"
                self._log.close()
                self._log = await self._environment.threads.run(
                    MetadataLog.open, self._environment.disk, path
                )
                logger.warning("%s was opened again after a failed write", path)
                version = self.version
                self._take_up()
                if self.version > version:
                    self._on_applied(None)
                    self.changed.notify()
            await self._environment.threads.run(job, self._log)
        finally:
            self._writing_since_s = None

    @contextlib.asynccontextmanager
    async def _noting_trouble(self) -> AsyncIterator[None]:
        """Notes any failure that keeps this broker from following the metadata, except a
        refusal."""
        try:
            yield
        except (FencedEpochError, StalePartitionError):
            raise
        except Exception as error:
            self._failure = str(error)
            raise
        self._failure = None

    async def _accept_epoch(self, epoch: int) -> None:
        if epoch < self._log.promised_epoch:
            raise self._fenced(epoch)
        if epoch > self._log.promised_epoch:
            await self._write(lambda log: log.promise(epoch))

    def _fenced(self, epoch: int) -> FencedEpochError:
        return FencedEpochError(
            f"Broker {self._directory.meta.broker} promised controller epoch "
            f"{self._log.promised_epoch}; epoch {epoch} is refused."
        )

    def _epoch_at(self, index: int) -> int | None:
        if index == self._log.snapshot_index:
            return self._log.snapshot_epoch
        return self._log.epoch_at(index)

    async def _apply(self, commit_index: int) -> None:
        if commit_index <= self.version:
            return
        applied: list[MetadataRecord] = []
        while self.version < commit_index:
            index, records = self._tail.popleft()
            assert index == self.version + 1, (index, self.version)
            for record in records:
                self.state.replay(record)
            applied += records
            self.version = index
        self._on_applied(applied)
        self.changed.notify()
        is_long = self.version - self._log.first_index >= self._snapshot_records
        if is_long and self._log.size_bytes >= len(self._log.snapshot_data or b""):
            epoch = self._epoch_at(self.version)
            assert epoch is not None
            version = self.version
            data = encode_records(self.state.snapshot())
            await self._write(lambda log: log.compact(version, epoch, data))

    def _restore(self, index: int, data: bytes) -> None:
        state = ClusterState()
        for record in decode_records(data):
            state.replay(record)
        self.state, self.version = state, index
