"""The settings that a cluster was started with hold for every later start that is not given others."""

from __future__ import annotations

import asyncio
import dataclasses
import stat
from pathlib import Path
from typing import Any

import pytest
import trustme

import rayq
from proving.simulation import ProcessDied, World
from rayq.cli.values import config_values
from rayq.client.environment import system_environment
from rayq.config import ClusterConfig, types_of
from rayq.errors import ConfigError, StorageError
from rayq.runtime.kept_settings import (
    SETTINGS,
    KeptSettings,
    changes,
    given_config,
    read_settings,
    settings_for,
    write_settings,
)
from rayq.runtime.layout import find_kept, format_broker, format_cluster, kept_of
from rayq.runtime.ray import cluster as ray_cluster
from rayq.runtime.ray.actors import BrokerActor
from rayq.runtime.ray.specs import BrokerSpec
from tests.local.test_tls import certificates

ENVIRONMENT = system_environment(None)
ROOT = "/data"
TLS: dict[str, Any] = {
    "tls_certificate": "/etc/rayq/node.pem",
    "tls_key": "/etc/rayq/node.key",
    "tls_ca": "/etc/rayq/ca.pem",
}
CERTIFIED = {"tls_client_ca": "/etc/rayq/clients.pem", "tls_principals": "cn"}
OTHERS: dict[str, Any] = {
    "session_timeout_ms": 7000,
    "group_assignors": {"mine": "module:function"},
    "max_frame_bytes": 100 * 2**20,
    "remote_storage_url": "file:///store",
    "remote_direct_reads": "none",
    "remote_storage_credentials": "/etc/rayq/credentials",
    "bind_host": "10.0.0.7",
    "advertised_host": "rayq.example",
    "broker_resource": "rayq_broker",
    "tls_check_hostname": False,
    "replica_rebuild_delay_ms": 600_000,
    "inside_ray_principal": "analytics",
    **TLS,
    **CERTIFIED,
}


def every_config() -> dict[str, Any]:
    """A value for each key that is not its default."""
    found = {}
    for field in dataclasses.fields(ClusterConfig):
        default = field.default
        found[field.name] = OTHERS.get(field.name, 1 if default is None else default)
        if found[field.name] == default:
            assert isinstance(default, int), f"{field.name}: add a value to OTHERS"
            found[field.name] = default + 1
    return found


def first(**given: Any) -> KeptSettings:
    return settings_for(None, name=None, port=None, given=given_config(given))


def later(kept: KeptSettings | None, **given: Any) -> KeptSettings:
    return settings_for(kept, name=None, port=None, given=given_config(given))


# --- what counts ----------------------------------------------------------------------------------


def test_what_a_start_is_not_given_is_as_it_was() -> None:
    given = every_config()
    assert given.keys() == types_of(ClusterConfig).keys()
    kept = settings_for(None, name="shop", port=9500, given=given)
    assert settings_for(kept, name=None, port=None, given={}) == kept
    assert kept.parsed() == ClusterConfig(**given)
    for key, value in given.items():
        if key not in {**TLS, **CERTIFIED, "broker_resource": None}:
            alone = first(**{key: value}) if key != "heartbeat_interval_ms" else kept
            assert getattr(later(alone).parsed(), key) == value


def test_what_a_start_is_given_counts_is_kept_and_is_said() -> None:
    kept = settings_for(None, name="shop", port=9500, given={**TLS, "bind_host": "127.0.0.1"})
    after = settings_for(kept, name="store", port=9600, given={"bind_host": "10.0.0.7"})
    assert (after.cluster_name, after.port) == ("store", 9600)
    assert after.parsed() == ClusterConfig(**TLS, bind_host="10.0.0.7")
    assert after.revision == kept.revision + 1
    assert changes(kept, after) == [
        "The cluster is called 'store'; it was 'shop'.",
        "Brokers listen from port 9600; it was 9500.",
        "bind_host is '10.0.0.7'; it was '127.0.0.1'.",
    ]
    assert changes(after, later(after, bind_host="10.0.0.7")) == []
    assert changes(None, after) == []


def test_tls_goes_off_where_that_is_asked_for_in_full_and_never_by_half() -> None:
    kept = first(**TLS)
    with pytest.raises(ConfigError, match=r"all three.* kept of earlier starts: .*tls_ca=/etc"):
        later(kept, tls_ca=None)
    off = later(kept, **dict.fromkeys(TLS))
    assert off.parsed() == ClusterConfig()
    assert changes(kept, off)[0] == "TLS is OFF, as asked for; it was on."
    assert later(off).parsed().tls_ca is None
    assert changes(off, later(off, **TLS))[0] == "TLS is on; it was off."
    # One file of three may be another one.
    assert later(kept, tls_ca="/new/ca.pem").parsed().tls_key == TLS["tls_key"]


def test_what_was_kept_is_taken_back_by_none() -> None:
    kept = first(session_timeout_ms=7000, tls_check_hostname=False, bind_host="10.0.0.7")
    given = config_values(
        ClusterConfig, ["session_timeout_ms=none", "tls.check.hostname=none", "bind_host=None"]
    )
    after = later(kept, **given)
    assert after.parsed() == ClusterConfig()
    assert after.config == {"bind_host": None}, "None is a value where the default may be another"
    assert changes(kept, after) == [
        "bind_host is None; it was '10.0.0.7'.",
        "session_timeout_ms is 3000; it was 7000.",
        "tls_check_hostname is True; it was False.",
    ]
    assert later(None, session_timeout_ms=None).parsed() == ClusterConfig()


def test_defaults_count_only_where_nothing_was_given_or_kept() -> None:
    def start(kept: KeptSettings | None, **given: Any) -> str | None:
        loopback = {"bind_host": "127.0.0.1"}
        settings = settings_for(kept, name=None, port=None, given=given, defaults=loopback)
        return settings.parsed().bind_host

    assert start(None) == start(first(session_timeout_ms=7000)) == "127.0.0.1"
    assert start(first(bind_host="10.0.0.7")) == start(None, bind_host="10.0.0.7") == "10.0.0.7"
    assert start(first(bind_host=None)) is None


def test_paths_hold_for_starts_from_other_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = given_config({"tls.key": "node.key", "remote_storage_credentials": "~/store"})
    assert given["tls_key"] == str(tmp_path / "node.key")
    assert given["remote_storage_credentials"] == str(Path("~/store").expanduser())
    with pytest.raises(ConfigError, match="Did you mean 'bind_host'"):
        given_config({"bind_hots": "x"})


def test_a_key_of_a_newer_version_is_passed_over_and_stays(tmp_path: Path) -> None:
    newer = first(bind_host="127.0.0.1")
    newer.config["tomorrow"] = 1
    write_settings(ENVIRONMENT.disk, str(tmp_path), newer)
    kept = read_settings(ENVIRONMENT.disk, str(tmp_path))
    assert kept is not None and later(kept, session_timeout_ms=7000).config["tomorrow"] == 1
    assert kept.parsed() == ClusterConfig(bind_host="127.0.0.1")


def test_brokers_of_several_machines_do_not_listen_on_loopback() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        ray_cluster._check_reachable(host, {"10.0.0.7"})
        with pytest.raises(ConfigError, match="bind_host=none"):
            ray_cluster._check_reachable(host, {"10.0.0.7", "10.0.0.8"})
    for other in (None, "0.0.0.0", "node1"):
        ray_cluster._check_reachable(other, {"10.0.0.7", "10.0.0.8"})


# --- on disk --------------------------------------------------------------------------------------


def test_a_first_start_that_dies_leaves_no_directory_without_its_settings() -> None:
    """After each of its disk operations, and after a power loss there."""
    kept, count, formatted, is_through = first(**TLS), 0, 0, False
    while not is_through:
        count += 1
        for power_loss in (False, True):
            with World(1000 * count + power_loss) as world:
                host = world.host()
                starting = host.process("start")
                starting.kill_at_disk_operation(count, power_loss=power_loss)
                environment = starting.environment
                try:
                    format_cluster(
                        environment,
                        ROOT,
                        3,
                        lambda _, job, *args, at=environment, **kwargs: job(at, *args, **kwargs),
                        kept,
                    )
                    is_through = True
                except ProcessDied:
                    pass
                if starting.alive:
                    starting.kill()
                host.boot()
                found = find_kept(host.process("later").environment, ROOT)
                assert all(settings == kept for _, settings in found), count
                assert not found or kept_of(found) == kept
                formatted += bool(found)
    assert formatted > 10


def test_a_change_that_dies_leaves_the_old_settings_or_the_new() -> None:
    old = first(**TLS)
    new, count, is_through, seen = later(old, tls_key="/new.key"), 0, False, set()
    while not is_through:
        count += 1
        for power_loss in (False, True):
            with World(1000 * count + power_loss) as world:
                host = world.host()
                before = host.process("before").environment
                for broker in range(2):
                    format_broker(
                        before, ROOT, broker, cluster_id="c", secret=b"s", settings=old
                    )
                changing = host.process("changing")
                changing.kill_at_disk_operation(count, power_loss=power_loss)
                try:
                    for broker in range(2):
                        write_settings(changing.environment.disk, f"{ROOT}/broker-{broker}", new)
                    is_through = True
                except ProcessDied:
                    pass
                if changing.alive:
                    changing.kill()
                host.boot()
                found = kept_of(find_kept(host.process("later").environment, ROOT))
                assert found in (old, new)
                seen.add(found is not None and found.revision)
    assert seen == {old.revision, new.revision}


def test_settings_that_cannot_be_read_are_no_reason_to_do_without(tmp_path: Path) -> None:
    path = format_broker(
        ENVIRONMENT, str(tmp_path), 0, cluster_id="c", secret=b"s", settings=first(**TLS)
    ).path
    file = Path(path, SETTINGS)
    file.write_bytes(file.read_bytes().replace(b"tls_ca", b"tlsXca"))
    with pytest.raises(StorageError, match=r"settings is damaged.*copy it from .* another broker"):
        rayq.start(str(tmp_path))


def spec(root: Path, settings: KeptSettings | None) -> BrokerSpec:
    return BrokerSpec(
        cluster_name="test",
        broker=0,
        root=str(root),
        node_id="node",
        port=0,
        config=ClusterConfig(bind_host="127.0.0.1"),
        brokers_on_node=1,
        peers=(),
        settings=settings,
    )


def test_a_broker_keeps_what_it_was_started_with(tmp_path: Path) -> None:
    """Also where Ray starts it again, and where it joined, or its file is damaged."""
    settings = first(bind_host="127.0.0.1")
    path = format_broker(ENVIRONMENT, str(tmp_path), 0, cluster_id="c", secret=b"s").path
    file = Path(path, SETTINGS)

    async def serve(given: KeptSettings | None) -> None:
        actor = BrokerActor(spec(tmp_path, given))
        assert (await actor.endpoint())[0] == "ok"
        assert actor._broker is not None
        actor._broker.close()

    for content in (None, b"damaged"):
        if content is not None:
            file.write_bytes(content)
        asyncio.run(serve(settings))
        assert read_settings(ENVIRONMENT.disk, path) == settings
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    written = file.stat().st_mtime_ns
    asyncio.run(serve(settings))
    asyncio.run(serve(None))  # As an older version had Ray keep it.
    assert file.stat().st_mtime_ns == written
    assert read_settings(ENVIRONMENT.disk, path) == settings


# --- rayq.start -----------------------------------------------------------------------------------


def test_a_start_uses_what_is_kept_before_it_asks_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayq.entry.has_ray", lambda: False)
    files = certificates(tmp_path / "tls", trustme.CA())
    format_broker(
        ENVIRONMENT,
        str(tmp_path / "data"),
        0,
        cluster_id="c",
        secret=b"s",
        settings=replace_key(first(**files), "gone.key"),
    )
    with pytest.raises(ConfigError, match=r"gone\.key"):
        rayq.start(str(tmp_path / "data"))


def replace_key(settings: KeptSettings, key: str) -> KeptSettings:
    return later(settings, tls_key=key)
