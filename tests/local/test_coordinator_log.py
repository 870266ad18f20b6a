"""The log of a coordinator, without its leader: which records go into which batch."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from rayq.actors import coordinator_log
from rayq.actors.coordinator_log import CoordinatorLog
from rayq.actors.signal import Signal
from rayq.client.environment import system_environment
from rayq.storage.batch import decode_columns, encode_batch, read_header, stamp
from rayq.wire import messages


class _Record(NamedTuple):
    key: str
    value: str


def test_records_on_which_no_answer_is_based_go_with_the_next_decision() -> None:
    batches: list[list[str]] = []

    def produce(request: messages.Produce, batch: memoryview) -> messages.ProduceResponse:
        columns = decode_columns(bytes(batch), 0, read_header(batch))
        batches.append([(key or b"").decode() for key in columns.keys or ()])
        return messages.ProduceResponse(0, 0, 0, False)

    async def story() -> None:
        replica_log: Any = SimpleNamespace(environment=system_environment(None))
        log: CoordinatorLog[_Record] = CoordinatorLog(
            replica_log,
            SimpleNamespace(leader_epoch=1, produce=produce),  # type: ignore[arg-type]
            SimpleNamespace(topic_id="t", partition=0),  # type: ignore[arg-type]
            encode=lambda record: (record.key.encode(), record.value.encode()),
            on_failure=lambda error: None,
        )
        log.append_later([_Record("a", "1")])
        log.append_later([_Record("b", "1")])
        await log.until_committed()
        await asyncio.sleep(0)
        assert batches == [], "nobody waits for them"
        log.append([_Record("c", "1"), _Record("d", "1")])
        await log.until_committed()
        assert batches == [["a", "b", "c", "d"]]
        log.write_rest()
        log.append_later([_Record("e", "1")])
        log.write_rest()
        await log.until_committed()
        assert batches[1:] == [["e"]]

    asyncio.run(story())


def test_a_new_coordinator_reads_all_that_there_is_piece_by_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coordinator_log, "READ_BYTES", 1)
    batches = []
    for first in range(0, 6, 2):
        values: list[bytes | None] = [b"%d" % one for one in (first, first + 1)]
        batch = encode_batch(values, timestamps_ms=1)
        stamp(batch, 0, base_offset=first, leader_epoch=1, append_time_ms=1)
        batches.append(bytes(batch))

    async def read(offset: int, limit_offset: int, bytes_max: int) -> tuple[bytes, int]:
        assert (limit_offset, bytes_max) == (6, 1)
        return batches[offset // 2], offset + 2

    async def story() -> None:
        replica_log: Any = SimpleNamespace(
            environment=system_environment(None), read=read, high_watermark=4,
            log=SimpleNamespace(start_offset=0, end_offset=6), committed=Signal(),
        )
        leader: Any = SimpleNamespace(leader_epoch=1, state=SimpleNamespace(may_serve=True))
        log: CoordinatorLog[_Record] = CoordinatorLog(
            replica_log, leader, SimpleNamespace(topic_id="t", partition=0),  # type: ignore[arg-type]
            encode=lambda record: (b"", None), on_failure=lambda error: None,
        )
        found: list[bytes | None] = []
        replay = asyncio.ensure_future(log.replay(lambda key, value: found.append(value)))
        await asyncio.sleep(0)
        assert found == [], "its end is not committed"
        replica_log.high_watermark = 6
        replica_log.committed.notify()
        assert await replay == 6
        assert found == [b"%d" % one for one in range(6)]

    asyncio.run(story())
