"""Names, data objects and manifests: what is written is what is read, and damage is noticed."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

import google_crc32c
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayq.client.environment import system_environment
from rayq.errors import CorruptBatchError, RemoteDamagedError
from rayq.messages.remote_names import (
    NUMBER_MAX,
    ObjectKind,
    RemoteName,
    is_listed,
    is_owner_mark_of,
    new_name,
    owner_mark,
    owners_prefix,
    parse_folder,
    parse_name,
    parse_owner_mark,
    partition_prefix,
    probes_prefix,
    topic_prefix,
)
from rayq.storage import checked_file
from rayq.storage.batch import encode_batch, stamp
from rayq.storage.remote import data_object, manifest
from rayq.storage.remote.data_object import (
    TRAILER_BYTES,
    DataObject,
    Footer,
    describe_batches,
    footer_bytes,
    read_footer,
)
from rayq.storage.remote.manifest import (
    Manifest,
    RemoteObject,
    decode_manifest,
    page_names,
)

CLUSTER, TOPIC = "c" * 32, "d" * 32
PREFIX = partition_prefix(CLUSTER, TOPIC, 3)


# --- names ----------------------------------------------------------------------------------------


def test_a_name_is_parsed_into_what_it_was_made_of() -> None:
    name = new_name(system_environment().random, PREFIX, ObjectKind.MANIFEST, 12, 7)
    parsed = parse_name(name)
    assert parsed is not None
    assert str(parsed) == name
    assert (parsed.prefix, parsed.number, parsed.leader_epoch) == (PREFIX, 12, 7)
    assert (parsed.kind, parsed.topic_id, parsed.partition) == (ObjectKind.MANIFEST, TOPIC, 3)


def test_names_are_listed_by_their_numbers() -> None:
    numbers = [0, 9, 10, 99, 2**62]
    names = [str(RemoteName(PREFIX, ObjectKind.DATA, number, 1, 0)) for number in numbers]
    assert names == sorted(names)


@pytest.mark.parametrize("name", ["", "x", f"{CLUSTER}/owners/1-x", f"{PREFIX}data/1-2-3"])
def test_what_no_leader_wrote_is_no_name_of_an_object(name: str) -> None:
    assert parse_name(name) is None


@given(st.text(max_size=150) | st.from_regex(r"[0-9a-f]{32}/([0-9a-f]{32}|owners)/[0-9]+/data/.*"))
@settings(max_examples=200, deadline=None)
def test_a_name_has_one_spelling(text: str) -> None:
    """What parses is what its parts make, so that two spellings never name one folder."""
    name = parse_name(text)
    assert name is None or str(name) == text
    where = parse_folder(text)
    assert where is None or text == (
        topic_prefix(*where[:2]) if where.partition is None else partition_prefix(*where)
    )


def test_folders_are_those_of_topics_and_partitions_and_lists_go_no_higher() -> None:
    topic = topic_prefix(CLUSTER, TOPIC)
    assert parse_folder(topic) == (CLUSTER, TOPIC, None) and parse_folder(PREFIX)[2] == 3  # type: ignore[index]
    for listed in (topic, PREFIX, f"{PREFIX}data/", owners_prefix(CLUSTER), probes_prefix(CLUSTER, 7)):
        assert is_listed(listed)
    for wrong in ("", "/", f"{CLUSTER}/", f"{CLUSTER}", topic[:-1], f"{PREFIX}x/", f"{topic}03/",
                  f"{CLUSTER}/../{TOPIC}/", f"{topic}\n", f"{CLUSTER}/owners"):
        assert not is_listed(wrong) and parse_folder(wrong) is None
    assert parse_folder(owners_prefix(CLUSTER)) is None


def test_a_mark_is_one_of_its_own_cluster_and_what_is_none_counts_as_the_latest() -> None:
    mark = owner_mark(CLUSTER, 7, "m")
    assert is_owner_mark_of(CLUSTER, mark) and parse_owner_mark(mark) == (7, "m")
    for wrong in (owner_mark(TOPIC, 7, "m"), f"{mark}/x", f"{CLUSTER}/owners/7-m", f"{mark}\0"):
        assert not is_owner_mark_of(CLUSTER, wrong)
    for strange in ("x", "\N{ARABIC-INDIC DIGIT FOUR}-m", "9" * 5000 + "-m", ""):
        assert parse_owner_mark(f"{owners_prefix(CLUSTER)}{strange}")[0] == NUMBER_MAX


# --- data objects ---------------------------------------------------------------------------------


def batches(
    sizes: Sequence[int], *, start: int = 0, epochs: Sequence[int] | None = None
) -> tuple[bytes, list[tuple[int, int]]]:
    """Batches of one record with these sizes, and the offset and position of each. The record at
    offset n has timestamp 1000 + n."""
    data, places = bytearray(), []
    for number, size in enumerate(sizes):
        offset = start + number
        batch = encode_batch([b"v" * size], timestamps_ms=1000 + offset, compression="none")
        epoch = 1 if epochs is None else epochs[number]
        stamp(batch, 0, base_offset=offset, leader_epoch=epoch, append_time_ms=5000 + offset)
        places.append((offset, len(data)))
        data += batch
    return bytes(data), places


def describe(data: bytes, start: int, end: int) -> DataObject:
    return describe_batches(
        data, topic_id=TOPIC, partition=3, start=start, end=end, aborted=[(4, 2)]
    )


@given(
    st.lists(st.integers(0, 700), min_size=1, max_size=60),
    st.integers(0, 1000),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_any_range_of_an_object_is_found_and_checked_by_its_footer(
    sizes: list[int], start: int, draw: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_object, "PLACE_BYTES", 1000)
        patch.setattr(data_object, "CRC_BYTES", 700)
        data, places = batches(sizes, start=start)
        end = start + len(sizes)
        made = describe(data, start, end)
        stored = data + made.tail
        assert made.object_bytes == len(stored)
        assert made.crc32c == google_crc32c.value(stored)
        footer = read_footer(stored[len(data) :], "it")
        assert footer == made.footer
        assert footer_bytes(stored[-TRAILER_BYTES:], "it") == len(made.tail)

        one = draw.draw(st.integers(start, end - 1))
        other = draw.draw(st.integers(one + 1, end + 5))
        span = footer.span(one, other)
        assert (span.start, span.position) in places
        assert span.start <= one
        assert min(other, end) <= span.end <= end
        assert (span.end, span.position + span.length) in [*places, (end, len(data))]
        limited = footer.span(one, other, bytes_max=1500)
        assert limited.start == span.start < limited.end <= span.end
        assert limited.length <= max(1500, 1000 + 700 + 100)

        parts = footer.crc_parts(span.position, span.length)
        assert parts[0][0] <= span.position
        assert parts[-1][0] + parts[-1][1] >= span.position + span.length
        for position, length, crc in parts:
            assert google_crc32c.value(data[position : position + length]) == crc


def test_a_time_is_looked_up_at_the_places() -> None:
    data, _ = batches([data_object.PLACE_BYTES] * 4)
    footer = describe(data, 0, 4).footer
    assert [place.offset for place in footer.places] == [0, 1, 2, 3]
    found = footer.place_of_time(1002)
    assert found is not None
    assert found.offset == 2
    assert footer.place_of_time(1004) is None
    assert (footer.first_append_ms, footer.last_append_ms) == (5000, 5003)
    assert footer.newest_timestamp_ms == 1003


def test_a_footer_has_the_start_of_each_epoch() -> None:
    data, _ = batches([9] * 5, start=10, epochs=[2, 2, 5, 5, 6])
    footer = describe(data, 10, 15).footer
    assert footer.epochs == [(2, 10), (5, 12), (6, 14)]
    assert footer.end_epoch == 6


@pytest.mark.parametrize(
    ("what", "damage"),
    [
        ("a flipped bit", lambda data: data[:-3] + bytes([data[-3] ^ 4]) + data[-2:]),
        ("half a batch", lambda data: data[:-3]),
        ("no batch", lambda data: b""),
        ("a hole", lambda data: data[: len(data) // 5 * 2] + data[len(data) // 5 * 3 :]),
    ],
)
def test_batches_that_are_not_the_range_make_no_object(what: str, damage: object) -> None:
    data, _ = batches([9] * 5)
    assert callable(damage)
    with pytest.raises(CorruptBatchError):
        describe(damage(data), 0, 5)


def test_batches_of_other_offsets_or_of_epochs_that_go_back_make_no_object() -> None:
    data, _ = batches([9] * 5)
    with pytest.raises(CorruptBatchError, match="offset"):
        describe(data, 1, 6)
    with pytest.raises(CorruptBatchError, match="not up to 6"):
        describe(data, 0, 6)
    data, _ = batches([9] * 3, epochs=[4, 5, 4])
    with pytest.raises(CorruptBatchError, match="epoch"):
        describe(data, 0, 3)


def test_a_damaged_footer_is_noticed_wherever_it_is_damaged() -> None:
    data, _ = batches([9] * 5)
    tail = describe(data, 0, 5).tail
    for place in range(len(tail)):
        damaged = bytearray(tail)
        damaged[place] ^= 1
        with pytest.raises(RemoteDamagedError):
            read_footer(bytes(damaged), "it")
    for length in range(len(tail)):
        with pytest.raises(RemoteDamagedError):
            read_footer(tail[len(tail) - length :], "it")


# --- manifests ------------------------------------------------------------------------------------


def remote_object(start: int, end: int, epoch: int = 1, random: int = 0) -> RemoteObject:
    name = str(RemoteName(PREFIX, ObjectKind.DATA, start, epoch, random))
    return RemoteObject(start, end, name, 120, 100, 7, 5000 + start, 5000 + end, start, epoch)


def empty_manifest() -> Manifest:
    return Manifest(
        prefix=PREFIX,
        cluster_id=CLUSTER,
        topic="t",
        topic_id=TOPIC,
        partition=3,
        partitions=4,
        config={"retention_ms": None, "remote_storage": True},
        replication_factor=3,
    )


def name_of(one: Manifest) -> str:
    return str(RemoteName(one.prefix, ObjectKind.MANIFEST, one.version, one.leader_epoch, 5))


class Stored:
    """The store of manifests that a test keeps."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self._made = 0

    def kept(self, one: Manifest) -> Manifest:
        """The manifest as it is read again."""
        paged, pages = one.paged(self._name)
        self.pages.update(pages)
        root, name = paged.encode(), name_of(paged)
        pages_read = {page: self.pages[page] for page in page_names(root, name)}
        read = decode_manifest(root, pages_read, name)
        assert read == paged
        return read

    def _name(self, start: int) -> str:
        self._made += 1
        return str(RemoteName(PREFIX, ObjectKind.PAGE, start, 1, self._made))


@pytest.mark.parametrize("seed", range(5))
def test_a_manifest_lists_what_a_plain_list_would(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "PAGE_OBJECTS", 3)
    monkeypatch.setattr(manifest, "ROOT_OBJECTS_MAX", 5)
    rng = random.Random(seed)
    stored, one = Stored(), empty_manifest()
    listed: list[RemoteObject] = []
    removed: set[str] = set()
    log_start = 0
    for step in range(70):
        match rng.choice(["append", "append", "append", "trim", "replace", "forget"]):
            case "append":
                start = max(one.end, log_start)
                for _ in range(rng.randint(1, 3)):
                    listed.append(remote_object(start, start := start + rng.randint(1, 9)))
                    one = one.appended(listed[-1])
            case "trim":
                log_start = max(log_start, rng.randint(one.start, one.end + 3))
                one = one.without_below(log_start, now_ms=step)
                removed |= {old.name for old in listed if old.end <= log_start}
                listed = [old for old in listed if old.end > log_start]
            case "replace" if listed:
                number = rng.randrange(len(listed))
                removed.add(listed[number].name)
                listed[number] = remote_object(*listed[number][:2], epoch=2, random=step)
                one = one.replaced(listed[number], now_ms=step)
            case "forget":
                gone = [name for name, at_ms in one.removed if at_ms < step - 20]
                one = one.without_removed(gone)
                removed -= set(gone)
        one = stored.kept(msgspec.structs.replace(one, version=step))
        assert list(one.objects) == listed
        assert one.data_bytes == sum(old.data_bytes for old in listed)
        assert one.log_start == log_start
        assert one.start == (listed[0].start if listed else one.end)
        data = {name for name, _ in one.removed if "/data/" in name}
        assert data == removed
        pages = {name for name in stored.pages if name not in one.names()}
        assert pages.isdisjoint(page.name for page in one.pages)
        place = rng.randint(0, one.end + 5)
        holds = [old for old in listed if old.start <= place < old.end]
        assert one.find(place) == (holds[0] if holds else None)
        until = place + rng.randint(0, 30)
        assert one.between(place, until) == [
            old for old in listed if old.start < until and old.end > place and place < until
        ]


def test_a_manifest_that_lost_all_its_objects_goes_on_at_its_end_or_later() -> None:
    one = empty_manifest().appended(remote_object(0, 10)).without_below(25, now_ms=1)
    assert (one.start, one.end, one.log_start, len(one.objects)) == (10, 10, 25, 0)
    one = Stored().kept(one).appended(remote_object(25, 30))
    assert (one.start, one.end) == (25, 30)
    assert one.pointer("m").end_epoch == 1


def test_epochs_below_the_log_start_go_with_the_records() -> None:
    one = msgspec.structs.replace(
        empty_manifest().appended(remote_object(0, 10)), epochs=[(1, 0), (2, 4), (5, 8)]
    )
    assert one.without_below(4, 0).epochs == [(2, 4), (5, 8)]
    assert one.without_below(7, 0).epochs == [(2, 4), (5, 8)]
    assert one.without_below(10, 0).epochs == [(5, 8)]


def test_a_damaged_manifest_or_page_is_noticed() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "PAGE_OBJECTS", 2)
        patch.setattr(manifest, "ROOT_OBJECTS_MAX", 2)
        one = empty_manifest().appended(*(remote_object(at, at + 1) for at in range(5)))
        stored = Stored()
        one, pages = one.paged(lambda start: stored._name(start))
    root, name = one.encode(), name_of(one)
    assert len(pages) == 2
    for place in range(0, len(root), 7):
        damaged = bytearray(root)
        damaged[place] ^= 1
        with pytest.raises(RemoteDamagedError):
            decode_manifest(bytes(damaged), dict(pages), name)
    (first, content), (second, _) = pages
    with pytest.raises(RemoteDamagedError):
        decode_manifest(root, {first: content, second: content}, name)
    with pytest.raises(RemoteDamagedError):
        decode_manifest(root, {first: content[:-1], second: content}, name)


def changed_root(one: Manifest, **changes: object) -> bytes:
    """The manifest as an object that says something else, with a CRC that is right."""
    content = checked_file.decode("remote-manifest", 1, one.encode(), "it")
    said = {**msgspec.msgpack.decode(content), **changes}
    return checked_file.encode("remote-manifest", 1, msgspec.msgpack.encode(said))


DEEP = msgspec.Raw(b"\x91" * 5000 + b"\x01")
OTHER = partition_prefix(CLUSTER, TOPIC, 4)
ROW = struct.Struct("<QQIQIIIqqqI")


@pytest.mark.parametrize(
    "changes",
    [
        {"prefix": OTHER}, {"prefix": ""}, {"prefix": f"{CLUSTER}/"}, {"prefix": "../"},
        {"prefix": PREFIX[:-1]}, {"version": 4}, {"leader_epoch": 8},
        {"topic": ""}, {"topic": "a/b"}, {"topic": "t\n"}, {"topic": "\x1b[2J"}, {"topic": "x" * 250},
        {"partition": -1}, {"partitions": 0}, {"partitions": 2**62}, {"replication_factor": 2**31},
        {"end": 2**62}, {"end": 2**64 - 1}, {"end_epoch": 2**32}, {"end_epoch": -1}, {"start": -1},
        {"log_start": 2**63}, {"data_bytes": -1}, {"data_bytes": 99}, {"written_ms": 2**63},
        {"epochs": [(2**32, 0)]}, {"epochs": [(1, -1)]}, {"epochs": [(2, 0), (1, 5)]},
        {"epochs": [(1, 5), (2, 0)]}, {"epochs": [(1, 0), (1, 5)]}, {"epochs": [(1, 0), (2**32 - 1, 5)]},
        {"pages": [(str(RemoteName(OTHER, ObjectKind.PAGE, 0, 1, 1)), 0, 5)]},
        {"pages": [(str(RemoteName(PREFIX, ObjectKind.DATA, 0, 1, 1)), 0, 5)]},
        {"pages": [("x", 0, 5)]},
        {"pages": [(str(RemoteName(PREFIX, ObjectKind.PAGE, 0, 1, 1)), 5, 0)]},
        {"removed": b"x" + bytes(28)}, {"removed": b"d" + b"\xff" * 28}, {"removed": b"d"},
        {"rows": ROW.pack(0, 10, 1, 0, 99, 100, 7, 0, 0, 0, 1)},
        {"rows": ROW.pack(0, 2**64 - 1, 1, 0, 120, 100, 7, 0, 0, 0, 1)},
        {"rows": ROW.pack(5, 5, 1, 0, 120, 100, 7, 0, 0, 0, 1)},
        {"config": 1}, {"config": {"x": DEEP}}, {"topic_id": 3},
    ],
)
def test_a_manifest_says_only_what_a_leader_may_have_written(changes: dict[str, object]) -> None:
    """Somebody else may write into the bucket: what it says names objects, sizes memory, and is
    computed with."""
    one = msgspec.structs.replace(
        empty_manifest().appended(remote_object(0, 10)), version=3, leader_epoch=7, epochs=[(1, 0)]
    )
    name = name_of(one)
    decode_manifest(changed_root(one), {}, name)
    root = changed_root(one, **changes)
    with pytest.raises(RemoteDamagedError):
        decode_manifest(root, dict.fromkeys(["x"], b""), name)
    with pytest.raises(RemoteDamagedError):
        decode_manifest(one.encode(), {}, name.replace("manifest", "data"))


def test_a_long_list_rewrites_a_short_one() -> None:
    one = empty_manifest().appended(*(remote_object(at, at + 1) for at in range(10_000)))
    read = Stored().kept(one)
    assert len(read.objects) == 10_000
    assert read.find(7_777) == remote_object(7_777, 7_778)
    assert len(read.encode()) < 200_000


def test_footers_of_another_version_are_refused() -> None:
    data, _ = batches([9])
    tail = describe(data, 0, 1).tail
    with pytest.raises(RemoteDamagedError, match="version"):
        read_footer(tail[:-1] + b"2", "it")
    assert isinstance(read_footer(tail, "it"), Footer)
