"""A whole cluster in this process, for tests and notebooks: no Ray, no network but the loopback."""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Unpack

from rayq.client.cluster import Cluster
from rayq.client.environment import system_environment
from rayq.client.loop_thread import LoopThread
from rayq.config import ClusterConfig, parse
from rayq.config.keywords import ClusterKeywords
from rayq.errors import InvalidRequestError, UnknownBrokerError
from rayq.runtime.local_pool import LocalPools
from rayq.runtime.local_runtime import LocalServers
from rayq.wire.authentication import ClientKey, client_key
from rayq.wire.descriptors import raise_limit

POOLS_STOP_TIMEOUT_S = 10.0
"""The maximum time that `stop` lets the consumers of pools finish."""


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
        self._servers_thread = LoopThread("rayq-servers")
        self._servers: LocalServers | None = None
        self._pools = LocalPools(self)
        try:
            self._servers = self._servers_thread.run(_start(self.data_dir, brokers, name, options))
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

    def connection(self, key: ClientKey | None = None, client_id: str = "") -> Cluster:
        """The result of `rayq.connect()` in this process: closing it leaves the servers running."""
        return _Connection(self, self._access.key if key is None else key, client_id)

    def stop(self) -> None:
        """A controlled stop; idempotent. The data stays, unless it was in a temporary directory."""
        try:
            self._pools.stop(POOLS_STOP_TIMEOUT_S)
            self.close()
        finally:
            servers, self._servers = self._servers, None
            if servers is not None:
                try:
                    self._servers_thread.run(servers.stop())
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

            self._servers_thread.run(end())
            self._end_servers()
        self.close()

    # Brokers are numbered from 0. To kill what does not run raises UnknownBrokerError.

    def kill_broker(self, broker: int) -> None:
        """Ends a broker and its replicas without warning, as the loss of its node would."""
        self._have_servers(lambda servers: servers.kill_broker(broker), running=broker)

    def start_broker(self, broker: int) -> None:
        """Starts a broker that was killed, on its directory. Raises InvalidRequestError where it
        runs."""
        self._have_servers(lambda servers: servers.start_broker(broker), killed=broker)

    def kill_controller(self) -> None:
        """Ends the controller without warning; a broker stands in within seconds."""
        self._have_servers(lambda servers: servers.kill_controller())

    def kill_replica(self, topic: str, partition: int, broker: int) -> None:
        """Ends the process of one replica without warning; its broker starts another. Of up to
        eight replicas each has a process of its own, unless `replicas_per_process` says more."""
        self._have_servers(
            lambda servers: servers.kill_replica(broker, f"{topic}-{partition}"), running=broker
        )

    def kill_object_server(self, broker: int) -> None:
        """Ends a broker's object server without warning; the broker starts another."""
        self._have_servers(lambda servers: servers.kill_object_server(broker), running=broker)

    def _have_servers(
        self,
        act: Callable[[LocalServers], object],
        *,
        running: int | None = None,
        killed: int | None = None,
    ) -> None:
        """Has the servers act on their loop, and waits until they have. The broker `running` has to
        run, and `killed` not to."""
        self._access.check_open()
        servers = self._servers
        assert servers is not None

        async def acted() -> None:
            if killed in servers.brokers:
                raise InvalidRequestError(f"Broker {killed} runs. Kill it first.")
            if running is not None and running not in servers.brokers:
                raise UnknownBrokerError(
                    f"There is no broker {running} that runs: those are {sorted(servers.brokers)}."
                )
            done = act(servers)
            if inspect.isawaitable(done):
                await done

        self._servers_thread.run(acted())

    def _end_servers(self) -> None:
        if self in Cluster._running_here:  # else its start failed
            Cluster._running_here.remove(self)

        async def cancel_rest() -> None:
            rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

        self._servers_thread.run(cancel_rest())
        self._servers_thread.stop()
        self._servers_thread.join()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)


class _Connection(Cluster):
    """A way to a LocalCluster of this process that can do all that the LocalCluster can."""

    def __init__(self, local: LocalCluster, key: ClientKey, client_id: str) -> None:
        super().__init__(
            local.addresses,
            key,
            cluster_id=local.cluster_id,
            name=local.name,
            config=local._access.config,
            client_id=client_id,
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
