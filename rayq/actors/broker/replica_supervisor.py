"""A broker's supervision of the replica processes of its node.

It lets `ReplicaProcesses` start and watch a process for each replica that the metadata places here,
hands each its assignments, and drops replicas that are no longer placed here. It reports what it
sees to the controller until the committed metadata shows it (docs/protocol.md, rules 12 and 13).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from rayq import messages
from rayq.actors.access import Access
from rayq.actors.broker.object_store_access import ObjectStoreAccess
from rayq.actors.broker.placed_replicas import PlacedReplicas
from rayq.actors.broker.quota_division import QuotaDivision
from rayq.actors.broker.replica_processes import ReplicaProcess, ReplicaProcesses
from rayq.actors.handlers import answers
from rayq.actors.hosting import Runtime
from rayq.actors.listening_clock import ListeningClock
from rayq.actors.metadata.metadata_keeper import MetadataKeeper
from rayq.actors.signal import Signal
from rayq.config import ClusterConfig
from rayq.core.cluster.damaged_logs import have_others_all, may_copy_again
from rayq.core.cluster.records import (
    MetadataRecord,
    RemoteDoubted,
    RemoteMoved,
    RequestDone,
    SnapshotPinned,
    SnapshotUnpinned,
)
from rayq.environment import Environment
from rayq.errors import ControllerUnavailableError, RayqError, StaleBrokerError, StorageError
from rayq.records import TopicIdPartition
from rayq.storage.data_directory import DataDirectory, DirectoryHolder
from rayq.wire.pool import ConnectionPool

logger = logging.getLogger(__name__)

STARTS_AT_ONCE_PER_NODE = 2
LOOKED_AT_ONCE_MAX = 100
"""Number of replicas whose directories are looked at before something is done with the result."""
REPORT_INTERVAL_S = 0.1
"""Interval at which replicas that are still to be started, reported or let go are looked at."""
CHECK_INTERVAL_S = 10.0
"""Interval at which all replicas are looked at, even if nothing happened."""
TIDY_INTERVAL_S = 1.0
"""Interval at which files are looked at again that could not be removed."""
DirectoryUser = tuple[DirectoryHolder | None, str | None]
"""The process that holds a partition's directory, and the id of the topic that it belongs to."""
_NO_NEWS = (RemoteMoved, RemoteDoubted, SnapshotPinned, SnapshotUnpinned, RequestDone)
"""Records that change neither the replicas nor their processes."""


class ReplicaSupervisor:
    """See the module. `ask_controller` sends a request to the controller; it raises RayqError."""

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
        incarnation: str,
        listening: ListeningClock,
        ask_controller: messages.Ask,
        objects: ObjectStoreAccess | None,
        access: Access,
        division: QuotaDivision,
    ) -> None:
        self._environment = environment
        self._config = config
        self._directory = directory
        self._metadata = metadata
        self._incarnation = incarnation
        self._listening = listening
        self._ask_controller = ask_controller
        self._objects = objects
        self._access = access
        self._division = division
        self._broker = directory.meta.broker
        self._hosts = ReplicaProcesses(
            environment,
            config,
            runtime,
            pool,
            cluster_name=cluster_name,
            broker=self._broker,
            data_path=directory.path,
            listening=listening,
            on_gone=self._take_gone,
        )
        self._placed = PlacedReplicas(metadata, self._broker, incarnation)
        self._failed: dict[TopicIdPartition, str] = {}
        """Replicas that stopped on a disk error, which this broker process does not start again."""
        self._damaged: dict[TopicIdPartition, str] = {}
        """The incarnation that found the damage, for those failed replicas that start again because
        only their logs are damaged."""
        self._copy_again_from_s: dict[TopicIdPartition, float] = {}
        """Time of the next check whether the others have all of the log, for replicas that started
        again as they are because the others did not."""
        self._tidy_from_s = environment.clock.monotonic()
        self._looks = asyncio.Lock()
        """Lock of those who look in a thread for the processes that hold directories: who looks
        holds a directory's lock for a moment."""
        self._wake = Signal()
        self._pending: dict[TopicIdPartition, None] = {}
        """Replicas with which something happened, or is still to happen. All others are what they
        should be, so a round costs what there is to do."""
        self._check_all_from_s = environment.clock.monotonic()
        self._has_news = True
        """True if something happened since the last round, or is still to happen."""
        self._is_stopping = False
        self._started_s = environment.clock.monotonic()

    async def run(self) -> None:
        """Reconciles forever: processes with metadata, metadata with processes."""
        for path in self._directory.leftovers():
            self._environment.tasks.spawn(self._remove(path), f"remove {path}")
        while not self._is_stopping:
            try:
                await self._hosts.end_silent()
                now_s = self._environment.clock.monotonic()
                due_s = min(self._check_all_from_s, self._tidy_from_s)
                if (self._has_news or now_s >= due_s) and self._metadata.version > 0:
                    await self._check(now_s)
            except RayqError as error:
                logger.debug("broker %d: %s", self._broker, error)
            except OSError as error:
                # One partition's directory fails: its replica reports that itself, the others
                # continue.
                logger.warning("broker %d cannot look at its disk: %s", self._broker, error)
            await self._wake.wait(REPORT_INTERVAL_S)

    async def _check(self, now_s: float) -> None:
        """Looks at the replicas that are pending, and does what can be done now; the rest stays
        pending. Raises RayqError, OSError."""
        self._has_news = False
        if now_s >= self._check_all_from_s:
            self._check_all_from_s = now_s + CHECK_INTERVAL_S
            self._look_at(self._placed)
            for host in self._hosts:
                self._look_at(host.keys)
        self._look_at(self._damaged)
        keys = sorted(self._pending)
        left = set(keys)
        self._pending = {}
        try:
            unplaced = self._remove_unplaced(keys)
            self._tidy(now_s)
            missing = await self._start_missing(keys, unplaced)
            told = await self._report(keys)
            await self._start_damaged_again()
            left = {*unplaced, *missing, *told}
        finally:
            self._look_at(key for key in keys if key in left)
            self._has_news |= bool(
                self._pending or self._hosts.starting or self._damaged or self._copy_again_from_s
            )

    def _look_at(self, keys: Iterable[TopicIdPartition]) -> None:
        self._pending.update(dict.fromkeys(keys))

    def wake(self) -> None:
        self._has_news = True
        self._wake.notify()

    @property
    def failed_count(self) -> int:
        """Number of replicas that stopped on a disk error."""
        return len(self._failed)

    def on_metadata(self, records: Sequence[MetadataRecord] | None) -> None:
        """Takes note that committed records (None: a snapshot) were applied."""
        touched = self._placed.take(records, self._hosts)
        for key in touched:
            for host in self._hosts.hosting(key):
                host.changed.notify()
        if records is not None and all(isinstance(record, _NO_NEWS) for record in records):
            return  # Only replicas act on them.
        here = [key for key in touched if self._placed.find(key) or self._was_here(key)]
        self._look_at(here)
        if records is None or any(self._placed.find(key) is None for key in here):
            self._tidy_soon()
        if here or not touched:
            self.wake()

    def tell_all(self) -> None:
        """Has each process told the news that is not about its replicas."""
        for host in self._hosts:
            host.changed.notify()

    def _was_here(self, key: TopicIdPartition) -> bool:
        return key in self._failed or key in self._pending or self._hosts.is_hosted(key)

    def _take_gone(self, keys: Iterable[TopicIdPartition]) -> None:
        """Takes note that a process with these replicas has ended."""
        self._look_at(keys)
        self._tidy_soon()
        self.wake()

    def _tidy_soon(self) -> None:
        self._tidy_from_s = self._environment.clock.monotonic()

    async def held(self) -> list[TopicIdPartition]:
        """The partitions whose directories replica processes hold that outlived the previous broker
        process."""

        def look() -> list[TopicIdPartition]:
            disk = self._environment.disk
            return [
                (meta.topic_id, meta.partition)
                for meta, path in self._directory.partitions()
                if DataDirectory.partition_holder(disk, path) is not None
            ]

        async with self._looks:
            return await self._environment.threads.run(look)

    # --- what processes ask -----------------------------------------------------------------

    @answers(messages.AttachReplicaHost)
    def attach(self, request: messages.AttachReplicaHost) -> messages.AttachReplicaHostResponse:
        """Takes a replica process that presents itself. Raises StaleBrokerError."""
        host = self._hosts.attach(request)
        self._note_all(host, request.replicas)
        self.wake()
        return messages.AttachReplicaHostResponse(
            self._directory.meta.cluster_id, session=host.session
        )

    @answers(messages.ReplicaHostHeartbeat)
    async def heartbeat(
        self, request: messages.ReplicaHostHeartbeat
    ) -> messages.ReplicaHostHeartbeatResponse:
        """Answers a replica process's heartbeat, which is held until an assignment or the access
        changes, at most `wait_ms`. Raises StaleBrokerError, and StorageError while this broker
        cannot follow the metadata: then no process gets a lease."""
        host = self._hosts.get(request.incarnation)
        if host is None or host.endpoint is None:
            raise StaleBrokerError("This broker process does not know you: present yourself.")
        if request.session not in (0, host.session):
            raise StaleBrokerError("You have presented yourself again since.")
        if request.has_all:
            is_new = self._note_all(host, request.replicas)
        else:
            is_new = self._note(host, request.replicas, request.closed)
        if is_new:
            self.wake()
        # One that is held leaves after the answers to all before it were acted on, or given up.
        is_held = request.wait_ms > 0
        if is_held:
            host.told_to_open.clear()
        self._hosts.note_remote_backlog(host, request.remote_backlog_bytes)
        known = set(host.statuses)
        deadline_s = self._environment.clock.monotonic() + request.wait_ms / 1000
        self._division.report(request.incarnation, request.quota_demands)
        is_new_share = False
        while True:
            # A broker that was just started may know less than its processes do: it waits.
            version = self._metadata.version
            assignments: list[messages.PartitionAssignment] = []
            removed: list[TopicIdPartition] = []
            deleted: list[str] = []
            is_removal_new = False
            access: messages.AccessNews | None = None
            if version >= request.version:
                mine = host.keys | known
                changed = self._placed.changed_since(request.version, among=mine)
                for key in changed | (host.keys ^ known) | (host.let_go & known):
                    is_new = key not in known or key in changed
                    is_hosted = key in host.keys and key not in host.let_go
                    placed = self._placed.find(key) if is_hosted else None
                    if placed is None:
                        if key in known:
                            removed.append(key)
                            host.let_go.add(key)
                            is_removal_new |= key not in host.told_to_close
                    elif is_new:
                        assignments.append(self._placed.assignment(key[1], *placed))
                deleted = host.forget_deleted(self._metadata.state.topics)
                access = self._access.news(request.access_digest)
            remaining_s = deadline_s - self._environment.clock.monotonic()
            has_access = access is not None and access.records is not None
            quotas = self._division.news(request.incarnation, self._hosts.count)
            has_news = bool(
                assignments or is_removal_new or deleted or has_access or is_new_share
            )
            if has_news or remaining_s <= 0:
                break
            await host.changed.wait(remaining_s)
            # Shares change with each report: those that the controller has just given count.
            is_new_share = self._division.news(request.incarnation, self._hosts.count) != quotas
        host.heard_s = self._listening.now_s()
        host.told_to_open.update((each.topic_id, each.partition) for each in assignments)
        if is_held:
            host.told_to_close.update(host.statuses.keys() & removed)
        if self._metadata.trouble is not None:
            raise StorageError(
                f"Broker {self._broker} cannot follow the metadata: {self._metadata.trouble}"
            )
        return messages.ReplicaHostHeartbeatResponse(
            max(version, request.version),
            assignments,
            removed,
            object_server=None if self._objects is None else self._objects.endpoint,
            remote_halt=None if self._objects is None else self._objects.halt,
            remote_backlog_bytes=self._hosts.remote_backlog_bytes,
            deleted=deleted,
            access=access,
            quota_part=quotas.part,
            quota_shares=quotas.shares,
        )

    def _note_all(self, host: ReplicaProcess, statuses: Sequence[messages.ReplicaStatus]) -> bool:
        """Takes note of a process's report of all its replicas. Returns whether something is
        new."""
        told = {(status.topic_id, status.partition) for status in statuses}
        return self._note(host, statuses, host.statuses.keys() - told)

    def _note(
        self,
        host: ReplicaProcess,
        statuses: Sequence[messages.ReplicaStatus],
        closed: Iterable[TopicIdPartition],
    ) -> bool:
        """Takes note of what changed in a process. Returns whether something is new."""
        host.heard_s = self._listening.now_s()
        gone = sorted(key for key in closed if host.statuses.pop(key, None) is not None)
        if gone:
            host.told_to_close.difference_update(gone)
            self._look_at(gone)
            self._tidy_soon()
        is_new = bool(gone)
        for status in statuses:
            key = (status.topic_id, status.partition)
            known = host.statuses.get(key)
            host.statuses[key] = status
            is_open = status.flushed >= 0
            if known is None or (known.flushed >= 0) != is_open:
                self._look_at([key])
                is_new = True
            if status.failure is not None and key not in self._failed:
                logger.error("replica %s of broker %d: %s", key, self._broker, status.failure)
                self._failed[key] = status.failure
                if status.is_damaged:
                    self._damaged[key] = host.incarnation
                self._look_at([key])
                is_new = True
        return is_new

    # --- metadata against processes ---------------------------------------------------------

    async def _start_missing(
        self, keys: Sequence[TopicIdPartition], unplaced: Sequence[TopicIdPartition]
    ) -> list[TopicIdPartition]:
        """Starts those of the replicas that are missing, as far as they may be started now. Returns
        those that were missing. Processes may still have the replicas in `unplaced`."""
        startable: dict[TopicIdPartition, str] = {}
        now_s = self._environment.clock.monotonic()
        nodes = {
            number: broker.registration.node_id
            for number, broker in self._metadata.state.brokers.items()
            if broker.live
        }
        neighbours = sum(node == nodes.get(self._broker) for node in nodes.values())
        starts_max = max(1, STARTS_AT_ONCE_PER_NODE // max(1, neighbours))
        # A process may yet make the directory of a deleted topic's partition, and that topic may
        # have had the name of one that is to be started.
        topics = self._metadata.state.topics
        ending = {number for topic_id, number in unplaced if topic_id not in topics}
        missing = [key for key in keys if self._is_missing(key)]
        due = [
            key
            for key in missing
            if key[1] not in ending and self._hosts.may_start(key, now_s)
        ]
        for first in range(0, len(due), LOOKED_AT_ONCE_MAX):
            users = await self._users_of(due[first : first + LOOKED_AT_ONCE_MAX])
            for key, user in users.items():
                placed = self._placed.find(key)
                # Some may have been removed meanwhile.
                if placed is not None and self._is_free(key, now_s, user):
                    startable[key] = f"{placed[0].name}-{key[1]}"
        self._hosts.assign(
            {key: name for key, name in startable.items() if self._is_missing(key)}
        )
        self._hosts.start_waiting(starts_max)
        return missing

    def _is_missing(self, key: TopicIdPartition) -> bool:
        """Returns whether a replica that is placed here has no process, and should have one."""
        is_wanted = self._placed.find(key) is not None and key not in self._failed
        return is_wanted and not self._hosts.is_hosted(key)

    async def _users_of(
        self, keys: Sequence[TopicIdPartition]
    ) -> dict[TopicIdPartition, DirectoryUser]:
        """Looks at the directories of replicas, in a thread: beside the syncs of thousands of logs
        a disk may take long for each answer."""
        if not keys:
            return {}
        disk = self._environment.disk
        paths = {
            key: self._directory.partition_path(placed[0].name, key[1])
            for key in keys
            if (placed := self._placed.find(key)) is not None
        }

        def look() -> dict[TopicIdPartition, DirectoryUser]:
            return {
                key: (
                    DataDirectory.partition_holder(disk, path),
                    DataDirectory.partition_topic_id(disk, path),
                )
                for key, path in paths.items()
            }

        async with self._looks:
            return await self._environment.threads.run(look)

    def _is_free(self, key: TopicIdPartition, now_s: float, user: DirectoryUser) -> bool:
        """Returns whether no process holds the partition's directory. A process that an earlier
        broker process started has one session to present itself, then it is killed."""
        placed = self._placed.find(key)
        assert placed is not None
        path = self._directory.partition_path(placed[0].name, key[1])
        holder, owner = user
        if holder is None:
            if owner is None or owner == key[0]:
                return True
            if owner in self._metadata.state.topics or self._hosts.is_hosted((owner, key[1])):
                return False
            if not self._placed.is_current:
                return False  # The owner may be newer than the topic that is placed here.
            self._put_away((owner, key[1]), path)  # A deleted topic had this name.
            return True
        if holder.incarnation in self._hosts:
            return False  # The process was told to let go, and does once its last flush ends.
        if now_s - self._started_s > self._config.session_timeout_ms / 1000:
            assert holder.start_time is not None, holder
            if self._hosts.kill_holder(key, holder.pid, holder.start_time, now_s):
                logger.warning("process %d held %s and was silent: killed", holder.pid, path)
        return False

    def _remove_unplaced(self, keys: Iterable[TopicIdPartition]) -> list[TopicIdPartition]:
        """Lets go of those of the replicas whose topics were deleted, or that were moved away.
        Returns those that processes may still have."""
        unplaced: list[TopicIdPartition] = []
        for key in keys:
            is_placed = self._placed.find(key) is not None
            for host in self._hosts.hosting(key):
                if is_placed and key not in host.let_go:
                    continue
                if host.may_have(key):
                    unplaced.append(key)
                    host.changed.notify()
                else:
                    self._hosts.take_away(host, key)
        for host in self._hosts:
            if not host.keys and host.process is not None:
                host.process.kill()
        return unplaced

    def _tidy(self, now_s: float) -> None:
        """Removes the files of partitions that are not here any more."""
        if now_s < self._tidy_from_s or not self._placed.is_current:
            return
        in_use = []
        for host in self._hosts:
            for key in host.keys:
                placed = self._placed.find(key)
                if placed is not None:
                    in_use.append((placed[0].name, key[1]))
        left: set[TopicIdPartition] = set()
        for meta, path in self._directory.partitions(except_for=in_use):
            key = (meta.topic_id, meta.partition)
            if self._placed.find(key) is not None or self._hosts.is_hosted(key):
                continue
            holder = DataDirectory.partition_holder(self._environment.disk, path)
            if holder is not None or not self._put_away(key, path):
                left.add(key)
        has_unfinished = self._remove_unfinished()
        self._forget_gone(left)
        is_tidy = not left and not has_unfinished
        self._tidy_from_s = now_s + (CHECK_INTERVAL_S if is_tidy else TIDY_INTERVAL_S)

    def _put_away(self, key: TopicIdPartition, path: str) -> bool:
        """Removes the directory of a partition that is not placed here, or puts it aside, as far as
        that is safe. Returns whether it did. Call it only once the metadata here are current."""
        if self._placed.may_remove(key):
            logger.info("broker %d removes %s, which is not placed here", self._broker, path)
            aside = self._directory.quarantine(path, to_remove=True)
            self._hosts.forget(key)
            self._environment.tasks.spawn(self._remove(aside), f"remove {aside}")
        elif key[0] not in self._metadata.state.topics:
            logger.warning("%s belongs to no topic of this cluster: put aside", path)
            self._directory.quarantine(path)
        else:
            return False
        return True

    def _forget_gone(self, left: set[TopicIdPartition]) -> None:
        """Forgets the replicas that are not here any more. Those in `left` still have files."""
        hosted = (key for host in self._hosts for key in host.keys)
        here = {*self._placed, *left, *hosted}
        self._placed.forget_all_but(here)
        for key in self._failed.keys() - here:
            del self._failed[key]
            self._hosts.forget(key)

    def _remove_unfinished(self) -> bool:
        """Removes unfinished directories of replicas that are no longer placed here: the disk was
        full, or their processes died. Returns whether processes still hold some."""
        has_more = False
        topics = self._metadata.state.topics
        keys = {*self._placed, *(key for host in self._hosts for key in host.keys)}
        in_use = [(topics[topic].name, number) for topic, number in keys if topic in topics]
        for path in self._directory.unfinished(except_for=in_use):
            if DataDirectory.partition_holder(self._environment.disk, path) is None:
                logger.info("broker %d removes %s, which holds no log", self._broker, path)
                aside = self._directory.quarantine(path, to_remove=True)
                self._environment.tasks.spawn(self._remove(aside), f"remove {aside}")
            else:
                has_more = True
        return has_more

    async def _remove(self, path: str) -> None:
        try:
            await self._environment.threads.run(self._environment.disk.remove_tree, path)
        except OSError as error:  # The next start tries again.
            logger.warning("%s could not be removed: %s", path, error)

    # --- processes against metadata ---------------------------------------------------------

    async def _report(self, keys: Sequence[TopicIdPartition]) -> Sequence[TopicIdPartition]:
        """Reports to the controller what the metadata does not show yet of these replicas. Returns
        those that there was something to report of, or will be."""
        if not self._placed.is_current:
            return ()  # The record that says that it is current has all of them looked at.
        register: list[messages.ReplicaRegistration] = []
        failed: list[tuple[str, int, str]] = []
        told: list[TopicIdPartition] = []
        users = await self._users_of([key for key in keys if self._is_of_unknown_process(key)])
        for key in keys:
            placed = self._placed.find(key)
            if placed is None:
                continue
            partition = placed[1]
            known = partition.processes.get(self._broker)
            host = self._hosts.serving(key)
            status = None if host is None else host.statuses[key]
            if known is not None and known.incarnation not in self._hosts:
                told.append(key)  # Its process has ended, or is still to present itself.
            if known is not None and self._is_gone(key, known.incarnation, users.get(key)):
                failed.append((*key, known.incarnation))
            if (
                host is not None
                and host.endpoint is not None
                and status is not None
                and status.failure is None
                and status.flushed >= 0
                and (known is None or known.incarnation != host.incarnation)
            ):
                register.append(
                    host.registration(host.endpoint, status, partition.value.partition_epoch)
                )
        if failed:
            await self._tell(
                messages.ReplicasFailed(
                    self._broker, self._incarnation, failed, "the process or its disk failed"
                )
            )
        if register:
            await self._tell(
                messages.RegisterReplicas(self._broker, self._incarnation, register)
            )
        told += [(topic_id, number) for topic_id, number, _ in failed]
        told += [(replica.topic_id, replica.partition) for replica in register]
        return told

    def _is_of_unknown_process(self, key: TopicIdPartition) -> bool:
        """Returns whether the process that is registered for a partition is none of those here."""
        placed = self._placed.find(key)
        known = None if placed is None else placed[1].processes.get(self._broker)
        return known is not None and known.incarnation not in self._hosts

    def _is_gone(
        self, key: TopicIdPartition, incarnation: str, user: DirectoryUser | None
    ) -> bool:
        """Returns whether a registered process is known to no longer serve this partition."""
        host = self._hosts.get(incarnation)
        if host is not None:
            return key in self._failed or key in host.let_go
        if user is None:
            return False  # It ended just now: the next round looks who holds the directory.
        if user[0] is None:
            return True
        # Another process holds the directory: one of this broker's, or one that is still to come.
        return self._hosts.is_hosted(key)

    async def _start_damaged_again(self) -> None:
        """Replaces a damaged log by a new copy from the others, if they have all of the log. If
        they may not have it, the replica starts again as it is: most of its log is sound, and what
        is damaged in the others' logs may be sound here."""
        now_s = self._environment.clock.monotonic()
        self._give_up_damaged(now_s)
        for key, incarnation in list(self._damaged.items()):
            host = self._hosts.get(incarnation)
            if host is not None and key in host.keys and key not in host.let_go:
                host.let_go.add(key)
                host.changed.notify()
            if self._hosts.is_hosted(key) or not self._hosts.may_start(key, now_s):
                continue
            # From now on no other server counts on that log: see `may_copy_again`.
            await self._tell(
                messages.ReplicasFailed(
                    self._broker, self._incarnation, [(*key, incarnation)], "its log is damaged"
                )
            )
            placed, disk = self._placed.find(key), self._environment.disk
            path = "" if placed is None else self._directory.partition_path(placed[0].name, key[1])
            if placed is not None and DataDirectory.partition_holder(disk, path) is not None:
                continue
            backoff_s = self._hosts.back_off(key, now_s)
            if placed is not None:
                if may_copy_again(*placed, self._broker) and (
                    DataDirectory.partition_topic_id(disk, path) in (None, key[0])
                ):
                    logger.warning("%s is damaged: it is copied again from its leader", path)
                    aside = self._directory.quarantine(path, to_remove=True)
                    self._environment.tasks.spawn(self._remove(aside), f"remove {aside}")
                else:
                    # The moment differs between brokers: if two let go at once, both would be
                    # refused.
                    spread = 2 + 2 * self._environment.random.random()
                    self._copy_again_from_s[key] = now_s + spread * backoff_s
            del self._damaged[key]
            self._failed.pop(key, None)
            self._look_at([key])

    def _give_up_damaged(self, now_s: float) -> None:
        """Gives up a log that is known to be damaged, but had to start again as it is, for a new
        copy as soon as the others have all of it. It may take long until a reader comes to that
        offset and finds the damage again."""
        for key, from_s in list(self._copy_again_from_s.items()):
            placed = self._placed.find(key)
            if placed is None or key in self._damaged:
                del self._copy_again_from_s[key]
            elif now_s >= from_s and have_others_all(*placed, self._broker):
                process = placed[1].processes.get(self._broker)
                if process is not None and process.incarnation in self._hosts:
                    del self._copy_again_from_s[key]
                    self._damaged[key] = process.incarnation
                    self._failed[key] = "its log is damaged"

    async def _tell(self, request: messages.AnyRequest) -> None:
        """Requests a change. Returns when the metadata here shows it. Raises RayqError."""
        answer = await self._ask_controller(request)
        is_shown = await self._metadata.changed.wait_until(
            lambda: self._metadata.version >= answer.version,
            self._config.session_timeout_ms / 1000,
        )
        if not is_shown:
            raise ControllerUnavailableError(
                f"Version {answer.version} of the metadata has not come yet."
            )

    # --- stopping ---------------------------------------------------------------------------

    async def stop(self) -> list[messages.ReplicaRegistration]:
        """Stops every replica process and returns where each log ended."""
        self._is_stopping = True
        self._wake.notify()
        return await self._hosts.stop()
