"""The coordinator of every transactional id, as a test plays it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rayq import messages as m
from rayq.errors import AlreadyCommittedError, ProducerFencedError, TransactionEndedError
from rayq.messages.transaction_ids import make_family
from rayq.storage.batch import decode_columns

if TYPE_CHECKING:
    from tests.client.fake_broker import FakeCluster

Numbers = tuple[int, int]
"""`(family, epoch)`"""


@dataclass
class FakeProducer:
    owner: str
    family: int
    epoch: int = 0
    former: set[str] = field(default_factory=set)
    last: tuple[Numbers, bool] | None = None
    """The last transaction that ended, and whether it is committed."""
    last_name: str | None = None


class FakeTransactions:
    """The state belongs to the fake cluster's loop; a test calls the methods for the test only."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster
        self.producers: dict[str, FakeProducer] = {}
        self.families = 0
        self.outcomes: dict[Numbers, bool] = {}
        self.offsets: dict[Numbers, list[tuple[str, list[Any]]]] = {}
        """The positions that are pending."""

    # --- for the test ---------------------------------------------------------------------------

    def time_out(self, transactional_id: str) -> None:
        """The coordinator aborts what is open."""
        self._cluster.call(lambda: self._end(self.producers[transactional_id], False))

    def commit_for(self, transactional_id: str) -> None:
        """Somebody else, who knows the owner, commits what is open."""
        self._cluster.call(lambda: self._end(self.producers[transactional_id], True))

    def take_over(self, transactional_id: str) -> None:
        """Another owner, elsewhere, begins."""
        self._cluster.call(lambda: self._init(transactional_id, "another"))

    def committed(self, topic: str, partition: int = 0) -> list[bytes | None]:
        """The values that a reader of what is committed sees."""

        def read() -> list[bytes | None]:
            found: list[bytes | None] = []
            for header, data in self._cluster.topics[topic].partitions[partition].batches:
                key = (header.producer_id or 0, header.producer_epoch)
                if not header.is_transactional or self.outcomes.get(key, False):
                    found += decode_columns(data, 0, header).values
            return found

        return self._cluster.call(read)

    # --- the coordinator ------------------------------------------------------------------------

    def apply(self, request: m.AnyRequest) -> Any:
        match request:
            case m.InitProducer():
                return self._init(request.transactional_id, request.owner)
            case m.EndTransaction():
                return self._end_transaction(request)
        return None

    def _init(self, transactional_id: str, owner: str) -> m.InitProducerResponse:
        known = self.producers.get(transactional_id)
        if known is None:
            family = make_family(0, self.families)
            self.families += 1
            known = self.producers[transactional_id] = FakeProducer(owner, family)
        elif owner in known.former:
            raise ProducerFencedError("Another producer took over.")
        elif owner != known.owner:
            known.former.add(known.owner)
            known.owner = owner
            self._end(known, False)
        return m.InitProducerResponse(known.family, known.epoch, known.last_name)

    def _end_transaction(self, request: m.EndTransaction) -> m.EndTransactionResponse:
        known = self.producers[request.transactional_id]
        key = (request.family, request.epoch)
        if known.last is not None and known.last[0] == key:
            return m.EndTransactionResponse(known.last[1], known.family, known.epoch, True)
        if request.owner != known.owner:
            raise ProducerFencedError("Another producer took over.")
        if key != (known.family, known.epoch):
            raise TransactionEndedError("It ended long ago.")
        if request.is_commit and request.name is not None:
            if request.name == known.last_name:
                raise AlreadyCommittedError(f"{request.name} is committed.")
            known.last_name = request.name
        self._end(known, request.is_commit)
        return m.EndTransactionResponse(request.is_commit, known.family, known.epoch, True)

    def _end(self, known: FakeProducer, is_commit: bool) -> None:
        key = (known.family, known.epoch)
        self.outcomes[key] = is_commit
        known.last = (key, is_commit)
        known.epoch += 1
        for group, offsets in self.offsets.pop(key, []):
            if is_commit:
                self._cluster.groups.put(group, offsets)

    def join(self, family: int, epoch: int) -> None:
        """Raises TransactionEndedError."""
        if not any((one.family, one.epoch) == (family, epoch) for one in self.producers.values()):
            raise TransactionEndedError(f"Epoch {epoch} is over.")

    def commit_offsets(self, request: m.CommitOffsets) -> m.CommitOffsetsResponse:
        assert request.transaction is not None
        self.join(*request.transaction)
        taken, refused = self._cluster.groups.check(request)
        self.offsets.setdefault(request.transaction, []).append((request.group, taken))
        return m.CommitOffsetsResponse(refused)
