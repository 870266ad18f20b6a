"""Metadata of many topics comes in several answers: asked for one after the other, put together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from rayq.wire.messages import Metadata, MetadataResponse

Ask = Callable[[Metadata], Awaitable[MetadataResponse]]


async def all_pages(ask: Ask, request: Metadata) -> MetadataResponse:
    """One answer with all topics asked for, under the lowest version that a part of it has: what
    changed between two pages is asked for again. Raises what `ask` raises."""
    answer = await ask(request)
    topics, version, after = answer.topics, answer.version, answer.next_after
    while after is not None:
        page = await ask(Metadata(request.topics, version, 0, after))
        topics = [*topics, *page.topics]
        version, after = min(version, page.version), page.next_after
    return msgspec.structs.replace(answer, version=version, topics=topics, next_after=None)
