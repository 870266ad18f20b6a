"""Set-up of a rayq process on Ray: what it needs of its machine, and its reports to Ray."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from pathlib import Path

import ray

from rayq.client.environment import system_environment
from rayq.config import ClusterConfig
from rayq.environment import Environment
from rayq.metrics import Metrics, Sample
from rayq.runtime.loop_watch import LoopWatch
from rayq.runtime.ray.logs import log_to_session
from rayq.runtime.ray.metrics import export_forever
from rayq.wire.descriptors import raise_limit


def server_environment(config: ClusterConfig) -> Environment:
    """The world of a process that serves: it may open as many files as the machine allows, and what
    was imported by now is never looked at again by the garbage collector. (A full collection took
    50 to 90 ms, in which nothing was answered: nearly all that it saw were the modules of Ray.)"""
    raise_limit()
    gc.freeze()
    environment = system_environment(config)
    measure_process(environment.metrics)
    return environment


def measure_process(metrics: Metrics) -> None:
    """Adds what this process takes of its machine to its metrics."""

    def figures() -> list[Sample]:
        found = [metrics.sample("rayq_process_cpu_seconds_total", time.process_time())]
        with contextlib.suppress(OSError):  # Only Linux has it.
            pages = int(Path("/proc/self/statm").read_bytes().split()[1])
            resident_bytes = pages * os.sysconf("SC_PAGE_SIZE")
            found.append(metrics.sample("rayq_process_resident_memory_bytes", resident_bytes))
        return found

    metrics.add_source(figures)


def start_reports(
    environment: Environment, config: ClusterConfig, name: str
) -> asyncio.Task[None]:
    """Makes this process log into a file, also when its loop stands still, and tell Ray what it
    measures."""
    log_to_session(name)
    LoopWatch()
    return environment.tasks.spawn(export_forever(environment, config), "metrics")


def bind_host(config: ClusterConfig) -> str:
    return config.bind_host or str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
