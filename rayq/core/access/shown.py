"""Answers without what a principal may not describe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from rayq.core.access.rights import View
from rayq.messages.acls import ResourceType
from rayq.metrics import Sample

RESOURCES_OF_LABELS: Mapping[str, ResourceType] = MappingProxyType(
    {"topic": "topic", "group": "group", "queue": "queue", "principal": "principal"}
)
"""The labels of metrics that name a resource."""


def shown_samples(view: View | None, samples: Iterable[Sample]) -> list[Sample]:
    """Returns the samples whose labels name nothing that is hidden."""
    if view is None:
        return list(samples)
    seen: dict[tuple[str, str], bool] = {}

    def is_seen(label: str, name: str) -> bool:
        resource_type = RESOURCES_OF_LABELS.get(label)
        if resource_type is None:
            return True
        if (label, name) not in seen:
            seen[label, name] = view.shows(resource_type, name)
        return seen[label, name]

    return [
        sample
        for sample in samples
        if all(is_seen(label, name) for label, name in sample.labels.items())
    ]
