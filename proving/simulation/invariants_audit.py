"""The invariants of the audit: each change of the metadata that has an origin is one line of
`__audit`, in the order of the changes, and no line tells anything else."""

from __future__ import annotations

from rayq.core.access.audit import AuditLine, decode_line, line_of
from rayq.core.cluster.records import RequestDone
from rayq.messages.audit import AuditedChange
from rayq.storage.batch import decode_columns, read_header


class AuditJudge:
    """See the module. Raises AssertionError for what is wrong."""

    def __init__(self) -> None:
        self._changes: dict[int, AuditedChange] = {}
        """Committed changes by their times."""
        self._early: dict[int, AuditLine] = {}
        """Lines of changes that nobody was seen to apply yet: a broker that took a snapshot has
        them at once."""
        self._last = 0
        """Number of the last change that has a line."""
        self.told = 0
        """Number of changes that have a line."""

    @property
    def untold(self) -> int:
        """Number of committed changes that have no line yet."""
        return len(self._changes) + len(self._early) - self.told

    def note_done(self, record: RequestDone) -> None:
        """Takes note of a change that is committed."""
        change = record.change
        if change is None:
            return
        if change.time_ms in self._changes:
            raise AssertionError(f"two changes have the time {change.time_ms}")
        self._changes[change.time_ms] = change
        early = self._early.pop(change.time_ms, None)
        if early is not None:
            self._compare(early, change)

    def committed(self, batch: bytes) -> None:
        """Takes a committed batch of `__audit`."""
        columns = decode_columns(batch, 0, read_header(batch))
        for key, value in zip(columns.keys or (), columns.values, strict=True):
            line = decode_line(value or b"")
            number = int((key or b"").split()[1])
            if line.kind == "lost":
                raise AssertionError(f"the audit lacks {line.left_out} changes")
            if line.kind == "change":
                if number != self._last + 1:
                    raise AssertionError(f"change {number} is told after change {self._last}")
                self._last = number
                self.told += 1
                change = self._changes.get(line.time_ms)
                if change is None:
                    self._early[line.time_ms] = line
                else:
                    self._compare(line, change)

    def _compare(self, line: AuditLine, change: AuditedChange) -> None:
        if line != line_of(change):
            raise AssertionError(f"the audit tells {line} of {change}")

    def check_ends(self) -> None:
        """At the end each change that was told is committed."""
        if self._early:
            raise AssertionError(f"lines tell changes that nobody made: {self._early}")
