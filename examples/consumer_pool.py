"""A pool of consumers that comes and goes with the load, and a dead-letter topic.

    python examples/consumer_pool.py

A handler charges each order; one order has no amount, so charging it fails every time. On Ray
(`rayq.start` instead of `LocalCluster`) nothing else changes: consumers are then actors, and
consumers that find no room make Ray's autoscaler add a node.
"""

from __future__ import annotations

import json

from rayq import Record
from rayq.testing import LocalCluster

ORDERS = 200


def main() -> None:
    charged: dict[int, int] = {}

    def charge(records: list[Record]) -> None:
        """Charges orders. It may see an order twice, and does no harm then."""
        for record in records:
            order = json.loads(record.value or b"")
            charged[order["number"]] = 5 * order["cups"]

    with LocalCluster(brokers=1) as cluster:
        cluster.create_topic("orders", partitions=4)
        cluster.create_topic("orders.dead")
        pool = cluster.consumer_pool(
            "orders",
            "charging",
            charge,
            dead_letter_topic="orders.dead",
            retries=2,
            retry_backoff_ms=10,
        )
        with pool:
            print(f"nothing waits: {pool.status().wanted} consumers")
            with cluster.producer() as producer:
                for number in range(ORDERS):
                    order = {"number": number, "cups": 2}
                    if number == 117:
                        del order["cups"]
                    producer.send("orders", json.dumps(order).encode(), key=b"%d" % number)
            status = pool.wait_idle(timeout_s=30)
            print(f"charged {len(charged)} of {ORDERS} orders, {status.dead_letters} dead letter")

        with cluster.consumer("orders.dead", auto_offset_reset="earliest") as consumer:
            for letter in consumer.poll(timeout_s=5):
                reasons = {name: value.decode() for name, value in letter.headers}
                print(f"order {letter.key!r}: {reasons}")


if __name__ == "__main__":
    main()
