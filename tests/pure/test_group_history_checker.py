"""The checker of group histories: a clean history passes, and each fault is found."""

from __future__ import annotations

from rayq.testing.checker import (
    Assigned,
    CommitsSeen,
    CommitsSet,
    Committed,
    Committing,
    Event,
    GroupOpened,
    Killed,
    Polled,
    Released,
    Sending,
    Sent,
    check,
)


def written(count: int) -> list[Event]:
    events: list[Event] = []
    for number in range(count):
        events.append(Sending("p", number + 1, "t", None, f"v{number}"))
        events.append(Sent("p", number + 1, "ok", 0, number))
    return events


def owns(consumer: str, epoch: int = 1) -> Event:
    return Assigned(consumer, "t", 0, "g", epoch)


def polled(consumer: str, *offsets: int) -> Event:
    return Polled(consumer, "t", 0, list(offsets), [f"v{one}" for one in offsets])


def commit(consumer: str, number: int, offset: int) -> list[Event]:
    return [
        Committing(consumer, "g", number, [("t", 0, offset)]),
        Committed(consumer, number, "ok"),
    ]


def released(consumer: str, how: str = "revoked") -> Event:
    return Released(consumer, "t", 0, how)  # type: ignore[arg-type]


def kinds(events: list[Event]) -> set[str]:
    return {fault.kind for fault in check(events).faults}


START: list[Event] = [GroupOpened("g", ["t"]), *written(4), owns("a"), polled("a", 0, 1)]


def test_a_partition_that_is_handed_over_is_clean() -> None:
    events = [*START, *commit("a", 1, 2), released("a"), owns("b", 2)]
    events += [CommitsSeen("b", "g", [("t", 0, 2)]), polled("b", 2, 3), *commit("b", 1, 4)]
    verdict = check([*events, released("b", "closed")])
    assert verdict.is_clean, verdict
    assert verdict.repeated == 0


def test_what_was_polled_after_the_last_commit_comes_again_after_a_kill() -> None:
    events = [*START, *commit("a", 1, 1), Killed("a"), owns("b", 2), polled("b", 1, 2, 3)]
    verdict = check(events)
    assert verdict.is_clean and verdict.repeated == 1


def test_what_was_committed_must_not_come_again() -> None:
    events = [*START, *commit("a", 1, 2), Killed("a"), owns("b", 2), polled("b", 1, 2, 3)]
    assert kinds(events) == {"record polled again though committed"}


def test_two_owners_at_once_are_found_but_not_members_that_were_taken_out() -> None:
    rest = [owns("b", 2), polled("b", 0, 1, 2, 3)]
    assert kinds([*START, *rest]) == {"two owners at once"}
    assert kinds([*START, *rest, released("a")]) == {"two owners at once"}
    assert kinds([*START, *rest, released("a", "lost")]) == set()
    assert kinds([*START, *rest, Killed("a")]) == set()


def test_a_record_that_nobody_polled_is_found() -> None:
    events = [*START, *commit("a", 1, 3), released("a"), owns("b", 2), polled("b", 3)]
    assert "record a group left out" in kinds(events)


def test_what_a_killed_member_had_in_hand_is_not_dealt_with() -> None:
    events = [*START, Killed("a"), owns("b", 2), polled("b", 2, 3)]
    assert kinds(events) == {"record a group left out"}
    events = [*START, polled("a", 2), Killed("a"), owns("b", 2), polled("b", 2, 3)]
    assert kinds(events) == set()


def test_a_commit_that_goes_back_is_found() -> None:
    hand_over = [*START, *commit("a", 1, 2), released("a", "lost"), owns("b", 2)]
    late = [*hand_over, polled("b", 2, 3), *commit("b", 1, 4), *commit("a", 2, 1)]
    assert kinds(late) == {"committed offset went back"}
    seen: list[Event] = [CommitsSeen("b", "g", [("t", 0, None)]), polled("b", 2, 3)]
    assert kinds([*hand_over, *seen]) == {"committed offset went back"}
    rewound = [*hand_over, polled("b", 2, 3), *commit("b", 1, 4), *commit("b", 2, 2)]
    assert kinds(rewound) == set()


def test_a_commit_that_was_under_way_when_another_took_over_did_not_go_back() -> None:
    slow, done = commit("a", 1, 1)
    events = [*START, slow, released("a", "lost"), owns("b", 2), polled("b", 0, 1, 2, 3)]
    assert kinds([*events, *commit("b", 1, 4), done]) == set()


def test_offsets_that_were_set_on_purpose_are_no_fault() -> None:
    events = [polled("reader of all", 0, 1, 2, 3), *START, *commit("a", 1, 2)]
    events += [released("a", "closed"), CommitsSet("g", [("t", 0, 3)])]
    assert kinds([*events, owns("b", 2), polled("b", 3)]) == set()
    events[-1] = CommitsSet("g", [("t", 0, 0)])
    assert kinds([*events, owns("b", 2), polled("b", 0, 1, 2, 3)]) == set()
