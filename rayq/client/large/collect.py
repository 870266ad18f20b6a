"""Removal of large values in an object store that no record of the cluster stands for.

An object is written before its record, and stays when its record goes: by retention or compaction,
with its topic, or because its producer died in between. Leftover objects are found by reading the
logs. The objects are listed first. Young ones are left alone: their records may be on the way. Then
every log is read, from its start to its end; and then again, from there on, because a record may
have been copied, as a dead letter, from a log that was not read yet to one that was. Values of
deleted topics that `rayq topic restore` may bring back are left alone, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from rayq.client.client import Client
from rayq.client.large.objects import (
    StoredObject,
    delete_objects,
    list_objects,
    prefix_of,
)
from rayq.client.leader_requests import fetch_now, known_end, list_offset
from rayq.client.metadata import LeaderAndEpoch
from rayq.config import MIB, check_values_url
from rayq.core.cluster.topic_changes import OWN_TOPICS
from rayq.core.large.values import read_manifest
from rayq.errors import (
    AuthorizationError,
    InvalidRequestError,
    LargeValueError,
    LargeValueRefusedError,
    OffsetNotAvailableError,
    OffsetOutOfRangeError,
    UnknownTopicError,
)
from rayq.messages import (
    EARLIEST,
    READ_UNCOMMITTED,
    DescribeObjectStore,
    DescribeObjectStoreResponse,
    Request,
    ResponseT,
)
from rayq.records import TopicPartition
from rayq.storage.batch import BatchHeader, decode_columns, split_batches

logger = logging.getLogger(__name__)

AGE_S_MIN = 3600
"""Minimum age of an object that may be removed: its producer has given up long before."""
SCAN_BYTES = 4 * MIB
DELETE_AT_ONCE = 100
TIMEOUT_S = 60.0
"""Maximum time a leader may be away."""

OnRead = Callable[[str, int, int], None]
"""`on_read(partition, offset, end)` reports the progress of the reading."""


class CollectedValues(NamedTuple):
    """The result of a sweep. `removed` are objects that no record stood for; in a dry run, those
    that it would have removed. `young` ones were not looked at."""

    removed: list[StoredObject]
    kept: int
    young: int


async def collect_values(
    client: Client,
    url: str,
    *,
    older_than_s: float = 86_400.0,
    dry_run: bool = False,
    on_read: OnRead = lambda _partition, _offset, _end: None,
) -> CollectedValues:
    """Sweeps the objects below a producer's `large_values`, of this cluster and of no other.

    Nothing is removed unless all logs could be read, to their ends. Records keep their objects as
    long as they are in a log, including those of open and of aborted transactions. Raises
    ConfigError (`url` is not a URL, or holds credentials), InvalidRequestError (an age below an
    hour), AuthorizationError (there are topics that this client may not read), CorruptBatchError,
    PartitionOfflineError, TimeoutError, RemoteStorageError, MissingExtraError.
    """
    check_values_url(url)
    if older_than_s < AGE_S_MIN:
        raise InvalidRequestError(
            f"Objects younger than {AGE_S_MIN} s may belong to records that are on their way: "
            f"older_than_s must be at least that, not {older_than_s:g}."
        )
    threads = client.environment.threads
    await client.fetch_all(timeout_s=TIMEOUT_S)
    cluster_id = client.metadata.cluster_id
    assert cluster_id is not None, "with metadata it is known"
    prefix = prefix_of(url, cluster_id)
    found = await threads.run(lambda: list(list_objects(prefix)))
    before_s = client.environment.clock.wall_ms() / 1000 - older_than_s
    old = [stored for stored in found if stored.time_s < before_s]
    references = _References(client, on_read)
    if old:
        await references.read_all()
        await references.read_all()
        await references.note_deleted()
    unused = [stored for stored in old if not references.has(stored)]
    if not dry_run:
        for start in range(0, len(unused), DELETE_AT_ONCE):
            uris = [stored.uri for stored in unused[start : start + DELETE_AT_ONCE]]
            await threads.run(delete_objects, uris)
    return CollectedValues(unused, len(old) - len(unused), len(found) - len(old))


class _References:
    """The values in object stores that records of the cluster stand for."""

    def __init__(self, client: Client, on_read: OnRead) -> None:
        self.value_ids: set[str] = set()
        """The ids in hex. Ids are used instead of URIs, because a store may be known by several
        URLs."""
        self._client = client
        self._on_read = on_read
        self._read_to: dict[tuple[str, int], int] = {}
        """The offset read up to, by topic id and partition."""
        self._deleted: set[str] = set()
        """Deleted topics whose records may come back from the object store."""

    def has(self, stored: StoredObject) -> bool:
        """Returns whether a record stands for a value, or may again."""
        return stored.value_id in self.value_ids or (
            bool(stored.value_id) and stored.topic in self._deleted
        )

    async def note_deleted(self) -> None:
        """Notes topics that `rayq topic restore` may bring back, now or since the last call. Raises
        AuthorizationError if there are topics that this client does not see."""
        metadata = self._client.metadata
        answer: DescribeObjectStoreResponse = await self._client.ask_any(
            DescribeObjectStore(),
            timeout_s=TIMEOUT_S,
            accept=lambda answer: answer.version >= metadata.oldest_acceptable,
        )
        if answer.hides_topics:
            raise AuthorizationError(
                "There are topics that this principal may not describe, and their records may "
                "stand for objects here. Nothing was removed. Sweep as the superuser, or as a "
                "principal that may read all topics."
            )
        self._deleted |= {garbage.name for garbage in answer.garbage}

    async def read_all(self) -> None:
        """Reads all logs from the end of the last reading. Raises if one cannot be read."""
        await self.note_deleted()
        answer = await self._client.fetch_all(timeout_s=TIMEOUT_S)
        for topic in answer.topics:
            if topic.name in OWN_TOPICS:
                continue  # They have no values, and clients do not read them.
            for partition in topic.partitions:
                place = TopicPartition(topic.name, partition.partition)
                try:
                    await self._read(place, topic.topic_id)
                except UnknownTopicError as error:
                    logger.info("%s is gone, and with it its records: %s", topic.name, error)

    async def _read(self, place: TopicPartition, topic_id: str) -> None:
        key = topic_id, place.partition
        while True:
            offset = self._read_to.get(key)
            if offset is None:
                offset = await self._log_start(place, topic_id)
            try:
                self._read_to[key] = await self._read_from(place, topic_id, offset)
                return
            except OffsetOutOfRangeError as error:
                # Retention was faster.
                self._read_to[key] = start = await self._log_start(place, topic_id)
                if start <= offset:
                    raise OffsetNotAvailableError(
                        f"{place.topic}-{place.partition}: its leader says that its log begins at "
                        f"{start}, and has nothing at offset {offset}: {error} Nothing was "
                        "removed: try again."
                    ) from error

    async def _read_from(self, place: TopicPartition, topic_id: str, offset: int) -> int:
        """Reads up to the end, and returns it."""
        end: int | None = None
        while end is None or offset < end:
            fetch = fetch_now(place.partition, offset, SCAN_BYTES, READ_UNCOMMITTED)
            answer, payload = await self._ask(place, topic_id, fetch)
            if end is None:
                end = answer.high_watermark
            for at, header in split_batches(payload):
                if header.is_large:
                    self._note(place, payload, at, header)
            if answer.next_offset <= offset < end:
                raise OffsetNotAvailableError(
                    f"{place.topic}-{place.partition}: its leader gives nothing from offset "
                    f"{offset} on, and the log extends to {end}. Nothing was removed: try again."
                )
            offset = answer.next_offset
            self._on_read(f"{place.topic}-{place.partition}", offset, end)
        return offset

    def _note(
        self, place: TopicPartition, payload: memoryview, at: int, header: BatchHeader
    ) -> None:
        for value in decode_columns(payload, at, header).values:
            try:
                found = read_manifest(value)
            except LargeValueError as error:
                logger.info("offset %d: %s", header.base_offset, error)
            except LargeValueRefusedError as error:
                raise error.with_message(
                    f"Offset {header.base_offset} of {place.topic}-{place.partition} may stand for "
                    f"any object: {error} Nothing was removed."
                ) from error
            else:
                self.value_ids.add(found.value_id.hex())

    async def _log_start(self, place: TopicPartition, topic_id: str) -> int:
        answer, _ = await self._ask(
            place, topic_id, list_offset(place.partition, EARLIEST, READ_UNCOMMITTED)
        )
        return known_end(answer, f"{place.topic}-{place.partition}")

    async def _ask(
        self,
        place: TopicPartition,
        topic_id: str,
        build: Callable[[str, LeaderAndEpoch], Request[ResponseT]],
    ) -> tuple[ResponseT, memoryview]:
        def build_checked(found_id: str, leader: LeaderAndEpoch) -> Request[ResponseT]:
            if found_id != topic_id:
                raise UnknownTopicError(f"{place.topic} is another topic now.")
            return build(found_id, leader)

        return await self._client.exchange_with_leader(
            *place, build_checked, timeout_s=TIMEOUT_S, attempt_timeout_s=TIMEOUT_S
        )
