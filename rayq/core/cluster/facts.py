"""The form of the controller's decisions, and the facts besides the state that they depend on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rayq import messages
from rayq.config import ClusterConfig
from rayq.core.cluster.records import MetadataRecord
from rayq.core.decision import Decision

ClusterDecision = Decision[MetadataRecord, messages.Response | None]
"""The answer None: the version of the metadata that has the records."""


def changed(records: Sequence[MetadataRecord]) -> ClusterDecision:
    """A decision that is answered with the version of the metadata that has its records."""
    return Decision(records, lambda: None)


class ObjectStoreFacts(NamedTuple):
    """The controller's knowledge of the cluster's object store."""

    url: str | None
    """URL of the object store. None: the cluster has none."""
    troubles: dict[int, str | None]
    """The reason that each broker cannot use it, by its last report; None if it can."""


NO_OBJECT_STORE = ObjectStoreFacts(None, {})


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts besides the state."""

    config: ClusterConfig
    new_id: Callable[[], str]
    now_ms: Callable[[], int]
    """Present time by the wall clock."""
    heard: Callable[[], set[int]]
    """The brokers that this controller has heard."""
    store: ObjectStoreFacts
