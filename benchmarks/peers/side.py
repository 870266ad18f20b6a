"""What the loads need of a system: three brokers that run, and a client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

BROKERS = 3
REPLICATION_FACTOR = 3


class Side(Protocol):
    """One of the two systems. Its client writes with acks=all, idempotence and lz4, and otherwise
    with default settings."""

    def create_topic(self, name: str, partitions: int) -> None:
        """Returns when the metadata shows all replicas of all partitions in sync."""
        ...

    def delete_topic(self, name: str) -> None: ...

    def send_each(self, topic: str, values: Sequence[bytes]) -> None:
        """Sends the values by one call each. Returns when all are acknowledged."""
        ...

    def send_many(self, topic: str, values: Sequence[bytes]) -> bool:
        """Sends the values by few calls. Returns when all are acknowledged; False where the client
        has no such call."""
        ...

    def write_to_all(self, topic: str, partitions: int) -> None:
        """Sends a record to each partition. Returns when all are acknowledged."""
        ...

    def send_paced(self, topic: str, value: bytes, per_s: int, count: int) -> list[float]:
        """Sends with a linger of 0, open loop. Returns the milliseconds from when each record was
        due until its acknowledgement."""
        ...

    def consume(self, topic: str, partitions: int, count: int) -> None:
        """Reads `count` records from the beginning of all partitions, and looks at each value."""
        ...

    def leader_pid(self, topic: str) -> int:
        """The process that leads partition 0."""
        ...

    def leader_broker_pids(self, topic: str) -> list[int]:
        """All processes of the broker that leads partition 0."""
        ...

    def heal(self, topic: str) -> None:
        """Starts again what was killed. Returns when all replicas are in sync."""
        ...

    def server_pids(self) -> list[int]:
        """The processes of all servers. What starts them (Ray) is not among them."""
        ...
