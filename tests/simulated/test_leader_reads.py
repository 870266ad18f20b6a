"""A leader alone: what it answers to readers from its disk and from the object store, and when."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from rayq import messages
from rayq.actors.handlers import NO_PAYLOAD
from rayq.actors.replica import leader_reads
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.errors import (
    NotLeaderError,
    OffsetNotAvailableError,
    OffsetOutOfRangeError,
    RayqError,
    RemoteMissingError,
)
from rayq.storage.batch import split_batches
from rayq.wire.answer_room import AnswerRoom
from rayq.wire.peer import Peer
from tests.simulated.leader_stage import BATCH_BYTES, END, LEADER_EPOCH, Led, leading
from tests.storage.support import NOW_MS, append

AT_ONCE_S = 0.05
START, LOCAL_START = 12, 15
QUESTION = {"ranges_max": 3, "bytes_max": None}
SECRET_URL = "https://store/name?signature=secret"
READER = Peer("client", None, "10.0.0.1", asyncio.Future(loop=Mock()), AnswerRoom(lambda: True))


async def shortened(log: ReplicaLog, high_watermark: int = END) -> None:
    """Its records from 12 up to 15 are only in the object store."""
    log.advance_high_watermark(high_watermark)
    await log.learn(0, 20, 5)
    await log.advance_log_start(START)
    await log.drop_local(LOCAL_START)


class PlayedReads:
    """What is in the object store: each object has one record of as many bytes as its offset."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.meanwhile: Callable[[], Awaitable[None]] | None = None
        self.time: tuple[int, int] | None = None

    async def _ask(self, *question: Any) -> None:
        self.asked.append(question)
        if self.meanwhile is not None:
            await self.meanwhile()

    async def bring(self, offset: int, bytes_max: int) -> Any:
        await self._ask("bring", offset, bytes_max)
        return SimpleNamespace(
            offset=offset, span=SimpleNamespace(length=100), aborted=[(offset, 1)]
        )

    async def read(self, cached: Any, offset: int, bytes_max: int) -> tuple[bytes, int]:
        assert cached.offset == offset
        await self._ask("read", offset, bytes_max)
        return b"x" * offset, offset + 1

    async def drop_cached(self, offset: int) -> None:
        await self._ask("drop", offset)

    async def offset_for_time(self, timestamp_ms: int) -> tuple[int, int] | None:
        await self._ask("time", timestamp_ms)
        return self.time

    async def append_time_ms(self, offset: int) -> int:
        await self._ask("append time", offset)
        return 7_000

    async def ranges(self, start: int, end: int, **options: Any) -> list[messages.RemoteRange]:
        await self._ask("ranges", start, end, options)
        return [messages.RemoteRange("name", start, end, 5, 6, None)]

    async def signed(
        self, ranges: list[messages.RemoteRange], valid_ms: int
    ) -> list[messages.RemoteRange]:
        await self._ask("sign", len(ranges), valid_ms)
        return [msgspec.structs.replace(found, url=SECRET_URL) for found in ranges]


def stored(led: Led) -> PlayedReads:
    """The topic has an object store from now on."""
    played = PlayedReads()
    led.leader.remote = Mock(**{"reads": played, "log.end_offset": None})
    return played


def offsets(data: bytes) -> list[int]:
    return [header.base_offset for _, header in split_batches(data)]


def counted(led: Led) -> dict[str, float]:
    """What the leader has counted of its readers."""
    return {
        sample.name: sample.value
        for sample in led.log.environment.metrics.collect()
        if sample.name in ("rayq_records_out_total", "rayq_bytes_out_total")
    }


# --- from the disk --------------------------------------------------------------------------------


def test_a_reader_gets_the_records_from_its_offset_on_and_all_that_it_must_know() -> None:
    async def work(led: Led) -> None:
        await led.fetched(2, 28, 6)
        await led.fetched(3, END, 6)
        answer, data = await led.reading(20, 4)
        assert answer == messages.FetchResponse(
            high_watermark=END, log_start_offset=START, cleaned_offset=20, next_offset=END,
            last_stable_offset=END, aborted=[],
        )
        assert offsets(data) == [*range(20, END)]
        assert await led.reading(END, 6) == (answer, b"")

    leading(work, before=shortened)


def test_a_reader_gets_committed_records_only() -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        led.produce(0, acks=1)
        answer, data = await led.reading(29, 6)
        assert (answer.high_watermark, answer.next_offset, offsets(data)) == (END, END, [29])
        assert (await led.reading(31, LEADER_EPOCH))[1] == b"", "who read it from another leader"
        with pytest.raises(OffsetOutOfRangeError, match=r"32 of t-0 is past the end of the log 31"):
            await led.reading(32)

    leading(work)


def test_a_reader_gets_as_many_bytes_as_it_asks_for() -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        for bytes_max, records in ((1, 1), (BATCH_BYTES, 1), (2 * BATCH_BYTES, 2), (1 << 20, 10)):
            answer, data = await led.reading(20, bytes_max=bytes_max)
            assert (answer.next_offset, offsets(data)) == (20 + records, [*range(20, 20 + records)])
        assert counted(led) == {
            "rayq_records_out_total": 14, "rayq_bytes_out_total": 14 * BATCH_BYTES
        }

    leading(work)


def test_a_reader_gets_no_more_bytes_than_the_leader_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leader_reads, "CLIENT_FETCH_BYTES_MAX", 2 * BATCH_BYTES)

    async def work(led: Led) -> None:
        await led.all_agree()
        assert offsets((await led.reading(20))[1]) == [20, 21]

    leading(work)


def test_a_reader_at_the_end_waits_for_as_long_as_it_says() -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        for wait_ms in (3_000, 1_000, 300, 0):
            began_s = led.clock.monotonic()
            answer, data = await led.reading(END, wait_ms=wait_ms)
            assert led.clock.monotonic() - began_s == pytest.approx(wait_ms / 1000, abs=AT_ONCE_S)
            assert (answer.next_offset, data) == (END, b"")

    leading(work)


@pytest.mark.parametrize("is_ended", [True, False])
def test_what_is_read_while_the_leader_is_deposed_goes_to_no_reader(
    monkeypatch: pytest.MonkeyPatch, is_ended: bool
) -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        played = stored(led)

        async def meanwhile() -> None:
            led.has_lease = is_ended
            if is_ended:
                led.leader.end("another leads")

        async def slow(*_: int) -> tuple[bytes, int]:
            await meanwhile()
            return b"data", 21

        async def slow_time(*_: int) -> tuple[int, int]:
            await meanwhile()
            return 20, 1_000

        monkeypatch.setattr(led.log, "read", slow)
        monkeypatch.setattr(led.log, "offset_for_time", slow_time)
        reads = led.leader.reads
        remote = messages.DescribeRemote("id", 0, LEADER_EPOCH, START, END)
        played.meanwhile = meanwhile
        questions: list[Callable[[], Awaitable[Any]]] = [
            lambda: led.reading(20),
            lambda: reads.read_stable(20, 1 << 20),
            lambda: led.listed(1_000),
            lambda: reads.describe_remote(READER, remote, NO_PAYLOAD),
            lambda: led.reading(START),
            lambda: reads.read_stable(START, 1 << 20),
        ]
        for ask in questions:
            led.has_lease, led.leader._ended = True, None
            with pytest.raises(NotLeaderError):
                await ask()

    leading(work, before=shortened)


# --- room for the answer --------------------------------------------------------------------------


def test_nothing_is_read_before_there_is_room_for_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        is_taking = False
        room = AnswerRoom(lambda: is_taking)
        read, reads = led.log.read, list[int]()

        async def noted(offset: int, limit: int, bytes_max: int) -> tuple[bytes, int]:
            reads.append(offset)
            return await read(offset, limit, bytes_max)

        monkeypatch.setattr(led.log, "read", noted)
        played = stored(led)
        readers = [
            asyncio.ensure_future(led.reading(offset, room=room)) for offset in (20, START)
        ]
        await asyncio.sleep(1)
        assert reads == [] and played.asked == [("bring", START, 1 << 20)]
        assert not any(reader.done() for reader in readers)
        is_taking = True
        room.grant()
        (answer, _), (_, stored_data) = await asyncio.gather(*readers)
        assert (answer.next_offset, stored_data) == (END, b"x" * START)

    leading(work, before=shortened)


class NotedRoom(AnswerRoom):
    """Notes for how much room it was asked."""

    def __init__(self) -> None:
        super().__init__(lambda: True)
        self.sizes: list[int] = []

    def take(self, size: int) -> AbstractAsyncContextManager[None]:
        self.sizes.append(size)
        return super().take(size)


def test_an_answer_takes_no_more_room_than_it_may_need() -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        stored(led)  # There are 100 bytes in one piece.
        room = NotedRoom()
        for offset, bytes_max in ((START, 70), (START, 300), (20, 70), (20, 300)):
            await led.reading(offset, bytes_max=bytes_max, room=room)
        assert room.sizes == [70, 100, 70, 300]

    leading(work, before=shortened)


def test_a_record_that_leaves_the_disk_while_its_reader_waits_for_room_comes_from_the_store() -> (
    None
):
    async def work(led: Led) -> None:
        await led.all_agree()
        stored(led)
        is_taking = False
        room = AnswerRoom(lambda: is_taking)
        reader = asyncio.ensure_future(led.reading(LOCAL_START, room=room))
        await asyncio.sleep(1)
        await led.log.drop_local(LOCAL_START + 1)
        is_taking = True
        room.grant()
        answer, data = await reader
        assert (answer.next_offset, data) == (LOCAL_START + 1, b"x" * LOCAL_START)

    leading(work, before=shortened)


# --- from the object store ------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [START, LOCAL_START - 1])
def test_what_is_only_in_the_object_store_is_read_from_there(offset: int) -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        played = stored(led)
        answer, data = await led.reading(offset, bytes_max=70)
        assert answer == messages.FetchResponse(END, START, 20, offset + 1, END, [(offset, 1)])
        assert data == b"x" * offset
        assert played.asked == [("bring", offset, 70), ("read", offset, 70)]
        assert counted(led) == {"rayq_records_out_total": 1, "rayq_bytes_out_total": offset}
        found = await led.leader.reads.read_stable(offset, 70)
        assert found == (data, offset + 1, [(offset, 1)])
        assert played.asked[2:] == [("bring", offset, 70), ("read", offset, 70)]
        assert await led.leader.reads.check_range(offset)
        assert played.asked[4:] == [("drop", offset)]

    leading(work, before=shortened)


@pytest.mark.parametrize("offset", [LOCAL_START, END - 1])
def test_what_is_on_the_disk_is_read_from_there(offset: int) -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        played = stored(led)
        answer, data = await led.reading(offset)
        assert (answer.next_offset, offsets(data)) == (END, [*range(offset, END)])
        assert await led.leader.reads.read_stable(offset, 1) == (data[:BATCH_BYTES], offset + 1, [])
        assert not await led.leader.reads.check_range(offset)
        assert played.asked == []

    leading(work, before=shortened)


def test_what_was_deleted_is_read_from_nowhere() -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        played = stored(led)
        remote = messages.DescribeRemote("id", 0, LEADER_EPOCH, START - 1, END)
        for question in (
            led.reading(START - 1),
            led.leader.reads.read_stable(START - 1, 1),
            led.leader.reads.describe_remote(READER, remote, NO_PAYLOAD),
        ):
            with pytest.raises(OffsetOutOfRangeError, match=r"11 of t-0 is below the log start 12"):
                await question
        assert not await led.leader.reads.check_range(START - 1)
        assert played.asked == []

    leading(work, before=shortened)


def test_what_is_deleted_while_it_is_read_is_shown_to_nobody() -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        played = stored(led)
        reads = led.leader.reads
        remote = messages.DescribeRemote("id", 0, LEADER_EPOCH, START, END)
        questions: list[Callable[[int], Awaitable[Any]]] = [
            led.reading,
            lambda offset: reads.read_stable(offset, 1),
            lambda offset: reads.describe_remote(
                READER, messages.DescribeRemote("id", 0, LEADER_EPOCH, offset, END), NO_PAYLOAD
            ),
        ]
        assert (await reads.describe_remote(READER, remote, NO_PAYLOAD)).log_start_offset == START
        for number, ask in enumerate(questions):
            offset = START + number

            async def meanwhile(offset: int = offset) -> None:
                await led.log.advance_log_start(offset + 1)

            played.meanwhile = meanwhile
            with pytest.raises(OffsetOutOfRangeError):
                await ask(offset)

    async def before(log: ReplicaLog) -> None:
        await shortened(log)
        await log.drop_local(20)

    leading(work, before=before)


@pytest.mark.parametrize(
    "offset, last_epoch, error", [(13, 4, None), (13, 3, RayqError), (13, 9, NotLeaderError)]
)
def test_a_reader_of_the_object_store_hears_of_an_unclean_election_too(
    offset: int, last_epoch: int, error: type[RayqError] | None
) -> None:
    async def work(led: Led) -> None:
        played = stored(led)
        with pytest.raises(OffsetNotAvailableError):
            await led.reading(offset, last_epoch)
        await led.all_agree()
        assert played.asked == []
        if error is None:
            assert (await led.reading(offset, last_epoch))[0].next_offset == offset + 1
        else:
            with pytest.raises(error):
                await led.reading(offset, last_epoch)
            assert played.asked == []

    async def before(log: ReplicaLog) -> None:
        await shortened(log, START)

    leading(work, before=before)


def test_a_topic_whose_metadata_are_older_than_its_log_names_what_is_missing() -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        reads = led.leader.reads
        for question in (
            led.reading(START),
            reads.read_stable(START, 1),
            led.listed(1_000),
            reads.check_range(START),
            reads.describe_offset(messages.DescribeOffset("id", 0, LEADER_EPOCH, START)),
        ):
            with pytest.raises(RemoteMissingError, match=r"Offset 12 of t-0 is below 15"):
                await question
        answer = await reads.describe_remote(
            READER, messages.DescribeRemote("id", 0, LEADER_EPOCH, START, END), NO_PAYLOAD
        )
        assert answer == messages.DescribeRemoteResponse([], START)

    leading(work, before=shortened)


@pytest.mark.parametrize(
    ("direct_reads", "principal", "left_ms", "valid_ms"),
    [
        ("all", None, None, 9_000),
        ("all", "anna", 60_000, 9_000),
        ("all", "anna", 4_000, 4_000),
        ("all", "anna", -1, 0),
        ("superuser", None, None, 9_000),
        ("superuser", "anna", None, 0),
        ("none", None, None, 0),
    ],
)
def test_only_clients_that_may_have_urls_get_them_and_they_end_with_the_token(
    direct_reads: Any, principal: str | None, left_ms: int | None, valid_ms: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)

    async def work(led: Led) -> None:
        await led.all_agree()
        played = stored(led)
        noted: list[Any] = []
        led.log.config = dataclasses.replace(led.log.config, remote_direct_reads=direct_reads)
        expires_ms = None if left_ms is None else led.log.environment.clock.wall_ms() + left_ms
        audit: Any = Mock(urls=lambda peer, where, **line: noted.append((peer, where, line)))
        peer = dataclasses.replace(
            READER, principal=principal, token_expires_ms=expires_ms, audit=audit
        )
        request = messages.DescribeRemote("id", 0, LEADER_EPOCH, START, 14, 3, 9_000)
        answer = await led.leader.reads.describe_remote(peer, request, NO_PAYLOAD)
        assert played.asked[1:] == ([("sign", 1, valid_ms)] if valid_ms else [])
        assert [found.url for found in answer.ranges] == [SECRET_URL if valid_ms else None]
        until_ms = led.log.environment.clock.wall_ms() + valid_ms
        line = {"objects": 1, "size": 6, "expires_ms": until_ms}
        assert noted == ([(peer, "t-0", line)] if valid_ms else [])
        # What is logged by accident has no URL either.
        logging.getLogger("test").debug("%s %r", answer, messages.SignObjectsResponse([SECRET_URL]))
        assert "secret" not in caplog.text

    async def before(log: ReplicaLog) -> None:
        await shortened(log, START)

    leading(work, before=before)


class Throttle:
    """A client's quota."""

    def __init__(self) -> None:
        self.is_free = asyncio.Event()
        self.used: list[float] = []

    async def acquire(self, name: str, units: float) -> None:
        assert (name, units) == ("consumer_byte_rate", 0)
        await self.is_free.wait()

    def most(self, name: str, units: float) -> float:
        return min(units, 1_000)

    def use(self, name: str, units: float) -> None:
        self.used.append(units)


def test_bytes_behind_urls_count_when_they_are_handed_out_and_a_debt_delays_the_next() -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        played, throttle = stored(led), Throttle()
        expires_ms = led.log.environment.clock.wall_ms() + 3_000
        peer = dataclasses.replace(
            READER, principal="anna", throttle=throttle, token_expires_ms=expires_ms
        )
        named = messages.DescribeRemote("id", 0, LEADER_EPOCH, START, 14, 3, 0)
        await led.leader.reads.describe_remote(peer, named, NO_PAYLOAD)
        assert throttle.used == [], "names cost nothing"
        request = msgspec.structs.replace(named, expires_ms=9_000)
        asked = asyncio.ensure_future(
            led.leader.reads.describe_remote(peer, request, NO_PAYLOAD)
        )
        await asyncio.sleep(1)
        assert len(played.asked) == 1, "nothing is signed before the debt is paid"
        throttle.is_free.set()
        assert (await asked).ranges[0].url == SECRET_URL
        assert throttle.used == [6]
        assert played.asked[-2][-1] == {**QUESTION, "bytes_max": 1_000}
        assert played.asked[-1] == ("sign", 1, 2_000), "the wait does not prolong the token"

    async def before(log: ReplicaLog) -> None:
        await shortened(log, START)

    leading(work, before=before)


def test_which_objects_hold_a_range_is_asked_as_the_reader_says() -> None:
    async def work(led: Led) -> None:
        request = messages.DescribeRemote("id", 0, LEADER_EPOCH, START, 14, 3, 9_000)
        with pytest.raises(OffsetNotAvailableError):
            await led.leader.reads.describe_remote(READER, request, NO_PAYLOAD)
        await led.all_agree()
        played = stored(led)
        answer = await led.leader.reads.describe_remote(READER, request, NO_PAYLOAD)
        named = messages.RemoteRange("name", START, 14, 5, 6, SECRET_URL)
        assert answer == messages.DescribeRemoteResponse([named], START)
        assert played.asked == [("ranges", START, 14, QUESTION), ("sign", 1, 9_000)]

    async def before(log: ReplicaLog) -> None:
        await shortened(log, START)

    leading(work, before=before)


# --- where records are ----------------------------------------------------------------------------


async def dated(log: ReplicaLog) -> None:
    """The records 30 and 31 are a minute younger each."""
    for minutes in (1, 2):
        append(log.log, epoch=6, timestamp_ms=NOW_MS + 60_000 * minutes)


def test_the_first_and_the_last_offset_are_told_with_the_epoch_of_the_end() -> None:
    async def work(led: Led) -> None:
        await led.log.advance_log_start(5)
        assert await led.listed(messages.EARLIEST) == messages.ListOffsetsResponse(5, None, None)
        for timestamp_ms in (messages.LATEST, 1_000):
            with pytest.raises(OffsetNotAvailableError):
                await led.listed(timestamp_ms)
        await led.all_agree()
        led.produce(0, acks=1)
        assert await led.listed(messages.LATEST) == messages.ListOffsetsResponse(END, None, 6)
        led.flushed(31)
        await led.all_agree(31)
        latest = messages.ListOffsetsResponse(31, None, LEADER_EPOCH)
        assert await led.listed(messages.LATEST) == latest
        await led.log.advance_log_start(31)
        assert await led.listed(messages.EARLIEST) == messages.ListOffsetsResponse(31, None, None)

    leading(work)


@pytest.mark.parametrize(
    "timestamp_ms, found",
    [
        (0, (0, NOW_MS)),
        (NOW_MS, (0, NOW_MS)),
        (NOW_MS + 1, (30, NOW_MS + 60_000)),
        (NOW_MS + 60_001, (31, NOW_MS + 120_000)),
        (NOW_MS + 120_001, (None, None)),  # The next one is not committed.
        (NOW_MS + 200_000, (None, None)),
    ],
)
def test_the_first_committed_record_of_a_time_is_found(
    timestamp_ms: int, found: tuple[int | None, int | None]
) -> None:
    async def work(led: Led) -> None:
        led.flushed(32)
        for broker in (2, 3):
            await led.fetched(broker, 32, 6)
        led.produce(0, acks=1, timestamp_ms=NOW_MS + 180_000)
        assert await led.listed(timestamp_ms) == messages.ListOffsetsResponse(*found)

    leading(work, before=dated)


def test_a_time_is_looked_for_in_the_object_store_first() -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        played = stored(led)
        played.time = (13, 900)
        assert await led.listed(800) == messages.ListOffsetsResponse(13, 900)
        played.time = None
        found = messages.ListOffsetsResponse(LOCAL_START, NOW_MS)
        assert await led.listed(950) == found
        assert played.asked == [("time", 800), ("time", 950)]
        await led.log.advance_log_start(LOCAL_START)
        assert await led.listed(950) == found
        assert len(played.asked) == 2, "there is nothing any more"

    leading(work, before=shortened)


def test_what_leaves_the_disk_between_the_two_questions_is_looked_for_again() -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        played = stored(led)

        async def meanwhile() -> None:
            if len(played.asked) == 1:
                await led.log.drop_local(20)
            else:
                played.time = (18, NOW_MS)

        played.meanwhile = meanwhile
        assert await led.listed(NOW_MS) == messages.ListOffsetsResponse(18, NOW_MS)
        assert len(played.asked) == 2

    leading(work, before=shortened)


def test_the_age_of_a_record_is_told_up_to_the_end_of_what_is_committed() -> None:
    async def work(led: Led) -> None:
        reads = led.leader.reads

        async def described(offset: int) -> tuple[int | None, int | None]:
            answer = await reads.describe_offset(
                messages.DescribeOffset("id", 0, LEADER_EPOCH, offset)
            )
            return answer.append_time_ms, answer.age_ms

        with pytest.raises(OffsetNotAvailableError):
            await described(20)
        await led.all_agree()
        played = stored(led)
        led.produce(0, acks=1)
        now_ms = led.clock.wall_ms()
        for offset in (LOCAL_START, END - 1):
            assert await described(offset) == (NOW_MS, now_ms - NOW_MS)
        assert await described(END) == (None, None), "it is not committed"
        assert await described(99) == (None, None)
        assert played.asked == []
        for offset in (0, START, LOCAL_START - 1):
            assert await described(offset) == (7_000, now_ms - 7_000)
        assert [request[1] for request in played.asked] == [START, START, LOCAL_START - 1]
        led.flushed(31)
        await led.all_agree(31)
        await asyncio.sleep(2)
        assert await described(END) == (now_ms, 2_000)

    async def before(log: ReplicaLog) -> None:
        await shortened(log, START)

    leading(work, before=before)


def test_a_record_of_a_clock_that_was_ahead_is_not_younger_than_now() -> None:
    async def before(log: ReplicaLog) -> None:
        append(log.log, epoch=6, now_ms=log.environment.clock.wall_ms() + 5_000)

    async def work(led: Led) -> None:
        led.flushed(31)
        for broker in (2, 3):
            await led.fetched(broker, 31, 6)
        answer = await led.leader.reads.describe_offset(
            messages.DescribeOffset("id", 0, LEADER_EPOCH, END)
        )
        assert answer.append_time_ms is not None and answer.age_ms == 0

    leading(work, before=before)


def test_the_producers_and_open_transactions_are_told_once_the_end_is_known() -> None:
    async def work(led: Led) -> None:
        reads = led.leader.reads
        producers = messages.DescribeProducers("id", 0, LEADER_EPOCH, 5, 3)
        open_ones = messages.DescribeOpenTransactions("id", 0, LEADER_EPOCH, None)
        with pytest.raises(OffsetNotAvailableError):
            reads.describe_producers(producers)
        with pytest.raises(OffsetNotAvailableError):
            reads.describe_open_transactions(open_ones)
        with pytest.raises(OffsetNotAvailableError):
            await reads.read_stable(0, 1)
        await led.all_agree()
        led.produce(0, acks=1)
        for first, count, found in ((5, 3, [7]), (5, 2, []), (7, 1, [7]), (8, 9, [])):
            asked = messages.DescribeProducers("id", 0, LEADER_EPOCH, first, count)
            assert reads.describe_producers(asked).producer_ids == found
        assert reads.describe_open_transactions(open_ones) == (
            messages.DescribeOpenTransactionsResponse(END, END, [], [], False, LEADER_EPOCH)
        )

    leading(work)


def test_whole_batches_are_read_up_to_the_last_stable_offset() -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        led.produce(0, acks=1)
        data, next_offset, aborted = await led.leader.reads.read_stable(28, 1 << 20)
        assert (offsets(data), next_offset, aborted) == ([28, 29], END, [])
        led.has_lease = False
        with pytest.raises(NotLeaderError):
            await led.leader.reads.read_stable(28, 1)

    leading(work)
