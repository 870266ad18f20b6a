"""A leader's answers to readers: committed records, their offsets, and open transactions.

See docs/protocol.md, rule 10.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from rayq import messages
from rayq.actors.handlers import answers, answers_peer
from rayq.actors.remote.reads import RemoteReads
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.actors.replica.replica_metrics import LeaderMetrics
from rayq.config import MIB
from rayq.core.partition.state import PartitionState
from rayq.core.remote.urls import url_validity_ms
from rayq.errors import (
    LogTruncatedError,
    NotLeaderError,
    OffsetNotAvailableError,
    OffsetOutOfRangeError,
    RayqError,
    RemoteMissingError,
    UnsupportedVersionError,
)
from rayq.storage.batch import read_header
from rayq.storage.log import Log
from rayq.storage.open_transactions import OpenTransactions
from rayq.wire.answer_room import AnswerRoom
from rayq.wire.peer import Peer
from rayq.wire.throttling import Throttle

CLIENT_FETCH_BYTES_MAX = 16 * MIB


class LeaderReads:
    """See the module. `check()` raises when the process may no longer answer as leader; `remote()`
    reads records in the object store, None for a topic that has and gets none there."""

    def __init__(
        self,
        replica_log: ReplicaLog,
        state: PartitionState,
        metrics: LeaderMetrics,
        *,
        check: Callable[[], None],
        remote: Callable[[], RemoteReads | None],
    ) -> None:
        self._replica_log = replica_log
        self._state = state
        self._metrics = metrics
        self._check = check
        self._remote = remote
        self._clock = replica_log.environment.clock
        self._where = replica_log.where
        self._stable = -1, 0
        """The high watermark at the last look, and the last stable offset then, which moves only
        with the high watermark."""

    async def fetch(
        self, request: messages.Fetch, room: AnswerRoom, throttle: Throttle | None = None
    ) -> tuple[messages.FetchResponse, bytes]:
        """Returns committed batches; none are read before there is room for the answer, and the
        client has not used up its quota. See `messages.Fetch` for the errors."""
        if throttle is None or "consumer_byte_rate" not in throttle.limited_by:
            return await self._fetch(request, room)
        # A fetch that waits for records holds no part of the quota meanwhile.
        is_news = self._has_news(request) or await self._replica_log.committed.wait(
            request.wait_ms / 1000, holds=lambda: self._has_news(request)
        )
        bytes_max = int(throttle.most("consumer_byte_rate", request.bytes_max))
        acquired_bytes = min(bytes_max, CLIENT_FETCH_BYTES_MAX) if is_news else 0
        if is_news:
            await throttle.acquire("consumer_byte_rate", acquired_bytes)
        sent_bytes = 0
        try:
            answer = await self._fetch(
                msgspec.structs.replace(request, bytes_max=bytes_max, wait_ms=0), room
            )
            sent_bytes = len(answer[1])
        finally:
            throttle.use("consumer_byte_rate", sent_bytes - acquired_bytes)
        return answer

    async def _fetch(
        self, request: messages.Fetch, room: AnswerRoom
    ) -> tuple[messages.FetchResponse, bytes]:
        clock = self._clock
        deadline_s = clock.monotonic() + request.wait_ms / 1000
        bytes_max = min(request.bytes_max, CLIENT_FETCH_BYTES_MAX)
        while True:
            if (remote := self._remote_of(request.offset)) is not None:
                return await self._fetch_remote(remote, request, bytes_max, room)
            async with room.take(bytes_max):
                if self._remote_of(request.offset) is not None:
                    continue  # It left this disk while the request waited for room.
                limit = self._fetch_limit(request)
                ends = self._replica_log.high_watermark, self._replica_log.last_stable_offset
                log = self._replica_log.log
                if request.offset < limit:
                    data, next_offset, aborted = await self._replica_log.read_with_aborted(
                        request.offset, limit, bytes_max
                    )
                    self._check()
                    records = next_offset - request.offset
                    self._metrics.sent(data, records, is_at_end=next_offset == limit)
                    return self._read_answer(log, ends, next_offset, aborted), data
            remaining_s = deadline_s - clock.monotonic()
            # The last stable offset moves only when the high watermark does.
            if remaining_s <= 0 or not await self._replica_log.committed.wait(
                remaining_s, holds=lambda: self._has_news(request)
            ):
                return self._read_answer(log, ends, request.offset, []), b""

    def _has_news(self, request: messages.Fetch) -> bool:
        """Returns whether a waiting fetch gets an answer now, records or an error. It is called for
        each of them at each commit."""
        high_watermark = self._state.high_watermark
        try:
            if request.isolation != messages.READ_COMMITTED:
                limit = high_watermark
            else:
                if self._stable[0] != high_watermark:
                    self._stable = high_watermark, self._replica_log.last_stable_offset
                limit = self._stable[1]
            if request.offset >= limit:
                self._check()
        except RayqError:
            return True
        return request.offset < limit

    async def _fetch_remote(
        self, remote: RemoteReads, request: messages.Fetch, bytes_max: int, room: AnswerRoom
    ) -> tuple[messages.FetchResponse, bytes]:
        """Returns batches that are only in the object store. Other requests have the room for
        answers while it sends them."""
        self._fetch_limit(request)
        cached = await remote.bring(request.offset, bytes_max)
        async with room.take(min(cached.span.length, bytes_max)):
            data, next_offset = await remote.read(cached, request.offset, bytes_max)
            self._fetch_limit(request)  # Records that were deleted meanwhile are shown to nobody.
            self._metrics.sent(data, next_offset - request.offset, is_at_end=False)
            ends = self._replica_log.high_watermark, self._replica_log.last_stable_offset
            return self._read_answer(self._replica_log.log, ends, next_offset, cached.aborted), data

    async def read_stable(
        self, offset: int, bytes_max: int
    ) -> tuple[bytes, int, list[tuple[int, int]]]:
        """Returns whole batches from the one at `offset` on, the offset of the next one, and the
        aborted transactions that may have batches among them. All are below the last stable offset.
        Raises as `fetch`."""
        self._check()
        self.check_serving()
        self._check_start(offset)
        if (remote := self._remote_of(offset)) is not None:
            cached = await remote.bring(offset, bytes_max)
            data, next_offset = await remote.read(cached, offset, bytes_max)
            aborted = cached.aborted
        else:
            limit = self._replica_log.last_stable_offset
            data, next_offset, aborted = await self._replica_log.read_with_aborted(
                offset, limit, bytes_max
            )
        self._check()
        self._check_start(offset)
        return data, next_offset, aborted

    def _remote_of(self, offset: int) -> RemoteReads | None:
        """Returns the reader of a record that is no longer on this disk. None: it is not such a
        record. Raises RemoteMissingError."""
        log = self._replica_log.log
        if not log.start_offset <= offset < log.local_start_offset:
            return None
        remote = self._remote()
        if remote is None:
            raise RemoteMissingError(
                f"Offset {offset} of {self._where} is below {log.local_start_offset}, where this "
                "disk begins, and according to this broker's metadata (possibly stale) the topic "
                "has no remote records: set remote_storage to True to find them again."
            )
        return remote

    def _fetch_limit(self, request: messages.Fetch) -> int:
        """Offset below which the request may read now."""
        self._check()
        self.check_serving()
        log = self._replica_log.log
        self._check_start(request.offset)
        if request.last_epoch is not None:
            if request.last_epoch > self._state.leader_epoch:
                # A committed position can be newer than the metadata of the reader that resumed
                # from it.
                raise NotLeaderError(
                    f"This process led {self._where} in epoch {self._state.leader_epoch}, and "
                    f"there are records of epoch {request.last_epoch}: ask for new metadata."
                )
            epoch, end = log.epochs.end_for(request.last_epoch, log.end_offset)
            if epoch != request.last_epoch or end < request.offset:
                raise LogTruncatedError(
                    f"Offset {request.offset} of {self._where} is not in the log of its leader any "
                    f"more (it ends at {log.end_offset}): an unclean election cut it off. Seek to "
                    "continue."
                )
        if request.offset > log.end_offset:
            # No reader comes here by reading: the records that it was given are committed, so a
            # leader that was elected cleanly has them; an unclean election shows in the reader's
            # epoch.
            raise OffsetOutOfRangeError(
                f"Offset {request.offset} of {self._where} is past the end of the log "
                f"{log.end_offset} (its start is {log.start_offset}): nothing was written there "
                "yet."
            )
        return self._limit(request.isolation)

    def _check_start(self, offset: int) -> None:
        log = self._replica_log.log
        if offset < log.start_offset:
            raise OffsetOutOfRangeError(
                f"Offset {offset} of {self._where} is below the log start {log.start_offset} (its "
                f"end is {log.end_offset}): retention or delete_records removed it."
            )

    def _limit(self, isolation: int) -> int:
        """Offset at which a reader finds no more records. Raises UnsupportedVersionError."""
        if isolation == messages.READ_COMMITTED:
            return self._replica_log.last_stable_offset
        if isolation == messages.ISOLATION_NONE and self._transactions.is_used:
            raise UnsupportedVersionError(
                f"{self._where} has records of transactions, and this client does not know of "
                "transactions: it would take aborted records for committed ones. Update it."
            )
        return self._replica_log.high_watermark

    @property
    def _transactions(self) -> OpenTransactions:
        return self._replica_log.log.producers.transactions

    def _read_answer(
        self, log: Log, ends: tuple[int, int], next_offset: int, aborted: list[tuple[int, int]]
    ) -> messages.FetchResponse:
        high_watermark, last_stable_offset = ends
        return messages.FetchResponse(
            high_watermark,
            log.start_offset,
            log.cleaned_offset,
            next_offset,
            last_stable_offset,
            aborted,
        )

    @answers(messages.DescribeOpenTransactions)
    def describe_open_transactions(
        self, request: messages.DescribeOpenTransactions
    ) -> messages.DescribeOpenTransactionsResponse:
        """Describes open transactions, all as of one moment. Raises as `describe_producers`."""
        self.check_serving()
        log, high_watermark = self._replica_log.log, self._replica_log.high_watermark
        since = request.since_offset
        return messages.DescribeOpenTransactionsResponse(
            high_watermark,
            self._replica_log.last_stable_offset,
            [*self._transactions.undecided(high_watermark)],
            [] if since is None else log.ended_between(since, high_watermark),
            self._transactions.is_used,
            self._state.leader_epoch,
        )

    @answers(messages.DescribeProducers)
    def describe_producers(
        self, request: messages.DescribeProducers
    ) -> messages.DescribeProducersResponse:
        """Raises NotLeaderError, FencedEpochError, UnknownEpochError, OffsetNotAvailableError."""
        self.check_serving()
        return messages.DescribeProducersResponse(
            self._replica_log.log.producers.ids_from(
                request.first_producer_id, request.producer_id_count
            )
        )

    def check_serving(self) -> None:
        """Raises OffsetNotAvailableError before the high watermark is known: see rule 10."""
        if not self._state.may_serve:
            raise OffsetNotAvailableError(
                f"The new leader of {self._where} does not know its high watermark yet."
            )

    @answers(messages.ListOffsets)
    async def list_offsets(self, request: messages.ListOffsets) -> messages.ListOffsetsResponse:
        """Raises NotLeaderError, FencedEpochError, UnknownEpochError, OffsetNotAvailableError,
        UnsupportedVersionError."""
        log = self._replica_log.log
        if request.timestamp_ms == messages.EARLIEST:
            return messages.ListOffsetsResponse(log.start_offset, None)
        self.check_serving()
        limit = self._limit(request.isolation)
        if request.timestamp_ms == messages.LATEST:
            return messages.ListOffsetsResponse(limit, None, log.epochs.epoch_of(limit - 1))
        hit, local_start = None, -1
        while local_start < log.local_start_offset:
            # Records that leave the disk between the two lookups would be found by neither.
            local_start = log.local_start_offset
            hit = None
            if (remote := self._remote_of(log.start_offset)) is not None:
                hit = await remote.offset_for_time(request.timestamp_ms)
                self._check()
            if hit is None:
                hit = await self._replica_log.offset_for_time(request.timestamp_ms, limit)
                self._check()
        if hit is None:
            return messages.ListOffsetsResponse(None, None)
        return messages.ListOffsetsResponse(*hit)

    @answers(messages.DescribeOffset)
    async def describe_offset(
        self, request: messages.DescribeOffset
    ) -> messages.DescribeOffsetResponse:
        """See `messages.DescribeOffset`."""
        self.check_serving()
        limit = self._replica_log.last_stable_offset
        offset = max(request.offset, self._replica_log.log.start_offset)
        if offset >= limit:
            return messages.DescribeOffsetResponse(None, None)
        if (remote := self._remote_of(offset)) is not None:
            append_time_ms = await remote.append_time_ms(offset)
        else:
            data, _ = await self._replica_log.read(offset, limit, 1)
            append_time_ms = read_header(data).append_time_ms
        age_ms = max(self._clock.wall_ms() - append_time_ms, 0)
        return messages.DescribeOffsetResponse(append_time_ms, age_ms)

    @answers_peer(messages.DescribeRemote)
    async def describe_remote(
        self, peer: Peer, request: messages.DescribeRemote, _: memoryview
    ) -> messages.DescribeRemoteResponse:
        """See `messages.DescribeRemote`."""
        self.check_serving()
        self._check_start(request.start)
        ranges: list[messages.RemoteRange] = []
        remote = self._remote()
        if remote is not None:
            ranges = await self._ranges(peer, remote, request)
            self._check()
            self._check_start(request.start)
        return messages.DescribeRemoteResponse(ranges, self._replica_log.log.start_offset)

    async def _ranges(
        self, peer: Peer, remote: RemoteReads, request: messages.DescribeRemote
    ) -> list[messages.RemoteRange]:
        """The objects of the request, with URLs if the client gets any. No server sees whether the
        client reads the objects, so all their bytes count as fetched when the URLs are handed out.
        A client whose quota is used up waits for the next ones."""
        throttle = peer.throttle if self._url_validity_ms(peer, request) else None
        bytes_max: float | None = None
        if throttle is not None:
            await throttle.acquire("consumer_byte_rate", 0)
            bytes_max = throttle.most("consumer_byte_rate", math.inf)
        ranges = await remote.ranges(
            request.start, request.end, ranges_max=request.ranges_max, bytes_max=bytes_max
        )
        # All this took time, and the token does not last longer.
        valid_ms = self._url_validity_ms(peer, request)
        if not (valid_ms and ranges):
            return ranges
        ranges = await remote.signed(ranges, valid_ms)
        size = sum(found.object_bytes for found in ranges)
        if throttle is not None:
            throttle.use("consumer_byte_rate", size)
        expires_ms = self._clock.wall_ms() + valid_ms
        peer.audit.urls(peer, self._where, objects=len(ranges), size=size, expires_ms=expires_ms)
        return ranges

    def _url_validity_ms(self, peer: Peer, request: messages.DescribeRemote) -> int:
        return url_validity_ms(
            request.expires_ms,
            direct_reads=self._replica_log.config.remote_direct_reads,
            principal=peer.principal,
            token_expires_ms=peer.token_expires_ms,
            now_ms=self._clock.wall_ms(),
        )

    async def check_range(self, offset: int) -> bool:
        """Returns whether the offset is only in the object store: then the damaged bytes are loaded
        again."""
        remote = self._remote_of(offset)
        if remote is not None:
            await remote.drop_cached(offset)
        return remote is not None
