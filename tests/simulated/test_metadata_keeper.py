"""What a voter confirms of its metadata log, and applies: never more than what it agrees on with
the controller (docs/protocol.md, rule 3). A keeper alone, which a test sends what controllers
send."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from proving.simulation import World
from rayq import messages
from rayq.actors.metadata import metadata_keeper
from rayq.actors.metadata.metadata_keeper import MetadataKeeper
from rayq.actors.metadata.quorum import Entry, encode_entries
from rayq.core.cluster.records import (
    EpochStarted,
    MetadataRecord,
    decode_entry,
    encode_record,
    encode_records,
)
from rayq.errors import StalePartitionError
from rayq.storage.data_directory import DataDirectory, format_directory
from rayq.storage.metadata_log import MetadataLog

PATH = "/data"
SNAPSHOT = encode_records([])


def _entries(first: int, *epochs: int) -> list[Entry]:
    return [
        (first + number, of, encode_record(EpochStarted(of, "h", 1, "c")))
        for number, of in enumerate(epochs)
    ]


class Voter:
    def __init__(self, keeper: MetadataKeeper, log: MetadataLog) -> None:
        self.keeper = keeper
        self._log = log

    @property
    def epochs(self) -> list[int]:
        """Of the records in its log."""
        entries = self._log.read(self._log.first_index, 1 << 20)
        return [epoch for _, epoch, _ in entries]

    async def append(
        self, epoch: int, previous: tuple[int, int], *epochs: int, commit: int = 0
    ) -> int:
        """The controller of `epoch` sends records of these epochs, which follow on the record
        `previous`, `(index, epoch)`. The index that the voter confirms."""
        entries = _entries(previous[0] + 1, *epochs)
        answer = await self.keeper.append(
            messages.AppendMetadata(epoch, "h", 1, *previous, commit),
            memoryview(encode_entries(entries)),
        )
        return answer.last_index

    def write(self, first: int, *epochs: int) -> None:
        """Writes records to the log alone: of a request whose task ended during its write."""
        self._log.append(_entries(first, *epochs))

    async def install(self, epoch: int, index: int, of_epoch: int) -> int:
        answer = await self.keeper.install(
            messages.InstallMetadataSnapshot(epoch, index, of_epoch), memoryview(SNAPSHOT)
        )
        return answer.last_index


def voting(work: Callable[[Voter], Coroutine[Any, Any, None]]) -> None:
    with World(seed=1) as world:
        process = world.host("voter").process("voter")
        environment = process.environment
        format_directory(environment, PATH, cluster_id="c", broker=1, secret=b"s")
        directory = DataDirectory.open(environment, PATH)
        log = MetadataLog.open(environment.disk, f"{PATH}/metadata")
        keeper = MetadataKeeper(
            environment,
            directory,
            log,
            incarnation="i",
            snapshot_records=1000,
            now_s=environment.clock.monotonic,
            on_applied=lambda records: None,
        )
        world.run(process.run(work(Voter(keeper, log))))


def test_a_voter_confirms_what_it_agrees_on_and_not_all_that_its_log_holds() -> None:
    async def work(voter: Voter) -> None:
        assert await voter.append(1, (0, 0), 1, 1, 1, 1, 1) == 5
        # The next controller has the first two of them only. What it pushes says nothing of the
        # others: they may be anything in its log.
        assert await voter.append(2, (2, 1)) == 2
        assert voter.epochs == [1, 1, 1, 1, 1]
        assert await voter.append(2, (1, 1), 1) == 2
        # It says that more is committed than it has sent by now: that may be other records.
        assert await voter.append(2, (2, 1), commit=5) == 2
        assert voter.keeper.version == 2
        assert await voter.append(2, (2, 1), 2, commit=5) == 3
        assert voter.epochs == [1, 1, 2] and voter.keeper.version == 3

    voting(work)


def test_a_voter_that_holds_other_records_in_front_takes_none_behind_them() -> None:
    async def work(voter: Voter) -> None:
        await voter.append(1, (0, 0), 1, 1, 1)
        with pytest.raises(StalePartitionError):
            await voter.append(3, (3, 2), 3, commit=4)
        with pytest.raises(StalePartitionError):
            await voter.append(3, (7, 2), 3)
        assert voter.epochs == [1, 1, 1] and voter.keeper.version == 0
        assert await voter.append(3, (1, 1), 2, 2, 3, commit=4) == 4
        assert voter.epochs == [1, 2, 2, 3] and voter.keeper.version == 4

    voting(work)


@pytest.mark.parametrize("of_epoch, stays", [(1, [1, 1]), (2, [])])
def test_records_behind_a_snapshot_stay_only_where_the_log_agrees_with_it(
    of_epoch: int, stays: list[int]
) -> None:
    async def work(voter: Voter) -> None:
        await voter.append(1, (0, 0), 1, 1, 1, 1, 1)
        assert await voter.install(2, 3, of_epoch) == 3
        assert voter.epochs == stays
        assert voter.keeper.version == 3
        # What was behind it is confirmed to nobody until the controller has sent it.
        assert await voter.append(2, (3, of_epoch), commit=5) == 3
        assert voter.keeper.version == 3
        assert await voter.append(2, (3, of_epoch), 2, commit=5) == 4
        assert voter.epochs == [2] and voter.keeper.version == 4

    voting(work)


def test_an_entry_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[bytes] = []

    def decode(data: bytes) -> list[MetadataRecord]:
        decoded.append(data)
        return decode_entry(data)

    monkeypatch.setattr(metadata_keeper, "decode_entry", decode)

    async def work(voter: Voter) -> None:
        for index in range(20):
            # What is not committed yet does not cost again with each further entry.
            await voter.append(1, (index, min(index, 1)), 1, commit=index // 2)
        await voter.append(1, (20, 1), commit=20)
        assert len(decoded) == voter.keeper.version == 20

    voting(work)


def test_what_a_write_left_in_the_log_without_an_answer_is_applied_once_it_is_committed() -> None:
    async def work(voter: Voter) -> None:
        await voter.append(1, (0, 0), 1)
        voter.write(2, 1, 1)
        assert voter.epochs == [1, 1, 1]
        assert await voter.append(1, (3, 1), 1, commit=4) == 4
        assert voter.keeper.version == 4

    voting(work)
