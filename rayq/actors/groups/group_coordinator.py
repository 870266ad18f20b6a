"""The group coordinator: it serves the groups of one `__consumer_offsets` partition.

It is a `Coordinator`, and lives with the partition's leader. Its soft state is when each member was
last heard: after a start every member has a full session.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from rayq import messages
from rayq.actors.access import Access
from rayq.actors.clock_watch import ClockWatch
from rayq.actors.coordinator import RETRY_S, Coordinator
from rayq.actors.handlers import HandlerTable, answers, answers_peer
from rayq.actors.listening_clock import ListeningClock
from rayq.actors.peers import Peers
from rayq.actors.replica.leader import Leader
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.actors.signal import Signal
from rayq.core.access.rights import View
from rayq.core.cluster.topic_changes import OFFSETS_TOPIC
from rayq.core.decision import Decision
from rayq.core.groups import changes as group_changes
from rayq.core.groups import descriptions
from rayq.core.groups import offsets as group_offsets
from rayq.core.groups import transactions as group_transactions
from rayq.core.groups.assignors import load_assignors
from rayq.core.groups.decisions import DECISIONS
from rayq.core.groups.descriptions import named
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
from rayq.core.groups.state import GroupState, Reader, SubscribedTopic
from rayq.errors import InvalidAssignmentError, InvalidRequestError, RayqError
from rayq.logs import log_event
from rayq.metrics import Sample
from rayq.wire.handler import Result
from rayq.wire.metadata_pages import all_pages
from rayq.wire.peer import Peer

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

_NEED_TOPICS = (messages.GroupHeartbeat, messages.DescribeGroup)

MemberKey = tuple[str, str]
"""`(group, member)`"""


class GroupCoordinator(Coordinator[GroupState, Record]):
    """See the module."""

    subject = "groups"
    topic = OFFSETS_TOPIC
    only_reads = (messages.ListGroups, messages.DescribeGroup)

    def __init__(
        self,
        replica_log: ReplicaLog,
        leader: Leader,
        assignment: messages.PartitionAssignment,
        *,
        access: Access,
        ask_broker: messages.Ask,
        metadata_version: int,
        clock_watch: ClockWatch,
        peers: Peers,
    ) -> None:
        """`ask_broker` sends a request to this node's broker, whose metadata was at
        `metadata_version` when this replica was told to lead. `peers` ask the coordinators of
        transactions."""
        super().__init__(replica_log, leader, assignment, access=access, encode=encode)
        self._ask_broker = ask_broker
        self._version = metadata_version
        self._clock_watch = clock_watch
        self._peers = peers
        self._aborts: set[group_transactions.Transaction] = set()
        """Transactions that are being aborted because their members are gone."""
        self._principals: dict[int, tuple[int, str]] = {}
        """Epoch and principal of each open family whose coordinator let a named principal join."""
        self._topic_id = assignment.topic_id
        self._partitions = assignment.partitions
        """Number of partitions of `__consumer_offsets`. 0: from an older broker; then the topics
        say it."""
        self._assignors = load_assignors(self._config.group_assignors)
        self.state = GroupState(self._assignors, self._may_read)
        self._has_topics = False
        self._access_version: object = None
        """The version of the access by which patterns were matched last."""
        self._held: dict[MemberKey, asyncio.Future[None]] = {}
        self._latest: dict[MemberKey, messages.GroupHeartbeat] = {}
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

    def _may_read(self, reader: Reader, topic: str) -> bool:
        return self._access.may_named(*reader, "read", "topic", topic)

    def _shown(self, view: View, answer: Result) -> Result:
        shown: Result = descriptions.shown(view, answer)
        return shown

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
        """See `messages.GroupHeartbeat`. A heartbeat is held until there is news for the member, or
        a newer heartbeat, or the time is up."""
        loop, generation = asyncio.get_running_loop(), self._log.generation
        deadline_s = loop.time() + min(request.wait_ms, request.session_timeout_ms // 2) / 1000
        key = (request.group, request.member)
        reader = None if peer.principal is None else Reader(peer.principal, peer.host)

        def heard() -> MemberValue | None:
            self._release(key)
            if request.member_epoch < 0:
                return None
            self._watch(key, peer)
            self._latest[key] = request
            return self._member(request)

        try:
            value = await self._answer(
                lambda: Decision(
                    group_changes.heartbeat(self.state, request, self._times(), reader), heard
                )
            )
            if value is None:
                return messages.GroupHeartbeatResponse(0, [])
            while (
                self._latest.get(key) is request
                and value.member_epoch == request.member_epoch
                and loop.time() < deadline_s
            ):
                await self._hold(key, deadline_s)
                self._check(generation)
                value = await self._answer(lambda: Decision([], lambda: self._member(request)))
        except InvalidAssignmentError as error:
            if reader is None:
                raise
            # What a user's assignor says may name topics that this member may not describe.
            raise error.with_message(
                f"The assignor {request.assignor!r} of group {request.group!r} failed. A superuser "
                "that joins the group is told why."
            ) from error
        finally:
            if self._latest.get(key) is request:
                del self._latest[key]
        assigned = named(self.state, value.assigned)
        return messages.GroupHeartbeatResponse(value.member_epoch, assigned)

    def _member(self, request: messages.GroupHeartbeat) -> MemberValue:
        return group_changes.find_member(
            self.state, request.group, request.member, request.instance
        )

    async def _hold(self, key: MemberKey, deadline_s: float) -> None:
        loop = asyncio.get_running_loop()
        held = self._held[key] = loop.create_future()
        timer = loop.call_at(deadline_s, _wake, held)
        try:
            await held
        finally:
            timer.cancel()
            if self._held.get(key) is held:
                del self._held[key]

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

    @answers_peer(messages.CommitOffsets)
    async def commit(
        self, peer: Peer, request: messages.CommitOffsets, _: memoryview
    ) -> messages.CommitOffsetsResponse:
        """See `messages.CommitOffsets`."""
        transaction, decide = request.transaction, group_offsets.commit
        if transaction is not None:
            decide = group_transactions.commit
            if not self._has_joined(*transaction, peer.principal):
                await self._peers.join(
                    *transaction, self._topic_id, self._partition, principal=peer.principal
                )
                # Everything is checked after the join: the member may have lost its partitions
                # meanwhile.
                await self._admit(request)
                if peer.principal is not None:
                    family, epoch = transaction
                    self._principals[family] = epoch, peer.principal
        return await self._answer(lambda: decide(self.state, request, self._times()))

    def _has_joined(self, family: int, epoch: int, principal: str | None) -> bool:
        """Returns whether a commit needs no question to the transaction's coordinator."""
        return group_transactions.has_joined(self.state, family, epoch) and (
            principal is None or self._principals.get(family) == (epoch, principal)
        )

    async def _abort(self, transaction: group_transactions.Transaction) -> None:
        try:
            await self._peers.abort(*transaction)
        except RayqError as error:
            logger.info("%s: transaction %s is not aborted yet: %s", self.where, transaction, error)
        await asyncio.sleep(ABORT_RETRY_S)  # Its end is on its way here.
        self._aborts.discard(transaction)

    @answers(messages.AbortUnknownTransaction)
    async def abort_unknown(self, request: messages.AbortUnknownTransaction) -> messages.Done:
        """See `messages.AbortUnknownTransaction`."""
        family, epoch = request.family, request.epoch
        outcome = None
        if group_transactions.has_joined(self.state, family, epoch):
            outcome = await self._peers.outcome(family, epoch)
            if outcome not in messages.OUTCOMES_OVER:
                raise InvalidRequestError(
                    f"Transaction {family}:{epoch} is {outcome}: its coordinator knows it, and "
                    "ends it. Abort it by its transactional id."
                )
            await self._admit(request)

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

    # --- before and after a decision --------------------------------------------------------

    async def _admit(self, request: messages.AnyRequest) -> None:
        """Returns when the request may be decided. Raises what `_begin` raises, and
        InvalidRequestError for the group of another coordinator."""
        is_write = type(request) not in self.only_reads
        if type(request) in _NEED_TOPICS and not self._has_topics:
            self._requests_waiting += 1
            self._topics_wanted.notify()
            try:
                await self._begin(is_write=is_write, is_ready=lambda: self._has_topics)
            finally:
                self._requests_waiting -= 1
        else:
            await self._begin(is_write=is_write)
        group: str | None = getattr(request, "group", None)
        if group is not None:
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
        self._principals.clear()
        for key in list(self._held):
            self._release(key)
        for closed in self._watched:
            closed.remove_done_callback(self._disconnected)
        self._watched.clear()
        self._connections.clear()

    async def _load(self) -> None:
        state = GroupState(self._assignors, self._may_read)
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
        listening = ListeningClock(clock, TICK_S)
        offsets_interval_s = min(
            OFFSETS_CHECK_INTERVAL_S, self._config.offsets_retention_ms / 1000 / 4
        )
        offsets_s = clock.monotonic() + offsets_interval_s
        while generation == self._log.generation:
            await self._reset_wanted.wait(TICK_S)
            if generation != self._log.generation:
                return
            can_hear = self._may_be_heard()
            unheard_s = listening.look(can_hear=can_hear)
            if unheard_s > 0:
                group_changes.prolong_sessions(self.state, unheard_s)
            if not can_hear:
                continue
            if unheard_s > 0:
                await listening.read_arrived()
                if generation != self._log.generation:
                    return
            now_s, now_ms = clock.monotonic(), clock.wall_ms()
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
            for family in self._principals.keys() - self.state.transactions.keys():
                del self._principals[family]
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
            has_access = self._access.version is not self._access_version
            if answer.version >= (self._version if has_access else wanted) and self._is_loaded:
                self._version = answer.version
                topics = {
                    topic.name: SubscribedTopic(topic.topic_id, len(topic.partitions))
                    for topic in answer.topics
                }
                if topics != self.state.topics or has_access:
                    self._access_version = self._access.version
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


GroupCoordinator.handlers = HandlerTable(
    "group coordinator", GroupCoordinator, decisions=DECISIONS
)
