"""A consumer pool under a step of load: 100 records/s, then 20,000, then none.

    python -m benchmarks.pool_load_step [--high 20000] [--target-lag-s 5] [--json FILE]

Prints a line for each second and a summary. Exit code 1 when a record was left out or came twice,
the lag did not come back below its target, or consumers were left over. Each consumer writes the
numbers of the records that it handled to a file; they are counted at the end. No process is killed
here, so no record may come twice.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import ray

import rayq
from rayq import Cluster, ConsumerPool, PoolStatus, Record

TOPIC = "load-step"
PARTITIONS = 8
VALUE_BYTES = 100
LOW_PER_S = 100
LOW_S = 15.0
HIGH_S = 40.0
PAUSE_S = 0.05
IDLE_TIMEOUT_S = 120.0


@dataclass
class Result:
    """The result of a run. Times are in seconds since the load rose."""

    produced: int = 0
    unprocessed: int = 0
    repeated: int = 0
    consumers_low: int = 0
    consumers_most: int = 0
    lag_s_most: float = 0.0
    lag_most: int = 0
    over_target_s: float = 0.0
    """From the first look at which the lag was above the target to the last."""
    settled_after_s: float | None = None
    """When the lag came below its target for good."""
    none_after_s: float | None = None
    """The time from the end of the load until no consumer is left."""
    capacity_per_s: float | None = None
    problems: list[str] = field(default_factory=list)


class Producing:
    """Produces numbered records at a rate, from a thread."""

    def __init__(self, cluster: Cluster) -> None:
        self.rate_per_s = 0
        self.sent = 0
        self._cluster = cluster
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        filling = b"." * (VALUE_BYTES - 8)
        with self._cluster.producer() as producer:
            due, last_s = 0.0, time.monotonic()
            while not self._stop.wait(PAUSE_S):
                now_s = time.monotonic()
                due, last_s = due + (now_s - last_s) * self.rate_per_s, now_s
                count = int(due)
                due -= count
                first = self.sent
                values = [n.to_bytes(8, "little") + filling for n in range(first, first + count)]
                # Each call chooses a partition, so many calls spread evenly.
                producer.send_many(TOPIC, values, keys=[value[:4] for value in values])
                self.sent += count

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def make_handler(directory: str, record_s: float) -> Callable[[list[Record]], None]:
    def handler(records: list[Record]) -> None:
        time.sleep(record_s * len(records))
        numbers = array("Q", b"".join((one.value or b"")[:8] for one in records))
        with open(f"{directory}/{ray.get_runtime_context().get_actor_id()}", "ab") as file:
            file.write(numbers.tobytes())

    return handler


def handled(directory: Path) -> array[int]:
    numbers = array("Q")
    for path in directory.iterdir():
        numbers.frombytes(path.read_bytes())
    return numbers


def measure(options: argparse.Namespace, cluster: Cluster, directory: Path) -> Result:
    result = Result()
    cluster.create_topic(TOPIC, partitions=PARTITIONS)
    producing = Producing(cluster)
    began_s = time.monotonic()
    with cluster.consumer_pool(
        TOPIC,
        TOPIC,
        make_handler(str(directory), options.record_s),
        target_lag_s=options.target_lag_s,
        cool_down_s=options.cool_down_s,
        resources={"num_cpus": 0},
    ) as pool:
        _watch(pool, 3.0, began_s)
        producing.rate_per_s = LOW_PER_S
        result.consumers_low = max(one.running for _, one in _watch(pool, LOW_S, began_s))
        producing.rate_per_s = options.high
        rose_s = time.monotonic()
        looks = _watch(pool, HIGH_S, began_s)
        producing.rate_per_s = 0
        producing.stop()
        fell_s = time.monotonic()
        looks += _watch(pool, IDLE_TIMEOUT_S, began_s, lambda one: not one.consumers)
        if not looks[-1][1].consumers:
            result.none_after_s = looks[-1][0] - fell_s
        late = [at_s for at_s, one in looks if one.lag_s > options.target_lag_s]
        result.settled_after_s = max(late) - rose_s if late else 0.0
        result.over_target_s = max(late) - min(late) if late else 0.0
        if late and max(late) >= looks[-1][0]:
            result.settled_after_s = None
        result.consumers_most = max(one.running for _, one in looks)
        result.lag_s_most = max(one.lag_s for _, one in looks)
        result.lag_most = max(one.lag or 0 for _, one in looks)
        result.capacity_per_s = looks[-1][1].capacity_per_s
        pool.wait_idle(IDLE_TIMEOUT_S)
    result.produced = producing.sent
    numbers = handled(directory)
    unique = set(numbers)
    result.unprocessed = producing.sent - len(unique)
    result.repeated = len(numbers) - len(unique)
    if result.unprocessed:
        result.problems.append(f"{result.unprocessed} records were not handled")
    if result.repeated:
        result.problems.append(f"{result.repeated} records were handled more than once")
    if result.settled_after_s is None:
        result.problems.append("the lag did not come back below its target")
    if result.none_after_s is None:
        result.problems.append("consumers were left over")
    return result


def _watch(
    pool: ConsumerPool,
    seconds: float,
    began_s: float,
    ends: Callable[[PoolStatus], bool] = lambda _: False,
) -> list[tuple[float, PoolStatus]]:
    looks: list[tuple[float, PoolStatus]] = []
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        time.sleep(1.0)
        one = pool.status()
        looks.append((time.monotonic(), one))
        print(
            f"{time.monotonic() - began_s:6.1f} s  in {one.incoming_per_s:7.0f}/s  "
            f"handled {one.handled_per_s:7.0f}/s  lag {one.lag or 0:7d} {one.lag_s:5.1f} s  "
            f"consumers {one.running} of {one.wanted}  {one.reason}",
            flush=True,
        )
        if ends(one):
            break
    return looks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--high", type=int, default=20_000, help="records/s at the top")
    parser.add_argument("--target-lag-s", type=float, default=5.0)
    parser.add_argument("--cool-down-s", type=float, default=10.0)
    parser.add_argument(
        "--record-s", type=float, default=0.0002, help="what a record costs its handler"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rayq-pool-") as name:
        data, directory = Path(name, "data"), Path(name, "handled")
        directory.mkdir()
        cluster = rayq.start(str(data), brokers=3, name="load-step")
        try:
            result = measure(options, cluster, directory)
        finally:
            cluster.stop()
    print(json.dumps(asdict(result), indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(result)))
    return 1 if result.problems else 0


if __name__ == "__main__":
    sys.exit(main())
