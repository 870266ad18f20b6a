"""What the admin says when a wait ends in vain."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rayq.client.admin.topics import until_ready
from rayq.errors import TimeoutError


def test_a_topic_that_is_not_ready_in_time_is_told_by_what_it_lacks() -> None:
    """The error does not name the last question, for which next to no time was left."""
    client: Any = SimpleNamespace(now=0.0, metadata=SimpleNamespace(version=1, topics={}))

    async def refresh(_topics: object, *, timeout_s: float, **_: object) -> None:
        client.now += min(timeout_s, 4.0)
        if client.now >= 10.0:
            raise TimeoutError("No broker answered Metadata within 0.1 s.")
        client.metadata.version += 1

    client.refresh = refresh
    with pytest.raises(TimeoutError, match="'t' exists, but for 10 s .* no broker knows it yet"):
        asyncio.run(until_ready(client, "t", 1, timeout_s=10.0))
