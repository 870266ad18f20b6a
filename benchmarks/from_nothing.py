"""From nothing to the first record: three hosts, `ray up deploy/local.yaml`, a topic with three
replicas, one record in, one record out.

    sudo .venv/bin/python -m benchmarks.from_nothing

The hosts are network and PID namespaces of this machine (`proving.hosts`): root only.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from proving.deployment import Deployment
from proving.hosts import Hosts, why_not


def main() -> int:
    reason = why_not()
    if reason is not None:
        print(f"Hosts cannot be played here: {reason}.")
        return 1
    started_s = last_s = time.monotonic()

    def passed(what: str) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        print(f"{now_s - started_s:6.1f} s  {what} ({now_s - last_s:.1f} s)")
        last_s = now_s

    with tempfile.TemporaryDirectory() as directory:
        with Hosts(Path(directory), 4) as hosts:
            desk, *machines = hosts
            passed("four hosts with sshd are up, three for brokers and one to work from")
            deployment = Deployment(desk, machines, hosts.key)
            passed("Ray's token is made")
            deployment.up()
            passed("`ray up` has returned: Ray on three hosts, a broker on each")
            with deployment.connect() as cluster:
                cluster.create_topic("first", replication_factor=3)
                passed("a topic with three replicas, all in sync")
                with cluster.producer() as producer:
                    producer.send("first", b"hello").result(20)
                passed("a record is on three disks")
                with cluster.consumer("first", auto_offset_reset="earliest") as consumer:
                    records = consumer.poll(timeout_s=20)
                passed(f"and is read: {records[0].value!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
