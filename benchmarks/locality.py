"""Whether a reader gains by sitting on its leader's host: `python -m benchmarks.locality`, as root.

This process reads with `read_range`, which a Spark or Ray Data task runs too, from a broker in a
network namespace of its own behind a link of a given rate (`tc tbf`). Beside that it reads over the
loopback address of one host, which is the best that locality could give. Not part of `make bench`:
it needs root, `ip` and `tc`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import rayq
from benchmarks.spark import TOPIC, VALUE_BYTES, fill
from rayq.batch.offset_ranges import snapshot
from rayq.batch.range_reader import read_range
from rayq.testing import LocalCluster

NAMESPACE = "rayq-far"
HERE, THERE = "10.78.0.1", "10.78.0.2"
RATES = (None, "25gbit", "10gbit", "1gbit")
"""The rates of the link. None: the link as it is."""
RECORDS = 1_000_000
REPETITIONS = 3


def serve(address: str) -> None:
    """Prints the address where it listens, and serves until its input ends."""
    with LocalCluster(brokers=1, bind_host=address) as cluster:
        fill(cluster, RECORDS)
        print(cluster.addresses[0], cluster.token, flush=True)
        sys.stdin.read()


@contextmanager
def server(prefix: list[str], address: str) -> Iterator[rayq.Cluster]:
    command = [*prefix, sys.executable, "-m", "benchmarks.locality", "serve", address]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        where, token = process.stdout.readline().split()
        with rayq.connect(where, token=token) as cluster:
            yield cluster
        process.stdin.close()


def records_s(cluster: rayq.Cluster) -> float:
    """The rate of the best of some runs: the link's part is to be measured."""
    found: list[float] = []
    for _ in range(REPETITIONS):
        started_s = time.perf_counter()
        ranges = snapshot(cluster, TOPIC)
        count = sum(batch.num_rows for one in ranges for batch in read_range(cluster, one))
        found.append(count / (time.perf_counter() - started_s))
        assert count == RECORDS
    return max(found)


@contextmanager
def namespace() -> Iterator[list[str]]:
    def ip(command: str) -> None:
        subprocess.run(["ip", *command.split()], check=True)

    ip(f"netns add {NAMESPACE}")
    try:
        ip(f"link add rayq-near type veth peer name rayq-far netns {NAMESPACE}")
        ip(f"addr add {HERE}/24 dev rayq-near")
        ip("link set rayq-near up")
        ip(f"-n {NAMESPACE} addr add {THERE}/24 dev rayq-far")
        ip(f"-n {NAMESPACE} link set rayq-far up")
        ip(f"-n {NAMESPACE} link set lo up")
        yield ["ip", "netns", "exec", NAMESPACE]
    finally:
        ip(f"netns del {NAMESPACE}")


def limit(prefix: list[str], rate: str | None) -> None:
    if rate is not None:
        rule = f"tc qdisc replace dev rayq-far root tbf rate {rate} burst 4mb latency 20ms"
        subprocess.run([*prefix, *rule.split()], check=True)


def main() -> None:
    with server([], "127.0.0.1") as cluster:
        here = records_s(cluster)
        print(f"{'on the same host':24} {here:12,.0f} records/s", flush=True)
    with namespace() as prefix, server(prefix, THERE) as cluster:
        for rate in RATES:
            limit(prefix, rate)
            far = records_s(cluster)
            print(f"{rate or 'a link without limit':24} {far:12,.0f} records/s   {far / here:.2f}")
    print(f"records of {VALUE_BYTES} bytes that do not compress, one process")


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2])
    else:
        main()
