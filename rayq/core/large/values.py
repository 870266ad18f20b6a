"""Large values: a producer appends chunks or an object's URI for a value too large for a record.

As chunks: the value is cut, and each piece is the value of a record of its own (a batch of one,
with the attribute CHUNK). Readers skip it. It has no key and one header, `rayq.chunk`: the value
that it belongs to, and its number. Once all chunks are acknowledged, the record itself follows,
with its key and headers. Its value is a **manifest** (its batch has the attribute LARGE): size and
CRC of the value, and the offset of each chunk. So whoever reads the record knows which offsets to
read, whatever lies between them; and nobody sees anything of a producer that dies half-way.

As an object: the value is written to an object store first, then the record, whose manifest has
the object's URI.

A manifest is a msgpack array::

    [1, size, crc32c, id of the value, [offsets] | nil, place of the chunks | nil, uri | nil]

The offsets are the first, and then the difference to the one before. The place is
`[topic, topic id, partition]`, nil for the partition that the record itself is in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Annotated

import google_crc32c
import msgspec

from rayq.errors import LargeValueError, LargeValueRefusedError
from rayq.records import Headers

CHUNK_HEADER = "rayq.chunk"
VALUE_ID_BYTES = 16
CHUNK_OFFSETS_MAX = 100_000
"""Maximum number of chunks of a value."""
CHUNK_OVERHEAD_BYTES = 256
"""Maximum size of a batch of one chunk besides the piece of the value and the size of every
batch."""
OFFSET_MAX = 2**62
"""Maximum offset of any log."""
TOPIC_LENGTH_MAX = 200
"""Maximum length of a topic's name."""
URI_LENGTH_MAX = 8192
OFFSET_BYTES_MAX = 9
"""Maximum size of a chunk's offset in a manifest."""
_VERSION = 1


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A partition that has chunks."""

    topic: str
    topic_id: str
    partition: int


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """The location of a large value, and its checksum."""

    version: int
    size_bytes: int
    crc: int
    value_id: bytes
    offset_steps: Annotated[list[int], msgspec.Meta(max_length=CHUNK_OFFSETS_MAX)] | None = None
    place: Place | None = None
    """The partition with the chunks. None: the partition of the record."""
    uri: str | None = None

    @property
    def offsets(self) -> list[int]:
        """Offsets of the chunks, in the order of the value; [] for a value that is an object."""
        return list(accumulate(self.offset_steps or ()))


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Manifest)
_ChunkName = tuple[bytes, int]
_chunk_decoder = msgspec.msgpack.Decoder(_ChunkName)


def crc_of(value: bytes | memoryview) -> int:
    """The CRC32C of a whole value."""
    return int(google_crc32c.value(bytes(value)))


def cut(size_bytes: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """Begin and end of each chunk of a value. None is empty."""
    return [
        (start, min(start + chunk_bytes, size_bytes)) for start in range(0, size_bytes, chunk_bytes)
    ]


def chunk_headers(value_id: bytes, index: int) -> Headers:
    """The headers of the chunk `index` (from 0) of a value."""
    return [(CHUNK_HEADER, _encoder.encode((value_id, index)))]


def manifest_of_chunks(
    size_bytes: int, crc: int, value_id: bytes, offsets: Sequence[int]
) -> bytes:
    """The manifest of a value whose chunks were acknowledged at these offsets."""
    steps = [offsets[0], *(after - before for before, after in pairwise(offsets))]
    return _encoder.encode(Manifest(_VERSION, size_bytes, crc, value_id, offset_steps=steps))


def manifest_of_object(size_bytes: int, crc: int, value_id: bytes, uri: str) -> bytes:
    """The manifest of a value that was written to the object `uri`."""
    return _encoder.encode(Manifest(_VERSION, size_bytes, crc, value_id, uri=uri))


class _Versioned(msgspec.Struct, array_like=True):
    version: int


_version_decoder = msgspec.msgpack.Decoder(_Versioned)


def _another_version(version: int) -> LargeValueRefusedError:
    return LargeValueRefusedError(
        f"its manifest has version {version}; this rayq reads {_VERSION}: use a newer rayq."
    )


def read_manifest(value: bytes | None, *, offset: int | None = None) -> Manifest:
    """Reads the manifest from a record's value, if its batch is LARGE. `offset` is the record's
    own.

    Raises LargeValueError: it is not a manifest, or names what cannot be; LargeValueRefusedError:
    it is one of a newer rayq.
    """
    version = _VERSION
    try:
        version = _version_decoder.decode(value or b"").version
        manifest = _decoder.decode(value or b"")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if version == _VERSION:
            raise LargeValueError(
                f"the record says that its value is a manifest, and it is none: {error}."
            ) from error
        raise _another_version(version) from error
    if manifest.version != _VERSION:
        raise _another_version(manifest.version)
    offsets = manifest.offsets
    is_possible = (
        manifest.size_bytes > 0
        and len(manifest.value_id) == VALUE_ID_BYTES
        and (manifest.uri is None) == bool(offsets)
        and len(manifest.uri or "") <= URI_LENGTH_MAX
        and len(offsets) <= manifest.size_bytes
        and len(set(offsets)) == len(offsets)
        and all(0 <= chunk < OFFSET_MAX for chunk in offsets)
        and (
            offset is None or manifest.place is not None or all(chunk < offset for chunk in offsets)
        )
        and (manifest.place is None or _is_possible(manifest.place))
    )
    if not is_possible:
        raise LargeValueError("its manifest cannot be: no producer of rayq writes such a one.")
    return manifest


def _is_possible(place: Place) -> bool:
    return place.partition >= 0 and 0 < len(place.topic) <= TOPIC_LENGTH_MAX


def pinned(value: bytes | None, topic: str, topic_id: str, partition: int) -> bytes | None:
    """The manifest of a record that is copied to another partition: it names the partition of the
    chunks, which stay. A value that is not a manifest with chunks is unchanged."""
    try:
        manifest = read_manifest(value)
    except (LargeValueError, LargeValueRefusedError):
        return value
    if manifest.place is not None or manifest.uri is not None:
        return value
    place = Place(topic, topic_id, partition)
    return _encoder.encode(msgspec.structs.replace(manifest, place=place))


def first_chunk_in(value: bytes | None, topic_id: str, partition: int) -> int | None:
    """The lowest offset of the chunks that the manifest of a record of this partition names; None
    if they are elsewhere, or it is not a manifest: its consumer is told of that."""
    try:
        manifest = read_manifest(value)
    except (LargeValueError, LargeValueRefusedError):
        return None
    place = manifest.place
    if place is not None and (place.topic_id, place.partition) != (topic_id, partition):
        return None
    return min(manifest.offsets, default=None)


def check_chunk(manifest: Manifest, index: int, headers: Headers | None) -> None:
    """Raises LargeValueError unless a chunk at an offset of the manifest belongs to this value."""
    names = [data for name, data in headers or () if name == CHUNK_HEADER]
    try:
        value_id, number = _chunk_decoder.decode(names[0] if names else b"")
    except msgspec.DecodeError as error:
        raise LargeValueError(f"its chunk {index} has no header {CHUNK_HEADER}.") from error
    if value_id != manifest.value_id or number != index:
        raise LargeValueError(
            f"where its chunk {index} should be is chunk {number} of the value {value_id.hex()}, "
            f"and it is {manifest.value_id.hex()}."
        )


def join(manifest: Manifest, pieces: Iterable[bytes | memoryview]) -> bytes:
    """Joins the pieces, in order, to the value. Raises LargeValueError if it is another one."""
    value = b"".join(pieces)
    if len(value) != manifest.size_bytes:
        raise LargeValueError(
            f"it has {len(value)} bytes, and should have {manifest.size_bytes}."
        )
    if (crc := crc_of(value)) != manifest.crc:
        raise LargeValueError(
            f"its CRC32C is {crc:#010x}, and should be {manifest.crc:#010x}: it is another value, "
            "or damaged."
        )
    return value


def runs(offsets: Iterable[int]) -> list[range]:
    """The offsets, ascending, in runs without gaps."""
    found_runs: list[range] = []
    for offset in sorted(offsets):
        if found_runs and found_runs[-1].stop == offset:
            found_runs[-1] = range(found_runs[-1].start, offset + 1)
        else:
            found_runs.append(range(offset, offset + 1))
    return found_runs
