"""The group coordinator: it serves the groups of one `__consumer_offsets` partition.

It is a `Coordinator`, and lives with the partition's leader. Its soft state is when each member was
last heard: after a start every member has a full session.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from rayq import messages
from rayq.actors.clock_watch import ClockWatch
from rayq.actors.coordinator import RETRY_S, Coordinator
from rayq.actors.groups.group_answers import committed_offsets, description, named, summaries
from rayq.actors.handlers import HandlerTable, answers, answers_peer
from rayq.actors.peers import Peers
from rayq.actors.replica.leader import Leader
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.actors.signal import Signal
from rayq.core.cluster.topic_changes import OFFSETS_TOPIC
from rayq.core.decision import Decision
from rayq.core.groups import changes as group_changes
from rayq.core.groups import offsets as group_offsets
from rayq.core.groups import transactions as group_transactions
from rayq.core.groups.assignors import load_assignors
from rayq.core.groups.changes import Beat
from rayq.core.groups.offsets import OffsetCommit
from rayq.core.groups.records import (
    GroupRecord,
    GroupValue,
    MemberRecord,
    MemberValue,
    Record,
    decode,
    encode,
    partition_of_group,
)
from rayq.core.groups.state import Group, GroupState, SubscribedTopic
from rayq.errors import InvalidRequestError, RayqError
from rayq.logs import log_event
from rayq.metrics import Sample
from rayq.wire.metadata_pages import all_pages
from rayq.wire.server import Peer

logger = logging.getLogger(__name__)

TICK_S = 0.1
"""Interval at which sessions are checked."""
TOPICS_WAIT_MS = 2_000
TOPICS_INTERVAL_S = 0.05
"""Minimum interval between two looks at the topics, however fast the metadata changes."""
TOPICS_TIMEOUT_S = 5.0
OFFSETS_CHECK_INTERVAL_S = 60.0
OFFSETS_PER_BATCH_MAX = 1000
ABORT_RETRY_S = 1.0

MemberKey = tuple[str, str]
"""`(group, member)`"""


class GroupCoordinator(Coordinator[Record]):
    """See the module."""

    subject = "groups"
    topic = OFFSETS_TOPIC

    def __init__(
        self,
        replica_log: ReplicaLog,
        leader: Leader,
        assignment: messages.PartitionAssignment,
        *,
        ask_broker: messages.Ask,
        metadata_version: int,
        clock_watch: ClockWatch,
        peers: Peers,
    ) -> None:
        """`ask_broker` sends a request to this node's broker, whose metadata was at
        `metadata_version` when this replica was told to lead. `peers` ask the coordinators of
        transactions."""
        super().__init__(replica_log, leader, assignment, encode=encode)
        self._ask_broker = ask_broker
        self._version = metadata_version
        self._clock_watch = clock_watch
        self._peers = peers
        self._aborts: set[group_transactions.Transaction] = set()
        """Transactions that are being aborted because their members are gone."""
        self._topic_id = assignment.topic_id
        self._partitions = assignment.partitions
        """Number of partitions of `__consumer_offsets`. 0: from an older broker; then the topics
        say it."""
        self._assignors = load_assignors(self._config.group_assignors)
        self.state = GroupState(self._assignors)
        """The decided state, committed or not."""
        self._has_topics = False
        self._held: dict[MemberKey, asyncio.Future[None]] = {}
        self._latest: dict[MemberKey, Beat] = {}
        """The newest pending heartbeat of each member: only that one is held."""
        self._connections: dict[MemberKey, asyncio.Future[None]] = {}
        self._watched: dict[asyncio.Future[None], dict[MemberKey, None]] = {}
        """The connections that are watched for their end, each with its members, which may all have
        left."""
        self._requests_waiting = 0
        self._topics_wanted = Signal()
        self._forget_source = self._environment.metrics.add_source(self._measure)
        self._spawn(self._watch_topics, f"topics for {self.where}")

    def _measure(self) -> list[Sample]:
        sample = self._environment.metrics.sample
        return [
            sample("rayq_consumergroup_members", len(group.members), group=name)
            for name, group in self.state.groups.items()
        ]

    def end(self, reason: str) -> None:
        """Ends this coordinator, as another process coordinates: the requests that wait are
        told."""
        self._forget_source()
        for group in self.state.groups:
            self._environment.metrics.forget(group=group)
        super().end(reason)

    # --- members ----------------------------------------------------------------------------

    @answers_peer(messages.GroupHeartbeat)
    async def heartbeat(
        self, peer: Peer, request: messages.GroupHeartbeat, _: memoryview
    ) -> messages.GroupHeartbeatResponse:
        """See `messages.GroupHeartbeat`."""
        await self._begin_for(request.group, is_write=True, needs_topics=True)
        if request.member_epoch < 0:
            return await self._leave(request)
        clock = self._environment.clock
        key = (request.group, request.member)
        beat = Beat(
            member=request.member,
            member_epoch=request.member_epoch,
            instance=request.instance,
            client=request.client,
            topics=tuple(request.topics),
            pattern=request.pattern,
            assignor=request.assignor,
            session_timeout_ms=request.session_timeout_ms,
            max_poll_interval_ms=request.max_poll_interval_ms,
            owned=frozenset(request.owned),
        )
        records = await self._decide(
            lambda: group_changes.heartbeat(
                self.state, request.group, beat, now_s=clock.monotonic(), now_ms=clock.wall_ms()
            )
        )
        self._append(records)
        self._watch(key, peer)
        self._latest[key] = beat
        self._release(key)
        try:
            return await self._hold(key, request, beat)
        finally:
            if self._latest.get(key) is beat:
                del self._latest[key]

    async def _hold(
        self, key: MemberKey, request: messages.GroupHeartbeat, beat: Beat
    ) -> messages.GroupHeartbeatResponse:
        """Answers when there is news for the member, or a newer heartbeat, or the time is up."""
        loop = asyncio.get_running_loop()
        wait_ms = min(request.wait_ms, request.session_timeout_ms // 2)
        deadline_s = loop.time() + wait_ms / 1000
        generation = self._log.generation
        value = self._member(key, request)
        while (
            self._latest.get(key) is beat
            and value.member_epoch == request.member_epoch
            and loop.time() < deadline_s
        ):
            held = self._held[key] = loop.create_future()
            timer = loop.call_at(deadline_s, _wake, held)
            try:
                await held
            finally:
                timer.cancel()
                if self._held.get(key) is held:
                    del self._held[key]
            self._check(generation)
            value = await self._decide(lambda: self._member(key, request))
        assigned = named(self.state, value.assigned)
        answer = messages.GroupHeartbeatResponse(value.member_epoch, assigned)
        await self._until_committed()
        return answer

    async def _leave(self, request: messages.GroupHeartbeat) -> messages.GroupHeartbeatResponse:
        key, clock = (request.group, request.member), self._environment.clock

        def decide() -> Decision[Record, messages.GroupHeartbeatResponse]:
            now_ms = clock.wall_ms()
            if request.member_epoch == messages.MEMBER_EPOCH_LEAVE_STATIC:
                records = group_changes.leave_static(
                    self.state, *key, now_s=clock.monotonic(), now_ms=now_ms
                )
            else:
                records = group_changes.leave(self.state, *key, request.reason, now_ms=now_ms)
            return Decision(records, left)

        def left() -> messages.GroupHeartbeatResponse:
            self._release(key)
            return messages.GroupHeartbeatResponse(0, [])

        return await self._answer(decide)

    def _member(self, key: MemberKey, request: messages.GroupHeartbeat) -> MemberValue:
        return group_changes.find_member(self.state, *key, request.instance)

    def _release(self, key: MemberKey) -> None:
        """Makes the member's held heartbeat check again whether to answer."""
        held = self._held.pop(key, None)
        if held is not None:
            _wake(held)

    def _watch(self, key: MemberKey, peer: Peer) -> None:
        """Watches for the end of the connection of the member's last heartbeat."""
        self._unwatch(key)
        self._connections[key] = peer.closed
        if peer.closed not in self._watched:
            self._watched[peer.closed] = {}
            peer.closed.add_done_callback(self._disconnected)
        self._watched[peer.closed][key] = None

    def _unwatch(self, key: MemberKey) -> None:
        connection = self._connections.pop(key, None)
        if connection is not None:
            self._watched[connection].pop(key, None)

    def _disconnected(self, closed: asyncio.Future[None]) -> None:
        now_s = self._environment.clock.monotonic()
        for key in self._watched.pop(closed, ()):
            del self._connections[key]
            group_changes.disconnected(self.state, *key, now_s=now_s)

    # --- offsets ----------------------------------------------------------------------------

    @answers(messages.CommitOffsets)
    async def commit(self, request: messages.CommitOffsets) -> messages.CommitOffsetsResponse:
        """See `messages.CommitOffsets`."""
        await self._begin_for(request.group, is_write=True)
        transaction = request.transaction
        if transaction is not None and not group_transactions.has_joined(self.state, *transaction):
            await self._peers.join(*transaction, self._topic_id, self._partition)
            # Everything is checked after the join: the member may have lost its partitions
            # meanwhile.
            await self._begin_for(request.group, is_write=True)
        offsets = [OffsetCommit(*offset) for offset in request.offsets]
        now_ms = self._environment.clock.wall_ms()

        def decide() -> Decision[Record, messages.CommitOffsetsResponse]:
            of_member = (request.member, request.member_epoch, request.sequence)
            if transaction is None:
                records, refused = group_offsets.commit(
                    self.state, request.group, *of_member, offsets, now_ms=now_ms
                )
            else:
                records, refused = group_transactions.commit(
                    self.state, request.group, transaction, *of_member, offsets, now_ms=now_ms
                )
            return Decision(records, lambda: messages.CommitOffsetsResponse(refused))

        return await self._answer(decide)

    @answers(messages.FetchCommitted)
    async def fetch_committed(
        self, request: messages.FetchCommitted
    ) -> messages.FetchCommittedResponse:
        """See `messages.FetchCommitted`."""
        await self._begin_for(request.group, is_write=True)

        def decide() -> Decision[Record, messages.FetchCommittedResponse]:
            group = self.state.groups.get(request.group)
            group_offsets.check_none_pending(group, request.group, request.partitions)
            # A record that changes nothing: when it is committed, no newer coordinator had started.
            unchanged = GroupRecord(request.group, None if group is None else group.value)
            return Decision([unchanged], lambda: fetched(group or Group()))

        def fetched(group: Group) -> messages.FetchCommittedResponse:
            wanted = sorted(group.offsets) if request.partitions is None else request.partitions
            return messages.FetchCommittedResponse(committed_offsets(group, wanted))

        return await self._answer(decide)

    @answers(messages.SetGroupOffsets)
    async def set_offsets(self, request: messages.SetGroupOffsets) -> messages.Done:
        """See `messages.SetGroupOffsets`."""
        await self._begin_for(request.group, is_write=True)
        offsets = [
            OffsetCommit(topic_id, partition, offset, last_epoch=None, metadata="")
            for topic_id, partition, offset in request.offsets
        ]
        return await self._answer(
            lambda: Decision(
                group_offsets.set_offsets(
                    self.state, request.group, offsets, now_ms=self._environment.clock.wall_ms()
                ),
                messages.Done,
            )
        )

    @answers(messages.WriteMarker)
    async def write_marker(self, request: messages.WriteMarker) -> messages.Done:
        """Applies the end of a transaction: all of its offsets take effect, or none. See
        `messages.WriteMarker`."""
        await self._begin(is_write=True)
        return await self._answer(
            lambda: Decision(
                group_transactions.end(
                    self.state,
                    request.family,
                    request.epoch,
                    is_commit=request.is_commit,
                    coordinator_epoch=request.coordinator_epoch,
                    now_ms=self._environment.clock.wall_ms(),
                ),
                messages.Done,
            )
        )

    async def _abort(self, transaction: group_transactions.Transaction) -> None:
        try:
            await self._peers.abort(*transaction)
        except RayqError as error:
            logger.info("%s: transaction %s is not aborted yet: %s", self.where, transaction, error)
        await asyncio.sleep(ABORT_RETRY_S)  # Its end is on its way here.
        self._aborts.discard(transaction)

    # --- groups -----------------------------------------------------------------------------

    @answers(messages.ListGroups)
    async def list_groups(self, request: messages.ListGroups) -> messages.ListGroupsResponse:
        """See `messages.ListGroups`."""
        await self._begin(is_write=False)
        return await self._answer(
            lambda: Decision([], lambda: messages.ListGroupsResponse(summaries(self.state)))
        )

    @answers(messages.DescribeGroup)
    async def describe(self, request: messages.DescribeGroup) -> messages.DescribeGroupResponse:
        """See `messages.DescribeGroup`."""
        await self._begin_for(request.group, is_write=False, needs_topics=True)

        def answer() -> messages.DescribeGroupResponse:
            group = group_changes.find_group(self.state, request.group)
            return description(self.state, request.group, group)

        return await self._answer(lambda: Decision([], answer))

    @answers(messages.DescribeOpenTransactions)
    async def describe_open_transactions(
        self, request: messages.DescribeOpenTransactions
    ) -> messages.DescribeOpenTransactionsResponse:
        """The transactions that hold positions here; the answer has no offsets of them."""
        await self._begin(is_write=True)

        def answer() -> messages.DescribeOpenTransactionsResponse:
            held = [
                (family, transaction.epoch, 0)
                for family, transaction in sorted(self.state.transactions.items())
            ]
            return messages.DescribeOpenTransactionsResponse(
                0, 0, held, [], leader_epoch=request.leader_epoch
            )

        return await self._answer(lambda: Decision([], answer))

    @answers(messages.AbortUnknownTransaction)
    async def abort_unknown(self, request: messages.AbortUnknownTransaction) -> messages.Done:
        """See `messages.AbortUnknownTransaction`."""
        await self._begin(is_write=True)
        family, epoch = request.family, request.epoch
        outcome = None
        if group_transactions.has_joined(self.state, family, epoch):
            outcome = await self._peers.outcome(family, epoch)
            if outcome not in messages.OUTCOMES_OVER:
                raise InvalidRequestError(
                    f"Transaction {family}:{epoch} is {outcome}: its coordinator knows it, and "
                    "ends it. Abort it by its transactional id."
                )
            await self._begin(is_write=True)

        def decide() -> Decision[Record, messages.Done]:
            if outcome is None:
                return Decision([], messages.Done)
            ended = self.state.ended.get(family)
            return Decision(
                group_transactions.end(
                    self.state,
                    family,
                    epoch,
                    is_commit=outcome == "committed",
                    coordinator_epoch=0 if ended is None else ended.coordinator_epoch,
                    now_ms=self._environment.clock.wall_ms(),
                ),
                messages.Done,
            )

        return await self._answer(decide)

    @answers(messages.DeleteGroup)
    async def delete(self, request: messages.DeleteGroup) -> messages.Done:
        """See `messages.DeleteGroup`."""
        await self._begin_for(request.group, is_write=True)
        return await self._answer(
            lambda: Decision(
                group_offsets.delete_group(self.state, request.group), messages.Done
            )
        )

    # --- before and after a decision --------------------------------------------------------

    async def _begin_for(self, group: str, *, is_write: bool, needs_topics: bool = False) -> None:
        """Returns when a request for this group may be decided. Raises what `_begin` raises, and
        InvalidRequestError for the group of another coordinator."""
        if needs_topics and not self._has_topics:
            self._requests_waiting += 1
            self._topics_wanted.notify()
            try:
                await self._begin(is_write=is_write, is_ready=lambda: self._has_topics)
            finally:
                self._requests_waiting -= 1
        else:
            await self._begin(is_write=is_write)
        self._check_is_here(group)

    def _check_is_here(self, group: str) -> None:
        count, own = self._partitions, self.state.topics.get(OFFSETS_TOPIC)
        if not count and own is not None:
            count = own.partitions
        if count and (partition := partition_of_group(group, count)) != self._partition:
            raise InvalidRequestError(
                f"Group {group!r} belongs to partition {partition} of {OFFSETS_TOPIC}, not to "
                f"{self._partition}."
            )

    def _replay(self, record: Record) -> None:
        if isinstance(record, GroupRecord):
            if record.value is None:
                self._environment.metrics.forget(group=record.group)
            else:
                self._log_rebalance(record.group, record.value)
        self.state.replay(record)
        if isinstance(record, MemberRecord):
            key = (record.group, record.member)
            self._release(key)
            if record.value is None:
                self._unwatch(key)

    def _append(self, records: Sequence[Record]) -> None:
        if any(isinstance(record, MemberRecord) for record in records):
            super()._append(records)
            return
        # Positions do not depend on each other.
        for start in range(0, len(records), OFFSETS_PER_BATCH_MAX):
            super()._append(records[start : start + OFFSETS_PER_BATCH_MAX])

    def _log_rebalance(self, group: str, value: GroupValue) -> None:
        known = self.state.groups.get(group)
        before = GroupValue() if known is None else known.value
        if (value.rebalance_time_ms, value.reason) != (before.rebalance_time_ms, before.reason):
            self._environment.metrics.counter(
                "rayq_consumergroup_rebalances_total", group=group
            ).value += 1
            log_event(
                logger,
                logging.INFO,
                "group_rebalanced",
                group=group,
                epoch=value.epoch,
                members=0 if known is None else len(known.members),
                reason=value.reason,
            )

    # --- starting over ----------------------------------------------------------------------

    def _fail_all(self, error: RayqError) -> None:
        super()._fail_all(error)
        self._has_topics = False
        for key in list(self._held):
            self._release(key)
        for closed in self._watched:
            closed.remove_done_callback(self._disconnected)
        self._watched.clear()
        self._connections.clear()

    async def _load(self) -> None:
        state = GroupState(self._assignors)
        count = await self._log.replay(lambda key, value: state.replay(decode(key, value)))
        self.state = state
        self._loaded()
        self._topics_wanted.notify()
        logger.info(
            "%s: %d groups, %d members from %d records",
            self.where,
            len(state.groups),
            sum(1 for _ in state.all_members()),
            count,
        )

    # --- background -------------------------------------------------------------------------

    async def _work(self) -> None:
        """Ends sessions and expires old offsets, until the state is dropped."""
        clock = self._environment.clock
        generation = self._log.generation
        last_s = clock.monotonic()
        offsets_interval_s = min(
            OFFSETS_CHECK_INTERVAL_S, self._config.offsets_retention_ms / 1000 / 4
        )
        offsets_s = last_s + offsets_interval_s
        while generation == self._log.generation:
            await self._reset_wanted.wait(TICK_S)
            if generation != self._log.generation:
                return
            now_s, now_ms = clock.monotonic(), clock.wall_ms()
            late_s, last_s = now_s - last_s - TICK_S, now_s
            if not self._may_be_heard():
                group_changes.prolong_sessions(self.state, late_s + TICK_S)
                continue
            if late_s > TICK_S:
                group_changes.prolong_sessions(self.state, late_s)
            if not await self._end_sessions(now_s, now_ms):
                return
            for transaction in group_transactions.abandoned(self.state):
                if transaction not in self._aborts:
                    self._aborts.add(transaction)
                    self._environment.tasks.spawn(
                        self._abort(transaction), f"abort of {transaction} for {self.where}"
                    )
            if now_s >= offsets_s:
                offsets_s = now_s + offsets_interval_s
                if not await self._forget_old(now_s):
                    return

    async def _end_sessions(self, now_s: float, now_ms: int) -> bool:
        """Ends expired sessions. Returns as `_of_each_group`."""
        grace_ms = self._config.group_disconnect_grace_ms
        return await self._of_each_group(
            lambda name: group_changes.end_sessions(
                self.state, name, now_s=now_s, now_ms=now_ms, disconnect_grace_ms=grace_ms
            )
        )

    async def _forget_old(self, now_s: float) -> bool:
        """Forgets expired offsets and deleted topics. Returns as `_of_each_group`."""
        old_ms, retention_ms = self._clock_watch.now_ms(), self._config.offsets_retention_ms
        goes_on = await self._of_each_group(
            lambda name: group_offsets.expire_offsets(
                self.state, name, now_ms=old_ms, retention_ms=retention_ms
            )
        )
        if goes_on:
            self._append(group_transactions.forget_ended(self.state, now_ms=old_ms))
        if goes_on and self._has_topics:
            gone = group_offsets.topics_gone(self.state, now_s=now_s)
            if gone:
                goes_on = await self._of_each_group(
                    lambda name: group_offsets.forget_topics(self.state, name, gone)
                )
        return goes_on

    async def _of_each_group(self, decide: Callable[[str], list[Record]]) -> bool:
        """Decides for one group after the other, with other tasks in between. One decision for all
        of them would keep heartbeats waiting, and might be larger than any batch. Returns False if
        the state was dropped meanwhile, and nothing more may follow from it."""
        generation = self._log.generation
        for name in list(self.state.groups):
            if records := decide(name):
                self._append(records)
                await asyncio.sleep(0)
                if generation != self._log.generation:
                    return False
        return True

    async def _watch_topics(self) -> None:
        """Keeps the topics fresh while there are groups."""
        clock = self._environment.clock
        while True:
            if not self._is_loaded or not (self.state.groups or self._requests_waiting):
                self._has_topics = False
                await self._topics_wanted.wait(TOPICS_TIMEOUT_S)
                continue
            wanted = self._version + 1 if self._has_topics else self._version
            try:
                answer = await all_pages(
                    self._ask_broker, messages.Metadata(None, wanted, TOPICS_WAIT_MS)
                )
            except RayqError as error:
                logger.info("%s: no metadata for the groups: %s", self.where, error)
                await asyncio.sleep(RETRY_S)
                continue
            if answer.version >= wanted and self._is_loaded:
                self._version = answer.version
                topics = {
                    topic.name: SubscribedTopic(topic.topic_id, len(topic.partitions))
                    for topic in answer.topics
                }
                if topics != self.state.topics:
                    self.state.take_topics(topics)
                    if not await self._of_each_group(
                        lambda name: group_changes.follow_topics(
                            self.state, name, now_ms=clock.wall_ms()
                        )
                    ):
                        continue
                self._has_topics = True
                self._ready.notify()
            await asyncio.sleep(TOPICS_INTERVAL_S)


def _wake(held: asyncio.Future[None]) -> None:
    if not held.done():
        held.set_result(None)


GroupCoordinator.handlers = HandlerTable("group coordinator", GroupCoordinator)
