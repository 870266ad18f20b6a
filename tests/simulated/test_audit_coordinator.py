"""The audit's coordinator alone: what it writes of the metadata's changes, and of servers' lines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from proving.simulation.process import Process
from rayq import messages
from rayq.actors.access import Access
from rayq.actors.audit.coordinator import AuditCoordinator
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.core.access.audit import AuditLine, decode_line, encode_line
from rayq.core.cluster.topic_changes import AUDIT_TOPIC
from rayq.errors import (
    CoordinatorLoadingError,
    DisconnectedError,
    NotEnoughReplicasError,
    RayqError,
)
from rayq.messages.audit import AuditedChange
from rayq.storage.batch import decode_columns, split_batches
from tests.simulated.coordinator_stage import EPOCH, Led, leading

DAY_MS = 86_400_000


class Audited(Led):
    """The coordinator, and the broker whose metadata have the changes."""

    topic, topic_id = AUDIT_TOPIC, "A"

    def __init__(
        self, process: Process, log: ReplicaLog, given: messages.PartitionAssignment
    ) -> None:
        super().__init__(process, log, given)
        self.changes: list[AuditedChange] = []
        self.failure: RayqError | None = None
        self.begin()

    def begin(self) -> None:
        self.coordinator = AuditCoordinator(
            self.log,
            self.leader,
            self.given,
            access=Access(self.environment.clock),
            ask_broker=self._broker,
        )

    async def _broker(self, request: messages.Request[Any]) -> Any:
        assert isinstance(request, messages.ReadChanges)
        await asyncio.sleep(0.001)
        if self.failure is not None:
            raise self.failure
        later = [change for change in self.changes if change.time_ms > request.after_ms]
        return messages.ReadChangesResponse(later[: request.changes_max])

    def change(self, number: int, time_ms: int | None = None) -> None:
        if time_ms is None:
            time_ms = max(self.now_ms, self.changes[-1].time_ms + 1 if self.changes else 0)
        self.changes.append(
            AuditedChange(time_ms, number, "CreateTopic", f"{number}", "anna", None, "h", "")
        )

    @property
    def now_ms(self) -> int:
        return self.environment.clock.wall_ms()

    async def append(self, *lines: AuditLine) -> None:
        request = messages.AppendAudit("A", 0, EPOCH, [encode_line(line) for line in lines])
        await self.coordinator.handle(self.connection(), request)

    async def read(self) -> list[AuditLine]:
        request = messages.ReadAudit("A", 0, EPOCH, 0, 0, 1 << 20, 0)
        answer: Any = await self.coordinator.handle(self.connection(), request)
        data = memoryview(answer[1])
        return [
            decode_line(value or b"")
            for position, header in split_batches(data)
            for value in decode_columns(data, position, header).values
        ]

    async def told(self) -> list[str]:
        """The changes that committed lines tell, and how many others are lost."""
        return [
            f"lost {line.left_out}" if line.kind == "lost" else line.what
            for line in await self.read()
            if line.kind in ("change", "lost")
        ]


def playing(play: Callable[[Audited], Awaitable[None]]) -> None:
    leading(Audited, play)


def denied(principal: str = "anna", **fields: Any) -> AuditLine:
    return AuditLine(time_ms=1, kind="denied", principal=principal, **fields)


def test_changes_are_told_once_in_their_order_by_one_coordinator_after_another() -> None:
    async def play(audited: Audited) -> None:
        audited.commits()
        for number in range(1, 13):
            audited.change(number)
            await asyncio.sleep(0.3)
            if number % 4 == 0:
                audited.coordinator.end("the test ends it")
                audited.begin()
        await asyncio.sleep(3)
        assert await audited.told() == [f"{number}" for number in range(1, 13)]

    playing(play)


def test_lines_of_servers_behind_the_last_change_do_not_hide_it_from_the_next_coordinator() -> (
    None
):
    async def play(audited: Audited) -> None:
        audited.commits()
        audited.change(1)
        await asyncio.sleep(2)
        for number in range(5):
            await audited.append(denied(f"p{number}"))
        audited.coordinator.end("the test ends it")
        audited.begin()
        await asyncio.sleep(3)
        assert await audited.told() == ["1"]
        assert len(await audited.read()) == 6

    playing(play)


def test_changes_that_were_not_committed_are_told_again_once() -> None:
    async def play(audited: Audited) -> None:
        audited.commits()
        audited.change(1)
        await asyncio.sleep(2)
        audited.refuse_appends(NotEnoughReplicasError("too few"))
        audited.change(2)
        await asyncio.sleep(3)
        assert await audited.told() == ["1"], "it can be read"
        with pytest.raises((NotEnoughReplicasError, CoordinatorLoadingError)):
            await audited.append(denied())
        audited.refuse_appends(None)
        audited.change(3)
        await asyncio.sleep(3)
        assert await audited.told() == ["1", "2", "3"]

    playing(play)


def test_a_broker_that_does_not_answer_delays_the_changes_alone() -> None:
    async def play(audited: Audited) -> None:
        audited.commits()
        audited.failure = DisconnectedError("gone")
        audited.change(1)
        await asyncio.sleep(3)
        await audited.append(denied())
        assert [line.kind for line in await audited.read()] == ["denied"]
        audited.failure = None
        await asyncio.sleep(2)
        assert await audited.told() == ["1"]

    playing(play)


def test_changes_are_written_as_fast_as_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayq.messages.AUDIT_LINES_MAX", 2)

    async def play(audited: Audited) -> None:
        audited.commits()
        for number in range(1, 12):
            audited.change(number)
        await asyncio.sleep(1.5)
        assert await audited.told() == [str(number) for number in range(1, 12)]

    playing(play)


def test_changes_that_the_metadata_no_longer_have_are_a_line_with_their_number() -> None:
    async def play(audited: Audited) -> None:
        audited.commits()
        audited.change(1)
        await asyncio.sleep(2)
        audited.change(7)
        await asyncio.sleep(2)
        assert await audited.told() == ["1", "lost 5", "7"]
        counter = audited.environment.metrics.counter(
            "rayq_audit_events_dropped_total", kind="change"
        )
        assert counter.value == 5

    playing(play)


def test_an_empty_log_gets_no_changes_that_retention_would_have_deleted() -> None:
    async def play(audited: Audited) -> None:
        audited.coordinator.end("the test begins it")
        audited.commits()
        keeps_ms = audited.log.topic_config.retention_ms
        assert keeps_ms is not None
        await asyncio.sleep(1)
        audited.change(1, time_ms=audited.now_ms - keeps_ms - DAY_MS)
        audited.change(2, time_ms=audited.now_ms - keeps_ms + DAY_MS)
        audited.begin()
        await asyncio.sleep(3)
        assert await audited.told() == ["2"]

    playing(play)


def test_the_rate_is_bounded_for_all_servers_together() -> None:
    async def play(audited: Audited) -> None:
        audited.commits()
        count = 0
        for _ in range(20):
            for _server in range(10):
                await audited.append(denied(left_out=4))
                count += 5
            await asyncio.sleep(0.1)
        await asyncio.sleep(3)
        lines = await audited.read()
        assert sum(1 + line.left_out for line in lines) == count
        assert len(lines) <= 5

    playing(play)


def test_a_line_that_cannot_be_read_is_counted_and_the_others_are_written() -> None:
    async def play(audited: Audited) -> None:
        audited.commits()
        request = messages.AppendAudit("A", 0, EPOCH, [b"{", b"[]", encode_line(denied())])
        await audited.coordinator.handle(audited.connection(), request)
        assert [line.principal for line in await audited.read()] == ["anna"]
        counter = audited.environment.metrics.counter(
            "rayq_audit_events_dropped_total", kind="unknown"
        )
        assert counter.value == 2

    playing(play)
