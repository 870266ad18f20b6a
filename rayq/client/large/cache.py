"""Cache of chunks that were fetched before their manifest."""

from __future__ import annotations

from collections import OrderedDict

from rayq.config import MIB

CACHE_BYTES = 64 * MIB

ChunkKey = tuple[str, int, int]
"""`(topic id, partition, offset)`."""


class ChunkCache:
    """The batches of the last chunks fetched, up to `bytes_max`. It is only a cache: chunks that
    are not in it are read back."""

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
        """Removes and returns a batch: a value is assembled once."""
        batch = self._batches.pop(key, None)
        if batch is not None:
            self._size_bytes -= len(batch)
        return batch
