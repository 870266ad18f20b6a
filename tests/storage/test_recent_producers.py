"""A truncation brings the producers of a log back without reading all of the log again."""

from __future__ import annotations

from random import Random

import pytest

from rayq.config import TopicConfig
from rayq.storage import recent_producers
from rayq.storage.batch import split_batches
from rayq.storage.log import Log
from rayq.storage.producer_state import ProducerState
from rayq.storage.recent_producers import STATES_MAX, RecentProducers
from tests.storage.support import CountingDisk, Place, append, flush, read_bytes

PRODUCERS = 3


def write(log: Log, batches: int, sequences: dict[int, int], rng: Random | None = None) -> None:
    """Appends batches of one record, by the producers in turn or at random."""
    for number in range(batches):
        producer = number % PRODUCERS if rng is None else rng.randrange(PRODUCERS)
        sequence = sequences.get(producer, 0)
        append(log, producer_id=producer, base_sequence=sequence, size=200)
        sequences[producer] = sequence + 1


def from_the_log(log: Log) -> bytes:
    """The state of its producers, by all of its headers."""
    state = ProducerState()
    for _, header in split_batches(read_bytes(log)):
        state.update(header)
    return state.snapshot()


def test_a_truncation_reads_little_of_what_was_written_since_the_checkpoint(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent_producers, "STEP_BATCHES", 100)
    log, sequences = place.open(), dict[int, int]()
    for _ in range(20):
        write(log, 250, sequences)
        flush(log, high_watermark=log.end_offset - 5)
    assert isinstance(place.disk, CountingDisk)
    before = place.disk.bytes_read
    log.truncate(log.end_offset - 5)
    assert place.disk.bytes_read - before < log.size_bytes / 10
    assert log.producers.snapshot() == from_the_log(log)


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_the_producers_after_a_truncation_are_those_of_the_log(
    place: Place, monkeypatch: pytest.MonkeyPatch, step: int, seed: int
) -> None:
    monkeypatch.setattr(recent_producers, "STEP_BATCHES", step)
    place.config = TopicConfig(segment_bytes=4096)
    rng, log, high_watermark = Random(seed), place.open(), 0
    for _ in range(120):
        match rng.choice(("write", "write", "flush", "checkpoint", "cut", "reopen", "restart")):
            case "write":
                known = {
                    one: batches[-1].last_sequence + 1
                    for one, producer in log.producers._producers.items()
                    if (batches := producer.batches)
                }
                write(log, rng.randrange(1, 30), known, rng)
            case "flush" | "checkpoint" as what:
                high_watermark = max(high_watermark, rng.randint(log.start_offset, log.end_offset))
                flush(log, checkpoint=what == "checkpoint", high_watermark=high_watermark)
            case "cut":  # After an unclean election also below the high watermark.
                floor = high_watermark if rng.random() < 0.8 else log.start_offset
                log.truncate(rng.randint(floor, log.end_offset))
                high_watermark = min(high_watermark, log.end_offset)
            case "reopen":
                log.close(high_watermark)
                log = place.open()
            case "restart" if rng.random() < 0.3:
                log.reset(log.end_offset, [(0, 0)], b"")
                high_watermark = log.end_offset
        assert log.producers.snapshot() == from_the_log(log)


def test_few_states_are_kept_and_always_one_at_the_high_watermark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recent_producers, "STEP_BATCHES", 10)
    recent, producers = RecentProducers(), ProducerState()
    recent.begin(0, producers)
    for offset in range(1, 1001):
        recent.appended(offset, producers)
        recent.forget_below(25)
    assert len(recent._states) == STATES_MAX
    assert [one.offset for one in recent._states[:2]] == [20, 940]
    recent.forget_below(955)
    assert recent._states[0].offset == 950
    newest = recent.cut(987)
    assert newest is not None and newest.offset == 980
    assert recent.cut(949) is None


def test_a_state_costs_little_per_batch_however_many_producers_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recent_producers, "STEP_BATCHES", 1)

    class Many(ProducerState):
        taken = 0

        def __len__(self) -> int:
            return 50

        def snapshot(self, high_watermark: int = 0) -> bytes:
            self.taken += 1
            return b""

    recent, producers = RecentProducers(), Many()
    for offset in range(1000):
        recent.appended(offset, producers)
    assert producers.taken == 20


def test_a_log_that_was_opened_after_a_crash_is_cut_without_being_read_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent_producers, "STEP_BATCHES", 100)
    log, sequences = place.open(), dict[int, int]()
    write(log, 5_000, sequences)
    flush(log)
    again = place.open()
    assert isinstance(place.disk, CountingDisk)
    before = place.disk.bytes_read
    again.truncate(again.end_offset - 5)
    assert place.disk.bytes_read - before < again.size_bytes / 10
    assert again.producers.snapshot() == from_the_log(again)
