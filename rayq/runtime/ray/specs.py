"""The specifications that the actors of a cluster are started with. Ray keeps it, and starts them
again with it."""

from __future__ import annotations

import msgspec

from rayq.config import ClusterConfig
from rayq.environment import Address
from rayq.runtime.kept_settings import KeptSettings
from rayq.wire.authentication import HasSecret


class BrokerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a broker actor needs, so that Ray can start it again without anyone's help."""

    cluster_name: str
    broker: int
    root: str
    node_id: str
    port: int
    config: ClusterConfig
    brokers_on_node: int
    peers: tuple[Address, ...]
    settings: KeptSettings | None = None
    """The settings that the broker keeps in its directory; None in a spec of an older version."""


class ClusterSpec(HasSecret, frozen=True, kw_only=True):
    """A cluster on Ray: what the controller's actor starts with, again and again, and tells to
    clients that connect by this Ray."""

    cluster_name: str
    cluster_id: str
    secret: bytes
    brokers: tuple[Address, ...]
    """The addresses on which the brokers listen."""
    config: ClusterConfig
    root: str
    port: int
    placed: dict[int, str]
    """The node id of each broker at the start."""
    nodes: tuple[str, ...]
    """The nodes there were at the start; nodes that join later get a broker."""
    settings: KeptSettings | None = None
    """The settings that the cluster was started with, for every broker to keep; `config` is made of
    it."""

    def broker_spec(self, broker: int, node_id: str, brokers_on_node: int) -> BrokerSpec:
        return BrokerSpec(
            cluster_name=self.cluster_name,
            broker=broker,
            root=self.root,
            node_id=node_id,
            port=self.port,
            config=self.config,
            brokers_on_node=brokers_on_node,
            peers=self.brokers,
            settings=self.settings,
        )
