"""A broker's process starts although somebody else looks at its directory's lock just then."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rayq.client.environment import system_environment
from rayq.config import ClusterConfig
from rayq.runtime import ray_runtime
from rayq.runtime.ray_runtime import BrokerActor, BrokerSpec
from rayq.storage.data_directory import BROKER_LOCK, format_directory


async def _start(root: Path, *, let_go_s: float | None) -> tuple[str, int | str, str]:
    environment = system_environment()
    path = f"{root}/broker-0"
    format_directory(environment, path, cluster_id="c1", broker=0, secret=b"s" * 32)
    lock = environment.disk.open(f"{path}/{BROKER_LOCK}", create=True)
    assert lock.try_lock()
    if let_go_s is not None:
        asyncio.get_running_loop().call_later(let_go_s, lock.close)
    config = ClusterConfig(bind_host="127.0.0.1")
    actor = BrokerActor(BrokerSpec("test", 0, str(root), "node", 0, config, 1, ()))
    answer = await actor.endpoint()
    if actor._broker is not None and answer[0] == "ok":
        actor._broker.close()
    return answer


def test_a_broker_waits_for_a_lock_that_is_held_for_a_moment(tmp_path: Path) -> None:
    assert asyncio.run(_start(tmp_path, let_go_s=0.2))[0] == "ok"


def test_a_lock_that_stays_held_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_runtime, "LOCK_PATIENCE_S", 0.1)
    answer = asyncio.run(_start(tmp_path, let_go_s=None))
    assert answer[:2] == ("error", "DirectoryInUseError")
