"""State of a queue state coordinator: which opening may write, and that the log says all of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayq.core.queues import queue_states
from rayq.core.queues.queue_states import (
    FENCE_BITS,
    OPENING,
    RECORD_BYTES,
    VERSION,
    QueueStates,
    Record,
    StateKey,
    decode,
    encode,
    pack,
    parts_of,
    queue_state_partition,
    unpack,
    unpack_part,
)
from rayq.errors import (
    CorruptBatchError,
    InvalidRequestError,
    QueueFencedError,
    QueueLimitError,
    UnsupportedFormatError,
)

KEY = StateKey("q", 0)


def open_state(kept: QueueStates, epoch: int, opener: str, key: StateKey = KEY) -> int:
    fence, records = kept.open_state(key, data_leader_epoch=epoch, opener=opener)
    take(kept, records)
    return fence


def take(kept: QueueStates, records: list[Record]) -> None:
    for record in records:
        kept.replay(decode(*encode(record)))


def test_the_newest_opening_is_the_one_that_writes() -> None:
    kept = QueueStates()
    first = open_state(kept, 5, "a")
    assert open_state(kept, 5, "a") == first  # Its answer was lost.
    take(kept, kept.write(KEY, first, [(b"k", b"1")]))
    second = open_state(kept, 5, "b")
    third = open_state(kept, 7, "c")
    assert first < second < third
    with pytest.raises(QueueFencedError, match="epoch 7: 6 is over"):
        open_state(kept, 6, "d")
    for fence in (first, second, third + 1):
        with pytest.raises(QueueFencedError, match="another leader"):
            kept.write(KEY, fence, [(b"k", b"2")])
    with pytest.raises(QueueFencedError, match="while this one read"):
        kept.open_state(KEY, data_leader_epoch=7, opener="e", is_first_page=False)
    assert kept.read(KEY, b"") == ([(b"k", b"1")], None)
    with pytest.raises(QueueFencedError):
        kept.write(StateKey("unknown", 0), 1, [])


def test_a_leader_opens_its_state_again_after_an_unclean_election_of_the_keeper() -> None:
    before = QueueStates(coordinator_epoch=3)
    fence, opened = before.open_state(KEY, data_leader_epoch=5, opener="a")
    take(before, opened)
    clean = QueueStates(coordinator_epoch=4, unclean_epoch=2)
    unclean = QueueStates(coordinator_epoch=6, unclean_epoch=6)
    for kept in (clean, unclean):
        take(kept, opened)
    take(clean, clean.write(KEY, fence, [(b"k", b"1")]))
    with pytest.raises(QueueFencedError, match="unclean election"):
        unclean.write(KEY, fence, [(b"k", b"1")])
    with pytest.raises(QueueFencedError, match="while this one read"):
        unclean.open_state(KEY, data_leader_epoch=5, opener="a", is_first_page=False)
    again = open_state(unclean, 5, "a")
    assert fence < unclean.fence_min < again
    take(unclean, unclean.write(KEY, again, [(b"k", b"1")]))


def test_an_opening_names_its_leader_and_its_opener() -> None:
    kept = QueueStates(coordinator_epoch=2)
    fence, records = kept.open_state(KEY, data_leader_epoch=5, opener="a")
    assert fence == (2 << FENCE_BITS) + 1
    opening = msgspec.msgpack.encode([VERSION, 5, fence, "a"])
    assert records == [Record(KEY, OPENING, opening)]
    assert list(kept) == [], "nothing is known before the log has it"
    take(kept, records)
    assert kept.open_state(KEY, data_leader_epoch=5, opener="a") == (fence, [])
    later: dict[str, Any] = {"data_leader_epoch": 5, "opener": "a", "is_first_page": False}
    assert kept.open_state(KEY, **later) == (fence, [])
    for epoch, opener in ((5, "b"), (6, "a"), (6, "b")):
        again, records = kept.open_state(KEY, data_leader_epoch=epoch, opener=opener)
        assert again == fence + 1
        opening = msgspec.msgpack.encode([VERSION, epoch, fence + 1, opener])
        assert records == [Record(KEY, OPENING, opening)]
        with pytest.raises(QueueFencedError, match="while this one read"):
            kept.open_state(KEY, data_leader_epoch=epoch, opener=opener, is_first_page=False)
    for page in (True, False):
        with pytest.raises(QueueFencedError, match="epoch 5: 4 is over"):
            kept.open_state(KEY, data_leader_epoch=4, opener="a", is_first_page=page)
    with pytest.raises(QueueFencedError, match="or the queue was deleted"):
        kept.open_state(StateKey("q", 1), **later)


def test_an_opening_counts_from_the_fence_that_an_unclean_election_sets() -> None:
    void = 6 << FENCE_BITS
    for fence, counts in ((void - 1, False), (void, True), (void + 1, True)):
        kept = QueueStates(coordinator_epoch=6, unclean_epoch=6)
        opening = msgspec.msgpack.encode([VERSION, 5, fence, "a"])
        kept.replay(Record(KEY, OPENING, opening))
        found, records = kept.open_state(KEY, data_leader_epoch=5, opener="a")
        assert (found, records == []) == ((fence, True) if counts else (void + 1, False))
        if counts:
            assert kept.write(KEY, fence, [(b"k", b"v")]) == [Record(KEY, b"k", b"v")]
        else:
            with pytest.raises(QueueFencedError, match="unclean election"):
                kept.write(KEY, fence, [(b"k", b"v")])


def test_a_write_is_what_it_says_and_changes_nothing_by_itself() -> None:
    kept = QueueStates()
    fence = open_state(kept, 1, "a")
    records = [(b"k", b"v"), (b"gone", None), (b"k", b"w")]
    assert kept.write(KEY, fence, records) == [
        Record(KEY, b"k", b"v"), Record(KEY, b"gone", None), Record(KEY, b"k", b"w")
    ]
    assert kept.read(KEY, b"") == ([], None) and kept.held_bytes == 0
    assert kept.write(KEY, fence, []) == []
    for records in ([(OPENING, b"v")], [(b"k", b"v"), (OPENING, None)]):
        with pytest.raises(InvalidRequestError, match="empty key"):
            kept.write(KEY, fence, records)


def test_no_fence_is_drawn_twice_where_an_unclean_election_loses_openings() -> None:
    first = open_state(QueueStates(coordinator_epoch=3), 5, "a")
    lost = QueueStates(coordinator_epoch=4)
    for opener in "bcd":
        again = open_state(lost, 5, opener)
        assert again > first
    assert open_state(QueueStates(coordinator_epoch=6, unclean_epoch=6), 5, "e") > again


def test_a_full_keeper_takes_only_what_makes_it_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_states, "HELD_BYTES_MAX", 1000)
    monkeypatch.setattr(queue_states, "RESERVE_BYTES", 1000)
    kept = QueueStates()
    fence = open_state(kept, 1, "a")
    take(kept, kept.write(KEY, fence, [(b"a", bytes(800)), (b"b", bytes(400))]))
    assert kept.is_full
    with pytest.raises(QueueLimitError):
        kept.write(KEY, fence, [(b"c", bytes(900))])
    assert kept.write(KEY, fence, [(b"c", bytes(900))], gives_out=False), "it is settled by it"
    take(kept, kept.write(KEY, fence, [(b"c", bytes(900)), (b"a", None), (b"b", None)]))
    take(kept, kept.write(KEY, fence, [(b"c", bytes(1))]))
    assert not kept.is_full


def test_what_is_held_counts_keys_and_values_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = QueueStates()
    other = StateKey("r", 7)
    held = {KEY: dict[bytes, bytes](), other: dict[bytes, bytes]()}
    for key in held:
        open_state(kept, 1, "a", key)
    for key, name, value in (
        (KEY, b"k", b"v"),
        (KEY, b"k", b"longer"),
        (other, b"k", b"v"),
        (KEY, b"two", b""),
        (KEY, b"k", None),
        (KEY, b"k", None),
        (KEY, b"never", None),
        (other, b"k", None),
        (KEY, b"k", b"again"),
    ):
        kept.replay(Record(key, name, value))
        if value is None:
            held[key].pop(name, None)
        else:
            held[key][name] = value
        sizes = [len(k) + len(v) + RECORD_BYTES for of in held.values() for k, v in of.items()]
        assert kept.held_bytes == sum(sizes)
        for one, of in held.items():
            assert kept.read(one, b"") == (sorted(of.items()), None)
    assert kept.queue_ids() == {"q", "r"}
    for limit, is_full in ((kept.held_bytes - 1, True), (kept.held_bytes, False)):
        monkeypatch.setattr(queue_states, "HELD_BYTES_MAX", limit)
        assert kept.is_full == is_full


def test_a_full_keeper_takes_writes_up_to_its_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_states, "HELD_BYTES_MAX", 1000)
    monkeypatch.setattr(queue_states, "RESERVE_BYTES", 1000)
    kept = QueueStates()
    fence = open_state(kept, 1, "a")
    fits = 2000 - RECORD_BYTES - 1
    with pytest.raises(QueueLimitError, match=r"holds 0 bytes, and takes 2000"):
        kept.write(KEY, fence, [(b"k", bytes(fits + 1))])
    take(kept, kept.write(KEY, fence, [(b"k", bytes(fits))]))
    assert kept.held_bytes == 2000
    # What is written again counts by how much it grew.
    for records in ([(b"k", bytes(fits + 1))], [(b"k", bytes(fits)), (b"l", b"")]):
        with pytest.raises(QueueLimitError):
            kept.write(KEY, fence, records)
    for records in (
        [(b"k", bytes(fits))],
        [(b"k", bytes(fits - 1))],
        [(b"k", None)],
        [(b"never", None)],
        [(b"l", bytes(fits)), (b"k", None)],
    ):
        assert len(kept.write(KEY, fence, records)) == len(records)
    # Also where it holds more than it should: what is settled is taken.
    with monkeypatch.context() as lower:
        lower.setattr(queue_states, "RESERVE_BYTES", 500)
        assert kept.write(KEY, fence, [(b"k", bytes(fits))])
        assert kept.write(KEY, fence, [(b"k", bytes(fits - 1))])
    # Nor does another queue of this keeper get more.
    other = StateKey("r", 0)
    fence = open_state(kept, 1, "a", other)
    with pytest.raises(QueueLimitError, match="holds 2000"):
        kept.write(other, fence, [(b"k", b"")])
    assert kept.write(other, fence, [(b"k", None)]) == [Record(other, b"k", None)]


def test_a_part_is_known_for_as_long_as_any_record_of_it() -> None:
    """Its records may be compacted in any order."""
    opening = msgspec.msgpack.encode([VERSION, 5, 1, "a"])
    for records, is_known in (
        ([], False),
        ([(OPENING, None)], False),
        ([(b"k", None)], False),
        ([(OPENING, opening)], True),
        ([(b"k", b"v")], True),
        ([(OPENING, opening), (b"k", b"v"), (OPENING, None)], True),
        ([(OPENING, opening), (b"k", b"v"), (b"k", None)], True),
        ([(OPENING, opening), (b"k", b"v"), (OPENING, None), (b"k", None)], False),
        ([(b"k", b"v"), (b"l", b"v"), (b"k", None)], True),
    ):
        kept = QueueStates()
        for key, value in records:
            kept.replay(Record(KEY, key, value))
        assert list(kept) == ([KEY] if is_known else [])
        assert kept.queue_ids() == ({"q"} if is_known else set())
    kept = QueueStates()
    for key, value in ((b"k", b"v"), (OPENING, opening), (b"l", b"w")):
        kept.replay(Record(KEY, key, value))
    assert kept.forget(KEY) == [Record(KEY, key, None) for key in (OPENING, b"k", b"l")]
    kept.replay(Record(KEY, OPENING, None))
    with pytest.raises(QueueFencedError, match="fence None, not 1"):
        kept.write(KEY, 1, [(b"k", b"v")])


def test_a_state_that_is_forgotten_leaves_nothing() -> None:
    kept = QueueStates()
    other = StateKey("q", 1)
    for key in (KEY, other):
        take(kept, kept.write(key, open_state(kept, 1, "a", key), [(b"k", b"v"), (b"l", b"w")]))
    take(kept, kept.forget(KEY))
    assert list(kept) == [other]
    take(kept, kept.forget(other))
    assert (list(kept), kept.held_bytes, kept.forget(KEY)) == ([], 0, [])
    assert open_state(kept, 1, "a") == 1


@settings(max_examples=30)
@given(st.data())
def test_the_compacted_log_says_what_is_held(data: st.DataObject) -> None:
    kept, log = QueueStates(), dict[bytes, bytes | None]()
    keys = [KEY, StateKey("q", 1), StateKey("r", 0)]
    fences: dict[StateKey, int] = {}
    for _ in range(data.draw(st.integers(0, 20))):
        key = data.draw(st.sampled_from(keys))
        match data.draw(st.sampled_from(["open", "write", "write", "forget"])):
            case "open":
                fences[key], records = kept.open_state(key, data_leader_epoch=1, opener="a")
            case "write" if key in fences:
                names, values = st.sampled_from([b"a", b"b", b"c"]), st.binary(max_size=9) | st.none()
                records = kept.write(
                    key, fences[key], data.draw(st.lists(st.tuples(names, values), max_size=4))
                )
            case _:
                fences.pop(key, None)
                records = kept.forget(key)
        take(kept, records)
        log.update(map(encode, records))
    again = QueueStates()
    for one in log.items():
        again.replay(decode(*one))
    assert set(again) == set(kept)
    assert again.held_bytes == kept.held_bytes
    for key in keys:
        assert again.read(key, b"") == kept.read(key, b"")
        assert (key in fences) == (key in set(kept))


def test_pages_hold_all_records_in_the_order_of_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_states, "PAGE_BYTES", 300)
    kept = QueueStates()
    records = [(b"%02d" % number, b"v") for number in range(10)]
    take(kept, kept.write(KEY, open_state(kept, 1, "a"), records[::-1]))
    found, after = list[tuple[bytes, bytes | None]](), b""
    while after is not None:
        page, after = kept.read(KEY, after)
        assert len(page) < 5
        found += page
    assert found == records


@pytest.mark.parametrize(
    ("page_bytes", "expected"),
    [
        # Each record counts 103 bytes. A page goes on up to and with the one that exceeds it.
        (0, [1, 1, 1, 1]),
        (102, [1, 1, 1, 1]),
        (103, [2, 2]),
        (205, [2, 2]),
        (206, [3, 1]),
        (311, [4]),
        (411, [4]),
        (412, [4]),
    ],
)
def test_a_page_ends_behind_the_record_that_exceeds_it(
    monkeypatch: pytest.MonkeyPatch, page_bytes: int, expected: list[int]
) -> None:
    monkeypatch.setattr(queue_states, "PAGE_BYTES", page_bytes)
    kept = QueueStates()
    records = [(b"%d" % number, b"vw") for number in range(4)]
    take(kept, kept.write(KEY, open_state(kept, 1, "a"), records))
    sizes, found, after = list[int](), list[tuple[bytes, bytes | None]](), b""
    while after is not None:
        page, after = kept.read(KEY, after)
        assert after in (None, page[-1][0])
        sizes.append(len(page))
        found += page
    assert (sizes, found) == (expected, records)
    assert kept.read(KEY, b"3") == kept.read(StateKey("q", 1), b"") == ([], None)


def test_what_is_sent_is_read_and_no_other_bytes_are() -> None:
    assert unpack(pack([(b"a", b"1"), (b"b", None)])) == [(b"a", b"1"), (b"b", None)]
    for payload in (b"", b"\xc1", b"\x91\x91\x01"):
        with pytest.raises(InvalidRequestError):
            unpack(payload)
    for key in (None, b"\xc1", b"\x92\xa1q\x00"):
        with pytest.raises(CorruptBatchError):
            decode(key, b"")
    kept = QueueStates()
    with pytest.raises(CorruptBatchError):
        kept.replay(Record(KEY, b"", b"\x01"))
    with pytest.raises(UnsupportedFormatError, match="newer"):
        kept.replay(Record(KEY, b"", b"\x95\x02\x01\x01\xa1a\x01"))


@pytest.mark.parametrize("bytes_max", [1, 20, 40, 100, 5000])
@given(records=st.lists(st.tuples(st.binary(max_size=9), st.none() | st.binary(max_size=60))))
@settings(max_examples=40)
def test_a_write_is_divided_into_parts_of_which_none_is_larger_than_it_may_be(
    bytes_max: int, records: list[queue_states.KeptRecord]
) -> None:
    with pytest.MonkeyPatch.context() as small:
        small.setattr(queue_states, "WRITE_BYTES_MAX", bytes_max)
        parts = parts_of(records)
        found = [unpack_part(memoryview(part)) for part in parts]
    assert [record for part in found for record in part] == records
    for part, its_records in zip(parts, found, strict=True):
        assert len(part) <= bytes_max or len(its_records) == 1 or not records
    assert len(parts) == 1 or min(len(one) for one in found) > 0


def test_queues_are_spread_over_the_keepers() -> None:
    assert {queue_state_partition(f"queue-{number}", 4) for number in range(50)} == {0, 1, 2, 3}
    assert queue_state_partition("q", 1) == 0
    # The name alone says which one, for all rayqs at all times.
    assert [queue_state_partition(name, 50) for name in ("", "q", "queue-1")] == [0, 3, 20]
