"""The output of Ray's Prometheus endpoint against the catalogue, the dashboard and the alerts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray._private import worker

import rayq
from rayq import Cluster
from rayq.client.admin.prometheus import exported_labels
from rayq.errors import AuthorizationError, TopicExistsError
from rayq.metrics import CATALOGUE
from tests.local.support import eventually, partition_of, wait_in_sync

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
NAME = "metered"
SCRAPED_TIMEOUT_S = 150.0
"""How long it takes until the agent has all figures; `ray_here` sets how often it gets them."""
ONLY_ASKED = {"rayq_process_up"}
"""The metrics of the program that asks all processes; Prometheus has its own `up`."""
EXPORTED = {
    name: set(labels)
    for metric in CATALOGUE.values()
    if metric.name not in ONLY_ASKED
    for name, labels in exported_labels(metric).items()
}

NOT_HERE = {"ray_rayq_throttled_seconds_total", "ray_rayq_token_expires_seconds"}
"""Figures of principals that have a quota, or only tokens that expire: tests of whole clusters in
one process show them."""

Scrape = dict[str, list[tuple[dict[str, str], float]]]


@pytest.fixture(scope="module")
def metered(ray_here: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two brokers in which everything has happened that has a figure."""
    path = str(tmp_path_factory.mktemp("metered"))
    store = tmp_path_factory.mktemp("store")
    cluster = rayq.start(
        path,
        brokers=2,
        name=NAME,
        port=19692,
        metrics_interval_ms=500,
        remote_storage_url=f"file://{store}",
    )
    try:
        cluster.create_topic("orders", replication_factor=2)
        with pytest.raises(TopicExistsError):
            cluster.create_topic("orders")
        with cluster.producer() as producer:
            producer.send_many("orders", [b"x" * 100] * 1000).result(60)
        with cluster.producer(transactional_id="orders") as producer, producer.transaction():
            producer.send("orders", b"one")
        cluster.create_topic("old", remote_storage=True)
        cluster.admin.create_queue("tasks")
        cluster.admin.create_principal("anna")
        token = cluster.admin.create_token("anna").token
        with rayq.connect(cluster.addresses[0], token=token) as hers:
            with pytest.raises(AuthorizationError):
                hers.create_topic("not-hers")
        with cluster.consumer("orders", group="delays", auto_offset_reset="earliest") as consumer:
            seen = 0
            while seen < 400:
                seen += len(consumer.poll(timeout_s=1.0, max_records=400 - seen))
            consumer.commit()
        # No records come for this pool, so it starts no consumers.
        cluster.consumer_pool("orders", "idle", print, auto_offset_reset="latest")
        kill_follower(cluster)
        yield cluster
    finally:
        cluster.stop()


def kill_follower(cluster: Cluster) -> None:
    partition = wait_in_sync(cluster, "orders", brokers=2)
    (follower,) = (replica for replica in partition.replicas if replica.broker != partition.leader)
    assert follower.pid is not None
    os.kill(follower.pid, signal.SIGKILL)
    eventually(lambda: len(partition_of(cluster, "orders").isr) == 1, "the dead one leaves")
    wait_in_sync(cluster, "orders", brokers=2)


def scrape() -> Scrape:
    """Every sample of rayq's that the agent of this node shows, by name."""
    (node,) = ray.nodes()  # type: ignore[no-untyped-call]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
        text = answer.read().decode()
        found: Scrape = defaultdict(list)
        for name, labels, value in re.findall(r"^(ray_rayq_\w+)\{(.*)\} (\S+)$", text, re.M):
            found[name].append((dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value)))
        return found
    return {}  # The agent is starting.


@pytest.mark.thorough
def test_every_figure_reaches_prometheus_under_its_name_and_labels(metered: Cluster) -> None:
    deadline_s = time.monotonic() + SCRAPED_TIMEOUT_S
    while missing := set(EXPORTED) - NOT_HERE - set(found := of_this_cluster(scrape())):
        assert time.monotonic() < deadline_s, f"not exported: {sorted(missing)}"
        time.sleep(0.5)
    for name, samples in found.items():
        assert name in EXPORTED, name
        for labels, _ in samples:
            assert EXPORTED[name] <= set(labels), name
    at = {"group": "delays", "topic": "orders", "partition": "0"}
    lag = 600 + 2  # The record of the transaction, and its marker.
    assert values(found, "ray_rayq_consumergroup_group_lag", at) == {lag}
    assert min(values(found, "ray_rayq_consumergroup_group_lag_seconds", at)) > 0
    assert values(found, "ray_rayq_unclean_leader_elections_total", {}) == {0}
    produced = {"request": "Produce", "le": "+Inf"}
    assert max(values(found, "ray_rayq_request_seconds_bucket", produced)) >= 1


def of_this_cluster(found: Scrape) -> Scrape:
    ours = {
        name: [sample for sample in samples if sample[0].get("cluster") == NAME]
        for name, samples in found.items()
    }
    return {name: samples for name, samples in ours.items() if samples}


def values(found: Scrape, name: str, labels: dict[str, str]) -> set[float]:
    return {value for have, value in found[name] if labels.items() <= have.items()}


@pytest.mark.thorough
def test_each_process_has_a_log_file_with_elections_and_rebalances(metered: Cluster) -> None:
    logs = Path(worker.global_worker.node.get_logs_dir_path())
    controller = (logs / f"rayq-{NAME}-controller.log").read_text()
    elected = r"leader_elected topic=orders partition=0 epoch=1 leader=\d .* reason=.replicas on"
    assert re.search(elected, controller)
    assert re.search(r"isr_shrunk topic=orders partition=0 .* reason=.replicas on", controller)
    # The process that leads __consumer_offsets may have begun with another partition.
    groups = "".join(path.read_text() for path in logs.glob(f"rayq-{NAME}-[01]-*.log"))
    assert re.search(r"group_rebalanced group=delays epoch=1 members=1 reason=.member", groups)
    for broker in (0, 1):
        assert (logs / f"rayq-{NAME}-broker-{broker}.log").exists()
    for path in logs.glob(f"rayq-{NAME}-*.log"):
        assert path.stat().st_mode & 0o077 == 0, "only its owner reads it: the directory is Ray's"


# --- the files in deploy/ -------------------------------------------------------------------------


def expressions() -> Iterator[tuple[str, str, str]]:
    """`(where, PromQL, text with labels of the result)`"""
    dashboard: dict[str, Any] = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"], target["legendFormat"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            query = variable["query"]["query"]
            inside = re.fullmatch(r"label_values\((.*), (\w+)\)", query)
            assert inside is not None, query
            yield variable["name"], f"sum by ({inside[2]}) ({inside[1]})", ""
    alerts: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus-alerts.yml").read_text())
    for group in alerts["groups"]:
        for rule in group["rules"]:
            notes = " ".join(rule["annotations"].values())
            yield rule["alert"], rule["expr"], re.sub(r"\$labels\.(\w+)", r"{{\1}}", notes)


def test_dashboard_and_alerts_use_names_and_labels_that_are_exported() -> None:
    used = set()
    for where, expression, text in expressions():
        names = set(re.findall(r"\bray_\w+", expression))
        assert names, where
        assert names <= set(EXPORTED), f"{where}: {sorted(names - set(EXPORTED))}"
        used |= names
        for name, selector in re.findall(r"\b(ray_\w+)\{([^}]*)\}", expression):
            labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
            assert labels <= EXPORTED[name], f"{where}: {name} has no {labels - EXPORTED[name]}"
        kept: set[str] = set()
        for clause in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression):
            kept |= set(re.findall(r"\w+", clause))
        results = set(re.findall(r"\{\{\s*(\w+)", text)) - {"value"}
        assert results <= kept, f"{where}: the result has no label {sorted(results - kept)}"
        for name in names:
            rest = kept - EXPORTED[name]
            # Where two vectors are joined, each has the labels that the join names.
            joined = re.search(r"\bgroup_(left|right)\b", expression) is not None
            assert not rest or joined, f"{where}: {name} has no label {sorted(rest)}"
    assert len(used) > 30


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    alerts = yaml.safe_load((DEPLOY / "prometheus-alerts.yml").read_text())
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 15
    for rule in rules:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}
