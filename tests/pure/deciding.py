"""Decisions as servers find them in their tables; a test gives the request and has the records."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from rayq.config import ClusterConfig
from rayq.core.cluster.decisions import DECISIONS
from rayq.core.cluster.facts import NO_OBJECT_STORE, Facts, ObjectStoreFacts
from rayq.core.cluster.records import MetadataRecord
from rayq.core.cluster.state import ClusterState
from rayq.messages import AnyRequest


def decide(
    state: ClusterState,
    request: AnyRequest,
    *,
    config: ClusterConfig | None = None,
    new_id: Callable[[], str] = lambda: "new",
    now_ms: int = 0,
    heard: Collection[int] = (),
    store: ObjectStoreFacts = NO_OBJECT_STORE,
) -> list[Any]:
    """The records of a decision of the controller."""
    facts = Facts(config or ClusterConfig(), new_id, lambda: now_ms, lambda: set(heard), store)
    records: list[MetadataRecord] = [*DECISIONS[type(request)](state, request, facts).records]
    return records
