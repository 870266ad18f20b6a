"""A topic whose config has keys that only a newer version knows: brokers, replicas and clients of
this version ignore the keys, and keep them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayq.client.admin import topics
from rayq.config import parse_stored
from rayq.core.cluster import topic_changes
from rayq.errors import ConfigError
from rayq.testing import LocalCluster
from tests.local.support import read_all, values


def test_everything_works_with_a_key_of_tomorrow_also_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalCluster(brokers=3, data_dir=tmp_path) as cluster:
        cluster.create_topic("t", partitions=1, retention_ms=1_000_000)
        # Client and controller of tomorrow accept keys that this version refuses.
        with monkeypatch.context() as tomorrow:
            tomorrow.setattr(topics, "given_values", lambda kind, options: dict(options))
            tomorrow.setattr(topic_changes, "parse", parse_stored)
            cluster.admin.alter_topic_config("t", warp_factor=9)
        with cluster.producer() as producer:
            producer.send("t", b"1").result(60)
        with pytest.raises(ConfigError, match="warp_factor"):
            cluster.admin.alter_topic_config("t", warp_factor=10)
        cluster.admin.alter_topic_config("t", retention_ms=2_000_000)
    with LocalCluster(brokers=3, data_dir=tmp_path) as cluster:
        config = cluster.admin.describe_topic("t").config
        assert (config["retention_ms"], config["warp_factor"]) == (2_000_000, 9)
        with cluster.producer() as producer:
            producer.send("t", b"2").result(60)
        assert values(read_all(cluster, "t")) == [b"1", b"2"]
