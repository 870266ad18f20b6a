"""Bugs planted into what keeps old records in the object store: see `mutations`."""

from __future__ import annotations

from typing import Any

import msgspec

from proving.simulation.patches import Patch
from proving.simulation.planting import plants
from rayq import messages
from rayq.actors.broker.remote_garbage import RemoteGarbageSweep
from rayq.actors.clock_watch import ClockWatch
from rayq.actors.controller.controller import Controller
from rayq.actors.remote import manifests, object_collector, remote_log, uploads
from rayq.actors.remote.leader_remote import LeaderRemote
from rayq.actors.remote.reads import RemoteReads
from rayq.actors.remote.remote_log import RemoteLog
from rayq.actors.remote.retention import RemoteRetention
from rayq.actors.remote.uploads import Uploads
from rayq.actors.replica import replica
from rayq.actors.replica.leader_followers import LeaderFollowers
from rayq.actors.replica.local_retention import LocalRetention
from rayq.core.cluster import remote_changes
from rayq.core.cluster.state import find_led_partition
from rayq.core.remote.retention import sweepable, upload_limit
from rayq.errors import RayqError, StalePartitionError
from rayq.storage import recovery
from rayq.storage.log import Log
from rayq.storage.remote import manifest

TIERED = "tiered"
TRANSACTIONS = "tiered-transactions"
EVERYTHING = 1 << 62


# --- what counts as stored ------------------------------------------------------------------------


@plants("35", "a deposed leader moves the remote pointer", TIERED)
def pointer_moved_by_any_leader() -> list[Patch]:
    def mutated(state: Any, request: Any) -> Any:
        known = state.partition(request.topic_id, request.partition)
        if known is None:
            return find_led_partition(state, request)
        return state.topics[request.topic_id], known

    return [(remote_changes, "find_led_partition", mutated)]


@plants("35", "what an unanswered commit named is deleted", TIERED)
def unknown_commit_cleaned_up() -> list[Patch]:
    async def mutated(self: Any, base: Any, pointer: Any, *, is_adopted: bool) -> None:
        request = messages.MoveRemote(
            topic_id=self._assignment.topic_id,
            partition=self._assignment.partition,
            broker=self._replica_log.broker,
            incarnation=self._replica_log.incarnation,
            leader_epoch=self.leader_epoch,
            pointer=pointer,
            is_adopted=is_adopted,
        )
        try:
            await self._ask_broker(request)
        except RayqError as error:
            await self.objects.ask(messages.DeleteObjects([pointer.manifest]))
            raise StalePartitionError("It failed.") from error
        self._move(pointer)

    return [(RemoteLog, "_move_pointer", mutated)]


@plants("36", "a manifest counts before its pages are stored", TIERED)
def pages_stored_later() -> list[Patch]:
    store_manifest = manifests.store_manifest

    async def mutated(objects: Any, manifest: Any, pages: Any, name: str) -> None:
        await store_manifest(objects, manifest, [], name)

    return [(remote_log, "store_manifest", mutated)]


@plants("36", "a manifest has the producers of the log's end, not of its own", TIERED)
def producers_of_the_logs_end() -> list[Patch]:
    def mutated(self: Any, offset: int) -> bytes:
        found: bytes = self.producers.snapshot()
        return found

    return [(Log, "producer_snapshot_at", mutated)]


@plants("36", "a later manifest has the producers of the first one", TIERED)
def producers_of_the_first_manifest() -> list[Patch]:
    at = Log.producer_snapshot_at

    def mutated(self: Any, offset: int) -> bytes:
        kept = getattr(self, "_first_producers", None)
        if kept is None:
            kept = self._first_producers = at(self, offset)
        return bytes(kept)

    return [(Log, "producer_snapshot_at", mutated)]


@plants("36", "a manifest has the last leader epoch only", TIERED)
def last_epoch_of_a_manifest() -> list[Patch]:
    return [(manifest, "_epochs_from", lambda epochs, offset: epochs[-1:])]


@plants("37", "records that are not committed yet go to the object store", TIERED)
def stored_above_the_high_watermark() -> list[Patch]:
    return [
        (uploads, "upload_limit", lambda segments, stable: upload_limit(segments, EVERYTHING))
    ]


@plants("37", "records of open transactions go to the object store", TRANSACTIONS)
def stored_above_the_last_stable_offset() -> list[Patch]:
    limit = Uploads.limit

    class Unstable:
        """A replica's log that takes whatever is committed for decided."""

        def __init__(self, replica_log: Any) -> None:
            self._replica_log = replica_log

        def __getattr__(self, name: str) -> Any:
            if name == "last_stable_offset":
                name = "high_watermark"
            return getattr(self._replica_log, name)

    def mutated(self: Any) -> Any:
        replica_log, self._replica_log = self._replica_log, Unstable(self._replica_log)
        try:
            return limit(self)
        finally:
            self._replica_log = replica_log

    return [(Uploads, "limit", mutated)]


# --- what leaves the disk -------------------------------------------------------------------------


@plants("38", "a leader drops what it has stored before that is committed", TIERED)
def dropped_before_the_commit() -> list[Patch]:
    store, tick = Uploads.store, LocalRetention.tick

    async def stored(self: Any) -> None:
        await store(self)
        if self.stored:
            self._replica_log._stored_end = self.stored[-1].end

    def mutated(self: Any, now_s: float, pointer: Any) -> None:
        end = getattr(self._replica_log, "_stored_end", 0)
        if pointer is not None and end > pointer.end:
            pointer = msgspec.structs.replace(pointer, end=end)
        tick(self, now_s, pointer)

    return [(Uploads, "store", stored), (LocalRetention, "tick", mutated)]


@plants("38", "after a restart the log begins where its first segment does", TIERED)
def log_start_at_the_local_start() -> list[Patch]:
    log_start = recovery._log_start

    def mutated(directory: str, bases: list[int], checkpoint: Any) -> int:
        return max(log_start(directory, bases, checkpoint), *bases[:1], 0)

    return [(recovery, "_log_start", mutated)]


@plants("38", "the leader epochs of records that are only in the store are forgotten", TIERED)
def epochs_cut_at_the_local_start() -> list[Patch]:
    drop_local = Log.drop_local

    def mutated(self: Any, offset: int) -> None:
        drop_local(self, offset)
        self.epochs.truncate_to_start(self._local_start)

    return [(Log, "drop_local", mutated)]


@plants("39", "a follower that starts over starts at the high watermark", TIERED)
def follower_begins_at_the_high_watermark() -> list[Patch]:
    snapshot = LeaderFollowers.snapshot

    def mutated(self: Any, *arguments: Any) -> Any:
        answer, payload = snapshot(self, *arguments)
        start = self._replica_log.high_watermark
        return msgspec.structs.replace(answer, local_start_offset=start), payload

    return [(LeaderFollowers, "snapshot", mutated)]


@plants("40", "a leader that lacks what is stored appends where its own log ends", TIERED)
def short_leader_leads() -> list[Patch]:
    return [(replica, "must_catch_up", lambda log, assignment: False)]


# --- what leaves the store ------------------------------------------------------------------------


@plants("41", "objects are deleted before a list without them is committed", TIERED)
def deleted_before_the_list() -> list[Patch]:
    change_list = LeaderRemote._change_list

    async def mutated(self: Any, clock_watch: Any, *, deletes: bool) -> None:
        manifest = await self.log.manifest()
        if manifest is not None:
            start = self._replica_log.log.persisted_log_start
            await self._collector._delete(
                [item.name for item in manifest.objects if item.end <= start]
            )
        await change_list(self, clock_watch, deletes=deletes)

    return [(LeaderRemote, "_change_list", mutated)]


@plants("41", "what leaves the list is deleted at once", TIERED)
def deleted_without_delay() -> list[Patch]:
    return [
        (object_collector, "due", lambda removed, now_ms, delay_ms: [name for name, _ in removed])
    ]


@plants("41", "what is on disk and in the store counts twice for retention", TIERED)
def stored_bytes_counted_twice() -> list[Patch]:
    bytes_above = RemoteRetention._bytes_above
    return [(RemoteRetention, "_bytes_above", lambda self, remote_end: bytes_above(self, 0))]


@plants("41", "retention does not look at pins", TIERED)
def pins_ignored() -> list[Patch]:
    return [(RemoteLog, "pinned_offset", None)]


@plants("41", "retention looks at pins before it loads the list, not after", TIERED)
def pins_read_before_the_list() -> list[Patch]:
    due_start = RemoteRetention._due_start

    async def mutated(self: Any, now_ms: int) -> Any:
        limit = self._limit_offset()
        self._limit_offset = lambda: limit
        try:
            return await due_start(self, now_ms)
        finally:
            del self._limit_offset

    return [(RemoteRetention, "_due_start", mutated)]


@plants("41", "a pin ends after half of its time", TIERED)
def pins_end_early() -> list[Patch]:
    unpin = Controller._unpin_expired

    def mutated(self: Any, now_s: float) -> None:
        before = dict(self._pinned_s)
        for pin_id, pin in self.state.pins.items():
            self._pinned_s.setdefault(pin_id, now_s)
            self._pinned_s[pin_id] -= pin.ttl_ms / 2000
        unpin(self, now_s)
        self._pinned_s |= before

    return [(Controller, "_unpin_expired", mutated)]


@plants("41", "a pin that is renewed ends by its first time", TIERED)
def renewed_pins_keep_their_time() -> list[Patch]:
    append = Controller._append

    def mutated(self: Any, *given: Any, **options: Any) -> Any:
        before = dict(self._pinned_s)
        index = append(self, *given, **options)
        self._pinned_s |= {pin: at_s for pin, at_s in before.items() if pin in self._pinned_s}
        return index

    return [(Controller, "_append", mutated)]


@plants("41", "what leaves the list is deleted by a wall clock that leaps", TIERED)
def deleted_by_a_leaping_clock() -> list[Patch]:
    delete_removed = object_collector.ObjectCollector.delete_removed

    async def mutated(self: Any, manifest: Any, now_ms: int) -> Any:
        return await delete_removed(self, manifest, self._environment.clock.wall_ms())

    return [(object_collector.ObjectCollector, "delete_removed", mutated)]


@plants("42", "what a deleted topic left is removed by a wall clock that leaps", TIERED)
def garbage_by_a_leaping_clock() -> list[Patch]:
    def mutated(self: Any) -> None:
        clock = self._environment.clock
        self._clock_watch = ClockWatch(clock)

    return [(RemoteGarbageSweep, "_look_at_clock", mutated)]


@plants("41", "a new leader offers what the committed list does not have any more", TIERED)
def log_start_not_raised() -> list[Patch]:
    return [(RemoteRetention, "raise_to_floor", lambda self: None)]


@plants("42", "a sweep takes objects of later leaders", TIERED)
def later_epochs_swept() -> list[Patch]:
    def mutated(listed: Any, **options: Any) -> Any:
        return sweepable(listed, **options | {"leader_epoch": EVERYTHING})

    return [(object_collector, "sweepable", mutated)]


@plants("42", "what a deleted topic left in the store stays there", TIERED)
def garbage_forgotten() -> list[Patch]:
    async def mutated(self: Any, garbage: Any, prefix: str) -> int:
        return 0

    return [(RemoteGarbageSweep, "_remove", mutated)]


# --- reading it -----------------------------------------------------------------------------------


@plants("44", "old records are read without the transactions that were aborted", TRANSACTIONS)
def aborted_transactions_not_told() -> list[Patch]:
    bring = RemoteReads.bring

    async def mutated(self: Any, offset: int, bytes_max: int) -> Any:
        return (await bring(self, offset, bytes_max))._replace(aborted=[])

    return [(RemoteReads, "bring", mutated)]
