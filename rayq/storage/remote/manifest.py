"""The manifest: the list of a partition's data objects, without hole or overlap.

A manifest is one object, a checked file whose content is msgpack of `_Root`. It has the rows of the
newest objects. The older rows are in *pages*, each an object of its own with `PAGE_OBJECTS` rows,
so that a change of a long list rewrites a short one. Pages are never changed. A row, little
endian::

    start u64 | end u64 | leader_epoch u32 | random u64
    object_bytes u32 | data_bytes u32 | crc32c u32
    first_append_ms i64 | last_append_ms i64 | newest_timestamp_ms i64 | end_epoch u32

Start, epoch and random number make the object's name (see `names`), behind the manifest's one
prefix: a restored topic continues below the prefix of the old one. What was taken off the list is
in `removed` until it was deleted, with the same parts of its name.

The manifest also has what the store needs to bring the topic back by itself: its name, config, the
leader epochs, and the producer state at `end`.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, overload

import msgspec

from rayq.errors import RayqError, RemoteDamagedError
from rayq.messages.remote_names import EPOCH_MAX, NUMBER_MAX, ObjectKind, RemoteName, parse_name
from rayq.messages.remote_pointer import OFFSET_MAX, RemotePointer
from rayq.storage import checked_file

PAGE_OBJECTS = 1024
"""The number of rows of a page."""
ROOT_OBJECTS_MAX = 2 * PAGE_OBJECTS
"""Maximum number of rows in the root: beyond that the oldest ones go to a page."""
_ROW = struct.Struct("<QQIQIIIqqqI")
_ROW_START = struct.Struct("<Q")
_NEWEST = struct.Struct("<q")
_NEWEST_POSITION = struct.calcsize("<QQIQIIIqq")
_REMOVED = struct.Struct("<cQIQq")
_KINDS = {b"d": ObjectKind.DATA, b"m": ObjectKind.MANIFEST, b"p": ObjectKind.PAGE}
_LETTERS = {kind: letter for letter, kind in _KINDS.items()}
_ROOT_KIND, _PAGE_KIND, _VERSION = "remote-manifest", "remote-manifest-page", 1


class RemoteObject(NamedTuple):
    """A data object as the manifest lists it."""

    start: int
    end: int
    """Exclusive."""
    name: str
    object_bytes: int
    data_bytes: int
    """Size without the footer."""
    crc32c: int
    """The CRC of the whole object."""
    first_append_ms: int
    last_append_ms: int
    newest_timestamp_ms: int
    """-1: it has no records."""
    end_epoch: int
    """The leader epoch of its last batch."""


class ManifestPage(msgspec.Struct, array_like=True, frozen=True):
    """A page that has the rows of the offsets from `start` up to `end` (exclusive)."""

    name: str
    start: int
    end: int


class RemoteObjects(Sequence[RemoteObject]):
    """Data objects in order, packed: a hundred thousand take 7 MB and no time to load."""

    __slots__ = ("_prefix", "_rows")

    def __init__(self, rows: bytes = b"", prefix: str = "") -> None:
        self._rows = rows
        self._prefix = prefix

    def __len__(self) -> int:
        return len(self._rows) // _ROW.size

    @overload
    def __getitem__(self, number: int) -> RemoteObject: ...

    @overload
    def __getitem__(self, number: slice) -> list[RemoteObject]: ...

    def __getitem__(self, number: int | slice) -> RemoteObject | list[RemoteObject]:
        if isinstance(number, slice):
            return [self._at(index) for index in range(len(self))[number]]
        return self._at(range(len(self))[number])

    def __iter__(self) -> Iterator[RemoteObject]:
        return map(self._at, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RemoteObjects)
            and self._rows == other._rows
            and (not self._rows or self._prefix == other._prefix)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} remote objects>"

    def _at(self, number: int) -> RemoteObject:
        start, end, epoch, random, *rest = _ROW.unpack_from(self._rows, number * _ROW.size)
        name = RemoteName(self._prefix, ObjectKind.DATA, start, epoch, random)
        return RemoteObject(start, end, str(name), *rest)

    def number_of(self, offset: int) -> int:
        """The number of objects that begin at `offset` or before."""
        return bisect_right(
            range(len(self)),
            offset,
            key=lambda number: _ROW_START.unpack_from(self._rows, number * _ROW.size)[0],
        )

    def newest_timestamp_ms(self, number: int) -> int:
        """The newest timestamp of one object, without unpacking the rest of its row."""
        (found,) = _NEWEST.unpack_from(self._rows, number * _ROW.size + _NEWEST_POSITION)
        return int(found)

    def rows(self, start: int = 0, end: int | None = None) -> bytes:
        """The packed rows with the numbers from `start` up to `end`."""
        return self._rows[start * _ROW.size : None if end is None else end * _ROW.size]


# Whoever reads a manifest computes with its numbers, and makes a topic by its name.
_Offset = Annotated[int, msgspec.Meta(ge=0, lt=OFFSET_MAX)]
_Epoch = Annotated[int, msgspec.Meta(ge=0, le=EPOCH_MAX)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
_TopicName = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9._-]{1,249}\Z")]


class _Root(msgspec.Struct, frozen=True):
    prefix: str
    cluster_id: str
    topic: _TopicName
    topic_id: str
    partition: Annotated[int, msgspec.Meta(ge=0, lt=1_000_000)]
    partitions: _Count
    config: dict[str, Any]
    replication_factor: _Count
    version: _Offset
    leader_epoch: _Epoch
    log_start: _Offset
    start: _Offset
    end: _Offset
    end_epoch: _Epoch | None
    data_bytes: _Offset
    epochs: list[tuple[_Epoch, _Offset]]
    producer_snapshot: bytes
    written_ms: _Offset
    pages: tuple[ManifestPage, ...]
    rows: bytes
    removed: bytes


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content behind one version of a partition's remote pointer. Its methods return a changed
    manifest; `version` and `leader_epoch` are for the caller (`msgspec.structs.replace`)."""

    prefix: str
    """The prefix of the names of all its objects (`names.partition_prefix`)."""
    cluster_id: str
    topic: str
    topic_id: str
    partition: int
    partitions: int
    """The number of partitions of the topic."""
    config: dict[str, Any]
    """The topic's config, as the metadata has it."""
    replication_factor: int
    version: int = 0
    leader_epoch: int = 0
    log_start: int = 0
    """The first readable offset."""
    end: int = 0
    """The offset at which the next object begins; with no object on the list it may begin later."""
    end_epoch: int | None = None
    """The leader epoch of the record at `end - 1`."""
    data_bytes: int = 0
    """The size of the objects on the list, without their footers."""
    epochs: list[tuple[int, int]] = []
    """`(leader epoch, start offset)` from `log_start` up to `end`."""
    producer_snapshot: bytes = b""
    """The producer state of all batches below `end`."""
    written_ms: int = 0
    """The time at which its leader made it."""
    objects: RemoteObjects = RemoteObjects()
    pages: tuple[ManifestPage, ...] = ()
    """The pages that have the oldest rows. They may also have older rows, which no longer count."""
    packed_removed: bytes = b""

    @property
    def start(self) -> int:
        """The first offset that is in the object store; `end` where there is none."""
        return self.objects[0].start if self.objects else self.end

    def pointer(self, name: str) -> RemotePointer:
        """The remote pointer to this manifest, stored as `name`."""
        return RemotePointer(
            version=self.version,
            leader_epoch=self.leader_epoch,
            manifest=name,
            start=self.start,
            end=self.end,
            end_epoch=self.end_epoch,
            data_bytes=self.data_bytes,
        )

    # --- look-ups ---------------------------------------------------------------------------------

    def find(self, offset: int) -> RemoteObject | None:
        """The object that holds `offset`."""
        number = self.objects.number_of(offset) - 1
        if number < 0 or (found := self.objects[number]).end <= offset:
            return None
        return found

    def between(self, start: int, end: int) -> list[RemoteObject]:
        """The objects that hold offsets from `start` up to `end` (exclusive)."""
        if end <= start:
            return []
        first = max(0, self.objects.number_of(start) - 1)
        found = self.objects[first : self.objects.number_of(end - 1)]
        return [item for item in found if item.end > start]

    def find_time(self, timestamp_ms: int, start: int = 0) -> RemoteObject | None:
        """The first object with an offset from `start` on that has a record of that time or later.
        Looks at each object's row."""
        first = max(0, self.objects.number_of(start) - 1)
        for number in range(first, len(self.objects)):
            if self.objects.newest_timestamp_ms(number) >= timestamp_ms:
                found = self.objects[number]
                if found.end > start:
                    return found
        return None

    @property
    def removed(self) -> list[tuple[str, int]]:
        """`(name, removed in ms)` of the objects that are off the list and may not be deleted yet.
        """
        found = []
        for letter, number, epoch, random, at_ms in _REMOVED.iter_unpack(self.packed_removed):
            name = RemoteName(self.prefix, _KINDS[letter], number, epoch, random)
            found.append((str(name), at_ms))
        return found

    def names(self) -> set[str]:
        """All objects that it refers to: on the list, pages, and what was removed."""
        return (
            {item.name for item in self.objects}
            | {page.name for page in self.pages}
            | {name for name, _ in self.removed}
        )

    # --- changes ----------------------------------------------------------------------------------

    def appended(self, *objects: RemoteObject) -> Manifest:
        """With objects that follow each other from `end` on. The first may begin later where there
        is none on the list."""
        if not objects:
            return self
        rows = bytearray()
        end = self.end
        for item in objects:
            is_first = not self.objects and not rows
            assert item.start == end or (is_first and item.start > end), f"{item} does not follow"
            assert item.start < item.end
            name = self._parsed(item.name)
            assert (name.kind, name.number) == (ObjectKind.DATA, item.start), item
            rows += _ROW.pack(item.start, item.end, name.leader_epoch, name.random, *item[3:])
            end = item.end
        return msgspec.structs.replace(
            self,
            objects=RemoteObjects(self.objects.rows() + rows, self.prefix),
            end=end,
            end_epoch=objects[-1].end_epoch,
            data_bytes=self.data_bytes + sum(item.data_bytes for item in objects),
        )

    def replaced(self, item: RemoteObject, now_ms: int) -> Manifest:
        """With another object for the range of one on the list, which is removed: it was made
        again. Pages that had the old one's row are removed, too."""
        number = self.objects.number_of(item.start) - 1
        old = self.objects[number]
        assert (old.start, old.end) == (item.start, item.end), f"{item} for {old}"
        alone = msgspec.structs.replace(
            self, objects=RemoteObjects(), end=item.start, data_bytes=0
        ).appended(item)
        rows = self.objects.rows(0, number) + alone.objects.rows() + self.objects.rows(number + 1)
        pages = tuple(page for page in self.pages if page.end <= item.start)
        changed = msgspec.structs.replace(
            self,
            objects=RemoteObjects(rows, self.prefix),
            pages=pages,
            data_bytes=self.data_bytes - old.data_bytes + item.data_bytes,
        )
        gone = [old.name, *(page.name for page in self.pages[len(pages) :])]
        return changed.with_removed(gone, now_ms)

    def without_below(self, log_start: int, now_ms: int) -> Manifest:
        """With this log start, if it is higher. Objects that end there or before are removed."""
        log_start = max(log_start, self.log_start)
        kept = self.objects.number_of(log_start)
        if kept and self.objects[kept - 1].end > log_start:
            kept -= 1
        gone = self.objects[:kept]
        changed = msgspec.structs.replace(
            self,
            log_start=log_start,
            objects=RemoteObjects(self.objects.rows(kept), self.prefix),
            data_bytes=self.data_bytes - sum(item.data_bytes for item in gone),
            epochs=_epochs_from(self.epochs, log_start),
        )
        pages = tuple(page for page in self.pages if page.end > changed.start)
        names = [item.name for item in gone]
        names += [page.name for page in self.pages if page not in pages]
        return msgspec.structs.replace(changed, pages=pages).with_removed(names, now_ms)

    def with_removed(self, names: Iterable[str], now_ms: int) -> Manifest:
        """With more objects to delete later: those that nothing refers to any more."""
        packed = bytearray(self.packed_removed)
        for text in names:
            name = self._parsed(text)
            packed += _REMOVED.pack(
                _LETTERS[name.kind],
                name.number,
                name.leader_epoch,
                name.random,
                now_ms,
            )
        return msgspec.structs.replace(self, packed_removed=bytes(packed))

    def without_removed(self, names: Iterable[str]) -> Manifest:
        """Without these among the removed: they were deleted."""
        gone = set(names)
        kept = bytearray()
        for number, (name, _) in enumerate(self.removed):
            if name not in gone:
                place = number * _REMOVED.size
                kept += self.packed_removed[place : place + _REMOVED.size]
        return msgspec.structs.replace(self, packed_removed=bytes(kept))

    def paged(self, new_name: Callable[[int], str]) -> tuple[Manifest, list[tuple[str, bytes]]]:
        """With the oldest rows in pages of their own while the root has too many, and the new
        pages as `(name, content)`: they are stored before the manifest. `new_name(start)` names
        one."""
        pages = list(self.pages)
        made = []
        while len(self.objects) - (first := self._paged_objects(pages)) > ROOT_OBJECTS_MAX:
            last = first + PAGE_OBJECTS
            start, end = self.objects[first].start, self.objects[last - 1].end
            page = ManifestPage(new_name(start), start, end)
            content = self.objects.rows(first, last)
            made.append((page.name, checked_file.encode(_PAGE_KIND, _VERSION, content)))
            pages.append(page)
        return msgspec.structs.replace(self, pages=tuple(pages)), made

    def _parsed(self, text: str) -> RemoteName:
        name = parse_name(text)
        assert name is not None, text
        assert name.prefix == self.prefix, text
        return name

    def _paged_objects(self, pages: Sequence[ManifestPage]) -> int:
        """The number of objects that have their rows in pages."""
        return self.objects.number_of(pages[-1].end - 1) if pages else 0

    # --- bytes ------------------------------------------------------------------------------------

    def encode(self) -> bytes:
        """The manifest as an object; its pages are others (`paged`)."""
        root = _Root(
            prefix=self.prefix,
            cluster_id=self.cluster_id,
            topic=self.topic,
            topic_id=self.topic_id,
            partition=self.partition,
            partitions=self.partitions,
            config=self.config,
            replication_factor=self.replication_factor,
            version=self.version,
            leader_epoch=self.leader_epoch,
            log_start=self.log_start,
            start=self.start,
            end=self.end,
            end_epoch=self.end_epoch,
            data_bytes=self.data_bytes,
            epochs=self.epochs,
            producer_snapshot=self.producer_snapshot,
            written_ms=self.written_ms,
            pages=self.pages,
            rows=self.objects.rows(self._paged_objects(self.pages)),
            removed=self.packed_removed,
        )
        return checked_file.encode(_ROOT_KIND, _VERSION, msgspec.msgpack.encode(root))


def page_names(root: bytes, name: str) -> list[str]:
    """The pages that the manifest `name` needs. Raises as `decode_manifest`."""
    return [page.name for page in _decoded(root, name).pages]


def decode_manifest(root: bytes, pages: Mapping[str, bytes], name: str) -> Manifest:
    """The manifest `name` with its pages, as they were stored, by their names.

    Raises RemoteDamagedError where one is damaged, of another version of rayq, of another name, or
    where it says what no leader writes: a list with a hole, numbers out of range, names elsewhere.
    """
    found = _decoded(root, name)
    rows = bytearray()
    for page in found.pages:
        rows += _content(_PAGE_KIND, pages[page.name], page.name)
    rows += found.rows
    if len(rows) % _ROW.size or len(found.removed) % _REMOVED.size:
        raise RemoteDamagedError(f"The manifest {name} is damaged: it has half a row.")
    every = RemoteObjects(bytes(rows), found.prefix)
    objects = RemoteObjects(every.rows(max(0, every.number_of(found.start) - 1)), found.prefix)
    _check(objects, found, name)
    return Manifest(
        prefix=found.prefix,
        cluster_id=found.cluster_id,
        topic=found.topic,
        topic_id=found.topic_id,
        partition=found.partition,
        partitions=found.partitions,
        config=found.config,
        replication_factor=found.replication_factor,
        version=found.version,
        leader_epoch=found.leader_epoch,
        log_start=found.log_start,
        end=found.end,
        end_epoch=found.end_epoch,
        data_bytes=found.data_bytes,
        epochs=found.epochs,
        producer_snapshot=found.producer_snapshot,
        written_ms=found.written_ms,
        objects=objects,
        pages=found.pages,
        packed_removed=found.removed,
    )


def _check(objects: RemoteObjects, root: _Root, name: str) -> None:
    """The rows follow each other from `start` up to `end`."""
    next_offset, size_bytes = root.start, 0
    for start, end, _, _, object_bytes, data_bytes, *_ in _ROW.iter_unpack(objects.rows()):
        size_bytes += data_bytes
        if start != next_offset or end <= start or data_bytes > object_bytes:
            raise RemoteDamagedError(
                f"The manifest {name} is damaged: an object begins at {start}, not at "
                f"{next_offset}."
            )
        next_offset = end
    if next_offset != root.end:
        raise RemoteDamagedError(
            f"The manifest {name} is damaged: its objects end at {next_offset}, not at {root.end}."
        )
    if size_bytes != root.data_bytes:
        raise RemoteDamagedError(
            f"The manifest {name} is damaged: its objects have {size_bytes} bytes, not "
            f"{root.data_bytes}."
        )
    for letter, number, *_ in _REMOVED.iter_unpack(root.removed):
        if letter not in _KINDS or number > NUMBER_MAX:
            raise RemoteDamagedError(
                f"The manifest {name} is damaged: what it removed has no name of rayq's."
            )


def _decoded(root: bytes, name: str) -> _Root:
    try:
        found = msgspec.msgpack.decode(_content(_ROOT_KIND, root, name), type=_Root)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteDamagedError(f"The manifest {name} cannot be read: {error}") from error
    parsed = parse_name(name)
    stored_as = None if parsed is None else parsed._replace(random=0)
    says = RemoteName(found.prefix, ObjectKind.MANIFEST, found.version, found.leader_epoch, 0)
    if stored_as != says:
        raise RemoteDamagedError(
            f"The manifest {name} is damaged, or another: it says that it is version "
            f"{found.version} of epoch {found.leader_epoch} below {found.prefix!r}."
        )
    pages = [parse_name(page.name) for page in found.pages]
    if (
        any(
            page is None or (page.prefix, page.kind) != (found.prefix, ObjectKind.PAGE)
            for page in pages
        )
        or any(not 0 <= page.start < page.end < OFFSET_MAX for page in found.pages)
        or any(before.end != after.start for before, after in pairwise(found.pages))
    ):
        raise RemoteDamagedError(f"The manifest {name} is damaged: its pages cannot be.")
    if any(
        before[0] >= after[0] or before[1] > after[1] for before, after in pairwise(found.epochs)
    ):
        raise RemoteDamagedError(f"The manifest {name} is damaged: its leader epochs go back.")
    if found.epochs and found.epochs[-1][0] > (found.end_epoch or 0):
        raise RemoteDamagedError(
            f"The manifest {name} is damaged: its last leader epoch is {found.epochs[-1][0]}, and "
            f"that of its last record {found.end_epoch}."
        )
    return found


def _content(kind: str, data: bytes, name: str) -> bytes:
    try:
        return checked_file.decode(kind, _VERSION, data, name)
    except RayqError as error:
        raise RemoteDamagedError(str(error)) from error


def _epochs_from(epochs: list[tuple[int, int]], offset: int) -> list[tuple[int, int]]:
    """Without the epochs that end at `offset` or before; the last one stays."""
    later = [number for number, (_, start) in enumerate(epochs) if start > offset]
    first = (later[0] if later else len(epochs)) - 1
    return epochs[max(0, first) :]
