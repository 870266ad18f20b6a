"""An object server and a controller that a test plays, for a leader alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from rayq import messages
from rayq.actors.remote.object_link import ObjectLink
from rayq.environment import Buffer, Environment
from rayq.errors import RayqError, RemoteMissingError, StalePartitionError, TimeoutError
from rayq.messages.remote_names import ObjectKind, parse_name
from rayq.messages.remote_pointer import RemotePointer
from rayq.storage.remote.data_object import describe_batches

CLUSTER_ID, TOPIC_ID = "c" * 32, "d" * 32


class PlayedObjects(ObjectLink):
    """The object server of the node, with its store. Requests `fails_for` end with `failure`, if
    there is one; `is_done_all_the_same` says that they took effect."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(cast(Any, None), CLUSTER_ID)
        self.endpoint = ("objects", 1)
        self._environment = environment
        self.store: dict[str, tuple[bytes, int]] = {}
        self.asked: list[messages.AnyRequest] = []
        self.failure: RayqError | None = None
        self.fails_for: tuple[type[messages.AnyRequest], ...] = (messages.Request,)
        self.failures_left = 1 << 30
        self.is_done_all_the_same = False

    async def ask(
        self,
        request: messages.Request[messages.ResponseT],
        payload: Buffer | Sequence[Buffer] = b"",
        *,
        timeout_s: float = 1.0,
    ) -> tuple[messages.ResponseT, memoryview]:
        self.asked.append(request)
        await asyncio.sleep(0.01)
        failure = self.failure if isinstance(request, self.fails_for) else None
        if failure is not None:
            self.failures_left -= 1
            if self.failures_left == 0:
                self.failure = None
        if failure is not None and not self.is_done_all_the_same:
            raise failure
        response, data = self._answer(request, cast(bytes, payload))
        if failure is not None:
            raise failure
        return cast(messages.ResponseT, response), memoryview(data)

    def _answer(
        self, request: messages.AnyRequest, payload: bytes
    ) -> tuple[messages.Response, bytes]:
        match request:
            case messages.StoreRecords():
                return self._store_records(request), b""
            case messages.PutBlob():
                self.put(request.name, bytes(payload))
                return messages.Done(), b""
            case messages.GetBlob():
                return messages.Done(), self._get(request.name)
            case messages.ReadObject():
                return self._read(request), b""
            case messages.DropCached():
                return messages.Done(), b""
            case messages.DeleteObjects():
                for name in request.names:
                    self.store.pop(name, None)
                return messages.Done(), b""
            case messages.HeadObjects():
                found = [self.store.get(name) for name in request.names]
                return messages.HeadObjectsResponse(
                    [None if one is None else (len(one[0]), one[1]) for one in found]
                ), b""
            case messages.ListObjects():
                names = sorted(
                    name
                    for name in self.store
                    if name.startswith(request.prefix) and name > request.after
                )
                page = [(name, len(self.store[name][0]), self.store[name][1]) for name in names[:3]]
                after = page[-1][0] if len(names) > 3 else None
                return messages.ListObjectsResponse(page, after), b""
        raise AssertionError(request)

    def put(self, name: str, data: bytes) -> None:
        assert name not in self.store, f"{name} is written twice"
        self.store[name] = (data, self._environment.clock.wall_ms())

    def _get(self, name: str) -> bytes:
        if name not in self.store:
            raise RemoteMissingError(f"There is no object {name}.")
        return self.store[name][0]

    def _read(self, request: messages.ReadObject) -> messages.ReadObjectResponse:
        data = self._get(request.name)[request.position : request.position + request.length]
        path = f"/data/read-{len(self.asked)}"
        file = self._environment.disk.open(path, create=True)
        file.pwrite(data, 0)
        return messages.ReadObjectResponse(path, 0, len(data))

    def _store_records(self, request: messages.StoreRecords) -> messages.StoreRecordsResponse:
        data = bytearray()
        for one in request.ranges:
            file = self._environment.disk.open(one.path, writable=False)
            data += file.pread(one.length, one.position)
        made = describe_batches(
            bytes(data),
            topic_id=TOPIC_ID,
            partition=0,
            start=request.start,
            end=request.end,
            aborted=request.aborted,
        )
        content = bytes(data) + made.tail
        self.put(request.name, content)
        footer = made.footer
        return messages.StoreRecordsResponse(
            object_bytes=made.object_bytes,
            data_bytes=len(data),
            crc32c=made.crc32c,
            first_append_ms=footer.first_append_ms,
            last_append_ms=footer.last_append_ms,
            newest_timestamp_ms=footer.newest_timestamp_ms,
            end_epoch=footer.end_epoch,
        )

    def names(self, kind: ObjectKind) -> list[str]:
        return [name for name in self.store if (one := parse_name(name)) and one.kind is kind]


class PlayedController:
    """The broker and the controller behind it: the truth about the remote pointer. Each move goes
    as the next of `outcomes` says; without any it is done and answered."""

    def __init__(self) -> None:
        self.pointer: RemotePointer | None = None
        self.outcomes: list[str] = []
        """"lost": it never arrives. "unanswered": it is done, and the answer is lost."""
        self.moves: list[RemotePointer] = []
        self.refusal: RayqError | None = None

    async def ask(self, request: messages.Request[messages.ResponseT]) -> messages.ResponseT:
        await asyncio.sleep(0.01)
        assert isinstance(request, messages.MoveRemote)
        outcome = self.outcomes.pop(0) if self.outcomes else "answered"
        if outcome == "lost":
            raise TimeoutError("No answer.")
        if self.refusal is not None:
            raise self.refusal
        version = 0 if self.pointer is None else self.pointer.version
        if request.pointer.version != version + 1:
            raise StalePartitionError(f"The version is {version}.")
        self.moves.append(request.pointer)
        self.pointer = request.pointer
        if outcome == "unanswered":
            raise TimeoutError("No answer.")
        return cast(messages.ResponseT, messages.ChangeResponse(1))
