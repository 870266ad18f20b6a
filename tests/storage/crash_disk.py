"""A disk in memory that lists all that a loss of power may leave, after each of its operations.

It takes POSIX at its word. The content of a file is durable after its fdatasync, and only then; a
name (made, renamed or removed) after the sync of its own directory, and only then. Of what is not
synced any part may be kept, in any order: each change of a name alone, all but each, none, all, and
the first few; and of a file the old content, the new one, each write alone, half of the last write,
and the new length with zeros. Two things are granted: a rename is one change, and a file that takes
the place of another does so at once.

The simulated disk (proving/simulation/disk.py) draws one such state for each crash of a long run.
This one lists the states of a short change, so that a test can try each of them.
"""

from __future__ import annotations

import copy
import errno
import functools
import linecache
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType

from rayq.environment import Buffer

Image = frozenset[tuple[str, bytes | None]]
"""All that a disk holds: (path, content) of each file, and (path, None) of each directory."""

FREE_BYTES = 1 << 40
ALONE_MAX = 3
"""Of more unsynced writes of one file than this, only the last are tried alone."""


@dataclass(eq=False)
class Node:
    """A file. `pending` are the writes (position, bytes) and cuts (size, None) since its sync."""

    content: bytes = b""
    durable: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    locked_by: object | None = None

    def change(self, position: int, data: bytes | None) -> None:
        self.content = _changed(self.content, position, data)
        self.pending.append((position, data))

    def sync(self) -> None:
        self.durable = self.content
        self.pending.clear()

    def possible(self) -> list[bytes]:
        """What a loss of power may leave: the new content first, the old one second."""
        if not self.pending:
            return [self.content]
        found = [self.content, self.durable]
        before = self.durable
        for position, data in self.pending[:-1]:
            before = _changed(before, position, data)
        position, data = self.pending[-1]
        found.append(before)
        if data:
            found.append(_changed(before, position, data[: len(data) // 2]))
        found += [_changed(self.durable, *one) for one in self.pending[-ALONE_MAX:]]
        if len(self.content) > len(self.durable):
            found.append(self.durable.ljust(len(self.content), b"\0"))
        return list(dict.fromkeys(found))


def _changed(content: bytes, position: int, data: bytes | None) -> bytes:
    if data is None:
        return content[:position].ljust(position, b"\0")
    return content[:position].ljust(position, b"\0") + data + content[position + len(data) :]


@dataclass(eq=False)
class Folder:
    """A directory: its names as processes see them, and as they are durable."""

    entries: dict[str, Node | Folder] = field(default_factory=dict)
    durable: dict[str, Node | Folder] = field(default_factory=dict)


Part = tuple[Folder, str, "Node | Folder | None"]
"""What a change does to a directory: the name now means this, or nothing."""


@dataclass
class Fault:
    """A planted bug: the syncs whose line of rayq, as `CrashDisk.syncs` names it, contains `sync` do
    nothing, or come one operation late."""

    sync: str
    is_late: bool = False


class CrashDisk:
    """`environment.Disk`. `watcher` is called after each operation that changes anything."""

    def __init__(self, image: Image = frozenset()) -> None:
        self._root = Folder()
        self._changes: list[list[Part]] = []
        self.fault: Fault | None = None
        self._late: list[Node | Folder] = []
        self.syncs: dict[str, None] | None = None
        """The lines of rayq that asked for syncs. None: nobody wants to know."""
        self.watcher: Callable[[], object] = lambda: None
        for path, content in sorted(image):
            above, name = self._place_of(path)
            if content is None:
                above.entries[name] = above.durable[name] = Folder()
            else:
                above.entries[name] = above.durable[name] = Node(content, content)

    # --- what a crash leaves ----------------------------------------------------------------------

    def image(self) -> Image:
        """All that processes see: what is left when all processes are killed now."""
        return self._image_of(self._changes, {})

    def killed(self) -> CrashDisk:
        """The disk after all processes were killed now. What they did not sync is as they left it,
        until a loss of power."""
        disk = CrashDisk()
        disk._root, disk._changes = copy.deepcopy((self._root, self._changes))
        for node in disk._nodes(disk._root):
            if isinstance(node, Node):
                node.locked_by = None
        disk.syncs, disk.fault = self.syncs, self.fault
        return disk

    @property
    def has_unsynced_names(self) -> bool:
        return bool(self._changes)

    def settle(self) -> None:
        """All that processes see becomes durable."""
        self._changes.clear()
        self._late.clear()
        for node in self._nodes(self._root):
            if isinstance(node, Node):
                node.sync()
            else:
                node.durable = dict(node.entries)

    def images(self, *, is_brief: bool = False) -> Iterator[Image]:
        """All that a loss of power may leave now, without repetitions. `is_brief`: only where all
        names are kept or none is, and all contents are old."""
        changes = self._changes
        choices: list[Sequence[list[Part]]] = [changes, []] if changes else [[]]
        if not is_brief:
            choices += self._some_changes()
        dirty = [
            node for node in self._nodes(self._root) if isinstance(node, Node) and node.pending
        ]
        old = {id(node): node.durable for node in dirty}
        contents: list[dict[int, bytes]] = [old] if is_brief else [{}, old]
        for node in () if is_brief else dirty:
            for content in node.possible():
                contents += [{id(node): content}, {**old, id(node): content}]
        seen: set[Image] = set()
        for kept in choices:
            for content_of in contents:
                image = self._image_of(kept, content_of)
                if image not in seen:
                    seen.add(image)
                    yield image

    def _some_changes(self) -> list[Sequence[list[Part]]]:
        changes = self._changes
        return [
            *([change] for change in changes),
            *(changes[:place] + changes[place + 1 :] for place in range(len(changes))),
            *(changes[:place] for place in range(2, len(changes) - 1)),
        ]

    def _nodes(self, folder: Folder) -> Iterator[Node | Folder]:
        """All files and directories that processes see or that are durable or pending."""
        seen: dict[int, Node | Folder] = {}
        queue: list[Node | Folder] = [folder]
        queue += [node for change in self._changes for _, _, node in change if node is not None]
        while queue:
            node = queue.pop()
            if id(node) not in seen:
                seen[id(node)] = node
                if isinstance(node, Folder):
                    queue += [*node.entries.values(), *node.durable.values()]
        yield from seen.values()

    def _image_of(self, kept: Sequence[list[Part]], content_of: dict[int, bytes]) -> Image:
        names: dict[int, dict[str, Node | Folder]] = {}
        for change in kept:
            for folder, name, node in change:
                entries = names.setdefault(id(folder), dict(folder.durable))
                if node is None:
                    entries.pop(name, None)
                else:
                    entries[name] = node
        found: list[tuple[str, bytes | None]] = []

        def walk(folder: Folder, path: str) -> None:
            for name, node in names.get(id(folder), folder.durable).items():
                if isinstance(node, Folder):
                    found.append((f"{path}/{name}", None))
                    walk(node, f"{path}/{name}")
                else:
                    found.append((f"{path}/{name}", content_of.get(id(node), node.content)))

        walk(self._root, "")
        return frozenset(found)

    # --- operations -------------------------------------------------------------------------------

    def change(self, *parts: Part) -> None:
        for folder, name, node in parts:
            if node is None:
                folder.entries.pop(name, None)
            else:
                folder.entries[name] = node
        self._changes.append(list(parts))
        self.operated()

    def operated(self) -> None:
        self.watcher()
        if self._late:
            late, self._late = self._late, []
            for node in late:
                self._make_durable(node)
            self.watcher()

    def sync(self, node: Node | Folder) -> None:
        if self.syncs is not None:
            line = _line_of_sync()
            self.syncs[line] = None
            if self.fault is not None and self.fault.sync in line:
                if self.fault.is_late:
                    self._late.append(node)
                return
        self._make_durable(node)
        self.operated()

    def _make_durable(self, node: Node | Folder) -> None:
        if isinstance(node, Node):
            node.sync()
            return
        node.durable = dict(node.entries)
        left = [[part for part in change if part[0] is not node] for change in self._changes]
        self._changes = [change for change in left if change]

    # --- environment.Disk -------------------------------------------------------------------------

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> CrashFile:
        node = self._find(path)
        if node is None and create:
            folder, name = self._place_of(path)
            node = Node()
            self.change((folder, name, node))
        if not isinstance(node, Node):
            raise _error(errno.ENOENT if node is None else errno.EISDIR, path)
        return CrashFile(self, node, path, writable)

    def exists(self, path: str) -> bool:
        return self._find(path) is not None

    def list(self, path: str) -> list[str]:
        node = self._find(path)
        if isinstance(node, Node):
            raise _error(errno.ENOTDIR, path)
        return [] if node is None else sorted(node.entries)

    def make_dirs(self, path: str, *, syncs: bool = True) -> None:
        if isinstance(self._find(path), Folder):
            return
        self.make_dirs(os.path.dirname(path), syncs=syncs)
        folder, name = self._place_of(path)
        self.change((folder, name, Folder()))
        if syncs:
            self.sync_dir(os.path.dirname(path))

    def rename(self, source: str, target: str) -> None:
        node = self._find(source)
        if node is None:
            raise _error(errno.ENOENT, source)
        from_folder, from_name = self._place_of(source)
        to_folder, to_name = self._place_of(target)
        there = to_folder.entries.get(to_name)
        if isinstance(there, Folder) and there.entries:
            raise _error(errno.ENOTEMPTY, target)
        if there is not node:
            self.change((to_folder, to_name, node), (from_folder, from_name, None))

    def remove(self, path: str) -> None:
        if not isinstance(self._find(path), Node):
            raise _error(errno.ENOENT, path)
        self.change((*self._place_of(path), None))

    def remove_tree(self, path: str) -> None:
        node = self._find(path)
        if not isinstance(node, Folder):
            raise _error(errno.ENOENT, path)
        for name, below in list(node.entries.items()):
            if isinstance(below, Folder):
                self.remove_tree(f"{path}/{name}")
            else:
                self.remove(f"{path}/{name}")
        self.change((*self._place_of(path), None))

    def sync_dir(self, path: str) -> None:
        node = self._find(path)
        if not isinstance(node, Folder):
            raise _error(errno.ENOENT, path)
        self.sync(node)

    def free_bytes(self, path: str) -> int:
        return FREE_BYTES

    def _find(self, path: str) -> Node | Folder | None:
        node: Node | Folder | None = self._root
        for name in path.split("/"):
            if name:
                node = node.entries.get(name) if isinstance(node, Folder) else None
        return node

    def _place_of(self, path: str) -> tuple[Folder, str]:
        above, _, name = path.rpartition("/")
        folder = self._find(above)
        if not isinstance(folder, Folder):
            raise _error(errno.ENOENT, path)
        return folder, name


class CrashFile:
    """`environment.File`."""

    def __init__(self, disk: CrashDisk, node: Node, path: str, writable: bool) -> None:
        self._disk = disk
        self._node = node
        self._path = path
        self._writable = writable
        self._is_closed = False

    def _check(self, is_usable: bool = True) -> None:
        if self._is_closed or not is_usable:
            raise _error(errno.EBADF, self._path)

    def pwrite(self, data: Buffer, position: int) -> int:
        self._check(self._writable)
        content = bytes(data)
        self._node.change(position, content)
        self._disk.operated()
        return len(content)

    def pread(self, length: int, position: int) -> bytes:
        self._check()
        return self._node.content[position : position + length]

    def pread_cached(self, length: int, position: int) -> bytes | None:
        return self.pread(length, position)

    def size(self) -> int:
        self._check()
        return len(self._node.content)

    def truncate(self, size: int) -> None:
        self._check(self._writable)
        if size != len(self._node.content):
            self._node.change(size, None)
            self._disk.operated()

    def sync_data(self) -> None:
        self._check()
        self._disk.sync(self._node)

    def try_lock(self) -> bool:
        self._check()
        if self._node.locked_by not in (None, self):
            return False
        self._node.locked_by = self
        return True

    def is_at(self, path: str) -> bool:
        return self._disk._find(path) is self._node

    def close(self) -> None:
        self._is_closed = True
        if self._node.locked_by is self:
            self._node.locked_by = None


HELPERS = frozenset(
    [
        "replace",
        "write",
        "make_directory",
        "make_dirs",
        "sync_dir",
        "write_checkpoint",
        "write_clean_state",
        "write_epochs",
        "write_aborted",
        "_write_json",
    ]
)
"""Functions that sync for those who call them: a sync is named by the first other one."""


def _line_of_sync() -> str:
    """The line of rayq that asks for this sync, and the line that calls the helpers around it."""
    frame = sys._getframe(2)
    lines: list[str] = []
    while "/rayq/" not in frame.f_code.co_filename:
        frame = frame.f_back  # type: ignore[assignment]
    lines.append(_source_line(frame.f_code, frame.f_lineno))
    if frame.f_code.co_name in HELPERS:
        while frame.f_code.co_name in HELPERS:
            frame = frame.f_back  # type: ignore[assignment]
        lines.append(_source_line(frame.f_code, frame.f_lineno))
    return " of ".join(dict.fromkeys(lines)) + f" in {frame.f_code.co_qualname}"


@functools.cache
def _source_line(code: CodeType, line: int) -> str:
    """The text of a line, with its number among the equal lines of its function."""
    texts = [
        linecache.getline(code.co_filename, number).strip()
        for number in range(code.co_firstlineno, line + 1)
    ]
    number = texts.count(texts[-1])
    return texts[-1] if number == 1 else f"{texts[-1]} (no. {number})"


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
