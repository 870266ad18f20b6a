"""An object store in memory that does what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rayq.environment import Buffer, ObjectMeta
from rayq.errors import RemoteMissingError

Fault = Callable[[bytes], bytes]
"""What a faulty call does with the bytes of an answer; or it raises."""


class MemoryStore:
    """`environment.ObjectStore`. `faults[operation]` are used up one by one, by the next calls of
    that operation (of probes: `faults["probe"]`); `latency_s` is how long each call takes."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.gets: list[tuple[str, int, int | None]] = []
        self.faults: dict[str, list[Fault]] = {}
        self.latency_s = 0.001

    async def _call(self, operation: str, name: str, answer: Callable[[], bytes]) -> bytes:
        await asyncio.sleep(self.latency_s)
        faults = self.faults.get("probe" if "/probes/" in name else operation)
        fault = faults.pop(0) if faults else None
        return answer() if fault is None else fault(answer())

    async def put(self, name: str, data: Buffer) -> None:
        self.objects[name] = await self._call("put", name, lambda: bytes(data))

    async def get(self, name: str, position: int = 0, length: int | None = None) -> bytes:
        self.gets.append((name, position, length))
        end = None if length is None else position + length
        return await self._call("get", name, lambda: self._found(name)[position:end])

    async def head(self, name: str) -> ObjectMeta:
        await self._call("head", name, lambda: b"")
        return ObjectMeta(name, len(self._found(name)), 1000)

    async def list(self, prefix: str, after: str = "") -> list[ObjectMeta]:
        await self._call("list", prefix, lambda: b"")
        return [
            ObjectMeta(name, len(self.objects[name]), 1000)
            for name in sorted(self.objects)
            if name.startswith(prefix) and name > after
        ][:2]

    async def delete(self, names: Sequence[str]) -> None:
        await self._call("delete", names[0] if names else "", lambda: b"")
        for name in names:
            self.objects.pop(name, None)

    async def sign(self, name: str, expires_s: float) -> str:
        return f"https://store/{name}?for={expires_s:g}"

    def _found(self, name: str) -> bytes:
        if name not in self.objects:
            raise RemoteMissingError(f"{name} does not exist.")
        return self.objects[name]


def raises(error: Exception) -> Fault:
    """A fault: the call is carried out, and its answer is lost."""

    def fault(answer: bytes) -> bytes:
        raise error

    return fault


def flipped(answer: bytes) -> bytes:
    """A fault: one bit is wrong."""
    return answer[:-1] + bytes([answer[-1] ^ 1]) if answer else answer


def short(answer: bytes) -> bytes:
    """A fault: the answer is not whole."""
    return answer[: len(answer) // 2]
