"""Planted bugs of what replicas share: their processes, and the connections between these."""

from __future__ import annotations

from typing import Any

import msgspec

from proving.simulation.patches import Patch
from proving.simulation.planting import plants
from rayq import messages
from rayq.wire.connection import Connection


@plants("7", "what is flushed is told to the leader of the partition beside it as well")
def flushed_told_for_another_partition() -> list[Patch]:
    send = Connection.send

    def mutated(self: Any, request: Any, payload: Any = b"") -> None:
        send(self, request, payload)
        if isinstance(request, messages.ReplicaFlushed):
            send(self, msgspec.structs.replace(request, partition=request.partition ^ 1), payload)

    return [(Connection, "send", mutated)]
