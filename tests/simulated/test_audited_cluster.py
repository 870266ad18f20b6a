"""Changes of a whole cluster in the simulated world, while servers die: each is one line of the
audit, in its order."""

from __future__ import annotations

import asyncio

import pytest

from proving.simulation import World
from proving.simulation.cluster import SimulatedCluster
from proving.simulation.invariants import Invariants
from rayq.actors.audit.coordinator import NEVER, AuditCoordinator
from rayq.client.admin.admin import AsyncAdmin
from rayq.client.client import Client
from rayq.config import ClusterConfig
from rayq.core.cluster.topic_changes import AUDIT_TOPIC

CHANGES = 60


def play(seed: int) -> str | None:
    """Plays a seed. Returns the first thing that is wrong."""
    with World(seed) as world:
        config = ClusterConfig(metadata_snapshot_records=20)
        cluster = SimulatedCluster(world, config=config)
        invariants = Invariants(cluster)
        world.loop.observer = invariants.observe
        try:
            with invariants.judge.judging():
                world.run(_script(world, cluster, invariants), limit_s=600)
            assert world.errors == []
            invariants.check_ends()
        except AssertionError as error:
            return str(error)
    return None


async def _script(world: World, cluster: SimulatedCluster, invariants: Invariants) -> None:
    await cluster.start()
    process = world.host("client").process("client")
    changed = 0

    async def change() -> None:
        nonlocal changed
        client = Client(
            process.environment, cluster.client_identity, cluster.endpoints, cluster.config
        )
        admin = AsyncAdmin(client)
        await admin.create_principal("anna", timeout_s=60)
        await admin.create_topic("t", 1, timeout_s=60)
        for number in range(CHANGES - 2):
            await admin.alter_topic_config("t", retention_ms=1_000_000 + number, timeout_s=60)
            changed += 1
            await asyncio.sleep(0.3)

    def leader() -> int:
        state = invariants.state
        topic = state.topic_named(AUDIT_TOPIC)
        value = None if topic is None else topic.partitions[0].value
        return 0 if value is None or value.leader is None else value.leader

    async def break_things() -> None:
        await cluster.wait_until(lambda: changed > 10, "the first changes")
        for replica in cluster.replica_processes(leader()):
            replica.kill()
        await cluster.wait_until(lambda: changed > 22, "changes after a leader's end")
        cluster.kill_controller()
        await cluster.wait_until(lambda: changed > 34, "changes without the controller")
        lost = leader()
        cluster.hosts[lost].power_loss()
        await asyncio.sleep(1)
        cluster.start_broker(lost)
        await cluster.wait_until(lambda: changed > 46, "changes after a loss of power")
        for replica in cluster.replica_processes(leader()):
            replica.pause()
            world.loop.call_later(4, replica.resume, context=world.loop.root.context)

    await asyncio.gather(process.run(change()), break_things())
    await cluster.wait_until(
        lambda: invariants.audit.told >= CHANGES and not invariants.audit.untold,
        "all changes are in the audit",
    )
    assert invariants.audit.told == CHANGES


@pytest.mark.parametrize("seed", range(3))
def test_each_change_is_one_line_although_leaders_controllers_and_power_fail(seed: int) -> None:
    assert play(seed) is None


@pytest.mark.parametrize("begins_at", ["the beginning", "now"])
def test_the_judge_finds_a_coordinator_that_does_not_continue_where_its_log_ends(
    begins_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = AuditCoordinator._load

    async def mutated(self: AuditCoordinator) -> None:
        await load(self)
        self.state = NEVER
        if begins_at == "now":
            self.state = self._environment.clock.wall_ms(), 0

    monkeypatch.setattr(AuditCoordinator, "_load", mutated)
    assert "is told after change" in (play(0) or "")
