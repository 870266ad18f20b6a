"""At-least-once: deal with the records first, commit after. The documentation begins with this way.

    python examples/at_least_once.py

Orders are booked in a ledger by a group of workers. The first worker dies between its work and its
commit, so the records that it had in hand are handed out again. No order is left out; a repeated
order is recognised by its number and booked once.
"""

from __future__ import annotations

from rayq import Cluster, Record
from rayq.testing import LocalCluster

ORDERS = 100


class CrashError(Exception):
    """Stands for a SIGKILL."""


def book(ledger: dict[bytes, Record], record: Record) -> None:
    """Books an order. Doing so twice must do no harm: the order's number shows a repetition."""
    assert record.key is not None
    ledger[record.key] = record


def work(cluster: Cluster, ledger: dict[bytes, Record], crash_after: int | None = None) -> int:
    """Books orders until there are no more for a while. Returns how many records it was handed."""
    handed = 0
    consumer = cluster.consumer(
        "orders", group="booking", auto_offset_reset="earliest", max_poll_records=10
    )
    with consumer:
        while records := consumer.poll(timeout_s=1.0):
            for record in records:
                book(ledger, record)
                handed += 1
                if handed == crash_after:
                    raise CrashError
            consumer.commit()  # only now: the next member goes on after these records
    return handed


def main() -> None:
    ledger: dict[bytes, Record] = {}
    with LocalCluster(brokers=1) as cluster:
        cluster.create_topic("orders", partitions=2)
        with cluster.producer() as producer:
            for number in range(ORDERS):
                producer.send("orders", b'{"cups": 2}', key=b"order-%d" % number)

        try:
            work(cluster, ledger, crash_after=25)
        except CrashError:
            print(f"the first worker died with {len(ledger)} orders booked")
        handed = work(cluster, ledger)

        repeated = 25 + handed - ORDERS
        print(f"booked {len(ledger)} of {ORDERS} orders; {repeated} records came twice")
        print(f"the group is {cluster.admin.describe_group('booking').lag} records behind")


if __name__ == "__main__":
    main()
