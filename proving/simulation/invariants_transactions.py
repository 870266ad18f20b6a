"""The invariants of transactions, checked with each batch that a leader commits.

- a transaction has one outcome: in the log of its coordinator, and in every partition;
- its decision is committed before any marker is written;
- no partition holds a batch of it behind its marker, or behind that of a later one of its family;
- a partition that holds committed batches of it is among its participants;
- it is forgotten once every participant has its marker, or can take no batch of it any more.
"""

from __future__ import annotations

from proving.simulation.invariants import InvariantError
from rayq.actors.replica.replica import Replica
from rayq.core import group_records, transaction_records
from rayq.core.group_records import EndedRecord
from rayq.core.topic_changes import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from rayq.core.transaction_records import TransactionKey, TransactionRecord, TransactionValue
from rayq.records import TopicIdPartition
from rayq.storage.batch import decode_columns, read_header
from rayq.transaction_ids import family_of, is_transactional


class TransactionInvariants:
    """See the module."""

    def __init__(self) -> None:
        self._known: dict[TransactionKey, TransactionValue] = {}
        """What is committed of each transaction that is not forgotten."""
        self._decided: dict[TransactionKey, bool] = {}
        self._ended: dict[tuple[TopicIdPartition, int], int] = {}
        """The highest epoch of a family with a marker in a partition."""
        self._newest: dict[tuple[TopicIdPartition, int], int] = {}
        """The highest epoch of a family with a batch or a marker in a partition."""
        self._written: dict[TransactionKey, set[TopicIdPartition]] = {}
        self._marked: dict[TransactionKey, set[TopicIdPartition]] = {}

    def committed(self, replica: Replica, leader_epoch: int, batch: bytes) -> None:
        """Takes a committed batch of any topic."""
        topic = replica.assignment.topic
        place = (replica.assignment.topic_id, replica.assignment.partition)
        header = read_header(batch)
        if topic == TRANSACTIONS_TOPIC:
            columns = decode_columns(batch, 0, header)
            for key, value in zip(columns.keys or (), columns.values, strict=True):
                record = transaction_records.decode(key, value)
                if isinstance(record, TransactionRecord):
                    self._decide(record)
        elif topic == OFFSETS_TOPIC:
            columns = decode_columns(batch, 0, header)
            for key, value in zip(columns.keys or (), columns.values, strict=True):
                ended = group_records.decode(key, value)
                if isinstance(ended, EndedRecord) and ended.value is not None:
                    self._end(place, TransactionKey(ended.family, ended.value.epoch), None)
        elif header.producer_id is not None and is_transactional(header.producer_id):
            assert header.producer_epoch is not None
            transaction = TransactionKey(family_of(header.producer_id), header.producer_epoch)
            if header.is_control:
                self._end(place, transaction, not header.is_abort)
            else:
                self._write(place, transaction)

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
