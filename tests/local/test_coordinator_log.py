"""The log of a coordinator, without its leader: which records go into which batch."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, NamedTuple

from rayq.actors.coordinator_log import CoordinatorLog
from rayq.client.environment import system_environment
from rayq.storage.batch import decode_columns, read_header
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
