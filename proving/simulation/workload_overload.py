"""The ordinary clients under load alone: nothing breaks before it (see `overload`)."""

from __future__ import annotations

from proving.simulation.workload import Workload


class OverloadWorkload(Workload):
    """See the module. Each of its seeds charges time."""

    lose_disks = False
    lasts_s = 5.0
    records_min = 0
    heals_at_s = 0.0
    faults_min = 0
    cuts_brokers = False

    @classmethod
    def is_charged(cls, seed: int, features: frozenset[str] | None) -> bool:
        return True
