"""Answers and errors without what a principal may not describe."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from rayq.core.access.rights import View
from rayq.core.cluster.state import ClusterState
from rayq.errors import RayqError
from rayq.messages import AnyRequest
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


HIDDEN = "(one that you may not describe)"
_QUOTED = re.compile(r"'([^']+)'")
_PARTITION = re.compile(r"-\d+$")


def shown_error(
    view: View, state: ClusterState, request: AnyRequest, error: RayqError
) -> RayqError:
    """Returns an error of a decision without names of hidden topics and queues. Messages have names
    in quotes, a topic's also with the number of a partition. Those that the request gives stay: its
    sender knows them."""
    given = {value for field in request.__struct_fields__
             if isinstance(value := getattr(request, field), str)}  # fmt: skip
    garbage = {garbage.name for garbage in state.garbage.values()}

    def shown(quoted: re.Match[str]) -> str:
        name = quoted[1]
        if name not in state.topic_ids:
            name = _PARTITION.sub("", name)
        types: list[ResourceType] = []
        if name in state.topic_ids or name in garbage:
            types.append("topic")
        if name in state.queue_ids:
            types.append("queue")
        is_hidden = types and not any(view.shows(of_type, name) for of_type in types)
        return HIDDEN if is_hidden and name not in given else quoted[0]

    return error.with_message(_QUOTED.sub(shown, error.message))
