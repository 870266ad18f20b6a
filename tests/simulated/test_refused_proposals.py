"""A leader whose proposals of an in-sync set are refused does not repeat them with every fetch."""

from __future__ import annotations

import pytest

from proving.simulation.server_view import role_of
from rayq import messages
from rayq.actors.replica.leader import Leader
from rayq.errors import StalePartitionError
from tests.simulated.staged import Stage, play

REFUSED_FOR_S = 3.0


@pytest.mark.slow
def test_a_refused_proposal_is_repeated_after_a_pause_and_accepted_at_last() -> None:
    async def script(stage: Stage) -> None:
        cluster = stage.cluster
        await stage.process.run(stage.admin.create_topic("t", 1, 3))
        await stage.send("t", [b"one"])
        value = stage.value("t")
        away = next(one for one in value.replicas if one != value.leader)
        cluster.kill_broker(away)
        await stage.until(lambda: away not in stage.in_sync("t"), "it to leave the set")
        leader = next(
            role
            for _, replica in cluster.live_replicas()
            if isinstance(role := role_of(replica), Leader)
        )
        propose, refused = leader.proposals._propose, list[messages.AlterPartition]()

        async def refuse(request: messages.AlterPartition) -> None:
            refused.append(request)
            raise StalePartitionError("not now")

        leader.proposals._propose = refuse
        cluster.start_broker(away)
        await stage.until(lambda: len(refused) > 0, "a proposal to take it in again")
        for _ in range(int(REFUSED_FOR_S * 100)):  # A fetch of the follower follows each record.
            await stage.send("t", [b"more"])
            await stage.pause(0.01)
        # 0, 0.1, 0.3, 0.7, 1.5, 2.3 ... s after the first; three hundred sends take up to 5 s.
        assert 3 <= len(refused) <= 9
        leader.proposals._propose = propose
        await stage.until(lambda: away in stage.in_sync("t"), "it to be in sync", limit_s=2)

    play(script)
