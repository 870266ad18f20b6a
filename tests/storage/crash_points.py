"""Tries all crash points of a change of files: after each operation, all that a crash may leave."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.storage.crash_disk import CrashDisk, Fault, Image

Allows = Callable[[Any, Any, Any], bool]
"""`allows(before, after, found)`: whether a crash within a step may leave what was found."""


def old_or_new(before: Any, after: Any, found: Any) -> bool:
    return bool(found in (before, after))


class Step(NamedTuple):
    """A part of a change. What it has done when it returns is acknowledged."""

    run: Callable[[Any], object]
    allows: Allows = old_or_new


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of files in steps.

    `prepare` makes what is there before (durable when it returns), and returns what the steps work
    on. `look` opens what is on a disk as the next start does, and returns all that counts of it. A
    crash within a step may leave what `look` finds before the step and after it, or else what the
    step `allows`. A crash after the step leaves what `look` finds after it.
    """

    prepare: Callable[[CrashDisk], Any]
    steps: Sequence[Step]
    look: Callable[[CrashDisk], Hashable]
    resume: Callable[[CrashDisk], object] | None = None
    """What the next process does after a kill, and acknowledges. None: it looks."""
    acknowledged: Callable[[Any], Hashable] = lambda found: found
    """The part of what `look` finds that `resume` has acknowledged."""


class Wrong(AssertionError):  # noqa: N818
    """A crash left what it may not leave."""


class CrashPoints:
    """All crash points of a change: losses of power, also a second one during the start that
    follows, and kills of the process that are followed by a loss of power some time later."""

    def __init__(self, change: Change, fault: Fault | None = None) -> None:
        self._change = change
        self._fault = fault
        self._seen: set[Hashable] = set()
        self.syncs: dict[str, None] = {}
        """The lines of rayq that asked for syncs."""

    @property
    def count(self) -> int:
        return len(self._seen)

    def run(self) -> None:
        """Raises `Wrong`."""
        change, disk = self._change, CrashDisk()
        context = change.prepare(disk)
        disk.settle()
        disk.syncs, disk.fault = self.syncs, self._fault
        before = self._look(disk.image())
        for step in change.steps:
            images = dict.fromkeys(disk.images())
            kills: list[CrashDisk] = []

            def crash(images: dict[Image, None] = images, kills: list[CrashDisk] = kills) -> None:
                images.update(dict.fromkeys(disk.images()))
                kills.append(disk.killed())

            disk.watcher = crash
            step.run(context)
            disk.watcher = lambda: None
            after = self._look(disk.image())
            for image in images:
                self._check(image, before, after, step.allows)
            for killed in kills:
                self._check_kill(killed, before, after, step.allows)
            before = after
        for image in disk.images():
            self._check(image, before, before, old_or_new)

    def _look(self, image: Image) -> Hashable:
        return self._change.look(CrashDisk(image))

    def _check(
        self,
        image: Image,
        before: Hashable,
        after: Hashable,
        allows: Allows,
        *,
        is_second: bool = False,
    ) -> None:
        case = (image, before, after)
        if case in self._seen:
            return
        self._seen.add(case)
        disk = CrashDisk(image)
        disk.syncs, disk.fault = self.syncs, self._fault
        images: dict[Image, None] = {}
        if not is_second:
            disk.watcher = lambda: images.update(dict.fromkeys(disk.images(is_brief=True)))
        try:
            found = self._change.look(disk)
        except Exception as error:
            raise Wrong(f"What a crash left cannot be opened: {_named(image)}") from error
        if not allows(before, after, found):
            raise Wrong(f"{_differences(before, after, found)}\n{_named(image)}")
        if not is_second:
            for again in images:
                self._check(again, before, after, allows, is_second=True)
            for again in disk.images(is_brief=True):  # What this start has shown stays.
                self._check(again, found, found, old_or_new, is_second=True)

    def _check_kill(
        self, disk: CrashDisk, before: Hashable, after: Hashable, allows: Allows
    ) -> None:
        """A loss of power while the next process starts, and one when it has done its work."""
        starting = disk.killed()
        images: dict[Image, None] = {}
        is_brief = not disk.has_unsynced_names
        starting.watcher = lambda: images.update(dict.fromkeys(starting.images(is_brief=is_brief)))
        try:
            self._change.look(starting)
            (self._change.resume or self._change.look)(disk)
        except Exception as error:
            raise Wrong(f"What a kill left cannot be used: {_named(disk.image())}") from error
        for image in images:
            self._check(image, before, after, allows, is_second=True)
        acknowledged = self._change.acknowledged
        found = self._look(disk.image())

        def stays(_: Any, __: Any, again: Any) -> bool:
            return bool(acknowledged(again) == acknowledged(found))

        for image in disk.images():
            self._check(image, found, found, stays, is_second=True)


def _named(image: Image) -> str:
    return ", ".join(
        path if data is None else f"{path} ({len(data)})" for path, data in sorted(image)
    )


def _differences(before: Any, after: Any, found: Any) -> str:
    if not hasattr(found, "_fields"):
        return f"A crash left {found}, of {before} and {after}:"
    wrong = [
        f"{name} {value}, of {old} and {new}"
        for name, value, old, new in zip(found._fields, found, before, after, strict=True)
        if value != old or value != new
    ]
    return "A crash left " + "; ".join(wrong) + ":"
