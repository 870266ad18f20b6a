"""A million tasks wait for the same time, more than queues may learn at once in some partitions."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest

from rayq.testing import LocalCluster
from tests.local.support import eventually, wait_in_sync

TASKS, AT_ONCE = 1_000_000, 20_000
WAIT_S = 15.0
"""About three times what it takes to put them."""
PATIENCE_S = 60.0


@pytest.mark.thorough
def test_a_million_delayed_tasks_come_once_each_and_none_too_early() -> None:
    with LocalCluster(brokers=3) as cluster, cluster.create_queue("later", partitions=12) as queue:
        due = datetime.now(UTC) + timedelta(seconds=WAIT_S)
        for first in range(0, TASKS, AT_ONCE):
            values = [b"%d" % number for number in range(first, first + AT_ONCE)]
            queue.put_many(values, deliver_at=due)
        leader = cluster.admin.describe_topic("later").partitions[0].leader
        assert leader is not None
        cluster.kill_broker(leader)
        cluster.start_broker(leader)
        wait_in_sync(cluster, "later", brokers=3, timeout_s=PATIENCE_S)
        came = bytearray(TASKS)
        last_s = time.monotonic()
        while came.count(1) < TASKS:
            assert time.monotonic() - last_s < PATIENCE_S, f"{came.count(1)} of {TASKS} came"
            tasks = queue.take(10_000)
            assert not tasks or datetime.now(UTC) >= due
            for task in tasks:
                assert task.value is not None
                came[int(task.value)] += 1
                task.ack()
                last_s = time.monotonic()
        queue.flush()
        assert max(came) == 1

        def is_empty() -> bool:
            found = cluster.admin.describe_queue("later").partitions
            return all(one.start_offset == one.end_offset is not None for one in found)

        eventually(is_empty, "nothing is left", PATIENCE_S)
