"""TLS on every connection, clients' included."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme

import rayq
from rayq.cli import current
from rayq.testing import LocalCluster
from tests.local.cli_support import Command
from tests.local.support import FAST, eventually, leader_of, read_all, values


def certificates(path: Path, authority: trustme.CA) -> dict[str, str]:
    path.mkdir()
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    certificate.private_key_pem.write_to_path(str(path / "key.pem"))
    for number, blob in enumerate(certificate.cert_chain_pems):
        blob.write_to_path(str(path / "certificate.pem"), append=number > 0)
    authority.cert_pem.write_to_path(str(path / "ca.pem"))
    return {
        "tls_certificate": str(path / "certificate.pem"),
        "tls_key": str(path / "key.pem"),
        "tls_ca": str(path / "ca.pem"),
    }


def test_a_cluster_with_tls_works_and_lets_in_only_its_own(tmp_path: Path) -> None:
    config = certificates(tmp_path / "ours", trustme.CA())
    with LocalCluster(3, data_dir=tmp_path / "data", **FAST, **config) as cluster:
        cluster.create_topic("t")
        with cluster.producer() as producer:
            producer.send_many("t", [b"%d" % number for number in range(100)]).result(60)
            cluster.kill_replica("t", 0, leader_of(cluster, "t"))
            producer.send("t", b"100").result(60)
        assert values(read_all(cluster, "t")) == [b"%d" % number for number in range(101)]

        address, token = cluster.addresses[0], cluster.token
        with rayq.connect(address, token=token, **config) as other:
            assert other.admin.list_topics() == ["t"]
        with (
            rayq.connect(address, token=token) as without,
            pytest.raises(rayq.RayqError, match="TLS"),
        ):
            without.admin.list_topics(timeout_s=3)
        strangers = certificates(tmp_path / "strangers", trustme.CA())
        with (
            rayq.connect(address, token=token, **strangers) as stranger,
            pytest.raises(rayq.AuthenticationError, match="TLS"),
        ):
            stranger.admin.list_topics(timeout_s=3)


def test_tls_needs_all_of_its_files(tmp_path: Path) -> None:
    with pytest.raises(rayq.ConfigError, match="all three"):
        LocalCluster(1, data_dir=tmp_path, tls_certificate="only.pem")
    with pytest.raises(rayq.RayqError, match=r"missing\.pem"):
        LocalCluster(
            1,
            data_dir=tmp_path,
            tls_certificate=str(tmp_path / "missing.pem"),
            tls_key=str(tmp_path / "missing.pem"),
            tls_ca=str(tmp_path / "missing.pem"),
        )


def test_the_command_speaks_tls_by_its_environment(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = certificates(tmp_path / "ours", trustme.CA())
    with LocalCluster(1, data_dir=tmp_path / "data", **FAST, **config) as cluster:
        command = Command(cluster, tmp_path / "home", capfd, monkeypatch)

        def tells_of_tls() -> bool:
            with monkeypatch.context() as impatient:
                impatient.setattr(current, "CONNECT_TIMEOUT_S", 1.0)
                ran = command("topic", "list")
            assert ran.code == 1 and ran.err.count("\n") == 1
            return "TLS" in ran.err

        # On a slow machine the last attempt may end by the time-out alone.
        eventually(tells_of_tls, "the command tells of TLS")
        for name, path in config.items():
            monkeypatch.setenv(f"RAYQ_{name.upper()}", path)
        command.well("topic", "create", "t", "-r", "1")
        assert "t" in command.well("topic", "list").out
