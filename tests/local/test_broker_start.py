"""A broker's process starts although somebody else looks at its directory's lock just then."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayq.client.environment import system_environment
from rayq.config import ClusterConfig
from rayq.errors import ControllerUnavailableError
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


def test_a_slow_start_may_take_longer_than_one_broker_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each broker that registers is a reason to wait for the next."""
    monkeypatch.setattr(ray_runtime, "START_TIMEOUT_S", 0.3)
    monkeypatch.setattr(ray_runtime.ray, "get", lambda answers: answers)
    began_s = time.monotonic()

    def broker(registers_after_s: float) -> Any:
        is_registered = SimpleNamespace(
            remote=lambda: time.monotonic() >= began_s + registers_after_s
        )
        return SimpleNamespace(is_registered=is_registered)

    ray_runtime._wait_registered([broker(0.2), broker(0.4), broker(0.6)], "/data", {})
    assert time.monotonic() >= began_s + 0.6
    with pytest.raises(ControllerUnavailableError, match="1 of 2 brokers are registered"):
        ray_runtime._wait_registered([broker(0.0), broker(60.0)], "/data", {})
