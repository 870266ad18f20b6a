"""At-most-once: commit first, deal with the records after. This is for work that should rather be
missed than done twice, such as ringing a bell.

    python examples/at_most_once.py

The first worker dies between its commit and its work: the records that it had in hand never ring.
"""

from __future__ import annotations

from rayq import Cluster
from rayq.testing import LocalCluster

BELLS = 100


class CrashError(Exception):
    """Stands for a SIGKILL."""


def work(cluster: Cluster, rung: list[bytes], crash_after: int | None = None) -> None:
    """Rings until there are no more records for a while."""
    consumer = cluster.consumer(
        "bells", group="ringers", auto_offset_reset="earliest", max_poll_records=10
    )
    with consumer:
        while records := consumer.poll(timeout_s=1.0):
            consumer.commit()  # from here on no member gets these records again
            for record in records:
                assert record.value is not None
                rung.append(record.value)
                if len(rung) == crash_after:
                    raise CrashError


def main() -> None:
    rung: list[bytes] = []
    with LocalCluster(brokers=1) as cluster:
        cluster.create_topic("bells")
        with cluster.producer() as producer:
            for number in range(BELLS):
                producer.send("bells", b"bell-%d" % number)

        try:
            work(cluster, rung, crash_after=25)
        except CrashError:
            print(f"the first worker died after {len(rung)} bells")
        work(cluster, rung)

        print(f"rung {len(rung)} of {BELLS} bells, {len(rung) - len(set(rung))} of them twice")


if __name__ == "__main__":
    main()
