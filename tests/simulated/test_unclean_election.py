"""A replica that was not in sync leads, and its log ends where the others' logs have not begun."""

from __future__ import annotations

from rayq.records import TopicPartition
from tests.simulated.staged import Stage, play

PLACE = TopicPartition("t", 0)


def test_others_restart_at_a_leader_that_ends_below_their_log_start() -> None:
    async def script(stage: Stage) -> None:
        run, admin, cluster = stage.process.run, stage.admin, stage.cluster
        await run(admin.create_topic("t", 1, 3, unclean_leader_election=True))
        await run(admin.reassign_partitions({PLACE: [3, 4, 5]}))  # The voters are 0, 1 and 2.
        await stage.send("t", [b"%d" % number for number in range(40)])
        stage.hosts[5].power_loss()
        await stage.until(lambda: stage.in_sync("t") == {3, 4}, "two to go on")
        for count in (60, 50):
            await stage.send("t", [b"%d" % number for number in range(count)])
        await run(admin.delete_records({PLACE: 100}))
        stage.hosts[3].power_loss()
        stage.hosts[4].power_loss()
        cluster.start_broker(5)
        await stage.until(lambda: stage.value("t").leader == 5, "the one that was behind to lead")
        cluster.start_broker(3)
        cluster.start_broker(4)
        await stage.until(lambda: stage.in_sync("t") == {3, 4, 5}, "all to be in sync again")
        await stage.send("t", [b"more"])
        await stage.until(cluster.is_replicated, "all to have the same")
        for broker in (3, 4, 5):
            held = stage.log("t", broker)
            assert held is not None
            assert (held.log.start_offset, held.log.end_offset) == (0, 41)

    play(script, brokers=6, keeps_invariants=False)
