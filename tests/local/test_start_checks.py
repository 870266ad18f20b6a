"""A start that cannot work on this machine is refused at once, before any process is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trustme

import rayq
from rayq.errors import (
    ConfigError,
    DirectoryInUseError,
    InvalidRequestError,
    RayqError,
    WrongClusterError,
)
from rayq.runtime.start_checks import tell_recovering
from rayq.testing import LocalCluster
from tests.local.support import FAST
from tests.local.test_tls import certificates


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that gets as far as Ray has failed the test."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("Ray was asked for")

    monkeypatch.setattr("rayq.entry.join_ray", refuse)
    monkeypatch.setattr("rayq.entry.has_ray", lambda: False)


def start(path: Path, **options: Any) -> RayqError:
    """The error with which `rayq.start` refuses."""
    with pytest.raises(RayqError) as refused:
        rayq.start(str(path), **options)
    return refused.value


def encrypted(key_pem: bytes) -> bytes:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(key_pem, None)
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )


@pytest.mark.parametrize("damage", ["missing", "no_pem", "of_another", "directory", "passphrase"])
def test_tls_files_that_are_no_use_are_named(tmp_path: Path, damage: str) -> None:
    config = certificates(tmp_path / "ours", trustme.CA())
    key = Path(config["tls_key"])
    pem = key.read_bytes()
    key.unlink()
    if damage == "no_pem":
        key.write_text("this is no key")
    elif damage == "of_another":
        key.write_bytes(Path(certificates(tmp_path / "b", trustme.CA())["tls_key"]).read_bytes())
    elif damage == "directory":
        key.mkdir()
    elif damage == "passphrase":
        key.write_bytes(encrypted(pem))
    refused = start(tmp_path / "data", brokers=1, **config)
    assert isinstance(refused, ConfigError)
    assert str(key) in str(refused) and "PEM" in str(refused)
    with pytest.raises(ConfigError):
        LocalCluster(1, data_dir=tmp_path / "data", **config)
    assert not (tmp_path / "data").exists()


def test_more_brokers_than_the_directory_holds(tmp_path: Path) -> None:
    with LocalCluster(3, data_dir=tmp_path, **FAST):
        pass
    refused = start(tmp_path, brokers=5)
    assert "holds 3 brokers, 5 were asked for" in str(refused)
    assert "broker-3, broker-4" in str(refused) and "brokers=3" in str(refused)
    with pytest.raises(RayqError, match="5 were asked for"):
        LocalCluster(5, data_dir=tmp_path)


def test_a_directory_that_is_in_use(tmp_path: Path) -> None:
    with LocalCluster(1, data_dir=tmp_path, **FAST):
        refused = start(tmp_path)
        assert isinstance(refused, DirectoryInUseError)
        assert "in use by process" in str(refused) and "Stop that cluster first" in str(refused)


def test_directories_of_two_clusters_a_file_and_a_number(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with LocalCluster(1, data_dir=tmp_path / name, **FAST):
            pass
    (tmp_path / "b" / "broker-0").rename(tmp_path / "a" / "broker-1")
    assert isinstance(start(tmp_path / "a"), WrongClusterError)
    (tmp_path / "file").touch()
    assert "is a file" in str(start(tmp_path / "file"))
    assert isinstance(start(tmp_path / "new", brokers=0), InvalidRequestError)


def test_a_start_names_the_first_partitions_that_wait_and_counts_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tell_recovering({f"t-{number}": "waits for broker 2" for number in range(300)})
    assert caplog.messages[0] == "t-0 waits for broker 2"
    assert len(caplog.messages) == 11 and caplog.messages[-1].startswith("290 more partitions")


@pytest.mark.parametrize("host", ["198.51.100.7", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_refused(tmp_path: Path, host: str) -> None:
    """It may have been kept from the time when this machine had it."""
    refused = start(tmp_path, brokers=1, bind_host=host)
    assert isinstance(refused, ConfigError)
    assert f"bind_host={host}" in str(refused) and "bind_host=none" in str(refused)
