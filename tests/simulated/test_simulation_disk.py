"""The disk that crashes: synced bytes survive everything; others may come out in any way."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proving.simulation import Host, Process, ProcessDied, World
from proving.simulation.files import PAGE_BYTES
from rayq.environment import Disk


def new(seed: int = 1) -> tuple[World, Host, Process, Disk]:
    world = World(seed)
    host = world.host()
    process = host.process("p")
    return world, host, process, process.environment.disk


@pytest.fixture
def disk() -> Iterator[Disk]:
    world, _, _, disk = new()
    yield disk
    world.close()


def outcomes(write: object, seeds: int = 60, path: str = "/d/f") -> set[bytes | None]:
    """The contents that `path` has after `write(disk)` and a power loss, for many seeds."""
    assert callable(write)
    found: set[bytes | None] = set()
    for seed in range(seeds):
        world, host, _, disk = new(seed)
        disk.make_dirs("/d")
        write(disk)
        host.power_loss()
        found.add(host.disk.read(path) if path in host.disk.paths() else None)
        world.close()
    return found


def put(disk: Disk, path: str, content: bytes, *, sync: bool = True) -> None:
    file = disk.open(path, create=True)
    file.pwrite(content, 0)
    if sync:
        file.sync_data()
    file.close()


def test_a_file_reads_as_it_was_written(disk: Disk) -> None:
    disk.make_dirs("/a/b")
    file = disk.open("/a/b/f", create=True)
    assert file.pwrite(b"hello", 0) == 5
    assert file.pwrite(memoryview(b"world"), 10) == 5
    assert file.pread(100, 0) == b"hello\0\0\0\0\0world"
    assert file.size() == 15
    file.truncate(3)
    assert file.pread(100, 0) == b"hel"
    assert disk.list("/a/b") == ["f"]
    assert disk.list("/nothing") == []
    assert disk.exists("/a/b") and not disk.exists("/a/c")


def test_opening_and_renaming_fail_as_on_a_real_disk(disk: Disk) -> None:
    disk.make_dirs("/a/full")
    put(disk, "/a/full/f", b"")
    put(disk, "/a/g", b"")
    with pytest.raises(FileNotFoundError):
        disk.open("/a/none")
    with pytest.raises(FileNotFoundError):
        disk.open("/none/f", create=True)
    with pytest.raises(IsADirectoryError):
        disk.open("/a")
    with pytest.raises(FileNotFoundError):
        disk.rename("/a/none", "/a/x")
    with pytest.raises(IsADirectoryError):
        disk.rename("/a/g", "/a/full")
    with pytest.raises(NotADirectoryError):
        disk.make_dirs("/a/g/h")
    with pytest.raises(OSError, match="Bad file descriptor"):
        disk.open("/a/g", writable=False).pwrite(b"x", 0)
    disk.remove_tree("/a")
    assert disk.list("/") == []


def test_a_directory_moves_with_all_that_is_in_it(disk: Disk) -> None:
    disk.make_dirs("/a/b")
    disk.make_dirs("/q")
    put(disk, "/a/b/f", b"x")
    disk.rename("/a/b", "/q/b")
    assert disk.open("/q/b/f").pread(1, 0) == b"x"
    assert disk.list("/a") == []


def test_what_was_synced_survives_a_power_loss() -> None:
    def write(disk: Disk) -> None:
        put(disk, "/d/f", b"kept" * 5000)
        disk.sync_dir("/d")

    assert outcomes(write) == {b"kept" * 5000}


def test_a_synced_file_may_be_lost_with_its_unsynced_name() -> None:
    assert outcomes(lambda disk: put(disk, "/d/f", b"kept")) == {b"kept", None}


def test_an_unsynced_append_comes_out_in_any_way_above_what_was_synced() -> None:
    def write(disk: Disk) -> None:
        put(disk, "/d/f", b"a" * 5000)
        disk.sync_dir("/d")
        file = disk.open("/d/f")
        file.pwrite(b"b" * 20_000, 5000)

    found = outcomes(write, seeds=200)
    assert all(content is not None and content[:5000] == b"a" * 5000 for content in found)
    tails = {content[5000:] for content in found if content is not None}
    assert b"" in tails and b"b" * 20_000 in tails
    assert any(tail.strip(b"b").strip(b"\0") == b"" and b"\0b" in tail for tail in tails)  # a hole
    assert any(0 < len(tail.rstrip(b"\0")) % PAGE_BYTES < 20_000 for tail in tails)  # torn
    assert len(tails) > 40


def test_an_unsynced_truncation_may_not_have_happened() -> None:
    def write(disk: Disk) -> None:
        put(disk, "/d/f", b"a" * 9000)
        disk.sync_dir("/d")
        disk.open("/d/f").truncate(100)

    found = outcomes(write)
    assert {b"a" * 9000, b"a" * 100} <= found
    assert all(content is not None and set(content) <= {ord("a")} for content in found)


def test_directory_changes_survive_in_their_order() -> None:
    found = set()
    for seed in range(60):
        world, host, _, disk = new(seed)
        disk.make_dirs("/d")
        for name in "abc":
            put(disk, f"/d/{name}", b"")
        host.power_loss()
        found.add("".join(path[-1] for path in host.disk.paths()))
        world.close()
    assert found == {"", "a", "ab", "abc"}


def test_a_rename_is_atomic_and_replaces() -> None:
    def write(disk: Disk) -> None:
        put(disk, "/d/f", b"old")
        disk.sync_dir("/d")
        put(disk, "/d/f.tmp", b"new")
        disk.rename("/d/f.tmp", "/d/f")

    assert outcomes(write) == {b"old", b"new"}


def test_a_move_between_directories_happens_in_both_or_in_neither() -> None:
    for seed in range(60):
        world, host, _, disk = new(seed)
        disk.make_dirs("/d")
        disk.make_dirs("/q")
        put(disk, "/d/f", b"x")
        disk.sync_dir("/d")
        put(disk, "/q/other", b"")
        disk.rename("/d/f", "/q/f")
        put(disk, "/d/later", b"")
        if seed % 2:
            disk.sync_dir("/q")
        host.power_loss()
        paths = host.disk.paths()
        assert ("/d/f" in paths) != ("/q/f" in paths)
        if seed % 2:
            assert "/q/f" in paths and "/q/other" in paths
        world.close()


def test_a_process_crash_keeps_the_page_cache() -> None:
    world, host, process, disk = new()
    disk.make_dirs("/d")
    put(disk, "/d/f", b"unsynced", sync=False)
    process.kill()
    assert host.process("q").environment.disk.open("/d/f").pread(99, 0) == b"unsynced"
    world.close()


def test_a_dead_process_cannot_touch_the_disk() -> None:
    world, host, process, disk = new()
    file = disk.open("/f", create=True)
    process.kill()
    for act in (
        lambda: file.pwrite(b"x", 0),
        lambda: file.pread(1, 0),
        file.sync_data,
        file.close,
        lambda: disk.open("/g", create=True),
        lambda: disk.list("/"),
        lambda: disk.rename("/f", "/g"),
    ):
        with pytest.raises(ProcessDied):
            act()
    assert host.disk.read("/f") == b""
    world.close()


def test_a_kill_in_a_write_leaves_a_part_of_it() -> None:
    lengths = set()
    for seed in range(50):
        world, host, process, disk = new(seed)
        file = disk.open("/f", create=True)
        file.pwrite(b"a" * 10, 0)
        process.kill_at_disk_operation(1)
        with pytest.raises(ProcessDied):
            file.pwrite(b"b" * 100, 10)
        assert not process.alive
        content = host.disk.read("/f")
        assert content[:10] == b"a" * 10 and set(content[10:]) <= {ord("b")}
        lengths.add(len(content))
        world.close()
    assert len(lengths) > 20


def test_a_kill_in_a_rename_is_before_or_after_it() -> None:
    found = set()
    for seed in range(20):
        world, host, process, disk = new(seed)
        put(disk, "/f", b"")
        process.kill_at_disk_operation(1, power_loss=seed % 2 == 0)
        with pytest.raises(ProcessDied):
            disk.rename("/f", "/g")
        if seed % 2:
            found.add(tuple(host.disk.paths()))
        else:
            assert not host.up
        world.close()
    assert found == {("/f",), ("/g",)}


def test_a_lock_is_exclusive_until_it_is_closed_or_its_holder_dies() -> None:
    world, host, process, disk = new()
    other = host.process("q").environment.disk
    first = disk.open("/lock", create=True)
    second = other.open("/lock")
    assert first.try_lock() and first.try_lock()
    assert not second.try_lock()
    first.close()
    assert second.try_lock()
    again = disk.open("/lock")
    assert not again.try_lock()
    second.close()
    assert again.try_lock()
    process.kill()
    assert other.open("/lock").try_lock()
    world.close()


def test_a_failed_sync_loses_its_pages_for_good() -> None:
    lost = False
    for seed in range(30):
        world, host, _, disk = new(seed)
        file = disk.open("/f", create=True)
        disk.sync_dir("/")
        file.pwrite(b"a" * 9000, 0)
        fault = host.disk.fail("sync", path_part="/f", times=1)
        with pytest.raises(OSError, match="Input/output") as caught:
            file.sync_data()
        assert caught.value.errno == errno.EIO
        assert fault.times_left == 0
        file.sync_data()  # raises nothing: the pages count as clean
        host.power_loss()
        lost |= host.disk.read("/f") != b"a" * 9000
        world.close()
    assert lost


def test_faults_are_raised_where_they_were_set_until_healed(disk: Disk) -> None:
    world, host, _, disk = new()
    file, other = disk.open("/bad", create=True), disk.open("/good", create=True)
    fault = host.disk.fail("read", "write", path_part="bad")
    with pytest.raises(OSError, match="/bad"):
        file.pwrite(b"x", 0)
    with pytest.raises(OSError, match="/bad"):
        file.pread(1, 0)
    assert other.pwrite(b"x", 0) == 1
    fault.heal()
    assert file.pwrite(b"x", 0) == 1
    world.close()


def test_a_full_disk_writes_short_then_refuses() -> None:
    world, host, _, disk = new()
    host.disk.capacity_bytes = 100
    file = disk.open("/f", create=True)
    assert file.pwrite(b"a" * 80, 0) == 80
    assert disk.free_bytes("/") == 20
    assert file.pwrite(b"b" * 80, 80) == 20
    with pytest.raises(OSError, match="No space") as caught:
        file.pwrite(b"c", 100)
    assert caught.value.errno == errno.ENOSPC
    assert file.pwrite(b"c" * 100, 0) == 100  # overwriting needs no room
    host.disk.capacity_bytes = None
    assert file.pwrite(b"d" * 100, 100) == 100
    world.close()


def test_short_writes_cold_reads_and_flipped_bits() -> None:
    world, host, _, disk = new()
    file = disk.open("/f", create=True)
    file.pwrite(b"a" * 100, 0)
    assert sum(file.pread_cached(1, 0) is None for _ in range(1000)) in range(10, 150)
    host.disk.short_writes = 1.0
    assert 1 <= file.pwrite(b"b" * 50, 100) <= 50
    position = host.disk.flip_bit("/f")
    flipped = file.pread(1000, 0)
    assert sum(byte not in b"ab" for byte in flipped) == 1 and flipped[position] not in b"ab"
    world.close()


def test_a_stalled_sync_holds_its_thread_but_not_the_loop() -> None:
    world, host, process, disk = new()

    async def script() -> None:
        file = disk.open("/f", create=True)
        host.disk.stall(5)
        ticks = 0
        syncing = process.start(process.environment.threads.run(file.sync_data))
        while not syncing.done():
            await asyncio.sleep(0.1)
            ticks += 1
        assert 50 <= ticks <= 52

    world.run(process.run(script()))
    world.close()


def test_a_stalled_sync_on_the_loop_holds_the_process() -> None:
    world, host, process, disk = new()

    async def script() -> float:
        loop = asyncio.get_running_loop()
        file = disk.open("/f", create=True)
        host.disk.stall(5)
        file.sync_data()
        start = loop.time()
        await asyncio.sleep(0.001)
        return loop.time() - start

    assert 5 <= world.run(process.run(script())) < 5.1
    world.close()


def test_a_copy_of_a_disk_is_what_was_there_then() -> None:
    world, host, process, disk = new()
    put(disk, "/f", b"old", sync=False)
    backup = host.disk.copy("backup")
    put(disk, "/f", b"new")
    process.kill()
    host.swap_disk(backup)
    host.power_loss()
    assert host.process("q").environment.disk.open("/f").pread(9, 0) == b"old"
    world.close()


@given(
    seed=st.integers(0, 10_000),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(1, 9000)),
            st.tuples(st.just("sync"), st.none()),
            st.tuples(st.just("cut"), st.integers(0, 9000)),
            st.tuples(st.just("crash"), st.none()),
        ),
        max_size=12,
    ),
)
def test_an_append_only_file_keeps_its_synced_part(
    seed: int, steps: list[tuple[str, int | None]]
) -> None:
    """Whatever is appended, synced and cut: a power loss leaves all synced bytes, and any other
    byte is zero or from the file."""
    world, host, process, _ = new(seed)
    disk = process.environment.disk
    disk.open("/f", create=True).close()
    disk.sync_dir("/")
    expected, synced, byte = b"", 0, 1
    for step, argument in [*steps, ("crash", None)]:
        file = disk.open("/f")
        if step == "append":
            assert argument is not None
            file.pwrite(bytes([byte]) * argument, len(expected))
            expected += bytes([byte]) * argument
            byte = byte % 250 + 1
        elif step == "cut":
            assert argument is not None
            expected = expected[: max(0, len(expected) - argument)]
            file.truncate(len(expected))
            synced = min(synced, len(expected))
        elif step == "sync":
            file.sync_data()
            synced = len(expected)
        else:
            host.power_loss()
            content = host.disk.read("/f")
            assert content[:synced] == expected[:synced]
            expected, synced = content, len(content)
            disk = host.process("next").environment.disk
    world.close()


def test_the_disk_knows_what_a_power_loss_would_leave() -> None:
    world, host, _, disk = new()
    disk.make_dirs("/d")
    file = disk.open("/d/f", create=True)
    file.pwrite(b"0123456789", 0)
    file.sync_data()
    assert not host.disk.is_durable("/d/f", 0, 10)  # its name is not
    disk.sync_dir("/d")
    assert host.disk.is_durable("/d/f", 0, 10)
    file.pwrite(b"x", 8)
    assert host.disk.is_durable("/d/f", 0, 8) and not host.disk.is_durable("/d/f", 0, 9)
    file.truncate(4)
    file.pwrite(b"4567", 4)
    assert host.disk.is_durable("/d/f", 0, 4) and not host.disk.is_durable("/d/f", 4, 8)
    file.sync_data()
    assert host.disk.is_durable("/d/f", 0, 8) and not host.disk.is_durable("/d/f", 0, 9)
    world.close()
