"""The real machine as an `Environment`, for clients and for the runtimes."""

from __future__ import annotations

import os
import random
import socket

from rayq.config import ClusterConfig
from rayq.environment import Environment, LoopTasks, SystemClock, ThreadPool
from rayq.storage.disk import LocalDisk
from rayq.wire.descriptors import has_room_for_replica
from rayq.wire.network import AsyncioNetwork
from rayq.wire.object_urls import open_object_url

THREADS_MAX = 16
"""Maximum number of blocking jobs of one process that run at once."""


def system_environment(config: ClusterConfig | None = None) -> Environment:
    """This machine's clocks, disk, network and threads. Make one for each event loop: its tasks
    belong to the loop that runs when they are spawned. Only the TLS files of `config` are used."""
    return Environment(
        clock=SystemClock(),
        random=random.SystemRandom(),
        disk=LocalDisk(),
        network=AsyncioNetwork(config),
        threads=ThreadPool(THREADS_MAX),
        tasks=LoopTasks(),
        pid=os.getpid(),
        boot_id=boot_id(),
        has_descriptors_for_replica=has_room_for_replica,
        open_object=open_object_url,
    )


def process_name() -> str:
    """The name of this process, for people who look at a cluster."""
    return f"{socket.gethostname()}:{os.getpid()}"


def boot_id() -> str:
    """Linux's id of this boot. Together with it, a pid and its start time identify a process
    forever."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
