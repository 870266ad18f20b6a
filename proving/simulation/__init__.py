"""A deterministic simulation of the world that rayq's servers and clients live in.

The same code that production runs gets an `Environment` made here: virtual time, a network that
delays, cuts and resets, disks that crash, processes that are killed and paused. Everything comes
from one seed, and the same seed gives the same run.
"""

from __future__ import annotations

from proving.simulation.disk import Fault, SimulatedDisk
from proving.simulation.loop import (
    DeadlockError,
    LimitError,
    ReportedError,
    SimulationError,
    SimulationLoop,
)
from proving.simulation.network import SimulatedNetwork
from proving.simulation.owner import ProcessDied
from proving.simulation.process import Process
from proving.simulation.world import Host, World

__all__ = [
    "DeadlockError",
    "Fault",
    "Host",
    "LimitError",
    "Process",
    "ProcessDied",
    "ReportedError",
    "SimulatedDisk",
    "SimulatedNetwork",
    "SimulationError",
    "SimulationLoop",
    "World",
]
