"""`Cluster`, the object that users hold: which cluster it is, its consumer pools, its metrics, its
operation and its end. It can be pickled."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self, Unpack

from rayq.client.admin.metrics import collect_metrics
from rayq.client.admin.queues import queue_name
from rayq.client.admin.restart import check_may_stop, restart_broker
from rayq.client.arguments import topic_name, whole_number
from rayq.client.background import background_loop
from rayq.client.cluster_access import ClusterAccess
from rayq.client.cluster_methods import ClusterMethods
from rayq.client.consumer_pool import ConsumerPool, Handler, PoolControl, PoolSpec, check_handler
from rayq.client.group_positions import check_group
from rayq.client.queues.arguments import PREFETCH, PREFETCH_MAX, whole_between
from rayq.client.timeouts import takes_timeout
from rayq.client.user_objects import closing_after
from rayq.config import (
    ClusterConfig,
    PoolConfig,
    QueueConfig,
    check_values_url,
    parse,
    parse_stored,
)
from rayq.config.keywords import PoolKeywords
from rayq.environment import Address
from rayq.errors import ConfigError, InvalidRequestError, NoClusterError, RayqError
from rayq.metrics import Sample
from rayq.wire.authentication import ClientKey, text_of

RESTART_TIMEOUT_S = 300.0
METRICS_TIMEOUT_S = 10.0
QUEUE_POOL_MAX = 16
"""Default of `queue_pool(max_consumers=...)`."""
POOL_CHECK_TIMEOUT_S = 30.0
"""Timeout for looking up a pool's topics before it starts."""


class PoolRuntime(Protocol):
    """The runtime that pools run on."""

    def start_pool(self, cluster: Cluster, spec: PoolSpec, handler: Handler) -> PoolControl:
        """Starts a pool. Raises PoolExistsError, HandlerError."""
        ...

    def pools(self, cluster: Cluster) -> dict[str, PoolControl]:
        """The running pools, by name."""
        ...


class Lifecycle(PoolRuntime, Protocol):
    """The lifecycle of a cluster's processes: a runtime gives it to a `Cluster`, so that any
    process can stop the cluster and start what runs beside it. It can be pickled."""

    def stop(self) -> None:
        """Stops the cluster's actors; the data is kept."""
        ...

    def restart_broker(self, broker: int) -> None:
        """Stops a broker in a controlled way and starts it again; returns when it has a session."""
        ...

    def restart_controller(self) -> None:
        """Restarts the controller's process."""
        ...

    def stop_broker(self, broker: int) -> None:
        """Stops a broker in a controlled way; it is not started again."""
        ...

    def replace_disk(self, broker: int, node: str | None, host: str | None) -> None:
        """Starts a broker on an empty directory on `node`. None means the broker's own node, whose
        address was `host`."""
        ...


class Cluster(ClusterMethods):
    """A handle on one cluster. Cheap to make: it connects at first use.

    Pickle it to use the cluster in other processes, such as Ray tasks: the unpickled object
    connects by itself. All `Cluster` objects of one process for the same cluster share one
    event-loop thread and its connections. `close` (or the end of a `with` block) closes what this
    object made; `stop` stops the cluster itself.
    """

    _current: ClassVar[Cluster | None] = None
    _running_here: ClassVar[list[Cluster]] = []
    """The clusters whose servers are in this process, the last started last."""
    _find_other: ClassVar[Callable[[], Cluster] | None] = None

    def __init__(
        self,
        addresses: str | Iterable[str | Address],
        key: ClientKey,
        *,
        cluster_id: str | None = None,
        name: str = "default",
        lifecycle: Lifecycle | None = None,
        config: ClusterConfig | None = None,
        client_id: str = "",
    ) -> None:
        """`addresses` are the `host:port` (port 9392 by default), or pairs, of some brokers. `key`
        is the client key, or a principal's token (`rayq.wire.authentication`). `cluster_id` is the
        id that the cluster must have; None accepts any. Only the TLS files and limits of `config`
        are used. `client_id` names this program to the servers."""
        access = ClusterAccess(addresses, key, cluster_id, config or ClusterConfig(), client_id)
        super().__init__(access)
        self.name = name
        self._lifecycle = lifecycle

    # --- the process's current one --------------------------------------------------------------

    @classmethod
    def current(cls) -> Cluster:
        """The last cluster of this process that was started or connected to, and is not closed;
        else the last one whose servers are in this process; else the one that `rayq.connect()`
        finds. Raises NoClusterError."""
        found = cls._current or cls.running_here()
        if found is None and cls._find_other is not None:
            found = cls._find_other()
        if found is None:
            raise NoClusterError(
                "This process has no cluster yet: call rayq.start(path) or rayq.connect() first, "
                "or pass a cluster."
            )
        return found

    @classmethod
    def running_here(cls, name: str | None = None) -> Cluster | None:
        """The last cluster, of that `name` if given, that was started with its servers in this
        process and is still running: a `rayq.testing.LocalCluster`."""
        running = reversed(cls._running_here)
        return next((cluster for cluster in running if name in (None, cluster.name)), None)

    @classmethod
    def find_others_by(cls, find: Callable[[], Cluster]) -> None:
        """Sets the function that `current` calls when the process has no cluster yet:
        `rayq.connect`, which knows Ray and cannot be imported here. Raises NoClusterError."""
        Cluster._find_other = find

    @property
    def lifecycle(self) -> Lifecycle | None:
        """The object that starts and stops the servers; None for a cluster connected to from
        outside."""
        return self._lifecycle

    def make_current(self) -> Self:
        """Makes this the cluster that `Cluster.current()` returns."""
        Cluster._current = self
        return self

    # --- which cluster it is --------------------------------------------------------------------

    @property
    def addresses(self) -> list[str]:
        """The address of every known broker, as `host:port`."""
        return self._access.addresses

    @property
    def cluster_id(self) -> str | None:
        """The cluster's id. None before the first connection, unless it was given."""
        return self._access.cluster_id

    @property
    def token(self) -> str:
        """The token that a client outside Ray needs besides an address: `rayq.connect(address,
        token=...)`. Treat it as a password."""
        return text_of(self._access.key)

    def add_addresses(self, addresses: str | Iterable[str | Address]) -> None:
        """Adds addresses of brokers, which may have moved since this object was made. Raises
        ConfigError."""
        self._access.add_addresses(addresses)

    def connection(self, key: ClientKey | None = None, client_id: str = "") -> Cluster:
        """Another object for the same cluster, which is closed separately: with this client's key
        and client id, or others."""
        access = self._access
        return _unpickled(
            self.addresses,
            access.key if key is None else key,
            self.cluster_id,
            self.name,
            self._lifecycle,
            access.config,
            client_id or access.client_id,
        )

    def __repr__(self) -> str:
        state = "closed" if self._access.is_closed else "open"
        return f"<{type(self).__name__} {self.name!r} at {', '.join(self.addresses)}, {state}>"

    def __reduce__(self) -> tuple[Any, ...]:
        access = self._access
        arguments = (self.addresses, access.key, self.cluster_id, self.name)
        return _unpickled, (*arguments, self._lifecycle, access.config, access.client_id)

    # --- consumer pools -------------------------------------------------------------------------

    def consumer_pool(
        self,
        topic: str,
        group: str,
        handler: Handler,
        *,
        name: str | None = None,
        **config: Unpack[PoolKeywords],
    ) -> ConsumerPool:
        """Runs `handler` on every record of `topic`, with as many consumers as it takes.

        The consumers are members of `group`. They are started and stopped by the age of the oldest
        waiting record, down to none. `handler` is called with a batch, in order within each
        partition. A batch counts as handled when the handler returns; it is delivered again if a
        consumer dies before that was committed (at-least-once). With `exactly_once` the handler
        returns what to send (`Outgoing`, an iterable of them, or None), which takes effect once,
        together with that commit. A plain function runs in a thread; a coroutine function runs on
        the consumer's event loop, which it must not block; of a class, each consumer makes an
        instance and calls it. Keywords as in `rayq.config.PoolConfig`, such as `min_consumers`,
        `max_consumers`, `target_lag_s`, `resources`, `batch`, `max_records`, `retries`,
        `dead_letter_topic`, `exactly_once`.

        On Ray the pool is a detached actor that Ray restarts: it outlives this process, until the
        pool or the cluster is stopped. `consumer_pools()` lists it under `name` (the group's by
        default).

        Raises ConfigError, HandlerError, UnknownTopicError (also for the dead letters' topic),
        PoolExistsError, InvalidRequestError (no Ray: the cluster was connected to by its address).
        """
        checked = parse(PoolConfig, config)
        spec = PoolSpec(
            name=check_group(group if name is None else name),
            topic=topic_name(topic),
            group=check_group(group),
            config=checked,
        )
        check_handler(handler)
        runtime = self._pool_runtime()
        client, background = self.shared_client()
        for required in (topic, checked.dead_letter_topic):
            if required is not None:
                background.run(client.topic(required, timeout_s=POOL_CHECK_TIMEOUT_S))
        if checked.dead_letter_topic == topic:
            raise ConfigError(
                f"dead_letter_topic cannot be {topic!r} itself: what fails would come again "
                "forever."
            )
        return ConsumerPool(spec.name, runtime.start_pool(self, spec, handler))

    def queue_pool(
        self,
        queue: str,
        handler: Handler,
        *,
        name: str | None = None,
        min_consumers: int = 0,
        max_consumers: int = QUEUE_POOL_MAX,
        target_lag_s: float = 10.0,
        cool_down_s: float = 30.0,
        resources: dict[str, float | int] | None = None,
        drain_timeout_s: float = 60.0,
        large_values: str | None = None,
        prefetch: int = PREFETCH,
    ) -> ConsumerPool:
        """Runs `handler(task)` on every record of a queue, with as many consumers as it takes.

        The consumers are started and stopped by the number of waiting records and the age of the
        oldest, down to none; there may be more consumers than partitions. A record is acknowledged
        when the handler returns. It is given back when the handler raises, and goes to the dead
        letters with its error after the queue's `max_deliveries`. Handlers, keywords (as in
        `rayq.config.PoolConfig`) and the runtime are those of `consumer_pool`; `name` is the
        queue's by default, `large_values` and `prefetch` are as in `queue`. A handler that takes
        longer than the queue's `max_handling_s` is killed with its consumer.

        Raises ConfigError, HandlerError, UnknownQueueError, PoolExistsError, InvalidRequestError
        (no Ray: the cluster was connected to by its address)."""
        pool_name = check_group(queue_name(queue) if name is None else name)
        whole_between("prefetch", prefetch, 0, PREFETCH_MAX)
        check_handler(handler)
        check_values_url(large_values)
        runtime = self._pool_runtime()
        found = self.admin.describe_queue(queue, timeout_s=POOL_CHECK_TIMEOUT_S)
        config = parse(
            PoolConfig,
            {
                "min_consumers": min_consumers,
                "max_consumers": max_consumers,
                "target_lag_s": target_lag_s,
                "cool_down_s": cool_down_s,
                "resources": resources,
                "drain_timeout_s": drain_timeout_s,
                "max_poll_interval_ms": round(
                    parse_stored(QueueConfig, found.config).max_handling_s * 1000
                ),
            },
        )
        spec = PoolSpec(pool_name, found.topic, queue, config, queue, large_values, prefetch)
        return ConsumerPool(spec.name, runtime.start_pool(self, spec, handler))

    def consumer_pools(self) -> dict[str, ConsumerPool]:
        """The running consumer pools of this cluster, by name."""
        found = self._pool_runtime().pools(self)
        return {name: ConsumerPool(name, control) for name, control in sorted(found.items())}

    def _pool_runtime(self) -> PoolRuntime:
        if self._lifecycle is None:
            raise InvalidRequestError(
                "This cluster was connected to by its address, and consumer pools run on Ray: use "
                "rayq.connect() in a process of the cluster's Ray."
            )
        return self._lifecycle

    # --- what it measures -----------------------------------------------------------------------

    @takes_timeout
    def metrics(self, *, timeout_s: float = METRICS_TIMEOUT_S) -> list[Sample]:
        """Returns the metrics of every process of the cluster and the lag of each group, sorted by
        name; `rayq.metrics.CATALOGUE` says what each name means. A process that does not answer has
        `rayq_process_up` 0. Raises TimeoutError if no broker answers, AuthorizationError."""
        client, background = self.shared_client()
        return background.run(collect_metrics(client, timeout_s=timeout_s))

    # --- operating it ---------------------------------------------------------------------------

    @takes_timeout
    def restart_broker(self, broker: int, *, timeout_s: float = RESTART_TIMEOUT_S) -> None:
        """Restarts a broker's processes under load: waits until other replicas are in sync for
        every partition that it holds, stops it in a controlled way, and returns when it is in sync
        again. Done for one broker after the other, this is a rolling restart; no write fails.

        Raises UnknownBrokerError; NotEnoughReplicasError if the broker cannot be spared, or is not
        in sync again in time; InvalidRequestError for a cluster that was connected to from
        outside."""
        restart_broker(self.admin, broker, self._restart_process, timeout_s=timeout_s)

    def restart_controller(self) -> None:
        """Restarts the process that is the preferred controller: the last step of an upgrade, after
        all brokers. A voter stands in meanwhile; records continue to flow.

        Raises InvalidRequestError for a cluster that was connected to from outside; RayqError."""
        self._operator().restart_controller()

    def replace_disk(self, broker: int, *, node: str | None = None) -> None:
        """Starts a broker whose data is lost on a new, empty disk, mounted at the old path; its
        replicas copy everything from the others. With `node`, a Ray address or node id, it starts
        there instead. Returns when the broker has a session; see `rayq cluster health` for the
        rest.

        Raises UnknownBrokerError; InvalidRequestError if the disk is not empty (then nothing was
        done), or for a cluster that was connected to from outside; RayqError."""
        whole_number("broker", broker)
        operator = self._operator()
        brokers = self.admin.describe_cluster().brokers
        host = next((candidate.host for candidate in brokers if candidate.broker == broker), None)
        operator.replace_disk(broker, node, host)

    def stop_broker(self, broker: int) -> None:
        """Stops a drained broker for good; afterwards `admin.remove_broker` makes the cluster
        forget it. Its directory is kept, so that it may start again when its node rejoins.

        Raises UnknownBrokerError; BrokerInUseError while it holds replicas, or while the others
        have no majority of the votes on the metadata; InvalidRequestError for a cluster that was
        connected to from outside."""
        check_may_stop(self.admin, broker)
        self._stop_process(broker)

    def _stop_process(self, broker: int) -> None:
        self._operator().stop_broker(broker)

    def _restart_process(self, broker: int) -> None:
        self._operator().restart_broker(broker)

    def _operator(self) -> Lifecycle:
        if self._lifecycle is None:
            raise InvalidRequestError(
                "This cluster was connected to by its address, and brokers are started through "
                "Ray: use rayq.connect() in a process of the cluster's Ray."
            )
        return self._lifecycle

    # --- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the consumers and queues made by this object, then its producers (delivering their
        buffered records), all at once, and then its connections. Idempotent. Raises the first
        DeliveryError once all are closed."""
        if self._access.is_closed:
            return
        background_loop().check_callable()
        self._access.is_closed = True
        if Cluster._current is self:
            Cluster._current = None
        first_error = self._open_clients.close_all()
        self._access.give_back()
        if first_error is not None:
            raise first_error

    def stop(self) -> None:
        """Stops the cluster's servers, then closes; the data is kept. Raises InvalidRequestError
        for a cluster that was only connected to from outside."""
        if self._lifecycle is None:
            raise InvalidRequestError(
                "This cluster was connected to by its address: stop it where it was started."
            )
        lifecycle = self._lifecycle
        undelivered: RayqError | None = None
        try:
            undelivered = self._open_clients.close_all()
        finally:
            lifecycle.stop()
            self.close()
        if undelivered is not None:
            raise undelivered

    def __enter__(self) -> Self:
        self._access.check_open()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        with closing_after(error):
            self.close()


# Servers do not run in a forked child.
os.register_at_fork(after_in_child=Cluster._running_here.clear)


def _unpickled(
    addresses: list[str],
    key: ClientKey,
    cluster_id: str | None,
    name: str,
    lifecycle: Lifecycle | None,
    config: ClusterConfig,
    client_id: str = "",
) -> Cluster:
    return Cluster(
        addresses,
        key,
        cluster_id=cluster_id,
        name=name,
        lifecycle=lifecycle,
        config=config,
        client_id=client_id,
    )
