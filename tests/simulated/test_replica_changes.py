"""After which events the invariants look at the replicas of a process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from proving.simulation import World
from proving.simulation.replica_changes import WATCHED, ReplicaChanges


class _Played:
    """Two replica processes of a cluster, and what an observer of events sees of them."""

    def __init__(self, world: World) -> None:
        self.replica_hosts: dict[Any, Any] = {}
        self.one, self.other = (world.host().process(name) for name in ("one", "other"))
        self.replica_hosts |= {self.one: "replicas of one", self.other: "replicas of other"}
        cluster: Any = self
        self.changes = ReplicaChanges(cluster)


def _assign(kind: type) -> None:
    kind.__setattr__(SimpleNamespace(), "anything", 1)


def test_replicas_are_looked_at_after_each_event_that_assigned_something() -> None:
    with World(seed=1) as world:
        played = _Played(world)
        look = played.changes.host
        assert look(played.one) == "replicas of one"
        assert look(played.one) is None
        for kind in WATCHED:
            _assign(kind)
            assert look(played.one) == "replicas of one", kind
            assert look(played.other) is None


def test_what_an_event_of_others_changed_is_looked_at_with_each_process_next_event() -> None:
    with World(seed=1) as world:
        played = _Played(world)
        look = played.changes.host
        look(played.one)
        _assign(WATCHED[0])
        assert look(world.loop.root) is None
        assert look(played.one) == "replicas of one"
        assert look(played.other) == "replicas of other"
        assert look(played.one) is look(played.other) is None
