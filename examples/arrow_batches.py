"""From a log to an Arrow table: `poll_arrow` builds the columns without a Python object per record.

    python examples/arrow_batches.py

Needs the extra `arrow`: pip install '.[arrow]'.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from rayq.testing import LocalCluster

RECORDS = 50_000


def main() -> None:
    with LocalCluster(brokers=1) as cluster:
        cluster.create_topic("clicks", partitions=2)
        with cluster.producer() as producer:
            pages = [f"/page/{number % 7}".encode() for number in range(RECORDS)]
            users = [f"user-{number % 1000}".encode() for number in range(RECORDS)]
            producer.send_many("clicks", pages, keys=users).result(timeout=30)

        tables: list[pa.Table] = []
        with cluster.consumer("clicks", auto_offset_reset="earliest") as consumer:
            while sum(table.num_rows for table in tables) < RECORDS:
                tables.append(consumer.poll_arrow(timeout_s=1.0, max_records=20_000))
        clicks = pa.concat_tables(tables)

        print("columns:", ", ".join(clicks.column_names))
        for entry in pc.value_counts(clicks["value"]).to_pylist():
            print(entry["values"].decode(), entry["counts"])


if __name__ == "__main__":
    main()
