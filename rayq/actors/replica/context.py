"""The surroundings of a replica: what its process shares among all of its replicas."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rayq import messages
from rayq.actors.access import Access
from rayq.actors.hosting import RunCleaner
from rayq.actors.listening_clock import ListeningClock
from rayq.actors.peers import Peers
from rayq.actors.remote.object_link import ObjectLink
from rayq.config import ClusterConfig
from rayq.environment import Environment
from rayq.wire.pool import ConnectionPool


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaContext:
    """See the module. `ReplicaHost` makes one."""

    environment: Environment
    config: ClusterConfig
    pool: ConnectionPool
    broker: int
    incarnation: str
    listening: ListeningClock
    has_lease: Callable[[], bool]
    propose: Callable[[messages.AlterPartition], Awaitable[None]]
    """Sends a new in-sync set to the controller."""
    on_failure: Callable[[], None]
    """Called when a replica stops for good, with the reason in its status."""
    ask_broker: messages.Ask
    """Sends a request to this node's broker."""
    metadata_version: Callable[[], int]
    """The version of the broker's metadata that this process knows."""
    peers: Peers
    objects: ObjectLink
    access: Access
    """The gate: who may do what."""
    run_cleaner: RunCleaner | None = None
    """None: threads of this process compact logs."""
