"""Faults of single records: lost, unseen, repeated, changed, or written though they had failed."""

from __future__ import annotations

from collections.abc import Iterator

from rayq.testing.checker.facts import Facts, Fault

LOST, UNSEEN = "lost write", "unseen record"
TAKEN_BACK = "record was read and is gone"
DUPLICATE = "duplicate"
INCONSISTENT = "inconsistent offset"
FAILED_READ = "failed write was read"
FOREIGN = "record nobody sent"


def check_acknowledged(facts: Facts) -> Iterator[Fault]:
    """An acknowledged record must have been read by the end of the history. "Lost": a consumer read
    past its offset and it was not there, or the reader that read everything in the end did not find
    it; "unseen": no consumer has read so far."""
    ends = {place: max(offsets) for place, offsets in facts.read.items() if offsets}
    for send in facts.sends:
        if send.outcome != "ok" or send.offset is None or send.partition is None:
            continue
        if not facts.promises_durability(send):
            continue
        place = (send.topic, send.partition)
        where = f"{send} at offset {send.offset} of {_name(place)}"
        found = facts.found.get(place)
        if found is not None and send.offset not in found:
            yield Fault(LOST, f"{where} was not there in the end.")
        elif (*place, send.offset) not in facts.places_of.get(send.value, ()):
            kind = LOST if ends.get(place, -1) > send.offset else UNSEEN
            yield Fault(kind, f"{where} was never read.")


def check_what_was_read(facts: Facts) -> Iterator[Fault]:
    """Checks that what any consumer has read, which is committed, is there in the end too."""
    for place, found in facts.found.items():
        for offset in sorted(facts.read_before[place] - found):
            values = " and ".join(map(repr, facts.log[place][offset]))
            yield Fault(TAKEN_BACK, f"{values} at offset {offset} of {_name(place)}.")


def check_duplicates(facts: Facts) -> Iterator[Fault]:
    for value, places in facts.places_of.items():
        send = facts.by_value.get(value)
        if len(places) > 1 and (send is None or facts.is_idempotent(send)):
            shown = ", ".join(
                f"{topic}-{number}@{offset}" for topic, number, offset in sorted(places)
            )
            yield Fault(DUPLICATE, f"{send or repr(value)} stands at {shown}.")


def check_offsets(facts: Facts) -> Iterator[Fault]:
    for place, offsets in facts.log.items():
        for offset, values in offsets.items():
            if len(values) > 1:
                shown = "; ".join(f"{value!r} {witness}" for value, witness in values.items())
                yield Fault(INCONSISTENT, f"offset {offset} of {_name(place)}: {shown}.")


def check_failed(facts: Facts) -> Iterator[Fault]:
    """A record that a client was told had not been written must not turn up, nor one that no client
    sent."""
    for value, places in facts.places_of.items():
        send = facts.by_value.get(value)
        topic, number, offset = min(places)
        where = f"{topic}-{number}@{offset}"
        if send is None:
            yield Fault(FOREIGN, f"{value!r} was read at {where}.")
        elif send.outcome == "failed":
            yield Fault(FAILED_READ, f"{send} was read at {where}.")
        elif topic != send.topic:
            yield Fault(FOREIGN, f"{send} went to {send.topic} and was read at {where}.")


def _name(place: tuple[str, int]) -> str:
    return f"{place[0]}-{place[1]}"
