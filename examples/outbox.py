"""The outbox: a database and the log tell the same story, whatever dies in between.

    python examples/outbox.py

A shop takes orders in SQLite. Each order and its message go into the database together. A relay
carries the messages over to the log: each batch is a transaction that is named by its last row. The
first relay dies after a commit, before it notes in the database that the batch is done. The second
one tries the same batch again, and hears that it is committed.
"""

from __future__ import annotations

import sqlite3

import rayq
from rayq import Cluster
from rayq.testing import LocalCluster

ORDERS = 50
BATCH_ROWS = 20


class CrashError(Exception):
    """Stands for a SIGKILL."""


def take_orders(shop: sqlite3.Connection) -> None:
    """The service: it writes to its database only, and so cannot tell one thing and do another."""
    for number in range(1, ORDERS + 1):
        with shop:  # a transaction of the database
            shop.execute("INSERT INTO orders VALUES (?, 2)", (number,))
            shop.execute("INSERT INTO outbox (message) VALUES (?)", (f"order {number}: 2 cups",))


def next_batch(shop: sqlite3.Connection) -> list[tuple[int, str]]:
    """The oldest messages. Before the first attempt the database notes which rows belong to the
    batch, so that a second attempt under the same name has the same rows."""
    marked = "SELECT id, message FROM outbox WHERE in_batch ORDER BY id"
    if not shop.execute(marked).fetchone():
        oldest = "SELECT id FROM outbox ORDER BY id LIMIT ?"
        with shop:
            shop.execute(f"UPDATE outbox SET in_batch = 1 WHERE id IN ({oldest})", (BATCH_ROWS,))
    return shop.execute(marked).fetchall()


def relay(cluster: Cluster, shop: sqlite3.Connection, crash_after: int | None = None) -> int:
    """Carries the messages over, in order. Returns how many batches the log had already."""
    repeated = 0
    with cluster.producer(transactional_id="shop-relay") as producer:
        while rows := next_batch(shop):
            last = rows[-1][0]
            try:
                with producer.transaction(name=f"up to row {last}") as tx:
                    tx.send_many("orders", [message.encode() for _, message in rows])
            except rayq.AlreadyCommittedError:
                repeated += 1
            if last == crash_after:
                raise CrashError
            with shop:
                shop.execute("DELETE FROM outbox WHERE in_batch")
    return repeated


def main() -> None:
    shop = sqlite3.connect(":memory:")
    shop.execute("CREATE TABLE orders (number INTEGER PRIMARY KEY, cups INTEGER)")
    shop.execute(
        "CREATE TABLE outbox (id INTEGER PRIMARY KEY AUTOINCREMENT, message TEXT, "
        "in_batch INTEGER DEFAULT 0)"
    )
    take_orders(shop)
    with LocalCluster(brokers=1) as cluster:
        cluster.create_topic("orders")
        try:
            relay(cluster, shop, crash_after=2 * BATCH_ROWS)
        except CrashError:
            print("the first relay died after a commit")
        print(f"the second one found {relay(cluster, shop)} batch in the log already")
        found = [record.value for record in cluster.tail("orders", 2 * ORDERS)]
        twice = len(found) - len(set(found))
        print(f"{len(found)} messages of {ORDERS} orders, {twice} of them twice")


if __name__ == "__main__":
    main()
