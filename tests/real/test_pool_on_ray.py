"""Consumer pools on Ray: real processes that come, go, and are killed."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

import rayq
from rayq import Cluster, ConsumerPool, QueueTask, Record
from rayq.runtime.ray import pool_actors as ray_pool_actors
from tests.local.support import eventually
from tests.real.support import actor_pid, actors_of, is_gone


@pytest.fixture(scope="module")
def cluster(ray_here: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One broker: no broker dies here."""
    made = rayq.start(str(tmp_path_factory.mktemp("cluster")), brokers=1, port=19392)
    yield made
    made.stop()


def keeping_accounts(directory: Path, *, record_s: float = 0.0) -> Callable[[list[Record]], None]:
    """A handler that writes its values to a file of its process. It is self-contained, as the
    processes that run it do not have this module."""
    path = str(directory)

    def handler(records: list[Record]) -> None:
        import os
        import time

        time.sleep(record_s * len(records))
        with open(f"{path}/{os.getpid()}", "a") as file:
            file.write("".join(f"{(record.value or b'').decode()}\n" for record in records))

    return handler


def handled(directory: Path) -> Counter[int]:
    return Counter(int(one) for file in directory.iterdir() for one in file.read_text().split())


class Producing:
    """Produces numbered records from a thread, at a rate that can be changed."""

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self.rate_per_s = 0
        self.sent = 0
        self._cluster, self._topic = cluster, topic
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Producing:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopped.set()
        self._thread.join(30)

    def _run(self) -> None:
        with self._cluster.producer() as producer:
            due, last_s = 0.0, time.monotonic()
            while not self._is_stopped.wait(0.05):
                now_s = time.monotonic()
                due, last_s = due + (now_s - last_s) * self.rate_per_s, now_s
                count, due = int(due), due % 1
                if count:
                    values = [b"%d" % n for n in range(self.sent, self.sent + count)]
                    producer.send_many(self._topic, values)
                    self.sent += count


@pytest.mark.thorough
def test_a_pool_grows_and_shrinks_with_its_load_and_survives_kills_and_leaves_nothing_out(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.create_topic("killed", partitions=2)
    pool = cluster.consumer_pool(
        "killed",
        "killed",
        keeping_accounts(tmp_path, record_s=0.001),
        target_lag_s=3.0,
        cool_down_s=1.0,
        resources={"num_cpus": 0.1},
        max_records=100,
        group_session_timeout_ms=6_000,
    )
    with Producing(cluster, "killed") as producing:
        assert pool.status().wanted == 0
        producing.rate_per_s = 1_200  # One consumer handles less than 1,000/s.
        eventually(lambda: pool.status().running == 2, "two run", 120)
        # A consumer dies: the pool starts another.
        victim, survivor = pool.status().consumers
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)

        def names() -> set[str]:
            return {one.consumer for one in pool.status().consumers}

        eventually(lambda: len(names() - {victim.consumer}) == 2, "another is on its way", 120)
        both = names()

        # The pool's process dies: Ray starts it again, and it finds the two.
        dead = actor_pid("rayq:default:pool-killed")
        assert dead is not None
        os.kill(dead, signal.SIGKILL)
        eventually(lambda: actor_pid("rayq:default:pool-killed") not in (None, dead), "it is back", 120)
        eventually(lambda: pool.status().running == 2, "it has found them", 120)
        assert names() == both and survivor.consumer in both
        pids = [one.pid for one in pool.status().consumers]
        producing.rate_per_s = 0
        eventually(lambda: not pool.status().consumers, "none runs", 120)
        assert pool.wait_idle(120).problem is None
        found = handled(tmp_path)
        assert set(found) == set(range(producing.sent))
        # At-least-once: what the dead consumer had not committed came again, and not much else.
        assert sum(found.values()) - len(found) <= max(400, len(found) // 10)

    # Any process of this Ray can find it and stop it; nothing is left.
    with rayq.connect() as other:
        (again,) = other.consumer_pools().values()
        assert isinstance(again, ConsumerPool) and again.name == "killed"
        with pytest.raises(rayq.errors.PoolExistsError):
            other.consumer_pool("killed", "killed", print)
        again.stop()
    cluster.make_current()
    with pytest.raises(rayq.errors.UnknownPoolError):
        pool.status()
    eventually(lambda: all(pid is not None and is_gone(pid) for pid in pids), "they are gone")
    assert cluster.admin.describe_group("killed").members == []
    assert [one for one in actors_of("default") if "-killed" in one["Name"]] == []


def test_a_pool_asks_ray_where_the_brokers_are_now(cluster: Cluster) -> None:
    (address,) = asyncio.run(ray_pool_actors.present_addresses("default"))
    assert cluster.addresses == [f"{address[0]}:{address[1]}"]
    assert asyncio.run(ray_pool_actors.present_addresses("there is none")) == []


def test_consumers_of_a_pool_are_not_those_of_one_whose_name_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [
        ray_pool_actors.consumer_prefix("c", pool) + "0123abcd" for pool in ("orders", "orders:eu")
    ]
    monkeypatch.setattr(
        ray_pool_actors,
        "actors_with",
        lambda prefix: [(one, None) for one in names if prefix in one],
    )
    assert [name for name, _ in ray_pool_actors.consumers_of("c", "orders")] == names[:1]
    assert [name for name, _ in ray_pool_actors.consumers_of("c", "orders:eu")] == names[1:]


@pytest.mark.thorough
def test_a_handler_that_does_not_pickle_is_told_at_once_and_one_that_does_not_load_by_the_status(
    cluster: Cluster,
) -> None:
    cluster.create_topic("pickles")
    lock = threading.Lock()

    def holds_a_lock(records: list[Record]) -> None:
        with lock:
            pass

    with pytest.raises(rayq.errors.HandlerError, match="cannot be sent"):
        cluster.consumer_pool("pickles", "pickles", holds_a_lock)

    class Absent:
        def __reduce__(self) -> tuple[object, ...]:
            return __import__, ("no_such_module_anywhere",)

        def __call__(self, records: list[Record]) -> None: ...

    with cluster.consumer_pool(
        "pickles", "pickles", Absent(), min_consumers=1, resources={"num_cpus": 0}
    ) as pool:
        eventually(
            lambda: "no_such_module_anywhere" in (pool.status().problem or ""), "it is told", 30
        )
    assert ray.is_initialized()


@pytest.mark.thorough
def test_a_queues_pool_survives_a_kill_and_has_more_consumers_than_partitions(
    cluster: Cluster, tmp_path: Path
) -> None:
    """What the killed consumer was at comes again as soon as its connection has gone."""
    queue = cluster.create_queue("jobs", visibility_timeout_s=300, backoff_s=0)
    queue.put_many([b"%d" % number for number in range(200)])
    path = str(tmp_path)

    def handle(task: QueueTask) -> None:
        import os
        import time

        time.sleep(0.03)
        with open(f"{path}/{os.getpid()}", "a") as file:
            file.write(f"{(task.value or b'').decode()}\n")

    with cluster.queue_pool(
        "jobs", handle, min_consumers=2, max_consumers=3, resources={"num_cpus": 0}
    ) as pool:
        eventually(lambda: len(handled(tmp_path)) > 20, "it began", 60)
        eventually(lambda: pool.status().running >= 2, "two consumers at one partition", 60)
        victim = next(one.pid for one in pool.status().consumers if one.pid is not None)
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: len(handled(tmp_path)) == 200, "all was handled", 60)
        pool.wait_idle(60)
    queue.close()
