"""Administration of topics, partitions and the cluster: `AsyncAdmin`, and `Admin` for threads.

Once a change returns, every later call sees it, whichever broker answers.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

from rayq.client.admin.groups import GroupAdmin, Target
from rayq.client.admin.moves import MoveAdmin, OnProgress
from rayq.client.admin.queues import QueueAdmin, check_states, create_queue, queue_name
from rayq.client.admin.remote import RemoteAdmin
from rayq.client.admin.topics import (
    cluster_info,
    create_topic,
    delete_records,
    describe_topic,
    until_ready,
)
from rayq.client.admin.transactions import TransactionAdmin
from rayq.client.arguments import (
    by_partition,
    partition_numbers,
    topic_name,
    topic_names,
    whole_number,
)
from rayq.client.background import BackgroundLoop
from rayq.client.client import Client, check_partition
from rayq.client.no_pickle import no_pickle_error
from rayq.client.timeouts import TIMEOUT_S_MAX, takes_timeout
from rayq.client.user_calls import call_callback, finish_callback
from rayq.config import QueueConfig, TopicConfig, given_values
from rayq.config.keywords import QueueKeywords, TopicKeywords
from rayq.errors import InvalidRequestError
from rayq.messages import (
    AlterTopicConfig,
    Change,
    CreatePartitions,
    CreateQueue,
    CreateTopic,
    DeleteTopic,
    ElectLeaders,
    EndRemoteStorage,
)
from rayq.records import (
    ClusterInfo,
    DrainProgress,
    GroupInfo,
    GroupListing,
    HangingTransaction,
    MovedRecords,
    ObjectStoreInfo,
    QueueInfo,
    QueueRecordInfo,
    Reassignment,
    RemotePartitionInfo,
    RemoteVerification,
    TopicInfo,
    TopicPartition,
    TransactionInfo,
    TransactionListing,
)
from rayq.user_functions import check_function, check_ran

P = ParamSpec("P")
T = TypeVar("T")

ADMIN_TIMEOUT_S = 30.0
"""Default of every call's `timeout_s`."""
MOVE_TIMEOUT_S = 600.0
"""Default of `reassign_partitions(timeout_s=...)`."""
INTERNAL_PREFIX = "__"
"""Prefix of the names of rayq's own topics."""


class AdminCore:
    """The inner half of an async admin (see `left_open`): its hold on the shared client."""

    def __init__(self, on_closed: Callable[[], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self.is_closed = False
        self._on_closed = on_closed

    def unsent_count(self) -> int:
        return 0

    async def leave(self, _timeout_s: float | None) -> None:
        self.close()

    def loop_has_ended(self) -> None:
        self.close()

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._on_closed()


class AsyncAdmin:
    """The admin of the cluster on the running event loop, made by `cluster.async_admin()`. Its
    methods are those of `Admin`, as coroutines. Use it as an async context manager, or call
    `close`."""

    def __init__(self, client: Client, core: AdminCore | None = None) -> None:
        self._client = client
        self._core = core

    async def close(self) -> None:
        """Gives its connections back. Idempotent. Calls in flight may fail."""
        if self._core is not None:
            self._core.close()

    def __reduce__(self) -> str:
        raise no_pickle_error(self, "an async admin")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    @takes_timeout
    async def create_topic(
        self,
        name: str,
        partitions: int = 1,
        replication_factor: int | None = None,
        *,
        exist_ok: bool = False,
        timeout_s: float = ADMIN_TIMEOUT_S,
        **config: Unpack[TopicKeywords],
    ) -> None:
        """Creates a topic; returns when every partition has a leader and a full in-sync set.
        `timeout_s` starts over whenever a replica has started or come in sync, because many of them
        may take long on a slow machine.

        `replication_factor` None means min(3, brokers). `config` is as in `TopicConfig`. With
        `exist_ok` an existing topic is left as it is, and not waited for; if it has a different
        number of partitions, or differs in a value given here, TopicExistsError says so.

        Raises TopicExistsError, InvalidTopicError, InvalidPartitionsError,
        InvalidReplicationFactorError, ReplicaLimitError, ConfigError.
        """
        request = CreateTopic(
            name=topic_name(name),
            partitions=whole_number("partitions", partitions),
            replication_factor=None
            if replication_factor is None
            else whole_number("replication_factor", replication_factor),
            config=given_values(TopicConfig, config),
        )
        await create_topic(self._client, request, exist_ok=exist_ok, timeout_s=timeout_s)

    @takes_timeout
    async def delete_topic(self, name: str, *, timeout_s: float = ADMIN_TIMEOUT_S) -> None:
        """Deletes a topic and its records. Raises UnknownTopicError."""
        await self._client.change(DeleteTopic(name=topic_name(name)), timeout_s=timeout_s)
        await self._client.refresh([name], timeout_s=timeout_s)

    @takes_timeout
    async def create_partitions(
        self,
        name: str,
        total: int,
        *,
        force: bool = False,
        timeout_s: float = ADMIN_TIMEOUT_S,
    ) -> None:
        """Increases the partitions of a topic to `total`, and waits as `create_topic` does. Records
        with a key may go to other partitions from then on. Raises InvalidPartitionsError, also if a
        queue handles the records of each key in order, unless `force` is True."""
        total = whole_number("total", total)
        request = CreatePartitions(name=topic_name(name), total=total, force=force)
        await self._client.change(request, timeout_s=timeout_s)
        await until_ready(self._client, name, total, timeout_s=timeout_s)

    @takes_timeout
    async def alter_topic_config(
        self,
        name: str,
        *,
        delete_remote: bool = False,
        timeout_s: float = ADMIN_TIMEOUT_S,
        **changes: Unpack[TopicKeywords],
    ) -> None:
        """Changes the given keys of a topic's config. Raises ConfigError, UnknownTopicError.

        `remote_storage=False` can be given with `delete_remote=True`, and then no other key: the
        topic's objects in the object store are removed, and records that are no longer on any
        broker's disk are gone at once.
        """
        if not changes:
            raise InvalidRequestError("alter_topic_config needs at least one key to change.")
        config = given_values(TopicConfig, changes)
        request: Change = AlterTopicConfig(name=topic_name(name), changes=config)
        if delete_remote:
            if config != {"remote_storage": False}:
                raise InvalidRequestError(
                    "delete_remote=True is for remote_storage=False alone: change other keys by a "
                    "call of their own."
                )
            request = EndRemoteStorage(name=topic_name(name))
        await self._client.change(request, timeout_s=timeout_s)
        await self._client.refresh([name], timeout_s=timeout_s)

    @takes_timeout
    async def elect_leaders(
        self,
        name: str,
        partitions: list[int] | None = None,
        *,
        unclean: bool = False,
        timeout_s: float = ADMIN_TIMEOUT_S,
    ) -> None:
        """Makes the first replica of each partition the leader if it is in sync. With `unclean`, a
        partition without a leader takes any live replica, which may lose acknowledged records."""
        request = ElectLeaders(
            name=topic_name(name), partitions=partition_numbers(partitions), unclean=unclean
        )
        await self._client.change(request, timeout_s=timeout_s)
        await self._client.refresh([name], timeout_s=timeout_s)

    @takes_timeout
    async def list_topics(
        self, *, internal: bool = False, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> list[str]:
        """The names of all topics, sorted. With `internal`, rayq's own topics (`__...`) too."""
        response = await self._client.fetch_all(timeout_s=timeout_s)
        names = (topic.name for topic in response.topics)
        return sorted(name for name in names if internal or not name.startswith(INTERNAL_PREFIX))

    @takes_timeout
    async def describe_topic(self, name: str, *, timeout_s: float = ADMIN_TIMEOUT_S) -> TopicInfo:
        """Describes a topic and its partitions. Each replica is asked for its offsets, which are
        None if it does not answer. Raises UnknownTopicError."""
        return await describe_topic(self._client, topic_name(name), timeout_s=timeout_s)

    @takes_timeout
    async def describe_cluster(self, *, timeout_s: float = ADMIN_TIMEOUT_S) -> ClusterInfo:
        """Describes the cluster: its brokers, its controller and the voters."""
        return cluster_info(await self._client.fetch_all(timeout_s=timeout_s))

    @takes_timeout
    async def delete_records(
        self,
        before: Mapping[TopicPartition, int | None],
        *,
        timeout_s: float = ADMIN_TIMEOUT_S,
    ) -> dict[TopicPartition, int]:
        """Deletes the records below an offset (None: all that are committed) of each partition, for
        good. Returns the new log start of each, once no replica that may lead starts below it.
        Waits for transactions with records there to end. Raises OffsetOutOfRangeError beyond the
        committed records; TimeoutError, which says whether nothing was deleted (too few replicas
        were in sync, a transaction is open), or the deletion may or may not last."""
        limits = by_partition(before, "the offset that records are deleted before")
        for (topic, partition), offset in limits.items():
            check_partition(await self._client.topic(topic, timeout_s=timeout_s), partition)
            if offset is not None and (type(offset) is not int or offset < 0):
                raise InvalidRequestError(
                    f"delete_records of {topic}-{partition} needs an offset from 0, or None for "
                    f"all that is committed, not {offset!r}."
                )
        starts = await asyncio.gather(
            *(
                delete_records(self._client, partition, offset, timeout_s=timeout_s)
                for partition, offset in limits.items()
            )
        )
        return dict(zip(limits, starts, strict=True))

    # --- moving partitions ----------------------------------------------------------------------

    @takes_timeout
    async def reassign_partitions(
        self,
        moves: Mapping[TopicPartition, Sequence[int]],
        *,
        throttle_bytes_per_s: int | None = None,
        wait: bool = True,
        timeout_s: float = MOVE_TIMEOUT_S,
    ) -> None:
        """Moves partitions to other brokers, under load; each target names as many as the topic's
        replication factor says, the preferred leader first.

        New replicas copy the log, at most `throttle_bytes_per_s` each, and join the in-sync set.
        The other replicas are removed once all of the target are in sync, never before. All of the
        moves begin, or none. With `wait` it returns when all are done. TimeoutError says which
        moves are still in progress and what they wait for; they continue all the same. Giving a
        move in progress again with the same target sets the new throttle: a throttle below the rate
        of writes to the partition keeps a move from ever ending. While a broker of its target is
        down, a move takes another target that includes all added replicas that are in sync.

        Raises InvalidReassignmentError (unknown, duplicate, too few or stopped brokers),
        ReassignmentInProgressError, ReplicaLimitError, UnknownTopicError, NoReassignmentError
        (somebody cancelled it meanwhile).
        """
        await self._moves(ADMIN_TIMEOUT_S).reassign(
            moves, throttle_bytes_per_s=throttle_bytes_per_s, wait=wait, timeout_s=timeout_s
        )

    @takes_timeout
    async def set_replication_factor(
        self,
        topic: str,
        replication_factor: int,
        *,
        throttle_bytes_per_s: int | None = None,
        wait: bool = True,
        timeout_s: float = MOVE_TIMEOUT_S,
    ) -> None:
        """Sets the number of replicas of every partition of a topic, under load, by moves like
        those of `reassign_partitions`; partitions that are added later get the same number. This
        works for rayq's own topics too: `__consumer_offsets` of a cluster that began with one
        broker.

        With a higher factor, replicas are added on the brokers that carry the fewest; leaders and
        existing replicas stay (`plan_spread` spreads the leaders too). With a lower factor, the
        leader and in-sync replicas stay if possible, and those on the brokers that carry the most
        go. If `min_insync_replicas` is not set, it is the majority of the new factor once a
        partition has all of its replicas. `throttle_bytes_per_s`, `wait` and `timeout_s` are as in
        `reassign_partitions`; called again for the same factor, it continues to wait.

        Raises InvalidReplicationFactorError (0, below `min_insync_replicas`, more than the running
        brokers that take replicas; or a partition has no leader), ReassignmentInProgressError (a
        partition is being moved), ReplicaLimitError, UnknownTopicError, NoReassignmentError
        (somebody cancelled it meanwhile).
        """
        await self._moves(ADMIN_TIMEOUT_S).set_replication_factor(
            topic_name(topic),
            whole_number("replication_factor", replication_factor),
            throttle_bytes_per_s=throttle_bytes_per_s,
            wait=wait,
            timeout_s=timeout_s,
        )

    @takes_timeout
    async def list_reassignments(
        self, *, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> list[Reassignment]:
        """The moves in progress, and what each of them waits for."""
        return await self._moves(timeout_s).reassignments()

    @takes_timeout
    async def cancel_reassignments(
        self,
        partitions: Iterable[TopicPartition] | None = None,
        *,
        timeout_s: float = ADMIN_TIMEOUT_S,
    ) -> list[TopicPartition]:
        """Cancels moves (None: all in progress), all of them or none, and returns their partitions.
        The replicas are again those from before. Raises NoReassignmentError for a partition that is
        not being moved, InvalidReassignmentError while that would leave too few in sync."""
        return await self._moves(timeout_s).cancel(partitions)

    @takes_timeout
    async def plan_drain(
        self, broker: int, *, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> dict[TopicPartition, list[int]]:
        """Plans the moves that `drain_broker` would make, without making them. Raises
        UnknownBrokerError, InvalidReassignmentError (too few other brokers)."""
        return await self._moves(timeout_s).plan_drain(whole_number("broker", broker))

    @takes_timeout
    async def drain_broker(
        self,
        broker: int,
        *,
        throttle_bytes_per_s: int | None = None,
        concurrency: int = 4,
        timeout_s: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        """Moves all replicas of a broker to others; it takes no new replicas from now on, and
        another broker takes over its vote. Returns when it holds nothing; then it can be stopped
        and removed.

        `concurrency` partitions move at a time, all together copying at most
        `throttle_bytes_per_s`, which also applies to moves that are already in progress.
        `on_progress(DrainProgress)` is called on the event loop (for `Admin`: in the thread of its
        loop) when something has changed. For an async admin it may be a coroutine function.

        TimeoutError (`timeout_s` None: never) leaves the broker cordoned; call it again to
        continue. Raises UnknownBrokerError, InvalidReassignmentError (the last broker, or too few
        would be left: nothing was changed), NoReassignmentError (somebody undrained it meanwhile).
        If nothing could be moved for half a minute, it raises the reason, InvalidReassignmentError
        or ReplicaLimitError, and leaves the broker cordoned. Raises HandlerError (for example,
        on_progress is a coroutine function that nobody awaits).
        """
        is_awaited = self._core is not None  # otherwise `Admin` has made this
        if on_progress is not None:
            check_function("on_progress", on_progress, is_awaited=is_awaited)

        async def tell(progress: DrainProgress) -> None:
            result = call_callback("on_progress", on_progress, progress)
            if is_awaited:
                await finish_callback("on_progress", result)
            else:
                check_ran("on_progress", result, may_go_on=True)

        await self._moves(ADMIN_TIMEOUT_S).drain(
            whole_number("broker", broker),
            throttle_bytes_per_s=throttle_bytes_per_s,
            concurrency=concurrency,
            timeout_s=timeout_s,
            tell=None if on_progress is None else tell,
        )

    @takes_timeout
    async def undrain_broker(self, broker: int, *, timeout_s: float = ADMIN_TIMEOUT_S) -> None:
        """Lets a broker take replicas again; nothing moves back by itself (see `plan_spread`).
        Raises UnknownBrokerError."""
        await self._moves(timeout_s).cordon(whole_number("broker", broker), False)

    @takes_timeout
    async def plan_spread(
        self, *, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> dict[TopicPartition, list[int]]:
        """The few moves after which brokers carry and lead equally many replicas, with
        those of a partition on different nodes: for `reassign_partitions`, after brokers were
        added. Empty if there is nothing to do."""
        return await self._moves(timeout_s).plan_spread()

    @takes_timeout
    async def remove_broker(self, broker: int, *, timeout_s: float = ADMIN_TIMEOUT_S) -> None:
        """Makes the cluster forget a broker that was drained and stopped. If it starts again with
        its directory, it joins as a new one. Raises UnknownBrokerError, BrokerInUseError (it runs,
        holds replicas, or is the last one)."""
        await self._moves(timeout_s).remove(whole_number("broker", broker))

    def _moves(self, timeout_s: float) -> MoveAdmin:
        return MoveAdmin(self._client, timeout_s)

    # --- groups ---------------------------------------------------------------------------------

    @takes_timeout
    async def list_groups(self, *, timeout_s: float = ADMIN_TIMEOUT_S) -> list[GroupListing]:
        """All consumer groups, sorted by name, with their state and number of members."""
        return await GroupAdmin(self._client, timeout_s).list_groups()

    @takes_timeout
    async def describe_group(self, group: str, *, timeout_s: float = ADMIN_TIMEOUT_S) -> GroupInfo:
        """Describes a group: its state, its members and their partitions, its offset and lag in
        each partition, and the reason for the last rebalance. Raises UnknownGroupError."""
        return await GroupAdmin(self._client, timeout_s).describe_group(group)

    @takes_timeout
    async def set_group_offsets(
        self,
        group: str,
        topics: str | Iterable[str | TopicPartition] | None = None,
        *,
        to: Target | None = None,
        timestamp_ms: int | None = None,
        shift: int | None = None,
        dry_run: bool = False,
        timeout_s: float = ADMIN_TIMEOUT_S,
    ) -> dict[TopicPartition, int]:
        """Sets the offsets at which a group without members resumes, and returns them.

        `topics` is a name, or several names or partitions; None means everything that the group has
        committed. Give one of: `to` "earliest", "latest", an offset, or `{partition: offset}`
        (without `topics`); `timestamp_ms`, the first record at or after that time; `shift`, the
        number of records forward (or, if negative, back) from the committed offset. An offset
        outside the log is moved to its nearer end. `dry_run` only returns the offsets. Raises
        GroupNotEmptyError, UnknownTopicError, InvalidRequestError, OutcomeUnknownError (an answer
        was lost, and members joined since).
        """
        return await GroupAdmin(self._client, timeout_s).set_group_offsets(
            group, topics, to=to, timestamp_ms=timestamp_ms, shift=shift, dry_run=dry_run
        )

    @takes_timeout
    async def delete_group(self, group: str, *, timeout_s: float = ADMIN_TIMEOUT_S) -> None:
        """Deletes a group without members, and its offsets. Raises UnknownGroupError,
        GroupNotEmptyError."""
        await GroupAdmin(self._client, timeout_s).delete_group(group)

    # --- transactions ---------------------------------------------------------------------------

    @takes_timeout
    async def list_transactions(
        self, *, idle: bool = False, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> list[TransactionListing]:
        """The transactions that are open, or decided while some partitions lack their markers,
        oldest first. With `idle`, also the transactional ids without a transaction in progress."""
        return await TransactionAdmin(self._client, timeout_s).list_transactions(idle=idle)

    @takes_timeout
    async def describe_transaction(
        self, transactional_id: str, *, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> TransactionInfo:
        """Describes a transactional id: its transactions in progress, and the partitions that take
        part in them; those of deleted topics are left out. Raises InvalidRequestError for an id
        that nobody uses."""
        return await TransactionAdmin(self._client, timeout_s).describe_transaction(
            transactional_id
        )

    @takes_timeout
    async def abort_transaction(
        self, transactional_id: str, *, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> None:
        """Aborts the open transaction of a transactional id; its producer gets
        TransactionAbortedError. Returns once that is decided, or once the producer has ended it at
        the same moment. Raises InvalidRequestError if the id is unknown or has nothing open."""
        await TransactionAdmin(self._client, timeout_s).abort_transaction(transactional_id)

    @takes_timeout
    async def find_hanging_transactions(
        self, topics: str | Iterable[str] | None = None, *, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> list[HangingTransaction]:
        """Finds transactions in all partitions of these topics (None: of all topics) that their
        coordinators do not know, as after the loss of `__transaction_state`. It asks the leader of
        each partition; a partition without a leader is an error, as in every call."""
        return await TransactionAdmin(self._client, timeout_s).find_hanging(
            None if topics is None else topic_names(topics)
        )

    @takes_timeout
    async def abort_hanging_transaction(
        self, hanging: HangingTransaction, *, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> None:
        """Aborts a transaction that `find_hanging_transactions` has found, in its partition only;
        does nothing if it is no longer open there. If the same transaction was committed, its
        records in this partition are lost to readers of committed records. Raises
        InvalidRequestError if its coordinator knows it."""
        await TransactionAdmin(self._client, timeout_s).abort_hanging(hanging)

    # --- remote storage -------------------------------------------------------------------------

    @takes_timeout
    async def describe_object_store(
        self, *, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> ObjectStoreInfo:
        """Describes the cluster's object store, the pins at which retention stops, and the deleted
        topics that still have objects there."""
        return await RemoteAdmin(self._client, timeout_s).describe_object_store()

    @takes_timeout
    async def describe_remote_storage(
        self, topics: str | Iterable[str] | None = None, *, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> list[RemotePartitionInfo]:
        """Describes how much of each partition of these topics (None: of all with `remote_storage`)
        is in the object store, as its leader reports; without figures if none answers. Raises
        UnknownTopicError."""
        return await RemoteAdmin(self._client, timeout_s).describe(
            None if topics is None else topic_names(topics)
        )

    @takes_timeout
    async def verify_remote(
        self,
        topic: str,
        partitions: Iterable[int] | None = None,
        *,
        deep: bool = False,
        repair: bool = False,
        timeout_s: float | None = None,
    ) -> list[RemoteVerification]:
        """Checks that the objects of a topic's partitions (None: of all) are in the object store
        with their sizes. With `deep` each object is read, and its CRCs, offsets and epochs are
        checked. With `repair` missing or damaged objects are stored again, if the leader still has
        the records on its own disk. `timeout_s` None means no timeout. Raises UnknownTopicError,
        RemoteStorageError."""
        left_s = TIMEOUT_S_MAX if timeout_s is None else timeout_s
        return await RemoteAdmin(self._client, left_s).verify(
            topic_name(topic), partition_numbers(partitions), deep=deep, repair=repair
        )

    @takes_timeout
    async def unpin(self, pin_id: str, *, timeout_s: float = ADMIN_TIMEOUT_S) -> None:
        """Ends a pin: retention continues. A batch job that still reads may then find records gone.
        Raises InvalidRequestError if there is no such pin."""
        await RemoteAdmin(self._client, timeout_s).unpin(pin_id)

    # --- queues ---------------------------------------------------------------------------------

    @takes_timeout
    async def create_queue(
        self,
        name: str,
        *,
        topic: str | None = None,
        partitions: int = 1,
        replication_factor: int | None = None,
        exist_ok: bool = False,
        timeout_s: float = ADMIN_TIMEOUT_S,
        **config: Unpack[QueueKeywords],
    ) -> None:
        """Creates a queue; returns when the leader of each partition has started it.

        With `topic` None, the queue has its own topic of the same name. That topic is created with
        `partitions` and `replication_factor` as in `create_topic`, and its retention removes only
        settled records (`retention="hold"` is the default then). Otherwise the queue reads the
        given topic, which stays as it is. With `dead_letters="keep"` there is also a queue
        `<name>.dead`, over a topic of that name.

        `config` is as in `QueueConfig`. With `exist_ok` an existing queue is left as it is; if it
        reads another topic, or differs in a value given here, QueueExistsError is raised.

        Raises QueueExistsError, QueueLimitError, ConfigError, UnknownTopicError (`topic`), and the
        errors of `create_topic`: TopicExistsError if a topic of that name exists without such a
        queue.
        """
        is_own = topic is None
        given: dict[str, Any] = {"retention": "hold"} if is_own else {}
        request = CreateQueue(
            name=queue_name(name),
            topic=name if topic is None else topic_name(topic),
            config={**given, **given_values(QueueConfig, config)},
            partitions=whole_number("partitions", partitions) if is_own else None,
            replication_factor=None
            if replication_factor is None
            else whole_number("replication_factor", replication_factor),
        )
        await create_queue(self._client, request, exist_ok=exist_ok, timeout_s=timeout_s)

    @takes_timeout
    async def alter_queue(
        self, name: str, *, timeout_s: float = ADMIN_TIMEOUT_S, **changes: Unpack[QueueKeywords]
    ) -> None:
        """Changes the given keys of a queue's config. Raises ConfigError, UnknownQueueError."""
        if not changes:
            raise InvalidRequestError("alter_queue needs at least one key to change.")
        config = given_values(QueueConfig, changes)
        await QueueAdmin(self._client, timeout_s).alter(queue_name(name), config)

    @takes_timeout
    async def delete_queue(self, name: str, *, timeout_s: float = ADMIN_TIMEOUT_S) -> None:
        """Deletes a queue and the state of its records. Its topic stays, with its records, and so
        do its dead letters. Raises UnknownQueueError."""
        await QueueAdmin(self._client, timeout_s).delete(queue_name(name))

    @takes_timeout
    async def list_queues(self, *, timeout_s: float = ADMIN_TIMEOUT_S) -> list[str]:
        """The names of all queues, sorted."""
        listed = await QueueAdmin(self._client, timeout_s).listed()
        return [queue.name for queue in listed]

    @takes_timeout
    async def describe_queue(self, name: str, *, timeout_s: float = ADMIN_TIMEOUT_S) -> QueueInfo:
        """Describes a queue and its state in each partition as its leader reports it; without
        figures if none answers. Raises UnknownQueueError."""
        return await QueueAdmin(self._client, timeout_s).describe(queue_name(name))

    @takes_timeout
    async def describe_queues(self, *, timeout_s: float = ADMIN_TIMEOUT_S) -> list[QueueInfo]:
        """Describes all queues, each as `describe_queue` does."""
        return await QueueAdmin(self._client, timeout_s).describe_all()

    @takes_timeout
    async def list_queue_records(
        self,
        name: str,
        *,
        states: str | Iterable[str] = (),
        limit: int = 1000,
        timeout_s: float = ADMIN_TIMEOUT_S,
    ) -> list[QueueRecordInfo]:
        """The unsettled records of a queue, by partition and from the oldest, up to `limit`.
        `states` restricts them to "ready", "locked", "delayed" or "moving" ones. Nothing is taken.
        Raises UnknownQueueError."""
        admin = QueueAdmin(self._client, timeout_s)
        chosen = check_states(states)
        return await admin.records(
            queue_name(name), states=chosen, limit=whole_number("limit", limit)
        )

    @takes_timeout
    async def purge_queue(self, name: str, *, timeout_s: float = ADMIN_TIMEOUT_S) -> int:
        """Settles all records of a queue that no consumer holds, and returns their number. They
        stay in the topic. Raises UnknownQueueError."""
        return await QueueAdmin(self._client, timeout_s).purge(queue_name(name))

    @takes_timeout
    async def move_queue_records(
        self,
        name: str,
        records: Mapping[TopicPartition, Iterable[int]],
        *,
        to_topic: str | None = None,
        timeout_s: float = ADMIN_TIMEOUT_S,
    ) -> dict[TopicPartition, MovedRecords]:
        """Writes records of a queue, given by partition and offset, to another topic, each exactly
        once, and settles them. With `to_topic` None, each goes to the topic that its header
        `rayq.source` names, as dead letters have it. The headers that made it a dead letter are
        left out. Records that are settled already count as moved; records that cannot be moved (for
        example because a consumer holds them) are in `refused`. May be repeated. Raises
        UnknownQueueError, InvalidRequestError."""
        target = "" if to_topic is None else topic_name(to_topic)
        return await QueueAdmin(self._client, timeout_s).move(
            queue_name(name), by_partition(records, "offsets"), to_topic=target
        )

    @takes_timeout
    async def discard_queue_records(
        self,
        name: str,
        records: Mapping[TopicPartition, Iterable[int]],
        *,
        timeout_s: float = ADMIN_TIMEOUT_S,
    ) -> dict[TopicPartition, MovedRecords]:
        """Settles records of a queue, given by partition and offset, so that nobody gets them. They
        stay in the topic. Returns and raises as `move_queue_records` does."""
        return await QueueAdmin(self._client, timeout_s).move(
            queue_name(name), by_partition(records, "offsets"), to_topic=None
        )


def _blocking(
    method: Callable[Concatenate[AsyncAdmin, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Admin, P], T]:
    """Makes a method of `Admin` that runs the coroutine of a method of `AsyncAdmin`, and waits for
    it. It has the signature and documentation of that method; `docs/hooks/reference.py` shows it in
    the reference."""

    @functools.wraps(method)
    def call(admin: Admin, /, *args: P.args, **kwargs: P.kwargs) -> T:
        client, background = admin._shared()
        return background.run(method(AsyncAdmin(client), *args, **kwargs))

    call.__qualname__ = f"Admin.{method.__name__}"
    return call


class Admin:
    """The admin of the cluster from any thread, `cluster.admin`. Its methods are those of
    `AsyncAdmin`, and each returns when it is done.

    Every call takes `timeout_s` and raises TimeoutError when that time has passed; a change may
    still take effect afterwards. Within that time a change whose answer was lost is requested
    again; it happens once.
    """

    def __init__(self, shared: Callable[[], tuple[Client, BackgroundLoop]]) -> None:
        self._shared = shared

    create_topic = _blocking(AsyncAdmin.create_topic)
    delete_topic = _blocking(AsyncAdmin.delete_topic)
    list_topics = _blocking(AsyncAdmin.list_topics)
    describe_topic = _blocking(AsyncAdmin.describe_topic)
    create_partitions = _blocking(AsyncAdmin.create_partitions)
    alter_topic_config = _blocking(AsyncAdmin.alter_topic_config)
    describe_cluster = _blocking(AsyncAdmin.describe_cluster)
    delete_records = _blocking(AsyncAdmin.delete_records)
    list_groups = _blocking(AsyncAdmin.list_groups)
    describe_group = _blocking(AsyncAdmin.describe_group)
    set_group_offsets = _blocking(AsyncAdmin.set_group_offsets)
    delete_group = _blocking(AsyncAdmin.delete_group)
    list_transactions = _blocking(AsyncAdmin.list_transactions)
    describe_transaction = _blocking(AsyncAdmin.describe_transaction)
    abort_transaction = _blocking(AsyncAdmin.abort_transaction)
    find_hanging_transactions = _blocking(AsyncAdmin.find_hanging_transactions)
    abort_hanging_transaction = _blocking(AsyncAdmin.abort_hanging_transaction)
    elect_leaders = _blocking(AsyncAdmin.elect_leaders)
    reassign_partitions = _blocking(AsyncAdmin.reassign_partitions)
    set_replication_factor = _blocking(AsyncAdmin.set_replication_factor)
    list_reassignments = _blocking(AsyncAdmin.list_reassignments)
    cancel_reassignments = _blocking(AsyncAdmin.cancel_reassignments)
    plan_drain = _blocking(AsyncAdmin.plan_drain)
    drain_broker = _blocking(AsyncAdmin.drain_broker)
    undrain_broker = _blocking(AsyncAdmin.undrain_broker)
    plan_spread = _blocking(AsyncAdmin.plan_spread)
    remove_broker = _blocking(AsyncAdmin.remove_broker)
    describe_object_store = _blocking(AsyncAdmin.describe_object_store)
    describe_remote_storage = _blocking(AsyncAdmin.describe_remote_storage)
    verify_remote = _blocking(AsyncAdmin.verify_remote)
    unpin = _blocking(AsyncAdmin.unpin)
    create_queue = _blocking(AsyncAdmin.create_queue)
    alter_queue = _blocking(AsyncAdmin.alter_queue)
    delete_queue = _blocking(AsyncAdmin.delete_queue)
    list_queues = _blocking(AsyncAdmin.list_queues)
    describe_queue = _blocking(AsyncAdmin.describe_queue)
    describe_queues = _blocking(AsyncAdmin.describe_queues)
    list_queue_records = _blocking(AsyncAdmin.list_queue_records)
    purge_queue = _blocking(AsyncAdmin.purge_queue)
    move_queue_records = _blocking(AsyncAdmin.move_queue_records)
    discard_queue_records = _blocking(AsyncAdmin.discard_queue_records)
