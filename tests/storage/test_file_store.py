"""An object store in a directory: names, pages, and crashes at every step of a PUT."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from proving.simulation import Process, ProcessDied, World
from rayq.client.environment import system_environment
from rayq.errors import (
    ConfigError,
    InvalidRequestError,
    RemoteDeniedError,
    RemoteMissingError,
    RemoteStorageError,
)
from rayq.runtime import file_store
from rayq.runtime.file_store import FileStore
from rayq.wire.object_urls import open_object_url

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(system_environment(), str(tmp_path))


def test_objects_are_listed_in_the_order_of_their_names_page_by_page(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_store, "LIST_OBJECTS_MAX", 3)
    names = sorted(["a/1", "a/10", "a/2/x", "a/2/y", "a/2-b", "b/1", "a-b/1", "c"])

    async def script() -> None:
        for name in names:
            await store.put(name, name.encode())
        for prefix in ("", "a/", "a/2/", "b/", "z/"):
            found: list[str] = []
            while page := await store.list(prefix, found[-1] if found else ""):
                assert len(page) <= 3
                found += [one.name for one in page]
                assert [one.size_bytes for one in page] == [len(one.name) for one in page]
            assert found == [name for name in names if name.startswith(prefix)]
        await store.delete(["a/1", "nothing/here"])
        assert [one.name for one in await store.list("a/1")] == ["a/10"]

    run(script())


def test_a_part_of_an_object_ends_where_the_object_ends(store: FileStore) -> None:
    async def script() -> None:
        await store.put("a/b", b"0123456789")
        assert await store.get("a/b") == b"0123456789"
        assert await store.get("a/b", 4) == b"456789"
        assert await store.get("a/b", 4, 3) == b"456"
        assert await store.get("a/b", 8, 9) == b"89"
        assert await store.get("a/b", 20, 9) == b""
        head = await store.head("a/b")
        assert head.size_bytes == 10
        assert abs(head.modified_ms - time.time() * 1000) < 60_000

    run(script())


def test_a_file_is_signed_as_its_path(tmp_path: Path) -> None:
    (tmp_path / "with a space").mkdir()
    store = FileStore(system_environment(), str(tmp_path / "with a space"))
    run(store.put("a/b", b"0123456789"))
    opened = open_object_url(run(store.sign("a/b", 60)), 2, 3)
    assert opened.read(3) == b"234"
    opened.close()


def test_errors_say_what_is_missing(tmp_path: Path) -> None:
    async def script() -> None:
        store = FileStore(system_environment(), str(tmp_path / "mount"))
        for ask in (lambda: store.put("a/b", b"x"), lambda: store.get("a/b"), lambda: store.list("")):
            with pytest.raises(RemoteStorageError, match="mounted"):
                await ask()
        assert not (tmp_path / "mount").exists(), "what is not mounted is not made"
        (tmp_path / "mount").mkdir()
        for read in (store.get, store.head):
            with pytest.raises(RemoteMissingError, match="mount/a/b"):
                await read("a/b")
        assert await store.list("a/") == []
        for name in ("../x", "a//b", "/etc/passwd", "a/.hidden", ""):
            with pytest.raises(InvalidRequestError):
                await store.put(name, b"x")
        if os.geteuid() != 0:
            (tmp_path / "mount").chmod(0o500)
            with pytest.raises(RemoteDeniedError):
                await store.put("a/b", b"x")

    run(script())


@pytest.mark.parametrize("path", ["", "/", "relative/path", "/.."])
def test_only_a_directory_of_its_own_is_taken(path: str) -> None:
    with pytest.raises(ConfigError):
        FileStore(system_environment(), path)


def test_what_is_far_too_large_is_not_read_whole(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_store, "REFUSED_WHOLE_BYTES", 5)
    monkeypatch.setattr(file_store, "DURABLE_MAX", 3)

    async def script() -> None:
        for number in range(9):
            await store.put(f"{number}/large", b"123456")
            assert len(store._durable) <= file_store.DURABLE_MAX + 1
        with pytest.raises(RemoteStorageError, match="has 6 bytes, which are not read at once"):
            await store.get("1/large")
        assert await store.get("1/large", 1) == b"23456"
        assert await store.get("1/large", 0, 6) == b"123456"

    run(script())


def test_a_full_disk_leaves_no_part_of_an_object() -> None:
    with World(1) as world:
        host = world.host()
        process = host.process("objects")
        environment = process.environment
        environment.disk.make_dirs("/mount")
        host.disk.capacity_bytes = 1000

        async def script() -> None:
            store = _on(process)
            with pytest.raises(RemoteStorageError, match="space"):
                await store.put("a/b", b"x" * 2000)
            await store.put("a/b", b"y" * 900)
            assert await store.get("a/b") == b"y" * 900
            assert environment.disk.list("/mount/a") == ["b"]

        world.run(process.run(script()))


@pytest.mark.parametrize("power_loss", [False, True])
def test_a_crash_leaves_the_whole_object_or_none(power_loss: bool) -> None:
    content = bytes(range(256)) * 8
    operation, is_through = 0, False
    while not is_through:
        operation += 1
        with World(10 * operation + power_loss) as world:
            host = world.host()
            process = host.process("objects")
            process.environment.disk.make_dirs("/mount")
            process.kill_at_disk_operation(operation, power_loss=power_loss)
            try:
                world.run(process.run(_on(process).put("a/b/c", content)))
                is_through = True
                host.power_loss()  # What was answered stays.
            except (ProcessDied, asyncio.CancelledError):
                pass
            after = host.process("objects")
            try:
                assert world.run(after.run(_on(after).get("a/b/c"))) == content
            except RemoteMissingError:
                assert not is_through
            # The next PUT is durable, whoever made its directories.
            world.run(after.run(_on(after).put("a/b/d", content)))
            host.power_loss()
            last = host.process("objects")
            assert world.run(last.run(_on(last).get("a/b/d"))) == content
    assert operation > 5, "the test crashed in each of them"


def test_what_a_crash_has_left_is_removed_a_day_later(store: FileStore, tmp_path: Path) -> None:
    async def script() -> None:
        await store.put("a/b", b"x")
        for name, age_s in (("old", 90_000), ("new", 0)):
            left = tmp_path / "a" / f".{name}.part"
            left.write_bytes(b"half")
            os.utime(left, (time.time() - age_s,) * 2)
        assert [one.name for one in await store.list("a/")] == ["a/b"]
        assert sorted(os.listdir(tmp_path / "a")) == [".new.part", "b"]

    run(script())


def _on(process: Process) -> FileStore:
    """A store on the simulated disk of a process."""
    return FileStore(process.environment, "/mount")


def test_files_that_no_object_can_be_are_neither_listed_nor_reached(
    store: FileStore, tmp_path: Path
) -> None:
    """Somebody else may use the mount; what is listed is sent to servers as text."""
    os.makedirs(os.fsencode(tmp_path) + b"/a/\xff")
    for name in (b"a/\xfe", b"a/\xff/x", b"a/sound"):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_bytes(b"x")

    async def script() -> None:
        assert [one.name for one in await store.list("a/")] == ["a/sound"]
        for wrong in ("a/\0", "../x", "a/../b", "/etc/x", "a//b", "", "a/", "a/\udcfe", "a/.hidden"):
            for ask in (
                store.put(wrong, b""), store.get(wrong), store.head(wrong), store.delete([wrong])
            ):
                with pytest.raises(InvalidRequestError):
                    await ask

    run(script())
