"""A move of a queue asks the leader of its target, which a test plays."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from rayq import messages
from rayq.actors.queues.numbered_moves import RESTARTS_MAX, MoveTargets, Target, unlooked
from rayq.core.queues.moves import Move
from rayq.errors import (
    LogTruncatedError,
    OffsetNotAvailableError,
    OffsetOutOfRangeError,
    ProtocolError,
    RayqError,
)

MOVE = Move(
    move_id=1, outcome="dead", topic_id="T", partition=0, producer_id=5, producer_epoch=1,
    scan_from=9, scan_epoch=1, crc=7, records=(),
)


class Leader:
    def __init__(self, error: RayqError, offset: int | None) -> None:
        self.error, self.offset = error, offset
        self.fetches = 0

    async def exchange(self, topic_id: str, partition: int, build: Any) -> Any:
        self.fetches += 1
        assert self.fetches < 20, "it is asked forever"
        raise self.error

    async def ask_leader(self, topic_id: str, partition: int, build: Any) -> Any:
        return messages.ListOffsetsResponse(self.offset, None)


@pytest.mark.parametrize("kind", [OffsetOutOfRangeError, LogTruncatedError])
def test_a_leader_that_refuses_where_its_log_begins_is_asked_again_later(
    kind: type[RayqError],
) -> None:
    leader = Leader(kind("no"), 3)
    with pytest.raises(OffsetNotAvailableError):
        asyncio.run(MoveTargets(cast(Any, leader)).look(MOVE, unlooked(MOVE)))
    assert leader.fetches == RESTARTS_MAX + 1


def test_a_leader_has_to_say_where_its_log_ends() -> None:
    targets = MoveTargets(cast(Any, Leader(OffsetOutOfRangeError("no"), None)))
    with pytest.raises(ProtocolError):
        asyncio.run(targets.end_of(Target("T", 0)))
