"""Partition assignors of groups: `uniform`, `range`, and a user's own.

An assignor is a pure, quick function; it runs on the event loop of the group's coordinator::

    def assign(
        members: Mapping[str, MemberSubscription],
        partitions: Mapping[str, int],
        current: Mapping[str, Collection[TopicPartition]],
    ) -> Mapping[str, Collection[TopicPartition]]: ...

`members` are the group's members by member id, in sorted order; `partitions` gives the number of
partitions of each topic that any of them subscribes to; `current` is what each member has now
(empty for a member that has just joined), without partitions that no longer exist. The answer gives
every partition of every topic to exactly one member that subscribes to it; a member that gets
nothing may be missing from it. `ClusterConfig.group_assignors` names an assignor of your own as
`module:function`; a consumer chooses it by its `assignor`.
"""

from __future__ import annotations

import heapq
import importlib
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from rayq.errors import HandlerError, InvalidAssignmentError, UnknownAssignorError
from rayq.records import TopicPartition
from rayq.user_functions import check_function, check_ran, told


class MemberSubscription(NamedTuple):
    """A member's subscribed topics, with patterns resolved, and its `group_instance_id`."""

    topics: frozenset[str]
    instance: str | None = None


Assignment = Mapping[str, Collection[TopicPartition]]
Assignor = Callable[[Mapping[str, MemberSubscription], Mapping[str, int], Assignment], Assignment]


def load_assignors(named: Mapping[str, str] | None) -> dict[str, Assignor | str]:
    """Loads the assignors by name. If one cannot be loaded, the value is the reason."""
    loaded: dict[str, Assignor | str] = {"uniform": uniform, "range": range_}
    for name, path in (named or {}).items():
        module, _, function = path.partition(":")
        try:
            assignor = getattr(importlib.import_module(module), function)
        except BaseException as error:  # noqa: BLE001 - a user's module may raise anything
            loaded[name] = f"{path!r} could not be loaded: {told(error)}"
            continue
        try:
            check_function(repr(path), assignor)
        except HandlerError as error:
            loaded[name] = str(error)
        else:
            loaded[name] = assignor
    return loaded


def find_assignor(assignors: Mapping[str, Assignor | str], name: str) -> Assignor:
    """The assignor of that name. Raises UnknownAssignorError."""
    assignor = assignors.get(name)
    if assignor is None:
        raise UnknownAssignorError(
            f"There is no assignor {name!r}: {', '.join(sorted(assignors))}, or one of your own "
            "in the cluster's group_assignors."
        )
    if isinstance(assignor, str):
        raise UnknownAssignorError(f"The assignor {name!r} cannot be used: {assignor}")
    return assignor


def run_assignor(
    name: str,
    assignor: Assignor,
    members: Mapping[str, MemberSubscription],
    partitions: Mapping[str, int],
    current: Assignment,
) -> dict[str, frozenset[TopicPartition]]:
    """Runs an assignor and checks its answer; the result has every member. Raises
    InvalidAssignmentError."""
    try:
        answer = assignor(members, partitions, current)
        check_ran("it", answer)
        given = {
            member: [TopicPartition(topic, number) for topic, number in answer.get(member, ())]
            for member in members
        }
        strangers = set(answer) - set(members)
    except BaseException as error:  # It must not end the coordinator that calls it.
        raise InvalidAssignmentError(f"The assignor {name!r} failed: {told(error)}") from error
    if strangers:
        raise InvalidAssignmentError(
            f"The assignor {name!r} assigned to {sorted(map(str, strangers))}, who are not members."
        )
    missing = {
        TopicPartition(topic, number) for topic, n in partitions.items() for number in range(n)
    }
    for member, owned in given.items():
        for partition in owned:
            if partition.topic not in members[member].topics:
                raise InvalidAssignmentError(
                    f"The assignor {name!r} gave {partition} to {member}, which does not subscribe "
                    f"to {partition.topic!r}."
                )
            if partition not in missing:
                raise InvalidAssignmentError(
                    f"The assignor {name!r} gave {partition} twice, or it does not exist."
                )
            missing.discard(partition)
    if missing:
        raise InvalidAssignmentError(
            f"The assignor {name!r} gave {min(missing)} to nobody ({len(missing)} in all)."
        )
    return {member: frozenset(owned) for member, owned in given.items()}


# --- range --------------------------------------------------------------------------------------


def range_(
    members: Mapping[str, MemberSubscription], partitions: Mapping[str, int], current: Assignment
) -> dict[str, list[TopicPartition]]:
    """Gives each member consecutive partitions of each topic, and the same partition numbers in
    topics of one size. Members are ordered by instance id, else by member id."""
    assigned: dict[str, list[TopicPartition]] = {member: [] for member in members}
    order = sorted(members, key=lambda member: (members[member].instance or member, member))
    for topic, count in sorted(partitions.items()):
        readers = [member for member in order if topic in members[member].topics]
        start = 0
        for index, member in enumerate(readers):
            share = count // len(readers) + (index < count % len(readers))
            assigned[member] += [
                TopicPartition(topic, number) for number in range(start, start + share)
            ]
            start += share
    return assigned


# --- uniform ------------------------------------------------------------------------------------


def uniform(
    members: Mapping[str, MemberSubscription], partitions: Mapping[str, int], current: Assignment
) -> dict[str, set[TopicPartition]]:
    """Sticky and balanced: among members with the same subscription the shares differ by at most
    one; if subscriptions differ, no chain of hand-overs could level two shares further.

    Every member keeps what it has; free partitions go to the least loaded member; then partitions
    move, one by one, from the most to the least loaded member.
    """
    shares = _Shares(members, partitions)
    free: dict[str, list[int]] = {topic: list(range(n)) for topic, n in partitions.items()}
    kept: set[TopicPartition] = set()
    for member in sorted(members):
        for partition in sorted(current.get(member, ())):
            is_there = partition.partition < partitions.get(partition.topic, 0)
            if is_there and partition not in kept and partition.topic in members[member].topics:
                kept.add(partition)
                shares.give(member, partition)
    for topic in free:
        free[topic] = [
            partition for partition in free[topic] if TopicPartition(topic, partition) not in kept
        ]
    shares.give_free(free)
    shares.level()
    return shares.owned()


class _Shares:
    """The partitions of each member, by topic, while `uniform` works."""

    def __init__(
        self, members: Mapping[str, MemberSubscription], partitions: Mapping[str, int]
    ) -> None:
        self._load = dict.fromkeys(sorted(members), 0)
        self._has: dict[str, dict[str, list[int]]] = {member: {} for member in self._load}
        """Heaps of the negated numbers: the highest partition is the first to go."""
        self._readers = {
            topic: [member for member in self._load if topic in members[member].topics]
            for topic in sorted(partitions)
        }

    def owned(self) -> dict[str, set[TopicPartition]]:
        return {
            member: {
                TopicPartition(topic, -number)
                for topic, numbers in has.items()
                for number in numbers
            }
            for member, has in self._has.items()
        }

    def give(self, member: str, partition: TopicPartition) -> None:
        self._load[member] += 1
        heapq.heappush(self._has[member].setdefault(partition.topic, []), -partition.partition)

    def give_free(self, free: Mapping[str, list[int]]) -> None:
        """Gives each partition to the least loaded reader, topics with the fewest readers first."""
        for topic, readers in sorted(self._readers.items(), key=lambda pair: len(pair[1])):
            heap = [(self._load[member], member) for member in readers]
            heapq.heapify(heap)
            for number in free[topic] if heap else ():
                load, member = heap[0]
                self.give(member, TopicPartition(topic, number))
                heapq.heapreplace(heap, (load + 1, member))

    def level(self) -> None:
        """Levels the shares. The most loaded member gives first, so that no member gives a
        partition without need."""
        has_moved = True
        while has_moved:
            has_moved = False
            heap = [(-load, member) for member, load in self._load.items()]
            heapq.heapify(heap)
            least = min(self._load.values(), default=0)
            while heap and -heap[0][0] - 2 >= least:  # else none has two fewer than the rest
                load, member = heapq.heappop(heap)
                path = self._path_down(member) if -load == self._load[member] else []
                for giver, topic, taker in path:
                    self._move(giver, topic, taker)
                if path:
                    has_moved = True
                    least = min(self._load.values())
                    for changed in (member, path[0][2]):
                        heapq.heappush(heap, (-self._load[changed], changed))

    def _move(self, giver: str, topic: str, taker: str) -> None:
        number = -heapq.heappop(self._has[giver][topic])
        self._load[giver] -= 1
        self.give(taker, TopicPartition(topic, number))

    def _path_down(self, start: str) -> list[tuple[str, str, str]]:
        """The shortest chain of hand-overs `(giver, topic, taker)` from `start` to a member with at
        least two partitions fewer; [] if there is none."""
        limit = self._load[start] - 2
        if limit < 0:
            return []
        came: dict[str, tuple[str, str]] = {}
        seen_topics: set[str] = set()
        level = deque([start])
        while level:
            underloaded = [member for member in level if self._load[member] <= limit]
            if underloaded:
                at = min(underloaded, key=lambda member: (self._load[member], member))
                path = []
                while at != start:
                    giver, topic = came[at]
                    path.append((giver, topic, at))
                    at = giver
                return path
            reached: deque[str] = deque()
            for giver in level:
                for topic in sorted(self._has[giver]):
                    if topic in seen_topics or not self._has[giver][topic]:
                        continue
                    seen_topics.add(topic)
                    for taker in self._readers[topic]:
                        if taker != start and taker not in came:
                            came[taker] = (giver, topic)
                            reached.append(taker)
            level = reached
        return []
