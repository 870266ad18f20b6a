"""`Cluster`, the object that users hold. It makes producers, consumers and the admin, and can be
pickled."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, Unpack

from rayq.client.admin.admin import Admin, AdminCore, AsyncAdmin
from rayq.client.admin.base import ADMIN_TIMEOUT_S
from rayq.client.admin.metrics import collect_metrics
from rayq.client.admin.queues import queue_name
from rayq.client.admin.restart import check_may_stop, restart_broker
from rayq.client.arguments import topic_name, topic_names, whole_number
from rayq.client.background import BackgroundLoop, background_loop
from rayq.client.client import Client
from rayq.client.cluster_access import ClusterAccess
from rayq.client.consumer_pool import (
    ConsumerPool,
    Handler,
    PoolControl,
    PoolSpec,
    check_handler,
)
from rayq.client.consuming.async_consumer import AsyncConsumer
from rayq.client.consuming.consumer import Consumer
from rayq.client.consuming.consumer_core import ConsumerCore
from rayq.client.consuming.group_consumer import Callback, Callbacks
from rayq.client.consuming.last_records import check_count, newest
from rayq.client.consuming.until_end import UNTIL_END_TIMEOUT_S
from rayq.client.finalizers import unwatch, watch, watch_loop
from rayq.client.group_positions import check_group
from rayq.client.open_clients import OpenClients
from rayq.client.producing.producer import AsyncProducer, Producer
from rayq.client.producing.producer_core import ProducerCore
from rayq.client.queues.arguments import PREFETCH, PREFETCH_MAX, names_and_weights, whole_between
from rayq.client.queues.queue import AsyncQueue, Queue
from rayq.client.queues.queue_core import QueueCore
from rayq.client.timeouts import takes_timeout
from rayq.client.user_objects import closing_after
from rayq.config import (
    ClusterConfig,
    ConsumerConfig,
    PoolConfig,
    ProducerConfig,
    QueueConfig,
    check_values_url,
    parse,
    parse_stored,
)
from rayq.config.keywords import (
    ConsumerKeywords,
    PoolKeywords,
    ProducerKeywords,
    QueueKeywords,
    TopicKeywords,
)
from rayq.environment import Address
from rayq.errors import (
    ConfigError,
    InvalidRequestError,
    NoClusterError,
    RayqError,
)
from rayq.metrics import Sample
from rayq.records import Record
from rayq.wire.authentication import token_of_key

if TYPE_CHECKING:  # Only Python 3.13 has defaults for type variables; type checkers know them.
    from typing_extensions import TypeVar

    ValueT = TypeVar("ValueT", default=bytes | None)
    KeyT = TypeVar("KeyT", default=bytes | None)
    SentValueT = TypeVar("SentValueT", default=bytes)
    SentKeyT = TypeVar("SentKeyT", default=bytes)

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


class Cluster:
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
        key: bytes,
        *,
        cluster_id: str | None = None,
        name: str = "default",
        lifecycle: Lifecycle | None = None,
        config: ClusterConfig | None = None,
    ) -> None:
        """`addresses` are the `host:port` (port 9392 by default), or pairs, of some brokers. `key`
        is the client key (`rayq.wire.authentication`). `cluster_id` is the id that the cluster must
        have; None accepts any. Only the TLS files and limits of `config` are used."""
        self._access = ClusterAccess(addresses, key, cluster_id, config or ClusterConfig())
        self.name = name
        self._lifecycle = lifecycle
        self._open_clients = OpenClients()
        self.admin = Admin(self.shared_client)

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
        return token_of_key(self._access.key)

    def add_addresses(self, addresses: str | Iterable[str | Address]) -> None:
        """Adds addresses of brokers, which may have moved since this object was made. Raises
        ConfigError."""
        self._access.add_addresses(addresses)

    def connection(self) -> Cluster:
        """Another object for the same cluster, which is closed separately."""
        _, arguments = self.__reduce__()
        return _unpickled(*arguments)

    def __repr__(self) -> str:
        state = "closed" if self._access.is_closed else "open"
        return f"<{type(self).__name__} {self.name!r} at {', '.join(self.addresses)}, {state}>"

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (self.addresses, self._access.key, self.cluster_id, self.name)
        return _unpickled, (*arguments, self._lifecycle, self._access.config)

    # --- the client behind it -------------------------------------------------------------------

    def new_client(self) -> Client:
        """A client for the running loop."""
        return self._access.new_client()

    def shared_client(self) -> tuple[Client, BackgroundLoop]:
        """The client on this process's background loop and that loop, for the parts of rayq that
        ask the servers directly."""
        return self._access.on_background_loop()

    # --- what it makes --------------------------------------------------------------------------

    def producer(
        self,
        *,
        value_serializer: Callable[[SentValueT], bytes] | None = None,
        key_serializer: Callable[[SentKeyT], bytes] | None = None,
        **config: Unpack[ProducerKeywords],
    ) -> Producer[SentValueT, SentKeyT]:
        """Makes a producer for threads; further keywords as in `ProducerConfig`. Values and keys
        are bytes, or anything that the serializers turn into bytes, such as `rayq.json_serializer`
        and `str.encode`. Raises ConfigError."""
        checked = parse(
            ProducerConfig,
            config | _given(value_serializer=value_serializer, key_serializer=key_serializer),
        )
        _, background = self.shared_client()

        async def make() -> ProducerCore:
            client, release = self._access.acquire()
            return ProducerCore(client, checked, release)

        core = background.run(make())
        producer: Producer[SentValueT, SentKeyT] = Producer(core, background)
        watch(producer, core, "A producer")
        self._open_clients.add(producer)
        return producer

    def consumer(
        self,
        *topics: str | Iterable[str],
        group: str | None = None,
        pattern: str | re.Pattern[str] | None = None,
        on_assigned: Callback | None = None,
        on_revoked: Callback | None = None,
        on_lost: Callback | None = None,
        value_deserializer: Callable[[bytes], ValueT] | None = None,
        key_deserializer: Callable[[bytes], KeyT] | None = None,
        **config: Unpack[ConsumerKeywords],
    ) -> Consumer[ValueT, KeyT]:
        """Makes a consumer for one thread; further keywords as in `ConsumerConfig`. With a `group`,
        it reads its share of `topics` and of the topics that `pattern` matches, starting at the
        group's last commit, and the callbacks report its partitions (see `Consumer.subscribe`).
        Without a group, it reads all partitions of `topics`. Without topics, call `subscribe` or
        `assign`. Values and keys of records are bytes, or the results of the deserializers, such as
        `rayq.json_deserializer` and `bytes.decode`. Raises ConfigError, UnknownTopicError,
        InvalidRequestError."""
        checked = parse(
            ConsumerConfig,
            config
            | _given(value_deserializer=value_deserializer, key_deserializer=key_deserializer),
        )
        names = topic_names(topics)
        callbacks = Callbacks(on_assigned, on_revoked, on_lost)
        callbacks.check(is_awaited=False)
        _, background = self.shared_client()

        async def make() -> ConsumerCore:
            client, release = self._access.acquire()
            core = ConsumerCore(client, checked, release, group)
            try:
                core.check_callbacks(callbacks)
                if names or pattern is not None:
                    await core.subscribe(names, pattern)
            except BaseException:
                core.close()
                raise
            return core

        core = background.run(make())
        consumer: Consumer[ValueT, KeyT] = Consumer(core, background, callbacks)
        watch(consumer, core, _name("A consumer", group, names))
        self._open_clients.add(consumer)
        return consumer

    def async_producer(
        self,
        *,
        value_serializer: Callable[[SentValueT], bytes] | None = None,
        key_serializer: Callable[[SentKeyT], bytes] | None = None,
        **config: Unpack[ProducerKeywords],
    ) -> AsyncProducer[SentValueT, SentKeyT]:
        """Makes a producer for the running event loop; its methods are coroutines. Its serializers
        run there too, so they must be quick."""
        checked = parse(
            ProducerConfig,
            config | _given(value_serializer=value_serializer, key_serializer=key_serializer),
        )
        self._check_async("async_producer")
        client, release = self._access.acquire()

        def ended() -> None:
            unwatch(core)
            release()

        producer: AsyncProducer[SentValueT, SentKeyT] = AsyncProducer(client, checked, ended)
        core = producer.core
        watch_loop(producer, core, "An async producer")
        return producer

    def async_consumer(
        self,
        *topics: str | Iterable[str],
        group: str | None = None,
        pattern: str | re.Pattern[str] | None = None,
        on_assigned: Callback | None = None,
        on_revoked: Callback | None = None,
        on_lost: Callback | None = None,
        value_deserializer: Callable[[bytes], ValueT] | None = None,
        key_deserializer: Callable[[bytes], KeyT] | None = None,
        **config: Unpack[ConsumerKeywords],
    ) -> AsyncConsumer[ValueT, KeyT]:
        """Makes a consumer for the running event loop; its methods are coroutines, and its
        callbacks may be. The group's heartbeats and the deserializers run on the same loop: do not
        block it."""
        checked = parse(
            ConsumerConfig,
            config
            | _given(value_deserializer=value_deserializer, key_deserializer=key_deserializer),
        )
        names = topic_names(topics)
        self._check_async("async_consumer")
        client, release = self._access.acquire()

        def ended() -> None:
            unwatch(core)
            release()

        try:
            consumer: AsyncConsumer[ValueT, KeyT] = AsyncConsumer(
                client,
                checked,
                names,
                ended,
                group=group,
                pattern=pattern,
                callbacks=Callbacks(on_assigned, on_revoked, on_lost),
            )
        except BaseException:
            release()
            raise
        core = consumer.core
        watch_loop(consumer, core, _name("An async consumer", group, names))
        return consumer

    def async_admin(self) -> AsyncAdmin:
        """Makes the admin for the running event loop: the methods of `Admin`, as coroutines."""
        self._check_async("async_admin")
        client, release = self._access.acquire()

        def ended() -> None:
            unwatch(core)
            release()

        core = AdminCore(ended)
        admin = AsyncAdmin(client, core)
        watch_loop(admin, core, "An async admin")
        return admin

    def _check_async(self, what: str) -> None:
        self._access.check_open()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise InvalidRequestError(
                f"{what}() belongs to an event loop: call it inside an async function."
            ) from None

    @takes_timeout
    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        replication_factor: int | None = None,
        *,
        exist_ok: bool = False,
        timeout_s: float = ADMIN_TIMEOUT_S,
        **config: Unpack[TopicKeywords],
    ) -> None:
        """Creates a topic, as `admin.create_topic` does."""
        self.admin.create_topic(
            name,
            partitions,
            replication_factor,
            exist_ok=exist_ok,
            timeout_s=timeout_s,
            **config,
        )

    @takes_timeout
    def tail(
        self,
        topic: str,
        count: int = 10,
        *,
        timeout_s: float = UNTIL_END_TIMEOUT_S,
        value_deserializer: Callable[[bytes], ValueT] | None = None,
        key_deserializer: Callable[[bytes], KeyT] | None = None,
        **config: Unpack[ConsumerKeywords],
    ) -> list[Record[ValueT, KeyT]]:
        """Returns the newest `count` records of a topic, across all its partitions, oldest first:
        ordered by timestamp, and within a partition by offset. Returns fewer if the topic has
        fewer.

        It reads the last `count` records of every partition (see `Consumer.seek_to_last`); keywords
        as in `ConsumerConfig`. Raises UnknownTopicError, InvalidRequestError, and the errors of
        `Consumer.until_end`."""
        topic, count = topic_name(topic), check_count(count)
        config.setdefault("auto_offset_reset", "earliest")
        with self.consumer(
            topic,
            value_deserializer=value_deserializer,
            key_deserializer=key_deserializer,
            **config,
        ) as consumer:
            consumer.seek_to_last(count)
            return newest(consumer.until_end(timeout_s), count)

    # --- queues ---------------------------------------------------------------------------------

    @takes_timeout
    def create_queue(
        self,
        name: str,
        *,
        topic: str | None = None,
        partitions: int = 1,
        replication_factor: int | None = None,
        exist_ok: bool = False,
        prefetch: int = PREFETCH,
        large_values: str | None = None,
        timeout_s: float = ADMIN_TIMEOUT_S,
        **config: Unpack[QueueKeywords],
    ) -> Queue:
        """Creates a queue, and its own topic unless it reads `topic`, as `admin.create_queue` does.
        Returns the queue as `queue` does with `prefetch` and `large_values`."""
        check_values_url(large_values)
        self.admin.create_queue(
            name,
            topic=topic,
            partitions=partitions,
            replication_factor=replication_factor,
            exist_ok=exist_ok,
            timeout_s=timeout_s,
            **config,
        )
        return self.queue(name, prefetch=prefetch, large_values=large_values)

    def queue(
        self,
        names: str | Sequence[str],
        *,
        weights: Sequence[int] | None = None,
        prefetch: int = PREFETCH,
        large_values: str | None = None,
    ) -> Queue:
        """Opens a queue for threads, to put records into and to take them out. With several
        `names`, it takes from all of them by `weights` (1 to 1,000 each, 1 by default): while each
        has a backlog, each gets its share of any 2 x sum(weights) records.

        Up to `prefetch` records (at most 10,000) are locked ahead while others are handled, but no
        more than are handled in a fifth of a second. A consumer that handles fewer than 20 a second
        prefetches none, so slow records are left to others. An idle consumer gets a share of the
        prefetched records. 0 turns prefetching off.

        A value above `max_message_bytes` is put in chunks, or as an object below the URL
        `large_values`, and arrives whole; see docs/how-to/large-values.md. Raises
        UnknownQueueError, InvalidRequestError, ConfigError (large_values is not a URL)."""
        checked, each = names_and_weights(names, weights)
        whole_between("prefetch", prefetch, 0, PREFETCH_MAX)
        _, background = self.shared_client()

        async def make() -> QueueCore:
            client, release = self._access.acquire()
            core = QueueCore(client, checked, each, prefetch, release, large_values)
            try:
                await core.open()
            except BaseException:
                await core.close()
                raise
            return core

        core = background.run(make())
        queue = Queue(
            core, background, lambda: self.producer(large_values=large_values or "chunks")
        )
        watch(queue, core, f"A queue of {', '.join(map(repr, checked))}")
        self._open_clients.add(queue)
        return queue

    def async_queue(
        self,
        names: str | Sequence[str],
        *,
        weights: Sequence[int] | None = None,
        prefetch: int = PREFETCH,
        large_values: str | None = None,
    ) -> AsyncQueue:
        """Does the same as `queue` for the running event loop: its methods are coroutines. Locks
        are extended on the same loop: do not block it. The queues are looked up at first use."""
        checked, each = names_and_weights(names, weights)
        whole_between("prefetch", prefetch, 0, PREFETCH_MAX)
        self._check_async("async_queue")
        client, release = self._access.acquire()

        def ended() -> None:
            unwatch(core)
            release()

        core = QueueCore(client, checked, each, prefetch, ended, large_values)
        queue = AsyncQueue(
            core, lambda: self.async_producer(large_values=large_values or "chunks")
        )
        watch_loop(queue, core, f"An async queue of {', '.join(map(repr, checked))}")
        return queue

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
        `rayq_process_up` 0. Raises TimeoutError if no broker answers."""
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


def _given(**functions: object) -> dict[str, object]:
    """The functions that are not None; the others may be in the config under dotted names."""
    return {name: function for name, function in functions.items() if function is not None}


def _name(kind: str, group: str | None, topics: tuple[str, ...]) -> str:
    """The name that tells people which producer or consumer they left open."""
    of_group = "" if group is None else f" of group {group!r}"
    of_topics = "" if not topics else f" of {', '.join(map(repr, topics))}"
    return kind + of_group + of_topics


# Servers do not run in a forked child.
os.register_at_fork(after_in_child=Cluster._running_here.clear)


def _unpickled(
    addresses: list[str],
    key: bytes,
    cluster_id: str | None,
    name: str,
    lifecycle: Lifecycle | None,
    config: ClusterConfig,
) -> Cluster:
    return Cluster(
        addresses,
        key,
        cluster_id=cluster_id,
        name=name,
        lifecycle=lifecycle,
        config=config,
    )
