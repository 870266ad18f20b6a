"""Guests and strangers: clients whose rights come and go, and one that has none.

A *guest* writes and reads the first topic of the scenario, and alters a config that nothing depends
on, while `faults_access` takes its rights and gives them back. What it writes is judged as that
of all producers. The *stranger* tries whatever it can think of, some of it as an ordinary client,
and the rest at the right servers by the right ids, which it has from a superuser: who lost a right
knows them, too. Nobody judges here: `invariants_access` sees who is served, and the checker whether
a record that was refused is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from functools import partial

from proving.simulation.process import Process
from rayq import messages
from rayq.client.client import Client
from rayq.client.consuming.async_consumer import AsyncConsumer
from rayq.client.producing.producer import AsyncProducer
from rayq.config import ConsumerConfig, ProducerConfig
from rayq.environment import Address
from rayq.errors import DeliveryError, RayqError
from rayq.messages.access import TokenVerifiers
from rayq.messages.acls import Acl
from rayq.messages.partition_leader import READ_UNCOMMITTED
from rayq.records import RecordMetadata, TopicPartition
from rayq.storage.batch import encode_batch
from rayq.testing.checker import Recorder

CONFIG = "index_interval_bytes"
ROUND_S = 0.4
EAGER_BYTES, EAGER_S = 400, 0.11
"""Bytes of a value of an eager guest, and the time after which it writes the next two."""
KEYS = 8
ALTER_S = 0.3
LOOK_S = 0.5
LIFE_S = (4.0, 20.0)
TIMEOUT_S = 2.0
GIVES_UP_SHARE = 0.05
"""Probability that a guest begins again, with new clients, after an error. Otherwise its clients
find out whether it may again."""
GROUP, QUEUE, TRANSACTIONAL_ID = "billing", "plain", "id-0"
"""A group, a queue and a transactional id of some scenarios."""


class Guest:
    """The lives of one guest: each has clients of its own."""

    def __init__(
        self,
        name: str,
        process: Process,
        rng: random.Random,
        new_client: Callable[[Process], Client],
        brokers: list[Address],
        places: list[TopicPartition],
        recorder: Recorder,
        acknowledged: Callable[[], None],
        is_eager: Callable[[], bool],
    ) -> None:
        """`is_eager()` says whether it is to write more than it may."""
        self._is_eager = is_eager
        self._name = name
        self._process = process
        self._rng = rng
        self._new_client = new_client
        self._brokers = brokers
        self._places = places
        self._topic = places[0].topic
        self._recorder = recorder
        self._acknowledged = acknowledged
        self._lives = 0

    async def live(self, goes_on: Callable[[], bool]) -> None:
        """Begins again and again, since another token needs another client. A further client only
        connects: its connections have to end with its token, too."""
        while goes_on():
            self._lives += 1
            client, idle = self._new_client(self._process), self._new_client(self._process)
            with contextlib.suppress(RayqError):
                await idle.fetch_all(timeout_s=TIMEOUT_S)
            until_s = client.now + self._rng.uniform(*LIFE_S)
            is_over = asyncio.Event()

            def lasts() -> bool:
                return goes_on() and client.now < until_s and not is_over.is_set()  # noqa: B023

            await asyncio.gather(
                self._write(f"{self._name}.{self._lives}", client, lasts, is_over),
                self._read(f"{self._name}-reads.{self._lives}", client, lasts, is_over),
                self._alter(client, lasts),
                self._insist(client, lasts),
            )
            client.close()
            idle.close()

    async def _write(
        self, name: str, client: Client, lasts: Callable[[], bool], is_over: asyncio.Event
    ) -> None:
        recorder, rng = self._recorder, self._rng
        recorder.opened(name)
        config = ProducerConfig(
            delivery_timeout_ms=rng.choice((15_000, 60_000)),
            linger_ms=rng.choice((0, 5)),
            batch_size=1_024,
            compression_type="none",
        )
        producer = AsyncProducer(client, config)
        count = 0
        while lasts():
            is_eager = self._is_eager()
            for _ in range(2 if is_eager else rng.randint(1, 3)):
                count += 1
                value = b"%s/%d" % (name.encode(), count)
                if is_eager:
                    value = value.ljust(EAGER_BYTES, b".")
                key = b"%s-%d" % (self._name.encode(), rng.randrange(KEYS))
                number = recorder.sending(name, self._topic, key, value)
                try:
                    future = await producer.send(self._topic, value, key=key)
                except RayqError as error:
                    recorder.not_delivered(name, number, error)
                    await asyncio.sleep(rng.uniform(0, ROUND_S))
                else:
                    future.call_on_delivery(partial(self._note, name, number, is_over))
            await asyncio.sleep(EAGER_S if is_eager else rng.uniform(0, 2 * ROUND_S))
        with contextlib.suppress(DeliveryError):
            await producer.close()

    def _note(
        self,
        name: str,
        number: int,
        is_over: asyncio.Event,
        metadata: RecordMetadata | None,
        error: BaseException | None,
    ) -> None:
        self._recorder.outcome(name, number, metadata, error)
        if metadata is not None:
            self._acknowledged()
        elif self._rng.random() < GIVES_UP_SHARE:
            is_over.set()

    async def _read(
        self, name: str, client: Client, lasts: Callable[[], bool], is_over: asyncio.Event
    ) -> None:
        consumer = AsyncConsumer(client, ConsumerConfig(auto_offset_reset="earliest"))
        is_assigned = False
        while lasts():
            try:
                if not is_assigned:
                    await consumer.assign(self._places)
                    is_assigned = True
                    for place in self._places:
                        self._recorder.assigned(name, *place)
                self._recorder.polled(name, await consumer.poll(0.5))
            except RayqError:
                await asyncio.sleep(self._rng.uniform(0, ROUND_S))
                if self._rng.random() < GIVES_UP_SHARE:
                    is_over.set()
        await consumer.close()

    async def _alter(self, client: Client, lasts: Callable[[], bool]) -> None:
        while lasts():
            await asyncio.sleep(self._rng.uniform(0, 2 * ALTER_S))
            changes: messages.ConfigOptions = {CONFIG: self._rng.choice((128, 256, 4096))}
            with contextlib.suppress(RayqError):
                await client.change(
                    messages.AlterTopicConfig(name=self._topic, changes=changes),
                    timeout_s=TIMEOUT_S,
                )


    async def _insist(self, client: Client, lasts: Callable[[], bool]) -> None:
        """Asks each broker by itself. A client's own questions go first to brokers that answered
        the last ones, and so not to one that is cut off: it may serve who has lost a right."""
        while lasts():
            await asyncio.sleep(self._rng.uniform(0, 2 * LOOK_S))
            with contextlib.suppress(RayqError):
                await client.ask(
                    self._rng.choice(self._brokers),
                    messages.Metadata(topics=[self._topic]),
                    timeout_s=TIMEOUT_S,
                )


class Stranger:
    """See the module."""

    def __init__(
        self,
        name: str,
        client: Client,
        spy: Client,
        rng: random.Random,
        places: list[TopicPartition],
        recorder: Recorder,
        victim: str,
    ) -> None:
        """`spy` is a superuser's client, `victim` a principal that may do something."""
        self._name = name
        self._client = client
        self._spy = spy
        self._rng = rng
        self._places = places
        self._recorder = recorder
        self._victim = victim
        self._count = 0

    async def live(self, goes_on: Callable[[], bool]) -> None:
        self._recorder.opened(self._name)
        while goes_on():
            await asyncio.sleep(self._rng.uniform(0, 2 * ROUND_S))
            attempt = self._rng.choice(
                (self._ask_leader, self._ask_leader, self._ask_a_coordinator, self._ask_a_broker)
            )
            with contextlib.suppress(RayqError):
                await attempt()

    async def _ask_leader(self) -> None:
        place = self._rng.choice(self._places)
        topic = await self._spy.topic(place.topic, timeout_s=TIMEOUT_S)
        leader = self._spy.metadata.leader(place.topic, topic.topic_id, place.partition)
        if leader is None:
            return
        where = topic.topic_id, place.partition, leader.epoch
        address: Address = leader.host, leader.port
        if self._rng.random() < 0.3:
            await self._produce(address, place.topic, *where)
            return
        request: messages.AnyRequest = self._rng.choice(
            (
                messages.Fetch(
                    *where,
                    offset=0,
                    last_epoch=None,
                    bytes_max=1 << 20,
                    wait_ms=500,
                    isolation=READ_UNCOMMITTED,
                ),
                messages.ListOffsets(*where, timestamp_ms=-1),
                messages.DeleteRecords(*where, before_offset=None, timeout_ms=1_000),
                messages.DescribeProducers(*where, first_producer_id=0, producer_id_count=10),
                messages.DescribeOpenTransactions(*where, since_offset=0),
            )
        )
        await self._client.ask(address, request, timeout_s=TIMEOUT_S)

    async def _produce(
        self, address: Address, topic: str, topic_id: str, partition: int, epoch: int
    ) -> None:
        self._count += 1
        value = b"%s/%d" % (self._name.encode(), self._count)
        number = self._recorder.sending(self._name, topic, None, value)
        request = messages.Produce(
            topic_id, partition, epoch, acks=self._rng.choice((1, -1)), timeout_ms=1_000
        )
        error: BaseException = AssertionError("a stranger may write")
        try:
            await self._client.ask(
                address, request, encode_batch([value]), timeout_s=TIMEOUT_S
            )
        except RayqError as caught:
            error = caught
        self._recorder.not_delivered(self._name, number, error)

    async def _ask_a_coordinator(self) -> None:
        name, build = self._rng.choice(
            (
                ("__consumer_offsets", self._join),
                ("__consumer_offsets", self._list_groups),
                ("__transaction_state", self._take_over),
            )
        )
        topic = await self._spy.topic(name, timeout_s=TIMEOUT_S)
        for partition in topic.partitions:
            leader = self._spy.metadata.leader(name, topic.topic_id, partition.partition)
            if leader is not None:
                request = build((topic.topic_id, partition.partition, leader.epoch))
                with contextlib.suppress(RayqError):
                    await self._client.ask(
                        (leader.host, leader.port), request, timeout_s=TIMEOUT_S
                    )

    def _join(self, where: tuple[str, int, int]) -> messages.AnyRequest:
        return messages.GroupHeartbeat(
            *where,
            group=GROUP,
            member=self._client.environment.new_id(),
            member_epoch=0,
            instance=self._rng.choice((None, "instance-0")),
            client=self._name,
            topics=[self._places[0].topic],
            pattern=None,
            assignor="uniform",
            session_timeout_ms=10_000,
            max_poll_interval_ms=10_000,
            owned=[],
            wait_ms=100,
        )

    def _list_groups(self, where: tuple[str, int, int]) -> messages.AnyRequest:
        return messages.ListGroups(*where)

    def _take_over(self, where: tuple[str, int, int]) -> messages.AnyRequest:
        owner = self._client.environment.new_id()
        return messages.InitProducer(
            *where,
            transactional_id=TRANSACTIONAL_ID,
            owner=owner,
            transaction_timeout_ms=10_000,
        )

    async def _ask_a_broker(self) -> None:
        rng, topic = self._rng, self._places[0].topic
        verifiers = TokenVerifiers(bytes(32), bytes(32), bytes(64), bytes(64))
        token_id = self._client.environment.new_id()
        grant = Acl(self._name, "allow", "all", "topic", "*")
        request: messages.AnyRequest = rng.choice(
            (
                messages.Metadata(),
                messages.DescribeQueues(),
                messages.AlterTopicConfig(name=topic, changes={CONFIG: 64}),
                messages.DeleteTopic(name=topic),
                messages.CreateTopic(
                    name=f"{topic}-too", partitions=1, replication_factor=1, config={}
                ),
                messages.CreateAcls(acls=[grant]),
                messages.CreateToken(
                    principal=self._victim, token_id=token_id, verifiers=verifiers
                ),
                messages.DeletePrincipal(name=self._victim),
            )
        )
        if isinstance(request, messages.Change):
            await self._client.change(request, timeout_s=TIMEOUT_S)
        else:
            await self._client.ask_any(request, timeout_s=TIMEOUT_S)
