"""The log of a coordinator, with a leader that the test plays: which records go into which batch,
and what becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from proving.simulation import World
from rayq import messages
from rayq.actors import coordinator_log
from rayq.actors.coordinator_log import WRITES_MAX, CoordinatorLog
from rayq.actors.signal import Signal
from rayq.client.environment import system_environment
from rayq.errors import CorruptBatchError, NotEnoughReplicasError, NotLeaderError, RayqError
from rayq.storage.batch import decode_columns, encode_batch, read_header, stamp

ANSWER = messages.ProduceResponse(0, 0, 0, False)


class _Record(NamedTuple):
    key: str
    value: str | None


class _Played:
    """A coordinator's log whose leader takes each batch, and commits it when the test says so."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[str, str | None]]] = []
        self.requests: list[messages.Produce] = []
        self.under_way: list[asyncio.Future[messages.ProduceResponse]] = []
        self.commits_at_once = False
        self.refusal: RayqError | None = None
        self.failures: list[RayqError] = []
        self.environment = system_environment(None)
        replica_log: Any = SimpleNamespace(environment=self.environment)
        leader: Any = SimpleNamespace(leader_epoch=7, produce=self._produce)
        assignment: Any = SimpleNamespace(topic_id="T", partition=3)
        self.log: CoordinatorLog[_Record] = CoordinatorLog(
            replica_log,
            leader,
            assignment,
            encode=lambda record: (
                record.key.encode(),
                None if record.value is None else record.value.encode(),
            ),
            on_failure=self._failed,
        )

    def _produce(
        self, request: messages.Produce, batch: memoryview, *, principal: str | None
    ) -> messages.ProduceResponse | asyncio.Future[messages.ProduceResponse]:
        if self.refusal is not None:
            raise self.refusal
        columns = decode_columns(bytes(batch), 0, read_header(batch))
        keys = [(key or b"").decode() for key in columns.keys or ()]
        values = [None if value is None else bytes(value).decode() for value in columns.values]
        self.batches.append(list(zip(keys, values, strict=True)))
        self.requests.append(request)
        if self.commits_at_once:
            return ANSWER
        self.under_way.append(asyncio.get_running_loop().create_future())
        return self.under_way[-1]

    def _failed(self, error: RayqError) -> None:
        self.failures.append(error)
        self.log.drop(error)

    def decide(self, *keys: str) -> asyncio.Task[None]:
        """A request that decides something, and waits until that is committed."""

        async def request() -> None:
            self.log.append([_Record(key, f"{key}'s") for key in keys])
            await self.log.until_committed()

        return asyncio.ensure_future(request())

    @property
    def keys(self) -> list[str]:
        """Those of each batch."""
        return ["".join(key for key, _ in batch) for batch in self.batches]


def _run(story: Coroutine[Any, Any, None]) -> None:
    with World(seed=1) as world:
        world.run(story)
        assert world.errors == []


async def _turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def _played(story: Callable[[_Played], Awaitable[None]]) -> None:
    async def play() -> None:
        await story(_Played())

    _run(play())


def test_records_on_which_no_answer_is_based_go_with_the_next_decision() -> None:
    async def story(of: _Played) -> None:
        of.commits_at_once = True
        of.log.append_later([_Record("a", "1")])
        of.log.append_later([_Record("b", "1")])
        await of.log.until_committed()
        await _turns()
        assert of.keys == [], "nobody waits for them"
        await of.decide("c", "d")
        assert of.keys == ["abcd"]
        of.log.write_rest()
        await _turns()
        assert of.keys == ["abcd"], "there is no rest"
        of.log.append_later([_Record("e", "1")])
        of.log.write_rest()
        of.log.write_rest()
        await of.log.until_committed()
        assert of.keys == ["abcd", "e"]

    _played(story)


def test_decisions_of_one_turn_go_into_one_batch_as_they_are() -> None:
    async def story(of: _Played) -> None:
        of.log.append([_Record("a", "1"), _Record("b", None)])
        of.log.append([_Record("a", "")])
        assert of.batches == [], "more may come in this turn"
        await _turns()
        assert of.batches == [[("a", "1"), ("b", None), ("a", "")]]
        assert of.requests == [
            messages.Produce(
                topic_id="T",
                partition=3,
                leader_epoch=7,
                acks=-1,
                timeout_ms=coordinator_log.APPEND_TIMEOUT_MS,
            )
        ]

    _played(story)


def test_an_answer_waits_for_what_was_decided_before_it_and_for_nothing_later() -> None:
    async def story(of: _Played) -> None:
        await of.log.until_committed()  # Nothing is decided.
        waiting = []
        for key in "abc":
            waiting.append(of.decide(key))
            await _turns()
        assert of.keys == ["a", "b", "c"]
        for place in range(3):
            assert [waiter.done() for waiter in waiting] == [index < place for index in range(3)]
            assert (of.log.decided, of.log.committed) == (3, place)
            of.under_way[place].set_result(ANSWER)
            await _turns()
        assert [waiter.result() for waiter in waiting] == [None] * 3
        assert of.log.committed == 3
        await asyncio.wait_for(of.log.until_committed(), 1)

    _played(story)


def test_a_few_batches_are_under_way_and_what_comes_meanwhile_is_written_together() -> None:
    async def story(of: _Played) -> None:
        letters = "abcdefghij"
        waiting = []
        for key in letters:
            waiting.append(of.decide(key))
            await _turns()
        assert of.keys == list(letters[:WRITES_MAX])
        of.under_way[0].set_result(ANSWER)
        await _turns()
        rest = letters[WRITES_MAX:]
        assert of.keys == [*letters[:WRITES_MAX], rest]
        last = of.decide("z")
        await _turns()
        assert len(of.batches) == WRITES_MAX + 1, "as many are under way as may be"
        of.under_way[1].set_result(ANSWER)
        await _turns()
        assert of.keys[WRITES_MAX:] == [rest, "z"]
        assert [waiter.done() for waiter in waiting] == [letter in "ab" for letter in letters]
        for future in of.under_way[2:]:
            future.set_result(ANSWER)
        await asyncio.gather(*waiting, last)
        waiting = []
        for key in letters:  # All of the room is there again.
            waiting.append(of.decide(key))
            await _turns()
        assert len(of.batches) == 2 * WRITES_MAX + 2
        await asyncio.sleep(0)
        for waiter in waiting:
            waiter.cancel()

    _played(story)


def test_no_more_are_under_way_when_answers_and_decisions_come_in_one_turn() -> None:
    async def story(of: _Played) -> None:
        loop = asyncio.get_running_loop()
        for key in "abc":
            of.log.append([_Record(key, "1")])
            await _turns()
        of.under_way[0].set_result(ANSWER)
        loop.call_soon(of.log.append, [_Record("e", "1")])
        of.log.append([_Record("d", "1")])
        loop.call_soon(of.log.append, [_Record("f", "1")])
        await _turns()
        assert of.keys == ["a", "b", "c", "d", "e"], "four of them are under way"
        of.under_way[1].set_result(ANSWER)
        await _turns()
        assert of.keys[5:] == ["f"]

    _played(story)


@pytest.mark.parametrize("limit_bytes, batches", [(1, "a b c d"), (4, "a b c d"), (5, "ab cd")])
def test_a_batch_takes_whole_decisions_until_it_has_its_size(
    monkeypatch: pytest.MonkeyPatch, limit_bytes: int, batches: str
) -> None:
    """A record is a key of one letter and a value of three."""
    monkeypatch.setattr(coordinator_log, "BATCH_BYTES", limit_bytes)

    async def story(of: _Played) -> None:
        of.commits_at_once = True
        await asyncio.gather(*(of.decide(key) for key in "abcd"))
        assert of.keys == batches.split()
        await of.decide("e", "f", "g")
        assert of.keys[-1] == "efg", "a decision is never split"

    _played(story)


@pytest.mark.parametrize("limit_bytes, batches", [(1, ["a", "b", "c"]), (5, ["ab", "c"])])
def test_an_answer_waits_for_the_batch_that_has_its_decision_where_batches_are_full(
    monkeypatch: pytest.MonkeyPatch, limit_bytes: int, batches: list[str]
) -> None:
    """Decisions of one turn that do not fit into one batch are not committed with its first."""
    monkeypatch.setattr(coordinator_log, "BATCH_BYTES", limit_bytes)
    monkeypatch.setattr(coordinator_log, "WRITES_MAX", 1)

    async def story(of: _Played) -> None:
        waiting = {key: of.decide(key) for key in "abc"}
        committed = ""
        for number, batch in enumerate(batches):
            await _turns()
            assert of.keys == batches[: number + 1]
            assert {key for key, waiter in waiting.items() if waiter.done()} == set(committed)
            assert of.log.committed == len(committed)
            of.under_way[number].set_result(ANSWER)
            committed += batch
        await asyncio.wait_for(asyncio.gather(*waiting.values()), 1)

    _played(story)


def test_what_is_dropped_is_not_written_and_its_requests_hear_why() -> None:
    async def story(of: _Played) -> None:
        waiting = []
        for key in "abcdefg":
            waiting.append(of.decide(key))
            await _turns()
        of.log.append_later([_Record("x", "1")])
        of.log.drop(NotLeaderError("over"))
        await _turns()
        assert [str(waiter.exception()) for waiter in waiting] == ["over"] * 7
        assert (of.log.generation, of.log.committed, of.log.decided) == (1, 7, 7)
        await asyncio.wait_for(of.log.until_committed(), 1)
        written = len(of.batches)
        of.log.write_rest()
        again = of.decide("h")
        await _turns()
        assert of.keys[written:] == ["h"]
        # What the old batches come to says nothing of the new decisions.
        of.under_way[0].set_result(ANSWER)
        of.under_way[1].set_exception(NotEnoughReplicasError("late"))
        await _turns()
        assert not again.done() and of.failures == []
        assert (of.log.generation, of.log.committed) == (1, 7)
        of.under_way[written].set_result(ANSWER)
        await again
        assert of.log.committed == 8
        more = []
        for key in "ijklmn":
            more.append(of.decide(key))
            await _turns()
        assert of.keys[written + 1 :] == list("ijkl"), "the old ones are not counted"
        of.log.drop(NotLeaderError("over"))
        await asyncio.wait(more)
        assert all(waiter.exception() for waiter in more)

    _played(story)


@pytest.mark.parametrize("fails_later", [True, False])
def test_a_failed_append_drops_all_that_is_not_committed(fails_later: bool) -> None:
    async def story(of: _Played) -> None:
        first = of.decide("a")
        await _turns()
        of.under_way[0].set_result(ANSWER)
        await first
        error = NotEnoughReplicasError("too few")
        if not fails_later:
            of.refusal = error
        waiting = [of.decide("b")]
        await _turns()
        if fails_later:
            waiting.append(of.decide("c"))
            await _turns()
            of.under_way[1].set_exception(error)
        await asyncio.wait(waiting)
        assert of.failures == [error]
        assert [waiter.exception() for waiter in waiting] == [error] * len(waiting)
        of.refusal, of.commits_at_once = None, True
        await of.decide("d")
        assert of.keys[-1] == "d" and of.failures == [error]
        assert of.log.committed == of.log.decided == len(waiting) + 2

    _played(story)


def _batch(first: int, values: list[bytes | None], *, keyed: bool = True) -> bytes:
    keys: list[bytes | None] | None = [b"k%d" % (first + place) for place in range(len(values))]
    batch = encode_batch(values, keys if keyed else None, timestamps_ms=1)
    stamp(batch, 0, base_offset=first, leader_epoch=1, append_time_ms=1)
    return bytes(batch)


class _Stored:
    """What a new coordinator reads: batches of two records from offset 2 on, the first of them
    without keys. All is read, and committed, up to 8; the log grows while it is read."""

    def __init__(self) -> None:
        self.pieces = {
            2: _batch(2, [b"2", None], keyed=False),
            4: _batch(4, [b"4", b"5"]),
            6: _batch(6, [None, b"7"]),
        }
        self.reads: list[tuple[int, int, int]] = []
        self.verified: list[int] = []
        self.committed = Signal()
        self.high_watermark = 8
        self.log = SimpleNamespace(start_offset=2, end_offset=8)
        self.environment = system_environment(None)
        self.leader = SimpleNamespace(leader_epoch=1, state=SimpleNamespace(may_serve=True))
        self.failure: Exception | None = None

    async def read(self, offset: int, limit_offset: int, bytes_max: int) -> tuple[bytes, int]:
        self.reads.append((offset, limit_offset, bytes_max))
        self.log.end_offset += 2
        return self.pieces[offset], offset + 2

    async def verify(self, offset: int) -> None:
        self.verified.append(offset)
        if self.failure is not None:
            raise self.failure

    def replay(self, take: Callable[[bytes | None, bytes | None], None]) -> asyncio.Task[int]:
        replica_log: Any = self
        leader: Any = self.leader
        log: CoordinatorLog[_Record] = CoordinatorLog(
            replica_log,
            leader,
            SimpleNamespace(topic_id="t", partition=0),  # type: ignore[arg-type]
            encode=lambda record: (b"", None),
            on_failure=lambda error: None,
        )
        return asyncio.ensure_future(log.replay(take))


def test_a_new_coordinator_reads_all_that_there_is_piece_by_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coordinator_log, "READ_BYTES", 1)

    async def story() -> None:
        stored, found = _Stored(), []
        count = await stored.replay(lambda key, value: found.append((key, value)))
        assert found == [
            (None, b"2"),
            (None, None),
            (b"k4", b"4"),
            (b"k5", b"5"),
            (b"k6", None),
            (b"k7", b"7"),
        ]
        assert count == 6 and stored.verified == []
        assert stored.reads == [(2, 8, 1), (4, 8, 1), (6, 8, 1)]

    _run(story())


def test_a_new_coordinator_begins_once_all_of_its_log_is_committed() -> None:
    async def story() -> None:
        stored = _Stored()
        stored.leader.state.may_serve, stored.high_watermark = False, 7
        replay = stored.replay(lambda key, value: None)
        for may_serve, high_watermark in (False, 7), (True, 7), (False, 8):
            stored.leader.state.may_serve, stored.high_watermark = may_serve, high_watermark
            stored.committed.notify()
            await _turns()
            assert stored.reads == []
        stored.leader.state.may_serve = True
        assert await asyncio.wait_for(replay, 5) == 6, "it looks without being told, too"
        stored.log = SimpleNamespace(start_offset=8, end_offset=8)
        assert await stored.replay(lambda key, value: None) == 0

    _run(story())


@pytest.mark.parametrize("failure", [None, NotLeaderError("the disk is the reason")])
def test_damage_that_is_read_is_looked_for_on_the_disk(failure: RayqError | None) -> None:
    async def story() -> None:
        stored, found = _Stored(), []
        stored.failure = failure
        damaged = bytearray(stored.pieces[4])
        damaged[-1] ^= 1
        stored.pieces[4] = bytes(damaged)
        with pytest.raises(CorruptBatchError if failure is None else NotLeaderError):
            await stored.replay(lambda key, value: found.append(value))
        assert found == [b"2", None] and stored.verified == [4]

    _run(story())


def test_other_work_goes_on_while_a_long_log_is_read() -> None:
    async def story() -> None:
        stored = _Stored()
        turns = 0

        def turn() -> None:
            nonlocal turns
            turns += 1
            asyncio.get_running_loop().call_soon(turn)

        turn()
        await _turns()
        before = turns
        await stored.replay(lambda key, value: None)
        assert turns - before >= len(stored.pieces)

    _run(story())
