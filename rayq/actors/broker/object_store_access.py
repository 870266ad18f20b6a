"""A broker's access to the object store: it keeps the node's object server running, and sends it
the broker's own requests."""

from __future__ import annotations

from collections.abc import Callable

from rayq import messages
from rayq.actors.broker.object_server_process import ObjectServerProcess
from rayq.actors.broker.remote_garbage import RemoteGarbageSweep
from rayq.actors.broker.store_ownership import StoreOwnership
from rayq.actors.hosting import Runtime
from rayq.actors.listening_clock import ListeningClock
from rayq.actors.metadata.metadata_keeper import MetadataKeeper
from rayq.actors.remote.object_link import ObjectLink
from rayq.config import ClusterConfig
from rayq.environment import Address, Environment
from rayq.storage.data_directory import DataDirectory
from rayq.wire.pool import ConnectionPool


class ObjectStoreAccess:
    """See the module. Exists only if the cluster has a `remote_storage_url`. `ask_controller` sends
    a request to the controller; it raises RayqError. `is_current()` says whether the metadata here
    are known to be current."""

    def __init__(
        self,
        environment: Environment,
        config: ClusterConfig,
        runtime: Runtime,
        directory: DataDirectory,
        metadata: MetadataKeeper,
        pool: ConnectionPool,
        *,
        cluster_name: str,
        listening: ListeningClock,
        ask_controller: messages.Ask,
        is_current: Callable[[], bool],
    ) -> None:
        meta = directory.meta
        self._environment = environment
        self._link = ObjectLink(pool, meta.cluster_id)
        self._server = ObjectServerProcess(
            environment,
            config,
            runtime,
            cluster_name=cluster_name,
            broker=meta.broker,
            data_path=directory.path,
            listening=listening,
        )
        self._ownership = StoreOwnership(
            environment, metadata, self._link, is_current=is_current
        )
        self._garbage = RemoteGarbageSweep(
            environment,
            config,
            metadata,
            self._link,
            self._ownership,
            broker=meta.broker,
            ask_controller=ask_controller,
        )

    def start(self) -> None:
        spawn = self._environment.tasks.spawn
        spawn(self._server.run(), "object-server-process")
        spawn(self._ownership.run(), "store-ownership")
        spawn(self._garbage.run(), "remote-garbage")

    def attach(self, request: messages.AttachObjectServer) -> None:
        """See `ObjectServerProcess.attach`."""
        self._server.attach(request)
        self._link.update(self._server.endpoint)

    def stop(self) -> None:
        """Ends the object server."""
        self._server.stop()

    @property
    def endpoint(self) -> Address | None:
        """Address of the object server; None while there is none."""
        return self._server.endpoint

    @property
    def trouble(self) -> str | None:
        """The reason that this node cannot use the object store. None: it can."""
        return self._server.trouble

    @property
    def halt(self) -> str | None:
        """The reason that leaders may neither store nor delete objects. None: they may."""
        return self._ownership.halt
