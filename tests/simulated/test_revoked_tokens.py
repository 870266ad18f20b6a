"""A stolen token, in loops of requests to each kind of server, after its revocation: in virtual
time, so that a second is a second."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from proving.simulation import Process, World
from proving.simulation.cluster import SimulatedCluster
from rayq import messages
from rayq.client.admin.admin import AsyncAdmin
from rayq.client.client import Client
from rayq.config import ClusterConfig
from rayq.core.cluster.state import ClusterState
from rayq.core.groups.records import partition_of_group
from rayq.environment import Address
from rayq.errors import (
    AuthenticationError,
    AuthorizationError,
    ControllerUnavailableError,
    DisconnectedError,
    NotLeaderError,
    RayqError,
)
from rayq.messages.acls import Acl
from rayq.storage.batch import encode_batch
from rayq.wire.authentication import Identity
from rayq.wire.pool import ConnectionPool
from rayq.wire.tokens import draw_token, verifiers_of

SALT = b"0123456789abcdef"
OFFSETS, GROUP, TOPIC, QUEUE = "__consumer_offsets", "group", "orders", "work"
TIMEOUT_S = 5.0
PAUSE_S = 0.1
ALLOWED = [
    Acl("anna", "allow", operation, resource_type, name)  # type: ignore[arg-type]
    for operation, resource_type, name in (
        ("read", "topic", TOPIC),
        ("write", "topic", TOPIC),
        ("read", "queue", QUEUE),
        ("read", "group", GROUP),
        ("alter_configs", "topic", TOPIC),
    )
]


class Stage:
    """A cluster with the principal `anna`, of whom somebody has the token."""

    def __init__(self, world: World, config: ClusterConfig | None = None) -> None:
        self.world = world
        self.cluster = SimulatedCluster(world, config=config)
        self.thief = world.host("thief").process("thief")
        self.owner = world.host("owner").process("owner")
        self.token = draw_token("anna", self.thief.environment.token_bytes)
        self.successes: dict[str, float] = {}
        """Time of the last success of each loop."""
        self.errors: dict[str, list[tuple[float, RayqError]]] = {}
        self.loops: list[asyncio.Task[None]] = []
        self.view = 0
        """The broker by whose metadata leaders are looked up."""

    @property
    def now_s(self) -> float:
        return self.world.now_s

    async def start(self, *, replication_factor: int) -> None:
        await self.cluster.start()
        config = self.cluster.config
        self.client = Client(
            self.owner.environment, self.cluster.client_identity, self.cluster.endpoints, config
        )
        self.admin = AsyncAdmin(self.client)
        await self.admin.create_topic(TOPIC, 1, replication_factor)
        await self.admin.create_queue(QUEUE, topic=TOPIC)
        await self.client.change(messages.EnsureOffsetsTopic(), timeout_s=60)
        await self.change(messages.CreatePrincipal("anna", SALT))
        await self.change(messages.CreateToken("anna", "01", verifiers_of(self.token, SALT)))
        await self.change(messages.CreateAcls(ALLOWED))
        await asyncio.sleep(2.0)

    async def change(self, request: messages.Change) -> None:
        await self.client.change(request, timeout_s=60)

    def topic(self, name: str = TOPIC) -> Any:
        return self.state.topic_named(name)

    @property
    def state(self) -> ClusterState:
        return self.cluster.brokers[self.view].metadata.state

    def leader(self, name: str, partition: int) -> tuple[int, int, Address]:
        """The broker and epoch of a partition's leader, and the address of its process. Raises
        NotLeaderError where there is none now."""
        found = self.topic(name).partitions[partition]
        broker = found.value.leader
        process = found.processes.get(broker)
        if process is None:
            raise NotLeaderError("It has none.")
        return broker, found.value.leader_epoch, (process.host, process.port)

    def identity(self) -> Identity:
        return Identity.of_client(self.token, self.cluster.cluster_id)

    def loop(
        self,
        name: str,
        process: Process,
        identity: Identity,
        ask: Callable[[ConnectionPool], Awaitable[Any]],
    ) -> None:
        """Repeats a request forever, whatever the answers are."""

        async def repeat() -> None:
            pool = ConnectionPool(process.environment, identity, self.cluster.config)
            while True:
                try:
                    await ask(pool)
                except RayqError as error:
                    self.errors.setdefault(name, []).append((self.now_s, error))
                else:
                    self.successes[name] = self.now_s
                await asyncio.sleep(PAUSE_S)

        async def begin() -> None:
            self.loops.append(asyncio.ensure_future(repeat()))

        self.loops.append(asyncio.ensure_future(process.run(begin())))

    def loops_of(self, who: str, process: Process, identity: Identity) -> None:
        queue_id = self.state.queue_ids[QUEUE]
        batch = bytes(encode_batch([b"v"], timestamps_ms=1))

        async def ask(
            pool: ConnectionPool, at: Address, request: messages.AnyRequest, payload: bytes = b""
        ) -> None:
            await pool.request(*at, request, payload, timeout_s=TIMEOUT_S)

        def place() -> tuple[Address, tuple[str, int, int]]:
            _, epoch, address = self.leader(TOPIC, 0)
            return address, (self.topic().topic_id, 0, epoch)

        async def produce(pool: ConnectionPool) -> None:
            at, to = place()
            await ask(pool, at, messages.Produce(*to, -1, 1000), batch)

        async def fetch(pool: ConnectionPool) -> None:
            at, to = place()
            await ask(pool, at, messages.Fetch(*to, 0, None, 1000, 0))

        async def take(pool: ConnectionPool) -> None:
            at, to = place()
            await ask(pool, at, messages.Take(*to, queue_id, who, 1, 1000, 1000))

        async def commit(pool: ConnectionPool) -> None:
            topic = self.topic(OFFSETS)
            coordinator = partition_of_group(GROUP, len(topic.partitions))
            _, epoch, at = self.leader(OFFSETS, coordinator)
            offsets = [messages.OffsetCommit(self.topic().topic_id, 0, 0, None, "")]
            to = topic.topic_id, coordinator, epoch
            await ask(pool, at, messages.CommitOffsets(*to, GROUP, "", 0, 0, offsets))

        async def alter(pool: ConnectionPool) -> None:
            change = messages.AlterTopicConfig(TOPIC, {"retention_ms": None})
            await ask(pool, self.cluster.endpoints[1], change)

        for work in (produce, fetch, take, commit, alter):
            self.loop(f"{who} {work.__name__}", process, identity, work)

    def lasts(self, who: str) -> dict[str, float]:
        return {name: at for name, at in self.successes.items() if name.startswith(who)}


def played(script: Callable[[Stage], Awaitable[None]], config: ClusterConfig | None = None) -> None:
    with World(seed=5) as world:
        stage = Stage(world, config)

        async def run() -> None:
            await script(stage)
            for task in stage.loops:
                task.cancel()

        world.run(run(), limit_s=200)
        assert world.errors == []


@pytest.mark.slow
@pytest.mark.parametrize("way", ["token", "principal"])
def test_a_stolen_token_ends_within_a_second_in_each_loop(way: str) -> None:
    async def script(stage: Stage) -> None:
        await stage.start(replication_factor=3)
        stage.loops_of("thief", stage.thief, stage.identity())
        stage.loops_of("owner", stage.owner, stage.cluster.client_identity)
        await asyncio.sleep(3.0)
        assert min(stage.lasts("thief").values()) > stage.now_s - 1.0
        assert len(stage.lasts("thief")) == 5
        end: messages.Change = messages.RevokeToken("anna", "01")
        if way == "principal":
            end = messages.DeletePrincipal("anna")
        await stage.change(end)
        revoked_s = stage.now_s
        await asyncio.sleep(3.0)
        assert max(stage.lasts("thief").values()) < revoked_s + 1.0
        # The push does not wait for the next heartbeat of a replica process.
        assert max(stage.lasts("thief").values()) < revoked_s + 0.3
        # Others go on.
        assert min(stage.lasts("owner").values()) > stage.now_s - 1.0
        for name, errors in stage.errors.items():
            if name.startswith("thief"):
                assert isinstance(errors[-1][1], AuthenticationError), errors[-1]

    played(script)


def test_requests_that_are_held_for_a_revoked_token_end_within_a_second() -> None:
    async def script(stage: Stage) -> None:
        await stage.start(replication_factor=3)
        _, epoch, address = stage.leader(TOPIC, 0)
        place = stage.topic().topic_id, 0, epoch

        async def hold() -> float:
            pool = ConnectionPool(
                stage.thief.environment, stage.identity(), stage.cluster.config
            )
            with pytest.raises((DisconnectedError, AuthenticationError)):
                await pool.request(
                    *address, messages.Fetch(*place, 0, None, 1000, 60_000), timeout_s=90
                )
            return stage.now_s

        holding = asyncio.ensure_future(stage.thief.run(hold()))
        await asyncio.sleep(3.0)
        await stage.change(messages.RevokeToken("anna", "01"))
        revoked_s = stage.now_s
        assert await holding < revoked_s + 1.0

    played(script)


def test_a_member_that_may_not_read_its_group_any_more_is_told_so_when_its_heartbeat_ends() -> None:
    async def script(stage: Stage) -> None:
        await stage.start(replication_factor=3)
        topic = stage.topic(OFFSETS)
        coordinator = partition_of_group(GROUP, len(topic.partitions))
        _, epoch, address = stage.leader(OFFSETS, coordinator)
        pool = ConnectionPool(stage.thief.environment, stage.identity(), stage.cluster.config)

        def beat(member_epoch: int, wait_ms: int) -> messages.GroupHeartbeat:
            place = topic.topic_id, coordinator, epoch
            return messages.GroupHeartbeat(
                *place, GROUP, "m", member_epoch, None, "", [TOPIC], None, "range",
                30_000, 300_000, [], wait_ms,
            )  # fmt: skip

        beats: list[float] = []

        async def hold() -> RayqError:
            joined, _ = await pool.request(*address, beat(0, 0), timeout_s=30)
            with pytest.raises(RayqError) as caught:
                while True:
                    beats.append(stage.now_s)
                    await pool.request(*address, beat(joined.member_epoch, 10_000), timeout_s=30)
            return caught.value

        holding = asyncio.ensure_future(stage.thief.run(hold()))
        await asyncio.sleep(3.0)
        assert not holding.done()
        await stage.change(messages.DeleteAcls([ALLOWED[3]]))
        deleted_s = stage.now_s
        error = await holding
        assert beats[-1] < deleted_s
        assert isinstance(error, AuthorizationError), error
        assert "may not read group 'group'" in str(error)

    played(script)


def test_a_held_request_is_refused_when_its_right_has_gone() -> None:
    async def script(stage: Stage) -> None:
        await stage.start(replication_factor=3)
        _, epoch, address = stage.leader(TOPIC, 0)
        place = stage.topic().topic_id, 0, epoch
        queue_id = stage.state.queue_ids[QUEUE]
        pool = ConnectionPool(stage.thief.environment, stage.identity(), stage.cluster.config)

        async def hold(request: messages.AnyRequest) -> RayqError:
            with pytest.raises(RayqError) as caught:
                await pool.request(*address, request, timeout_s=90)
            return caught.value

        held = [
            asyncio.ensure_future(stage.thief.run(hold(request)))
            for request in (
                messages.Fetch(*place, 0, None, 1000, 60_000),
                messages.Take(*place, queue_id, "anna", 1, 1000, 60_000),
            )
        ]
        await asyncio.sleep(3.0)
        await stage.change(messages.DeleteAcls([ALLOWED[0]]))
        await asyncio.sleep(1.0)
        assert not any(request.done() for request in held)
        owners = ConnectionPool(
            stage.owner.environment, stage.cluster.client_identity, stage.cluster.config
        )
        await owners.request(
            *address,
            messages.Produce(*place, -1, 1000),
            bytes(encode_batch([b"secret"], timestamps_ms=1)),
            timeout_s=10,
        )
        for request in held:
            error = await request
            assert isinstance(error, AuthorizationError), error
            assert "may not read topic 'orders'" in str(error)

    played(script)


@pytest.mark.slow
@pytest.mark.parametrize(
    "with_controller", [False, pytest.param(True, marks=pytest.mark.thorough)]
)
def test_behind_a_cut_a_stolen_token_ends_by_the_patience_and_others_are_served_after_it(
    with_controller: bool,
) -> None:
    """A controller that is cut off as well goes on for a session, without a majority."""
    patience_s = 6.0

    async def script(stage: Stage) -> None:
        await stage.start(replication_factor=1)
        stage.view = number = stage.leader(TOPIC, 0)[0]
        cut_off = stage.cluster.hosts[number]
        rest = [host for host in stage.cluster.hosts if host is not cut_off]
        new = draw_token("anna", stage.owner.environment.token_bytes)
        await stage.change(messages.CreateToken("anna", "02", verifiers_of(new, SALT)))
        honest = stage.world.host("honest").process("honest")
        stage.loops_of("thief", stage.thief, stage.identity())
        stage.loops_of("honest", honest, Identity.of_client(new, stage.cluster.cluster_id))
        stage.loops_of("owner", stage.owner, stage.cluster.client_identity)
        await asyncio.sleep(3.0)
        controller = stage.cluster.controller_host
        if with_controller:
            stage.world.network.cut([cut_off, controller], rest)
        else:
            stage.world.network.cut([cut_off], [*rest, controller])
        limit_s = patience_s + 1.0
        if with_controller:
            limit_s += stage.cluster.config.session_timeout_ms / 1000
        cut_s = stage.now_s
        await asyncio.sleep(1.0)
        await stage.change(messages.RevokeToken("anna", "01"))
        await asyncio.sleep(limit_s + 1.0)
        here = ("produce", "fetch")
        for who in ("thief", "honest"):
            for what in here:
                last_s = stage.successes[f"{who} {what}"]
                assert cut_s + patience_s - 2.0 < last_s < cut_s + limit_s, (who, what)
                _, error = stage.errors[f"{who} {what}"][-1]
                assert isinstance(error, ControllerUnavailableError), error
                assert "serves superusers only" in str(error)
        for what in here:
            assert stage.successes[f"owner {what}"] > stage.now_s - 1.0
        stage.world.network.heal()
        await stage.cluster.wait_until(
            lambda: stage.successes["honest fetch"] > stage.now_s - 1.0, "anna to be served again"
        )
        await asyncio.sleep(2.0)
        for what in here:
            assert stage.successes[f"honest {what}"] > stage.now_s - 1.0, what
            assert stage.successes[f"thief {what}"] < cut_s + limit_s
            assert isinstance(stage.errors[f"thief {what}"][-1][1], AuthenticationError)

    played(script, ClusterConfig(access_patience_ms=6_000))
