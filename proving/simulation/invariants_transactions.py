"""The invariants of transactions, checked with each batch that a leader commits.

- a transaction has one outcome: in the log of its coordinator, and in every partition;
- its decision is one batch of that log, committed before any marker is written;
- no leader's last stable offset passes a committed batch of it before its marker is committed;
- one transaction at a time holds a group's position in a partition, and nobody else writes it;
- no partition holds a batch of it behind its marker, or behind that of a later one of its family;
- a partition that holds committed batches of it is among its participants;
- it is forgotten once every participant has its marker, or can take no batch of it any more.
"""

from __future__ import annotations

from proving.simulation.invariants import InvariantError
from proving.simulation.server_view import replica_log_of
from rayq.actors.replica.replica import Replica
from rayq.core.cluster.topic_changes import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from rayq.core.groups import records as group_records
from rayq.core.groups.records import EndedRecord, OffsetRecord, PendingRecord
from rayq.core.transactions import records as transaction_records
from rayq.core.transactions.records import (
    IdRecord,
    TransactionKey,
    TransactionRecord,
    TransactionValue,
)
from rayq.messages.transaction_ids import family_of, is_transactional
from rayq.records import TopicIdPartition
from rayq.storage.batch import decode_columns, read_header


class TransactionInvariants:
    """See the module."""

    def __init__(self) -> None:
        self._known: dict[TransactionKey, TransactionValue] = {}
        """The committed state of each transaction that is not forgotten."""
        self._decided: dict[TransactionKey, bool] = {}
        self._ended: dict[tuple[TopicIdPartition, int], int] = {}
        """The highest epoch of a family with a marker in a partition."""
        self._newest: dict[tuple[TopicIdPartition, int], int] = {}
        """The highest epoch of a family with a batch or a marker in a partition."""
        self._written: dict[TransactionKey, set[TopicIdPartition]] = {}
        self._marked: dict[TransactionKey, set[TopicIdPartition]] = {}
        self._open: dict[TopicIdPartition, dict[TransactionKey, int]] = {}
        """The first offset of each transaction that has batches in a partition and no marker."""
        self._pending: dict[tuple[str, str, int], TransactionKey] = {}
        """The transaction that holds the position of a group in a partition."""
        self._moved: set[Replica] = set()
        """The leaders that have committed something since `observe`."""

    def observe(self) -> None:
        """Checks what the last event may have changed, once its batches were taken."""
        if not self._moved:
            return
        for replica in self._moved:
            place = (replica.assignment.topic_id, replica.assignment.partition)
            stable_offset = replica_log_of(replica).last_stable_offset
            for key, first_offset in self._open.get(place, {}).items():
                if first_offset < stable_offset:
                    raise InvariantError(
                        f"the last stable offset of {place} is {stable_offset}, and {key} is open "
                        f"from {first_offset} on"
                    )
        self._moved.clear()

    def committed(self, replica: Replica, leader_epoch: int, batch: bytes) -> None:
        """Takes a committed batch of any topic."""
        topic = replica.assignment.topic
        place = (replica.assignment.topic_id, replica.assignment.partition)
        header = read_header(batch)
        self._moved.add(replica)
        if topic == TRANSACTIONS_TOPIC:
            columns = decode_columns(batch, 0, header)
            records = [
                transaction_records.decode(key, value)
                for key, value in zip(columns.keys or (), columns.values, strict=True)
            ]
            for record in records:
                if isinstance(record, TransactionRecord):
                    self._decide(record)
            for record in records:
                if isinstance(record, IdRecord):
                    self._check_whole(record)
        elif topic == OFFSETS_TOPIC:
            columns = decode_columns(batch, 0, header)
            for key, value in zip(columns.keys or (), columns.values, strict=True):
                position = group_records.decode(key, value)
                if isinstance(position, EndedRecord) and position.value is not None:
                    self._end(place, TransactionKey(position.family, position.value.epoch), None)
                elif isinstance(position, PendingRecord | OffsetRecord):
                    self._take_position(position)
                    if isinstance(position, PendingRecord) and position.value is not None:
                        taker = TransactionKey(position.value.family, position.value.epoch)
                        self._write(place, taker)
        elif header.producer_id is not None and is_transactional(header.producer_id):
            assert header.producer_epoch is not None
            transaction = TransactionKey(family_of(header.producer_id), header.producer_epoch)
            if header.is_control:
                self._end(place, transaction, not header.is_abort)
                self._open.get(place, {}).pop(transaction, None)
            else:
                self._write(place, transaction)
                self._open.setdefault(place, {}).setdefault(transaction, header.base_offset)

    def _check_whole(self, record: IdRecord) -> None:
        if record.value is None or record.value.last is None:
            return
        key = record.value.last.key
        known = self._known.get(key)
        if known is not None and not known.is_decided:
            raise InvariantError(f"{key} has ended for its id, and is {known.state} itself")

    def _take_position(self, record: PendingRecord | OffsetRecord) -> None:
        place = (record.group, record.topic_id, record.partition)
        holder = self._pending.get(place)
        if isinstance(record, OffsetRecord):
            if holder is not None and not self._decided.get(holder):
                raise InvariantError(f"{place} is set, and {holder} holds it and did not commit")
        elif record.value is None:
            self._pending.pop(place, None)
        else:
            key = TransactionKey(record.value.family, record.value.epoch)
            if holder not in (None, key):
                raise InvariantError(f"{place} is held by {holder} and by {key}")
            self._pending[place] = key

    def _decide(self, record: TransactionRecord) -> None:
        key, value = record
        if value is None:
            before = self._known.pop(key, None)
            for place in () if before is None else before.participants:
                # Where it has written nothing, the fence may be a later transaction's.
                has_fence = self._newest.get((place, key.family), -1) > key.epoch
                if place in self._marked.get(key, ()) or (
                    has_fence and place not in self._written.get(key, ())
                ):
                    continue
                raise InvariantError(f"{key} is forgotten, and {place} has no marker of it")
            return
        self._known[key] = value
        if value.is_decided:
            is_committed = value.state == "committing"
            if self._decided.setdefault(key, is_committed) != is_committed:
                raise InvariantError(f"{key} is decided twice, and differently: now {value.state}")
        elif key in self._decided:
            raise InvariantError(f"{key} is open again, after it was decided")

    def _end(self, place: TopicIdPartition, key: TransactionKey, is_commit: bool | None) -> None:
        """`is_commit` is None where the record does not say."""
        decided = self._decided.get(key)
        if decided is None:
            raise InvariantError(f"{place} has a marker of {key}, which is not decided")
        if is_commit is not None and is_commit != decided:
            raise InvariantError(f"{place} has a marker of {key} with another outcome: {is_commit}")
        self._marked.setdefault(key, set()).add(place)
        ended = self._ended.get((place, key.family), -1)
        self._ended[place, key.family] = max(ended, key.epoch)
        self._came(place, key)

    def _came(self, place: TopicIdPartition, key: TransactionKey) -> None:
        newest = self._newest.get((place, key.family), -1)
        self._newest[place, key.family] = max(newest, key.epoch)

    def _write(self, place: TopicIdPartition, key: TransactionKey) -> None:
        if self._ended.get((place, key.family), -1) >= key.epoch:
            raise InvariantError(f"{place} has a batch of {key} behind its marker")
        known = self._known.get(key)
        if known is None or place not in known.participants:
            raise InvariantError(f"{place} has a batch of {key} and did not join it: {known}")
        self._written.setdefault(key, set()).add(place)
        self._came(place, key)
