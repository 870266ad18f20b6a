"""Chunks that came by, for the manifest that comes after them."""

from __future__ import annotations

from collections import OrderedDict

from rayq.config import MIB

CACHE_BYTES = 64 * MIB

ChunkKey = tuple[str, int, int]
"""`(topic id, partition, offset)`."""


class ChunkCache:
    """The batches of the chunks that came last, up to `bytes_max`. It is nothing but a cache: what
    is not in it is read back."""

    def __init__(self, bytes_max: int = CACHE_BYTES) -> None:
        self._bytes_max = bytes_max
        self._batches: OrderedDict[ChunkKey, bytes] = OrderedDict()
        self._size_bytes = 0

    def add(self, key: ChunkKey, batch: bytes) -> None:
        self.take(key)
        self._batches[key] = batch
        self._size_bytes += len(batch)
        while self._size_bytes > self._bytes_max:
            _, oldest = self._batches.popitem(last=False)
            self._size_bytes -= len(oldest)

    def take(self, key: ChunkKey) -> bytes | None:
        """The batch, which is not kept: a value is put together once."""
        batch = self._batches.pop(key, None)
        if batch is not None:
            self._size_bytes -= len(batch)
        return batch
