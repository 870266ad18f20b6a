"""The faults of each scenario, as often as they are drawn."""

from __future__ import annotations

from proving.simulation.faults import Injection
from proving.simulation.faults_disks import (
    disk_errors,
    disk_full,
    disk_stall,
    failed_syncs,
    jump_a_clock,
)
from proving.simulation.faults_network import (
    isolate_a_broker,
    leave_a_broker_behind,
    reset_connections,
    slow_links,
    split,
)
from proving.simulation.faults_processes import (
    crash_at_a_change_of_names,
    crash_at_a_disk_operation,
    kill_a_broker,
    kill_a_host,
    kill_a_leader,
    kill_a_replica,
    kill_the_controller,
    pause_a_host,
    pause_a_process,
    pause_at_a_disk_operation,
    pause_replicas_while_their_broker_restarts,
    power_loss,
    power_loss_of_all,
    stop_a_broker,
)

AFTERMATHS: list[Injection] = [
    kill_a_leader,
    kill_a_leader,
    power_loss,
    kill_the_controller,
]
"""The faults that also come just when the victim of another one is coming back."""

BETWEEN_STEPS: list[Injection] = [
    pause_at_a_disk_operation,
    crash_at_a_change_of_names,
    leave_a_broker_behind,
]
"""The faults beside the ordinary ones, where few kinds of faults meet in a run."""

ORDINARY: list[Injection] = [
    kill_a_replica,
    kill_a_leader,
    kill_a_broker,
    kill_a_host,
    power_loss,
    power_loss,
    power_loss_of_all,
    power_loss_of_all,
    crash_at_a_disk_operation,
    crash_at_a_disk_operation,
    kill_the_controller,
    stop_a_broker,
    pause_a_process,
    pause_a_process,
    pause_a_host,
    pause_replicas_while_their_broker_restarts,
    isolate_a_broker,
    split,
    slow_links,
    reset_connections,
    jump_a_clock,
    disk_errors,
    failed_syncs,
    disk_full,
    disk_stall,
]
