"""The state of producers, transactions and leader epochs in a log's batches: derived from the
headers alone, without the replica's code, to compare it with what the replica remembers after a
recovery or a truncation, and with what a manifest says of the batches below its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from proving.simulation.server_view import ended_epochs_of, open_transactions_of, producers_of
from rayq.messages.transaction_ids import family_of
from rayq.storage.batch import BatchHeader
from rayq.storage.log import Log
from rayq.storage.producer_state import ProducerState
from rayq.storage.remote.manifest import Manifest

REMEMBERED = 5
"""The number of the last batches that are remembered of each producer."""
SEQUENCES = 1 << 31

Producers = dict[int, tuple[int, list[tuple[int, int, int, int]]]]
"""By producer id: the epoch, and the first and last sequence and offset of each batch that is
remembered."""


class Derived:
    """The state that follows from batches, added in the order of their offsets, from offset 0 on.
    """

    def __init__(self) -> None:
        self._producers: dict[int, tuple[int, deque[tuple[int, int, int, int]]]] = {}
        self.opened: dict[int, tuple[int, int]] = {}
        """By family: epoch and first offset of the transaction that is open."""
        self.ended: dict[int, int] = {}
        """By family: the highest epoch that a marker has ended."""
        self.epochs: list[tuple[int, int]] = []
        """`(leader epoch, start offset)`."""
        self.end = 0

    def add(self, header: BatchHeader) -> None:
        self.end = header.next_offset
        if not self.epochs or self.epochs[-1][0] != header.leader_epoch:
            self.epochs.append((header.leader_epoch, header.base_offset))
        if header.is_transactional and header.producer_id is not None:
            family, epoch = family_of(header.producer_id), header.producer_epoch
            if not header.is_control:
                self.opened.setdefault(family, (epoch, header.base_offset))
            else:
                self.ended[family] = max(epoch, self.ended.get(family, -1))
                if family in self.opened and self.opened[family][0] == epoch:
                    del self.opened[family]
        if header.producer_id is None or header.base_sequence is None:
            return
        before, batches = self._producers.get(header.producer_id, (None, deque()))
        if before != header.producer_epoch:
            batches = deque(maxlen=REMEMBERED)
            self._producers[header.producer_id] = header.producer_epoch, batches
        last_sequence = (header.base_sequence + header.last_offset_delta) % SEQUENCES
        batches.append(
            (header.base_sequence, last_sequence, header.base_offset, header.last_offset)
        )

    @property
    def producers(self) -> Producers:
        return {key: (epoch, list(batches)) for key, (epoch, batches) in self._producers.items()}


def fault_of(log: Log, headers: Iterable[BatchHeader]) -> str | None:
    """The error in what a log remembers of its batches, or None. The log begins at 0 and was not
    compacted. No producer expires in a simulation, and there are never too many of them."""
    derived = Derived()
    for header in headers:
        derived.add(header)
    expected, remembered = derived.producers, producers_of(log.producers)
    for key in sorted(expected.keys() | remembered.keys()):
        if expected.get(key) != remembered.get(key):
            return (
                f"remembers of producer {key} {remembered.get(key)}, its batches say "
                f"{expected.get(key)}"
            )
    transactions = log.producers.transactions
    known_open = open_transactions_of(transactions)
    if known_open != derived.opened:
        return f"takes {known_open} for its open transactions, its batches say {derived.opened}"
    known_ended = ended_epochs_of(transactions)
    if known_ended != derived.ended:
        return (
            f"takes {known_ended} for the last ended transactions, its batches say {derived.ended}"
        )
    # The log may also remember an epoch that begins at its end and has no batch yet.
    known = [entry for entry in log.epochs.entries() if entry[1] < log.end_offset]
    if known != derived.epochs:
        return f"takes its epochs for {known}, its batches say {derived.epochs}"
    return None


def fault_of_manifest(manifest: Manifest, below: Derived, leader: Log | None) -> str | None:
    """The error in what a manifest says of the batches below its end, or None. `below` has them;
    `leader` is the log of the leader that has committed it, if that is known.

    A log remembers the last batches of a producer that it has, and its manifest those of them that
    are below its end: so there may be fewer, the more came behind it. It says nothing that is not
    so, and nothing less than its leader still knows.
    """
    state = ProducerState()
    state.load(manifest.producer_snapshot)
    expected, said = below.producers, producers_of(state)
    known = {} if leader is None else producers_of(leader.producers)
    for key in sorted(said.keys() | known.keys()):
        epoch, batches = said.get(key, (None, []))
        of_epoch, of_batches = expected.get(key, (None, []))
        if batches and (epoch, batches) != (of_epoch, of_batches[-len(batches) :]):
            return (
                f"says of producer {key} {said[key]}, the batches below {manifest.end} say "
                f"{expected.get(key)}"
            )
        kept = [batch for batch in known.get(key, (0, []))[1] if batch[3] < manifest.end]
        if not set(kept) <= set(batches):
            return f"says of producer {key} {batches}, and its leader knows {kept}"
    transactions = state.transactions
    if opened := open_transactions_of(transactions):
        return f"takes {opened} for open"
    for family, ended in ended_epochs_of(transactions).items():
        if below.ended.get(family) != ended:
            return (
                f"takes {ended} for the last ended transaction of {family}, the batches "
                f"below {manifest.end} say {below.ended.get(family)}"
            )
    if manifest.log_start >= manifest.end:
        return None
    told, true = (_epochs_of(epochs, manifest) for epochs in (manifest.epochs, below.epochs))
    return None if told == true else f"has the epochs {told}, the batches say {true}"


def _epochs_of(epochs: list[tuple[int, int]], manifest: Manifest) -> list[tuple[int, int]]:
    """The epochs from the log start on; the first may have begun earlier."""
    ends = [start for _, start in epochs[1:]] + [manifest.end]
    return [
        (epoch, max(start, manifest.log_start))
        for (epoch, start), end in zip(epochs, ends, strict=True)
        if end > manifest.log_start
    ]
