"""A coordinator of groups alone: positions that are committed, told, set, deleted and forgotten."""

from __future__ import annotations

import asyncio

import pytest

from rayq import messages
from rayq.actors.groups import group_coordinator
from rayq.actors.groups.group_coordinator import OFFSETS_CHECK_INTERVAL_S
from rayq.config import ClusterConfig
from rayq.core.groups.offsets import TOPIC_GONE_S
from rayq.core.groups.transactions import ENDED_KEPT_MS
from rayq.errors import (
    FencedMemberError,
    GroupNotEmptyError,
    InvalidRequestError,
    NotEnoughReplicasError,
    NotLeaderError,
    OffsetPendingError,
    RayqError,
    TransactionEndedError,
    UnknownGroupError,
    UnknownMemberError,
)
from tests.simulated.coordinator_stage import EPOCH, leading
from tests.simulated.group_stage import FAMILY, OTHER, WHERE, Groups, coordinating

LEAVE = messages.MEMBER_EPOCH_LEAVE


class Forgetful(Groups):
    """Positions are forgotten after ten seconds, and looked at each 2.5 s."""

    config = ClusterConfig(offsets_retention_ms=10_000)


async def describe_open(of: Groups) -> messages.DescribeOpenTransactionsResponse:
    return await of.ask(
        messages.DescribeOpenTransactions(*WHERE, None)
    )


async def abort_unknown(of: Groups, family: int, epoch: int) -> None:
    await of.ask(messages.AbortUnknownTransaction(*WHERE, family, epoch))


def test_a_position_is_told_as_it_was_committed() -> None:
    async def work(of: Groups) -> None:
        at_ms = of.environment.clock.wall_ms()
        answer = await of.ask(
            messages.CommitOffsets(
                *WHERE,
                "g",
                "",
                0,
                1,
                [
                    messages.OffsetCommit("T", 1, 7, 4, "note"),
                    messages.OffsetCommit("T", 0, 5, None, ""),
                    messages.OffsetCommit("U", 0, 1, 2, ""),
                ],
            )
        )
        assert answer == messages.CommitOffsetsResponse([])
        told = messages.CommittedOffset
        expected = [
            told("T", 0, 5, None, "", at_ms),
            told("T", 1, 7, 4, "note", at_ms),
            told("U", 0, 1, 2, "", at_ms),
        ]
        assert await of.committed() == expected
        assert await of.committed(1, 9, 0) == [expected[1], expected[0]]
        assert (await of.describe()).offsets == expected
        assert await of.committed(group="nobody") == []
        of.begin_again()
        assert await of.committed() == expected
        assert await of.list_groups() == [messages.GroupSummary("g", "empty", 0)]

    coordinating(work)


def test_what_a_member_may_commit_follows_from_what_it_owns() -> None:
    async def work(of: Groups) -> None:
        epoch = await of.beat("a")
        assert await of.send(3, 0, 1, transaction=None, member="a", member_epoch=epoch) == []
        refused = await of.send(
            4, 0, 7, transaction=None, member="a", member_epoch=epoch, sequence=2
        )
        assert [one[:3] for one in refused] == [("T", 7, "CommitRefusedError")]
        await of.send(1, 0, transaction=None, member="a", member_epoch=epoch, sequence=1)
        assert await of.fetch() == {0: 4, 1: 3}, "a late commit is dropped"
        for error, member, member_epoch in (
            (FencedMemberError, "a", epoch + 1),
            (UnknownMemberError, "b", epoch),
            (GroupNotEmptyError, "", 0),
        ):  # fmt: skip
            with pytest.raises(error):
                await of.send(
                    9, 0, transaction=None, member=member, member_epoch=member_epoch, sequence=3
                )
        assert await of.fetch() == {0: 4, 1: 3}

    coordinating(work)


def test_positions_are_set_and_deleted_while_nobody_is_there() -> None:
    async def work(of: Groups) -> None:
        await of.set_offsets(5, 0, 1)
        await of.set_offsets(6, 1)
        assert await of.fetch() == {0: 5, 1: 6}
        await of.beat("a")
        for refused in of.set_offsets(1, 0), of.delete():
            with pytest.raises(GroupNotEmptyError):
                await refused
        await of.beat("a", epoch=LEAVE)
        await of.delete()
        assert await of.fetch() == {} and await of.list_groups() == []
        for unknown in of.delete(), of.describe():
            with pytest.raises(UnknownGroupError):
                await unknown

    coordinating(work)


def test_positions_of_a_transaction_cannot_be_overwritten() -> None:
    async def work(of: Groups) -> None:
        await of.set_offsets(1, 0, 1)
        await of.send(5, 0)
        for refused in of.set_offsets(2, 0), of.delete(), of.committed(0), of.committed():
            with pytest.raises(OffsetPendingError):
                await refused
        await of.set_offsets(2, 1)
        assert await of.fetch(1) == {1: 2}
        await of.end()
        assert await of.fetch() == {0: 5, 1: 2}

    coordinating(work)


def test_many_positions_are_written_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_coordinator, "OFFSETS_PER_BATCH_MAX", 3)

    async def work(of: Groups) -> None:
        decisions: list[int] = []
        append = of.coordinator._log.append
        monkeypatch.setattr(
            of.coordinator._log, "append", lambda some: (decisions.append(len(some)), append(some))
        )
        await of.set_offsets(1, *range(7))  # The group's own record comes with them.
        await of.set_offsets(2, *range(3))
        assert decisions == [3, 3, 2, 3]
        assert await of.fetch() == {**dict.fromkeys(range(7), 1), **dict.fromkeys(range(3), 2)}
        decisions.clear()
        for member in "abcd":
            await of.beat(member, session_ms=1_000)
        await asyncio.sleep(2)
        assert max(decisions) > 3, "what a rebalance decides stays together"
        of.begin_again()
        assert len(await of.fetch()) == 7

    coordinating(work)


# --- forgetting -----------------------------------------------------------------------------------


def test_positions_of_an_idle_group_are_forgotten() -> None:
    async def work(of: Forgetful) -> None:
        of.clock_watch.look()
        await of.set_offsets(1, 0, group="idle")
        epoch = await of.beat("a", group="used")
        await asyncio.sleep(6)
        await of.set_offsets(1, 1, group="idle")
        await of.set_offsets(1, 0, group="later")
        await asyncio.sleep(3.5)
        assert len(await of.committed(group="idle")) == 2
        await asyncio.sleep(4)
        assert [one.partition for one in await of.committed(group="idle")] == [1]
        await of.beat("a", 0, 1, epoch=epoch, group="used")
        await asyncio.sleep(6)
        assert [one.group for one in await of.list_groups()] == ["used"]
        of.begin_again()
        assert [one.group for one in await of.list_groups()] == ["used"]
        assert await of.committed(group="idle") == []

    leading(Forgetful, work)


def test_positions_are_looked_at_once_a_minute() -> None:
    """With a long retention; a quarter of a short one."""

    async def work(of: Groups) -> None:
        of.coordinator.end("a test")
        of.clock_watch = _Late(of)
        of.begin()
        await of.set_offsets(1, 0)
        await asyncio.sleep(OFFSETS_CHECK_INTERVAL_S - 2)
        assert await of.fetch() == {0: 1}
        await asyncio.sleep(4)
        assert await of.fetch() == {} and await of.list_groups() == []

    coordinating(work)


class _Late(group_coordinator.ClockWatch):
    """By this clock all is old."""

    def __init__(self, of: Groups) -> None:
        super().__init__(of.environment.clock)

    def now_ms(self) -> int:
        return super().now_ms() + 8 * 24 * 3_600_000


def test_positions_of_a_deleted_topic_are_forgotten() -> None:
    async def work(of: Groups) -> None:
        of.change_topics(t=2, u=1)
        epoch = await of.beat("a", topics=["t", "u"])
        answer = await of.heartbeat("a", 0, 1, epoch=epoch, topics=["t", "u"])
        await of.ask(
            messages.CommitOffsets(
                *WHERE,
                "g",
                "a",
                answer.member_epoch,
                1,
                [
                    messages.OffsetCommit("T", 0, 3, None, ""),
                    messages.OffsetCommit("U", 0, 4, None, ""),
                ],
            )
        )
        of.change_topics(t=2)

        async def stay(seconds: float) -> None:
            for _ in range(int(seconds / 10)):
                answer = await of.heartbeat("a", 0, 1, topics=["t", "u"])
                await of.heartbeat("a", 0, 1, epoch=answer.member_epoch, topics=["t", "u"])
                await asyncio.sleep(10)

        await stay(OFFSETS_CHECK_INTERVAL_S + TOPIC_GONE_S)
        assert len(await of.committed()) == 2, "it was seen missing once"
        await stay(OFFSETS_CHECK_INTERVAL_S)
        assert await of.fetch() == {0: 3}

    coordinating(work)


def test_without_fresh_topics_none_counts_as_deleted() -> None:
    async def work(of: Groups) -> None:
        await of.set_offsets(3, 0)
        await asyncio.sleep(0.5)
        of.failure = NotLeaderError("no broker")
        of.refuse_appends(NotEnoughReplicasError("refused"))
        with pytest.raises(NotEnoughReplicasError):
            await of.set_offsets(4, 0)
        of.refuse_appends(None)
        await asyncio.sleep(4 * OFFSETS_CHECK_INTERVAL_S)
        assert await of.fetch() == {0: 3}

    coordinating(work)


def test_the_end_of_a_transaction_is_remembered_for_a_day() -> None:
    async def work(of: Groups) -> None:
        late = _Late(of)
        await of.send(3, 0)
        await of.end()
        await asyncio.sleep(OFFSETS_CHECK_INTERVAL_S + 1)
        with pytest.raises(TransactionEndedError):
            await of.send(4, 0)
        of.coordinator.end("a test")
        assert late.now_ms() - of.environment.clock.wall_ms() > ENDED_KEPT_MS
        of.clock_watch = late
        of.begin()
        await asyncio.sleep(OFFSETS_CHECK_INTERVAL_S + 1)
        assert await of.send(4, 0) == [], "no request is that late"

    coordinating(work)


# --- transactions that nobody ends ----------------------------------------------------------------


def test_open_transactions_are_described() -> None:
    async def work(of: Groups) -> None:
        nothing = messages.DescribeOpenTransactionsResponse(0, 0, [], [], leader_epoch=EPOCH)
        assert await describe_open(of) == nothing
        await of.send(3, 1, transaction=(OTHER, 4))
        await of.send(3, 0, transaction=(FAMILY, 2))
        assert await describe_open(of) == messages.DescribeOpenTransactionsResponse(
            0, 0, [(FAMILY, 2, 0), (OTHER, 4, 0)], [], leader_epoch=EPOCH
        )
        await of.end(2)
        await of.end(4, family=OTHER)
        assert await describe_open(of) == nothing

    coordinating(work)


@pytest.mark.parametrize("outcome", ["committed", "aborted", "unknown"])
def test_a_transaction_that_its_coordinator_does_not_end_ends_as_that_one_says(
    outcome: str,
) -> None:
    async def work(of: Groups) -> None:
        await of.set_offsets(1, 0)
        await abort_unknown(of, FAMILY, 0)  # It holds nothing here: nobody is asked.
        await of.send(3, 0)
        await abort_unknown(of, FAMILY, 1)
        of.transactions.outcomes[FAMILY, 0] = "open"
        with pytest.raises(InvalidRequestError) as told:
            await abort_unknown(of, FAMILY, 0)
        assert told.value.message == (
            f"Transaction {FAMILY}:0 is open: its coordinator knows it, and ends it. Abort it by "
            "its transactional id."
        )
        of.transactions.outcomes[FAMILY, 0] = outcome
        await abort_unknown(of, FAMILY, 0)
        assert await of.fetch() == {0: 3 if outcome == "committed" else 1}
        with pytest.raises(TransactionEndedError):
            await of.send(4, 0)
        await of.send(5, 0, transaction=(FAMILY, 1))
        await of.end(1)  # A coordinator's own end comes later, in its epoch.
        of.transactions.outcomes[FAMILY, 2] = "aborted"
        await of.send(6, 0, transaction=(FAMILY, 2))
        await abort_unknown(of, FAMILY, 2)
        assert await of.fetch() == {0: 5}
        await of.end(2)  # Late, and in the same epoch as before.
        assert await of.fetch() == {0: 5}

    coordinating(work)


def test_who_may_not_decide_any_more_ends_no_unknown_transaction() -> None:
    async def work(of: Groups) -> None:
        await of.send(3, 0)
        of.transactions.outcomes[FAMILY, 0] = "aborted"
        of.transactions.gate.clear()
        aborting = asyncio.ensure_future(abort_unknown(of, FAMILY, 0))
        await asyncio.sleep(0.1)
        of.is_starved()
        of.transactions.gate.set()
        with pytest.raises(NotEnoughReplicasError, match="groups wait for more brokers"):
            await aborting
        of.commits()
        with pytest.raises(OffsetPendingError):
            await of.fetch(0)

    coordinating(work)


def test_a_commit_that_waited_for_its_transaction_is_decided_by_who_may_decide_then() -> None:
    async def work(of: Groups) -> None:
        of.transactions.gate.clear()
        sending = asyncio.ensure_future(of.send(3, 0))
        await asyncio.sleep(0.1)
        of.is_starved()
        of.transactions.gate.set()
        with pytest.raises(NotEnoughReplicasError, match="groups wait for more brokers"):
            await sending
        of.commits()
        assert await of.fetch() == {}

    coordinating(work)


# --- what is committed ----------------------------------------------------------------------------


def test_no_answer_comes_before_all_that_it_is_based_on_is_committed() -> None:
    async def work(of: Groups) -> None:
        epoch = await of.beat("a", group="h")
        await of.send(3, 0, transaction=(OTHER, 1))
        of.transactions.outcomes[OTHER, 1] = "aborted"
        of.waits()
        answered = [
            of.set_offsets(1, 1),
            of.list_groups(),
            of.describe(),
            describe_open(of),
            of.committed(1),
            of.beat("a", 0, 1, epoch=epoch, group="h"),
            of.beat("nobody", epoch=LEAVE),
            abort_unknown(of, FAMILY, 7),
            of.end(7),
            of.send(2, 1, transaction=None),
            abort_unknown(of, OTHER, 1),
            of.beat("a", epoch=LEAVE, group="h"),
            of.delete("h"),
        ]
        refused = [
            of.describe("nobody"),
            of.delete("nobody"),
            of.beat("nobody", epoch=3),
            of.send(2, 1, member="nobody", member_epoch=1),
            of.end(3, family=FAMILY, is_commit=False, coordinator_epoch=1),
        ]
        waiting = []
        for one in [*answered, *refused]:
            waiting.append(asyncio.ensure_future(one))
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        assert [one.done() for one in waiting] == [False] * len(waiting)
        of.commits()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        failed = [isinstance(one, RayqError) for one in found]
        assert failed == [False] * len(answered) + [True] * len(refused)
        assert await of.fetch() == {1: 2}

    coordinating(work)


def test_a_position_is_told_only_by_who_may_still_write() -> None:
    """A record is written for each question: once it is committed, no newer one had begun."""

    async def work(of: Groups) -> None:
        await of.set_offsets(1, 0)
        end_offset = of.end_offset
        assert await of.fetch() == {0: 1}
        assert of.end_offset > end_offset
        of.is_starved()
        for refused in (
            of.committed(),
            of.set_offsets(2, 0),
            of.beat("a"),
            of.delete(),
            of.end(),
            describe_open(of),
            abort_unknown(of, FAMILY, 0),
            of.send(1, 0, transaction=None),
        ):
            with pytest.raises(NotEnoughReplicasError, match="groups wait for more brokers"):
                await refused
        assert (await of.describe()).offsets[0].offset == 1
        assert len(await of.list_groups()) == 1
        of.commits()
        assert await of.fetch() == {0: 1}, "nothing that was refused is decided"

    coordinating(work)
