"""What a log's batches say of its producers, transactions and leader epochs: derived from the
headers alone, without the replica's code, to compare it with what the replica remembers after a
recovery or a truncation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from rayq.storage.batch import BatchHeader
from rayq.storage.log import Log
from rayq.transaction_ids import family_of

REMEMBERED = 5
"""The number of the last batches that are remembered of each producer."""
SEQUENCES = 1 << 31

Producers = dict[int, tuple[int, list[tuple[int, int, int, int]]]]
"""By producer id: the epoch, and the first and last sequence and offset of each batch that is
remembered."""


def fault_of(log: Log, headers: Iterable[BatchHeader]) -> str | None:
    """The error in what a log remembers of its batches, or None. The log begins at 0 and was not
    compacted. No producer expires in a simulation, and there are never too many of them."""
    producers: dict[int, tuple[int, deque[tuple[int, int, int, int]]]] = {}
    opened: dict[int, tuple[int, int]] = {}
    ended: dict[int, int] = {}
    epochs: list[tuple[int, int]] = []
    for header in headers:
        if not epochs or epochs[-1][0] != header.leader_epoch:
            epochs.append((header.leader_epoch, header.base_offset))
        if header.is_transactional and header.producer_id is not None:
            family, epoch = family_of(header.producer_id), header.producer_epoch
            if not header.is_control:
                opened.setdefault(family, (epoch, header.base_offset))
            else:
                ended[family] = max(epoch, ended.get(family, -1))
                if family in opened and opened[family][0] == epoch:
                    del opened[family]
        if header.producer_id is None or header.base_sequence is None:
            continue
        before, batches = producers.get(header.producer_id, (None, deque()))
        if before != header.producer_epoch:
            batches = deque(maxlen=REMEMBERED)
            producers[header.producer_id] = header.producer_epoch, batches
        last_sequence = (header.base_sequence + header.last_offset_delta) % SEQUENCES
        batches.append(
            (header.base_sequence, last_sequence, header.base_offset, header.last_offset)
        )
    expected = {key: (epoch, list(batches)) for key, (epoch, batches) in producers.items()}
    remembered = _remembered(log)
    for key in sorted(expected.keys() | remembered.keys()):
        if expected.get(key) != remembered.get(key):
            return (
                f"remembers of producer {key} {remembered.get(key)}, its batches say "
                f"{expected.get(key)}"
            )
    transactions = log.producers.transactions
    known_open = {one.family: (one.epoch, one.first_offset) for one in transactions._open.values()}
    if known_open != opened:
        return f"takes {known_open} for its open transactions, its batches say {opened}"
    known_ended = {family: one.epoch for family, one in transactions._ended_epochs.items()}
    if known_ended != ended:
        return f"takes {known_ended} for the last ended transactions, its batches say {ended}"
    # The log may also remember an epoch that begins at its end and has no batch yet.
    known = [entry for entry in log.epochs.entries() if entry[1] < log.end_offset]
    return None if known == epochs else f"takes its epochs for {known}, its batches say {epochs}"


def _remembered(log: Log) -> Producers:
    return {
        key: (
            producer.epoch,
            [
                (one.base_sequence, one.last_sequence, one.base_offset, one.last_offset)
                for one in producer.batches
            ],
        )
        for key, producer in log.producers._producers.items()
    }
