"""The checker of transactions finds each kind of fault, and nothing in a sound history."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rayq.testing.checker import transactions as kinds
from rayq.testing.checker.transactions import TransactionHistory


def sound() -> TransactionHistory:
    history = TransactionHistory()
    for name, outcome in (("a", "committed"), ("b", "aborted"), ("c", "unknown"), ("d", "unknown")):
        history.begun(name)
        for number in (1, 2):
            history.sending(name, f"{name}{number}".encode())
        history.ended(name, outcome)  # type: ignore[arg-type]
    history.begun("copy")
    history.sending("copy", b"copy of i", made_of=b"i")
    history.ended("copy", "committed")
    history.input(b"i")
    history.read([b"a1", b"a2", b"c1"])
    history.cut([])
    history.cut([b"a1", b"a2", b"c2", b"c1"])
    history.read_in_the_end([b"a1", b"c1", b"a2", b"c2", b"copy of i"])
    return history


def test_a_sound_history_has_no_fault() -> None:
    assert sound().faults() == []
    assert sound().committed == 2


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda one: one.final.append(b"b1"), kinds.ABORTED),
        (lambda one: one.final.remove(b"a1"), kinds.MISSING),
        (lambda one: one.final.append(b"a1"), kinds.TWICE),
        (lambda one: one.final.append(b"d1"), kinds.TORN),
        (lambda one: one.final.remove(b"c1"), kinds.TORN),
        (lambda one: one.read([b"b2"]), kinds.TAKEN_BACK),
        (lambda one: one.cut([b"a1"]), kinds.TORN),
        (lambda one: one.cut([b"b1", b"b2"]), kinds.ABORTED),
        (lambda one: one.cut([b"a1", b"a2", b"a2"]), kinds.TWICE),
        (lambda one: one.input(b"j"), kinds.INPUT_LEFT_OUT),
        (lambda one: one.made_of.__setitem__(b"a1", b"i"), kinds.INPUT_TWICE),
    ],
)
def test_each_kind_of_fault_is_found(
    change: Callable[[TransactionHistory], object], kind: str
) -> None:
    history = sound()
    change(history)
    assert kind in {fault.split(":")[0] for fault in history.faults()}


def test_what_was_never_asked_to_commit_may_not_be_there() -> None:
    history = sound()
    history.begun("e")
    history.sending("e", b"e1")
    history.read_in_the_end([b"e1"])
    assert history.faults() == [f"{kinds.ABORTED}: 1 of 1 of e"]
