"""A snapshot of the metadata on its way, in parts.

At 100,000 partitions it has 73 MB: more than a message should have, and more than can be sent in
the time that an answer may take.
"""

from __future__ import annotations

from rayq import messages

PART_BYTES_MAX = 1024 * 1024
"""Maximum size of a part. A snapshot that is not larger travels as one message."""

Snapshot = tuple[int, int, bytes]
"""`(index, epoch, encoded records)`: all that is committed up to this index."""


class SnapshotParts:
    """The parts of a snapshot that a broker has got so far. They are in memory only: a broker that
    starts again has none, and its log is untouched until all are there.

    They are of one snapshot of one controller. Another controller may have written the same records
    in another way, so its parts do not follow on these.
    """

    def __init__(self) -> None:
        self._of: tuple[int, int, int, int] | None = None
        self._data = bytearray()

    def take(self, request: messages.InstallMetadataSnapshotPart, payload: memoryview) -> int:
        """Takes a part in, if it is the next one. Returns the size of all that is there."""
        of = (request.epoch, request.last_index, request.last_epoch, request.snapshot_bytes)
        if of != self._of:
            self.drop()
            self._of = of
        is_next = request.position == len(self._data)
        if is_next and request.position + len(payload) <= request.snapshot_bytes:
            self._data += payload
        return len(self._data)

    def whole(self) -> bytes:
        """The snapshot, once all of its parts are there."""
        return bytes(self._data)

    def drop(self) -> None:
        """Forgets the parts."""
        self._of, self._data = None, bytearray()
