"""Upload of this node's segment files as data objects."""

from __future__ import annotations

import os.path
from collections.abc import Sequence
from contextlib import closing

from rayq import messages
from rayq.actors.handlers import answers
from rayq.actors.objects.folder_claims import FolderClaims
from rayq.actors.objects.store_client import StoreClient
from rayq.environment import Disk, Environment
from rayq.errors import CorruptBatchError, InvalidRequestError, StorageError
from rayq.messages.remote_names import ObjectKind, RemoteName, parse_name
from rayq.storage.batch import BATCH_BYTES_MAX
from rayq.storage.remote import data_object
from rayq.storage.remote.data_object import DataObject, describe_batches


class RecordUploads:
    """See the module. A crash leaves nothing, or an object that no manifest names, which the sweep
    removes."""

    def __init__(
        self,
        environment: Environment,
        client: StoreClient,
        claims: FolderClaims,
        data_path: str,
    ) -> None:
        self._environment = environment
        self._client = client
        self._claims = claims
        self._data_path = data_path

    @answers(messages.StoreRecords)
    async def store(self, request: messages.StoreRecords) -> messages.StoreRecordsResponse:
        """See `messages.StoreRecords`."""
        name = self._checked(request)
        await self._claims.check([request.name])
        size_bytes = sum(part.length for part in request.ranges)
        async with self._client.upload_turn(size_bytes):
            data, made = await self._environment.threads.run(
                _make, self._environment.disk, request, name
            )
            await self._client.put(request.name, data)
        footer = made.footer
        return messages.StoreRecordsResponse(
            object_bytes=made.object_bytes,
            data_bytes=footer.data_bytes,
            crc32c=made.crc32c,
            first_append_ms=footer.first_append_ms,
            last_append_ms=footer.last_append_ms,
            newest_timestamp_ms=footer.newest_timestamp_ms,
            end_epoch=footer.end_epoch,
        )

    def _checked(self, request: messages.StoreRecords) -> RemoteName:
        """The object's name. Raises InvalidRequestError."""
        name = parse_name(request.name)
        if name is None or name.kind is not ObjectKind.DATA or name.number != request.start:
            raise InvalidRequestError(
                f"{request.name} is not the name of a data object that begins at {request.start}."
            )
        for part in request.ranges:
            path = os.path.normpath(part.path)
            if not path.startswith(f"{self._data_path}/") or min(part.position, part.length) < 0:
                raise InvalidRequestError(f"{part} is not a range of a file of this broker.")
        size_bytes = sum(part.length for part in request.ranges)
        # Only a single large batch exceeds it.
        if not 0 < size_bytes <= data_object.OBJECT_DATA_BYTES_MAX + BATCH_BYTES_MAX:
            raise InvalidRequestError(f"{request.name} would have {size_bytes} bytes.")
        return name


def _make(
    disk: Disk, request: messages.StoreRecords, name: RemoteName
) -> tuple[bytearray, DataObject]:
    """Makes the bytes of the object, from the very memory that was checked."""
    data = _read(disk, request.ranges)
    with memoryview(data) as view:
        made = describe_batches(
            view,
            topic_id=name.topic_id,
            partition=name.partition,
            start=request.start,
            end=request.end,
            aborted=request.aborted,
        )
    data += made.tail
    return data, made


def _read(disk: Disk, ranges: Sequence[messages.LocalRange]) -> bytearray:
    data = bytearray()
    for part in ranges:
        try:
            with closing(disk.open(part.path, writable=False)) as file:
                chunk = file.pread(part.length, part.position)
        except OSError as error:
            raise StorageError(f"{part.path} cannot be read to be stored: {error}.") from error
        if len(chunk) != part.length:
            raise CorruptBatchError(
                f"{part.path} ends at {part.position + len(chunk)}, {part.length - len(chunk)} "
                "bytes before the log says: these records cannot be stored."
            )
        data += chunk
    return data
