"""The coordinator of the audit, beside the leader of `__audit`: the only writer of its lines.

Servers send it what they note (`AuditTrail`). It asks this node's broker for the changes of the
metadata. The metadata log keeps each change with the client that asked for it: so none is lost
while `__audit` cannot be written, and each is one line. The key of each record is the time and
number of the last change in the log. A new leader reads the last record, and continues with the
next change.
"""

from __future__ import annotations

import logging

import msgspec

from rayq import messages
from rayq.actors.access import Access
from rayq.actors.coordinator import Coordinator
from rayq.actors.handlers import HandlerTable, answers, answers_peer
from rayq.actors.replica.leader import Leader
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.core.access.audit import AuditLine, AuditLines, decode_line, encode_line, line_of
from rayq.core.cluster.topic_changes import AUDIT_TOPIC
from rayq.core.decision import Decision
from rayq.errors import CorruptBatchError, RayqError
from rayq.messages.acls import SUPERUSER
from rayq.wire.peer import Peer

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""Interval at which the broker is asked for changes, and counted lines are written."""
NEVER = (0, 0)


class AuditRecord(msgspec.Struct, frozen=True):
    """A line, and the time and number of the last change that is in the log with it."""

    line: bytes
    last_change: tuple[int, int]


def encode(record: AuditRecord) -> tuple[bytes, bytes]:
    """The key and value of a record."""
    return b"%d %d" % record.last_change, record.line


def last_change_of(key: bytes | None) -> tuple[int, int]:
    """The time and number of the last change. Raises CorruptBatchError."""
    try:
        time_ms, number = (int(part) for part in (key or b"").split())
    except ValueError as error:
        raise CorruptBatchError(f"A record of __audit has the key {key!r}.") from error
    return time_ms, number


class AuditCoordinator(Coordinator[tuple[int, int], AuditRecord]):
    """See the module. `state` are the time and number of the last change in the log."""

    subject = "the audit"
    topic = AUDIT_TOPIC

    def __init__(
        self,
        replica_log: ReplicaLog,
        leader: Leader,
        assignment: messages.PartitionAssignment,
        *,
        access: Access,
        ask_broker: messages.Ask,
    ) -> None:
        """`ask_broker` sends a request to this node's broker."""
        super().__init__(replica_log, leader, assignment, access=access, encode=encode)
        self._ask_broker = ask_broker
        self.state = NEVER
        self._lines = AuditLines()
        """Lines of all servers: the rate is bounded for the whole cluster here."""

    async def _admit(self, request: messages.AnyRequest) -> None:
        """Admits readers whether or not this coordinator can write."""
        if isinstance(request, messages.ReadAudit):
            self._check(None)
        else:
            await super()._admit(request)

    def _replay(self, record: AuditRecord) -> None:
        self.state = record.last_change

    # --- servers ----------------------------------------------------------------------------

    @answers(messages.AppendAudit)
    async def append(self, request: messages.AppendAudit) -> messages.Done:
        """See `messages.AppendAudit`."""
        now_s = self._environment.clock.monotonic()
        for data in request.lines:
            try:
                self._lines.add(decode_line(data), now_s)
            except msgspec.MsgspecError as error:  # A server of another version.
                self._count_dropped("unknown", 1)
                logger.error("%s: a line of the audit cannot be read: %s", self.where, error)
        return await self._answer(lambda: Decision(self._due(), messages.Done))

    def _due(self) -> list[AuditRecord]:
        """The lines that are to be written now."""
        due = self._lines.due(self._environment.clock.monotonic(), messages.AUDIT_LINES_MAX)
        self._lines.written(len(due))
        dropped = self._lines.dropped
        for kind, count in dropped.items():
            self._count_dropped(kind, count)
        dropped.clear()
        return [AuditRecord(encode_line(line), self.state) for line in due]

    def _count_dropped(self, kind: str, count: int) -> None:
        self._environment.metrics.counter(
            "rayq_audit_events_dropped_total", kind=kind
        ).value += count

    # --- readers ----------------------------------------------------------------------------

    @answers_peer(messages.ReadAudit)
    async def read(
        self, peer: Peer, request: messages.ReadAudit, _: memoryview
    ) -> tuple[messages.ReadAuditResponse, bytes]:
        """See `messages.ReadAudit`."""
        reads, topic_id, epoch = self._leader.reads, request.topic_id, request.leader_epoch
        reads.check_serving()
        offset = request.offset
        if offset is None:
            found = await reads.list_offsets(
                messages.ListOffsets(topic_id, 0, epoch, request.since_ms)
            )
            offset = found.offset
        log = self._replica_log.log
        offset = self._replica_log.high_watermark if offset is None else offset
        fetch = messages.Fetch(
            topic_id,
            0,
            epoch,
            max(offset, log.start_offset),
            None,
            request.bytes_max,
            request.wait_ms,
            messages.READ_UNCOMMITTED,
        )
        answer, data = await reads.fetch(fetch, peer.room)
        return messages.ReadAuditResponse(answer.next_offset, answer.high_watermark), data

    # --- starting over ----------------------------------------------------------------------

    async def _load(self) -> None:
        """Finds the last change in the log. Where the log is empty, retention has deleted all that
        is older than it says."""
        retention_ms = self._replica_log.topic_config.retention_ms
        oldest_ms = 0
        if retention_ms is not None:
            oldest_ms = self._environment.clock.wall_ms() - retention_ms
        last = oldest_ms, 0

        def take(key: bytes | None, _: bytes | None) -> None:
            nonlocal last
            last = last_change_of(key)

        await self._log.replay(take, only_last=True)
        self.state = last
        self._loaded()

    # --- background -------------------------------------------------------------------------

    async def _work(self) -> None:
        """Writes the changes of the metadata, and lines that were counted, until the state is
        dropped."""
        generation = self._log.generation
        while generation == self._log.generation:
            try:
                while await self._write_changes(generation):
                    pass  # The metadata log keeps so many, and somebody may make more each second.
            except RayqError as error:
                logger.debug("%s: no changes are written: %s", self.where, error)
            await self._reset_wanted.wait(INTERVAL_S)

    async def _write_changes(self, generation: int) -> bool:
        """Writes the next changes. Returns whether there are more. Raises RayqError."""
        await self._begin(is_write=True)
        answer = await self._ask_broker(
            messages.ReadChanges(self.state[0], messages.AUDIT_LINES_MAX)
        )
        await self._begin(is_write=True)
        self._check(generation)
        for change in answer.changes:
            time_ms, number = self.state
            if change.time_ms <= time_ms:
                continue
            missing = change.number - number - 1
            if number and missing > 0:
                self._count_dropped("change", missing)
                logger.error("%s lacks %d changes of the metadata", self.where, missing)
                lost = AuditLine(
                    time_ms=change.time_ms,
                    kind="lost",
                    principal=SUPERUSER,
                    what="changes that the metadata log did not keep until they were written here",
                    left_out=missing,
                    id=f"lost-{change.time_ms}",
                )
                self._append([AuditRecord(encode_line(lost), self.state)])
            line = encode_line(line_of(change))
            self._append([AuditRecord(line, (change.time_ms, change.number))])
        self._append(self._due())
        await self._until_committed()
        return len(answer.changes) == messages.AUDIT_LINES_MAX


AuditCoordinator.handlers = HandlerTable("audit coordinator", AuditCoordinator)
