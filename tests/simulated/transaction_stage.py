"""A leader alone with one follower, and the coordinators of its transactions, acted by the test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from proving.simulation import World
from proving.simulation.process import Process
from rayq import messages
from rayq.actors.peers import Peers
from rayq.actors.replica.compactor import cleaner_in_steps
from rayq.actors.replica.leader import Leader
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.config import ClusterConfig
from rayq.errors import (
    AuthorizationError,
    CoordinatorLoadingError,
    RayqError,
    TimeoutError,
)
from rayq.messages.transaction_ids import is_transactional as is_transactional_id
from rayq.messages.transaction_ids import make_family
from rayq.metrics import Sample
from rayq.storage.batch import encode_batch
from rayq.storage.data_directory import PartitionDirectory
from rayq.wire.answer_room import AnswerRoom

LEADER_EPOCH = 8
FAMILY, OTHER = make_family(0, 1), make_family(0, 2)
READ_COMMITTED, READ_UNCOMMITTED = messages.READ_COMMITTED, messages.READ_UNCOMMITTED
Answer = messages.ProduceResponse | asyncio.Future[messages.ProduceResponse]


class Coordinators(Peers):
    """Answers each join when the test says so, or at once; tells the outcomes that the test set."""

    def __init__(self) -> None:  # It has no network.
        self.answers_at_once = True
        self.refusal: RayqError | None = None
        self.principal: str | None = None
        """The principal of all families; only superusers may write in those of None."""
        self.asked: list[tuple[int, int, str, int]] = []
        self.outcomes: dict[tuple[int, int], str] = {}
        self.asked_outcomes: list[tuple[int, int]] = []
        self.answers: dict[int, asyncio.Future[None]] = {}

    def answer(self, family: int = FAMILY) -> None:
        self.answers[family].set_result(None)

    async def join(
        self, family: int, epoch: int, topic_id: str, partition: int, *, principal: str | None
    ) -> None:
        self.asked.append((family, epoch, topic_id, partition))
        if not self.answers_at_once:
            self.answers[family] = asyncio.get_running_loop().create_future()
            await self.answers[family]
        if principal not in (None, self.principal):
            raise AuthorizationError(f"{principal!r} may not write in the transaction")
        if self.refusal is not None:
            raise self.refusal

    async def outcome(self, family: int, epoch: int) -> str:
        self.asked_outcomes.append((family, epoch))
        if (family, epoch) not in self.outcomes:
            raise CoordinatorLoadingError("not yet")
        return self.outcomes[family, epoch]


def batch_of(
    family: int | None, epoch: int = 0, sequence: int = 0, *,
    is_transactional: bool | None = None, is_numbered: bool = True,
) -> bytearray:
    """One record of a producer: of a transaction where its id says so, if nothing else is said."""
    return encode_batch(
        [b"v"],
        [b"%d" % (family or 0)],
        timestamps_ms=1,
        producer_id=family,
        producer_epoch=epoch,
        base_sequence=sequence if family is not None and is_numbered else None,
        is_transactional=(
            is_transactional_id(family) if is_transactional is None else is_transactional
        ),
    )


class Led:
    """A leader with one follower, in epoch 8."""

    def __init__(self, log: ReplicaLog, given: messages.PartitionAssignment) -> None:
        self.log = log
        self.coordinators = Coordinators()
        self.has_lease = True
        self.leader = Leader(
            log,
            given,
            propose=self._propose,
            has_lease=lambda: self.has_lease,
            now_s=log.environment.clock.monotonic,
            peers=self.coordinators,
        )
        self.leader.committed(given)
        self.clock = log.environment.clock

    async def _propose(self, request: messages.AlterPartition) -> None:
        pass

    async def copied(self) -> None:
        """Leader and follower have all on disk."""
        end = self.log.log.end_offset
        last_epoch = self.log.log.last_epoch
        self.leader.flushed(end)
        request = messages.ReplicaFetch(
            "id", 0, 2, "2a", LEADER_EPOCH, end, end, 0, last_epoch, 1 << 20, 0
        )
        await self.leader.followers.fetch(request)
        await self.settle()

    def produce(
        self, family: int | None = FAMILY, epoch: int = 0, sequence: int = 0, *,
        acks: int = -1, timeout_ms: int = 30_000, is_transactional: bool | None = None,
        is_numbered: bool = True, principal: str | None = None,
    ) -> Answer:
        payload = batch_of(
            family, epoch, sequence, is_transactional=is_transactional, is_numbered=is_numbered
        )
        request = messages.Produce("id", 0, LEADER_EPOCH, acks, timeout_ms)
        return self.leader.produce(request, memoryview(payload), principal=principal)

    def waiting(
        self, family: int | None = FAMILY, epoch: int = 0, sequence: int = 0,
        timeout_ms: int = 30_000, principal: str | None = None,
    ) -> asyncio.Future[messages.ProduceResponse]:
        found = self.produce(family, epoch, sequence, timeout_ms=timeout_ms, principal=principal)
        assert isinstance(found, asyncio.Future)
        return found

    async def written(self, family: int | None = FAMILY, epoch: int = 0, sequence: int = 0) -> int:
        """The offset of a batch that is committed."""
        answer = self.produce(family, epoch, sequence)
        await self.settle()
        await self.copied()
        if isinstance(answer, asyncio.Future):
            answer = await asyncio.wait_for(answer, 1)
        return answer.base_offset

    async def settle(self) -> None:
        await asyncio.sleep(0.01)

    def mark(
        self, epoch: int = 0, *, family: int = FAMILY, is_commit: bool = True, coordinator: int = 3
    ) -> messages.Done | asyncio.Future[messages.Done]:
        return self.leader.transactions.write_marker(
            messages.WriteMarker("id", 0, LEADER_EPOCH, family, epoch, is_commit, coordinator)
        )

    def seal(
        self, epoch: int = 0
    ) -> messages.SealPartitionResponse | asyncio.Future[messages.SealPartitionResponse]:
        return self.leader.transactions.seal(
            messages.SealPartition("id", 0, LEADER_EPOCH, FAMILY, epoch)
        )

    async def ended(
        self, epoch: int = 0, *, family: int = FAMILY, is_commit: bool = True
    ) -> None:
        answer = self.mark(epoch, family=family, is_commit=is_commit)
        await self.copied()
        if isinstance(answer, asyncio.Future):
            await asyncio.wait_for(answer, 1)

    def fetching(
        self, offset: int, isolation: int = READ_COMMITTED, *, wait_ms: int = 0,
        bytes_max: int = 1 << 20,
    ) -> Awaitable[tuple[messages.FetchResponse, bytes]]:
        request = messages.Fetch(
            "id", 0, LEADER_EPOCH, offset, None, bytes_max, wait_ms, isolation
        )
        return self.leader.reads.fetch(request, AnswerRoom(lambda: True))

    async def listed(self, timestamp_ms: int, isolation: int = READ_COMMITTED) -> int | None:
        request = messages.ListOffsets("id", 0, LEADER_EPOCH, timestamp_ms, isolation)
        return (await self.leader.reads.list_offsets(request)).offset

    def described(self, since: int | None = None) -> messages.DescribeOpenTransactionsResponse:
        return self.leader.reads.describe_open_transactions(
            messages.DescribeOpenTransactions("id", 0, LEADER_EPOCH, since)
        )

    async def deleted(self, before: int | None) -> int:
        request = messages.DeleteRecords("id", 0, LEADER_EPOCH, before, 0)
        try:
            return (await self.leader.delete_records(request)).log_start_offset
        except TimeoutError:  # The follower does not say where its log starts.
            return self.log.log.start_offset

    async def compact(self) -> None:
        """Compacts all that is decided."""
        log, environment = self.log.log, self.log.environment
        now_ms = environment.clock.wall_ms() + 1_000
        assert log.roll_to_clean(now_ms)
        await self.log.flusher.checkpoint()
        cleaning = log.plan_cleaning(
            now_ms, memory_bytes=1 << 20, bytes_per_s=1 << 30, at_once=True
        )
        assert cleaning is not None
        result = await cleaner_in_steps(environment)(cleaning.job)
        assert await self.log.swap(cleaning, result, now_ms)

    @property
    def end(self) -> int:
        return self.log.log.end_offset

    async def look(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self.leader.transactions.tick(self.clock.monotonic())
        await self.settle()

    def measured(self) -> dict[str, float]:
        samples: list[Sample] = self.leader.transactions.measure(self.clock.monotonic())
        return {sample.name.removeprefix("rayq_partition_"): sample.value for sample in samples}


def assignment(
    config: dict[str, object] | None = None, last_unclean_epoch: int | None = None
) -> messages.PartitionAssignment:
    members = [(1, "1a"), (2, "2a")]
    return messages.PartitionAssignment(
        "t", "id", 0, config or {}, 1, "1a", "h", 1, LEADER_EPOCH, 1, last_unclean_epoch,
        members, [*members],
    )


def leading(
    work: Callable[[Led], Awaitable[None]],
    *,
    config: dict[str, object] | None = None,
    last_unclean_epoch: int | None = None,
    before: Callable[[ReplicaLog], None] = lambda log: None,
) -> None:
    given = assignment(config, last_unclean_epoch)

    async def script(process: Process) -> None:
        environment = process.environment
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
        before(log)
        led = Led(log, given)
        await led.copied()
        await work(led)

    with World(seed=1) as world:
        process = world.host("broker").process("replica")
        world.run(process.run(script(process)), limit_s=3_600)
        assert world.errors == []
