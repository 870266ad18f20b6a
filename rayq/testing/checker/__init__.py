"""Judges what clients saw: a recorder for histories, and a checker that knows nothing of rayq's
insides.

`python -m rayq.testing.checker HISTORY.jsonl` judges a file; `check(events)` judges a list.
Every value that is sent must be unique: values are how records are told apart.
"""

from __future__ import annotations

from rayq.testing.checker.history import (
    Assigned,
    Begun,
    ClockInDoubt,
    CommitsSeen,
    CommitsSet,
    Committed,
    Committing,
    Cut,
    Delayed,
    Disturbed,
    Event,
    Found,
    GroupOpened,
    KeeperInDoubt,
    Killed,
    Polled,
    ProducerOpened,
    Purged,
    QueueClosed,
    QueueOpened,
    Released,
    Sending,
    Sent,
    Settled,
    Settling,
    Took,
    read_history,
)
from rayq.testing.checker.recorder import Recorder
from rayq.testing.checker.verdict import Verdict, check

__all__ = [
    "Assigned",
    "Begun",
    "ClockInDoubt",
    "CommitsSeen",
    "CommitsSet",
    "Committed",
    "Committing",
    "Cut",
    "Delayed",
    "Disturbed",
    "Event",
    "Found",
    "GroupOpened",
    "KeeperInDoubt",
    "Killed",
    "Polled",
    "ProducerOpened",
    "Purged",
    "QueueClosed",
    "QueueOpened",
    "Recorder",
    "Released",
    "Sending",
    "Sent",
    "Settled",
    "Settling",
    "Took",
    "Verdict",
    "check",
    "read_history",
]
