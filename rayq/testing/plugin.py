"""The pytest plugin: installed with rayq, it gives tests the fixture `rayq_cluster`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from rayq.testing.local_cluster import LocalCluster


@pytest.fixture
def rayq_cluster() -> Iterator[LocalCluster]:
    """A fresh cluster of three brokers in this process, in a temporary directory; stopped after the
    test."""
    from rayq.testing.local_cluster import LocalCluster

    with LocalCluster(brokers=3) as cluster:
        yield cluster
