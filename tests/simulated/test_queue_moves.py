"""Moves out of a queue, with its keeper and the leaders of the targets played: whatever dies and
whichever answer is lost, a record gets into its target once."""

from __future__ import annotations

import asyncio
import functools
import gc
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any, cast

import pytest

from proving.simulation import World
from proving.simulation.process import Process
from rayq import messages
from rayq.actors.queues.moves import READ_BYTES, QueueMoves
from rayq.actors.queues.numbered_moves import MovedRecord
from rayq.config import QueueConfig
from rayq.core.large.values import manifest_of_chunks
from rayq.core.queues.moved_records import (
    DOUBT_HEADER,
    SOURCE_HEADER,
    dead_letter_headers,
    own_headers,
    source_of,
)
from rayq.core.queues.moves import FailedRecord
from rayq.core.queues.state import QueueState
from rayq.errors import (
    AuthorizationError,
    CorruptBatchError,
    DisconnectedError,
    InvalidTopicError,
    LogTruncatedError,
    NotLeaderError,
    OffsetOutOfRangeError,
    QueueLoadingError,
    RayqError,
    RecordTooLargeError,
    UnknownTopicError,
)
from rayq.records import Headers
from rayq.storage.batch import decode_columns, encode_batch, read_header, stamp
from rayq.storage.producer_state import ProducerState

CONFIG = QueueConfig(max_deliveries=1)
RECORDS = 8


class Target:
    """One partition of a topic and its leader."""

    def __init__(self) -> None:
        self.batches: list[bytes] = []
        self.producers = ProducerState()
        self.start = self.end = 0
        self.epoch = 1
        self.is_offline = False
        self.takes_appends = self.answers_appends = True
        self.bytes_max = 1 << 20

    def answer(self, request: Any, payload: bytes) -> tuple[Any, bytes]:
        if self.is_offline:
            raise NotLeaderError("no leader")
        match request:
            case messages.ListOffsets():
                at = self.end if request.timestamp_ms == messages.LATEST else self.start
                epochs = [read_header(batch).leader_epoch for batch in self.batches]
                return messages.ListOffsetsResponse(at, None, epochs[-1] if epochs else None), b""
            case messages.DescribeProducers():
                known = self.producers.ids_from(request.first_producer_id, 1)
                return messages.DescribeProducersResponse(known), b""
            case messages.Fetch():
                if not self.start <= request.offset <= self.end:
                    raise OffsetOutOfRangeError("not there")
                if request.last_epoch is not None and request.offset > self._end_of(
                    request.last_epoch
                ):
                    raise LogTruncatedError("cut")
                found = [
                    batch
                    for batch in self.batches
                    if read_header(batch).last_offset >= request.offset
                ]
                return messages.FetchResponse(self.end, self.start, 0, self.end), b"".join(found)
            case messages.Produce():
                if not self.takes_appends:
                    raise NotLeaderError("not now")
                answer = self._append(payload)
                if not self.answers_appends:
                    raise DisconnectedError("the answer was lost")
                return answer, b""
        raise AssertionError(request)

    def _append(self, payload: bytes) -> messages.ProduceResponse:
        if len(payload) > self.bytes_max:
            raise RecordTooLargeError("too large")
        header = read_header(payload)
        repeat = self.producers.check(header)
        if repeat is not None:
            return messages.ProduceResponse(repeat.base_offset, 0, 0, True)
        batch = bytearray(payload)
        stamped = stamp(batch, 0, base_offset=self.end, leader_epoch=self.epoch, append_time_ms=1)
        self.producers.update(stamped)
        self.batches.append(bytes(batch))
        self.end = stamped.next_offset
        return messages.ProduceResponse(stamped.base_offset, 1, 0, False)

    def write(self, count: int) -> None:
        """Others append records."""
        for _ in range(count):
            self._append(encode_batch([b"other"], [None], [[]], append_time=True))

    def forget(self) -> None:
        """The producers expire."""
        self.producers.clear()

    def cut(self, offset: int) -> None:
        """An unclean election."""
        self.batches = [batch for batch in self.batches if read_header(batch).next_offset <= offset]
        self.producers.forget_from(offset)
        self.end, self.epoch = offset, self.epoch + 1

    def delete_below(self, offset: int) -> None:
        """Retention."""
        self.batches = [batch for batch in self.batches if read_header(batch).base_offset >= offset]
        self.start = offset

    def _end_of(self, epoch: int) -> int:
        later = [read_header(batch) for batch in self.batches]
        return min(
            (batch.base_offset for batch in later if batch.leader_epoch > epoch), default=self.end
        )

    @property
    def records(self) -> list[tuple[bytes | None, Headers]]:
        found: list[tuple[bytes | None, Headers]] = []
        for batch in self.batches:
            columns = decode_columns(batch, 0, read_header(batch))
            headers = columns.headers or [None] * len(columns.values)
            found += [
                (value, list(own or ())) for value, own in zip(columns.values, headers, strict=True)
            ]
        return found


class Cluster:
    """What outlives the leader of the queue: what is kept, the source's log, the targets; and the
    leader's way to them, on which it dies or loses answers."""

    def __init__(self, process: Process, random: Random) -> None:
        self.process = process
        self.random = random
        places = (("tasks.dead", 0), ("orders", 0), ("orders", 1))
        self.targets = {place: Target() for place in places}
        self.kept: dict[bytes, bytes] = {}
        self.log = {n: MovedRecord(b"k", b"v%d" % n, [("own", b"h%d" % n)]) for n in range(RECORDS)}
        self.deaths = 0.0
        """How likely it is that the leader dies at a step."""
        self.losses = 0.0
        self.dead = asyncio.Event()
        self.producer_ids = 0
        self.damaged: set[int] = set()
        self.dies_before_append = self.dies_after_append = False
        self.life = 0

    def start(self) -> Leader:
        self.life += 1
        self.dies_before_append = self.dies_after_append = False
        self.dead.clear()
        return Leader(self, self.life)

    async def step(self, life: int) -> None:
        """The leader dies here, perhaps: then it never goes on."""
        await asyncio.sleep(0.001)
        if life != self.life or self.random.random() < self.deaths:
            await self.die()

    async def die(self) -> None:
        """The leader never goes on."""
        self.dead.set()
        await asyncio.get_running_loop().create_future()


class Leader:
    """One life of the queue's leader: `MoveSource` and `Peers`."""

    queue = topic = "tasks"
    topic_id = "T"
    partition = 0

    def __init__(self, cluster: Cluster, life: int) -> None:
        self._cluster = cluster
        self._life = life
        state = QueueState.replay(CONFIG, cluster.kept.items(), now_ms=0, now_s=0.0)
        if state is None:
            state = QueueState.begin(CONFIG, 0, state_epoch=0)
            state.learn(RECORDS - 1)
        self.state = state
        self.gone: set[str] = set()
        self.held: list[tuple[bytes | None, int]] = []
        environment = cluster.process.environment
        self.moves = QueueMoves(state, self, cast(Any, self), environment)

    # --- MoveSource

    async def read_records(
        self, offsets: Sequence[int], bytes_max: int
    ) -> tuple[dict[int, MovedRecord], int]:
        await self._cluster.step(self._life)
        log = self._cluster.log
        some = offsets[: self._cluster.random.randint(1, 8)] if bytes_max == READ_BYTES else offsets
        if any(offset in self._cluster.damaged for offset in some):
            raise CorruptBatchError("damaged")
        return {offset: log[offset] for offset in some if offset in log}, len(some)

    def hold_moved(self, value: bytes | None) -> None:
        self.held.append((value, len(self.state.moves.all())))

    async def commit(self) -> None:
        changes = self.state.changes()
        await self._cluster.step(self._life)
        for key, value in changes:
            if value is None:
                self._cluster.kept.pop(key, None)
            else:
                self._cluster.kept[key] = value
        await self._cluster.step(self._life)

    def wake(self) -> None:
        pass

    def failed(self, error: Exception) -> None:
        raise error

    # --- Peers

    async def find_topic(self, name: str) -> tuple[str, int]:
        count = sum(topic == name for topic, _ in self._cluster.targets)
        if not count:
            raise UnknownTopicError(f"no topic {name}")
        return name, count

    async def new_producer_id(self) -> int:
        self._cluster.producer_ids += 1
        return self._cluster.producer_ids

    def is_gone(self, topic_id: str) -> bool:
        return topic_id in self.gone

    async def ask_leader(self, topic_id: str, partition: int, build: Any) -> Any:
        answer, _ = await self.exchange(topic_id, partition, build)
        return answer

    async def exchange(
        self, topic_id: str, partition: int, build: Any, payload: bytes = b""
    ) -> tuple[Any, bytes]:
        cluster = self._cluster
        await cluster.step(self._life)
        if cluster.random.random() < cluster.losses:
            raise DisconnectedError("before it arrived")
        request = build(topic_id, partition, 1)
        place = request.topic_id, request.partition, request.leader_epoch
        assert place == (topic_id, partition, 1), "it would go to another leader"
        is_append = isinstance(request, messages.Produce)
        if is_append and cluster.dies_before_append:
            await cluster.die()
        answer, data = cluster.targets[topic_id, partition].answer(request, payload)
        if is_append and cluster.dies_after_append:
            await cluster.die()
        await cluster.step(self._life)
        if cluster.random.random() < cluster.losses:
            raise DisconnectedError("the answer was lost")
        if isinstance(request, messages.Fetch):
            last = read_header(data).next_offset if data else request.offset
            data = data[: read_header(data).length] if data else b""
            answer = messages.FetchResponse(
                answer.high_watermark, answer.log_start_offset, 0, last
            )
        return answer, data

    # --- what consumers do

    def reject(self, *offsets: int) -> None:
        self.state.take("h", RECORDS, now_s=0.0)
        lost = self.state.reject(
            "h",
            self.state.state_epoch,
            [(offset, 1, f"error {offset}") for offset in offsets],
            now_ms=0,
            now_s=0.0,
        )
        assert not lost
        self.moves.wake()


def played(work: Callable[[Cluster], Awaitable[None]], seed: int = 1) -> None:
    async def script(process: Process) -> None:
        await work(Cluster(process, Random(seed)))

    with World(seed=seed) as world:
        process = world.host("broker").process("replica")
        world.run(process.run(script(process)), limit_s=36_000)


async def until(holds: Callable[[], bool], limit_s: float = 600.0) -> None:
    async with asyncio.timeout(limit_s):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def settled(leader: Leader) -> bool:
    return leader.state.counts().moving == 0


def sources(target: Target) -> Counter[bytes]:
    return Counter(
        value for _, headers in target.records for name, value in headers if name == SOURCE_HEADER
    )


def test_a_dead_letter_has_its_own_headers_and_says_where_it_came_from_and_why() -> None:
    async def work(cluster: Cluster) -> None:
        leader = cluster.start()
        await leader.commit()
        leader.moves.start()
        leader.reject(1, 3)
        await until(lambda: settled(leader))
        assert leader.moves.trouble is None and leader.state.dead == 2
        assert cluster.targets["tasks.dead", 0].records == [
            (
                b"v%d" % offset,
                [
                    ("own", b"h%d" % offset),
                    ("rayq.source", b"tasks/0/%d" % offset),
                    ("rayq.reason", b"rejected"),
                    ("rayq.count", b"1"),
                    ("rayq.error", b"error %d" % offset),
                ],
            )
            for offset in (1, 3)
        ]

    played(work)


@pytest.mark.filterwarnings("error:coroutine .* was never awaited")
def test_a_leader_that_ends_as_it_begins_leaves_no_work_that_nobody_awaits() -> None:
    async def work(cluster: Cluster) -> None:
        leader = cluster.start()
        leader.moves.start()
        leader.moves.stop()
        await asyncio.sleep(1)
        gc.collect()

    played(work)


@pytest.mark.parametrize("seed", range(24))
def test_each_dead_letter_is_written_once_whoever_dies(seed: int) -> None:
    async def work(cluster: Cluster) -> None:
        leader = cluster.start()
        await leader.commit()
        leader.reject(0, 1, 2)
        await leader.commit()
        cluster.deaths, cluster.losses = 0.08, 0.1 * (seed % 3)
        for life in range(40):
            leader.moves.start()
            if life == 0:
                leader.reject(4, 5)
            waits = asyncio.ensure_future(until(functools.partial(settled, leader), 3_600.0))
            dies = asyncio.ensure_future(cluster.dead.wait())
            await asyncio.wait((waits, dies), return_when=asyncio.FIRST_COMPLETED)
            is_done = waits.done() and not cluster.dead.is_set()
            waits.cancel()
            dies.cancel()
            leader.moves.stop()
            if is_done and life > 2:
                break
            if cluster.random.random() < 0.5:
                cluster.targets["tasks.dead", 0].forget()
            if life == 25:
                cluster.deaths = cluster.losses = 0.0
            leader = cluster.start()
        found = sources(cluster.targets["tasks.dead", 0])
        assert set(found.values()) == {1}, found
        # The last two were rejected in the first life: perhaps it died before that was kept.
        assert {b"tasks/0/0", b"tasks/0/1", b"tasks/0/2"} <= set(found)

    played(work, seed)


def request(offsets: list[int], to_topic: str | None) -> messages.MoveQueueRecords:
    return messages.MoveQueueRecords("T", 0, 1, "q", offsets, to_topic)


def anybody(topic: str) -> None:
    """Allows a move to each topic."""


class Redriver:
    """A principal that asks, and may write to these topics."""

    def __init__(self, *topics: str) -> None:
        self.topics = {*topics}
        self.asked: list[str] = []

    def check(self, topic: str) -> None:
        self.asked.append(topic)
        if topic not in self.topics:
            raise AuthorizationError(f"may not write {topic}")


def test_records_go_back_to_where_they_came_from_once_even_when_asked_twice_at_once() -> None:
    async def work(cluster: Cluster) -> None:
        for offset in range(RECORDS):
            source = b"orders/%d/7" % (offset % 2)
            cluster.log[offset] = MovedRecord(
                None, b"v%d" % offset, [("own", b"h"), ("rayq.source", source)]
            )
        cluster.log[5] = MovedRecord(None, b"no source", [])
        cluster.log[6] = MovedRecord(None, b"gone", [("rayq.source", b"gone/0/1")])
        cluster.log[7] = MovedRecord(None, b"own", [("rayq.source", b"__queue_state/0/1")])
        cluster.log[4] = MovedRecord(None, b"here", [("rayq.source", b"tasks/0/1")])
        leader = cluster.start()
        leader.moves.start()
        leader.state.take("h", 1, now_s=0.0)
        answers = await asyncio.gather(
            leader.moves.move_records(request([0, 1, 2, 3], ""), anybody),
            leader.moves.move_records(request(list(range(RECORDS)), ""), anybody),
        )
        assert [answer.moved for answer in answers] == [[1, 2, 3], [1, 2, 3]]
        why = dict(answers[1].refused)
        assert sorted(why) == [0, 4, 5, 6, 7] and "already" in why[4]
        assert "rayq.source" in why[5] and "no topic gone" in why[6] and "rayq's own" in why[7]
        for partition, values in ((0, [b"v2"]), (1, [b"v1", b"v3"])):
            records = cluster.targets["orders", partition].records
            assert sorted(records) == [(value, [("own", b"h")]) for value in values]
        again = await leader.moves.move_records(request([1, 2, 3], ""), anybody)
        assert again.moved == [1, 2, 3] and not again.refused
        # What could not go is as it was.
        assert leader.state.counts().ready == 4
        dropped = await leader.moves.move_records(request([4, 5, 6, 7], None), anybody)
        assert dropped.moved == [4, 5, 6, 7] and leader.state.counts().ready == 0

    played(work)


@pytest.mark.parametrize("seed", range(6))
def test_a_redrive_that_is_asked_again_after_each_death_makes_no_copy(seed: int) -> None:
    async def work(cluster: Cluster) -> None:
        cluster.deaths, cluster.losses = 0.05, 0.1
        left = list(range(RECORDS))
        for life in range(100):
            cluster.deaths *= life < 60
            leader = cluster.start()
            leader.moves.start()
            asked = asyncio.ensure_future(
                leader.moves.move_records(request(left, "orders"), anybody)
            )
            dies = asyncio.ensure_future(cluster.dead.wait())
            await asyncio.wait((asked, dies), return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                left = [place for place in left if place not in asked.result().moved]
            asked.cancel()
            dies.cancel()
            leader.moves.stop()
            cluster.targets["orders", 0].forget()
            if not left:
                break
        found = Counter(value for value, _ in cluster.targets["orders", 0].records)
        assert found == {b"v%d" % offset: 1 for offset in range(RECORDS)}

    played(work, seed)


async def dead_after_append(
    cluster: Cluster, *, redriven: bool = False, is_appended: bool = True
) -> None:
    """A leader dies when its target has the batch and it does not know; or just before."""
    leader = cluster.start()
    await leader.commit()
    leader.moves.start()
    cluster.dies_after_append, cluster.dies_before_append = is_appended, not is_appended
    asked: asyncio.Future[Any] | None = None
    if redriven:
        asked = asyncio.ensure_future(leader.moves.move_records(request([0, 1], "orders"), anybody))
    else:
        leader.reject(0, 1)
    await cluster.dead.wait()
    if asked is not None:
        asked.cancel()
    leader.moves.stop()


def test_a_batch_is_found_where_its_target_was_cut_below_the_end_that_was_noted() -> None:
    async def work(cluster: Cluster) -> None:
        target = cluster.targets["tasks.dead", 0]
        target.write(20)
        number = Leader.exchange

        async def cut_before_append(self: Leader, *args: Any) -> Any:
            if len(args) > 3 and not target.epoch > 1:
                target.cut(5)
            return await number(self, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Leader, "exchange", cut_before_append)
            await dead_after_append(cluster)
        assert target.epoch == 2 and target.end == 7
        target.write(30)
        target.forget()
        leader = cluster.start()
        leader.moves.start()
        await until(lambda: settled(leader))
        assert sources(target) == {b"tasks/0/0": 1, b"tasks/0/1": 1}

    played(work)


@pytest.mark.parametrize("is_remembered", [True, False])
def test_a_dead_letter_that_may_be_there_twice_says_so(is_remembered: bool) -> None:
    async def work(cluster: Cluster) -> None:
        target = cluster.targets["tasks.dead", 0]
        await dead_after_append(cluster)
        target.write(3)
        target.delete_below(target.end)
        if not is_remembered:
            target.forget()
        leader = cluster.start()
        leader.moves.start()
        await until(lambda: settled(leader))
        doubted = [dict(headers).get(DOUBT_HEADER) for _, headers in target.records]
        assert doubted == ([] if is_remembered else [b"copy", b"copy"])
        assert leader.state.dead == 2 and leader.moves.trouble is None

    played(work)


def test_a_redrive_that_may_have_been_done_is_left_to_who_asks_again() -> None:
    async def work(cluster: Cluster) -> None:
        target = cluster.targets["orders", 0]
        await dead_after_append(cluster, redriven=True)
        target.delete_below(target.end)
        target.forget()
        leader = cluster.start()
        leader.moves.start()
        answer = await leader.moves.move_records(request([0, 1, 2], "orders"), anybody)
        assert answer.moved == [2]
        assert all("may have been moved before" in why for _, why in answer.refused)
        assert leader.state.counts().ready == RECORDS - 1 and len(target.records) == 1
        answer = await leader.moves.move_records(request([0, 1], "orders"), anybody)
        assert answer.moved == [0, 1] and len(target.records) == 3

    played(work)


@pytest.mark.parametrize("is_redriven", [True, False])
def test_who_lost_a_target_for_a_day_looks_before_it_appends_again(is_redriven: bool) -> None:
    async def work(cluster: Cluster) -> None:
        target = cluster.targets["orders" if is_redriven else "tasks.dead", 0]
        leader = cluster.start()
        await leader.commit()
        leader.moves.start()
        exchange = Leader.exchange

        async def answer_lost(self: Leader, *args: Any) -> Any:
            answer = await exchange(self, *args)
            if len(args) > 3 and not target.start:
                target.delete_below(target.end)
                target.forget()
                target.is_offline = True
                raise DisconnectedError("the answer was lost")
            return answer

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Leader, "exchange", answer_lost)
            if is_redriven:
                asked = asyncio.ensure_future(
                    leader.moves.move_records(request([0, 1], "orders"), anybody)
                )
            else:
                leader.reject(0, 1)
            await until(lambda: target.is_offline)
            await asyncio.sleep(10.0)
            target.is_offline = False
            if is_redriven:
                why = dict((await asked).refused)
                assert "may have been moved before" in why[0] == why[1] and not target.records
                return
            await until(lambda: settled(leader))
        assert [dict(headers)[DOUBT_HEADER] for _, headers in target.records] == [b"copy"] * 2

    played(work)


@pytest.mark.parametrize("is_appended", [True, False])
def test_what_an_unclean_election_takes_from_a_batch_doubles_none_of_the_rest(
    is_appended: bool,
) -> None:
    async def work(cluster: Cluster) -> None:
        await dead_after_append(cluster, is_appended=is_appended)
        cluster.log[1] = MovedRecord(None, b"another", [])
        leader = cluster.start()
        leader.state.cut(1, 7)
        leader.state.learn(RECORDS - 1)
        await leader.commit()
        leader.moves.start()
        if not is_appended:
            # What is left of the batch goes under another number.
            cluster.dies_after_append = True
            await cluster.dead.wait()
            leader.moves.stop()
            leader = cluster.start()
            leader.moves.start()
        await until(lambda: settled(leader))
        target = cluster.targets["tasks.dead", 0]
        assert sources(target) == dict.fromkeys([b"tasks/0/0", b"tasks/0/1"][: 1 + is_appended], 1)
        assert leader.state.start_offset == 1

    played(work)


def test_a_target_that_does_not_answer_holds_up_no_other_and_no_record() -> None:
    async def work(cluster: Cluster) -> None:
        for offset in range(4):
            source = b"orders/%d/7" % (offset % 2)
            cluster.log[offset] = MovedRecord(None, b"v", [(SOURCE_HEADER, source)])
        del cluster.log[3]
        cluster.targets["orders", 0].is_offline = True
        leader = cluster.start()
        leader.moves.start()
        answer = await leader.moves.move_records(request([0, 1, 2, 3], ""), anybody)
        assert answer.moved == [1]
        why = dict(answer.refused)
        assert "no leader" in why[0] and "no leader" in why[2] and "gone" in why[3]
        assert leader.moves.trouble is None and leader.state.counts().ready == RECORDS - 1
        dropped = await leader.moves.move_records(request([0, 3], None), anybody)
        assert dropped.moved == [0, 3]

    played(work)


def test_the_chunks_of_a_large_value_are_held_before_its_move_begins() -> None:
    async def work(cluster: Cluster) -> None:
        manifest = manifest_of_chunks(5, 1, bytes(16), [0])
        cluster.log[1] = MovedRecord(None, manifest, [], is_large=True)
        leader = cluster.start()
        leader.moves.start()
        leader.reject(1, 2)
        await until(lambda: settled(leader))
        assert leader.held == [(manifest, 0)]

    played(work)


def test_what_a_target_refuses_stays_in_the_queue_and_the_others_go() -> None:
    async def work(cluster: Cluster) -> None:
        target = cluster.targets["tasks.dead", 0]
        target.bytes_max = 2_000
        cluster.log[2] = MovedRecord(None, cluster.random.randbytes(5_000), [])
        leader = cluster.start()
        leader.moves.start()
        leader.reject(1, 2, 3)
        await until(lambda: leader.moves.trouble is not None and leader.state.dead == 2)
        assert "too large" in str(leader.moves.trouble)
        assert "tasks/0/2" in str(leader.moves.trouble)
        assert leader.state.counts().moving == 1
        target.bytes_max = 10_000
        await until(lambda: settled(leader))
        await until(lambda: leader.moves.trouble is None)
        assert set(sources(target).values()) == {1} and len(target.records) == 3

    played(work)


def test_a_record_that_cannot_be_read_holds_up_no_other() -> None:
    async def work(cluster: Cluster) -> None:
        cluster.damaged = {2}
        leader = cluster.start()
        leader.moves.start()
        leader.reject(0, 1, 2, 3, 4)
        await until(lambda: leader.state.dead == 4)
        await until(lambda: leader.moves.trouble is not None)
        assert "tasks/0/2 cannot be read: damaged" in str(leader.moves.trouble)
        del cluster.log[2]  # Retention removes it in the end.
        cluster.damaged.clear()
        await until(lambda: settled(leader) and leader.moves.trouble is None)
        assert len(cluster.targets["tasks.dead", 0].records) == 4

    played(work)


def test_a_redrive_that_is_refused_leaves_the_record_to_consumers() -> None:
    async def work(cluster: Cluster) -> None:
        cluster.targets["orders", 0].bytes_max = 10
        leader = cluster.start()
        leader.moves.start()
        answer = await leader.moves.move_records(request([0, 1], "orders"), anybody)
        assert not answer.moved and "too large" in answer.refused[0][1]
        assert leader.state.counts().ready == RECORDS
        with pytest.raises(InvalidTopicError):
            await leader.moves.move_records(request([0], "__consumer_offsets"), anybody)

    played(work)


def test_a_header_sends_no_record_to_where_the_redriver_may_not_write() -> None:
    """A principal that may write to the dead letters' topic chooses the header."""

    async def work(cluster: Cluster) -> None:
        for offset, topic in enumerate((b"orders", b"tasks.dead", b"nowhere")):
            cluster.log[offset] = MovedRecord(None, b"v", [("rayq.source", topic + b"/0/7")])
        leader = cluster.start()
        leader.moves.start()
        redriver = Redriver("tasks.dead")
        answer = await leader.moves.move_records(request([0, 1, 2], ""), redriver.check)
        assert answer.moved == [1]
        assert [why for _, why in answer.refused] == ["may not write orders", "may not write nowhere"]
        assert not cluster.targets["orders", 0].records
        assert leader.state.counts().ready == RECORDS - 1, "they are left to consumers"
        answer = await leader.moves.move_records(request([0], "orders"), redriver.check)
        assert not answer.moved and not cluster.targets["orders", 0].records

    played(work)


@pytest.mark.parametrize("trouble", ["offline", "no append", "answer lost"])
def test_a_redrive_ends_with_the_right_of_the_principal_that_asked_for_it(trouble: str) -> None:
    async def work(cluster: Cluster) -> None:
        leader = cluster.start()
        leader.moves.start()
        redriver, target = Redriver("orders"), cluster.targets["orders", 0]
        target.is_offline = trouble == "offline"
        target.takes_appends = trouble != "no append"
        target.answers_appends = trouble == "offline"
        asked = asyncio.ensure_future(
            leader.moves.move_records(request([0, 1], "orders"), redriver.check)
        )
        await until(lambda: leader.moves.trouble is not None)
        redriver.topics.clear()
        target.is_offline, target.takes_appends, target.answers_appends = False, True, True
        answer = await asked
        if trouble == "answer lost":
            assert answer.moved == [0, 1] and len(target.records) == 2
            return
        assert {why for _, why in answer.refused} == {"may not write orders"}
        assert not target.records and leader.state.counts().ready == RECORDS

    played(work)


def test_the_end_of_the_leader_is_told_to_those_who_wait() -> None:
    async def work(cluster: Cluster) -> None:
        leader = cluster.start()
        leader.moves.start()
        cluster.losses = 1.0
        asked = asyncio.ensure_future(leader.moves.move_records(request([0], "orders"), anybody))
        await until(lambda: leader.moves.trouble is not None)
        leader.moves.stop()

        async def ended() -> None:
            raise QueueLoadingError("ended")

        leader.commit = ended  # type: ignore[method-assign]
        with pytest.raises(RayqError):
            await asked

    played(work)


def test_headers_of_a_dead_letter_that_dies_again_are_those_of_the_last_time() -> None:
    first = dead_letter_headers("t", 1, FailedRecord(7, 5, "deliveries", ""), [("a", b"1")])
    assert first == [
        ("a", b"1"),
        ("rayq.source", b"t/1/7"),
        ("rayq.reason", b"deliveries"),
        ("rayq.count", b"5"),
    ]
    again = dead_letter_headers("u", 2, FailedRecord(8, 1, "rejected", "x\udcff"), first)
    assert dict(again)["rayq.source"] == b"u/2/8" and len(again) == 5
    assert own_headers(again) == [("a", b"1")]
    assert source_of(again) == ("u", 2)
    for wrong in (b"", b"t", b"t/1", b"/1/2", b"t/x/1", b"t/-1/2", b"t/99999999/2", b"\xff"):
        assert source_of([("rayq.source", wrong)]) is None
