"""The files and directories of a simulated disk, as processes see them and as they are durable."""

from __future__ import annotations

import random
from collections.abc import Iterator

PAGE_BYTES = 4096


class StoredFile:
    """A file: `current` is what processes see, `_durable` what a power loss leaves for certain.

    `_dirty` holds the pages whose bytes are not durable. `_cut` is the smallest size that an
    unsynced truncation made, None without one: until the next sync the old tail may come back.
    """

    def __init__(self, content: bytes = b"") -> None:
        self.current = bytearray(content)
        self.locked_by: object | None = None
        self._durable = bytearray(content)
        self._durable_size = len(content)
        self._dirty: dict[int, None] = {}
        self._cut: int | None = None
        self._last_write = (0, 0)

    def write(self, data: bytes, position: int) -> None:
        end = position + len(data)
        if position > len(self.current):
            self.current.extend(bytes(position - len(self.current)))
        self.current[position:end] = data
        self._last_write = (position, end)
        for page in range(position // PAGE_BYTES, -(-end // PAGE_BYTES)):
            self._dirty[page] = None

    def truncate(self, size: int) -> None:
        if size > len(self.current):
            self.current.extend(bytes(size - len(self.current)))
            return
        del self.current[size:]
        self._cut = size if self._cut is None else min(self._cut, size)
        pages = -(-size // PAGE_BYTES)
        self._dirty = {page: None for page in self._dirty if page < pages}

    def sync(self) -> None:
        """All bytes and the size become durable, but for pages that an earlier failed sync lost."""
        self._make_cut_durable()
        for page in self._dirty:
            self._store(page)
        self._dirty.clear()
        self._durable_size = len(self.current)

    def write_back(self, rng: random.Random) -> None:
        """The kernel writes one dirty page early: a later version of it may then be lost alone."""
        if self._dirty and self._cut is None:
            self._store(rng.choice(list(self._dirty)))
            if rng.random() < 0.5:
                self._durable_size = max(self._durable_size, len(self.current))

    def lose_dirty_pages(self, rng: random.Random) -> None:
        """A failed sync: the pages count as clean, so that no later sync writes them. Some of the
        pages are still in the cache, others are read again from the disk below."""
        for page in self._dirty:
            if rng.random() < 0.5:
                start = page * PAGE_BYTES
                end = min(start + PAGE_BYTES, len(self.current))
                self.current[start:end] = self._durable[start:end].ljust(end - start, b"\0")
        self._dirty.clear()

    def power_loss(self, rng: random.Random) -> None:
        """Keeps all that was synced, and a random part of the rest."""
        luck = rng.random()
        if luck < 0.2:
            self.sync()  # The disk has written everything.
        elif luck < 0.8:
            self._keep_some(rng, rng.choice((0.2, 0.5, 0.8, 1.0)))
        content = self._durable[: self._durable_size]
        content.extend(bytes(self._durable_size - len(content)))
        self.__init__(bytes(content))  # type: ignore[misc]

    def _keep_some(self, rng: random.Random, keep: float) -> None:
        old_size, new_size = self._durable_size, len(self.current)
        torn_from = None
        start, end = self._last_write
        if start < end <= new_size and (end - 1) // PAGE_BYTES in self._dirty:
            torn_from = rng.randint(start, end)
        if self._cut is not None and rng.random() < 0.5:
            # The truncation is undone: the old tail is back, also behind a new page.
            last = self._cut // PAGE_BYTES
            self._dirty = {page: None for page in self._dirty if page <= last}
            new_size = old_size
        else:
            self._make_cut_durable()
        for page in self._dirty:
            if rng.random() < keep:
                self._store(page, torn_from)
        low, high = sorted((self._durable_size, new_size))
        self._durable_size = rng.choice((low, high, rng.randint(low, high)))

    def is_durable(self, start: int, stop: int) -> bool:
        """Returns whether a power loss now would leave these bytes as processes see them."""
        is_cut = self._cut is not None and self._cut < stop
        return (
            not is_cut
            and self._durable_size >= stop
            and self._durable[start:stop] == self.current[start:stop]
        )

    def flip(self, position: int, mask: int) -> None:
        self.current[position] ^= mask
        if position < len(self._durable):
            self._durable[position] ^= mask

    def _make_cut_durable(self) -> None:
        if self._cut is not None:
            del self._durable[self._cut :]
            self._durable_size = min(self._durable_size, self._cut)
            self._cut = None

    def _store(self, page: int, torn_from: int | None = None) -> None:
        """Writes a page down to the disk, with zeros behind the end of the file. With `torn_from`
        in the page, writes only the bytes before it."""
        start = page * PAGE_BYTES
        if len(self._durable) < start:
            self._durable.extend(bytes(start - len(self._durable)))
        content = self.current[start : start + PAGE_BYTES]
        if torn_from is not None and start <= torn_from < start + len(content):
            content = content[: torn_from - start]
        else:
            behind = min(len(self._durable) - start, PAGE_BYTES) - len(content)
            content.extend(bytes(max(0, behind)))
        self._durable[start : start + len(content)] = content


class Directory:
    """A directory's names, as processes see them and as they are durable."""

    def __init__(self) -> None:
        self.entries: dict[str, Directory | StoredFile] = {}
        self.durable: dict[str, Directory | StoredFile] = {}

    def power_loss(self) -> None:
        self.entries = dict(self.durable)
        for entry in self.entries.values():
            if isinstance(entry, Directory):
                entry.power_loss()

    def walk(self, path: str = "") -> Iterator[tuple[str, StoredFile]]:
        """Every file below, with its path, in order of names."""
        for name, entry in sorted(self.entries.items()):
            if isinstance(entry, Directory):
                yield from entry.walk(f"{path}/{name}")
            else:
                yield f"{path}/{name}", entry

    def copy(self) -> Directory:
        """A copy of the tree that processes see, all of it durable."""
        tree = Directory()
        for name, entry in self.entries.items():
            if isinstance(entry, Directory):
                tree.entries[name] = entry.copy()
            else:
                tree.entries[name] = StoredFile(bytes(entry.current))
        tree.durable = dict(tree.entries)
        return tree


class Change:
    """One atomic change of directory entries (None: the name is gone) that is not durable yet."""

    def __init__(self, *parts: tuple[Directory, str, Directory | StoredFile | None]) -> None:
        self._parts = parts

    def directories(self) -> list[Directory]:
        return [directory for directory, _, _ in self._parts]

    def apply(self) -> None:
        for directory, name, entry in self._parts:
            _set(directory.entries, name, entry)

    def make_durable(self) -> None:
        for directory, name, entry in self._parts:
            _set(directory.durable, name, entry)


def _set(
    entries: dict[str, Directory | StoredFile], name: str, entry: Directory | StoredFile | None
) -> None:
    if entry is None:
        entries.pop(name, None)
    else:
        entries[name] = entry
