"""The in-sync set that a leader proposes: when, to whom, and what it does while that is undecided."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from rayq import messages
from rayq.actors.replica.isr_proposals import PROPOSAL_PAUSE_S
from rayq.config import ClusterConfig
from rayq.errors import StalePartitionError, TimeoutError
from tests.simulated.leader_stage import ALL, END, LEADER_EPOCH, Led, assignment, leading

WAIT_S = 2.0


@pytest.mark.parametrize("refusal", [StalePartitionError("no"), TimeoutError("who knows?")])
def test_only_a_proposal_that_was_refused_for_certain_is_forgotten(refusal: Exception) -> None:
    async def work(led: Led) -> None:
        led.refusal = refusal
        led.leader.committed(assignment(2, ALL[:2]))
        await led.all_agree()
        await asyncio.sleep(WAIT_S)
        (proposed, *_) = led.proposals
        assert (proposed.isr, proposed.partition_epoch) == (ALL, 2)
        led.produce(0, acks=1)
        led.flushed(31)
        await led.fetched(2, 31, LEADER_EPOCH)
        is_refused = isinstance(refusal, StalePartitionError)
        await asyncio.sleep(WAIT_S)
        # A proposal that may have been accepted holds the high watermark until its third member has
        # all.
        assert led.log.high_watermark == (31 if is_refused else 30)

    leading(work)


def test_a_proposal_names_the_process_and_both_epochs_and_is_made_once() -> None:
    async def work(led: Led) -> None:
        led.leader.committed(assignment(2, ALL[:2]))
        await led.fetched(3, END, 6)
        await led.fetched(3, END, 6)
        await asyncio.sleep(WAIT_S)
        assert led.proposals == [
            messages.AlterPartition(
                topic_id="id", partition=0, broker=1, incarnation="1a", leader_epoch=LEADER_EPOCH,
                partition_epoch=2, isr=ALL,
            )
        ]

    leading(work)


@pytest.mark.parametrize("is_ended", [True, False])
def test_a_deposed_leader_and_one_without_its_broker_propose_nothing(is_ended: bool) -> None:
    async def work(led: Led) -> None:
        led.leader.committed(assignment(2, ALL[:2]))
        if is_ended:
            led.leader.end("another leads")
        led.has_lease = is_ended
        led.leader.state.follower_fetched(
            3, "3a", flushed=END, log_start_offset=0, now_s=led.clock.monotonic()
        )
        led.leader.proposals.propose()
        await asyncio.sleep(WAIT_S)
        assert led.proposals == []

    leading(work)


def test_a_follower_that_has_not_heard_of_a_deletion_is_not_proposed() -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        await led.log.advance_log_start(12)
        led.leader.committed(assignment(2, ALL[:2]))
        await led.fetched(3, END, 6, log_start=11)
        await asyncio.sleep(WAIT_S)
        assert led.proposals == []
        await led.fetched(3, END, 6, log_start=12)
        await asyncio.sleep(WAIT_S)
        assert [one.isr for one in led.proposals] == [ALL]

    leading(work)


def test_a_follower_that_lags_for_too_long_is_proposed_out() -> None:
    async def work(led: Led) -> None:
        await led.fetched(2, END, 6)  # The third has never been heard.
        await asyncio.sleep(2.9)
        await led.fetched(2, END, 6)
        assert led.proposals == []
        await asyncio.sleep(0.2)
        await led.fetched(2, END, 6)
        await asyncio.sleep(WAIT_S)
        assert [one.isr for one in led.proposals] == [ALL[:2]]

    leading(work, cluster=ClusterConfig(replica_lag_time_max_ms=3_000))


@pytest.mark.parametrize("refusal", [StalePartitionError("no"), TimeoutError("who knows?")])
def test_a_proposal_that_failed_is_repeated_after_a_pause(refusal: Exception) -> None:
    async def work(led: Led) -> None:
        led.refusal = refusal
        led.leader.committed(assignment(2, ALL[:2]))
        await led.fetched(3, END, 6)
        await asyncio.sleep(0)
        began_s = led.clock.monotonic()
        while led.clock.monotonic() < began_s + 0.75 * PROPOSAL_PAUSE_S - 0.02:
            await led.fetched(3, END, 6)
            await asyncio.sleep(0.01)
        assert len(led.proposals) == 1
        await asyncio.sleep(0.5 * PROPOSAL_PAUSE_S + 0.03)
        await led.fetched(3, END, 6)
        await asyncio.sleep(0)
        assert [one.isr for one in led.proposals] == [ALL, ALL]
        # On top of a newer epoch none has failed.
        led.leader.committed(assignment(3, ALL[:2]))
        await asyncio.sleep(0)
        assert [one.partition_epoch for one in led.proposals] == [2, 2, 3]
        led.leader.committed(assignment(3, ALL[:2]))
        await led.fetched(3, END, 6)
        await asyncio.sleep(0)
        assert len(led.proposals) == 3, "the same metadata again are no news"

    leading(work)


@pytest.mark.parametrize(
    ("refusal", "in_sync", "pauses_s"),
    [
        (StalePartitionError("no"), ALL[:2], [0.1, 0.2, 0.4, 0.8, 0.8, 0.8, 0.8]),
        (StalePartitionError("no"), ALL[:1], [0.1] * 39),
        (TimeoutError("who knows?"), ALL[:2], [0.1] * 39),
    ],
    ids=["refused again and again", "refused while writes wait for it", "unknown"],
)
def test_only_a_refusal_that_nobody_waits_for_is_met_with_longer_pauses(
    refusal: Exception, in_sync: list[tuple[int, str]], pauses_s: list[float]
) -> None:
    async def work(led: Led) -> None:
        led.refusal = refusal
        for partition_epoch in (2, 3):  # Each partition epoch begins with short pauses.
            await led.fetched(2, 0)
            led.leader.committed(assignment(partition_epoch, in_sync))
            began_s, seen = led.clock.monotonic(), len(led.proposals)
            at_s: list[float] = []
            while (now_s := led.clock.monotonic() - began_s) < 4.0:
                await led.fetched(3, END, 6)
                await asyncio.sleep(0.001)
                at_s += [now_s] * (len(led.proposals) - seen)
                seen = len(led.proposals)
            pauses = [later_s - s for s, later_s in pairwise(at_s)]
            # Each fetch of the follower is up to 2 ms late for the end of a pause.
            assert pauses == pytest.approx(pauses_s[: len(pauses)], rel=0.25, abs=0.005)
            assert len(pauses) >= 0.75 * len(pauses_s)

    leading(work)


def test_a_proposal_of_unknown_outcome_is_soon_repeated_after_refusals_too() -> None:
    async def work(led: Led) -> None:
        async def repeated_after_s(failure: Exception) -> float:
            led.refusal, seen = failure, len(led.proposals)
            began_s = led.clock.monotonic()
            while len(led.proposals) == seen:
                await led.fetched(3, END, 6)
                await asyncio.sleep(0.001)
            return led.clock.monotonic() - began_s

        led.leader.committed(assignment(2, ALL[:2]))
        for _ in range(5):
            await repeated_after_s(StalePartitionError("no"))
        assert await repeated_after_s(TimeoutError("who knows?")) > 0.5
        assert await repeated_after_s(TimeoutError("who knows?")) < 0.15

    leading(work)


def test_who_waits_for_a_proposal_that_failed_once_does_not_wait_long() -> None:
    async def work(led: Led) -> None:
        led.refusal = TimeoutError("who knows?")
        led.leader.committed(assignment(2, ALL[:2]))
        began_s = led.clock.monotonic()
        while len(led.proposals) < 2:
            await led.fetched(3, END, 6)
            await asyncio.sleep(0.02)
            assert led.clock.monotonic() - began_s < 0.5
            led.refusal = None

    leading(work)


def test_the_late_answer_to_a_proposal_of_an_earlier_epoch_holds_up_nothing() -> None:
    async def work(led: Led) -> None:
        late = asyncio.get_running_loop().create_future()
        propose = led.leader.proposals._propose

        async def slow(request: messages.AlterPartition) -> None:
            led.proposals.append(request)
            await late

        led.leader.proposals._propose = slow
        led.leader.committed(assignment(2, ALL[:2]))
        await led.fetched(3, END, 6)
        await asyncio.sleep(0)
        assert len(led.proposals) == 1
        given = assignment(3, ALL[:2])
        given.replicas[2] = (3, "3b")
        led.leader.committed(given)
        late.set_exception(StalePartitionError("no"))
        await asyncio.sleep(0.01)
        led.leader.proposals._propose = propose
        await led.fetched(3, END, 6, incarnation="3b")
        await asyncio.sleep(0.01)
        assert led.proposals[1].isr == [*ALL[:2], (3, "3b")]

    leading(work)


def test_a_refusal_frees_what_waited_for_the_members_that_were_proposed() -> None:
    async def work(led: Led) -> None:
        answer_of = asyncio.get_running_loop().create_future()

        async def slow(request: messages.AlterPartition) -> None:
            await answer_of

        led.leader.proposals._propose = slow
        led.leader.committed(assignment(2, ALL[:2]))
        await led.all_agree()
        waiting = led.waiting(0)
        led.flushed(31)
        await led.fetched(2, 31)
        assert not waiting.done()
        answer_of.set_exception(StalePartitionError("no"))
        await asyncio.sleep(0.01)
        assert waiting.result().base_offset == 30

    leading(work)
