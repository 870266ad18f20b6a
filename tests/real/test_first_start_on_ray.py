"""The first start on Ray died while it formatted: the same command works the second time."""

from __future__ import annotations

from pathlib import Path

import pytest

import rayq
from rayq.client.environment import system_environment
from rayq.errors import ConfigError, InvalidRequestError
from rayq.runtime.kept_settings import settings_for
from rayq.runtime.layout import format_broker
from tests.local.support import read_all, values


@pytest.mark.thorough
def test_a_start_after_one_that_died_amid_formatting(ray_here: None, tmp_path: Path) -> None:
    for broker in (0, 1):
        format_broker(
            system_environment(None), str(tmp_path), broker, cluster_id="died", secret=b"s"
        )
    (tmp_path / "broker-1" / "meta.json").unlink()
    cluster = rayq.start(str(tmp_path), brokers=2, port=19592, name="first")
    try:
        cluster.create_topic("t")
        with cluster.producer() as producer:
            producer.send("t", b"served").result(60)
        assert values(read_all(cluster, "t")) == [b"served"]
    finally:
        cluster.stop()


def test_a_directory_that_holds_data_without_its_meta_is_refused(
    ray_here: None, tmp_path: Path
) -> None:
    held = tmp_path / "broker-0" / "t-0"
    held.mkdir(parents=True)
    with pytest.raises(InvalidRequestError) as refused:
        rayq.start(str(tmp_path), port=19592, name="refused")
    told = str(refused.value)
    assert told.startswith(f"{held.parent} is not empty (t-0)") and "move it away first" in told
    assert [*tmp_path.rglob("*")] == [held.parent, held]


def test_a_start_goes_on_with_what_the_directories_on_the_nodes_keep(
    ray_here: None, tmp_path: Path
) -> None:
    """TLS here: files that are gone since are an error, and no reason to serve without."""
    tls = {key: str(tmp_path / key) for key in ("tls_certificate", "tls_key", "tls_ca")}
    kept = settings_for(None, name="kept", port=19592, given=tls)
    for broker in (0, 1):
        format_broker(
            system_environment(None),
            str(tmp_path),
            broker,
            cluster_id="c",
            secret=b"s",
            settings=None if broker == 0 else kept,
        )
    with pytest.raises(ConfigError, match=r"tls_\w+.*PEM"):
        rayq.start(str(tmp_path))
