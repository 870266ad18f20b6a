"""Pins that keep a job's records from retention, if the topic is in an object store.

The driver pins the starts of its ranges and renews the pins as long as the job may read. One pin
stands for everything that a process reads from a topic. A driver that dies leaves it for `TTL_MS`.
Pins are a service, not a promise: if none can be had the job reads without, and a record that
expires before it is read is the usual error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from rayq.batch.offset_ranges import Split
from rayq.batch.stored_ranges import stored_ranges
from rayq.client.client import Client
from rayq.client.cluster import Cluster
from rayq.errors import ClosedError, RayqError
from rayq.messages import PinSnapshot, UnpinSnapshot

logger = logging.getLogger(__name__)

TTL_MS = 600_000
RENEW_S = 150.0
ASK_TIMEOUT_S = 10.0
DAY_S = 86_400.0


def pin_ranges(
    cluster: Cluster, ranges: Sequence[Split], *, timeout_s: float, age_max_s: float | None = None
) -> Callable[[], None]:
    """Pins the records to read, until the returned function is called (from any thread; it does not
    wait), the process ends, or `age_max_s` seconds have passed. Raises UnknownTopicError,
    TimeoutError, if the topics are not known."""
    client, background = cluster.shared_client()
    hold = background.run(_hold(client, ranges, timeout_s, age_max_s))

    def release() -> None:
        if hold is not None:
            with contextlib.suppress(RuntimeError):  # The loop is closed: the process ends.
                background.call_soon(hold.end)

    return release


_pins: dict[Client, _Pins] = {}
"""The pins of each client that has any. Touched on its loop only."""


async def _hold(
    client: Client, ranges: Sequence[Split], timeout_s: float, age_max_s: float | None
) -> _Hold | None:
    kept = await stored_ranges(client, ranges, timeout_s)
    if not kept:
        return None
    pins = _pins.get(client)
    if pins is None:
        pins = _pins[client] = _Pins(client)
    hold = _Hold(pins, kept)
    pins.holds[hold] = None
    if age_max_s is not None:
        asyncio.get_running_loop().call_later(age_max_s, hold.end)
    pins.start()
    await pins.renew()
    return hold


class _Hold:
    """The ranges that one job reads."""

    def __init__(self, pins: _Pins, ranges: Sequence[Split]) -> None:
        self._pins = pins
        self.ranges = ranges

    def end(self) -> None:
        self._pins.holds.pop(self, None)
        self._pins.changed.set()


class _Pins:
    """The pins of one client: one for each topic, at the lowest starts of all holds."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.holds: dict[_Hold, None] = {}
        """The holds, as an ordered set."""
        self.changed = asyncio.Event()
        self._pin_ids: dict[str, str] = {}
        """The ids of the pins, by topic id."""
        self._renewing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def start(self) -> None:
        if self._task is None:
            self._task = self._client.environment.tasks.spawn(self._keep(), "pins of batch jobs")

    async def _keep(self) -> None:
        try:
            while (self.holds or self._pin_ids) and not self._is_closed:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RENEW_S):
                        await self.changed.wait()
                self.changed.clear()
                await self.renew()
        finally:
            del _pins[self._client]

    async def renew(self) -> None:
        """Updates the pins to match the holds."""
        async with self._renewing:
            wanted: dict[str, dict[int, int]] = {}
            for hold in self.holds:
                for split in hold.ranges:
                    starts = wanted.setdefault(split.topic_id, {})
                    starts[split.partition] = min(
                        split.start, starts.get(split.partition, split.start)
                    )
            for topic_id, starts in wanted.items():
                pin_id = self._pin_ids.setdefault(topic_id, self._client.environment.new_id())
                pin = PinSnapshot(pin_id=pin_id, topic_id=topic_id, starts=starts, ttl_ms=TTL_MS)
                # A topic that is unknown may only be hidden for a while, so it is asked for again.
                if not await self._change(pin):
                    # It may come late, and take a later one of that id back: that one ends by its
                    # time, and the next has an id of its own.
                    del self._pin_ids[topic_id]
            for topic_id in [pinned for pinned in self._pin_ids if pinned not in wanted]:
                await self._change(UnpinSnapshot(pin_id=self._pin_ids.pop(topic_id)))

    async def _change(self, change: PinSnapshot | UnpinSnapshot) -> bool:
        """Asks for a change. Returns whether it was confirmed."""
        try:
            await self._client.change(change, timeout_s=ASK_TIMEOUT_S)
        except ClosedError:
            self._is_closed = True  # The pins end by their time.
        except RayqError as error:
            logger.warning("what a batch job reads is not pinned for now: %s", error)
        else:
            return True
        return False
