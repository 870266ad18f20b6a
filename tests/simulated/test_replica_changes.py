"""After which events the invariants look at the replicas of a process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from proving.simulation import World
from proving.simulation.replica_changes import WATCHED, ReplicaChanges


class _Cluster:
    def __init__(self) -> None:
        self.replica_hosts: dict[Any, Any] = {}


def _assign(kind: type) -> None:
    kind.__setattr__(SimpleNamespace(), "anything", 1)


def test_replicas_are_looked_at_after_each_event_that_assigned_something() -> None:
    with World(seed=1) as world:
        cluster: Any = _Cluster()
        one = world.host().process("one")
        other = world.host().process("other")
        cluster.replica_hosts |= {one: "replicas of one", other: "replicas of other"}
        changes = ReplicaChanges(cluster)
        assert changes.host(one) == "replicas of one"
        assert changes.host(one) is None
        for kind in WATCHED:
            _assign(kind)
            assert changes.host(one) == "replicas of one", kind
            assert changes.host(other) is None


def test_what_an_event_of_others_changed_is_looked_at_with_each_process_next_event() -> None:
    with World(seed=1) as world:
        cluster: Any = _Cluster()
        one = world.host().process("one")
        other = world.host().process("other")
        cluster.replica_hosts |= {one: "replicas of one", other: "replicas of other"}
        changes = ReplicaChanges(cluster)
        changes.host(one)
        _assign(WATCHED[0])
        assert changes.host(world.loop.root) is None
        assert changes.host(one) == "replicas of one"
        assert changes.host(other) == "replicas of other"
        assert changes.host(one) is changes.host(other) is None
