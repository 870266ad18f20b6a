"""Faults of order: what one idempotent producer sends to one partition stands in the order of its
sends, and so do the records of one key."""

from __future__ import annotations

from collections.abc import Iterator

from rayq.testing.checker.facts import Facts, Fault, Place, Send

NONMONOTONIC_SEND = "non-monotonic send"
KEY_ORDER = "order per key"


def check_sends(facts: Facts) -> Iterator[Fault]:
    """By the acknowledgements: offsets rise with the sends."""
    last: dict[tuple[str, Place], Send] = {}
    for send in sorted(facts.sends, key=lambda send: (send.producer, send.number)):
        if send.outcome != "ok" or send.offset is None or send.partition is None:
            continue
        if not facts.is_idempotent(send):
            continue
        place = (send.topic, send.partition)
        before = last.get((send.producer, place))
        if before is not None and before.offset is not None and send.offset <= before.offset:
            yield Fault(
                NONMONOTONIC_SEND,
                f"{send} was given offset {send.offset} of {place[0]}-{place[1]}, {before} before "
                f"it {before.offset}.",
            )
        last[send.producer, place] = send


def check_keys(facts: Facts) -> Iterator[Fault]:
    """By the log as it was read, records of unknown outcome included."""
    for place, offsets in facts.log.items():
        last: dict[tuple[str, str], Send] = {}
        for offset in sorted(offsets):
            for value in offsets[offset]:
                send = facts.by_value.get(value)
                if send is None or send.key is None or not facts.is_idempotent(send):
                    continue
                before = last.get((send.producer, send.key))
                if before is not None and before.number > send.number:
                    yield Fault(
                        KEY_ORDER,
                        f"{place[0]}-{place[1]}: {send} stands after {before}, both of key "
                        f"{send.key!r}.",
                    )
                last[send.producer, send.key] = send
