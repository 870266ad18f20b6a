"""`rayq.connect()` where `rayq start` was run: it finds the cluster, and by address its token."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import rayq
from rayq.errors import AuthenticationError, NoClusterError
from rayq.runtime.current_cluster import Current, write_current
from rayq.testing import LocalCluster

RAY_ADDRESS = "127.0.0.1:1"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a user who has no cluster."""
    for name in ("RAY_ADDRESS", "RAYQ_TOKEN", "RAYQ_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAYQ_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def started(home: Path, cluster: LocalCluster) -> Current:
    """What `rayq start` leaves behind; the brokers are those of a LocalCluster."""
    current = Current(
        ray_address=RAY_ADDRESS,
        name="flights",
        brokers=cluster.addresses,
        path="/data",
        started_ray=True,
        token=cluster.token,
    )
    write_current(current)
    return current


def test_connect_finds_the_cluster_that_was_started_here(
    started: Current, cluster: LocalCluster, topic: str
) -> None:
    for name in (None, "flights"):
        with rayq.connect(name=name) as found:
            assert found.name == "flights"
            assert topic in found.admin.list_topics()
    with pytest.raises(NoClusterError, match="No cluster named 'other' was started"):
        rayq.connect(name="other")


def test_connect_by_address_finds_the_token(
    started: Current, home: Path, cluster: LocalCluster, topic: str
) -> None:
    # Also beside the token of another cluster.
    (home / "token").write_text("rayq-" + "A" * 43)
    with rayq.connect(cluster.addresses[0]) as found:
        assert topic in found.admin.list_topics()


def test_a_token_that_was_put_down_is_found_by_connect(
    home: Path, cluster: LocalCluster, topic: str
) -> None:
    address = cluster.addresses[0]
    with pytest.raises(AuthenticationError, match="`rayq token`"):
        rayq.connect(address)
    (home / "token").write_text(cluster.token + "\n")
    with rayq.connect(address) as found:
        assert topic in found.admin.list_topics()
    with rayq.connect(address, token=cluster.token) as found:
        assert topic in found.admin.list_topics()


def test_a_script_of_another_shell_finds_it_without_loading_ray(
    started: Current, topic: str
) -> None:
    program = (
        "import sys, rayq; cluster = rayq.connect();"
        "print(*cluster.admin.list_topics()); assert 'ray' not in sys.modules"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert topic in ran.stdout.split() and ran.stderr == ""


def test_without_any_cluster_connect_says_what_to_do(home: Path) -> None:
    with pytest.raises(NoClusterError, match="give the address of a broker"):
        rayq.connect()
