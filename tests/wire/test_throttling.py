"""A client that has used up a quota waits; the requests of one that does not heed it are parked,
and only those."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

from rayq import messages
from rayq.actors.quotas import Quotas
from rayq.errors import DisconnectedError, QuotaLimitError
from rayq.messages import AnyRequest, Produce, ProduceResponse, Quota
from rayq.messages.acls import QuotaName
from rayq.wire.authentication import NONCE_BYTES, ClientHandshake, Identity
from rayq.wire.codec import ENCODER
from rayq.wire.frames import FLAG_ONE_WAY
from rayq.wire.throttling import PARKED_BYTES_MAX, PARKED_FRAME_BYTES
from tests.wire.test_gate import ANNA, BEN, Door, holder_of

MIB = 1024**2
PRODUCE = Produce("topic", 7, 0, -1, 1000)
UNACKED = Produce("topic", 7, 0, 0, 1000)
COMMIT = messages.CommitOffsets("topic", 7, 0, "group", "", 0, 0, [])


class Tenants:
    """A server whose principals may do everything, as far as their quotas go."""

    def __init__(self) -> None:
        self.handled: list[tuple[str | None, type[AnyRequest], int]] = []
        self.partitions: list[int] = []
        self.server: Any = None
        self.quotas: Any = None

    async def start(self, wire: Any, *quotas: Quota) -> Any:
        class Open(Door):
            def check(
                self, peer: Any, request: AnyRequest, now_s: float | None = None
            ) -> None:
                pass

        self.server = await wire.serve(self.handle, gate=Open())
        self.quotas = self.server.throttles = Quotas(self.server.environment)
        self.quotas.replace(quotas)
        return self.server

    def handle(self, peer: Any, request: AnyRequest, payload: memoryview) -> Any:
        self.handled.append((peer.principal, type(request), len(payload)))
        if isinstance(request, Produce):
            self.partitions.append(request.partition)
            return ProduceResponse(request.partition, 0, len(payload))
        return messages.CommitOffsetsResponse([])

    def bytes_of(self, principal: str) -> int:
        return sum(size for who, _, size in self.handled if who == principal)

    def held_bytes(self) -> int:
        return sum(stream.held_bytes for stream in self.server.held_bytes._clients())


def limit(name: QuotaName, value: float, principal: str | None = "anna") -> Quota:
    return Quota(principal, None, {name: value})


async def raw_principal(wire: Any, server: Any, identity: Identity) -> Any:
    client = await wire.raw(server)
    handshake = ClientHandshake(identity, bytes(NONCE_BYTES), None)
    client.write_handshake(handshake.hello())
    client.write_handshake(handshake.answer(bytes((await client.read_frame()).header)))
    handshake.finish(bytes((await client.read_frame()).header))
    return client


def test_a_client_is_told_of_a_used_up_quota_and_what_it_still_sends_waits(run: Any, wire: Any) -> None:
    async def scenario() -> None:
        tenants = Tenants()
        server = await tenants.start(wire, limit("producer_byte_rate", 100_000))
        anna = await wire.connect(server, holder_of(ANNA))
        ben = await wire.connect(server, holder_of(BEN))
        began_s = asyncio.get_running_loop().time()
        await anna.request(PRODUCE, b"v" * 250_000, timeout_s=60)  # A second is saved.
        assert 1.0 < anna.throttled_s(Produce) <= 1.6
        parked = anna.request(PRODUCE, b"v" * 1000, timeout_s=0.2)
        # Others, and what a member must not be late with, go on.
        await anna.request(COMMIT, timeout_s=0.2)
        assert anna.throttled_s(messages.CommitOffsets) == 0
        await ben.request(PRODUCE, b"v" * 10 * MIB, timeout_s=10)
        assert not parked.done()
        await parked  # The time for which it is throttled counts for no time-out.
        assert asyncio.get_running_loop().time() - began_s > 0.4

    run(scenario)


def test_a_client_that_ignores_its_quota_has_at_most_16_mib_in_the_server(
    run: Any, wire: Any, eventually: Any
) -> None:
    async def scenario() -> None:
        tenants = Tenants()
        server = await tenants.start(wire, limit("producer_byte_rate", 2 * MIB))
        rude = await raw_principal(wire, server, holder_of(ANNA))
        ben = await wire.connect(server, holder_of(BEN))
        header, batch = ENCODER.encode(PRODUCE), bytes(MIB - 100)
        for number in range(64):
            rude.write_request(Produce.api, number + 1, header, batch)
        most = 0
        for _ in range(100):
            await asyncio.sleep(0.01)
            most = max(most, tenants.held_bytes())
            await ben.request(PRODUCE, b"v", timeout_s=1)
        assert PARKED_BYTES_MAX <= most <= 16 * MIB
        # It has a second that is saved, a second of debt, and what time has brought.
        assert tenants.bytes_of("anna") <= 8 * MIB
        tenants.quotas.replace([])
        await eventually(lambda: tenants.bytes_of("anna") == 64 * len(batch))
        assert tenants.held_bytes() < MIB

    run(scenario)


def test_records_that_want_no_answer_are_parked_and_none_is_lost(
    run: Any, wire: Any, eventually: Any
) -> None:
    async def scenario() -> None:
        tenants = Tenants()
        server = await tenants.start(wire, limit("producer_byte_rate", 20_000))
        rude = await raw_principal(wire, server, holder_of(ANNA))
        for _ in range(10):
            rude.write_request(Produce.api, 0, ENCODER.encode(UNACKED), bytes(10_000), FLAG_ONE_WAY)
        await asyncio.sleep(0.3)
        assert 30_000 <= tenants.bytes_of("anna") <= 50_000
        tenants.quotas.replace([limit("producer_byte_rate", 1e9)])
        await eventually(lambda: tenants.bytes_of("anna") == 100_000)

    run(scenario)


def test_an_honest_client_without_answers_is_told_too(run: Any, wire: Any, eventually: Any) -> None:
    async def scenario() -> None:
        server = await Tenants().start(wire, limit("producer_byte_rate", 1000))
        anna = await wire.connect(server, holder_of(ANNA))
        anna.send(UNACKED, bytes(5000))
        await eventually(lambda: anna.throttled_s(Produce) > 1)

    run(scenario)


def test_waiting_requests_end_with_their_connection_and_cost_nothing(
    run: Any, wire: Any, eventually: Any
) -> None:
    async def scenario() -> None:
        tenants = Tenants()
        server = await tenants.start(wire, limit("producer_byte_rate", 1000))
        steps: list[str] = []

        def wait(peer: Any, request: AnyRequest, payload: memoryview) -> Any:
            async def acquire() -> Any:
                try:
                    await peer.throttle.acquire("producer_byte_rate", 100_000)
                except DisconnectedError:
                    steps.append("gone")
                    raise
                return messages.ListOffsetsResponse(0, None)

            is_list = isinstance(request, messages.ListOffsets)
            return acquire() if is_list else tenants.handle(peer, request, payload)

        server.handler = wait
        staying = await raw_principal(wire, server, holder_of(ANNA))
        staying.write_request(Produce.api, 1, ENCODER.encode(PRODUCE), bytes(2800))
        await eventually(lambda: tenants.bytes_of("anna") == 2800)  # In debt for 1.8 s.
        peers = []
        for _ in range(20):
            leaving = await raw_principal(wire, server, holder_of(ANNA))
            leaving.write_request(Produce.api, 1, ENCODER.encode(PRODUCE), bytes(100_000))
            lists = ENCODER.encode(messages.ListOffsets("topic", 7, 0, -1))
            leaving.write_request(messages.ListOffsets.api, 2, lists)
            await eventually(lambda: tenants.held_bytes() > 100_000)
            peers += [
                weakref.ref(stream)
                for stream in server._authenticated
                if stream.held_bytes > 100_000
            ]
            leaving.close()
            await eventually(lambda: wire.connections(server) == 1)
        await eventually(lambda: len(steps) == 20)
        gc.collect()
        assert len(peers) == 20
        assert [peer() for peer in peers] == [None] * 20
        # Who stays does not wait for what those had wanted.
        staying.write_request(Produce.api, 3, ENCODER.encode(PRODUCE), bytes(10))
        await eventually(lambda: tenants.bytes_of("anna") == 2810)

    run(scenario)


def test_a_quota_of_0_lets_nothing_through_until_it_is_removed(
    run: Any, wire: Any, eventually: Any
) -> None:
    async def scenario() -> None:
        tenants = Tenants()
        server = await tenants.start(wire, limit("producer_byte_rate", 0))
        anna = await wire.connect(server, holder_of(ANNA))
        answers = [anna.request(PRODUCE, b"v", timeout_s=0.1) for _ in range(3)]
        await eventually(lambda: anna.throttled_s(Produce) > 50)
        await asyncio.sleep(0.2)
        assert tenants.handled == []
        told = asyncio.get_running_loop().create_future()
        anna.on_throttled_less(lambda: told.set_result(None))
        tenants.quotas.replace([])
        await told
        assert anna.throttled_s(Produce) == 0
        await asyncio.gather(*answers)

    run(scenario)


def test_a_request_that_waits_behind_others_is_not_given_up(
    run: Any, wire: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayq.actors.quotas.TOLD_S_MAX", 0.05)
    monkeypatch.setattr("rayq.actors.quotas.TOLD_AGAIN_S", 0.05)

    async def scenario() -> None:
        tenants = Tenants()
        server = await tenants.start(wire, limit("producer_byte_rate", 0))
        anna = await wire.connect(server, holder_of(ANNA))
        parked = anna.request(PRODUCE, b"v", timeout_s=0.5)
        await asyncio.sleep(1.5)
        assert not parked.done()
        tenants.quotas.replace([])
        await parked

    run(scenario)


def test_clients_of_one_account_share_it_and_each_has_its_turn(run: Any, wire: Any) -> None:
    async def scenario() -> None:
        tenants = Tenants()
        server = await tenants.start(wire, limit("producer_byte_rate", 400_000))
        clients = [await raw_principal(wire, server, holder_of(ANNA)) for _ in range(4)]
        for partition, client in enumerate(clients):
            header = ENCODER.encode(Produce("topic", partition, 0, -1, 1000))
            for number in range(100):
                client.write_request(Produce.api, number + 1, header, bytes(20_000))
        await asyncio.sleep(2.0)
        # Two seconds, one that was saved, and one of debt.
        assert 1_200_000 <= tenants.bytes_of("anna") <= 1_700_000
        waited = tenants.partitions[-20:]
        assert all(waited.count(partition) == 5 for partition in range(4))

    run(scenario)


def test_process_time_is_charged_and_all_requests_but_promises_wait(run: Any, wire: Any) -> None:
    async def scenario() -> None:
        tenants = Tenants()
        server = await tenants.start(wire, limit("request_percentage", 1))
        clock = server.environment.clock

        def work(peer: Any, request: AnyRequest, payload: memoryview) -> Any:
            async def steps() -> Any:
                until_s = clock.monotonic() + 0.02
                await asyncio.sleep(0)
                while clock.monotonic() < until_s:
                    pass
                return messages.ListOffsetsResponse(0, None)

            is_commit = isinstance(request, messages.CommitOffsets)
            return messages.CommitOffsetsResponse([]) if is_commit else steps()

        server.handler = work
        anna = await wire.connect(server, holder_of(ANNA))
        await anna.request(messages.ListOffsets("topic", 7, 0, -1), timeout_s=60)
        assert anna.throttled_s(messages.ListOffsets) > 0.5  # 20 ms or more, at 10 ms a second.
        await anna.request(messages.ListOffsets("topic", 7, 0, -1), timeout_s=60)
        parked = anna.request(messages.ListOffsets("topic", 7, 0, -1), timeout_s=0.1)
        await anna.request(COMMIT, timeout_s=0.2)
        await asyncio.sleep(0.3)
        assert not parked.done()
        tenants.quotas.replace([])
        await parked

    run(scenario)


def test_time_from_before_a_quota_is_not_charged_to_it(run: Any, wire: Any) -> None:
    async def scenario() -> None:
        tenants = Tenants()
        server = await tenants.start(wire)
        clock = server.environment.clock
        work_s = 0.3

        def work(peer: Any, request: AnyRequest, payload: memoryview) -> Any:
            until_s = clock.monotonic() + work_s
            while clock.monotonic() < until_s:
                pass
            return messages.ListOffsetsResponse(0, None)

        server.handler = work
        anna = await wire.connect(server, holder_of(ANNA))
        await anna.request(messages.ListOffsets("topic", 7, 0, -1), timeout_s=60)
        # The quota allows a request of an instant, and none of 0.3 s.
        tenants.quotas.replace([limit("request_percentage", 10)])
        work_s = 0.0
        await anna.request(messages.ListOffsets("topic", 7, 0, -1), timeout_s=60)
        assert anna.throttled_s(messages.ListOffsets) == 0
        work_s = 0.3
        await anna.request(messages.ListOffsets("topic", 7, 0, -1), timeout_s=60)
        assert anna.throttled_s(messages.ListOffsets) > 1

    run(scenario)


def test_what_comes_after_the_quota_was_removed_stays_behind_what_waits(
    run: Any, wire: Any, eventually: Any
) -> None:
    async def scenario() -> None:
        tenants = Tenants()
        server = await tenants.start(wire, limit("producer_byte_rate", 0))
        client = await raw_principal(wire, server, holder_of(ANNA))

        def send(partitions: range) -> None:
            for partition in partitions:
                header = ENCODER.encode(Produce("topic", partition, 0, -1, 1000))
                client.write_request(Produce.api, partition + 1, header, b"v")

        send(range(100))
        await eventually(lambda: tenants.held_bytes() >= 100 * PARKED_FRAME_BYTES)
        tenants.quotas.replace([])
        # Those that wait go one in a turn of the loop, and these come meanwhile.
        send(range(100, 200))
        await eventually(lambda: len(tenants.partitions) == 200)
        assert tenants.partitions == list(range(200))

    run(scenario)


def test_connections_are_limited_in_number_and_rate(run: Any, wire: Any, eventually: Any) -> None:
    async def scenario() -> None:
        tenants = Tenants()
        server = await tenants.start(
            wire,
            Quota("anna", None, {"max_connections": 2}),
            Quota("ben", None, {"connection_creation_rate": 1}),
        )
        opened = [await wire.connect(server, holder_of(ANNA)) for _ in range(2)]
        with pytest.raises(QuotaLimitError, match="has 2 connections to this process, and its quota"):
            await wire.connect(server, holder_of(ANNA))
        await wire.connect(server)  # A superuser has no quotas.
        opened[0].close()
        await eventually(lambda: wire.connections(server) == 2)
        await wire.connect(server, holder_of(ANNA))
        with pytest.raises(QuotaLimitError, match="more often"):
            for _ in range(4):
                await wire.connect(server, holder_of(BEN))

    run(scenario)


def test_throttled_time_is_counted_for_each_principal(run: Any, wire: Any) -> None:
    async def scenario() -> None:
        server = await Tenants().start(wire, limit("producer_byte_rate", 10_000))
        anna = await wire.connect(server, holder_of(ANNA))
        await anna.request(PRODUCE, bytes(12_000), timeout_s=60)
        await asyncio.sleep(0.4)
        (sample,) = [
            sample
            for sample in server.environment.metrics.collect()
            if sample.name == "rayq_throttled_seconds_total"
        ]
        assert (sample.labels["principal"], sample.labels["quota"]) == (
            "anna",
            "producer_byte_rate",
        )
        assert 0.1 < sample.value <= 0.3

    run(scenario)
