"""The transactions of one `__transaction_state` partition, as its coordinator holds them.

Durable state comes from records alone: only `replay` changes it, and start-up is the same replay
over the compacted log. `changes` reads it and returns records. Each coordinator
rebuilds the soft state (deadlines, markers that are written, families in hand).
"""

from __future__ import annotations

from rayq.core.transactions.records import (
    IdRecord,
    IdValue,
    Outcome,
    Record,
    TransactionKey,
    TransactionValue,
)
from rayq.records import TopicIdPartition


class TransactionState:
    """See the module."""

    def __init__(self) -> None:
        self.ids: dict[str, IdValue] = {}
        self.transactions: dict[TransactionKey, TransactionValue] = {}
        self._of_family: dict[int, str] = {}
        self._of_id: dict[str, list[TransactionKey]] = {}
        self.deadlines_s: dict[TransactionKey, float] = {}
        """Time at which each open transaction is aborted, on the monotonic clock."""
        self.throttled_until_s: dict[TransactionKey, float] = {}
        """Time up to which a transaction has been prolonged because a quota is used up."""
        self.written: dict[TransactionKey, set[TopicIdPartition]] = {}
        """The participants that have their marker, of each transaction that has ended."""
        self.families: list[int] = []
        """Families that were drawn for this coordinator and belong to no id yet."""

    def id_of(self, key: TransactionKey) -> str | None:
        """The transactional id whose present transaction this is."""
        transactional_id = self._of_family.get(key.family)
        return (
            transactional_id
            if transactional_id is not None and self.ids[transactional_id].next == key
            else None
        )

    def last_of_family(self, family: int) -> Outcome | None:
        """The outcome of the last transaction of the transactional id that has this family."""
        transactional_id = self._of_family.get(family)
        return None if transactional_id is None else self.ids[transactional_id].last

    def under_way(self, transactional_id: str) -> list[TransactionKey]:
        """The transactions of an id that are open or lack markers, oldest first."""
        return sorted(
            self._of_id.get(transactional_id, ()),
            key=lambda key: (self.transactions[key].start_ms, key),
        )

    def replay(self, record: Record) -> None:
        """Applies one record. Records of different keys may come in any order (compaction)."""
        if isinstance(record, IdRecord):
            name, value = record
            before = self.ids.pop(name, None)
            if before is not None:
                del self._of_family[before.next.family]
            if value is not None:
                self.ids[name] = value
                self._of_family[value.next.family] = name
            return
        key, transaction = record
        known = self.transactions.pop(key, None)
        if known is not None:
            self._of_id[known.transactional_id].remove(key)
            if not self._of_id[known.transactional_id]:
                del self._of_id[known.transactional_id]
        if transaction is None or transaction.is_decided:
            self.deadlines_s.pop(key, None)
            self.throttled_until_s.pop(key, None)
        if transaction is None:
            self.written.pop(key, None)
            return
        self.transactions[key] = transaction
        self._of_id.setdefault(transaction.transactional_id, []).append(key)
