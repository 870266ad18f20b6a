"""Bugs planted into the real code, one for each rule: proof that the simulation can fail.

A mutation patches production code for as long as `planted(name)` lasts; production knows nothing
of it. `python -m proving.simulation --mutation NAME 0:200` looks for the first seed that
finds it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

import proving.simulation.mutations_access  # registers its bugs
import proving.simulation.mutations_groups  # registers its bugs
import proving.simulation.mutations_metadata  # registers its bugs
import proving.simulation.mutations_moves  # registers its bugs
import proving.simulation.mutations_overload  # registers its bugs
import proving.simulation.mutations_queues  # registers its bugs
import proving.simulation.mutations_sharing  # registers its bugs
import proving.simulation.mutations_tiered  # registers its bugs
import proving.simulation.mutations_transactions  # registers its bugs
import proving.simulation.mutations_trimming  # noqa: F401 - and of what removes records
from proving.simulation.patches import Patch
from proving.simulation.planting import MUTATIONS, plants
from rayq import messages
from rayq.actors.controller.controller_host import ControllerHost
from rayq.actors.metadata.metadata_keeper import MetadataKeeper
from rayq.actors.metadata.quorum import Quorum
from rayq.actors.replica.flush_lock import FlushLock
from rayq.actors.replica.follower import Follower
from rayq.actors.replica.leader import Leader
from rayq.actors.replica.leader_followers import LeaderFollowers
from rayq.actors.replica.leader_reads import LeaderReads
from rayq.client import metadata as client_metadata
from rayq.client.metadata import MetadataCache
from rayq.client.producing import flight
from rayq.client.producing.flight import Flight
from rayq.core.cluster import broker_changes, election
from rayq.core.partition.state import PartitionState
from rayq.storage import data_directory, recovery, segment
from rayq.storage.appending import is_full
from rayq.storage.batch import read_header
from rayq.storage.data_directory import DataDirectory
from rayq.storage.log import Log
from rayq.storage.metadata_log import MetadataLog
from rayq.storage.plans import FlushPlan
from rayq.storage.producer_state import ProducerState

__all__ = ["MUTATIONS"]

EVERYTHING = 1 << 62


# --- who may lead ---------------------------------------------------------------------------------


@plants("1", "after a full stop the leader that is elected continues in the old epoch")
def epoch_kept_over_restart() -> list[Patch]:
    settle = election.settle

    def mutated(value: Any, live: Any, **options: Any) -> Any:
        after = settle(value, live, **options)
        if after is None or (value.leader is not None and after.leader is not None):
            return after
        return msgspec.structs.replace(after, leader_epoch=max(value.leader_epoch, 1))

    return [(election, "settle", mutated)]


@plants("2", "a broker's replicas are trusted whatever disk they come back with")
def empty_disk_trusted() -> list[Patch]:
    def same(member: Any, live: Any) -> bool:
        return member.broker in live

    readmit = election.readmit

    def mutated(value: Any, process: Any) -> Any:
        def renewed(member: Any) -> Any:
            return election.as_member(process) if member.broker == process.broker else member

        value = readmit(value, process)
        return msgspec.structs.replace(
            value,
            isr=tuple(renewed(member) for member in value.isr),
            elr=tuple(renewed(member) for member in value.elr),
        )

    return [
        (election, "is_same_process", same),
        (election, "is_same_disk", same),
        (election, "readmit", mutated),
        (broker_changes._BrokerDraft, "lose", lambda self, topic_id, partition, broker: None),
    ]


@plants("3", "brokers act on metadata before it is committed")
def uncommitted_metadata_applied() -> list[Patch]:
    append = MetadataKeeper.append

    async def mutated(self: Any, request: Any, payload: Any) -> Any:
        request = msgspec.structs.replace(request, commit_index=EVERYTHING)
        return await append(self, request, payload)

    return [(MetadataKeeper, "append", mutated)]


@plants("3", "one voter is enough to commit metadata")
def metadata_committed_by_one() -> list[Patch]:
    def mutated(self: Any) -> None:
        held = max(0 if peer is None else peer.match_index for peer in self._voting_peers())
        if held >= self._epoch_index > 0 and held > self.commit_index:
            self.commit_index = min(held, self.last_index)
            self._committed.notify()
            for peer in self._peers.values():
                peer.wake.notify()

    return [(Quorum, "_advance", mutated)]


@plants("3, 5", "voters take records from a controller that was replaced")
def old_controller_writes() -> list[Patch]:
    async def accept(self: Any, epoch: int) -> None:
        if epoch > self._log.promised_epoch:
            await self._write(lambda log: log.promise(epoch))

    return [(MetadataKeeper, "_accept_epoch", accept)]


@plants("3", "a new controller takes over the shortest log of its majority")
def shortest_log_adopted() -> list[Patch]:
    ask, adopt = Quorum._ask, Quorum._adopt
    shortest: dict[Any, Any] = {}

    async def remember(self: Any, endpoints: Any, **options: Any) -> Any:
        found = await ask(self, endpoints, **options)
        if found:
            shortest[self] = min(found, key=lambda item: item[0].last_index)[1]
        return found

    async def mutated(self: Any, at: Any) -> None:
        await adopt(self, shortest[self])

    return [(Quorum, "_ask", remember), (Quorum, "_adopt", mutated)]


@plants("3", "a voter forgets its promise when it stops")
def promise_not_written() -> list[Patch]:
    def promise(self: Any, epoch: int) -> None:
        self._promised_epoch = max(self._promised_epoch, epoch)

    return [(MetadataLog, "promise", promise), (ControllerHost, "_patience_s", lambda self: 0.3)]


@plants("2", "any live replica is elected when no member is left, and nobody hears of it")
def election_outside_the_isr() -> list[Patch]:
    settle = election.settle

    def mutated(value: Any, live: Any, *, min_insync: int, unclean: bool) -> Any:
        after = settle(value, live, min_insync=min_insync, unclean=True)
        if after is None:
            return None
        return msgspec.structs.replace(after, last_unclean_epoch=value.last_unclean_epoch)

    return [(election, "settle", mutated)]


# --- replication ----------------------------------------------------------------------------------


@plants("6", "a follower joins the in-sync set however far behind it is")
def isr_joined_at_a_stale_high_watermark() -> list[Patch]:
    def proposal(self: Any, now_s: float) -> Any:
        if self._in_flight or self.partition_epoch < 0:
            return None
        wanted = [(self.broker, self.incarnation)]
        wanted += [
            (broker, follower.incarnation)
            for broker, follower in self._followers.items()
            if follower.is_heard and now_s - follower.last_fetch_s < self.lag_time_max_s
        ]
        proposed = tuple(sorted(wanted))
        if proposed == self.isr and not self.undecided:
            return None
        self._in_flight = True
        return proposed

    return [(PartitionState, "proposal", proposal)]


@plants("6", "the high watermark moves while too few replicas are in sync")
def high_watermark_moves_below_min_isr() -> list[Patch]:
    advance = PartitionState._advance

    def mutated(self: Any) -> None:
        self.min_insync, before = 1, self.min_insync
        advance(self)
        self.min_insync = before

    return [
        (PartitionState, "_advance", mutated),
        (PartitionState, "is_under_min_isr", property(lambda self: False)),
    ]


@plants("6", "the high watermark waits for the leader alone")
def high_watermark_without_followers() -> list[Patch]:
    def advance(self: Any) -> None:
        if len(self.isr) >= self.min_insync:
            self.high_watermark = max(self.high_watermark, self.flushed_offset)

    return [(PartitionState, "_advance", advance)]


@plants("6", "a proposal whose answer is lost is forgotten")
def undecided_proposal_forgotten() -> list[Patch]:
    def unknown(self: Any, proposed: Any, partition_epoch: int) -> None:
        self._in_flight = False
        if proposed in self.undecided:
            self.undecided.remove(proposed)
        self._advance()

    return [(PartitionState, "proposal_unknown", unknown)]


@plants("7", "a truncation does not wait for the flush that runs, whose result then counts")
def flush_result_from_before_a_truncation() -> list[Patch]:
    truncate, apply_flush = Follower._truncate, Log.apply_flush

    async def mutated(self: Any, epoch: int | None, end_offset: int) -> None:
        held = self._replica_log.flush_lock
        self._replica_log.flush_lock = FlushLock(lambda: None)
        try:
            await truncate(self, epoch, end_offset)
        finally:
            self._replica_log.flush_lock = held

    def count_anyway(self: Any, plan: FlushPlan, *, has_checkpoint: bool = True) -> bool:
        current = replace(plan, generation=self.generation)
        return apply_flush(self, current, has_checkpoint=has_checkpoint)

    return [(Follower, "_truncate", mutated), (Log, "apply_flush", count_anyway)]


@plants("7", "after a roll neither the old segment nor the directory is synced")
def closed_segment_not_synced() -> list[Patch]:
    run = FlushPlan.run

    def mutated(self: Any) -> None:
        run(replace(self, files=(), syncs_directory=False))

    return [(FlushPlan, "run", mutated)]


@plants("7", "replicas acknowledge the end of their log, flushed or not")
def end_acknowledged_instead_of_flushed() -> list[Patch]:
    return [(Log, "flushed_offset", property(lambda self: self._end))]


@plants("8", "a duplicate is answered at once, committed or not")
def duplicate_answered_at_once() -> list[Patch]:
    produce = Leader.produce

    def mutated(self: Any, request: Any, payload: Any, **options: Any) -> Any:
        log = self._replica_log.log
        duplicate = log.producers.check(read_header(payload))
        if duplicate is None:
            return produce(self, request, payload, **options)
        return messages.ProduceResponse(
            duplicate.base_offset, duplicate.append_time_ms, log.start_offset
        )

    return [(Leader, "produce", mutated)]


@plants("8", "a leader that is deposed acknowledges what still waits")
def waiters_outlive_the_epoch() -> list[Patch]:
    end = Leader.end

    def mutated(self: Any, reason: str) -> None:
        self._awaiting_commit.reached(EVERYTHING)
        end(self, reason)

    return [(Leader, "end", mutated)]


@plants("8", "a batch that comes again is appended again")
def duplicates_not_recognised() -> list[Patch]:
    return [(ProducerState, "check", lambda self, header: None)]


@plants("8, 19", "recovery forgets the producers, and unknown ones may begin anywhere")
def producers_forgotten_in_recovery() -> list[Patch]:
    check = ProducerState.check

    def mutated(self: Any, header: Any) -> Any:
        if header.producer_id not in self._producers:
            return None
        return check(self, header)

    def forget(*_: Any) -> ProducerState:
        return ProducerState()

    return [(ProducerState, "check", mutated), (recovery, "load_producers", forget)]


@plants("8", "a truncation leaves the producer state as it was")
def producers_kept_over_truncation() -> list[Patch]:
    truncate = Log._truncate

    def mutated(self: Any, offset: int) -> None:
        producers = self.producers
        truncate(self, offset)
        self.producers = producers

    return [(Log, "_truncate", mutated)]


@plants("9", "a follower cuts its log at its high watermark")
def truncation_to_the_high_watermark() -> list[Patch]:
    fetch = Follower._fetch

    async def mutated(self: Any) -> None:
        log = self._replica_log
        if not getattr(self, "_mutation_cut", False):
            self._mutation_cut = True
            async with log.flush_lock:
                log.log.truncate(max(log.high_watermark, log.log.start_offset))
        await fetch(self)

    return [(Follower, "_fetch", mutated)]


@plants("9", "a leader compares ends, not epochs")
def divergence_by_offset_only() -> list[Patch]:
    check = LeaderFollowers._check_follower

    def mutated(self: Any, leader: Any, log: Any, request: Any) -> Any:
        if request.offset <= log.end_offset:
            request = msgspec.structs.replace(request, last_epoch=None)
        return check(self, leader, log, request)

    return [(LeaderFollowers, "_check_follower", mutated)]


@plants("9", "a follower that diverges drops its last epoch, committed records too")
def committed_records_cut() -> list[Patch]:
    truncate = Follower._truncate

    async def mutated(self: Any, epoch: int | None, end_offset: int) -> None:
        log = self._replica_log.log
        self._assignment = msgspec.structs.replace(self._assignment, last_unclean_epoch=1 << 30)
        start = log.start_offset if log.last_epoch is None else log.epochs.start_of(log.last_epoch)
        await truncate(self, epoch, min(end_offset, start or 0))

    return [(Follower, "_truncate", mutated)]


@plants("10", "readers get what is not committed")
def fetch_above_the_high_watermark() -> list[Patch]:
    fetch = LeaderReads.fetch

    async def mutated(self: Any, request: Any, room: Any, throttle: Any = None) -> Any:
        self._check()
        log = self._replica_log
        if log.high_watermark <= request.offset < log.log.end_offset:
            data, next_offset = await log.read(
                request.offset, log.log.end_offset, request.bytes_max
            )
            return messages.FetchResponse(next_offset, log.log.start_offset, 0, next_offset), data
        return await fetch(self, request, room, throttle)

    return [(LeaderReads, "fetch", mutated)]


@plants("10", "a new leader says where the log ends before it knows")
def end_told_before_it_is_known() -> list[Patch]:
    return [(PartitionState, "may_serve", property(lambda self: True))]


# --- the log on disk ------------------------------------------------------------------------------


@plants("11", "a flush reports success without fdatasync")
def nothing_is_synced() -> list[Patch]:
    def run(self: Any) -> None:
        if self.checkpoint is not None:
            self.checkpoint.run(self.disk, self.directory)

    return [(FlushPlan, "run", run)]


@plants("11", "recovery takes batches with a wrong CRC")
def body_crc_skipped() -> list[Patch]:
    return [(segment, "check_body", lambda buffer, position, header: None)]


@plants("11", "a sync that failed is tried again, and believed")
def failed_sync_tried_again() -> list[Patch]:
    run = FlushPlan.run

    def mutated(self: Any) -> bool:
        try:
            return run(self)
        except OSError:
            return run(self)

    return [(FlushPlan, "run", mutated)]


@plants("11", "recovery trusts a page cache that a failed sync left behind")
def page_cache_trusted_in_recovery() -> list[Patch]:
    return [(recovery, "_write_again", lambda file, start, end: None)]


@plants("12", "a directory's lock keeps nobody out")
def lock_ignored() -> list[Patch]:
    return [
        (data_directory, "_lock", lambda path, file, holder: data_directory._sign(file, holder)),
        (DataDirectory, "partition_holder", staticmethod(lambda disk, path: None)),
    ]


@plants("18", "a short write counts as a whole one")
def short_write_believed() -> list[Patch]:
    def write(self: Any, data: Any, position: int) -> None:
        try:
            self._segments.active.file.pwrite(data, position)
        except OSError as error:
            if is_full(error):
                raise self._room.refusal(str(error)) from error
            raise self._fail("write", error) from error

    return [(Log, "_write", write)]


@plants("17", "clients take older metadata and older leader epochs")
def older_metadata_taken() -> list[Patch]:
    return [
        (MetadataCache, "is_acceptable", lambda self, response: True),
        (client_metadata, "_newest", lambda known, answered: answered),
    ]


# --- producers ------------------------------------------------------------------------------------


@plants("19", "batches in doubt are numbered again")
def batch_in_doubt_numbered_again() -> list[Patch]:
    start = Flight._start_new_epoch

    def mutated(self: Any) -> None:
        doubted = [inflight for inflight in self.waiting if inflight.in_doubt]
        for inflight in doubted:
            inflight.in_doubt = False
        start(self)
        for inflight in doubted:
            inflight.in_doubt = True

    return [(Flight, "_start_new_epoch", mutated)]


@plants("19", "a batch whose outcome is unknown is said to have failed")
def unknown_outcome_called_a_failure() -> list[Patch]:
    return [(flight, "_unknown", lambda name, error: error)]
