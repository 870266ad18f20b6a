"""Plans of replica moves: to empty a broker, to replace one that is gone, to change the number of
replicas, or to spread the load.

Pure, over plain values: `nodes` maps each broker that may take replicas to its node; `placements`
maps each partition to its replicas, the preferred leader first. A plan holds the partitions that
change, with their new replicas. Replicas of a partition are kept on different nodes if possible;
second, brokers get equal numbers of replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=tuple[str, int])
"""A partition: `(topic, partition)`."""


def replace(
    nodes: Mapping[int, str],
    placements: Mapping[Key, Sequence[int]],
    gone: Collection[int],
) -> tuple[dict[Key, list[int]], list[Key]]:
    """A plan with replicas on other brokers for all replicas of the brokers `gone`, as far as there
    are other brokers, each in the position of the replica that it replaces; and the partitions for
    which there are too few other brokers."""
    takers = {broker: node for broker, node in nodes.items() if broker not in gone}
    load = _Load(placements.values())
    plan: dict[Key, list[int]] = {}
    impossible: list[Key] = []
    for key in sorted(placements):
        replicas = list(placements[key])
        for position, broker in enumerate(placements[key]):
            if broker in gone:
                taker = _best_taker(takers, load, replicas, position)
                if taker is not None:
                    replicas[position] = taker
        if replicas != list(placements[key]):
            load.change(placements[key], replicas)
            plan[key] = replicas
        if any(broker in gone for broker in replicas):
            impossible.append(key)
    return plan, impossible


def with_factor(
    nodes: Mapping[int, str],
    placements: Mapping[Key, Sequence[int]],
    in_sync: Mapping[Key, Sequence[int]],
    factor: int,
) -> tuple[dict[Key, list[int]], list[Key]]:
    """A plan with `factor` replicas for each partition of `in_sync`, which names the brokers that
    are in sync, the leader first; and the partitions for which there are too few brokers. The
    replicas that stay keep their order. New replicas are added on the brokers that carry fewest. Of
    too many, replicas that are not in sync go first, then those on brokers that are not in `nodes`,
    then those on the brokers that carry most; the leader stays."""
    load = _Load(placements.values())
    plan: dict[Key, list[int]] = {}
    impossible: list[Key] = []
    for key in sorted(in_sync):
        replicas = list(placements[key])
        while len(replicas) > factor:
            replicas.remove(_most_dispensable(nodes, load, replicas, in_sync[key]))
        while len(replicas) < factor:
            taker = _best_taker(nodes, load, replicas, len(replicas))
            if taker is None:
                impossible.append(key)
                break
            replicas.append(taker)
        if replicas != list(placements[key]):
            load.change(placements[key], replicas)
            plan[key] = replicas
    return plan, impossible


def spread(
    nodes: Mapping[int, str], placements: Mapping[Key, Sequence[int]]
) -> dict[Key, list[int]]:
    """The few moves that separate replicas of a partition that share a node, then give the brokers
    in `nodes` equal numbers of replicas, within one, then of preferred leaders. Empty if that is so
    already. Replicas on brokers outside of `nodes` stay there."""
    spreading = _Spreading(nodes, placements)
    spreading.take_apart()
    spreading.balance()
    spreading.balance_leaders()
    return {
        key: replicas
        for key, replicas in spreading.placed.items()
        if replicas != list(placements[key])
    }


class _Load:
    """Number of replicas of each broker, and of those that are preferred leaders."""

    def __init__(self, placements: Iterable[Sequence[int]]) -> None:
        self.carries: Counter[int] = Counter()
        self.leads: Counter[int] = Counter()
        for replicas in placements:
            self.carries.update(replicas)
            self.leads[replicas[0]] += 1

    def change(self, before: Sequence[int], after: Sequence[int]) -> None:
        self.carries.subtract(before)
        self.carries.update(after)
        self.leads[before[0]] -= 1
        self.leads[after[0]] += 1


def _best_taker(
    takers: Mapping[int, str], load: _Load, replicas: Sequence[int], position: int
) -> int | None:
    """The broker that takes the replica at a position, where the other replicas stay."""
    remaining = [broker for at, broker in enumerate(replicas) if at != position]
    used = {takers[broker] for broker in remaining if broker in takers}
    return min(
        (broker for broker in takers if broker not in replicas),
        key=lambda broker: (
            takers[broker] in used,
            load.leads[broker] if position == 0 else 0,
            load.carries[broker],
            broker,
        ),
        default=None,
    )


def _most_dispensable(
    nodes: Mapping[int, str], load: _Load, replicas: Sequence[int], in_sync: Sequence[int]
) -> int:
    """The replica to remove if there are too many: never that of the leader."""

    def cost_of_losing(broker: int) -> tuple[bool, bool, bool, int, int]:
        other_nodes = {nodes[other] for other in replicas if other != broker and other in nodes}
        return (
            broker in in_sync,
            broker in nodes,
            nodes.get(broker) not in other_nodes,
            -load.carries[broker],
            -replicas.index(broker),
        )

    return min((broker for broker in replicas if broker != in_sync[0]), key=cost_of_losing)


class _Spreading(Generic[Key]):
    """The state of `spread`. Each step lowers the imbalance, so it comes to an end."""

    def __init__(
        self, nodes: Mapping[int, str], placements: Mapping[Key, Sequence[int]]
    ) -> None:
        self._nodes = nodes
        self.placed = {key: list(placements[key]) for key in sorted(placements)}
        self._load = _Load(self.placed.values())
        self._on: dict[int, dict[Key, None]] = {broker: {} for broker in nodes}
        for key, replicas in self.placed.items():
            for broker in replicas:
                if broker in self._on:
                    self._on[broker][key] = None

    def take_apart(self) -> None:
        for key in self.placed:
            for position in reversed(range(len(self.placed[key]))):
                replicas = self.placed[key]
                if replicas[position] not in self._nodes:
                    continue
                if not self._shares_node(replicas, position):
                    continue
                taker = _best_taker(self._nodes, self._load, replicas, position)
                if taker is not None and not self._is_used(replicas, position, taker):
                    self._move(key, position, taker)

    def balance(self) -> None:
        while self._balance_once():
            pass

    def _balance_once(self) -> bool:
        carries = self._load.carries
        order = sorted(self._nodes, key=lambda broker: (carries[broker], broker))
        for high in reversed(order):
            for low in order:
                if carries[high] - carries[low] < 2:
                    break
                partition = self._movable(high, low)
                if partition is not None:
                    self._move(partition, self.placed[partition].index(high), low)
                    return True
        return False

    def _movable(self, high: int, low: int) -> Key | None:
        """A partition whose replica may go from one broker to the other: preferably one whose move
        evens out the leaders too."""
        leads = self._load.leads
        wants_leader = leads[high] > leads[low]
        fallback = None
        for key in self._on[high]:
            replicas = self.placed[key]
            position = replicas.index(high)
            if low in replicas:
                continue
            if self._is_used(replicas, position, low) and not self._shares_node(replicas, position):
                continue  # The move would bring two replicas together.
            if (position == 0) == wants_leader:
                return key
            fallback = fallback or key
        return fallback

    def balance_leaders(self) -> None:
        while self._balance_leaders_once():
            pass

    def _balance_leaders_once(self) -> bool:
        leads = self._load.leads
        for high in sorted(self._nodes, key=lambda broker: (-leads[broker], broker)):
            best = None
            for key in self._on[high]:
                replicas = self.placed[key]
                if replicas[0] != high:
                    continue
                for position, low in enumerate(replicas):
                    if low in self._nodes and leads[high] - leads[low] >= 2:
                        best = min(best or (leads[low], key, position), (leads[low], key, position))
            if best is not None:
                _, key, position = best
                replicas = self.placed[key]
                after = list(replicas)
                after[0], after[position] = after[position], after[0]
                self._load.change(replicas, after)
                self.placed[key] = after
                return True
        return False

    def _others(self, replicas: Sequence[int], position: int) -> set[str | None]:
        return {self._nodes.get(broker) for at, broker in enumerate(replicas) if at != position}

    def _shares_node(self, replicas: Sequence[int], position: int) -> bool:
        return self._nodes[replicas[position]] in self._others(replicas, position)

    def _is_used(self, replicas: Sequence[int], position: int, taker: int) -> bool:
        return self._nodes[taker] in self._others(replicas, position)

    def _move(self, key: Key, position: int, taker: int) -> None:
        replicas = self.placed[key]
        after = list(replicas)
        after[position] = taker
        self._on[replicas[position]].pop(key, None)
        self._on[taker][key] = None
        self._load.change(replicas, after)
        self.placed[key] = after
