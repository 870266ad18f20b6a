"""The partitions by what is often asked for: no such question walks over all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from rayq.core.cluster.records import PartitionValue
from rayq.records import TopicIdPartition

Keys = dict[TopicIdPartition, None]
"""Partitions, in an order that is the same in every run."""


@dataclass(slots=True)
class PartitionIndex:
    """See the module. It follows from the values of all partitions; `replace` keeps it so."""

    by_broker: dict[int, Keys] = field(default_factory=dict)
    """The partitions that have a replica on a broker."""
    unfounded: Keys = field(default_factory=dict)
    """The partitions that no replica has led yet."""
    led_by_another: Keys = field(default_factory=dict)
    """The partitions that another replica leads than the preferred one, the first."""

    def replace(
        self, key: TopicIdPartition, before: PartitionValue | None, after: PartitionValue | None
    ) -> None:
        """Takes note of a partition's new value. None: there is no such partition."""
        had = () if before is None else before.replicas
        has = () if after is None else after.replicas
        if had != has:
            for broker in had:
                if broker not in has:
                    self._remove(key, broker)
            for broker in has:
                if broker not in had:
                    self.by_broker.setdefault(broker, {})[key] = None
        _set(self.unfounded, key, after is not None and after.leader_epoch == 0)
        _set(
            self.led_by_another,
            key,
            after is not None
            and after.leader is not None
            and after.leader not in after.replicas[:1],
        )

    def _remove(self, key: TopicIdPartition, broker: int) -> None:
        keys = self.by_broker[broker]
        del keys[key]
        if not keys:  # A snapshot knows nothing of a broker without replicas.
            del self.by_broker[broker]


def _set(keys: Keys, key: TopicIdPartition, belongs: bool) -> None:
    if belongs:
        keys[key] = None
    else:
        keys.pop(key, None)
