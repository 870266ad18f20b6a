"""One Ray for all tests of this floor that start clusters in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

import rayq
from rayq import Cluster


@pytest.fixture(scope="session", autouse=True)
def no_ray_is_left() -> Iterator[None]:
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def ray_here(no_ray_is_left: None) -> None:
    """A local Ray of this process, for whoever asks first and all who follow."""
    if not ray.is_initialized():
        ray.init(address="local", num_cpus=2, include_dashboard=False)


@pytest.fixture(scope="module")
def cluster(ray_here: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three brokers on Ray, for the tests of one file."""
    path: Path = tmp_path_factory.mktemp("cluster")
    made = rayq.start(str(path), brokers=3, port=19392)
    yield made
    made.stop()
