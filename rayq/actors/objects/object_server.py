"""The object server: the broker's only process with the object store's client and secrets.

It sends heartbeats to its broker, and exits when the broker rejects it or is silent for too long.
It has no state but its cache, so a new one can replace it after a crash. From time to time it
writes, reads and deletes a probe object, and reports to the broker if that fails, and why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import ClassVar

from rayq import messages
from rayq.actors.access import Access
from rayq.actors.handlers import HandlerTable, answers, answers_peer
from rayq.actors.hosting import ObjectServerSpec
from rayq.actors.listening_clock import ListeningClock
from rayq.actors.objects.folder_claims import FolderClaims
from rayq.actors.objects.object_cache import ObjectCache
from rayq.actors.objects.record_uploads import RecordUploads
from rayq.actors.objects.store_client import StoreClient
from rayq.actors.signal import Signal
from rayq.backoff import Backoff
from rayq.config import ClusterConfig
from rayq.environment import Environment, ObjectStore
from rayq.errors import (
    InvalidRequestError,
    ProtocolError,
    RayqError,
    RemoteDamagedError,
    RemoteStorageError,
    StaleBrokerError,
)
from rayq.messages.remote_names import is_listed, is_probe, parse_name, probe_name, probes_prefix
from rayq.storage import checked_file
from rayq.storage.data_directory import DataDirectory, read_meta, read_secret
from rayq.wire.authentication import Identity
from rayq.wire.connection import Connection
from rayq.wire.handler import Result
from rayq.wire.peer import Peer
from rayq.wire.pool import ConnectionPool
from rayq.wire.server import Server

logger = logging.getLogger(__name__)

RETRY_S = 0.05
ORPHAN_S = 30.0
"""Time without its broker after which an object server exits: the next broker process starts
another."""
PROBE_S = 60.0
"""Interval of the probes while the object store works."""
PROBE_AGAIN_S, PROBE_AGAIN_S_MAX = 1.0, 60.0
"""Initial and maximum interval of the probes while it does not."""
OLD_PROBE_MS = 3_600_000
STARTING = "the object server has not reached the object store yet"


class ObjectServer:
    """See the module. `run` serves until the broker rejects it or is gone."""

    handlers: ClassVar[HandlerTable]

    def __init__(
        self,
        environment: Environment,
        config: ClusterConfig,
        spec: ObjectServerSpec,
        store: ObjectStore,
        *,
        host: str,
        pid_start_time: int,
    ) -> None:
        self._environment = environment
        self._config = config
        self._spec = spec
        self._host = host
        self._pid_start_time = pid_start_time
        environment.metrics.label(cluster=spec.cluster_name, broker=spec.broker)
        meta = read_meta(environment.disk, spec.data_path)
        assert meta is not None, spec.data_path
        secret = read_secret(environment.disk, spec.data_path)
        identity = Identity(
            role="server", key=secret, cluster_id=meta.cluster_id, broker=spec.broker
        )
        self._cluster_id = meta.cluster_id
        self._listening = ListeningClock(
            environment.clock, config.heartbeat_interval_ms / 1000 / 2, environment.metrics
        )
        self._pool = ConnectionPool(
            environment, identity, config, keeps_alive=True, unheard_s=self._listening.unheard_s
        )
        self._access = Access(environment.clock)
        self._server = Server(environment, identity, self._handle, config, self._access)
        self._probe_due = Signal()
        """Notified when a request failed."""
        self._client = StoreClient(environment, config, store, self._probe_due.notify)
        self._claims = FolderClaims(environment.clock, self._client, meta.cluster_id)
        self._uploads = RecordUploads(environment, self._client, self._claims, spec.data_path)
        self._cache = ObjectCache(
            environment,
            self._client,
            data_path=spec.data_path,
            incarnation=spec.incarnation,
            bytes_max=config.remote_cache_bytes,
        )
        self._trouble: str | None = STARTING

    async def run(self) -> None:
        """Serves. Raises OSError if the cache's directory or the listening socket cannot be
        made."""
        await self._cache.start()
        await self._server.start(self._host, 0)
        spawn = self._environment.tasks.spawn
        looks = spawn(self._listening.run(), "listening-clock")
        probes = spawn(self._probe_forever(), "object store probes")
        try:
            await self._attach_forever()
        finally:
            looks.cancel()
            probes.cancel()
            self.abort()

    def abort(self) -> None:
        """Drops everything at once, as the end of the process would."""
        self._server.close()
        self._pool.close()

    # --- the broker -------------------------------------------------------------------------------

    async def _attach_forever(self) -> None:
        interval_s = self._config.heartbeat_interval_ms / 1000
        heard_s = self._listening.now_s()
        connection: Connection | None = None
        while True:
            try:
                if connection is None or connection.closed:
                    connection = await self._connect()
                asked_s = self._environment.clock.monotonic()
                answer, _ = await connection.request(
                    messages.AttachObjectServer(
                        incarnation=self._spec.incarnation,
                        pid=self._environment.pid,
                        pid_start_time=self._pid_start_time,
                        host=self._server.host,
                        port=self._server.port,
                        trouble=self._trouble,
                        access_digest=self._access.digest,
                    ),
                    timeout_s=self._config.session_timeout_ms / 1000,
                )
            except StaleBrokerError as error:
                logger.info("the object server ends: %s", error)
                return
            except RayqError as error:
                logger.debug("object server of broker %d: %s", self._spec.broker, error)
                if self._listening.now_s() - heard_s > ORPHAN_S:
                    logger.warning("the object server ends, without its broker: %s", error)
                    return
                await asyncio.sleep(RETRY_S)
                continue
            heard_s = self._listening.now_s()
            if self._access.take(answer.access, asked_s):
                self._server.end_revoked()
            await self._cache.make_room()
            await asyncio.sleep(interval_s)

    async def _connect(self) -> Connection:
        endpoint = DataDirectory.read_endpoint(self._environment.disk, self._spec.data_path)
        if endpoint is None:
            raise RemoteStorageError(f"Broker {self._spec.broker} has not said where it listens.")
        return await self._pool.get(*endpoint)

    # --- probes -----------------------------------------------------------------------------------

    async def _probe_forever(self) -> None:
        backoff = Backoff(self._environment, PROBE_AGAIN_S, PROBE_AGAIN_S_MAX)
        while True:
            try:
                await self._probe()
            except RayqError as error:
                self._set_trouble(str(error))
                await asyncio.sleep(backoff.next_s())
            else:
                if self._trouble is not None:
                    await self._remove_old_probes()
                self._set_trouble(None)
                backoff.reset()
                await self._probe_due.wait(PROBE_S)

    async def _probe(self) -> None:
        """Writes, reads, lists and deletes an object, to check that all needed operations are
        allowed and work."""
        probe_id = self._environment.new_id()
        name = probe_name(self._cluster_id, self._spec.broker, probe_id)
        content = name.encode()
        await self._client.put_small(name, content)
        if await self._client.get(name) != content:
            raise RemoteDamagedError(f"{name} was read with other bytes than were written.")
        try:
            # It may not be listed yet; a store that begins each list at its beginning is noticed.
            await self._client.list(probes_prefix(self._cluster_id, self._spec.broker), name)
        finally:
            await self._client.delete([name])

    async def _remove_old_probes(self) -> None:
        """Removes the probes that a crash has left."""
        try:
            probes = await self._client.list(probes_prefix(self._cluster_id, self._spec.broker), "")
            newest_ms = max((probe.modified_ms for probe in probes), default=0)
            old = [
                probe.name
                for probe in probes
                if probe.modified_ms < newest_ms - OLD_PROBE_MS and is_probe(probe.name)
            ]
            await self._client.delete(old)
        except RayqError as error:
            logger.info("old probes stay in the object store: %s", error)

    def _set_trouble(self, trouble: str | None) -> None:
        if trouble is None and self._trouble not in (None, STARTING):
            logger.warning("the object store of broker %d works again", self._spec.broker)
        elif trouble is not None and self._trouble in (None, STARTING):
            logger.warning("the object store of broker %d: %s", self._spec.broker, trouble)
        self._trouble = trouble

    # --- requests ---------------------------------------------------------------------------------

    def _handle(
        self, peer: Peer, request: messages.AnyRequest, payload: memoryview
    ) -> Result | Awaitable[Result]:
        if type(request) not in self.handlers:
            raise ProtocolError(f"An object server does not answer {type(request).__name__}.")
        return self.handlers.answer(self, peer, request, payload)

    @answers(messages.DescribeMetrics)
    def _describe_metrics(self, _: messages.DescribeMetrics) -> messages.DescribeMetricsResponse:
        return messages.DescribeMetricsResponse(self._environment.metrics.collect())

    @answers(messages.DropCached)
    def _drop_cached(self, request: messages.DropCached) -> messages.Done:
        self._cache.drop(request.name)
        return messages.Done()

    @answers_peer(messages.PutBlob)
    def _answer_put_blob(
        self, _: Peer, request: messages.PutBlob, payload: memoryview
    ) -> Awaitable[Result]:
        return self._put_blob(request.name, bytes(payload))

    async def _put_blob(self, name: str, content: bytes) -> Result:
        if not _is_intact(name, content):
            raise InvalidRequestError(f"{name} does not match its CRC, and was not stored.")
        await self._claims.check_blob(name)
        await self._client.put_small(name, content)
        return messages.Done()

    @answers(messages.GetBlob)
    async def _get_blob(self, request: messages.GetBlob) -> Result:
        async def check(content: bytes) -> None:
            if not _is_intact(request.name, content):
                raise RemoteDamagedError(f"{request.name} does not match its CRC.")

        return messages.Done(), await self._client.get_checked(request.name, check)

    @answers(messages.ListObjects)
    async def _list(self, request: messages.ListObjects) -> Result:
        if not is_listed(request.prefix):
            raise InvalidRequestError(f"{request.prefix!r} is not a folder of rayq's.")
        listed = await self._client.list(request.prefix, request.after)
        return messages.ListObjectsResponse(
            objects=[(meta.name, meta.size_bytes, meta.modified_ms) for meta in listed],
            next_after=listed[-1].name if listed else None,
        )

    @answers(messages.HeadObjects)
    async def _head(self, request: messages.HeadObjects) -> Result:
        metas = await asyncio.gather(*(self._client.head(name) for name in request.names))
        return messages.HeadObjectsResponse(
            [None if meta is None else (meta.size_bytes, meta.modified_ms) for meta in metas]
        )

    @answers(messages.DeleteObjects)
    async def _delete(self, request: messages.DeleteObjects) -> Result:
        await self._claims.check(request.names)
        for name in request.names:
            self._cache.drop(name)
        await self._client.delete(request.names)
        return messages.Done()

    @answers(messages.SignObjects)
    async def _sign(self, request: messages.SignObjects) -> Result:
        expires_s = request.expires_ms / 1000
        return messages.SignObjectsResponse(
            [await self._client.sign(name, expires_s) for name in request.names]
        )


def _is_intact(name: str, content: bytes) -> bool:
    """Returns whether a manifest or a page is intact; other blobs have no CRC of rayq's."""
    return parse_name(name) is None or checked_file.is_intact(content)


ObjectServer.handlers = HandlerTable(
    "object server", ObjectServer, _cache=ObjectCache, _uploads=RecordUploads
)
