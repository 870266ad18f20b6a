"""The simulated object store: what it has taken it keeps, and all else goes wrong when told to."""

from __future__ import annotations

import asyncio

import pytest

from proving.simulation import World
from proving.simulation.object_store import LATE_S, ProcessObjectStore, SimulatedObjectStore
from rayq.errors import RemoteDeniedError, RemoteMissingError, RemoteStorageError


async def outcome_of(store: ProcessObjectStore, name: str) -> str:
    try:
        await store.put(name, name.encode())
    except RemoteStorageError as error:
        return "denied" if isinstance(error, RemoteDeniedError) else "unknown"
    return "ok"


def test_objects_are_read_listed_and_deleted() -> None:
    with World(1) as world:
        process = world.host().process("p")
        store = ProcessObjectStore(SimulatedObjectStore(world), process)

        async def script() -> None:
            for name in ("a/2", "a/1", "b/1"):
                await store.put(name, name.encode() * 2)
            assert await store.get("a/1") == b"a/1a/1"
            assert await store.get("a/1", 2, 2) == b"1a"
            assert (await store.head("a/1")).size_bytes == 6
            assert [one.name for one in await store.list("a/")] == ["a/1", "a/2"]
            assert [one.name for one in await store.list("a/", "a/1")] == ["a/2"]
            await store.delete(["a/1", "none"])
            with pytest.raises(RemoteMissingError, match="a/1"):
                await store.get("a/1")

        world.run(process.run(script()))


def test_what_has_no_answer_was_done_or_not_or_is_done_later() -> None:
    with World(1) as world:
        process = world.host().process("p")
        objects = SimulatedObjectStore(world)
        store = ProcessObjectStore(objects, process)
        names = [f"{number:03}" for number in range(100)]

        async def script() -> tuple[list[str], list[str]]:
            objects.faults.unanswered = 0.5
            outcomes = await asyncio.gather(*(outcome_of(store, name) for name in names))
            now = objects.names()
            process.kill()
            return list(outcomes), now

        async def outside() -> None:
            outcomes, now = await asyncio.wait_for(script(), 60)
            ok = {name for name, one in zip(names, outcomes, strict=True) if one == "ok"}
            await asyncio.sleep(2 * LATE_S)
            assert 30 < len(ok) < 70
            assert ok < set(now) < set(objects.names()) < set(names)

        world.run(outside())


def test_it_is_away_for_some_and_refuses_others() -> None:
    with World(1) as world:
        hosts = [world.host(name) for name in ("far", "thief", "good")]
        objects = SimulatedObjectStore(world)
        stores = [ProcessObjectStore(objects, host.process("p")) for host in hosts]
        objects.faults.away.add("far")
        objects.faults.denied.add("thief")

        async def script() -> list[str]:
            return [await outcome_of(one, str(number)) for number, one in enumerate(stores)]

        assert world.run(script()) == ["unknown", "denied", "ok"]
        objects.heal()
        assert world.run(script()) == ["ok", "ok", "ok"]


def test_lists_and_bodies_that_are_wrong() -> None:
    with World(1) as world:
        process = world.host().process("p")
        objects = SimulatedObjectStore(world)
        store = ProcessObjectStore(objects, process)

        async def script() -> None:
            await store.put("a", b"0123456789")
            await asyncio.sleep(5)
            await store.put("b", b"b")
            await store.delete(["a"])
            objects.faults.stale_lists_s = 2.0
            seen = {
                tuple(one.name for one in await store.list("")) for _ in range(20)
            }
            assert {("a",), ("b",)} <= seen
            objects.faults.short_bodies = 0.5
            assert {len(await store.get("b")) for _ in range(20)} == {0, 1}
            objects.faults.short_bodies, objects.faults.flipped_bodies = 0.0, 0.5
            assert len({await store.get("b") for _ in range(20)}) > 2

        world.run(process.run(script()))


def test_an_object_is_written_once() -> None:
    with World(1) as world:
        objects = SimulatedObjectStore(world)
        objects.put("a", b"1", "p")
        objects.put("a", b"1", "p")
        with pytest.raises(AssertionError, match="other bytes"):
            objects.put("a", b"2", "p")
        assert [change.name for change in objects.changes] == ["a"]
