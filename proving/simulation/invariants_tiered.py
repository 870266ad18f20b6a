"""The invariants of records in the object store, beside the ordinary invariants.

- The remote pointer moves by one version at a time, by the leader of the present epoch; its
  manifest is in the store, and lists objects without hole or overlap up to its end, which is
  committed.
- Each object that it lists is in the store and holds, byte for byte, the batches that leaders have
  committed; its footer says what it holds.
- What it says of producers, transactions and epochs is what the batches below its end say.
- Nothing that the committed manifest names is ever deleted, nor what it named a moment ago, nor
  what it named of a topic that was deleted a moment ago. A wall clock that leaps shortens no delay
  by more than rule 16 says.
- A pin ends only where it was given up or has had its time, and retention passes none.
- A replica's log starts locally no later than the committed remote end, and a leader offers no
  offset that is neither on its disk nor in the store.
- The log starts where it may: it moves only by retention or delete_records.
- Who leads holds the last record that is stored. Where an unclean election may take back what is
  committed, its log has what is stored, byte for byte.
- A replica remembers all leader epochs from the log start on, however little of it is local.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from proving.simulation.clock_doubt import dated_s, most_aged_s
from proving.simulation.cluster import SimulatedCluster
from proving.simulation.derived_state import Derived, fault_of_manifest
from proving.simulation.disk import SimulatedDisk
from proving.simulation.invariants import InvariantError, Invariants
from proving.simulation.object_store import SimulatedObjectStore, StoreChange
from proving.simulation.owner import Owner
from proving.simulation.replica_changes import ReplicaChanges
from proving.simulation.server_view import (
    metadata_log_of,
    open_log_of,
    replica_log_of,
    replicas_of,
    role_of,
    segments_of,
)
from rayq.actors.replica.leader import Leader
from rayq.actors.replica.replica import Replica
from rayq.core.cluster.records import (
    MetadataRecord,
    RemoteGarbage,
    RemoteMoved,
    SnapshotPinned,
    SnapshotUnpinned,
    TopicDeleted,
    decode_entry,
)
from rayq.core.cluster.state import ClusterState
from rayq.errors import RayqError
from rayq.messages.remote_pointer import RemotePointer
from rayq.records import TopicIdPartition
from rayq.storage.batch import BatchHeader, decode_columns, read_header, split_batches
from rayq.storage.log import Log
from rayq.storage.remote.data_object import read_footer
from rayq.storage.remote.manifest import Manifest, RemoteObject, decode_manifest, page_names

SLACK_S = 0.2
"""A leader looks at its clock a moment before it writes a manifest, and a controller before its
record is committed."""


PIN_SLACK_S = 1.0
"""The time of a pin begins with its decision, which is committed later."""


@dataclass(slots=True)
class _History:
    """The manifests that the leaders of one partition have committed, and the objects in the
    store."""

    batches: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """By base offset: next offset, CRC and leader epoch. Of a topic that may lose what is
    committed: what was stored."""
    values: dict[int, bytes] = field(default_factory=dict)
    """By offset: the values that were stored, of such a topic."""
    epochs: list[tuple[int, int]] = field(default_factory=list)
    """`(leader epoch, start offset)`."""
    headers: list[BatchHeader] = field(default_factory=list)
    """Headers of the committed batches, in order."""
    derived: Derived = field(default_factory=Derived)
    """Producers and epochs by the headers below the end of the last manifest."""
    derived_from: int = 0
    """Number of these headers."""
    size_bytes: list[tuple[int, int]] = field(default_factory=list)
    """`(next offset, all bytes up to there)`."""
    end: int = 0
    checked: set[str] = field(default_factory=set)
    """The objects whose bytes were compared."""
    manifest: Manifest | None = None
    pointer: RemotePointer | None = None
    left_s: dict[str, float] = field(default_factory=dict)
    """Time at which the manifest was written that an object is not on: it may be deleted later than
    that."""


@dataclass(slots=True)
class _Seen:
    """A replica as it was at the last check."""

    generation: int = -1
    log_start: int = -1
    local_start: int = -1
    role: object = None
    pointer: RemotePointer | None = None


class TieredInvariants:
    """See the module. `watch` the ordinary invariants, which follow metadata and commits.

    `fault_of_start` says why the log of a replica, whose log start has moved, must not start there;
    None where it may."""

    def __init__(
        self,
        cluster: SimulatedCluster,
        fault_of_start: Callable[[Replica, Log], str | None],
    ) -> None:
        self._cluster = cluster
        self._changes = ReplicaChanges(cluster)
        self._store: SimulatedObjectStore = cluster.objects
        self._fault_of_start = fault_of_start
        self._invariants: Invariants | None = None
        self._histories: dict[TopicIdPartition, _History] = {}
        self._replicas: dict[Replica, _Seen] = {}
        self._changes_seen = 0
        self._objects_of: dict[str, TopicIdPartition] = {}
        """By name: of which partition's committed manifest it is, or was."""
        self._left_with_topic: dict[str, str] = {}
        """By name: the id of the deleted topic whose committed manifest named it."""
        self._topic_left_s: dict[str, float] = {}
        """By id: when the deletion of a topic was decided, as its record says. Its commit may come
        seconds later, as after a loss of power."""
        self._pinned_s: dict[str, tuple[float, float]] = {}
        """By pin: when it was renewed for the last time, and for how many seconds."""
        self.given_up: set[str] = set()
        """The pins that somebody may have asked to end."""
        self.uploaded = 0
        """The number of objects that were committed."""

    def watch(self, invariants: Invariants) -> None:
        self._invariants = invariants
        on_record, on_committed = invariants.on_record, invariants.on_committed

        def record(state: ClusterState, metadata_record: MetadataRecord) -> None:
            if on_record is not None:
                on_record(state, metadata_record)
            self._check_record(state, metadata_record)

        def committed(replica: Replica, leader_epoch: int, batch: bytes) -> None:
            if on_committed is not None:
                on_committed(replica, leader_epoch, batch)
            self._committed(_key(replica), batch)

        invariants.on_record, invariants.on_committed = record, committed

    @property
    def state(self) -> ClusterState:
        """The newest committed metadata that any broker has."""
        assert self._invariants is not None
        return self._invariants.state

    def observe(self, owner: Owner) -> None:
        """Checks what the event of this owner may have changed. Raises `InvariantError`."""
        if self._changes_seen < len(self._store.changes):
            self._check_deletions()
        host = self._changes.host(owner)
        if host is None or not owner.alive:
            return
        for replica in replicas_of(host).values():
            log = open_log_of(replica)
            if log is not None:
                self._check_replica(replica, log)

    def bytes_between(self, key: TopicIdPartition, start: int, end: int) -> int:
        """The bytes of the committed batches that end above `start`, and at `end` or below."""
        sizes = self._histories[key].size_bytes if key in self._histories else []
        first = bisect_right(sizes, start, key=lambda item: item[0])
        last = bisect_right(sizes, end, key=lambda item: item[0])
        below = sizes[first - 1][1] if first else 0
        return sizes[last - 1][1] - below if last > first else 0

    def committed_end(self, key: TopicIdPartition) -> int:
        """The offset up to which leaders have committed."""
        return self._histories[key].end if key in self._histories else 0

    def named(self) -> set[str]:
        """All objects that committed metadata refers to."""
        found = set()
        for history in self._histories.values():
            if history.pointer is not None and history.manifest is not None:
                found |= _named(history.pointer, history.manifest)
        return found

    def check_ends(self) -> None:
        """At the end: what replicas know of epochs, once more."""
        for _, replica in self._cluster.live_replicas():
            log = open_log_of(replica)
            if log is not None:
                self._check_epochs(replica, log)

    # --- the metadata -----------------------------------------------------------------------------

    def _check_record(self, state: ClusterState, record: MetadataRecord) -> None:
        now_s = self._cluster.world.now_s
        if isinstance(record, TopicDeleted):
            for key in [history for history in self._histories if history[0] == record.topic_id]:
                history = self._histories.pop(key)
                if history.pointer is not None and history.manifest is not None:
                    names = _named(history.pointer, history.manifest)
                    self._left_with_topic |= dict.fromkeys(names, record.topic_id)
        elif isinstance(record, RemoteGarbage):
            # The controller may be on any host. A date fits one host: leaps are so large.
            hosts = [self._cluster.controller_host, *self._cluster.hosts]
            decided_s = min(dated_s(host, record.deleted_ms, now_s) for host in hosts)
            self._topic_left_s.setdefault(record.topic_id, decided_s)
        elif isinstance(record, RemoteMoved):
            self._check_move(state, record)
        elif isinstance(record, SnapshotPinned):
            self._pinned_s[record.pin_id] = now_s, record.ttl_ms / 1000
        elif isinstance(record, SnapshotUnpinned) and record.pin_id in self._pinned_s:
            pinned_s, ttl_s = self._pinned_s.pop(record.pin_id)
            lasted_s = now_s - pinned_s
            if record.pin_id not in self.given_up and lasted_s < ttl_s - PIN_SLACK_S:
                raise InvariantError(
                    f"the pin {record.pin_id} ends {lasted_s:.3f} s after it was renewed, and was "
                    f"to last for {ttl_s} s"
                )

    def _check_move(self, state: ClusterState, record: RemoteMoved) -> None:
        key = record.topic_id, record.partition
        after = record.pointer
        partition = state.partition(*key)
        if partition is None:
            raise InvariantError(f"{record} is for a partition that does not exist")
        where = f"{state.topics[record.topic_id].name}-{record.partition}"
        history = self._histories.setdefault(key, _History())
        before = history.pointer = partition.remote
        if after.version != (0 if before is None else before.version) + 1:
            raise InvariantError(f"the remote pointer of {where} goes from {before} to {after}")
        if after.leader_epoch != partition.value.leader_epoch:
            raise InvariantError(
                f"{after} of {where} was committed in leader epoch {partition.value.leader_epoch}"
            )
        manifest = self.load(after, where)
        self._check_manifest(where, history, before, after, manifest)
        if history.manifest is not None and before is not None:
            gone = _live_names(history.manifest) - _live_names(manifest)
            if before.leader_epoch != after.leader_epoch:
                # A leader knows what it replaced itself. One that was deposed may still read this.
                gone.add(before.manifest)
            host = self._cluster.hosts[partition.value.leader or 0]
            at_s = dated_s(host, manifest.written_ms, self._cluster.world.now_s)
            history.left_s |= dict.fromkeys(gone, at_s)
        history.pointer, history.manifest = after, manifest
        for name in _named(after, manifest):
            self._objects_of[name] = key

    def load(self, pointer: RemotePointer, where: str) -> Manifest:
        """The manifest of a pointer, from the store. Raises `InvariantError`."""
        root = self._find(pointer.manifest, f"the manifest of {where}")
        pages = {}
        for name in page_names(root, pointer.manifest):
            pages[name] = self._find(name, f"a page of the manifest of {where}")
        try:
            return decode_manifest(root, pages, pointer.manifest)
        except RayqError as error:
            raise InvariantError(f"{pointer} of {where}: {error}") from error

    def _find(self, name: str, what: str) -> bytes:
        found = self._store.find(name)
        if found is None:
            raise InvariantError(f"{what} is not in the store: {name}")
        return found

    def _check_manifest(
        self,
        where: str,
        history: _History,
        before: RemotePointer | None,
        after: RemotePointer,
        manifest: Manifest,
    ) -> None:
        if manifest.pointer(after.manifest) != after:
            raise InvariantError(
                f"{where}: the pointer is {after}, its manifest says "
                f"{manifest.pointer(after.manifest)}"
            )
        if after.end > history.end and not self._may_lose(manifest.topic):
            raise InvariantError(
                f"{where}: objects up to {after.end}; only {history.end} is committed"
            )
        if before is not None and (after.end < before.end or after.start < before.start):
            raise InvariantError(f"the remote log of {where} goes back from {before} to {after}")
        next_offset = manifest.start
        for item in manifest.objects:
            if item.start != next_offset:
                raise InvariantError(f"{where}: {item} does not begin at {next_offset}")
            next_offset = item.end
            if item.name in history.checked:
                self._find(item.name, f"an object of {where}")
            else:
                self._check_object(where, history, item)
                history.checked.add(item.name)
                self.uploaded += 1
        if next_offset != after.end:
            raise InvariantError(f"{where}: objects up to {next_offset}, the pointer is {after}")
        if not self._may_lose(manifest.topic):
            self._check_derived(where, history, manifest)

    def _check_derived(self, where: str, history: _History, manifest: Manifest) -> None:
        """Checks the derived state, by which a replica goes that restarts its log from the
        manifest."""
        if history.derived.end > manifest.end:
            history.derived, history.derived_from = Derived(), 0
        for header in history.headers[history.derived_from :]:
            if header.next_offset > manifest.end:
                break
            history.derived.add(header)
            history.derived_from += 1
        leader = self._leader_of(manifest)
        fault = fault_of_manifest(manifest, history.derived, leader)
        if fault is not None:
            raise InvariantError(
                f"{where}: version {manifest.version} of its manifest, up to {manifest.end}, "
                f"{fault}"
            )

    def _leader_of(self, manifest: Manifest) -> Log | None:
        """The log of the leader of the manifest's epoch, while it lives."""
        for process, host in self._cluster.replica_hosts.items():
            replica = replicas_of(host).get((manifest.topic_id, manifest.partition))
            log = None if replica is None else open_log_of(replica)
            if process.alive and replica is not None and log is not None:
                role = role_of(replica)
                if isinstance(role, Leader) and role.leader_epoch == manifest.leader_epoch:
                    return log
        return None

    def _may_lose(self, topic: str) -> bool:
        assert self._invariants is not None
        return topic in self._invariants.unclean_topics

    def stored_values(self, topic: str) -> dict[int, bytes]:
        """By offset: all values of partition 0 that committed lists have had. For a topic that may
        lose what is committed."""
        return self._histories[self.state.topic_ids[topic], 0].values

    def _note_stored(self, where: str, history: _History, data: memoryview) -> None:
        """Checks that an object stays, and that nothing else is stored in its place."""
        for position, header in split_batches(data):
            batch = data[position : position + header.length]
            said = header.next_offset, zlib.crc32(batch), header.leader_epoch
            if history.batches.setdefault(header.base_offset, said) != said:
                raise InvariantError(
                    f"{where}: {said} is stored at {header.base_offset}, where "
                    f"{history.batches[header.base_offset]} was"
                )
            columns = decode_columns(data, position, header)
            history.values |= {
                offset: value or b""
                for offset, value in zip(columns.offsets, columns.values, strict=True)
            }

    def _check_object(self, where: str, history: _History, item: RemoteObject) -> None:
        data = self._find(item.name, f"an object of {where}")
        if self._may_lose(where.rpartition("-")[0]):
            self._note_stored(where, history, memoryview(data)[: item.data_bytes])
        next_offset, last_epoch = item.start, None
        batches = memoryview(data)[: item.data_bytes]
        for position, header in split_batches(batches):
            crc = zlib.crc32(batches[position : position + header.length])
            known = history.batches.get(header.base_offset)
            if header.base_offset != next_offset or known is None or known[:2] != (
                header.next_offset,
                crc,
            ):
                raise InvariantError(
                    f"{item.name} of {where} holds at {header.base_offset} a batch up to "
                    f"{header.next_offset} with CRC {crc:08x}; committed was {known}, the batch "
                    f"before ends at {next_offset}"
                )
            next_offset, last_epoch = header.next_offset, header.leader_epoch
        footer = read_footer(data[item.data_bytes :], item.name)
        said = (footer.start, footer.end, footer.end_epoch, footer.data_bytes, len(data))
        listed = (item.start, item.end, item.end_epoch, item.data_bytes, item.object_bytes)
        if said != listed or (next_offset, last_epoch) != (item.end, item.end_epoch):
            raise InvariantError(
                f"{item} of {where}: its footer says {said}, its batches end at {next_offset} in "
                f"epoch {last_epoch}"
            )

    # --- the store --------------------------------------------------------------------------------

    def _check_deletions(self) -> None:
        news = self._store.changes[self._changes_seen :]
        self._changes_seen += len(news)
        for change in news:
            if not change.is_deleted:
                continue
            left_s = self._topic_left_s.get(self._left_with_topic.get(change.name, ""))
            if left_s is not None:
                self._check_delay(change, left_s, "its topic was deleted")
            key = self._objects_of.get(change.name)
            if key is None:
                continue  # It was never committed.
            history = self._histories.get(key)
            if history is None or history.pointer is None or history.manifest is None:
                continue  # Its topic is gone.
            named = _named(history.pointer, history.manifest)
            if change.name in named and not self._left_just_now(key, change.name):
                raise InvariantError(
                    f"{change.by} deletes {change.name}, which the committed manifest names"
                )
            if change.name in history.left_s:
                self._check_delay(change, history.left_s[change.name], "it left the manifest")

    def _check_delay(self, change: StoreChange, since_s: float, since: str) -> None:
        """The host of whoever deletes has seen the delay pass, as far as it can know."""
        cluster, now_s = self._cluster, self._cluster.world.now_s
        delay_s = cluster.config.remote_delete_delay_ms / 1000
        host = next(host for host in cluster.hosts if host.name == change.host)
        aged_s = most_aged_s(cluster.hosts, host, since_s, now_s)
        if aged_s < delay_s - SLACK_S:
            raise InvariantError(
                f"{change.by} deletes {change.name}, {now_s - since_s:.3f} s after {since} (its "
                f"clock may say {aged_s:.3f} s); {delay_s} s is the delay"
            )

    def _left_just_now(self, key: TopicIdPartition, name: str) -> bool:
        """Returns whether a pointer is committed that no longer names it, and that no broker has
        applied yet: most of them have it in their logs. The controller's answer told the leader
        first."""
        brokers = [broker for process, broker in self._cluster.broker_of.items() if process.alive]
        holders: Counter[RemotePointer] = Counter()
        for broker in brokers:
            metadata = broker.metadata
            for _, _, data in metadata_log_of(metadata).read(metadata.version + 1, 1 << 30):
                holders.update(
                    record.pointer
                    for record in decode_entry(data)
                    if isinstance(record, RemoteMoved)
                    and (record.topic_id, record.partition) == key
                )
        held = [broker for broker, count in holders.items() if 2 * count > len(self._cluster.hosts)]
        if not held:
            return False
        newest = max(held, key=lambda record: record.version)
        manifest = self.load(newest, f"{key[0]}-{key[1]}")
        return name not in _named(newest, manifest)

    # --- replicas ---------------------------------------------------------------------------------

    def _committed(self, key: TopicIdPartition, batch: bytes) -> None:
        header = read_header(batch)
        history = self._histories.setdefault(key, _History())
        history.batches[header.base_offset] = (
            header.next_offset,
            zlib.crc32(batch),
            header.leader_epoch,
        )
        if not history.epochs or history.epochs[-1][0] != header.leader_epoch:
            history.epochs.append((header.leader_epoch, header.base_offset))
        size = history.size_bytes[-1][1] if history.size_bytes else 0
        history.size_bytes.append((header.next_offset, size + len(batch)))
        history.end = header.next_offset
        history.headers.append(header)

    def _check_replica(self, replica: Replica, log: Log) -> None:
        role = role_of(replica)
        seen = self._replicas.setdefault(replica, _Seen())
        pointer = replica.assignment.remote
        if (
            seen.generation == log.generation
            and seen.log_start == log.start_offset
            and seen.local_start == log.local_start_offset
            and seen.role is role
            and seen.pointer == pointer
        ):
            return
        partition = self.state.partition(*_key(replica))
        where = f"{replica.where} on broker {replica_log_of(replica).broker}"
        if log.local_start_offset < log.start_offset:
            raise InvariantError(
                f"{where}: local start {log.local_start_offset}, log start {log.start_offset}"
            )
        if log.local_start_offset > log.start_offset:
            remote = None if partition is None else partition.remote
            end = 0 if remote is None else remote.end
            if partition is not None and log.local_start_offset > end:
                raise InvariantError(
                    f"{where} is local from {log.local_start_offset} on, its log starts at "
                    f"{log.start_offset}; in the store is what is below {end}"
                )
        if isinstance(role, Leader) and seen.role is role:
            # Not in its first event: it may have just begun.
            self._check_offered(where, replica, log)
            self._check_leads(where, replica, log)
        if log.start_offset > seen.log_start:
            self._check_start(where, replica, log)
        if seen.generation != log.generation:
            self._check_epochs(replica, log)
        seen.generation, seen.role, seen.pointer = log.generation, role, pointer
        seen.log_start, seen.local_start = log.start_offset, log.local_start_offset

    def _check_offered(self, where: str, replica: Replica, log: Log) -> None:
        pointer = replica.assignment.remote
        if log.start_offset >= log.local_start_offset or pointer is None:
            return
        if log.start_offset < pointer.start:
            raise InvariantError(
                f"{where} leads, its log starts at {log.start_offset} and is local from "
                f"{log.local_start_offset} on; the store begins at {pointer.start}"
            )

    def _check_leads(self, where: str, replica: Replica, log: Log) -> None:
        """A leader continues from the last record in the store."""
        pointer = replica.assignment.remote
        if pointer is None or pointer.end_epoch is None or pointer.end <= log.start_offset:
            return
        epoch = log.epochs.epoch_of(pointer.end - 1)
        if log.end_offset < pointer.end or epoch != pointer.end_epoch:
            raise InvariantError(
                f"{where} leads, ends at {log.end_offset} and has epoch {epoch} at "
                f"{pointer.end - 1}; {pointer} is committed"
            )
        history = self._histories.get(_key(replica))
        if history is None or not self._may_lose(replica.assignment.topic):
            return
        disk = self._disk_of(replica)
        for segment in segments_of(log):
            content = disk.find_file(segment.path).current
            position = 0
            while position < segment.size:
                header = read_header(content, position)
                if header.base_offset >= pointer.end:
                    return
                crc = disk.checksum(segment.path, position, position + header.length)
                said = header.next_offset, crc, header.leader_epoch
                known = history.batches.get(header.base_offset)
                if header.base_offset >= log.local_start_offset and known != said:
                    raise InvariantError(
                        f"{where} leads with {said} at {header.base_offset}; {known} is stored"
                    )
                position += header.length

    def _disk_of(self, replica: Replica) -> SimulatedDisk:
        return self._cluster.hosts[replica_log_of(replica).broker].disk

    def _check_start(self, where: str, replica: Replica, log: Log) -> None:
        fault = self._fault_of_start(replica, log) if log.start_offset > 0 else None
        if fault is not None:
            raise InvariantError(
                f"the log of {where} starts at {log.start_offset} (local start "
                f"{log.local_start_offset}): {fault}"
            )

    def _check_epochs(self, replica: Replica, log: Log) -> None:
        history = self._histories.get(_key(replica))
        if history is None or replica.assignment.config.get("cleanup_policy") == "compact":
            return
        if self._may_lose(replica.assignment.topic):
            return
        # Above that it may have other records than were committed, and not know it yet.
        limit = min(replica_log_of(replica).high_watermark, history.end)
        expected = {
            (epoch, max(start, log.start_offset))
            for number, (epoch, start) in enumerate(history.epochs)
            if start < limit
            and (
                number + 1 == len(history.epochs)
                or history.epochs[number + 1][1] > log.start_offset
            )
        }
        known = {(epoch, max(start, log.start_offset)) for epoch, start in log.epochs.entries()}
        if not expected <= known:
            raise InvariantError(
                f"{replica.where} on broker {replica_log_of(replica).broker} starts at "
                f"{log.start_offset}, local from {log.local_start_offset}, and takes its epochs "
                f"for {sorted(known)}; they are {sorted(expected)}"
            )


def _named(pointer: RemotePointer, manifest: Manifest) -> set[str]:
    """Returns the names that a committed pointer refers to."""
    return {pointer.manifest} | _live_names(manifest)


def _live_names(manifest: Manifest) -> set[str]:
    """Returns the objects that a manifest needs: not those that it lists as removed."""
    return {item.name for item in manifest.objects} | {page.name for page in manifest.pages}


def _key(replica: Replica) -> TopicIdPartition:
    return replica.assignment.topic_id, replica.assignment.partition
