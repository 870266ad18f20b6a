"""For tests of code that uses rayq: a cluster in the test's own process."""

from rayq.testing.local_cluster import LocalCluster

__all__ = ["LocalCluster"]
