"""A new request to a coordinator takes one declaration, and one row in the table of its decisions.
The rest (who may send it, where it is answered, waiting for the commit) follows."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from rayq.core.decision import Decision, Times
from rayq.core.groups.decisions import decides
from rayq.core.groups.records import GroupRecord, GroupValue, Record
from rayq.core.groups.state import GroupState
from rayq.messages import Response, ToGroupCoordinator
from rayq.messages.acls import Rights
from rayq.messages.base import GroupName
from tests.simulated.group_stage import WHERE, Groups, coordinating


class Opened(Response, frozen=True):
    groups: int


class OpenGroup(ToGroupCoordinator[Opened], frozen=True):
    api: ClassVar[int] = 38
    rights: ClassVar[Rights] = ()
    group: GroupName


@decides(OpenGroup)
def _open_group(
    state: GroupState, request: OpenGroup, times: Times
) -> Decision[Record, Opened]:
    opened = GroupRecord(request.group, GroupValue(empty_since_ms=times.now_ms))
    return Decision([opened], lambda: Opened(len(state.groups)))


def test_a_request_to_a_coordinator_is_declared_and_decided_and_nothing_else() -> None:
    async def work(of: Groups) -> None:
        of.commits()
        assert await of.ask(OpenGroup(*WHERE, "g")) == Opened(1)
        assert [one.group for one in await of.list_groups()] == ["g"]
        of.waits()
        answer = asyncio.ensure_future(of.ask(OpenGroup(*WHERE, "h")))
        await asyncio.sleep(5)
        assert not answer.done(), "its record is not committed"
        of.commits()
        assert await answer == Opened(2)
        of.begin_again()
        assert [one.group for one in await of.list_groups()] == ["g", "h"]

    coordinating(work)
