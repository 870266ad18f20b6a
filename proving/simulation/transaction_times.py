"""Checks that no transaction is aborted before its timeout, or lives much longer.

Its coordinator looks several times a second at what has had its time. The judge stands beside that
look: one that began under this coordinator has its whole time-out, one that an earlier coordinator
knew has 5 s at least, and none is open for longer than its time-out while requests were heard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

from rayq.core.transactions import changes as transaction_changes
from rayq.core.transactions.records import TransactionKey
from rayq.core.transactions.state import TransactionState

LEAST_S = 5.0
"""Time by rule 31; not the constant of the code that is judged."""
LOOK_S = 1.0
"""The longest time between two looks that counts; what passes beyond that, nobody could be heard
in."""
SLACK_S = 1.0
"""A transaction is seen at the first look after it began."""


@dataclass(slots=True)
class _Seen:
    """A transaction, since one coordinator knows of it."""

    since_s: float
    is_own: bool
    """True if it began under this coordinator."""
    heard_s: float = 0.0


class TransactionTimes:
    """See the module. `judging` wraps what coordinators ask; `problems` gets what was found."""

    def __init__(self, problems: list[str]) -> None:
        self._problems = problems
        self._seen: dict[tuple[TransactionState, TransactionKey], _Seen] = {}
        self._looked_s: dict[TransactionState, float] = {}

    @contextlib.contextmanager
    def judging(self) -> Iterator[None]:
        """Judges each look, for the length of a `with` block."""
        expired = transaction_changes.expired

        def judged(
            state: TransactionState, *, now_s: float, now_ms: int
        ) -> list[TransactionKey]:
            self._look(state, now_s)
            found = expired(state, now_s=now_s, now_ms=now_ms)
            self._judge(state, found, now_s)
            return found

        with mock.patch.object(transaction_changes, "expired", judged):
            yield

    def _look(self, state: TransactionState, now_s: float) -> None:
        passed_s = min(now_s - self._looked_s.get(state, now_s), LOOK_S)
        self._looked_s[state] = now_s
        for key in state.transactions:
            is_own = key in state.deadlines_s
            self._seen.setdefault((state, key), _Seen(now_s, is_own)).heard_s += passed_s

    def _judge(
        self, state: TransactionState, expired: list[TransactionKey], now_s: float
    ) -> None:
        for key, transaction in state.transactions.items():
            if transaction.is_decided:
                continue
            seen, tell = self._seen[state, key], self._problems.append
            timeout_s = state.ids[transaction.transactional_id].transaction_timeout_ms / 1000
            least_s = timeout_s if seen.is_own else LEAST_S
            open_s = now_s - seen.since_s
            what = f"{key} of {transaction.transactional_id!r}, whose time-out is {timeout_s} s,"
            if key in expired and open_s < least_s - SLACK_S:
                tell(f"{what} has had its time after {open_s:.3f} s; {least_s} s were promised")
            most_s = max(timeout_s, LEAST_S) + SLACK_S
            if key not in expired and not transaction.is_touched and seen.heard_s > most_s:
                tell(f"{what} is open after {seen.heard_s:.3f} s in which requests were heard")
