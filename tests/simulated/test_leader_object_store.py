"""What a leader does with the part of it that stores records in the object store: what it tells
that part, what it asks it, and when it gives it up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from rayq import messages
from rayq.errors import NotLeaderError, RemoteBacklogError
from rayq.messages.remote_pointer import RemotePointer
from tests.simulated.leader_stage import END, LEADER_EPOCH, Led, assignment, leading

POINTER = RemotePointer(1, LEADER_EPOCH, "manifest", 0, 10, 2, 999)
DESCRIBE = messages.DescribeRemoteStorage("id", 0, LEADER_EPOCH)
VERIFY = messages.VerifyRemote("id", 0, LEADER_EPOCH, 0, deep=False, repair=False)
VERIFIED = messages.VerifyRemoteResponse(3, None, [], [])
DESCRIBED = messages.DescribeRemoteStorageResponse(POINTER, 1, 2, 3, 4, 5, "trouble")


class PlayedRemote:
    """Notes what the leader tells it."""

    def __init__(self, led: Led) -> None:
        self.told: list[Any] = []
        self.has_room = True
        self.verification = SimpleNamespace(verify=self._verify)
        self._led = led
        self.loses_lease = False
        led.leader.remote = cast(Any, self)

    def committed(self, given: messages.PartitionAssignment) -> None:
        self.told.append(given)

    def end(self, reason: str) -> None:
        self.told.append(reason)

    def check_backlog(self) -> None:
        if not self.has_room:
            raise RemoteBacklogError("full")

    def describe(self) -> messages.DescribeRemoteStorageResponse:
        return DESCRIBED

    async def _verify(self, request: messages.VerifyRemote) -> messages.VerifyRemoteResponse:
        assert request == VERIFY
        self._led.has_lease = not self.loses_lease
        return VERIFIED


def test_the_part_is_told_of_each_commit_until_the_topic_has_given_up_its_objects() -> None:
    async def work(led: Led) -> None:
        remote = PlayedRemote(led)
        has_objects = assignment(2, remote=POINTER)
        led.leader.committed(has_objects)
        led.log.configure({"remote_storage": True})
        gets_objects = assignment(3)
        led.leader.committed(gets_objects)
        assert remote.told == [has_objects, gets_objects]
        assert led.leader.remote is remote
        led.log.configure({"remote_storage": False})
        led.leader.committed(assignment(4))
        assert remote.told[2:] == ["the topic gave up its objects"]
        assert led.leader.remote is None
        led.leader.committed(assignment(5))
        led.leader.end("another leads")
        assert len(remote.told) == 3

    leading(work)


def test_the_part_ends_with_its_leader() -> None:
    async def work(led: Led) -> None:
        remote = PlayedRemote(led)
        led.leader.end("another leads")
        assert remote.told == ["another leads"]

    leading(work)


def test_nothing_is_taken_while_too_much_waits_for_the_store() -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        remote = PlayedRemote(led)
        remote.has_room = False
        with pytest.raises(RemoteBacklogError):
            led.produce(0)
        assert led.log.log.end_offset == END
        remote.has_room = True
        led.produce(0)
        assert led.log.log.end_offset == END + 1

    leading(work)


def test_the_part_answers_for_the_store_as_long_as_its_leader_leads() -> None:
    async def work(led: Led) -> None:
        remote = PlayedRemote(led)
        assert led.leader.describe_remote_storage(DESCRIBE) is DESCRIBED
        assert await led.leader.verify_remote(VERIFY) is VERIFIED
        remote.loses_lease = True
        with pytest.raises(NotLeaderError):
            await led.leader.verify_remote(VERIFY)

    leading(work)
