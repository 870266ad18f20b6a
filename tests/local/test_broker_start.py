"""A broker's process starts although another program looks at its directory's lock just then."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from rayq.client.environment import system_environment
from rayq.config import ClusterConfig
from rayq.errors import ControllerUnavailableError, StorageError
from rayq.runtime.ray import actors as ray_actors
from rayq.runtime.ray import cluster as ray_cluster
from rayq.runtime.ray.actors import BrokerActor
from rayq.runtime.ray.specs import BrokerSpec
from rayq.storage.data_directory import BROKER_LOCK, format_directory
from rayq.testing import LocalCluster
from tests.local.faulty_disk import Faults
from tests.local.support import FAST


def _spec(root: Path) -> BrokerSpec:
    return BrokerSpec(
        cluster_name="test",
        broker=0,
        root=str(root),
        node_id="node",
        port=0,
        config=ClusterConfig(bind_host="127.0.0.1"),
        brokers_on_node=1,
        peers=(),
    )


async def _start(root: Path, *, let_go_s: float | None) -> tuple[str, int | str, str]:
    environment = system_environment()
    path = f"{root}/broker-0"
    format_directory(environment, path, cluster_id="c1", broker=0, secret=b"s" * 32)
    lock = environment.disk.open(f"{path}/{BROKER_LOCK}", create=True)
    assert lock.try_lock()
    if let_go_s is not None:
        asyncio.get_running_loop().call_later(let_go_s, lock.close)
    actor = BrokerActor(_spec(root))
    answer = await actor.endpoint()
    if actor._broker is not None and answer[0] == "ok":
        actor._broker.close()
    return answer


def test_a_broker_waits_for_a_lock_that_is_held_for_a_moment(tmp_path: Path) -> None:
    assert asyncio.run(_start(tmp_path, let_go_s=0.2))[0] == "ok"


def test_a_broker_whose_start_failed_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray sees a process that lives, and does not start it again."""
    monkeypatch.setattr(ray_actors, "BROKER_RETRY_S", 0.05)

    async def script() -> None:
        environment = system_environment()
        path = f"{tmp_path}/broker-0"
        format_directory(environment, path, cluster_id="c1", broker=0, secret=b"s" * 32)
        (tmp_path / "broker-0/metadata").write_bytes(b"in the way")
        actor = BrokerActor(_spec(tmp_path))
        assert (await actor.endpoint())[:2] == ("error", "StorageError")
        assert not await actor.is_registered()
        (tmp_path / "broker-0/metadata").unlink()
        await asyncio.wait_for(actor._starting, 60)
        assert (await actor.endpoint())[0] == "ok"
        assert actor._broker is not None
        actor._broker.close()

    asyncio.run(script())


def test_a_local_cluster_that_could_not_start_can_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults()
    faults.install(monkeypatch)
    with LocalCluster(2, tmp_path, **FAST):
        pass
    faults.sync_fails.add("broker-1/metadata")
    with pytest.raises(StorageError, match="Input/output error") as caught:
        LocalCluster(data_dir=tmp_path, **FAST)
    faults.sync_fails.clear()
    with LocalCluster(data_dir=tmp_path, **FAST) as cluster:
        assert len(cluster.admin.describe_cluster().brokers) == 2
    assert caught.value is not None  # Kept until here: its traceback refers to objects with locks.


def test_a_lock_that_stays_held_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_actors, "LOCK_PATIENCE_S", 0.1)
    answer = asyncio.run(_start(tmp_path, let_go_s=None))
    assert answer[:2] == ("error", "DirectoryInUseError")


def test_a_slow_start_may_take_longer_than_one_broker_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each broker that registers is a reason to wait for the next."""
    now_s = 0.0

    def sleep(wait_s: float) -> None:
        nonlocal now_s
        now_s += wait_s

    clock = SimpleNamespace(monotonic=lambda: now_s, sleep=sleep)
    monkeypatch.setattr(ray_cluster, "time", clock)
    monkeypatch.setattr(ray_cluster, "START_TIMEOUT_S", 30.0)
    monkeypatch.setattr(ray_cluster.ray, "get", lambda answers: answers)

    def broker(registers_at_s: float) -> Any:
        is_registered = SimpleNamespace(remote=lambda: now_s >= registers_at_s)
        return SimpleNamespace(is_registered=is_registered)

    ray_cluster._wait_registered([broker(20), broker(40), broker(60)], "/data", {})
    assert 60 <= now_s < 61
    with pytest.raises(ControllerUnavailableError, match="1 of 2 brokers are registered"):
        ray_cluster._wait_registered([broker(0), broker(100)], "/data", {})


def test_a_start_asks_for_the_partitions_that_recover_only_to_tell_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It asks many times a second, and a broker has thousands of them."""
    now_s, lists, told = 0.0, 0, dict[str, str]()

    def sleep(wait_s: float) -> None:
        nonlocal now_s
        now_s += wait_s

    def recovering() -> dict[str, str]:
        nonlocal lists
        lists += 1
        return {"t-0": "waits"}

    def broker(recovers_at_s: float) -> Any:
        return SimpleNamespace(
            is_recovering=SimpleNamespace(remote=lambda: now_s < recovers_at_s),
            recovering_partitions=SimpleNamespace(remote=recovering),
        )

    monkeypatch.setattr(ray_cluster, "time", SimpleNamespace(monotonic=lambda: now_s, sleep=sleep))
    monkeypatch.setattr(ray_cluster.ray, "get", lambda answer: answer)
    monkeypatch.setattr(ray_cluster, "tell_recovering", told.update)
    ray_cluster._wait_recovered(broker(ray_cluster.RECOVERY_TIMEOUT_S / 2))
    assert (lists, told) == (0, {})
    ray_cluster._wait_recovered(broker(1000 * ray_cluster.RECOVERY_TIMEOUT_S))
    assert (lists, told) == (1, {"t-0": "waits"})


def test_a_broker_that_cannot_listen_says_where(tmp_path: Path) -> None:
    async def script() -> tuple[str, int | str, str]:
        path = f"{tmp_path}/broker-0"
        format_directory(system_environment(), path, cluster_id="c1", broker=0, secret=b"s" * 32)
        spec = msgspec.structs.replace(
            _spec(tmp_path), config=ClusterConfig(bind_host="198.51.100.7")
        )
        actor = BrokerActor(spec)
        answer = await actor.endpoint()
        actor._starting.cancel()
        return answer

    kind, error, text = asyncio.run(script())
    assert (kind, error) == ("error", "ConfigError") and "198.51.100.7" in text
