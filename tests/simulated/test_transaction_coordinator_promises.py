"""A coordinator of transactions tells only what is committed, and the next one goes on with it."""

from __future__ import annotations

import asyncio

import pytest

from proving.simulation.world import START_WALL_MS
from rayq.actors.transactions.transaction_coordinator import (
    TICK_S,
)
from rayq.core.transactions.records import IdRecord, IdValue
from rayq.errors import (
    NotEnoughReplicasError,
    NotLeaderError,
    RayqError,
)
from rayq.messages.transaction_ids import EPOCH_MAX
from tests.simulated.transaction_coordinator_stage import (
    NAME,
    OTHER,
    TIMEOUT_MS,
    Coordinating,
    coordinating,
    key_of,
)

# --- what is committed ----------------------------------------------------------------------------


def test_no_answer_comes_before_all_that_it_is_based_on_is_committed() -> None:
    async def work(of: Coordinating) -> None:
        key, other, unknown = await of.init(), await of.init(OTHER), key_of(9)
        await of.join(key, ("T", 0))
        of.waits()
        answered = [
            of.join(other, ("T", 0)),
            of.listed(),
            of.describe(),
            of.outcome(key),
            of.outcome(unknown),
            of.abort(unknown),
            of.init(),
            of.join(key, ("T", 1)),
            of.touch(key),
            of.seal(key),
            of.end(key),
            of.abort(other),
        ]
        refused = [
            of.describe("unknown"),
            of.join(unknown, ("T", 0)),
            of.touch(unknown),
            of.seal(unknown),
            of.end(unknown),
            of.init(OTHER, timeout_ms=1),
        ]
        waiting = []
        for one in [*answered, *refused]:
            waiting.append(asyncio.ensure_future(one))
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        assert [one.done() for one in waiting] == [False] * len(waiting)
        assert of.leaders.tries == [], "nor does a marker go out"
        of.commits()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        failed = [isinstance(one, RayqError) for one in found]
        assert failed == [False] * len(answered) + [True] * len(refused)
        assert of.marked(key) == [("T", 0, True), ("T", 1, True)]
        assert of.marked(other) == [("T", 0, False)]

    coordinating(work)


def test_a_question_makes_sure_that_no_newer_coordinator_has_begun() -> None:
    """A record is written for it, where the answer would let a leader forget the transaction."""

    async def work(of: Coordinating) -> None:
        key = await of.init()
        end_offset = of.end_offset
        assert await of.outcome(key) == "unknown"
        assert of.end_offset > end_offset
        await of.join(key, ("T", 0))
        end_offset = of.end_offset
        assert await of.outcome(key) == "open"
        assert of.end_offset == end_offset, "this lets nobody forget it"
        of.waits()
        waiting = asyncio.ensure_future(of.outcome(key_of(9)))
        await asyncio.sleep(0.1)
        of.has_lease = False
        of.commits()
        with pytest.raises(NotLeaderError):
            await waiting

    coordinating(work)


@pytest.mark.parametrize("is_starved", [True, False])
def test_who_may_not_decide_refuses(is_starved: bool) -> None:
    async def work(of: Coordinating) -> None:
        key = await of.init()
        await of.join(key, ("T", 0))
        end_offset = of.end_offset
        if is_starved:
            of.is_starved()
            error, match = NotEnoughReplicasError, "transactions wait for more brokers"
        else:
            of.lose()
            error, match = NotLeaderError, "it lost its broker"
        for refused in (
            of.init(),
            of.end(key),
            of.touch(key),
            of.seal(key),
            of.join(key, ("T", 1)),
            of.outcome(key),
            of.abort(key),
        ):
            with pytest.raises(error, match=match):
                await refused
        if is_starved:
            assert (await of.describe()).transactions and (await of.listed()).transactions
        else:
            for asked in of.describe(), of.listed():
                with pytest.raises(error, match=match):
                    await asked
        of.commits()
        of.regain()
        assert await of.outcome(key) == "open" and of.end_offset == end_offset
        assert await of.seal(key) == [("T", 0)]

    coordinating(work)


def test_a_coordinator_that_begins_is_waited_for() -> None:
    async def work(of: Coordinating) -> None:
        key = await of.init()
        await of.join(key, ("T", 0))
        for ask in (
            lambda: of.listed(),
            lambda: of.describe(),
            lambda: of.outcome(key),
            lambda: of.touch(key),
            lambda: of.join(key, ("T", 1)),
            lambda: of.seal(key),
            lambda: of.abort(key_of(1, 1)),
            lambda: of.init(),
            lambda: of.end(key),
        ):
            of.begin_again()
            of.waits()
            asking = asyncio.ensure_future(ask())
            await asyncio.sleep(0)
            of.commits()
            await asking
        assert await of.outcome(key) == "committed"
        assert of.marked(key) == [("T", 0, True), ("T", 1, True)]
        await of.join(key_of(1, 1), ("T", 0))
        of.begin_again()
        await of.abort(key_of(1, 1))
        assert await of.outcome(key_of(1, 1)) in ("aborting", "aborted")

    coordinating(work)


def test_an_abort_draws_the_family_that_it_needs() -> None:
    async def work(of: Coordinating) -> None:
        key = key_of(7, EPOCH_MAX)
        await of.stored(IdRecord(NAME, IdValue("a", TIMEOUT_MS, key, START_WALL_MS)))
        of.begin_again()
        await of.join(key, ("T", 0))
        await of.abort(key)
        assert await of.init() == key_of(1)
        await asyncio.sleep(0.1)
        assert of.marked(key) == [("T", 0, False)]

    coordinating(work)


# --- failover -------------------------------------------------------------------------------------


def test_the_next_coordinator_writes_the_markers_that_are_missing() -> None:
    async def work(of: Coordinating) -> None:
        of.leaders.held |= {("T", 1), ("T", 2)}
        key, open_one = await of.init(), await of.init(OTHER)
        await of.join(key, ("T", 0), ("T", 1))
        await of.join(open_one, ("T", 2))
        assert not (await of.end(key, wait_ms=100)).is_complete
        of.coordinator.end("a test")
        await asyncio.sleep(2)
        count = len(of.leaders.tries)
        of.leaders.held.clear()
        await asyncio.sleep(5)
        assert len(of.leaders.tries) == count, "it tells nobody any more"
        of.begin()
        await asyncio.sleep(1)
        assert set(of.marked(key)) == {("T", 0, True), ("T", 1, True)}
        assert of.marked(open_one) == []
        assert await of.outcome(key) == "committed" and await of.outcome(open_one) == "open"
        assert of.measured() == [("2", 1)]
        count = len(of.leaders.markers)
        await of.init()  # A decision takes along that the markers are written.
        of.begin_again()
        await asyncio.sleep(1)
        assert len(of.leaders.markers) == count

    coordinating(work)


def test_that_all_markers_are_written_is_in_the_log_soon() -> None:
    async def work(of: Coordinating) -> None:
        key = await of.init()
        await of.join(key, ("T", 0))
        await of.end(key)
        end_offset = of.end_offset
        await asyncio.sleep(2 * TICK_S)
        assert of.end_offset == end_offset + 1
        await asyncio.sleep(10 * TICK_S)
        assert of.end_offset == end_offset + 1
        of.begin_again()
        await asyncio.sleep(1)
        assert len(of.leaders.markers) == 1

    coordinating(work)


def test_a_marker_that_was_written_while_another_may_coordinate_is_no_reason_to_forget() -> None:
    async def work(of: Coordinating) -> None:
        of.leaders.held.add(("T", 0))
        key = await of.init()
        await of.join(key, ("T", 0))
        await of.end(key, wait_ms=0)
        of.lose()
        of.leaders.held.clear()
        await asyncio.sleep(3)
        assert of.marked(key) and of.measured() == [("2", 1)]
        of.regain()
        await asyncio.sleep(2)
        assert of.measured() == [("2", 0)]

    coordinating(work)


def test_after_a_failed_append_the_log_says_how_a_transaction_stands() -> None:
    async def work(of: Coordinating) -> None:
        key = await of.init()
        await of.join(key, ("T", 0))
        of.refuse_appends(NotEnoughReplicasError("refused"))
        with pytest.raises(NotEnoughReplicasError):
            await of.end(key)
        of.refuse_appends(None)
        await asyncio.sleep(1)
        assert await of.outcome(key) == "open" and of.leaders.tries == []
        assert (await of.end(key)).is_committed
        assert of.marked(key) == [("T", 0, True)]
        of.coordinator.end("a test")
        assert of.measured() == []

    coordinating(work)


def test_a_decision_that_is_lost_with_its_coordinator_brings_no_marker() -> None:
    async def work(of: Coordinating) -> None:
        key = await of.init()
        await of.join(key, ("T", 0))
        of.waits()
        ending = asyncio.ensure_future(of.end(key))
        await asyncio.sleep(0.1)
        of.coordinator.end("it moved")
        with pytest.raises(NotLeaderError, match="it moved"):
            await ending
        of.commits()
        await asyncio.sleep(5)
        assert of.leaders.tries == []
        of.begin()
        await asyncio.sleep(1)
        assert of.marked(key) == [("T", 0, True)], "it was committed after all"

    coordinating(work)


def test_a_wait_for_markers_ends_with_the_coordinator() -> None:
    async def work(of: Coordinating) -> None:
        of.leaders.held.add(("T", 0))
        key = await of.init()
        await of.join(key, ("T", 0))
        ending = asyncio.ensure_future(of.end(key, wait_ms=60_000))
        await asyncio.sleep(1)
        assert not ending.done()
        of.coordinator.end("it moved")
        with pytest.raises(NotLeaderError, match="it moved"):
            await asyncio.wait_for(ending, 1)

    coordinating(work)
