"""One Ray for all tests of this floor that start clusters in this process."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import rayq
from rayq import Cluster
from tests.local.support import STILL_RUNNING


@pytest.fixture(scope="session", autouse=True)
def no_ray_is_left() -> Iterator[None]:
    while STILL_RUNNING:  # the shared cluster of the floor below has many topics
        STILL_RUNNING.pop().stop()
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def ray_here(no_ray_is_left: None) -> None:
    """A local Ray of this process, started by the first test that asks, and kept for all others."""
    if not ray.is_initialized():
        # Else Ray writes what its processes log, "the disk is over 95% full", between the lines of a
        # command that a later test runs in this process.
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)


@pytest.fixture(scope="module")
def cluster(ray_here: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three brokers on Ray, for the tests of one file."""
    path: Path = tmp_path_factory.mktemp("cluster")
    made = rayq.start(str(path), brokers=3, port=19392)
    yield made
    made.stop()


SPARK_FILES = (
    "test_spark_batch",
    "test_spark_batch_faults",
    "test_spark_direct",
    "test_spark_example",
)
"""The files that share one Spark session: it takes 15 s to start, and two of Ray's CPUs."""


class _SharedSpark:
    """A session that is started for the first of `SPARK_FILES` and stopped after the last."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._session: Any = None

    def get(self) -> Any:
        if self._session is None:
            from rayq.spark import session

            self._session = self._stack.enter_context(
                session(
                    "tests",
                    executors=1,
                    cores=2,
                    spark_sql_shuffle_partitions=2,
                    spark_task_maxFailures=2,
                )
            )
        return self._session

    def stop(self) -> None:
        self._session = None
        self._stack.close()


@pytest.fixture(scope="session")
def shared_spark(no_ray_is_left: None) -> Iterator[_SharedSpark]:
    shared = _SharedSpark()
    yield shared
    shared.stop()


@pytest.fixture(scope="module", autouse=True)
def spark_leaves_room_for_others(
    request: pytest.FixtureRequest, shared_spark: _SharedSpark
) -> None:
    if request.path.stem not in SPARK_FILES:
        shared_spark.stop()


@pytest.fixture(scope="module")
def spark(ray_here: None, shared_spark: _SharedSpark) -> Any:
    """A Spark session with two cores on the Ray of this process."""
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java, and there is none")
    return shared_spark.get()
