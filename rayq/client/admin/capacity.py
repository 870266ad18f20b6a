"""Administration of capacity: plan for a load, compare the cluster with a plan."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from rayq.client.admin.base import ADMIN_TIMEOUT_S, AdminMethods
from rayq.client.admin.metrics import collect_metrics
from rayq.client.timeouts import takes_timeout
from rayq.core.capacity.check import CapacityCheck, check
from rayq.core.capacity.measured_load import measured_load
from rayq.core.capacity.plan import CapacityPlan, Costs, Load, Machine, plan
from rayq.errors import InvalidRequestError

CHECK_S = 10.0
SECONDS_MIN, SECONDS_MAX = 0.1, 3600.0


class CapacityAdmin(AdminMethods):
    """Methods of `AsyncAdmin` about capacity."""

    async def plan(
        self,
        *,
        records_per_s: float,
        record_bytes: float,
        retention_s: float,
        replication_factor: int = 3,
        peak: float = 2,
        fan_out: float = 2,
        compression: float = 1,
        skew: float = 1.3,
        growth: float = 1,
        consumers: int = 0,
        hottest_key_share: float = 0,
        local_s: float | None = None,
        upload_lag_s: float = 3600,
        outage_s: float = 6 * 3600,
        disk_bytes: float = 30e12,
        network_bytes_per_s: float = 25e9 / 8,
        cores: float = 16,
        memory_bytes: float = 64e9,
        profile: Mapping[str, float] | None = None,
    ) -> CapacityPlan:
        """Computes the brokers, disks and partitions for a load, as `rayq plan` does, with its
        defaults. It asks no broker. `disk_bytes` to `memory_bytes` are one broker's; `profile` has
        costs that were measured, as `rayq bench profile` writes them. Raises InvalidRequestError
        (a number makes no sense, or no number of such brokers will do)."""
        return plan(
            Load(
                records_per_s=records_per_s,
                record_bytes=record_bytes,
                retention_s=retention_s,
                replication_factor=replication_factor,
                peak=peak,
                fan_out=fan_out,
                compression=compression,
                skew=skew,
                growth=growth,
                consumers=consumers,
                hottest_key_share=hottest_key_share,
                local_s=local_s,
                upload_lag_s=upload_lag_s,
                outage_s=outage_s,
            ),
            Machine(
                disk_bytes=disk_bytes,
                network_bytes_per_s=network_bytes_per_s,
                cores=cores,
                memory_bytes=memory_bytes,
            ),
            Costs.measured(profile or {}),
        )

    @takes_timeout
    async def check_plan(
        self,
        plan: CapacityPlan,
        *,
        seconds: float = CHECK_S,
        timeout_s: float = ADMIN_TIMEOUT_S,
    ) -> CapacityCheck:
        """Measures the cluster for `seconds`, and compares it with a plan: what is beyond it, and
        what comes next. Call it in the busiest hour. `timeout_s` is that of each of its two
        questions to all servers. Raises TimeoutError, and DisconnectedError where a server ended
        meanwhile or did not answer: what it did would be missing."""
        if not SECONDS_MIN <= seconds <= SECONDS_MAX:
            raise InvalidRequestError(
                f"seconds must be from {SECONDS_MIN:g} to {SECONDS_MAX:g}, not {seconds!r}."
            )
        client = self._client
        before, began = await collect_metrics(client, timeout_s=timeout_s), client.now
        await asyncio.sleep(seconds)
        after, ended = await collect_metrics(client, timeout_s=timeout_s), client.now
        return check(plan, measured_load(before, after, ended - began))
