"""The controller: decides every change of the cluster's metadata, for one controller epoch.

Its hard state is the metadata log (`Quorum`): a handler decides on the state, appends the resulting
records, replays them at once, and answers when they are committed. Its soft state is when each
broker was last heard; a new controller rebuilds that within one session. A controller object ends
for good with its epoch, because its memory may then hold records that were never committed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec

from rayq import messages
from rayq.actors.controller.metrics import ControllerMetrics, reason_of
from rayq.actors.handlers import HandlerTable, answers
from rayq.actors.listening_clock import ListeningClock
from rayq.actors.metadata.quorum import Quorum
from rayq.actors.once_committed import once_committed
from rayq.config import ClusterConfig
from rayq.core.access.quota_shares import ShareBook
from rayq.core.access.rights import View
from rayq.core.access.shown import shown_error
from rayq.core.cluster import (
    access_changes,
    audited_changes,
    broker_changes,
    queue_changes,
    quota_changes,
    reassignment,
    remote_changes,
    topic_changes,
)
from rayq.core.cluster.broker_changes import is_plausible
from rayq.core.cluster.decisions import DECISIONS
from rayq.core.cluster.facts import ClusterDecision, Facts, ObjectStoreFacts, changed
from rayq.core.cluster.records import (
    STEP_RECORDS,
    BrokerRegistered,
    BrokerRemoved,
    MetadataRecord,
    PartitionChanged,
    PartitionValue,
    RequestDone,
    SnapshotPinned,
    VotersChanged,
    encode_records,
)
from rayq.core.cluster.state import ClusterState
from rayq.core.decision import Decision
from rayq.environment import Address, Environment
from rayq.errors import (
    ControllerUnavailableError,
    OverloadedError,
    ProtocolError,
    RayqError,
    StaleBrokerError,
    WrongClusterError,
)
from rayq.logs import RateLimitedLogger, log_event
from rayq.wire.codec import DECODERS, decode
from rayq.wire.pool import ConnectionPool

logger = logging.getLogger(__name__)


SILENT_HEARTBEATS = 2
"""Number of heartbeat intervals after which a silent broker may be gone. A voter that heard a
controller more recently is not asked for its vote."""
BALANCE_INTERVAL_S = 10.0
REBUILD_INTERVAL_S = 1.0
CLUSTER_STOP_PATIENCE_S = 5.0
"""Time after the last stop of a broker at which a heartbeat shows that the stop of the whole
cluster was abandoned. Brokers are told of that stop at once, and one that stops sends no more
heartbeats."""
OFFLINE_PATIENCE_S = 30.0
"""Time after a controller's start during which partitions without a leader are not logged as
warnings: after a start of the whole cluster its brokers and replicas are still coming back."""
CHANGE_PATIENCE_S = 5.0
"""Time after which a change that still waits for its turn is refused: the broker that forwarded it
does not wait any longer (its `FORWARD_TIMEOUT_S`)."""
FOUND_PATIENCE_S = 5.0
"""Time that a new partition, one of whose replicas runs, waits for the others to start."""


class Controller:
    """See the module. Start with `take_over`; `ended` is then awaited by the host. `listening` is
    the clock of this process by which it judges others, and which somebody else looks at."""

    handlers: ClassVar[HandlerTable]

    def __init__(
        self,
        environment: Environment,
        pool: ConnectionPool,
        config: ClusterConfig,
        *,
        cluster_id: str,
        endpoint: Address,
        listening: ListeningClock,
    ) -> None:
        self._environment = environment
        self._config = config
        self._listening = listening
        self._cluster_id = cluster_id
        self._session_s = config.session_timeout_ms / 1000
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._quorum = Quorum(
            environment,
            pool,
            config,
            cluster_id=cluster_id,
            endpoint=endpoint,
            now_s=listening.now_s,
            on_end=self._on_quorum_end,
        )
        self.state = ClusterState()
        self._heard_s: dict[int, float] = {}
        self._gone_since_s: dict[int, float] = {}
        """Time since which brokers have had no session, as far as this controller has seen it."""
        self._unfounded_since_s: dict[tuple[str, int], float] = {}
        self._store = ObjectStoreFacts(config.remote_storage_url, troubles={})
        self._facts = Facts(
            config, environment.new_id, environment.clock.wall_ms, self._heard, self._store
        )
        self._quota_shares: ShareBook[int] = ShareBook()
        self._pinned_s: dict[str, float] = {}
        """Time at which each pin was set or renewed, as far as this controller has seen it."""
        self._started_s = 0.0
        self._stop_expected_until_s: float | None = None
        """Time by which the next broker should have stopped. While the whole cluster stops no
        leader is elected, leaders stay where they are, and nothing is moved."""
        self._cluster_starts = True
        """True until `OFFLINE_PATIENCE_S` after the start of this epoch."""
        self._changes = asyncio.Lock()
        """Lock held by the client's change that is decided next."""
        self._watch: asyncio.Task[None] | None = None
        self._metrics: ControllerMetrics | None = None
        self._implausible = RateLimitedLogger(logger, logging.ERROR, environment.clock.monotonic)
        self._no_audit = RateLimitedLogger(logger, logging.WARNING, environment.clock.monotonic)

    @property
    def epoch(self) -> int:
        return self._quorum.epoch

    async def take_over(self, known: Sequence[Address]) -> None:
        """Wins the log. Raises ControllerUnavailableError, FencedEpochError, NotControllerError."""
        silent_s_min = SILENT_HEARTBEATS * self._config.heartbeat_interval_ms / 1000
        records = await self._quorum.take_over(known, silent_s_min=silent_s_min)
        for number, record in enumerate(records):
            self.state.replay(record)
            if number % STEP_RECORDS == 0:
                await asyncio.sleep(0)
        self._started_s = self._listening.now_s()
        for number, broker in self.state.brokers.items():
            registered = broker.registration
            self._quorum.add_peer(
                number, registered.directory_id, (registered.host, registered.port)
            )
        self._metrics = ControllerMetrics(
            self._environment, self.state, silent_s=self._silent_s
        )
        log_event(logger, logging.INFO, "controller_started", controller_epoch=self.epoch)
        self._watch = self._environment.tasks.spawn(self._watch_sessions(), "controller-sessions")

    def end(self, reason: str) -> None:
        self._quorum.end(reason)

    async def handle(self, request: messages.AnyRequest) -> messages.Response:
        """Answers once everything that was decided, or seen, is committed. Raises the errors of
        `core`, and NotControllerError: the outcome of a change is then unknown."""
        if isinstance(request, messages.BrokerHeartbeat) and self._is_renewal(request):
            self._note_heard(request)
            return self._answer_heartbeat(request)
        forward = None
        if isinstance(request, messages.Forward):
            forward, request = request, _forwarded(request)
        if isinstance(request, messages.Change):
            await self._turn_of_a_change()
        return await once_committed(
            self._quorum.until_committed, lambda: self._carry_out(request, forward)
        )

    async def _turn_of_a_change(self) -> None:
        """Waits for a turn, so that one client's change is decided in each turn of the loop and
        heartbeats are handled in between. Changes come over the connections of brokers, and one may
        concern thousands of partitions. Raises OverloadedError if the turn comes so late that
        nobody waits for the answer."""
        came_s = self._environment.clock.monotonic()
        async with self._changes:
            await asyncio.sleep(0)
        if self._environment.clock.monotonic() - came_s > CHANGE_PATIENCE_S:
            raise OverloadedError(
                "The controller is overloaded: the change waited too long for its turn, and was "
                "not made. Try again."
            )

    # --- deciding ---------------------------------------------------------------------------

    def _carry_out(
        self, request: messages.AnyRequest, forward: messages.Forward | None
    ) -> messages.Response:
        """Decides on a request and appends the records. Of a change that is repeated it appends
        nothing. A request that waited for its turn is checked here, on the state that decides."""
        if forward is not None:
            now_ms = self._environment.clock.wall_ms()
            access_changes.check_forwarded(self.state, forward, request, now_ms)
        before_index = self._quorum.last_index
        done = self._done(request, forward) if isinstance(request, messages.Change) else None
        if done is not None and done.request_id in self.state.requests_done:
            return messages.ChangeResponse(before_index)
        try:
            records, answer = self._decide(request)
            if forward is not None and forward.by is not None:
                records = quota_changes.owned_records(self.state, forward, records)
        except RayqError as error:
            if forward is None or forward.by is None:
                raise
            view = View(self.state.acls, forward.by, forward.address, self.state)
            raise shown_error(view, self.state, request, error) from error
        if done is not None and (records or self._quorum.last_index > before_index):
            records = [*records, done]
        # After a controller's death, a retry finds all of it or nothing.
        index = self._append(records, reason_of(request), together=True)
        return answer() or messages.ChangeResponse(index)

    def _done(
        self, request: messages.Change, forward: messages.Forward | None
    ) -> RequestDone | None:
        """The record that remembers a change, and who asked for it. None: it needs none."""
        change = None
        if forward is not None and request.is_audited:
            change = audited_changes.audited_change(
                self.state, forward, request, self._environment.clock.wall_ms()
            )
        elif request.request_id is None:
            return None
        request_id = request.request_id or self._environment.new_id()
        return RequestDone(audited_changes.done_id(request_id, forward), change)

    def _decide(self, request: messages.AnyRequest) -> ClusterDecision:
        kind = type(request)
        if kind in DECISIONS:
            return DECISIONS[kind](self.state, request, self._facts)
        if kind in self.handlers:
            decision: ClusterDecision = self.handlers.decide(self, request)
            return decision
        raise ProtocolError(f"{kind.__name__} is not a request to the controller.")

    def _is_renewal(self, request: messages.BrokerHeartbeat) -> bool:
        """Returns whether a heartbeat only renews a session, so that nothing is decided. It is
        answered at once: behind the changes that are being committed it would come too late."""
        known = self.state.brokers.get(request.broker)
        return (
            known is not None
            and known.live
            and known.registration.incarnation == request.incarnation
            and request.broker in self._heard_s
            and not self._cluster_stops
            and not self.ended.done()
        )

    def _note_heard(self, request: messages.BrokerHeartbeat) -> None:
        is_late = self._silent_s(request.broker) > self._session_s / 2
        if is_late and self.state.is_live(request.broker) and self._metrics is not None:
            self._metrics.heard_late(request.broker)
        self._heard_s[request.broker] = self._listening.now_s()
        self._store.troubles[request.broker] = request.remote_trouble

    @answers(messages.BrokerHeartbeat)
    def _hear_broker(self, request: messages.BrokerHeartbeat) -> ClusterDecision:
        state = self.state
        broker_changes.check_broker(state, request.broker, request.incarnation)
        self._end_cluster_stop_that_died()
        is_news = request.broker not in self._heard_s or not state.is_live(request.broker)
        self._note_heard(request)
        return Decision(
            broker_changes.hear_broker(state, request.broker, self._heard()) if is_news else (),
            lambda: self._answer_heartbeat(request),
        )

    def _answer_heartbeat(
        self, request: messages.BrokerHeartbeat
    ) -> messages.BrokerHeartbeatResponse:
        """Divides the quotas that the broker's clients use."""
        answer = messages.BrokerHeartbeatResponse(self.epoch, last_index=self._quorum.last_index)
        if not request.quota_demands:
            return answer
        now_s = self._listening.now_s()
        self._quota_shares.report(request.broker, request.quota_demands, now_s)
        if now_s - self._started_s < SILENT_HEARTBEATS * self._config.heartbeat_interval_ms / 1000:
            return answer  # Others may not have reported yet.
        shares = self._quota_shares.shares(request.broker, self.state.quotas, now_s)
        return msgspec.structs.replace(answer, quota_shares=shares)

    @answers(messages.RegisterReplicas)
    def _register_replicas(self, request: messages.RegisterReplicas) -> ClusterDecision:
        self._check_heard(request.broker, request.incarnation)
        self._warn_of_implausible(request)
        return changed(
            broker_changes.register_replicas(
                self.state, request.broker, request.replicas, self._heard()
            )
        )

    @answers(messages.ReplicasFailed)
    def _fail_replicas(self, request: messages.ReplicasFailed) -> ClusterDecision:
        self._check_heard(request.broker, request.incarnation)
        log_event(
            logger, logging.WARNING, "replicas_gone",
            broker=request.broker, replicas=len(request.replicas), reason=request.reason,
        )
        return changed(
            broker_changes.fail_replicas(
                self.state, request.broker, request.replicas, self._heard()
            )
        )

    @answers(messages.AlterPartition)
    def _alter_partition(self, request: messages.AlterPartition) -> ClusterDecision:
        records = broker_changes.alter_partition(self.state, request)
        if (request.topic_id, request.partition) not in self.state.moving:
            return changed(records)
        self._append(records, reason_of(request))
        self._complete_moves()
        return changed(())

    @answers(messages.AlterPartitions)
    def _alter_partitions(self, request: messages.AlterPartitions) -> ClusterDecision:
        records, refused = broker_changes.alter_partitions(self.state, request.proposals)
        self._append(records, reason_of(request), together=True)
        if not self.state.moving.isdisjoint(
            (proposal.topic_id, proposal.partition) for proposal in request.proposals
        ):
            self._complete_moves()
        return Decision((), lambda: messages.AlterPartitionsResponse(refused))

    @answers(messages.PrepareStop)
    def _prepare_stop(self, _: messages.PrepareStop) -> ClusterDecision:
        self._expect_stops()
        return Decision((), messages.Done)

    @answers(messages.BrokerStopped)
    def _stop_broker(self, request: messages.BrokerStopped) -> ClusterDecision:
        broker_changes.check_broker(self.state, request.broker, request.incarnation)
        self._warn_of_implausible(request)
        if self._cluster_stops:
            self._expect_stops()
        return changed(
            broker_changes.stop_broker(
                self.state,
                request.broker,
                request.replicas,
                self._heard(),
                cluster_stops=self._cluster_stops,
            )
        )

    @answers(messages.AlterTopicConfig)
    def _alter_topic_config(self, request: messages.AlterTopicConfig) -> ClusterDecision:
        queue_changes.check_topic_config(self.state, request.name, request.changes)
        records = topic_changes.alter_topic_config(
            self.state, request.name, request.changes, store=self._store
        )
        self._append(records, reason_of(request))
        return changed(
            topic_changes.settle_after_config_change(self.state, request.name, self._heard())
        )

    @answers(messages.RemoveBroker)
    def _remove_broker(self, request: messages.RemoveBroker) -> ClusterDecision:
        broker = request.broker
        records = reassignment.remove_broker(self.state, broker)
        changes_voters = any(isinstance(record, VotersChanged) for record in records)
        if changes_voters and self._quorum.commit_index < self._quorum.last_index:
            raise ControllerUnavailableError(
                f"Broker {broker} has a vote, and the voters change one at a time: other changes "
                "are being committed. Try again."
            )
        return changed(records)

    def _warn_of_implausible(
        self, request: messages.RegisterReplicas | messages.BrokerStopped
    ) -> None:
        for report in request.replicas:
            if not is_plausible(report):
                self._implausible.say(
                    "broker %d reports a log of %s-%d that ends in epoch %s at %s: it is passed "
                    "over. Look at that disk; replace-disk rebuilds the replica.",
                    request.broker,
                    report.topic_id,
                    report.partition,
                    report.last_epoch,
                    report.flushed,
                )

    @answers(messages.RegisterBroker)
    def _register_broker(self, request: messages.RegisterBroker) -> ClusterDecision:
        if request.cluster_id != self._cluster_id:
            raise WrongClusterError(
                f"Broker {request.broker} belongs to cluster {request.cluster_id}, this is "
                f"cluster {self._cluster_id}."
            )
        registration = BrokerRegistered(
            broker=request.broker,
            directory_id=request.directory_id,
            start_counter=request.start_counter,
            incarnation=request.incarnation,
            host=request.host,
            port=request.port,
            node_id=request.node_id,
            replicas_max=request.replicas_max,
        )
        if self._cluster_stops:
            self._end_cluster_stop(f"broker {request.broker} started in the middle of a stop")
        records = broker_changes.register_broker(
            self.state, registration, request.held, self._heard()
        )
        self._heard_s[request.broker] = self._listening.now_s()
        self._quorum.add_peer(request.broker, request.directory_id, (request.host, request.port))
        return Decision(records, lambda: messages.RegisterBrokerResponse(self.epoch))

    def _check_heard(self, broker: int, incarnation: str) -> None:
        broker_changes.check_broker(self.state, broker, incarnation)
        if not self.state.is_live(broker):
            raise StaleBrokerError(f"The session of broker {broker} ended: send a heartbeat first.")

    def _append(
        self, records: Sequence[MetadataRecord], reason: str, *, together: bool = False
    ) -> int:
        """Adds records to the log and to the state at once: the next decision builds on them.
        `reason` is for the log lines about the changes: it is known here, where the decision is
        made, and not on the brokers, which only replay. So there is one line for the whole
        cluster."""
        if not records:
            return self._quorum.last_index
        index = self._quorum.append(records, together=together)
        for record in records:
            before = self._value_before(record)
            self.state.replay(record)
            if isinstance(record, SnapshotPinned):
                self._pinned_s[record.pin_id] = self._listening.now_s()
            if isinstance(record, PartitionChanged) and self._metrics is not None:
                self._metrics.changed(
                    record,
                    before,
                    reason,
                    brokers_come_or_go=self._cluster_stops or self._cluster_starts,
                )
            elif isinstance(record, BrokerRemoved):
                self._quorum.remove_peer(record.broker)
                self._heard_s.pop(record.broker, None)
                self._store.troubles.pop(record.broker, None)
        return index

    def _value_before(self, record: MetadataRecord) -> PartitionValue | None:
        if not isinstance(record, PartitionChanged):
            return None
        known = self.state.partition(record.topic_id, record.partition)
        return None if known is None else known.value

    # --- the stop of the whole cluster ------------------------------------------------------

    @property
    def _cluster_stops(self) -> bool:
        return self._stop_expected_until_s is not None

    def _expect_stops(self) -> None:
        self._stop_expected_until_s = self._listening.now_s() + CLUSTER_STOP_PATIENCE_S

    def _end_cluster_stop_that_died(self) -> None:
        until_s = self._stop_expected_until_s
        if until_s is not None and self._listening.now_s() > until_s:
            self._end_cluster_stop("the stop of the cluster died half-way")

    def _end_cluster_stop(self, reason: str) -> None:
        """Ends the stop, as the cluster continues: elections that were held back meanwhile happen
        now."""
        self._stop_expected_until_s = None
        self._append(broker_changes.settle_everything(self.state, self._heard()), reason)

    # --- sessions ---------------------------------------------------------------------------

    def _heard(self) -> set[int]:
        return set(self._heard_s)

    def _heard_lately(self) -> set[int]:
        """The brokers that seem to run: changes that can wait should wait for the other brokers,
        until they are heard again or their sessions end."""
        silent_s_max = SILENT_HEARTBEATS * self._config.heartbeat_interval_ms / 1000
        from_s = self._listening.now_s() - silent_s_max
        return {
            broker
            for broker, heard_s in self._heard_s.items()
            if heard_s >= from_s and self._quorum.is_connected(broker)
        }

    def _found_late(self, now_s: float) -> None:
        """Starts new partitions that have waited long enough for a replica that does not start."""
        waiting = {
            (topic.topic_id, number)
            for topic, number, partition in self.state.found(self.state.index.unfounded)
            if partition.processes
        }
        for key in [key for key in self._unfounded_since_s if key not in waiting]:
            del self._unfounded_since_s[key]
        for topic_id, number in sorted(waiting):
            since_s = self._unfounded_since_s.setdefault((topic_id, number), now_s)
            if now_s - since_s > FOUND_PATIENCE_S:
                topic = self.state.topics[topic_id]
                self._append(
                    broker_changes.found_partition(self.state, topic, number, self._heard()),
                    "those of its replicas that started do not wait for the others any longer",
                )

    def _warn_of_offline(self, now_s: float) -> None:
        if self._cluster_starts and now_s > self._started_s + OFFLINE_PATIENCE_S:
            self._cluster_starts = False
            if self._metrics is not None and not self._cluster_stops:
                self._metrics.warn_of_offline("nobody came to lead it since the controller started")

    def _unpin_expired(self, now_s: float) -> None:
        """Ends the expired pins. A pin from an earlier controller gets its whole time again."""
        pins = self.state.pins
        self._pinned_s = {pin: self._pinned_s.get(pin, now_s) for pin in pins}
        expired = {
            pin for pin, at_s in self._pinned_s.items() if now_s - at_s > pins[pin].ttl_ms / 1000
        }
        if expired:
            self._append(
                remote_changes.unpin_snapshots(self.state, expired), "the time of pins is over"
            )

    def _ensure_audit(self) -> None:
        """Creates `__audit` once there are principals, and enough brokers for its replicas."""
        state = self.state
        if not state.principals or topic_changes.AUDIT_TOPIC in state.topic_ids:
            return
        try:
            records = topic_changes.ensure_own_topic(
                state,
                topic_changes.AUDIT_TOPIC,
                topic_id=self._environment.new_id(),
                partitions=1,
            )
        except RayqError as error:
            self._no_audit.say("%s is not created yet: %s", topic_changes.AUDIT_TOPIC, error)
        else:
            self._append(records, "there are principals", together=True)

    def _complete_moves(self) -> None:
        if not self._cluster_stops:
            self._append(
                reassignment.complete_moves(self.state, self._heard_lately()),
                "all replicas of a move are in sync",
            )

    def _rebuild(self, now_s: float) -> None:
        """Moves the replicas of brokers that have been gone for too long."""
        delay_ms = self._config.replica_rebuild_delay_ms
        away = {number for number, broker in self.state.brokers.items() if not broker.live}
        self._gone_since_s = {
            broker: self._gone_since_s.get(broker, now_s) for broker in sorted(away)
        }
        if delay_ms is None:
            return
        gone = {
            broker for broker, at_s in self._gone_since_s.items() if now_s - at_s > delay_ms / 1000
        }
        if gone:
            self._append(
                reassignment.rebuild(self.state, gone),
                f"brokers {sorted(gone)} have been away for replica_rebuild_delay_ms",
            )

    async def _watch_sessions(self) -> None:
        """Ends sessions of silent brokers, and does what is due. Time in which this process could
        not hear counts for nothing here (`ListeningClock`)."""
        interval_s = self._config.heartbeat_interval_ms / 1000 / 2
        balance_s = self._started_s + BALANCE_INTERVAL_S
        rebuild_s = self._started_s
        while True:
            await asyncio.sleep(interval_s)
            if self._is_cut_off() or self._silent_brokers():
                await self._listening.read_arrived()
            if self._is_cut_off():
                self.end("no majority of the voters answered for a session")
                return
            self._end_sessions(self._silent_brokers())
            now_s = self._listening.now_s()
            self._found_late(now_s)
            self._unpin_expired(now_s)
            self._quota_shares.tidy(now_s)
            self._warn_of_offline(now_s)
            self._complete_moves()
            self._ensure_audit()
            if now_s > rebuild_s and not self._cluster_stops:
                rebuild_s = now_s + REBUILD_INTERVAL_S
                self._rebuild(now_s)
            if self._quorum.commit_index == self._quorum.last_index:
                voters = broker_changes.next_voters(self.state, self._heard())
                if voters:
                    self._append(voters, "the voters are completed")
                elif self._quorum.wants_snapshot(self._config.metadata_snapshot_records):
                    self._quorum.compact(encode_records(self.state.snapshot()))
            is_quiet = self._quorum.commit_index == self._quorum.last_index
            if now_s > balance_s and is_quiet and not self._cluster_stops:
                balance_s = now_s + BALANCE_INTERVAL_S
                self._append(
                    broker_changes.balance_leaders(self.state, self._heard_lately()),
                    "the preferred replica is in sync again",
                )

    def _is_cut_off(self) -> bool:
        """Returns whether no majority of the voters answered for a session."""
        is_new = self._listening.now_s() <= self._started_s + self._session_s
        return not is_new and not self._quorum.has_majority()

    def _silent_brokers(self) -> dict[int, float]:
        """The live brokers that were silent for a session, each with that time in seconds."""
        silent_s = {
            number: self._silent_s(number)
            for number, broker in self.state.brokers.items()
            if broker.live
        }
        return {number: at_s for number, at_s in silent_s.items() if at_s > self._session_s}

    def _silent_s(self, broker: int) -> float:
        """Time since a broker was heard, or since this controller's start."""
        return self._listening.now_s() - self._heard_s.get(broker, self._started_s)

    def _end_sessions(self, silent_s: Mapping[int, float]) -> None:
        for number, at_s in silent_s.items():
            if self._metrics is not None:
                self._metrics.session_ended(number, at_s)
            self._append(
                broker_changes.fence_broker(self.state, number, self._heard()),
                f"broker {number} was silent for {at_s:.1f} s",
            )

    def _on_quorum_end(self, reason: str) -> None:
        log_event(
            logger, logging.INFO, "controller_ended", controller_epoch=self.epoch, reason=reason
        )
        if self._metrics is not None:
            self._metrics.end()
        if self._watch is not None:
            self._watch.cancel()
        if not self.ended.done():
            self.ended.set_result(reason)


def _forwarded(forward: messages.Forward) -> messages.AnyRequest:
    """The request that a broker forwards for a principal. Raises ProtocolError for one that no
    client sends to a controller."""
    kind = messages.REQUESTS.get(forward.kind)
    if kind is None or not kind.sent_by_clients or not issubclass(kind, messages.ToController):
        raise ProtocolError(f"No client sends a request of kind {forward.kind} to the controller.")
    request: messages.AnyRequest = decode(DECODERS[kind], forward.request, kind.__name__)
    return request


Controller.handlers = HandlerTable("controller", Controller, decisions=DECISIONS)
