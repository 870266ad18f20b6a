"""A broker starts processes through Ray, whose head may be away: then Ray's call does not return."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayq.actors.hosting import ReplicaHostSpec
from rayq.config import ClusterConfig
from rayq.errors import RayqError
from rayq.metrics import Metrics
from rayq.runtime.processes import process_start_time
from rayq.runtime.ray import actors as ray_actors
from rayq.runtime.ray.actors import RayRuntime
from rayq.runtime.ray.process import measure_process

NODE = "0" * 56


class Actor:
    """A process that Ray has made: this one."""

    @property
    def start(self) -> Actor:
        return self

    async def remote(self, *_: Any) -> tuple[int, int]:
        started = process_start_time(os.getpid())
        assert started is not None
        return os.getpid(), started


class Ray:
    """Makes actors once its head is there, and none before."""

    def __init__(self) -> None:
        self.has_head = threading.Event()
        self.made: list[Actor] = []
        self.killed: list[Actor] = []

    def remote(self, kind: type) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._make))

    def _make(self) -> Actor:
        self.has_head.wait(60)
        self.made.append(Actor())
        return self.made[-1]

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor)


async def holds(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_a_start_that_waits_for_rays_head_blocks_nothing_and_leaves_no_process_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = Ray()
    monkeypatch.setattr(ray_actors, "ray", ray)
    monkeypatch.setattr(ray_actors, "START_TIMEOUT_S", 0.2)
    runtime = RayRuntime(ClusterConfig(), NODE, 1)
    spec = ReplicaHostSpec("c", 0, "i", str(tmp_path), ("t-0",))

    async def script() -> None:
        # Both are given up after their time, which goes by for whoever else uses the loop.
        for failed in await asyncio.gather(
            *(runtime.start_replica_host(spec) for _ in range(2)), return_exceptions=True
        ):
            assert isinstance(failed, RayqError) and "is its head away?" in str(failed)
        # As long as these wait in Ray no other one is asked for.
        with pytest.raises(RayqError, match="has not answered"):
            await runtime.start_replica_host(spec)
        assert not ray.made
        ray.has_head.set()
        await holds(lambda: len(ray.killed) == 2)
        assert ray.killed == ray.made
        monkeypatch.setattr(ray_actors, "START_TIMEOUT_S", 60.0)
        assert await runtime.start_replica_host(spec) is not None
        assert len(ray.made) == 3 and len(ray.killed) == 2

    asyncio.run(script())


def test_a_process_tells_its_processor_time_and_its_memory() -> None:
    metrics = Metrics()
    measure_process(metrics)
    before = {sample.name: sample.value for sample in metrics.collect()}
    work_until_s = time.process_time() + 0.05
    while time.process_time() < work_until_s:
        pass
    after = {sample.name: sample.value for sample in metrics.collect()}
    cpu, memory = "rayq_process_cpu_seconds_total", "rayq_process_resident_memory_bytes"
    assert 0.05 <= after[cpu] - before[cpu] < 10
    assert 1e7 < after[memory] < 1e11
