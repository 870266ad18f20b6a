"""The state of one partition's batches on their way. No I/O: the sender decides and acts."""

from __future__ import annotations

import asyncio
from typing import Any

from rayq.client.backoff import Backoff
from rayq.client.metadata import LeaderAndEpoch
from rayq.client.producing.accumulator import PartitionQueue, ProducerBatch
from rayq.errors import RayqError
from rayq.storage.producer_state import BATCHES_REMEMBERED
from rayq.wire.connection import Connection


class Shipment:
    """A batch on its way: its number, its attempts."""

    __slots__ = (
        "batch",
        "deadline",
        "serial",
        "payload",
        "producer_id",
        "producer_epoch",
        "base_sequence",
        "in_doubt",
        "attempt",
        "sent_at",
    )

    def __init__(self, batch: ProducerBatch, deadline: float, serial: int) -> None:
        self.batch = batch
        self.deadline = deadline
        self.serial = serial
        """Its place in the order of the partition."""
        self.payload: bytearray | None = None
        self.producer_id: int | None = None
        self.producer_epoch = 0
        self.base_sequence: int | None = None
        self.in_doubt = False
        """An attempt may have been written, without an answer that says so."""
        self.attempt: asyncio.Future[Any] | None = None
        self.sent_at = 0.0

    def forget_number(self) -> None:
        self.payload = None
        self.producer_id = None
        self.base_sequence = None


class Flight:
    """One partition on its way to its leader."""

    __slots__ = (
        "queue",
        "producer_id",
        "producer_epoch",
        "next_sequence",
        "next_serial",
        "in_flight",
        "retries",
        "is_stalled",
        "resume_at",
        "needs_new_epoch",
        "backoff",
        "timer",
        "leader",
        "connection",
        "connecting",
        "full_connection",
        "full_since",
        "last_error",
    )

    def __init__(self, queue: PartitionQueue, backoff: Backoff) -> None:
        self.queue = queue
        self.producer_id: int | None = None
        self.producer_epoch = 0
        self.next_sequence = 0
        self.next_serial = 0
        self.in_flight: list[Shipment] = []
        self.retries: list[Shipment] = []
        """To be sent again, in order."""
        self.is_stalled = False
        """After a failure: until all answers are in and `resume_at` has come."""
        self.resume_at = 0.0
        self.needs_new_epoch = False
        self.backoff = backoff
        self.timer: asyncio.TimerHandle | None = None
        self.leader: LeaderAndEpoch | None = None
        """Whom the batches in flight were sent to."""
        self.connection: Connection | None = None
        self.connecting: asyncio.Task[None] | None = None
        """Done before it has set this to None: it was cancelled before it began."""
        self.full_connection: Connection | None = None
        """One that takes no more bytes, since `full_since`; where nothing is acknowledged."""
        self.full_since = 0.0
        self.last_error: RayqError | None = None

    @property
    def name(self) -> str:
        return f"{self.queue.topic}-{self.queue.partition}"

    def is_first(self, shipment: Shipment) -> bool:
        """Nothing that was sent before it is unresolved."""
        return all(other.serial >= shipment.serial for other in (*self.in_flight, *self.retries))

    @property
    def is_window_full(self) -> bool:
        """One more batch, and the leader might forget the oldest that is unresolved: its retry
        would no longer be recognised."""
        if self.producer_id is None:
            return False
        serials = [shipment.serial for shipment in (*self.in_flight, *self.retries)]
        return bool(serials) and self.next_serial - min(serials) >= BATCHES_REMEMBERED

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
