"""A look at all of a cluster: what status and health judge."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from rayq.client.admin import INTERNAL_PREFIX, AsyncAdmin
from rayq.client.cluster import Cluster
from rayq.client.health import Problem, find_problems
from rayq.errors import RayqError, UnknownGroupError, UnknownTopicError
from rayq.records import ClusterInfo, GroupInfo, Reassignment, TopicInfo

GROUPS_TIMEOUT_S = 5.0


class Survey(NamedTuple):
    """A cluster, its topics (rayq's own too), its groups, and the moves that are under way."""

    cluster: ClusterInfo
    topics: list[TopicInfo]
    groups: list[GroupInfo]
    moves: list[Reassignment]

    @property
    def users_topics(self) -> list[TopicInfo]:
        return [topic for topic in self.topics if not topic.name.startswith(INTERNAL_PREFIX)]


def problems_of(found: Survey) -> list[Problem]:
    return find_problems(found.cluster, found.topics, found.groups, found.moves)


def survey(cluster: Cluster) -> Survey:
    """What goes while it looks is left out, and so are groups whose coordinator does not answer:
    the partitions tell why. Raises RayqError where nobody answers."""
    client, background = cluster.shared_client()
    admin = AsyncAdmin(client)

    async def topic(name: str) -> TopicInfo | None:
        try:
            return await admin.describe_topic(name)
        except UnknownTopicError:
            return None

    async def group(name: str) -> GroupInfo | None:
        try:
            return await admin.describe_group(name, timeout_s=GROUPS_TIMEOUT_S)
        except (UnknownGroupError, UnknownTopicError):
            return None
        except RayqError as error:
            if not error.retriable:
                raise
            return None

    async def groups() -> list[GroupInfo]:
        try:
            listed = await admin.list_groups(timeout_s=GROUPS_TIMEOUT_S)
        except RayqError as error:
            if not error.retriable:
                raise
            return []
        found = await asyncio.gather(*(group(one.group) for one in listed))
        return [one for one in found if one is not None]

    async def look() -> Survey:
        info = await admin.describe_cluster()
        names = await admin.list_topics(internal=True)
        topics = await asyncio.gather(*(topic(name) for name in names))
        moves = await admin.list_reassignments()
        return Survey(info, [one for one in topics if one is not None], await groups(), moves)

    return background.run(look())
