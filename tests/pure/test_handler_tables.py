"""Each request has exactly one handler at each server that answers it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rayq import messages
from rayq.actors.audit.coordinator import AuditCoordinator
from rayq.actors.broker.broker import Broker
from rayq.actors.controller.controller import Controller
from rayq.actors.groups.group_coordinator import GroupCoordinator
from rayq.actors.handlers import HandlerTable, answers
from rayq.actors.objects.object_server import ObjectServer
from rayq.actors.queues.leader import QueueLeader
from rayq.actors.queues.state_coordinator import QueueStateCoordinator
from rayq.actors.replica.leader import Leader
from rayq.actors.replica.replica import Replica
from rayq.actors.replica.replica_host import ReplicaHost
from rayq.actors.transactions.transaction_coordinator import TransactionCoordinator
from rayq.core.cluster.decisions import DECISIONS

SERVERS: dict[messages.Answerer, Any] = {
    "broker": Broker,
    "controller": Controller,
    "replica host": ReplicaHost,
    "replica": Replica,
    "leader": Leader,
    "queue leader": QueueLeader,
    "group coordinator": GroupCoordinator,
    "transaction coordinator": TransactionCoordinator,
    "queue state coordinator": QueueStateCoordinator,
    "audit coordinator": AuditCoordinator,
    "object server": ObjectServer,
}


@pytest.mark.parametrize("kind", messages.REQUESTS.values(), ids=lambda kind: kind.__name__)
def test_a_request_has_a_handler_where_it_says_that_it_is_answered_and_nowhere_else(
    kind: type[messages.AnyRequest],
) -> None:
    if not kind.__module__.startswith("rayq.") or kind is messages.Ping:
        return  # A request that a test declares; and one that no handler sees.
    handled = {answerer for answerer, server in SERVERS.items() if kind in server.handlers}
    if kind in DECISIONS:
        handled.add("controller")
    assert handled == set(kind.answered_by)


def _missing() -> HandlerTable:
    class Host:
        @answers(messages.StopReplicaHost)
        def stop(self, request: messages.StopReplicaHost) -> None: ...

    return HandlerTable("replica host", Host)


def _twice() -> HandlerTable:
    class Host:
        @answers(messages.StopReplicaHost)
        def stop(self, request: messages.StopReplicaHost) -> None: ...

        @answers(messages.StopReplicaHost)
        def end(self, request: messages.StopReplicaHost) -> None: ...

    return HandlerTable("replica host", Host)


def _foreign() -> HandlerTable:
    class Host(ReplicaHost):
        @answers(messages.CreateTopic)
        def create_topic(self, request: messages.CreateTopic) -> None: ...

    return HandlerTable("replica host", Host)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (_missing, r"differ in \['DescribeMetrics', 'DescribeQuotaUse'\]"),
        (_twice, "answers StopReplicaHost twice"),
        (_foreign, r"differ in \['CreateTopic'\]"),
    ],
)
def test_a_table_that_lacks_a_request_or_has_one_too_many_cannot_be_made(
    make: Callable[[], HandlerTable], told: str
) -> None:
    with pytest.raises(TypeError, match=told):
        make()
