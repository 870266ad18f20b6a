"""A process that may have 320 file descriptors: one broker and a writer. test_few_descriptors.py
runs it: it prints its address, writes until its standard input ends, and prints the result."""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import threading
from typing import Any

from rayq.errors import RayqError
from rayq.testing import LocalCluster
from tests.local.support import leader_endpoint, read_all

DESCRIPTORS_MAX = 320


def main() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS_MAX, DESCRIPTORS_MAX))
    with (
        tempfile.TemporaryDirectory() as directory,
        LocalCluster(brokers=1, data_dir=directory) as cluster,
        cluster.producer(delivery_timeout_ms=60_000, compression_type="none") as producer,
    ):
        told: dict[str, Any] = {"refusal": ""}
        try:
            cluster.create_topic("many", partitions=60, replication_factor=1)
        except RayqError as error:
            told["refusal"] = str(error)
        cluster.create_topic("t", segment_bytes=100_000)
        producer.send("t", b"first").result(60)
        broker = cluster.addresses[0].rpartition(":")
        endpoints = [leader_endpoint(cluster, "t"), (broker[0], int(broker[2]))]
        say({"endpoints": endpoints, "token": cluster.token})
        ended = threading.Event()
        threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
        acknowledged = 1
        while not ended.is_set():
            producer.send("t", os.urandom(30_000)).result(60)
            acknowledged += 1
        told["acknowledged"] = acknowledged
        told["read"] = len(read_all(cluster, "t"))
        say(told)


def say(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
