"""Producer state for a log that begins at an offset: nothing of batches that may yet be cut off."""

from __future__ import annotations

from rayq.storage.batch import encode_batch, read_header, stamp
from rayq.storage.producer_state import DuplicateBatch, ProducerState


def appended(state: ProducerState, sequence: int, offset: int) -> None:
    batch = encode_batch([b"v"] * 5, timestamps_ms=1, producer_id=7, base_sequence=sequence)
    state.update(stamp(batch, 0, base_offset=offset, leader_epoch=1, append_time_ms=1))


def produced(sequence: int) -> bytes:
    return bytes(encode_batch([b"v"] * 5, timestamps_ms=1, producer_id=7, base_sequence=sequence))


def test_a_batch_above_the_offset_is_not_known_and_one_below_still_is() -> None:
    # A follower that restarted at its leader's log start once got the producer state of the
    # leader's end: as leader it then took a batch for a duplicate that no replica had.
    state = ProducerState()
    for number in range(4):
        appended(state, 5 * number, 10 + 5 * number)
    state.forget_from(20)
    known = ProducerState()
    known.load(state.snapshot())
    duplicate = known.check(read_header(produced(5)))
    assert duplicate == DuplicateBatch(15, 19, 1)
    assert known.check(read_header(produced(10))) is None


def test_the_batch_that_ends_at_the_offset_is_not_known_either() -> None:
    state = ProducerState()
    appended(state, 0, 11)
    appended(state, 5, 16)
    state.forget_from(20)
    assert state.check(read_header(produced(0))) == DuplicateBatch(11, 15, 1)
    assert state.check(read_header(produced(5))) is None


def test_a_producer_with_nothing_below_the_offset_is_forgotten() -> None:
    state = ProducerState()
    appended(state, 0, 30)
    state.forget_from(20)
    assert len(state) == 0
