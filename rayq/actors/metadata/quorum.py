"""The controller's writer of the metadata log, which a majority of the voters stores.

Raft's commit rules with one writer (docs/protocol.md, rules 3 to 5): `take_over` wins a majority's
promise for an epoch, adopts the log whose last record has the greatest (epoch, index) and adds
`EpochStarted`; once a majority holds that, everything before it is committed too. From then on
`append` adds records, every broker is sent them, and a record is committed when a majority of the
voters has it on disk. Any failure ends this object for good: its owner starts over with a new one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from rayq import messages
from rayq.actors.metadata import snapshot_parts
from rayq.actors.metadata.snapshot_parts import Snapshot
from rayq.actors.signal import Signal
from rayq.backoff import Backoff
from rayq.config import MIB, ClusterConfig
from rayq.core.cluster.records import (
    BrokerRegistered,
    EpochStarted,
    MetadataRecord,
    Voter,
    VotersChanged,
    decode_entry,
    decode_in_steps,
    encode_record,
    encode_together,
)
from rayq.environment import Address, Environment
from rayq.errors import (
    ControllerUnavailableError,
    FencedEpochError,
    NotControllerError,
    ProtocolError,
    RayqError,
    StalePartitionError,
)
from rayq.wire.pool import ConnectionPool

logger = logging.getLogger(__name__)

APPEND_BYTES_MAX = MIB
RETRY_S = 0.1
RETRY_MAX_S = 0.5
GREETING_INTERVAL_S = 0.5
"""Interval at which a broker that did not answer the candidate is asked again, until it does."""
STRAGGLERS_S = 0.1
"""Time that a candidate waits for more answers once it has those of a majority."""
Entry = tuple[int, int, bytes]
"""`(index, epoch, encoded record)`"""
Answer = tuple[messages.PrepareResponse, Address]
"""A broker's answer to `Prepare`, and its address."""

encode_entries = msgspec.msgpack.Encoder().encode
decode_entries = msgspec.msgpack.Decoder(list[Entry]).decode


@dataclass(slots=True)
class _Peer:
    """A broker to which the log is sent."""

    broker: int
    directory_id: str
    host: str
    port: int
    next_index: int
    match_index: int = 0
    acknowledged_s: float = 0.0
    has_vote: bool = True
    """False for an old copy of a voter's directory: it is told the controller's address, so that it
    can register and come back under another id, and it does not count until then."""
    wake: Signal = field(default_factory=Signal)
    step_back: int = 1
    sent_commit_index: int = -1
    snapshot: Snapshot | None = None
    """The snapshot that is being sent in parts. A newer snapshot does not replace it: the broker
    would have to begin again each time."""
    snapshot_position: int = 0
    takes_parts: bool = True
    """False for a broker of an older rayq, which knows no parts."""
    pusher: asyncio.Task[None] | None = None


class Quorum:
    """See the module. `on_end(reason)` is called once, when the epoch is over."""

    def __init__(
        self,
        environment: Environment,
        pool: ConnectionPool,
        config: ClusterConfig,
        *,
        cluster_id: str,
        endpoint: Address,
        now_s: Callable[[], float],
        on_end: Callable[[str], None],
    ) -> None:
        """`now_s()` is the time by which the silence of voters is measured (`ListeningClock`)."""
        self._environment = environment
        self._now_s = now_s
        self._pool = pool
        self._config = config
        self._cluster_id = cluster_id
        self._endpoint = endpoint
        self._on_end = on_end
        self._timeout_s = config.session_timeout_ms / 1000
        self.epoch = 0
        self.commit_index = 0
        self.voters: tuple[Voter, ...] = ()
        self._snapshot: Snapshot | None = None
        self._entries: list[Entry] = []
        """The entries behind the snapshot, and those before its end that brokers still lack."""
        self._before = (0, 0)
        """The index and the epoch of the record before the first entry."""
        self._bytes_behind_snapshot = 0
        self._encoded: tuple[tuple[int, int], int, bytes] | None = None
        """The last entries that were encoded: the index of the first and the end of the log at that
        time, their number, their bytes. Most brokers are sent the same."""
        self._peers: dict[int, _Peer] = {}
        self._greeters: list[asyncio.Task[None]] = []
        self._epoch_index = 0
        self._committed = Signal()
        self._ended: str | None = None

    # --- taking over ------------------------------------------------------------------------

    async def take_over(
        self, known: Sequence[Address], *, silent_s_min: float
    ) -> list[MetadataRecord]:
        """Wins the log and returns every record in it (from a snapshot on), `EpochStarted` last.

        `known` are addresses of brokers. Before it disturbs anyone it asks which voters answer: it
        gives up while a majority of the voters is not there, or while a majority of them has heard
        a controller less than `silent_s_min` ago (Raft's PreVote: a candidate that reaches only
        some must not depose a controller that works).

        Raises ControllerUnavailableError, which names what is missing or the voters that hear a
        controller, and FencedEpochError (another controller is ahead).
        """
        answers = await self._ask(known, epoch=0, is_probe=True)
        if not answers:
            raise ControllerUnavailableError(f"None of the brokers at {list(known)} answers.")
        self._set_voters_of(answers)
        self._require_majority(answers)
        self._require_silence(answers, silent_s_min)
        self.epoch = max(answer.promised_epoch for answer, _ in answers) + 1
        by_voter = {(answer.broker, answer.directory_id): at for answer, at in answers}
        promised = await self._ask(
            [by_voter[key] for key in self._voter_keys() if key in by_voter],
            epoch=self.epoch,
            is_probe=False,
        )
        self._require_majority(promised)
        best, best_at = max(
            promised, key=lambda promise: (promise[0].last_epoch, promise[0].last_index)
        )
        self._set_voters_of([(best, best_at)])
        await self._adopt(best_at)
        records = await self._all_records()
        old_copies = _old_copies(records, [answer for answer, _ in promised])
        self._require_majority(
            [promise for promise in promised if promise[0].broker not in old_copies]
        )
        for answer, at in answers:
            self._add(answer, at, has_vote=answer.broker not in old_copies)
        host, port = self._endpoint
        has_object_store = self._config.remote_storage_url is not None
        mark = self._environment.new_id() if has_object_store else ""
        started = EpochStarted(self.epoch, host, port, self._cluster_id, mark)
        self._epoch_index = self.append([started])
        for peer in self._peers.values():
            self._start_pusher(peer)
        late = set(known) - {at for _, at in answers}
        self._greeters = [
            self._environment.tasks.spawn(self._greet(at, records), "greeting-a-late-broker")
            for at in sorted(late)
        ]
        await self.committed(self._epoch_index)
        return [*records, started]

    async def _greet(self, at: Address, records: Sequence[MetadataRecord]) -> None:
        """Sends the log to a broker that did not answer in time, as soon as it answers. A broker
        that starts for the first time may know no other broker: it would never hear of the
        controller."""
        request = messages.Prepare(self._cluster_id, 0, *self._endpoint, is_probe=True)
        while all((peer.host, peer.port) != at for peer in self._peers.values()):
            try:
                answer, _ = await self._pool.request(*at, request, timeout_s=self._timeout_s)
            except RayqError as error:
                logger.debug("the broker at %s does not answer yet: %s", at, error)
                await asyncio.sleep(GREETING_INTERVAL_S)
                continue
            if answer.broker not in self._peers:
                has_vote = answer.broker not in _old_copies(records, [answer])
                self._add(answer, at, has_vote=has_vote)
                self._start_pusher(self._peers[answer.broker])
            return

    async def _ask(
        self, endpoints: Sequence[Address], *, epoch: int, is_probe: bool
    ) -> list[Answer]:
        """Returns the answers, one for each broker. Does not wait long for the rest once a majority
        of the voters (those of the best log among the answers) has answered."""
        request = messages.Prepare(self._cluster_id, epoch, *self._endpoint, is_probe=is_probe)
        by_broker: dict[int, Answer] = {}

        async def ask(at: Address) -> None:
            answer, _ = await self._pool.request(*at, request, timeout_s=self._timeout_s / 2)
            by_broker[answer.broker] = (answer, at)

        waiting = {asyncio.ensure_future(ask(at)) for at in dict.fromkeys(endpoints)}
        timeout_s = None
        try:
            while waiting:
                done, waiting = await asyncio.wait(
                    waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                for error in [task.exception() for task in done]:
                    if isinstance(error, FencedEpochError) or (
                        error is not None and not isinstance(error, RayqError)
                    ):
                        raise error
                if by_broker and timeout_s is None:
                    self._set_voters_of(list(by_broker.values()))
                    if not self._missing_voters(list(by_broker.values()))[1]:
                        timeout_s = STRAGGLERS_S
        finally:
            _cancel_all(waiting)
        return [by_broker[broker] for broker in sorted(by_broker)]

    def _set_voters_of(self, answers: Sequence[Answer]) -> None:
        best, _ = max(answers, key=lambda answer: (answer[0].last_epoch, answer[0].last_index))
        self.voters = tuple(Voter(broker, directory) for broker, directory in best.voters)

    def _voter_keys(self) -> list[tuple[int, str]]:
        return [(voter.broker, voter.directory_id) for voter in self.voters]

    def _missing_voters(self, answers: Sequence[Answer]) -> tuple[list[tuple[int, str]], bool]:
        """The voters that are not among the answers, and whether that is too many."""
        present = {(answer.broker, answer.directory_id) for answer, _ in answers}
        missing = [key for key in self._voter_keys() if key not in present]
        return missing, len(self.voters) - len(missing) <= len(self.voters) // 2

    def _require_majority(self, answers: Sequence[Answer]) -> None:
        missing, is_too_many = self._missing_voters(answers)
        if is_too_many:
            names = ", ".join(f"broker {broker} (directory {where})" for broker, where in missing)
            raise ControllerUnavailableError(
                f"No majority of the {len(self.voters)} voters of the metadata log: waiting for "
                f"{names or 'a formatted broker'}. Start these brokers with their directories."
            )

    def _require_silence(self, answers: Sequence[Answer], silent_s_min: float) -> None:
        """Raises ControllerUnavailableError if a majority of the voters hears a controller."""
        hearing = [
            answer.broker
            for answer, _ in answers
            if (answer.broker, answer.directory_id) in self._voter_keys()
            and answer.heard_ms_ago is not None
            and answer.heard_ms_ago < silent_s_min * 1000
        ]
        if len(hearing) > len(self.voters) // 2:
            raise ControllerUnavailableError(
                f"The voters {hearing} still hear a controller, so it is not replaced."
            )

    async def _adopt(self, at: Address) -> None:
        first_index = 1
        parts = bytearray()
        of: tuple[int, int, int | None] | None = None
        while True:
            is_tail = self._snapshot is not None
            request = messages.ReadMetadataLog(
                self.epoch,
                first_index,
                APPEND_BYTES_MAX if is_tail else snapshot_parts.PART_BYTES_MAX,
                None if is_tail else len(parts),
            )
            answer, payload = await self._pool.request(*at, request, timeout_s=self._timeout_s)
            entries = decode_entries(payload)
            if entries and answer.snapshot_index is not None:
                index, epoch, part = entries.pop(0)
                size_bytes = answer.snapshot_bytes
                if of not in (None, (index, epoch, size_bytes)):
                    raise ProtocolError(
                        f"The voter at {at} sent parts of two snapshots, of {of} and of "
                        f"{(index, epoch, size_bytes)}."
                    )
                of = (index, epoch, size_bytes)
                parts += part
                if part and len(parts) < (size_bytes or 0):
                    continue
                if len(parts) != (size_bytes or len(parts)):
                    raise ProtocolError(
                        f"The voter at {at} was asked for its snapshot of {size_bytes} bytes, and "
                        f"sent {len(parts)}."
                    )
                self._snapshot = (index, epoch, bytes(parts))
                self._before = (index, epoch)
                self._entries.clear()
                self._bytes_behind_snapshot = 0
            for entry in entries:
                if entry[0] != self.last_index + 1:
                    raise ProtocolError(
                        f"The voter at {at} was asked for its log from record {first_index} on: "
                        f"after record {self.last_index} it sent record {entry[0]}."
                    )
                self._entries.append(entry)
                self._bytes_behind_snapshot += len(entry[2])
            if answer.is_last:
                return
            if self.last_index < first_index:
                raise ProtocolError(
                    f"The voter at {at} sent nothing of its log from record {first_index} on, and "
                    "says that there is more."
                )
            first_index = self.last_index + 1

    async def _all_records(self) -> list[MetadataRecord]:
        records: list[MetadataRecord] = []
        for step in [] if self._snapshot is None else decode_in_steps(self._snapshot[2]):
            records += step
            await asyncio.sleep(0)
        for _, _, data in self._entries:
            records += decode_entry(data)
        return records

    # --- the log ----------------------------------------------------------------------------

    @property
    def last_index(self) -> int:
        return self._before[0] + len(self._entries)

    def append(self, records: Sequence[MetadataRecord], *, together: bool = False) -> int:
        """Adds records and returns the index of the last; they are not committed yet. `together`:
        as one entry, so that all of them are committed, or none. Raises NotControllerError."""
        self._check_not_ended()
        together = together and len(records) > 1
        for data in [encode_together(records)] if together else map(encode_record, records):
            self._entries.append((self.last_index + 1, self.epoch, data))
            self._bytes_behind_snapshot += len(data)
        for record in records:
            if isinstance(record, VotersChanged):
                self.voters = record.voters  # As in Raft: the newest set counts, committed or not.
        for peer in self._peers.values():
            peer.wake.notify()
        return self.last_index

    async def committed(self, index: int) -> None:
        """Returns once `index` is committed. Raises NotControllerError: the epoch ended, and the
        record may or may not become committed."""
        while self.commit_index < index:
            self._check_not_ended()
            await self._committed.wait(self._timeout_s)
        self._check_not_ended()

    async def until_committed(self) -> None:
        """Returns once everything appended so far is committed. Raises as `committed`."""
        await self.committed(self.last_index)

    def _add(self, answer: messages.PrepareResponse, at: Address, *, has_vote: bool) -> None:
        host, port = at
        self._peers[answer.broker] = _Peer(
            broker=answer.broker,
            directory_id=answer.directory_id,
            host=host,
            port=port,
            next_index=min(answer.last_index, self.last_index) + 1,
            acknowledged_s=self._now_s(),
            has_vote=has_vote,
        )

    def add_peer(self, broker: int, directory_id: str, endpoint: Address) -> None:
        """Starts to send the log to a broker that registered."""
        known = self._peers.get(broker)
        if known is not None:
            if (known.host, known.port, known.directory_id) == (*endpoint, directory_id):
                return
            if known.pusher is not None:
                known.pusher.cancel()
        host, port = endpoint
        peer = self._peers[broker] = _Peer(
            broker=broker,
            directory_id=directory_id,
            host=host,
            port=port,
            next_index=self.last_index + 1,
            acknowledged_s=self._now_s(),
        )
        self._start_pusher(peer)

    def remove_peer(self, broker: int) -> None:
        """Stops sending to a broker that was removed."""
        peer = self._peers.pop(broker, None)
        if peer is not None and peer.pusher is not None:
            peer.pusher.cancel()

    def is_connected(self, broker: int) -> bool:
        """Returns whether there is an open connection to the broker: it ends at once with its
        process."""
        peer = self._peers.get(broker)
        connection = None if peer is None else self._pool.current(peer.host, peer.port)
        return connection is not None and not connection.closed

    def compact(self, snapshot: bytes) -> None:
        """Replaces the entries in memory by a snapshot of the state after all of them, which must
        be committed. Brokers that answer get what they lack as entries, and not all of it again."""
        assert self.commit_index == self.last_index
        self._snapshot = (self.last_index, self._epoch_at(self.last_index), snapshot)
        self._bytes_behind_snapshot = 0
        since_s = self._environment.clock.monotonic() - self._timeout_s
        held = (
            peer.next_index - 1 if peer.snapshot is None else peer.snapshot[0]
            for peer in self._peers.values()
            if peer.acknowledged_s >= since_s
        )
        lacking_from = max(min(held, default=self.last_index), self._before[0])
        before = (lacking_from, self._epoch_at(lacking_from))
        del self._entries[: lacking_from - self._before[0]]
        self._before = before

    def wants_snapshot(self, entries_min: int) -> bool:
        """Returns whether everything is committed, and there are more than so many entries behind
        the last snapshot, which take as many bytes: it costs what has changed since."""
        index, size_bytes = (0, 0) if self._snapshot is None else (
            self._snapshot[0], len(self._snapshot[2])
        )
        return (
            self.commit_index == self.last_index
            and self.last_index - index > entries_min
            and self._bytes_behind_snapshot >= size_bytes
        )

    def has_majority(self) -> bool:
        """Returns whether a majority of the voters answered within a session."""
        since_s = self._now_s() - self._timeout_s
        heard = sum(
            peer is not None and peer.acknowledged_s >= since_s for peer in self._voting_peers()
        )
        return heard > len(self.voters) // 2

    def end(self, reason: str) -> None:
        """Stops sending; each request that waits for a commit gets NotControllerError."""
        if self._ended is not None:
            return
        self._ended = reason
        for greeter in self._greeters:
            greeter.cancel()
        for peer in self._peers.values():
            if peer.pusher is not None:
                peer.pusher.cancel()
        self._committed.notify()
        self._on_end(reason)

    def _check_not_ended(self) -> None:
        if self._ended is not None:
            raise NotControllerError(f"Controller epoch {self.epoch} is over: {self._ended}")

    # --- sending ----------------------------------------------------------------------------

    def _start_pusher(self, peer: _Peer) -> None:
        peer.pusher = self._environment.tasks.spawn(
            self._push_forever(peer), f"metadata-to-broker-{peer.broker}"
        )

    async def _push_forever(self, peer: _Peer) -> None:
        backoff = Backoff(self._environment, RETRY_S, RETRY_MAX_S)
        while self._ended is None:
            try:
                await self._push(peer)
            except FencedEpochError as error:
                self.end(f"broker {peer.broker} follows a newer one: {error}")
                return
            except StalePartitionError as error:
                if peer.next_index == 1:  # Nothing comes before the first record.
                    logger.warning("metadata to broker %d: %s", peer.broker, error)
                    await asyncio.sleep(RETRY_S)
                    continue
                # Its log does not hold the preceding record: start further back.
                peer.next_index = max(1, peer.next_index - peer.step_back)
                peer.step_back *= 2
                continue
            except RayqError as error:
                logger.debug("metadata to broker %d: %s", peer.broker, error)
                await asyncio.sleep(backoff.next_s())
                continue
            backoff.reset()
            peer.step_back = 1
            is_behind = (
                peer.snapshot is not None
                or peer.next_index <= self.last_index
                or peer.sent_commit_index < self.commit_index
            )
            if not is_behind:
                await peer.wake.wait(self._config.heartbeat_interval_ms / 1000)

    async def _push(self, peer: _Peer) -> None:
        host, port = self._endpoint
        commit_index = self.commit_index
        answer: messages.AppendMetadataResponse | messages.InstallMetadataSnapshotPartResponse
        snapshot = self._snapshot_for(peer)
        if snapshot is not None:
            answer = await self._push_snapshot(peer, snapshot)
            sent_commit_index, sent_index = -1, 0 if peer.snapshot is not None else snapshot[0]
        else:
            previous_index = peer.next_index - 1
            count, entries = self._encoded_from(peer.next_index)
            answer, _ = await self._pool.request(
                peer.host,
                peer.port,
                messages.AppendMetadata(
                    epoch=self.epoch,
                    host=host,
                    port=port,
                    previous_index=previous_index,
                    previous_epoch=self._epoch_at(previous_index),
                    commit_index=commit_index,
                ),
                entries,
                timeout_s=self._timeout_s,
            )
            sent_commit_index, sent_index = commit_index, previous_index + count
        if not sent_index <= answer.last_index <= self.last_index:
            raise ProtocolError(
                f"Broker {peer.broker} was sent the metadata log up to record {sent_index}, and "
                f"says that it holds {answer.last_index} of {self.last_index}."
            )
        peer.acknowledged_s = self._now_s()
        if answer.directory_id != peer.directory_id:
            peer.directory_id, peer.has_vote = answer.directory_id, True
        if peer.snapshot is not None:
            return
        peer.match_index = answer.last_index
        peer.next_index = answer.last_index + 1
        peer.sent_commit_index = sent_commit_index
        self._advance()

    def _snapshot_for(self, peer: _Peer) -> Snapshot | None:
        """The snapshot that a broker needs because entries that it lacks are gone."""
        if peer.snapshot is not None and not self._has_epoch_of(peer.snapshot[0]):
            peer.snapshot = None  # It was away for long. What follows on this one is gone, too.
        if peer.snapshot is not None or self._has_epoch_of(peer.next_index - 1):
            return peer.snapshot
        return self._snapshot

    async def _push_snapshot(
        self, peer: _Peer, snapshot: Snapshot
    ) -> messages.AppendMetadataResponse | messages.InstallMetadataSnapshotPartResponse:
        """Sends a snapshot, or the next part of it. While parts are missing `peer.snapshot` is
        set."""
        index, epoch, data = snapshot
        if peer.takes_parts and len(data) > snapshot_parts.PART_BYTES_MAX:
            if peer.snapshot is None:
                peer.snapshot, peer.snapshot_position = snapshot, 0
            start = peer.snapshot_position
            part = data[start : start + snapshot_parts.PART_BYTES_MAX]
            request = messages.InstallMetadataSnapshotPart(
                self.epoch, *self._endpoint, index, epoch, len(data), start
            )
            try:
                answer, _ = await self._pool.request(
                    peer.host, peer.port, request, part, timeout_s=self._timeout_s
                )
            except ProtocolError:
                peer.snapshot, peer.takes_parts = None, False
                raise
            received_bytes = answer.received_bytes
            if received_bytes == start or not 0 <= received_bytes <= len(data):
                raise ProtocolError(
                    f"Broker {peer.broker} was sent the snapshot of the metadata from byte {start} "
                    f"of {len(data)} on, and says that it has {received_bytes}."
                )
            peer.snapshot_position = received_bytes
            if received_bytes == len(data):
                peer.snapshot = None
            return answer
        whole = messages.InstallMetadataSnapshot(self.epoch, index, epoch)
        answer_to_whole, _ = await self._pool.request(
            peer.host, peer.port, whole, data, timeout_s=self._timeout_s
        )
        peer.takes_parts = True  # It may be another rayq when it needs the next one.
        return answer_to_whole

    def _encoded_from(self, index: int) -> tuple[int, bytes]:
        """Number of the entries to send from `index` on, and their bytes."""
        asked = (index, self.last_index)
        if self._encoded is None or self._encoded[0] != asked:
            entries = self._entries_from(index)
            self._encoded = (asked, len(entries), encode_entries(entries))
        return self._encoded[1:]

    def _entries_from(self, index: int) -> list[Entry]:
        chosen: list[Entry] = []
        size_bytes = 0
        for entry in self._entries[index - 1 - self._before[0] :]:
            size_bytes += len(entry[2])
            if chosen and size_bytes > APPEND_BYTES_MAX:
                break
            chosen.append(entry)
        return chosen

    def _has_epoch_of(self, index: int) -> bool:
        return index >= self._before[0]

    def _epoch_at(self, index: int) -> int:
        first_index = self._before[0] + 1
        return self._before[1] if index < first_index else self._entries[index - first_index][1]

    def _voting_peers(self) -> list[_Peer | None]:
        """The peer of each voter, None if that broker is not there with that directory."""
        peers: list[_Peer | None] = []
        for voter in self.voters:
            peer = self._peers.get(voter.broker)
            is_voter = (
                peer is not None and peer.has_vote and peer.directory_id == voter.directory_id
            )
            peers.append(peer if is_voter else None)
        return peers

    def _advance(self) -> None:
        held = sorted(
            (0 if peer is None else peer.match_index for peer in self._voting_peers()),
            reverse=True,
        )
        by_majority = held[len(held) // 2]
        # A record of an older epoch is committed only by a later one of this epoch (Raft 5.4.2).
        if by_majority >= self._epoch_index > 0 and by_majority > self.commit_index:
            self.commit_index = min(by_majority, self.last_index)
            self._committed.notify()
            for peer in self._peers.values():
                peer.wake.notify()


def _old_copies(
    records: Sequence[MetadataRecord], answers: Sequence[messages.PrepareResponse]
) -> set[int]:
    """The brokers whose directory is an old copy, compared with their last start in the log: such a
    broker may have lost its promises and accepted records, so it has no vote."""
    newest = {record.broker: record for record in records if isinstance(record, BrokerRegistered)}
    old = set()
    for answer in answers:
        known = newest.get(answer.broker)
        if (
            known is not None
            and known.directory_id == answer.directory_id
            and known.incarnation != answer.incarnation
            and known.start_counter >= answer.start_counter
        ):
            old.add(answer.broker)
    return old


def _cancel_all(tasks: Iterable[asyncio.Future[None]]) -> None:
    for task in tasks:
        task.cancel()
