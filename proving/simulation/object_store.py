"""An object store that fails: `environment.ObjectStore` over objects that the whole world shares.

What it has taken is durable. All else goes wrong: requests take long, fail, or go unanswered with
their work done, not done, or done half a minute later, when whoever asked is long dead. It refuses
credentials, is away for some hosts or for all, sends bodies that are too short or have a wrong bit,
and lists what it held a minute ago.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from proving.simulation.process import Process
from proving.simulation.world import START_WALL_MS, World
from rayq.environment import Buffer, ObjectMeta
from rayq.errors import (
    RemoteDeniedError,
    RemoteMissingError,
    RemoteStorageError,
)

T = TypeVar("T")

LATENCY_S = (0.002, 0.03)
"""Time of a request in seconds, at least and usually at most; one in a hundred takes 20 times as
long."""

DEADLINE_S = 4.0
"""A request fails after this time without an answer."""

LATE_S = 30.0
"""The work of a request that failed so may be done this much later."""

LISTED_MAX = 1000


@dataclass(slots=True)
class StoredObject:
    """An object, from its first PUT to its end."""

    data: bytes
    put_s: float
    deleted_s: float | None = None


@dataclass(frozen=True, slots=True)
class StoreChange:
    """A PUT or a DELETE that was carried out; `by` is the process that had asked for it, `host`
    its host."""

    name: str
    is_deleted: bool
    by: str
    host: str


@dataclass
class StoreFaults:
    """The probabilities, from 0 to 1, of what goes wrong with a request."""

    refused: float = 0.0
    """503: it was not carried out."""
    unanswered: float = 0.0
    """A timeout: no answer comes until the deadline."""
    short_bodies: float = 0.0
    flipped_bodies: float = 0.0
    """Bytes per second of a GET."""
    stale_lists_s: float = 0.0
    """A LIST shows what was there up to so long ago."""
    away: set[str] = field(default_factory=set)
    """The names of the hosts that do not reach it."""
    denied: set[str] = field(default_factory=set)
    """The names of the hosts whose credentials it refuses."""


class SimulatedObjectStore:
    """The store itself. Processes use a `ProcessObjectStore`.

    `changes` has all PUTs and DELETEs in the order in which they were carried out. Its clock is off
    by `clock_offset_ms`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.faults = StoreFaults()
        self.latency_s = LATENCY_S
        self.bytes_per_s: float | None = None
        self.changes: list[StoreChange] = []
        self.requests = 0
        self.rng = world.new_random("object store")
        self.clock_offset_ms = self.rng.randint(-3_600_000, 3_600_000)
        self._objects: dict[str, StoredObject] = {}
        self._gone: list[tuple[str, StoredObject]] = []
        """Objects that were deleted, for lists that are stale."""

    # --- for the test -----------------------------------------------------------------------------

    def names(self) -> list[str]:
        return sorted(self._objects)

    def find(self, name: str) -> bytes | None:
        """The bytes of an object. None: there is none of that name."""
        found = self._objects.get(name)
        return None if found is None else found.data

    def lose(self, name: str) -> None:
        """An object is gone though nobody deleted it, as by a lifecycle rule."""
        self.world.trace.note(f"the store loses {name}")
        self._objects.pop(name)

    def heal(self) -> None:
        self.faults = StoreFaults()
        self.latency_s, self.bytes_per_s = LATENCY_S, None

    # --- what requests do -------------------------------------------------------------------------

    def put(self, name: str, data: bytes, by: str, host: str = "") -> None:
        held = self._objects.get(name)
        if held is None:
            self._objects[name] = StoredObject(data, self.world.now_s)
            self._changed(StoreChange(name, False, by, host))
        else:
            assert held.data == data, f"{by} puts other bytes as {name}, which is there"

    def delete(self, names: Sequence[str], by: str, host: str = "") -> None:
        for name in names:
            held = self._objects.pop(name, None)
            if held is not None:
                held.deleted_s = self.world.now_s
                self._gone.append((name, held))
                self._changed(StoreChange(name, True, by, host))

    def list(self, prefix: str, after: str, age_s: float) -> list[ObjectMeta]:
        """Returns the objects that were there `age_s` ago."""
        then_s = self.world.now_s - age_s
        was_there = [
            (name, item)
            for name, item in [*self._objects.items(), *(self._gone if age_s else ())]
            if item.put_s <= then_s
            and (item.deleted_s is None or item.deleted_s > then_s)
            and name.startswith(prefix)
            and name > after
        ]
        listed = {name: self.meta(name, item) for name, item in was_there}
        return [listed[name] for name in sorted(listed)[:LISTED_MAX]]

    def get(self, name: str) -> StoredObject:
        found = self._objects.get(name)
        if found is None:
            raise RemoteMissingError(f"There is no object {name}.")
        return found

    def meta(self, name: str, found: StoredObject) -> ObjectMeta:
        modified_ms = START_WALL_MS + int(found.put_s * 1000) + self.clock_offset_ms
        return ObjectMeta(name, len(found.data), modified_ms)

    def _changed(self, change: StoreChange) -> None:
        self.changes.append(change)
        what = "deletes" if change.is_deleted else "puts"
        self.world.trace.note(f"{change.by} {what} {change.name}")


class ProcessObjectStore:
    """`environment.ObjectStore` of one process: requests on their way to the store and back."""

    def __init__(self, store: SimulatedObjectStore, process: Process) -> None:
        self._store = store
        self._process = process
        self._rng = random.Random(store.rng.getrandbits(64))

    async def put(self, name: str, data: Buffer) -> None:
        content = bytes(data)
        who = self._process.name, self._process.host.name
        await self._ask("PUT", name, lambda: self._store.put(name, content, *who), len(content))

    async def get(self, name: str, position: int = 0, length: int | None = None) -> bytes:
        def read() -> bytes:
            data = self._store.get(name).data
            return data[position:] if length is None else data[position : position + length]

        body = await self._ask("GET", name, read)
        faults, rng = self._store.faults, self._rng
        if body and rng.random() < faults.short_bodies:
            return body[: rng.randrange(len(body))]
        if body and rng.random() < faults.flipped_bodies:
            flipped = bytearray(body)
            flipped[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
            return bytes(flipped)
        return body

    async def head(self, name: str) -> ObjectMeta:
        return await self._ask(
            "HEAD", name, lambda: self._store.meta(name, self._store.get(name))
        )

    async def list(self, prefix: str, after: str = "") -> list[ObjectMeta]:
        stale_s = self._store.faults.stale_lists_s
        age_s = self._rng.uniform(0, stale_s) if stale_s and self._rng.random() < 0.5 else 0.0
        return await self._ask("LIST", prefix, lambda: self._store.list(prefix, after, age_s))

    async def delete(self, names: Sequence[str]) -> None:
        chosen, who = list(names), (self._process.name, self._process.host.name)
        what = chosen[0] if chosen else ""
        await self._ask("DELETE", what, lambda: self._store.delete(chosen, *who))

    async def sign(self, name: str, expires_s: float) -> str:
        return f"simulated:{name}"

    async def _ask(self, verb: str, name: str, work: Callable[[], T], size: int = 0) -> T:
        """Sends a request, which is carried out whatever becomes of the process meanwhile."""
        self._process.check_alive()
        store, rng, loop = self._store, self._rng, self._store.world.loop
        store.requests += 1
        faults, host = store.faults, self._process.host.name
        least, usual = store.latency_s
        takes_s = least + (usual - least) * rng.random() ** 2
        if rng.random() < 0.01:
            takes_s *= rng.uniform(1, 20)
        if store.bytes_per_s is not None:
            takes_s += size / store.bytes_per_s
        if host in faults.denied:
            await asyncio.sleep(takes_s)
            raise RemoteDeniedError(f"{verb} {name}: 403, the credentials are refused.")
        if host in faults.away:
            await asyncio.sleep(rng.choice((takes_s, DEADLINE_S)))
            raise RemoteStorageError(f"{verb} {name}: the store cannot be reached.")
        if rng.random() < faults.refused:
            await asyncio.sleep(takes_s)
            raise RemoteStorageError(f"{verb} {name}: 503, slow down.")
        answer: asyncio.Future[T] = loop.create_future()
        is_unanswered = rng.random() < faults.unanswered or takes_s > DEADLINE_S
        arrives_s = takes_s * rng.random()
        if is_unanswered:
            # Never, now, or long after.
            arrives_s = rng.choice((float("inf"), arrives_s, rng.uniform(0, LATE_S)))

        def arrive() -> None:
            if not self._process.alive and rng.random() < 0.5:
                return  # Its last bytes never left the host.
            try:
                result = work()
            except RemoteMissingError as error:
                if not is_unanswered:
                    loop.call_later(takes_s - arrives_s, _fail, answer, error)
                return
            if not is_unanswered:
                loop.call_later(takes_s - arrives_s, _succeed, answer, result)

        if arrives_s < float("inf"):
            loop.call_later(arrives_s, arrive, context=loop.root.context)
        try:
            return await asyncio.wait_for(answer, DEADLINE_S)
        except TimeoutError:
            raise RemoteStorageError(
                f"{verb} {name}: no answer in {DEADLINE_S:.0f} s; whether it was done is not known."
            ) from None


def _succeed(answer: asyncio.Future[T], result: T) -> None:
    if not answer.done():
        answer.set_result(result)


def _fail(answer: asyncio.Future[T], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
