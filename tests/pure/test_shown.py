"""Answers without what a principal may not describe."""

from __future__ import annotations

from rayq.core.access.acls import AclTable
from rayq.core.access.rights import View
from rayq.core.access.shown import RESOURCES_OF_LABELS, shown_samples
from rayq.core.cluster.state import ClusterState
from rayq.messages.acls import Acl
from rayq.metrics import CATALOGUE, Sample

NO_NAMES = {
    "broker", "bucket", "cluster", "error", "kind", "operation", "partition", "pool", "process",
    "quota", "replica", "request",
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
