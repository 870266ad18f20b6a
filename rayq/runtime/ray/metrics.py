"""Hands what a process measures to Ray, whose agent on each node serves it to Prometheus.

Everything goes out as a gauge of `ray.util.metrics`, counters and the buckets of histograms too: a
counter of Ray's cannot say 0, so that an alert would miss the first time that something happens,
and the agent keeps it forever when its process is gone. The agent forgets a gauge that was not set
for two of its report intervals (20 s), so that a figure that is no longer measured is not shown.
Prometheus's `rate` and `increase` look at the numbers, not at the declared kind. Names gain Ray's
prefix: `ray_rayq_bytes_in_total`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from ray.util.metrics import Gauge

from rayq.client.admin.metrics import GroupLag
from rayq.client.admin.prometheus import series
from rayq.client.client import Client
from rayq.client.environment import system_environment
from rayq.config import ClusterConfig
from rayq.environment import Address, Environment
from rayq.errors import RayqError
from rayq.metrics import CATALOGUE, Sample
from rayq.wire.authentication import Identity, client_key

logger = logging.getLogger(__name__)

class RayExporter:
    """Gives Ray the samples of one process, each time all of them."""

    def __init__(self) -> None:
        self._gauges: dict[str, Gauge] = {}

    def export(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            metric = CATALOGUE[sample.name]
            for name, labels, value in series(metric, sample):
                self._set(name, labels, metric.help, value)

    def _set(self, name: str, labels: dict[str, str], text: str, value: float) -> None:
        gauge = self._gauges.get(name)
        if gauge is None:
            gauge = self._gauges[name] = Gauge(name, text, tuple(labels))
        gauge.set(value, labels)


async def export_forever(environment: Environment, config: ClusterConfig) -> None:
    """Exports what this process measures, every `metrics_interval_ms`. Ray's part runs in a thread:
    it takes some microseconds for each figure, and a process may hold many partitions."""
    exporter = RayExporter()
    while True:
        await asyncio.sleep(config.metrics_interval_ms / 1000)
        await asyncio.to_thread(exporter.export, environment.metrics.collect())


async def export_group_lag_forever(
    config: ClusterConfig,
    *,
    cluster_name: str,
    cluster_id: str,
    secret: bytes,
    brokers: Sequence[Address],
) -> None:
    """Exports the lag of every group; one process of the cluster does this for all."""
    identity = Identity(
        role="client", key=client_key(secret), cluster_id=cluster_id, broker=None
    )
    client = Client(system_environment(config), identity, brokers, config, name="group lag")
    lag, exporter = GroupLag(client, cluster_name), RayExporter()
    interval_s = config.metrics_interval_ms / 1000
    is_known = True
    while True:
        await asyncio.sleep(interval_s)
        try:
            samples = await lag.collect(timeout_s=max(interval_s, 5.0))
        except RayqError as error:
            if is_known:  # Once each time that it begins to fail.
                logger.warning("the lag of groups is not known: %s", error)
            is_known = False
            continue
        is_known = True
        await asyncio.to_thread(exporter.export, samples)
