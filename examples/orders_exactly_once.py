"""Orders become invoices and movements of stock, each exactly once, while consumers are killed.

    python examples/orders_exactly_once.py

The handler of the pool returns what to send. rayq sends it in the transaction that also says which
orders are dealt with. Processes that run the handler are killed in the middle of their work; what
they had begun is never seen, and others deal with these orders. In the end the books are compared.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter

import rayq
from rayq import Cluster, ConsumerPool, Outgoing, Record

ORDERS = 2_000
KILLS = 3
CENTS_PER_CUP = 250
ITEMS = ("tea", "coffee", "cocoa")


def invoice(records: list[Record]) -> list[Outgoing]:
    """What follows from some orders. It does nothing else, so calling it twice does no harm."""
    outgoing = []
    for record in records:
        order = json.loads(record.value or b"")
        bill = {"order": order["number"], "cents": CENTS_PER_CUP * order["cups"]}
        outgoing.append(Outgoing("invoices", json.dumps(bill).encode()))
        outgoing.append(Outgoing("stock", b"%d" % -order["cups"], key=order["item"].encode()))
    time.sleep(0.05)  # Pricing is hard work.
    return outgoing


def take_orders(cluster: Cluster) -> list[dict[str, object]]:
    chance = random.Random(2026)
    orders = [
        {"number": number, "item": chance.choice(ITEMS), "cups": chance.randint(1, 9)}
        for number in range(ORDERS)
    ]
    with cluster.producer() as producer:
        producer.send_many("orders", [json.dumps(order).encode() for order in orders])
    return orders


def kill_one(pool: ConsumerPool, killed: set[int]) -> None:
    """Kills the process of a consumer that is at work, if there is one."""
    at_work = {one.pid for one in pool.status().consumers if one.pid and one.records} - killed
    if at_work:
        victim = random.choice(list(at_work))
        os.kill(victim, signal.SIGKILL)
        killed.add(victim)


def audit(cluster: Cluster, orders: list[dict[str, object]]) -> None:
    """Readers see what is committed, by default."""
    bills = [json.loads(one.value or b"") for one in cluster.tail("invoices", 2 * ORDERS)]
    stock: Counter[str] = Counter()
    for movement in cluster.tail("stock", 2 * ORDERS):
        stock[(movement.key or b"").decode()] -= int(movement.value or b"0")
    sold: Counter[str] = Counter()
    for order in orders:
        sold[str(order["item"])] += int(str(order["cups"]))
    missing = len(orders) - len({bill["order"] for bill in bills})
    twice = len(bills) - len({bill["order"] for bill in bills})
    print(f"{len(orders)} orders, {len(bills)} invoices: {missing} missing, {twice} twice")
    print(f"cups sold and cups taken from stock are equal: {sold == stock}")
    earned = sum(bill["cents"] for bill in bills)
    print(f"money is right to the cent: {earned == CENTS_PER_CUP * sold.total()}")


def main(data_dir: str) -> None:
    with rayq.start(data_dir, brokers=3) as cluster:
        for topic in ("orders", "invoices", "stock"):
            cluster.create_topic(topic, partitions=4)
        orders = take_orders(cluster)
        pool = cluster.consumer_pool(
            "orders",
            "billing",
            invoice,
            exactly_once=True,
            min_consumers=2,
            max_records=20,
            resources={"num_cpus": 0.1},
        )
        with pool:
            killed: set[int] = set()
            while len(killed) < KILLS and pool.status().lag != 0:
                time.sleep(random.uniform(0.3, 1.0))
                kill_one(pool, killed)
            pool.wait_idle(timeout_s=120)
            print(f"consumers killed: {len(killed)}")
        audit(cluster, orders)
        cluster.stop()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="rayq-orders-"))
