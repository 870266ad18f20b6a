"""Three brokers on this machine's Ray, a topic with three replicas, one record there and back.

    python examples/quickstart.py [data directory]

Run it twice with the same directory: the second run finds the topic and the records of the first.
"""

from __future__ import annotations

import sys
import tempfile

import rayq
from rayq import TopicPartition


def main(data_dir: str) -> None:
    with rayq.start(data_dir, brokers=3) as cluster:
        cluster.create_topic("orders", partitions=2, replication_factor=3, exist_ok=True)

        with cluster.producer() as producer:
            future = producer.send("orders", b'{"item": "tea", "cups": 2}', key=b"table-7")
            written = future.result(timeout=30)
            print(f"on disk three times: partition {written.partition}, offset {written.offset}")

        with cluster.consumer("orders", auto_offset_reset="earliest") as consumer:
            ends = consumer.end_offsets([TopicPartition("orders", p) for p in range(2)])
            for _ in range(sum(ends.values())):
                record = next(consumer)
                print(f"read: {record.key!r} {record.value!r}")

        cluster.stop()  # the data stays


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="rayq-quickstart-"))
