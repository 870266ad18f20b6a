"""All checks over one history, and what comes out of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rayq.testing.checker.facts import Facts, Fault, gather
from rayq.testing.checker.groups import judge_groups
from rayq.testing.checker.history import Event
from rayq.testing.checker.order import check_keys, check_sends
from rayq.testing.checker.polls import check_polls
from rayq.testing.checker.queues import check_queues
from rayq.testing.checker.writes import (
    check_acknowledged,
    check_duplicates,
    check_failed,
    check_offsets,
    check_what_was_read,
)

CHECKS = (
    check_acknowledged,
    check_what_was_read,
    check_offsets,
    check_duplicates,
    check_failed,
    check_polls,
    check_sends,
    check_keys,
    check_queues,
)
SHOWN_PER_KIND_MAX = 5


@dataclass(frozen=True)
class Verdict:
    """The verdict on a history. `faults` is empty for a good one."""

    faults: list[Fault]
    sent: int
    acknowledged: int
    failed: int
    unknown: int
    polled: int
    repeated: int = 0
    """Records that a group polled more than once."""

    @property
    def is_clean(self) -> bool:
        return not self.faults

    def __str__(self) -> str:
        lines = [
            f"{self.sent} records sent: {self.acknowledged} acknowledged, {self.failed} failed, "
            f"{self.unknown} of unknown outcome; {self.polled} polled"
        ]
        if self.repeated:
            lines.append(f"{self.repeated} polled again by their group")
        by_kind = Counter(fault.kind for fault in self.faults)
        for kind, count in by_kind.items():
            lines.append(f"{kind}: {count}")
            shown = [fault.what for fault in self.faults if fault.kind == kind]
            lines.extend(f"  {what}" for what in shown[:SHOWN_PER_KIND_MAX])
            if count > SHOWN_PER_KIND_MAX:
                lines.append(f"  ... and {count - SHOWN_PER_KIND_MAX} more")
        lines.append("clean" if self.is_clean else f"{len(self.faults)} faults")
        return "\n".join(lines)


def check(events: Iterable[Event]) -> Verdict:
    """Judges a history that ended with all partitions read to their ends. Raises ValueError for a
    history that contradicts itself."""
    facts = gather(events)
    sends = [*facts.sends, *facts.queue_sends]
    outcomes = Counter(send.outcome for send in sends)
    groups = judge_groups(facts)
    return Verdict(
        faults=[*(fault for judge in CHECKS for fault in judge(facts)), *groups.faults],
        sent=len(sends),
        acknowledged=outcomes["ok"],
        failed=outcomes["failed"],
        unknown=outcomes["unknown"],
        polled=facts.records_polled,
        repeated=groups.repeated,
    )


__all__ = ["CHECKS", "Facts", "Fault", "Verdict", "check"]
