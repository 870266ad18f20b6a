"""A whole cluster in this process, for tests and notebooks: no Ray, no network but the loopback."""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, Unpack

from rayq.client.background import new_event_loop
from rayq.client.cluster import Cluster
from rayq.client.environment import system_environment
from rayq.config import ClusterConfig, parse
from rayq.config_keywords import ClusterKeywords
from rayq.descriptors import raise_limit
from rayq.runtime.local_pool import LocalPools
from rayq.runtime.local_runtime import LocalServers
from rayq.wire.authentication import client_key

T = TypeVar("T")

POOLS_STOP_TIMEOUT_S = 10.0
"""How long `stop` lets the consumers of pools finish."""


class LocalCluster(Cluster):
    """`brokers` brokers, their replicas and a controller on one event loop of this process.

    The same actors and files as on Ray, ready in well under a second, and the same face as the
    `Cluster` that `rayq.start` returns::

        with LocalCluster(brokers=3) as cluster:
            cluster.create_topic("orders", partitions=2)

    `data_dir`: where the data is kept, and found again by the next LocalCluster; None means a
    temporary directory that `stop` removes. `config` are fields of `rayq.config.ClusterConfig`.
    Leaving the `with` block stops it.

    Until then `rayq.connect()` finds it, also in the handlers of its consumer pools, but not in
    other processes; of several the last one started, or with `rayq.connect(name=...)` that which
    was given this `name`.

    Raises what `rayq.start` raises.
    """

    def __init__(
        self,
        brokers: int | None = None,
        data_dir: str | os.PathLike[str] | None = None,
        *,
        name: str = "local",
        **config: Unpack[ClusterKeywords],
    ) -> None:
        options = parse(ClusterConfig, config)
        self._temporary = tempfile.mkdtemp(prefix="rayq-") if data_dir is None else None
        self.data_dir = os.path.abspath(os.fspath(data_dir or self._temporary or ""))
        self._servers_loop = new_event_loop()
        self._servers_thread = threading.Thread(
            target=self._run_servers, name="rayq-servers", daemon=True
        )
        self._servers_thread.start()
        self._servers: LocalServers | None = None
        self._pools = LocalPools(self)
        try:
            self._servers = self._on_servers(_start(self.data_dir, brokers, name, options))
        except BaseException:
            self._end_servers()
            raise
        super().__init__(
            [f"{host}:{port}" for host, port in self._servers.endpoints],
            key=client_key(self._servers.secret),
            cluster_id=self._servers.cluster_id,
            name=name,
            config=options,
        )
        Cluster._running_here.append(self)
        self.make_current()

    def connection(self) -> Cluster:
        """What `rayq.connect()` answers in this process: closing it leaves the servers running."""
        return _Connection(self)

    def stop(self) -> None:
        """A controlled stop; idempotent. The data stays, unless it was in a temporary directory."""
        try:
            self._pools.stop(POOLS_STOP_TIMEOUT_S)
            self.close()
        finally:
            servers, self._servers = self._servers, None
            if servers is not None:
                try:
                    self._on_servers(servers.stop())
                finally:
                    self._end_servers()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _restart_process(self, broker: int) -> None:
        self._have_servers(lambda servers: servers.restart_broker(broker))

    def _stop_process(self, broker: int) -> None:
        async def stop(servers: LocalServers) -> None:
            await servers.brokers[broker].stop()
            servers.kill_broker(broker)

        self._have_servers(stop)

    def _pool_runtime(self) -> LocalPools:
        return self._pools

    # --- for tests of what happens when servers die ---------------------------------------------

    def abort(self) -> None:
        """Ends all servers without warning, as kill -9 would; the data stays as in `stop`."""
        servers, self._servers = self._servers, None
        if servers is not None:

            async def end() -> None:
                servers.abort()

            self._on_servers(end())
            self._end_servers()
        self.close()

    def kill_broker(self, broker: int) -> None:
        """Ends a broker and its replicas without warning, as the loss of its node would."""
        self._have_servers(lambda servers: servers.kill_broker(broker))

    def start_broker(self, broker: int) -> None:
        """Starts a broker that was killed, on its directory."""
        self._have_servers(lambda servers: servers.start_broker(broker))

    def kill_controller(self) -> None:
        """Ends the controller without warning; a broker stands in within seconds."""
        self._have_servers(lambda servers: servers.kill_controller())

    def kill_replica(self, topic: str, partition: int, broker: int) -> None:
        """Ends the process of one replica without warning; its broker starts another. Of up to
        eight replicas each has a process of its own, unless `replicas_per_process` says more."""
        self._have_servers(lambda servers: servers.kill_replica(broker, f"{topic}-{partition}"))

    def kill_object_server(self, broker: int) -> None:
        """Ends a broker's object server without warning; the broker starts another."""
        self._have_servers(lambda servers: servers.kill_object_server(broker))

    def _have_servers(self, act: Callable[[LocalServers], object]) -> None:
        """Has the servers act on their loop, and waits until they have."""
        self._access.check_open()
        servers = self._servers
        assert servers is not None

        async def acted() -> None:
            done = act(servers)
            if inspect.isawaitable(done):
                await done

        self._on_servers(acted())

    # --- the servers' loop ----------------------------------------------------------------------

    def _run_servers(self) -> None:
        asyncio.set_event_loop(self._servers_loop)
        self._servers_loop.run_forever()

    def _on_servers(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._servers_loop).result()

    def _end_servers(self) -> None:
        if self in Cluster._running_here:  # else its start failed
            Cluster._running_here.remove(self)

        async def cancel_rest() -> None:
            rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

        self._on_servers(cancel_rest())
        self._servers_loop.call_soon_threadsafe(self._servers_loop.stop)
        self._servers_thread.join()
        self._servers_loop.close()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)


class _Connection(Cluster):
    """A way to a LocalCluster of this process that can do all that the LocalCluster can."""

    def __init__(self, local: LocalCluster) -> None:
        super().__init__(
            local.addresses,
            local._access.key,
            cluster_id=local.cluster_id,
            name=local.name,
            config=local._access.config,
        )
        self._local = local

    def stop(self) -> None:
        self.close()
        self._local.stop()

    def _restart_process(self, broker: int) -> None:
        self._local._restart_process(broker)

    def _stop_process(self, broker: int) -> None:
        self._local._stop_process(broker)

    def _pool_runtime(self) -> LocalPools:
        return self._local._pool_runtime()


async def _start(
    root: str, brokers: int | None, name: str, config: ClusterConfig
) -> LocalServers:
    raise_limit()
    servers = LocalServers(
        lambda _: system_environment(config), config, root=root, brokers=brokers, name=name
    )
    await servers.start()
    return servers
