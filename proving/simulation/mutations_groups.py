"""Bugs planted into groups and compaction: see `mutations`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from proving.simulation.patches import Patch
from proving.simulation.planting import plants
from rayq.actors.coordinator_log import CoordinatorLog
from rayq.actors.groups.group_coordinator import GroupCoordinator
from rayq.actors.replica import compactor
from rayq.actors.replica.leader_followers import LeaderFollowers
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.client.consuming.group_member import GroupMember
from rayq.core.groups import changes as group_changes
from rayq.core.groups import offsets as group_offsets
from rayq.core.groups.draft import GroupDraft
from rayq.core.groups.records import NOTHING
from rayq.core.groups.state import GroupState
from rayq.storage import checked_file, cleaner, log, swap
from rayq.storage.clean_state import CleanState

GROUPS = "groups"
EVERYTHING = 1 << 62

# --- groups ---------------------------------------------------------------------------------------


@plants("21", "a partition is assigned before its owner has given it up", GROUPS)
def assigned_before_it_was_given_up() -> list[Patch]:
    reconcile = GroupDraft.reconcile

    def mutated(self: Any) -> None:
        reconcile(self)
        for member, info in list(self.members.items()):
            if info.revoking:
                self.put(member, revoking=NOTHING)
        reconcile(self)

    return [(GroupDraft, "reconcile", mutated)]


@plants("21", "a member's heartbeats leave out what it still reads", GROUPS)
def held_partitions_not_listed() -> list[Patch]:
    heartbeat = GroupMember._heartbeat

    def mutated(self: Any, *where: Any) -> Any:
        request = heartbeat(self, *where)
        granted = [(of, place.partition) for place, of in self.state.grant.partitions.items()]
        return msgspec.structs.replace(request, owned=granted)

    return [(GroupMember, "_heartbeat", mutated)]


@plants("21", "commits are accepted of whoever sends them", GROUPS)
def commit_of_a_lost_partition_accepted() -> list[Patch]:
    def commit(state: Any, request: Any, times: Any) -> Any:
        records = group_offsets._set(state, request.group, request.offsets, times.now_ms)
        return group_offsets.answered(records, [])

    return [(group_offsets, "commit", commit)]


@plants("20", "a coordinator answers before its decision is committed", GROUPS)
def answered_before_it_is_committed() -> list[Patch]:
    async def until_committed(self: Any) -> None:
        self._check(None)

    return [(GroupCoordinator, "_until_committed", until_committed)]


@plants("20", "a coordinator serves before it has replayed its log", GROUPS)
def served_before_the_replay() -> list[Patch]:
    async def load(self: Any) -> None:
        self.state = GroupState(self._assignors)
        self._is_loaded = True
        self._ready.notify()
        self._topics_wanted.notify()

    return [(GroupCoordinator, "_load", load)]


@plants("20", "a new coordinator replays what is committed by then, not all there is", GROUPS)
def replay_ends_at_the_high_watermark() -> list[Patch]:
    replay = CoordinatorLog.replay

    class _Seen:
        """A log that seems to end at its high watermark."""

        def __init__(self, replica_log: Any) -> None:
            self._replica_log = replica_log
            self._end = replica_log.high_watermark

        @property
        def end_offset(self) -> int:
            return int(self._end)

        @property
        def log(self) -> Any:
            return self

        def __getattr__(self, name: str) -> Any:
            found = getattr(self._replica_log, name, None)
            return getattr(self._replica_log.log, name) if found is None else found

    async def mutated(self: Any, take: Any, *, only_last: bool = False) -> int:
        replica_log = self._replica_log
        self._replica_log = _Seen(replica_log)
        try:
            return await replay(self, take, only_last=only_last)
        finally:
            self._replica_log = replica_log

    return [(CoordinatorLog, "replay", mutated)]


@plants("21", "after a change of coordinator nobody's session is extended", GROUPS)
def sessions_end_with_their_coordinator() -> list[Patch]:
    end_sessions = group_changes.end_sessions

    def mutated(state: Any, name: str, *, now_s: float, **options: Any) -> Any:
        for _, group, member, info in state.all_members():
            if group.sessions[member].heard_s is None:
                group.sessions[member].heard_s = now_s - info.session_timeout_ms / 1000 - 1
        return end_sessions(state, name, now_s=now_s, **options)

    return [(group_changes, "end_sessions", mutated)]


# --- compaction -----------------------------------------------------------------------------------


@plants("14", "compaction passes the high watermark", GROUPS)
def cleaning_above_the_high_watermark() -> list[Patch]:
    cleanable = swap.cleanable

    def mutated(config: Any, segments: Sequence[Any], limit_offset: int, now_ms: int) -> Any:
        return cleanable(config, segments, EVERYTHING, now_ms)

    return [(log, "cleanable", mutated)]


@plants("14", "tombstones go with the next pass, however soon", GROUPS)
def tombstones_dropped_at_once() -> list[Patch]:
    return [(CleanState, "removable_below", lambda self, now_ms, retention_ms: self.clean_until)]


@plants("14", "a follower continues below the horizon of its leader", GROUPS)
def horizon_ignored() -> list[Patch]:
    return [(LeaderFollowers, "_is_below_horizon", lambda self, leader, log, request: False)]


@plants("14", "compacted segments are swapped in before they are on disk", GROUPS)
def compacted_segments_not_synced() -> list[Patch]:
    def finish(self: Any) -> int:
        length: int = self.write()
        self.segment.seal()
        for index in (self.segment.offsets, self.segment.times):
            write = index.write()
            checked_file.write_all(write.file, write.data, write.position)
            length += len(write.data)
        self.segment.release()
        return length

    return [(cleaner._Output, "finish", finish)]


@plants("14", "a follower remembers in memory alone how far its leader has compacted", GROUPS)
def cleaned_offset_not_written() -> list[Patch]:
    async def learn(self: Any, offset: int, cleaned_offset: int, horizon: int) -> None:
        state = self.log.plan_learning(offset, cleaned_offset, horizon)
        if state is not None:
            self.log.learned(state)

    return [(ReplicaLog, "learn", learn)]


@plants("14", "a pass that its memory cut short says that it went through", GROUPS)
def map_covers_less_than_it_says() -> list[Patch]:
    clean = cleaner.clean

    def mutated(disk: Any, job: Any) -> Any:
        result = yield from clean(disk, job)
        end = max(group[-1].next_offset for group in job.groups)
        return msgspec.structs.replace(result, end_offset=end)

    return [(compactor, "clean", mutated)]
