"""Answers without what a principal may not describe."""

from __future__ import annotations

import pytest

from rayq import messages
from rayq.config import ClusterConfig
from rayq.core.access.acls import AclTable
from rayq.core.access.rights import View
from rayq.core.access.shown import HIDDEN, RESOURCES_OF_LABELS, shown_error, shown_samples
from rayq.core.cluster.decisions import DECISIONS
from rayq.core.cluster.facts import NO_OBJECT_STORE, Facts
from rayq.core.cluster.records import (
    MetadataRecord,
    PartitionChanged,
    PartitionValue,
    QueueChanged,
    RemoteGarbage,
    TopicCreated,
)
from rayq.core.cluster.state import ClusterState
from rayq.errors import ConfigError, RayqError
from rayq.messages.acls import Acl
from rayq.metrics import CATALOGUE, Sample

NO_NAMES = {
    "broker", "cluster", "error", "kind", "operation", "partition", "pool", "process", "quota",
    "replica", "request",
}  # fmt: skip
"""Labels that name nothing with rights of its own."""


def view(*acls: Acl) -> View:
    return View(AclTable(acls), "anna", "h", ClusterState())


def sample(**labels: str) -> Sample:
    return Sample("rayq_x", labels, 1.0)


def test_metrics_leave_out_what_is_hidden() -> None:
    plain = sample(broker="0", partition="3")
    own = sample(topic="__consumer_offsets", partition="0")
    orders, secret = sample(topic="orders", partition="0"), sample(topic="secret", partition="0")
    both = sample(queue="mails", topic="orders")
    group = sample(group="billing")
    samples = [plain, own, orders, secret, both, group]
    reads_orders = Acl("anna", "allow", "read", "topic", "orders")
    assert shown_samples(view(reads_orders), samples) == [plain, orders]
    all_queues = Acl("anna", "allow", "describe", "queue", "*")
    assert shown_samples(view(reads_orders, all_queues), samples) == [plain, orders, both]
    of_cluster = Acl("anna", "allow", "describe", "cluster", "cluster")
    assert shown_samples(view(of_cluster), samples) == [plain, own]
    assert shown_samples(None, samples) == samples


def test_each_label_of_metrics_is_known_to_name_a_resource_or_none() -> None:
    labels = {label for metric in CATALOGUE.values() for label in metric.labels}
    assert labels <= NO_NAMES | RESOURCES_OF_LABELS.keys()


def metadata() -> ClusterState:
    state = ClusterState()
    records: list[MetadataRecord] = [
        TopicCreated("T", "orders", {}, 1),
        PartitionChanged("T", 0, PartitionValue((1,))),
        QueueChanged("Q", "payroll", "T", {"ordered_by_key": True}, 1),
        TopicCreated("D", "payroll.dead", {}, 1),
        QueueChanged("R", "payroll.dead", "D", {}, 1),
        TopicCreated("S", "__queue_state", {}, 1),
        RemoteGarbage("G", "former", 1, ()),
    ]
    for record in records:
        state.replay(record)
    return state


def refused(request: messages.AnyRequest, *acls: Acl) -> str:
    """The message for anna of a decision that refuses the request."""
    state = metadata()
    facts = Facts(ClusterConfig(), lambda: "id", lambda: 1, set, NO_OBJECT_STORE)
    with pytest.raises(RayqError) as caught:
        DECISIONS[type(request)](state, request, facts)
    return shown_error(View(AclTable(acls), "anna", "h", state), state, request, caught.value).message


@pytest.mark.parametrize(
    "request_",
    [
        messages.CreatePartitions(name="orders", total=3),
        messages.CreateQueue(
            name="mine", topic="orders", config={"retention": "delete_done", "dead_letters": "discard"}
        ),
        messages.DeleteTopic(name="payroll.dead"),
        messages.DeleteQueue(name="payroll.dead"),
    ],
    ids=lambda request: type(request).__name__,
)
def test_a_refused_change_names_no_hidden_queue_of_the_topic(
    request_: messages.AnyRequest,
) -> None:
    topics = Acl("anna", "allow", "all", "topic", "*")
    told = refused(request_, topics)
    assert "'payroll'" not in told and HIDDEN in told
    assert getattr(request_, "topic", request_.name) in told  # type: ignore[attr-defined]
    seen = refused(request_, topics, Acl("anna", "allow", "describe", "queue", "payroll"))
    assert "'payroll'" in seen and HIDDEN not in seen


def test_an_error_keeps_words_that_name_nothing_and_what_the_request_gives() -> None:
    state, nobody = metadata(), AclTable()
    error = ConfigError(
        "'orders' has 'payroll', 'former' and 'other', with 'payroll.dead-0' and 'orders-1'; say "
        "retention='topic'."
    )
    request = messages.DeleteTopic(name="orders")
    shown = shown_error(View(nobody, "anna", "h", state), state, request, error)
    assert shown.message == (
        f"'orders' has {HIDDEN}, {HIDDEN} and 'other', with {HIDDEN} and 'orders-1'; say "
        "retention='topic'."
    )
    assert type(shown) is ConfigError
