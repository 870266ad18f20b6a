"""The audit of a whole cluster: who changed what, logged in, or was denied."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rayq
from rayq import AuditLine, Cluster, messages
from rayq.actors.controller.controller import Controller
from rayq.client.addresses import parse_addresses
from rayq.client.admin.dead_letters import DeadLetters, Filter
from rayq.client.client import Client
from rayq.client.environment import system_environment
from rayq.config import ClusterConfig
from rayq.core.access.audit import encode_line
from rayq.core.cluster.facts import changed
from rayq.core.cluster.records import ProducerIdsAllocated
from rayq.core.cluster.topic_changes import AUDIT_TOPIC
from rayq.errors import (
    AuthenticationError,
    AuthorizationError,
    ControllerUnavailableError,
    DeliveryError,
    InvalidTopicError,
)
from rayq.messages import REQUESTS
from rayq.testing import LocalCluster
from rayq.wire.authentication import Identity
from tests.local.cli_support import Command
from tests.local.principal_support import Named
from tests.local.support import eventually, leader_of, wait_in_sync
from tests.wire.recorded_messages import example_of

CHANGES = [
    kind
    for kind in REQUESTS.values()
    if issubclass(kind, messages.Change)
    and kind.__module__.startswith("rayq.")
    and kind.is_audited
]
EVERYTHING: tuple[Any, ...] = (
    ("all", "cluster", "cluster"),
    ("all", "topic", "*"),
    ("all", "queue", "*"),
    ("all", "principal", "*"),
)


def audit(cluster: Cluster, since_ms: int = 0) -> list[AuditLine]:
    """All lines, as far as they are written."""
    page = cluster.admin.read_audit(since_ms=since_ms)
    lines = page.lines
    while not page.is_end:
        page = cluster.admin.read_audit(offset=page.next_offset)
        lines += page.lines
    return lines


def wait_for(
    cluster: Cluster, has_all: Callable[[list[AuditLine]], bool], what: str
) -> list[AuditLine]:
    found: list[AuditLine] = []

    def has() -> bool:
        found[:] = audit(cluster)
        return has_all(found)

    eventually(has, what)
    return found


def of(lines: list[AuditLine], principal: str, kind: str = "change") -> list[AuditLine]:
    return [line for line in lines if (line.principal, line.kind) == (principal, kind)]


@pytest.fixture
def any_change_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the controller make a change for each request, whatever it asks for; the rest is as
    always."""
    decide = Controller._decide

    def make(self: Controller, request: messages.AnyRequest) -> Any:
        if isinstance(request, messages.Change):
            return changed([ProducerIdsAllocated(self.state.next_producer_id + 1)])
        return decide(self, request)

    monkeypatch.setattr(Controller, "_decide", make)


def test_each_change_leaves_exactly_one_line_with_who_and_from_where(
    cluster: LocalCluster, request: pytest.FixtureRequest
) -> None:
    anna = Named(cluster, *EVERYTHING)
    request.getfixturevalue("any_change_is_made")
    assert len(CHANGES) > 15
    with anna.connect() as hers:
        for asker in (hers, cluster):
            client, background = asker.shared_client()
            for kind in CHANGES:
                background.run(client.change(example_of(kind), timeout_s=60))

    names = [kind.__name__ for kind in CHANGES]

    def requests_of(lines: list[AuditLine], principal: str) -> list[str]:
        return [line.request for line in of(lines, principal)]

    def has_all(lines: list[AuditLine]) -> bool:
        hers, own = (requests_of(lines, principal) for principal in (anna.name, "superuser"))
        return len(hers) >= len(names) and own[-len(names) :] == names

    lines = wait_for(cluster, has_all, "all changes are in the audit")
    assert requests_of(lines, anna.name) == names
    for line in of(lines, anna.name):
        assert line.token_id == anna.token_id and line.address == "127.0.0.1"
        assert abs(line.time_ms - time.time() * 1000) < 120_000
        assert line.what.startswith("{")
    assert len({line.id for line in lines}) == len(lines)


def test_requests_that_are_refused_or_change_nothing_leave_no_line(cluster: LocalCluster) -> None:
    anna = Named(cluster, ("create", "topic", "once"), ("delete", "topic", "once"))
    with anna.connect() as hers:
        hers.create_topic("once")
        with pytest.raises(AuthorizationError):
            hers.create_topic("other")
        hers.admin.delete_topic("once")
    lines = wait_for(
        cluster,
        lambda lines: len(of(lines, anna.name)) == 2 and bool(of(lines, anna.name, "denied")),
        "the changes and the denial are there",
    )
    created, deleted = of(lines, anna.name)
    assert json.loads(created.what)["name"] == "once" and created.request == "CreateTopic"
    assert deleted.request == "DeleteTopic"
    (denied,) = of(lines, anna.name, "denied")
    assert denied.request == "CreateTopic" and "may not create topic 'other'" in denied.what
    assert of(lines, anna.name, "login")
    created_principal = [line for line in of(lines, "superuser") if anna.name in line.what]
    assert {line.request for line in created_principal} >= {"CreatePrincipal", "CreateToken"}


@pytest.fixture
def lose(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of requests whose next answer is lost, and with it the controller that made it."""
    lost: list[str] = []
    handle = Controller.handle

    async def handle_and_lose(controller: Controller, request: messages.AnyRequest) -> Any:
        answer = await handle(controller, request)
        if isinstance(request, messages.Forward):
            name = REQUESTS[request.kind].__name__
            if name in lost:
                lost.remove(name)
                controller.end("the test ends it")
                raise ControllerUnavailableError("The test lost an answer.")
        return answer

    monkeypatch.setattr(Controller, "handle", handle_and_lose)
    yield lost
    assert not lost


def test_a_change_that_is_repeated_after_its_controller_died_is_one_line(
    fragile: LocalCluster, lose: list[str]
) -> None:
    anna = Named(fragile, *EVERYTHING)
    with anna.connect() as hers:
        for number in range(3):
            lose.append("CreateTopic")
            hers.create_topic(f"t{number}", 1)
    lines = wait_for(fragile, lambda lines: len(of(lines, anna.name)) >= 3, "three lines")
    assert [json.loads(line.what)["name"] for line in of(lines, anna.name)] == ["t0", "t1", "t2"]


def test_no_change_is_lost_or_told_twice_where_the_leader_of_the_audit_dies(
    fragile: LocalCluster,
) -> None:
    anna = Named(fragile, *EVERYTHING)
    eventually(
        lambda: AUDIT_TOPIC in fragile.admin.list_topics(internal=True), "there is an audit"
    )
    wait_in_sync(fragile, AUDIT_TOPIC)
    with anna.connect() as hers:
        hers.create_topic("t", 1)
        for number in range(30):
            if number in (10, 20):
                fragile.kill_replica(AUDIT_TOPIC, 0, leader_of(fragile, AUDIT_TOPIC))
            hers.admin.alter_topic_config("t", retention_ms=1_000_000 + number)
    lines = wait_for(fragile, lambda lines: len(of(lines, anna.name)) >= 31, "all changes")
    assert [
        json.loads(line.what)["changes"]["retention_ms"] for line in of(lines, anna.name)[1:]
    ] == [1_000_000 + number for number in range(30)]
    ids = Counter(line.id for line in lines if line.kind == "change")
    assert set(ids.values()) == {1}


def test_a_flood_of_denials_is_a_line_a_second_with_the_number_of_the_others(
    cluster: LocalCluster, topic: str
) -> None:
    anna = Named(cluster)
    begun_s = time.monotonic()
    count = 400
    with anna.connect() as hers:
        client, background = hers.shared_client()

        async def be_denied() -> None:
            address = client.addresses()[0]
            request = messages.DeleteTopic(topic)
            for _ in range(count):
                with pytest.raises(AuthorizationError):
                    await client.ask(address, request, timeout_s=60)

        background.run(be_denied())
    lasted_s = time.monotonic() - begun_s

    def told(lines: list[AuditLine]) -> int:
        return sum(1 + line.left_out for line in of(lines, anna.name, "denied"))

    lines = wait_for(cluster, lambda lines: told(lines) >= count, "all denials are counted")
    assert told(lines) == count
    assert len(of(lines, anna.name, "denied")) <= lasted_s + 3


def test_an_audit_that_cannot_be_written_stops_nothing_and_loses_no_change(
    fragile: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    anna = Named(fragile, ("create", "topic", "*"))
    eventually(
        lambda: AUDIT_TOPIC in fragile.admin.list_topics(internal=True), "there is an audit"
    )
    wait_in_sync(fragile, AUDIT_TOPIC)
    fragile.admin.alter_topic_config(AUDIT_TOPIC, min_insync_replicas=3)
    killed = (leader_of(fragile, AUDIT_TOPIC) + 1) % 3
    fragile.kill_broker(killed)
    eventually(
        lambda: len(fragile.admin.describe_topic(AUDIT_TOPIC).partitions[0].isr) == 2,
        "the audit has too few replicas in sync",
    )
    monkeypatch.setattr("rayq.core.access.audit.LINES_MAX", 2)
    with anna.connect() as hers:
        hers.create_topic("before", 1, 1)
        begun_s = time.monotonic()
        for number in range(5):
            hers.create_topic(f"t{number}", 1, 1)
            with pytest.raises(AuthorizationError):
                hers.admin.delete_topic("before")
        assert time.monotonic() - begun_s < 20, "no request waits for the audit"
    assert not of(audit(fragile), anna.name), "it can be read"
    fragile.start_broker(killed)
    lines = wait_for(fragile, lambda lines: len(of(lines, anna.name)) >= 6, "all changes")
    assert len(of(lines, anna.name)) == 6


def test_the_audit_has_no_tokens_keys_or_values(
    fragile: LocalCluster, tmp_path: Path
) -> None:
    anna = Named(fragile, ("write", "topic", "orders"))
    fragile.create_topic("orders", 1)
    fragile.create_topic("other", 1)
    secret = anna.token.text.rpartition(f"{anna.name}-")[2]
    with anna.connect() as hers:
        with hers.producer() as producer:
            producer.send("orders", b"value-of-a-record", key=b"key-of-a-record").result(60)
        with hers.producer() as producer, pytest.raises(AuthorizationError):
            producer.send("other", b"value-of-a-record", key=b"key-of-a-record").result(60)
    at = fragile.addresses[0]
    wrong = anna.token.text[:-5] + "AAAAA"
    with rayq.connect(at, token=wrong) as connection, pytest.raises(AuthenticationError):
        connection.admin.list_topics(timeout_s=10)
    nobody = f"rayq2-{anna.token.text}-{'b' * 43}"
    with rayq.connect(at, token=nobody) as connection, pytest.raises(AuthenticationError):
        connection.admin.list_topics(timeout_s=10)
    fragile.make_current()
    lines = wait_for(
        fragile,
        lambda lines: bool(
            of(lines, anna.name, "failed_login") and of(lines, "(unknown)", "failed_login")
        ),
        "the failed logins are there",
    )
    assert of(lines, "(unknown)", "failed_login")[0].what == "claimed to be '(a token)'"
    segments = list((tmp_path / "data").glob(f"*/{AUDIT_TOPIC}-0/*.log"))
    assert len(segments) == 3
    kept = [path.read_bytes() for path in segments]
    kept += [path.read_bytes() for path in (tmp_path / "data").glob("*/metadata/*")]
    assert any(b"CreateToken" in data for data in kept)
    for hidden in (secret, secret[5:-5], wrong[-40:], "value-of-a-record", "key-of-a-record"):
        assert not any(hidden.encode() in data for data in kept), hidden


def test_reading_the_audit_needs_the_right_to_describe_the_cluster_and_nobody_writes_it(
    cluster: LocalCluster,
) -> None:
    anna, ben = Named(cluster), Named(cluster, ("describe", "cluster", "cluster"))
    with ben.connect() as his:
        eventually(lambda: bool(of(audit(his), ben.name, "login")), "his login is there")
    with anna.connect() as hers, pytest.raises(AuthorizationError, match="describe the cluster"):
        hers.admin.read_audit()
    with pytest.raises(DeliveryError, match="is rayq's own"), cluster.producer() as producer:
        producer.send(AUDIT_TOPIC, b"forged")
    with pytest.raises(InvalidTopicError):
        cluster.admin.delete_topic(AUDIT_TOPIC)
    with pytest.raises(InvalidTopicError):
        cluster.admin.alter_topic_config(AUDIT_TOPIC, cleanup_policy="compact")
    cluster.admin.alter_topic_config(AUDIT_TOPIC, retention_ms=365 * 86_400_000)
    cluster.admin.alter_topic_config(AUDIT_TOPIC, retention_ms=30 * 86_400_000)


def test_a_redrive_is_told_with_the_number_of_its_records(cluster: LocalCluster) -> None:
    anna = Named(cluster, *EVERYTHING)
    with cluster.create_queue("redriven") as queue:
        queue.put_many([b"1", b"2", b"3"])
        left = 3
        while left:
            for task in queue.take(left, timeout_s=10.0):
                task.reject("broken")
                left -= 1
        queue.flush()
    with anna.connect() as hers:
        client, background = hers.shared_client()
        letters = DeadLetters(client, "redriven", timeout_s=60.0)
        moved = 0

        def move() -> bool:
            nonlocal moved
            moved += background.run(letters.settle(Filter(), to_topic="")).moved
            return moved == 3

        eventually(move, "all of them are dead letters, and moved back")

    def told(lines: list[AuditLine]) -> int:
        return sum(line.objects for line in of(lines, anna.name, "redrive"))

    lines = wait_for(cluster, lambda lines: told(lines) >= 3, "the redrive is there")
    assert told(lines) == 3
    first = of(lines, anna.name, "redrive")[0]
    assert first.what.startswith("moved back, from queue redriven.dead in redriven.dead-")


def test_a_cluster_without_principals_has_no_audit(tmp_path: Path) -> None:
    with LocalCluster(brokers=1, data_dir=tmp_path / "data") as cluster:
        cluster.create_topic("t", 1)
        with rayq.connect(cluster.addresses[0], token="rayq-" + "A" * 43) as wrong:
            with pytest.raises(AuthenticationError):
                wrong.admin.list_topics(timeout_s=10)
        assert cluster.admin.read_audit() == ([], None, True)
        assert cluster.admin.list_topics(internal=True) == ["t"]
        for broker in cluster._servers.brokers.values():  # type: ignore[union-attr]
            assert not any(broker.metadata.state.requests_done.values())


def test_the_command_shows_filters_and_follows(
    cluster: LocalCluster, rayq_command: Command
) -> None:
    anna = Named(cluster)
    with anna.connect() as hers, pytest.raises(AuthorizationError):
        hers.create_topic("other")
    wait_for(cluster, lambda lines: bool(of(lines, anna.name, "denied")), "the denial is there")
    ran = rayq_command.well("audit", "--json", "--principal", anna.name)
    told = [json.loads(line) for line in ran.out.splitlines()]
    assert {line["kind"] for line in told} == {"login", "denied"}
    ran = rayq_command.well("audit", "--kind", "denied", "--principal", anna.name)
    assert "CreateTopic" in ran.out and "may not create" in ran.out
    [token] = cluster.admin.list_tokens(anna.name)
    ran = rayq_command.well("audit", "--kind", "login", "--principal", anna.name)
    assert token.token_id in ran.out, "who looks into a theft has to know which token it was"
    ran = rayq_command.well("audit", "--kind", "denied", "--principal", anna.name, "--since", "-1ms")
    assert "CreateTopic" not in ran.out
    ran = rayq_command("audit", "--kind", "denials")
    assert ran.code == 2 and "denied" in ran.err


def test_lines_that_came_late_are_shown_in_order_of_time_once_and_by_pages_too(
    cluster: LocalCluster, rayq_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    Named(cluster)  # From the first principal on there is an audit.
    wait_for(cluster, bool, "the audit has begun")
    began_ms = time.time_ns() // 1_000_000
    names = [f"late-{number}" for number in range(40)]
    times_ms = {name: began_ms + (number * 17) % 23 for number, name in enumerate(names)}
    big = os.urandom(1_500).hex()  # Nothing that compresses well.

    async def send() -> None:
        server = Identity(
            role="server", key=cluster._servers.secret, cluster_id=None, broker=None
        )
        client = Client(
            system_environment(), server, parse_addresses(cluster.addresses), ClusterConfig(),
            name="server",
        )  # fmt: skip
        try:
            for first in range(0, 40, 4):
                lines = [
                    encode_line(
                        AuditLine(
                            time_ms=times_ms[name], kind="denied", principal=name, what=big, id=name
                        )
                    )
                    for name in names[first : first + 4]
                ]
                # A server that got no answer sends them again.
                for _ in range(2):
                    await client.ask_leader(
                        AUDIT_TOPIC,
                        0,
                        lambda topic_id, leader, lines=lines: messages.AppendAudit(
                            topic_id, 0, leader.epoch, lines
                        ),
                        timeout_s=60,
                        attempt_timeout_s=10,
                    )
        finally:
            client.close()

    asyncio.run(send())
    wait_for(cluster, lambda lines: len({line.id for line in lines} & {*names}) == 40, "all")
    monkeypatch.setattr("rayq.client.admin.audit.MIB", 10_000)  # Of several pages.
    page, pages, seen = cluster.admin.read_audit(since_ms=began_ms), 1, []
    while True:
        assert page.lines == sorted(page.lines, key=lambda line: line.time_ms)
        seen += [line.id for line in page.lines if line.id in times_ms]
        if page.is_end:
            break
        page, pages = cluster.admin.read_audit(since_ms=began_ms, offset=page.next_offset), pages + 1
    assert pages > 3 and sorted(set(seen)) == sorted(names)
    in_order = sorted(names, key=times_ms.__getitem__)
    ran = rayq_command.well("audit", "--json", "--kind", "denied", "--since", str(began_ms))
    told = [json.loads(line)["id"] for line in ran.out.splitlines()]
    assert [line_id for line_id in told if line_id in times_ms] == in_order
    ran = rayq_command.well("audit", "--kind", "denied", "--since", str(began_ms))
    assert re.findall(r"late-\d+", ran.out) == in_order
