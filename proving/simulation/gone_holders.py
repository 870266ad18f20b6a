"""Checks that the locks of a consumer that is gone are free within a second, and not before.

A leader hears of a holder by its requests, and of its end by the end of their connections. From the
last of these on a second is promised. The judge notes which connections named a holder, and looks
at the locks of every open queue now and then: the code that it judges has no part in that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Set
from unittest import mock

from proving.simulation.loop import START_S
from proving.simulation.owner import OPEN
from proving.simulation.process import Process
from proving.simulation.server_view import can_hear, holders_of
from rayq.actors.queues.leader import QueueLeader
from rayq.actors.queues.open_queue import OpenQueue
from rayq.actors.queues.waiting import LockOwners
from rayq.wire.peer import Peer

PROMISED_S = 1.0
"""Time by docs/promises.md and rule 56; not the constant of the code that is judged."""
EARLY_S = 0.01
"""Timers fire as exactly as that."""
LOOK_S = 0.02
"""The interval at which the judge looks."""
SLACK_S = 0.25
"""A process may be busy just then."""


class GoneHolders:
    """See the module. `judging` wraps the servers' methods; `look` is to be called every `LOOK_S`;
    `problems` gets what was found."""

    def __init__(self, problems: list[str]) -> None:
        self._problems = problems
        self._connections: dict[LockOwners, dict[str, list[asyncio.Future[None]]]] = {}
        """The connections that have named each holder, of each leader."""
        self._ended_s: dict[asyncio.Future[None], float] = {}
        """The time at which a leader heard that a connection had ended."""
        self._waits_s: dict[tuple[OpenQueue, str], float] = {}
        """Time since which an opening that could act has had locks of a holder that is gone."""
        self._looked_s = 0.0

    @contextlib.contextmanager
    def judging(self) -> Iterator[None]:
        """Notes who is heard and whose locks are freed, for the length of a `with` block."""
        heard, free_holders = LockOwners.heard, OpenQueue.free_holders
        closed = vars(LockOwners)["_closed"]

        def note_heard(holders: LockOwners, holder: str, peer: Peer) -> None:
            named = self._connections.setdefault(holders, {}).setdefault(holder, [])
            if peer.closed not in named:
                named.append(peer.closed)
            heard(holders, holder, peer)

        def note_closed(holders: LockOwners, connection: asyncio.Future[None]) -> None:
            self._ended_s[connection] = asyncio.get_running_loop().time()
            closed(holders, connection)

        def judge_freed(opened: OpenQueue, holders: Set[str]) -> None:
            for holder in sorted(_with_locks(opened) & holders):
                self._judge_freed(opened, holder)
            free_holders(opened, holders)

        with (
            mock.patch.object(LockOwners, "heard", note_heard),
            mock.patch.object(LockOwners, "_closed", note_closed),
            mock.patch.object(OpenQueue, "free_holders", judge_freed),
        ):
            yield

    def look(self, leaders: Iterable[tuple[Process, QueueLeader]]) -> None:
        """Looks at the leaders of all processes that live."""
        now_s = self._looked_s = asyncio.get_running_loop().time()
        waits_s: dict[tuple[OpenQueue, str], float] = {}
        for process, leader in leaders:
            named, opened = self._connections.get(leader.owners, {}), leader.open
            if opened is None or process.gate != OPEN or not can_hear(leader):
                # It begins again, stands still, or has no lease: its time counts from the end of
                # that.
                continue
            for holder in _with_locks(opened):
                # What a new leader has not heard of it cannot miss.
                if holder not in named or self._gone_since_s(named[holder], now_s) is None:
                    continue
                since_s = waits_s[opened, holder] = self._waits_s.get((opened, holder), now_s)
                if now_s - since_s > PROMISED_S + SLACK_S:
                    self._problems.append(
                        f"{leader.where}: at {now_s - START_S:.3f} {holder} still has locks, and "
                        f"has had no connection since {since_s - START_S:.3f}"
                    )
                    del named[holder]  # It is told once.
        self._waits_s = waits_s

    def _gone_since_s(
        self, connections: list[asyncio.Future[None]], now_s: float
    ) -> float | None:
        """Returns the time since which all of these are closed. None: one of them is open."""
        if not all(connection.done() for connection in connections):
            return None
        return max(self._ended_s.get(connection, now_s) for connection in connections)

    def _judge_freed(self, opened: OpenQueue, holder: str) -> None:
        now_s = asyncio.get_running_loop().time()
        named = self._connections.get(holders_of(opened), {})
        if holder not in named or now_s - self._looked_s > 2 * LOOK_S:
            return  # It was told of, or the run has ended.
        gone_since_s = self._gone_since_s(named[holder], now_s)
        if gone_since_s is None or now_s - gone_since_s < PROMISED_S - EARLY_S:
            since = "has one"
            if gone_since_s is not None:
                since = f"lost it at {gone_since_s - START_S:.3f}"
            self._problems.append(
                f"{opened.queue} in {opened.topic}-{opened.partition}: the locks of {holder} are "
                f"freed for want of a connection at {now_s - START_S:.3f}, and it {since}"
            )


def _with_locks(opened: OpenQueue) -> set[str]:
    """The holders that have locks."""
    return {holder for block in opened.state.offsets.blocks.values() for holder in block.holders}
