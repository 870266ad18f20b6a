"""`rayq cluster metrics --serve`: what Prometheus scrapes, of any cluster."""

from __future__ import annotations

import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rayq.cli.serve_metrics import MetricsServer
from rayq.client.admin.prometheus import exported_labels, exposition
from rayq.errors import ConfigError
from rayq.metrics import CATALOGUE, SECONDS_BOUNDS, Sample
from rayq.testing import LocalCluster
from tests.local.cli_support import Command

LINE = re.compile(r'(\w+)\{((?:\w+="(?:[^"\\\n]|\\.)*",?)*)\} (\S+)')


@contextmanager
def served(cluster: LocalCluster) -> Iterator[str]:
    with MetricsServer(cluster, "0") as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()


def test_a_scrape_has_the_figures_of_the_whole_cluster(cluster: LocalCluster, topic: str) -> None:
    with cluster.producer() as producer:
        producer.send(topic, b"x").result(60)
    with served(cluster) as url:
        assert url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            text = answer.read().decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(url.replace("/metrics", "/"), timeout=60)
    found = [LINE.fullmatch(line) for line in text.splitlines() if not line.startswith("#")]
    assert found and all(found), text
    names = {line[1] for line in found if line}
    known = {name for metric in CATALOGUE.values() for name in exported_labels(metric)}
    assert names <= known and {"ray_rayq_active_brokers", "ray_rayq_process_up"} <= names
    (written,) = (
        line[3]
        for line in found
        if line and line[1] == "ray_rayq_records_in_total" and f'topic="{topic}"' in line[2]
    )
    assert float(written) == 1
    order = [line[1] for line in found if line]
    assert len(re.findall("^# TYPE ", text, re.M)) == len(names)
    assert order == sorted(order, key=order.index), "those of one name stand together"


def test_labels_are_escaped_and_buckets_are_series() -> None:
    name = next(metric.name for metric in CATALOGUE.values() if metric.kind == "histogram")
    counts = list(range(len(SECONDS_BOUNDS)))
    text = exposition([Sample(name, {"request": 'a"b\\c\nd'}, 1.5, 20, counts)])
    assert f'ray_{name}_bucket{{le="0.0005",request="a\\"b\\\\c\\nd"}} 0\n' in text
    assert f'ray_{name}_bucket{{le="+Inf",request="a\\"b\\\\c\\nd"}} 20\n' in text
    assert f'ray_{name}_sum{{request="a\\"b\\\\c\\nd"}} 1.5\n' in text


def test_a_cluster_that_does_not_answer_is_a_503(monkeypatch: pytest.MonkeyPatch, cluster: LocalCluster) -> None:
    def refuse() -> None:
        raise ConfigError("no broker answers")

    monkeypatch.setattr(cluster, "metrics", refuse)
    with served(cluster) as url, pytest.raises(urllib.error.HTTPError, match="503"):
        urllib.request.urlopen(url, timeout=60)


@pytest.mark.parametrize("where", ["", "x", "1.2.3.4", "h:p", "127.0.0.1:70000", "-1"])
def test_a_place_to_listen_that_is_none_is_one_line(rayq_command: Command, where: str) -> None:
    ran = rayq_command("cluster", "metrics", f"--serve={where}")
    assert ran.code == 2 and ran.err.count("\n") == 1 and "host:port" in ran.err.lower()
