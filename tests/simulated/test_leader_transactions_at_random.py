"""Leaders of one partition, one after the other, with producers and a coordinator that repeat, delay
and reorder all they say: what the log holds then, and what readers may see."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TypeVar

import pytest

from proving.simulation import World
from proving.simulation.process import Process
from rayq import messages
from rayq.actors.peers import Peers
from rayq.actors.replica.leader import Leader
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.config import ClusterConfig
from rayq.errors import RayqError, TransactionEndedError
from rayq.messages.transaction_ids import make_family
from rayq.storage.batch import BatchHeader, encode_batch, split_batches
from rayq.storage.data_directory import PartitionDirectory

FAMILIES = make_family(0, 1), make_family(0, 2)
STEPS = 400
MEMBERS = [(1, "1a"), (2, "2a")]
Key = tuple[int, int]
T = TypeVar("T")


class Coordinator(Peers):
    """It decides at once; its answers take their time, and it speaks on when it was replaced."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.epochs = dict.fromkeys(FAMILIES, 0)
        self.members: dict[Key, None] = {}
        self.outcomes: dict[Key, bool] = {}

    async def join(
        self, family: int, epoch: int, topic_id: str, partition: int, *, principal: str | None
    ) -> None:
        if epoch != self.epochs[family]:
            raise TransactionEndedError("over")
        self.members[family, epoch] = None
        await asyncio.sleep(self._chance.choice((0, 0.01, 0.2)))

    def end(self, family: int) -> None:
        self.outcomes[family, self.epochs[family]] = self._chance.random() < 0.5
        self.epochs[family] += 1


class Partition:
    """One log; `lead` begins the next leader epoch, after what was not committed may be lost."""

    def __init__(self, log: ReplicaLog, chance: random.Random) -> None:
        self.log = log
        self.chance = chance
        self.coordinator = Coordinator(chance)
        self.epoch = 0
        self.sent: dict[Key, int] = {}
        """How many batches of a transaction were ever sent."""
        self.acknowledged: dict[tuple[int, int, int], int] = {}
        self.marked: set[Key] = set()
        self.stable_offset = 0

    async def lead(self) -> None:
        if self.epoch:
            self.leader.end("another leads")
            async with self.log.flush_lock:
                cut = self.chance.choice((self.log.high_watermark, self.log.log.end_offset))
                self.log.log.truncate(cut)
        self.epoch += 1
        given = messages.PartitionAssignment(
            "t", "id", 0, {}, 1, "1a", "h", 1, self.epoch, self.epoch, None, MEMBERS, [*MEMBERS]
        )

        async def propose(request: messages.AlterPartition) -> None:
            pass

        self.leader = Leader(
            self.log, given, propose=propose, has_lease=lambda: True,
            now_s=self.log.environment.clock.monotonic, peers=self.coordinator,
        )
        self.leader.committed(given)
        await self.copy(self.log.high_watermark)

    async def copy(self, offset: int) -> None:
        """The follower's log ends at `offset`, as far as the leader's disk does not hold it up."""
        log = self.log.log
        self.leader.flushed(log.end_offset)
        last_epoch = log.epochs.epoch_of(offset - 1) if offset else None
        request = messages.ReplicaFetch(
            "id", 0, 2, "2a", self.epoch, offset, offset, 0, last_epoch, 1 << 20, 0
        )
        await self.leader.followers.fetch(request)

    def send(self, family: int, epoch: int, sequence: int) -> None:
        payload = encode_batch(
            [b"v"], timestamps_ms=1, producer_id=family, producer_epoch=epoch,
            base_sequence=sequence, is_transactional=True,
        )
        request = messages.Produce("id", 0, self.epoch, -1, self.chance.choice((50, 60_000)))

        def acknowledged(answer: messages.ProduceResponse) -> None:
            assert answer.base_offset < self.log.high_watermark
            number = (family, epoch, sequence)
            assert self.acknowledged.setdefault(number, answer.base_offset) == answer.base_offset

        self._ask(lambda: self.leader.produce(request, memoryview(payload), principal=None), acknowledged)

    def mark(self, key: Key) -> None:
        request = messages.WriteMarker(
            "id", 0, self.epoch, *key, self.coordinator.outcomes[key], coordinator_epoch=1
        )

        def acknowledged(answer: messages.Done) -> None:
            committed = self.headers(self.log.high_watermark)
            is_overtaken = any(
                family == key[0] and epoch > key[1] for family, epoch in map(key_of, committed)
            )
            assert is_overtaken or key in markers(committed)
            self.marked.add(key)

        self._ask(lambda: self.leader.transactions.write_marker(request), acknowledged)

    def _ask(self, ask: Callable[[], T | asyncio.Future[T]], then: Callable[[T], None]) -> None:
        try:
            answer = ask()
        except RayqError:
            return
        if not isinstance(answer, asyncio.Future):
            then(answer)
            return

        def answered(future: asyncio.Future[T]) -> None:
            if future.exception() is None:
                then(future.result())
            else:
                assert isinstance(future.exception(), RayqError), future.exception()

        answer.add_done_callback(answered)

    def headers(self, end_offset: int) -> list[BatchHeader]:
        """The log up to `end_offset`."""
        data = self.log.log.plan_read(0, self.log.log.end_offset, 1 << 30).run().data
        found = [header for _, header in split_batches(data)]
        return [header for header in found if header.base_offset < end_offset]

    def check(self) -> None:
        """The last stable offset is as the bytes say, and does not go back."""
        high_watermark = self.log.high_watermark
        committed = self.headers(high_watermark)
        ended = markers(committed)
        undecided = [
            header.base_offset
            for header in committed
            if not header.is_control and key_of(header) not in ended
        ]
        assert self.log.last_stable_offset == min([high_watermark, *undecided])
        assert self.log.last_stable_offset >= self.stable_offset
        self.stable_offset = self.log.last_stable_offset

    async def step(self) -> None:
        chance, coordinator = self.chance, self.coordinator
        family = chance.choice(FAMILIES)
        what = chance.random()
        if what < 0.5:
            key = family, coordinator.epochs[family]
            if chance.random() < 0.1 and self.sent:
                key = chance.choice([*self.sent])  # It comes late.
            sent = self.sent.setdefault(key, 0)
            waiting = [number for number in range(sent) if (*key, number) not in self.acknowledged]
            sequence = chance.choice([*waiting, sent, chance.randint(0, sent)])
            self.sent[key] = max(sent, sequence + 1)
            self.send(*key, sequence)
        elif what < 0.53:
            coordinator.end(family)
        elif what < 0.7:
            ended = [key for key in coordinator.members if key in coordinator.outcomes]
            waiting_for = [key for key in ended if key not in self.marked]
            if ended:
                self.mark(chance.choice(waiting_for or ended))
        elif what < 0.85:
            await self.copy(chance.randint(self.log.high_watermark, self.log.log.end_offset))
        elif what < 0.88:
            await self.lead()
        else:
            await asyncio.sleep(chance.choice((0, 0.01, 0.3)))
            self.leader.expire_waiters(self.log.environment.clock.monotonic())

    async def settle(self) -> None:
        for family in FAMILIES:
            self.coordinator.end(family)
        for _ in range(100):
            for key in [*self.coordinator.members]:
                if key not in self.marked:
                    self.mark(key)
            await asyncio.sleep(0.3)
            await self.copy(self.log.log.end_offset)


def key_of(header: BatchHeader) -> Key:
    assert header.producer_id is not None
    return header.producer_id, header.producer_epoch


def markers(headers: list[BatchHeader]) -> set[Key]:
    return {key_of(header) for header in headers if header.is_control}


def check_log(headers: list[BatchHeader], outcomes: dict[Key, bool]) -> None:
    """Each transaction is whole, apart from others of its family, and ends by one marker."""
    ended: set[Key] = set()
    opened: dict[int, int] = {}
    sequences: dict[Key, int] = {}
    for header in headers:
        family, epoch = key = key_of(header)
        assert key not in ended, f"{key} goes on behind its marker"
        assert opened.get(family) in (None, epoch), f"{key} within another transaction"
        if header.is_control:
            assert header.is_abort != outcomes[key]
            ended.add(key)
            opened.pop(family, None)
        else:
            assert header.base_sequence == sequences.get(key, 0)
            sequences[key] = header.base_sequence + 1
            opened[family] = epoch
    assert opened == {}


@pytest.mark.parametrize(
    "seed",
    [*range(10), *(pytest.param(more, marks=pytest.mark.thorough) for more in range(10, 30))],
)
def test_transactions_are_whole_and_end_once_whatever_is_repeated_late_or_lost(seed: int) -> None:
    async def script(process: Process) -> None:
        environment = process.environment
        given = messages.PartitionAssignment(
            "t", "id", 0, {}, None, None, None, None, 0, 0, None, MEMBERS, [*MEMBERS]
        )
        log = ReplicaLog(
            environment, ClusterConfig(), given, broker=1, incarnation="1a",
            on_flushed=lambda _: None, on_failure=lambda: None,
        )
        await log.open(
            PartitionDirectory.open(
                environment, "/data/t-0", topic="t", topic_id="id", partition=0, incarnation="1a",
                pid_start_time=1,
            )
        )
        partition = Partition(log, random.Random(seed))
        await partition.lead()
        for _ in range(STEPS):
            await partition.step()
            partition.check()
        await partition.settle()
        partition.check()
        headers = partition.headers(log.log.end_offset)
        check_log(headers, partition.coordinator.outcomes)
        assert log.last_stable_offset == log.log.end_offset
        at = {(*key_of(header), header.base_sequence): header.base_offset for header in headers}
        assert all(at[number] == offset for number, offset in partition.acknowledged.items())
        assert len(partition.acknowledged) > 10 and len(partition.marked) > 2

    with World(seed=seed) as world:
        process = world.host("broker").process("replica")
        world.run(process.run(script(process)), limit_s=3_600)
        assert world.errors == []
