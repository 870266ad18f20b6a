"""The faults of queues: whoever takes part in a move of records fails in the middle of it.

A move is noted, its batch is appended to the target, its end is noted. Each of that takes a few
milliseconds, and faults that come at any moment hardly ever meet them.
"""

from __future__ import annotations

import asyncio
import random

from proving.simulation.cluster import SimulatedCluster
from proving.simulation.process import Process
from proving.simulation.server_view import partition_of, queue_leaders_of, replica_log_of, role_of
from rayq.actors.replica.leader import Leader
from rayq.actors.replica.replica import Replica
from rayq.core.queues.moves import Move
from rayq.core.queues.queue_states import StateKey

STRUCK_SHARE = 0.3
APPEND_LIMIT_S = 1.0
LOOK_S = 0.0003
SHORTEST_S, LONGEST_S = 0.5, 8.0


class MoveFaults:
    """Strikes at up to `strikes_left` moves. `noted` is to be called with each move whose note is
    committed, `run` hears of them; it ends by being cancelled."""

    def __init__(self, cluster: SimulatedCluster, rng: random.Random) -> None:
        self._cluster = cluster
        self._rng = rng
        self._noted: asyncio.Queue[tuple[StateKey, Move]] = asyncio.Queue()
        self._is_struck = False
        self.strikes_left = rng.randint(1, 3)

    def noted(self, state_key: StateKey, move: Move) -> None:
        if self._cluster.loses_a_disk:
            return
        if self.strikes_left and not self._is_struck and self._rng.random() < STRUCK_SHARE:
            self._is_struck = True
            self._noted.put_nowait((state_key, move))

    async def run(self) -> None:
        while self.strikes_left:
            await self._strike(*await self._noted.get())
            self._is_struck = False

    async def _strike(self, state_key: StateKey, move: Move) -> None:
        source, target = self._source(state_key), self._target(move)
        if source is None or target is None:
            return
        what = self._rng.choice(
            ("kill the source", "kill the source", "pause the source", "kill the target",
             "pause the target", "cut the source off")
        )  # fmt: skip
        is_late = what.endswith("source") and self._rng.random() < 0.8
        if is_late and not await self._appended(move):
            return
        if self._cluster.loses_a_disk:
            return
        self.strikes_left -= 1
        where = "after its append" if is_late else "once it is noted"
        self._cluster.world.trace.note(f"MOVE {move.move_id} of {state_key}: {what} {where}")
        await self._do(what, source, target)

    async def _do(self, what: str, source: Process, target: Process) -> None:
        victim = source if what.endswith("source") else target
        lasts_s = SHORTEST_S + (LONGEST_S - SHORTEST_S) * self._rng.random() ** 2
        if what.startswith("kill"):
            victim.kill()
        elif what.startswith("pause"):
            victim.pause()
            await asyncio.sleep(lasts_s)
            victim.resume()
        else:
            network, ends = self._cluster.world.network, ([source.host], [target.host])
            network.cut(*ends, both_ways=self._rng.random() < 0.5)
            await asyncio.sleep(lasts_s)
            if self._rng.random() < 0.5 and not self._cluster.loses_a_disk:
                source.kill()
            network.heal(*ends)

    # --- who is who -------------------------------------------------------------------------------

    def _source(self, state_key: StateKey) -> Process | None:
        """The process in which the queue's leader of this partition has opened its state."""
        for process, replica in self._cluster.live_replicas():
            for leader in queue_leaders_of(replica):
                name = leader.queue.queue_id, partition_of(leader)
                if leader.open is not None and StateKey(*name) == state_key:
                    return process
        return None

    def _target(self, move: Move) -> Process | None:
        return next((process for process, _ in self._targets(move)), None)

    def _targets(self, move: Move) -> list[tuple[Process, Replica]]:
        """The leaders of the target. During an election an old leader may think so, too."""
        return [
            (process, replica)
            for process, replica in self._cluster.live_replicas()
            if isinstance(role_of(replica), Leader)
            and replica.assignment.topic_id == move.topic_id
            and replica.assignment.partition == move.partition
        ]

    async def _appended(self, move: Move) -> bool:
        """Returns once something was committed in the target since the move was noted: most likely
        its batch."""
        until_s = self._cluster.world.now_s + APPEND_LIMIT_S
        while self._cluster.world.now_s < until_s:
            for _, replica in self._targets(move):
                if replica_log_of(replica).high_watermark > move.scan_from:
                    return True
            await asyncio.sleep(LOOK_S)
        return False
