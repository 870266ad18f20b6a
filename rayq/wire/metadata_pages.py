"""Metadata of many topics comes in several answers, which are asked for one after the other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from rayq.messages import Metadata, MetadataResponse
from rayq.wire.paging import check_advances

Ask = Callable[[Metadata], Awaitable[MetadataResponse]]


async def all_pages(ask: Ask, request: Metadata) -> MetadataResponse:
    """One answer with all topics of the request. Its version is the lowest of its pages: so the
    client asks again for what changed between two pages. Raises what `ask` raises, and
    ProtocolError."""
    answer = await ask(request)
    topics, version, after = answer.topics, answer.version, answer.next_after
    while after is not None:
        page = await ask(Metadata(request.topics, version, 0, after, request.topic_ids))
        topics = [*topics, *page.topics]
        check_advances(after, page.next_after, "the cluster's topics")
        version, after = min(version, page.version), page.next_after
    return msgspec.structs.replace(answer, version=version, topics=topics, next_after=None)
