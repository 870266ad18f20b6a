"""The objects that a `Cluster` makes: producers, consumers, queues, admins."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Unpack

from rayq.client.admin.admin import Admin, AdminCore, AsyncAdmin
from rayq.client.admin.base import ADMIN_TIMEOUT_S
from rayq.client.arguments import topic_name, topic_names
from rayq.client.background import BackgroundLoop
from rayq.client.client import Client
from rayq.client.cluster_access import ClusterAccess
from rayq.client.consuming.async_consumer import AsyncConsumer
from rayq.client.consuming.consumer import Consumer
from rayq.client.consuming.consumer_core import ConsumerCore
from rayq.client.consuming.group_consumer import Callback, Callbacks
from rayq.client.consuming.last_records import check_count, newest
from rayq.client.consuming.until_end import UNTIL_END_TIMEOUT_S
from rayq.client.finalizers import unwatch, watch, watch_loop
from rayq.client.open_clients import OpenClients
from rayq.client.producing.producer import AsyncProducer, Producer
from rayq.client.producing.producer_core import ProducerCore
from rayq.client.queues.arguments import PREFETCH, PREFETCH_MAX, names_and_weights, whole_between
from rayq.client.queues.queue import AsyncQueue, Queue
from rayq.client.queues.queue_core import QueueCore
from rayq.client.timeouts import takes_timeout
from rayq.config import ConsumerConfig, ProducerConfig, check_values_url, parse
from rayq.config.keywords import ConsumerKeywords, ProducerKeywords, QueueKeywords, TopicKeywords
from rayq.errors import InvalidRequestError
from rayq.records import Record

if TYPE_CHECKING:  # Only Python 3.13 has defaults for type variables; type checkers know them.
    from typing_extensions import TypeVar

    ValueT = TypeVar("ValueT", default=bytes | None)
    KeyT = TypeVar("KeyT", default=bytes | None)
    SentValueT = TypeVar("SentValueT", default=bytes)
    SentKeyT = TypeVar("SentKeyT", default=bytes)


class ClusterMethods:
    """The methods of `Cluster` that make producers, consumers, queues and admins."""

    def __init__(self, access: ClusterAccess) -> None:
        self._access = access
        self._open_clients = OpenClients()
        self.admin = Admin(self.shared_client)

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


def _given(**functions: object) -> dict[str, object]:
    """The functions that are not None; the others may be in the config under dotted names."""
    return {name: function for name, function in functions.items() if function is not None}


def _name(kind: str, group: str | None, topics: tuple[str, ...]) -> str:
    """The name that tells people which producer or consumer they left open."""
    of_group = "" if group is None else f" of group {group!r}"
    of_topics = "" if not topics else f" of {', '.join(map(repr, topics))}"
    return kind + of_group + of_topics
