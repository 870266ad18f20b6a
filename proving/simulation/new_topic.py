"""Topics that a scenario begins with."""

from __future__ import annotations

import asyncio
from typing import Any

from rayq.client.admin.admin import AsyncAdmin
from rayq.client.client import Client
from rayq.errors import InvalidReplicationFactorError

REPLICAS = 3
RETRY_S = 0.5


async def create_topic(client: Client, topic: str, partitions: int, **options: Any) -> None:
    """Creates a topic, once there are enough live brokers: a write of one of them may have hung for
    so long that its session has ended."""
    while True:
        try:
            await AsyncAdmin(client).create_topic(topic, partitions, REPLICAS, **options)
            return
        except InvalidReplicationFactorError:
            await asyncio.sleep(RETRY_S)
