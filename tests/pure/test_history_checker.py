"""The checker: a clean history passes, and each fault is found in a history that has only it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from rayq.errors import DeliveryTimeoutError, OutcomeUnknownError
from rayq.records import Record, RecordMetadata
from rayq.testing.checker import (
    Assigned,
    Event,
    Polled,
    ProducerOpened,
    Recorder,
    Sending,
    Sent,
    check,
    read_history,
)
from rayq.testing.checker.__main__ import main


def sending(number: int, value: str, key: str | None = None, producer: str = "p") -> Sending:
    return Sending(producer, number, "t", key, value)


def ok(number: int, offset: int, producer: str = "p") -> Sent:
    return Sent(producer, number, "ok", 0, offset)


def polled(offsets: list[int], values: list[str], consumer: str = "c") -> Polled:
    return Polled(consumer, "t", 0, offsets, values)


def kinds(events: list[Event]) -> set[str]:
    return {fault.kind for fault in check(events).faults}


CLEAN: list[Event] = [
    ProducerOpened("p", "all", True),
    sending(1, "a", "k"),
    sending(2, "b", "k"),
    ok(1, 0),
    ok(2, 1),
    Assigned("c", "t", 0),
    polled([0], ["a"]),
    polled([1], ["b"]),
]


def test_a_clean_history_passes() -> None:
    verdict = check(CLEAN)
    assert verdict.is_clean
    assert (verdict.sent, verdict.acknowledged, verdict.polled) == (2, 2, 2)
    assert str(verdict).endswith("clean")


def test_a_record_of_unknown_outcome_may_be_there_or_not() -> None:
    unknown: list[Event] = [sending(3, "c", "k"), Sent("p", 3, "unknown")]
    assert kinds([*CLEAN, *unknown]) == set()
    assert kinds([*CLEAN, *unknown, polled([2], ["c"])]) == set()


def test_an_acknowledged_record_that_readers_passed_over_is_lost() -> None:
    events: list[Event] = [
        *CLEAN[:6],
        sending(3, "c"),
        ok(3, 2),
        polled([0], ["a"]),
        Assigned("c", "t", 0),
        polled([2], ["c"]),
    ]
    assert kinds(events) == {"lost write"}


def test_an_acknowledged_record_that_nobody_reached_is_unseen() -> None:
    assert kinds(CLEAN[:-1]) == {"unseen record"}


def test_an_acknowledged_record_that_is_gone_in_the_end_is_lost_whoever_had_read_it() -> None:
    final = Assigned("final", "t", 0, reads_all=True)
    assert kinds([*CLEAN, final, polled([0, 1], ["a", "b"], "final")]) == set()
    for found in ([], [polled([0], ["a"], "final")], [polled([1], ["b"], "final")]):
        assert kinds([*CLEAN, final, *found]) == {"lost write", "record was read and is gone"}


def test_a_record_that_anybody_read_is_there_in_the_end_whatever_its_producer_was_told() -> None:
    unknown: list[Event] = [*CLEAN, sending(3, "c"), Sent("p", 3, "unknown"), polled([2], ["c"])]
    final: list[Event] = [
        Assigned("final", "t", 0, reads_all=True),
        polled([0, 1], ["a", "b"], "final"),
    ]
    assert kinds([*unknown, *final]) == {"record was read and is gone"}
    assert kinds([*unknown, *final, polled([2], ["c"], "final")]) == set()


def test_what_is_read_after_the_reader_of_everything_began_may_be_beyond_its_end() -> None:
    late: list[Event] = [*CLEAN, sending(3, "c"), Sent("p", 3, "unknown")]
    late += [Assigned("final", "t", 0, reads_all=True), polled([2], ["c"])]
    assert kinds([*late, polled([0, 1], ["a", "b"], "final")]) == set()


def test_a_record_under_acks_1_may_be_lost() -> None:
    events: list[Event] = [ProducerOpened("p", "1", False), *CLEAN[1:-1]]
    assert kinds(events) == set()


def test_a_record_that_stands_twice_is_a_duplicate() -> None:
    assert kinds([*CLEAN, polled([2], ["a"])]) >= {"duplicate"}


def test_two_values_at_one_offset_are_inconsistent() -> None:
    events: list[Event] = [
        *CLEAN,
        sending(3, "c"),
        Assigned("d", "t", 0),
        polled([1], ["c"], "d"),
    ]
    assert "inconsistent offset" in kinds(events)


def test_an_acknowledgement_that_readers_contradict_is_inconsistent() -> None:
    events: list[Event] = [sending(1, "a"), sending(2, "b"), ok(1, 0), polled([0], ["b"])]
    assert "inconsistent offset" in kinds(events)


def test_a_failed_write_must_not_be_read() -> None:
    events: list[Event] = [*CLEAN, sending(3, "c"), Sent("p", 3, "failed"), polled([2], ["c"])]
    assert kinds(events) == {"failed write was read"}


def test_a_record_nobody_sent_must_not_be_read() -> None:
    assert kinds([*CLEAN, polled([2], ["x"])]) == {"record nobody sent"}


def test_a_poll_must_not_skip_a_record() -> None:
    events: list[Event] = [
        *CLEAN,
        sending(3, "c"),
        ok(3, 2),
        polled([2], ["c"]),
        Assigned("d", "t", 0),
        polled([0], ["a"], "d"),
        polled([2], ["c"], "d"),
    ]
    assert kinds(events) == {"poll skip"}


def test_polls_must_not_go_back_within_an_assignment() -> None:
    assert kinds([*CLEAN, polled([0], ["a"])]) == {"non-monotonic poll"}
    assert kinds([*CLEAN, Assigned("c", "t", 0), polled([0, 1], ["a", "b"])]) == set()


def test_acknowledged_offsets_rise_with_the_sends() -> None:
    events: list[Event] = [
        sending(1, "a"),
        sending(2, "b"),
        ok(1, 1),
        ok(2, 0),
        polled([0, 1], ["b", "a"]),
    ]
    assert kinds(events) == {"non-monotonic send"}


def test_records_of_one_key_stand_in_the_order_of_their_sends() -> None:
    events: list[Event] = [
        sending(1, "a", "k"),
        sending(2, "b", "k"),
        Sent("p", 1, "unknown"),
        ok(2, 0),
        polled([0, 1], ["b", "a"]),
    ]
    assert kinds(events) == {"order per key"}


def test_a_value_sent_twice_is_no_history() -> None:
    with pytest.raises(ValueError, match="sent twice"):
        check([sending(1, "a"), sending(2, "a")])


def test_the_recorder_writes_what_the_checker_reads() -> None:
    file = io.BytesIO()
    recorder = Recorder(file)
    recorder.opened("p")
    numbers = [recorder.sending("p", "t", None, value) for value in (b"a", b"b", b"\xff")]
    recorder.delivered("p", numbers[0], RecordMetadata("t", 0, 0, 1))
    recorder.not_delivered("p", numbers[1], OutcomeUnknownError("who knows"))
    recorder.not_delivered("p", numbers[2], DeliveryTimeoutError("never sent"))
    recorder.assigned("c", "t", 0)
    recorder.polled("c", [Record("t", 0, 0, 1, None, b"a", [])])
    recorder.assigned("final", "t", 0, reads_all=True)
    recorder.polled("final", [Record("t", 0, 0, 1, None, b"a", [])])
    verdict = check(read_history(file.getvalue().splitlines(keepends=True)))
    assert verdict.is_clean
    assert (verdict.acknowledged, verdict.failed, verdict.unknown) == (1, 1, 1)


def test_a_history_whose_last_line_was_cut_off_is_one_all_the_same() -> None:
    lines = [b'{"event":"assigned","consumer":"c","topic":"t","partition":0}\n', b'{"event":"as']
    assert len(list(read_history(lines))) == 1
    with pytest.raises(ValueError, match="line 1"):
        list(read_history([b"{}\n"]))


def test_the_command_judges_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "history.jsonl"
    with path.open("wb") as file:
        recorder = Recorder(file)
        number = recorder.sending("p", "t", b"k", b"a")
        recorder.delivered("p", number, RecordMetadata("t", 0, 0, 1))
    assert main([str(path)]) == 1
    assert "unseen record: 1" in capsys.readouterr().out
    with path.open("ab") as file:
        Recorder(file).polled("c", [Record("t", 0, 0, 1, b"k", b"a", [])])
    assert main([str(path)]) == 0
    assert main([str(tmp_path / "none")]) == 2
