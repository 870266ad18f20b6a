"""The checkpoint of a streaming query: what a crash at each disk operation leaves, damage, locks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import fsspec
import msgspec
import pytest

from proving.simulation import ProcessDied, World
from rayq.batch.offset_ranges import Split
from rayq.environment import Disk
from rayq.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointInUseError,
    UnsupportedFormatError,
)
from rayq.spark.batches import MicroBatch, Resumption, after
from rayq.spark.checkpoint import BATCHES_KEPT, Checkpoint, QueryMetadata
from rayq.spark.checkpoint_store import (
    CheckpointHolder,
    FsspecStore,
    LeaseLock,
    LocalStore,
    Store,
    this_process,
)

TOPIC_ID = "a" * 32
START = [Split("flights", TOPIC_ID, 0, 3, 3), Split("flights", TOPIC_ID, 1, 0, 0)]
METADATA = QueryMetadata("query", "cluster", ["flights"], None, 1, START)
PATH = "/checkpoints/query"
HOLDER = CheckpointHolder("host", 1, 1, "run")


def batch_of(number: int, variant: int = 0) -> MicroBatch:
    """Batch `number`, as one process decides it; another `variant` finds more records in the
    log."""
    start = 3 + 10 * number
    ranges = [Split("flights", TOPIC_ID, 0, start, start + 10), START[1]]
    return MicroBatch(number, variant, ranges)


def start(checkpoint: Checkpoint) -> Resumption:
    metadata = checkpoint.metadata()
    if metadata is None:
        metadata = METADATA
        checkpoint.create(metadata)
    assert metadata == METADATA
    return checkpoint.resume(metadata)


def run(checkpoint: Checkpoint, count: int, variant: int, ran: list[MicroBatch]) -> None:
    """Runs a query up to the batch `count`. `ran` gets the batches in the order in which they
    ran."""
    found = start(checkpoint)
    progress = found.progress
    if found.replay is not None:
        ran.append(found.replay)
        checkpoint.commit(found.replay.batch_id, 1)
    while progress.next_id < count:
        batch = batch_of(progress.next_id, variant)
        assert batch.ranges[0].start == progress.positions[0].start
        checkpoint.write_batch(batch)
        ran.append(batch)
        checkpoint.commit(batch.batch_id, 1)
        progress = after(batch)


def at_local(path: Path, run_id: str = "run") -> Checkpoint:
    return Checkpoint.open(path, run_id)


def filled(path: Path, count: int = 2) -> None:
    checkpoint = at_local(path)
    run(checkpoint, count, 0, [])
    checkpoint.close()


# --- crashes --------------------------------------------------------------------------------------


def on(disk: Disk) -> Checkpoint:
    return Checkpoint.of(LocalStore(disk, PATH, HOLDER))


@pytest.mark.parametrize("power_loss", [False, True], ids=["killed", "power loss"])
def test_a_crash_at_any_disk_operation_replays_the_same_batch(power_loss: bool) -> None:
    operation, is_through = 0, False
    while not is_through:
        operation += 1
        with World(operation) as world:
            host = world.host()
            process = host.process("driver")
            process.kill_at_disk_operation(operation, power_loss=power_loss)
            ran: list[MicroBatch] = []
            try:
                run(on(process.environment.disk), 3, 0, ran)
                is_through = True
            except ProcessDied:
                pass
            if process.alive:
                process.kill()
            # The start after it dies as well, a little later each time; the one after that works.
            second = host.process("driver")
            second.kill_at_disk_operation(1 + operation % 13, power_loss=power_loss)
            try:
                run(on(second.environment.disk), 4, 1, ran)
            except ProcessDied:
                pass
            if second.alive:
                second.kill()
            third = on(host.process("driver").environment.disk)
            run(third, 5, 2, ran)
            assert start_again(third) == Resumption(None, after(ran[-1]))
            third.close()

            by_id: dict[int, MicroBatch] = {}
            for batch in ran:
                assert by_id.setdefault(batch.batch_id, batch) == batch
            ids = [batch.batch_id for batch in ran]
            assert ids == sorted(ids) and sorted(by_id) == [0, 1, 2, 3, 4]
            assert len(ids) <= 5 + 2, "a crash repeats one batch"
    assert operation > 40, "the test crashed in each of them"


def start_again(checkpoint: Checkpoint) -> Resumption:
    metadata = checkpoint.metadata()
    assert metadata is not None
    return checkpoint.resume(metadata)


def test_a_full_disk_is_an_error_that_names_the_file_and_the_next_start_goes_on() -> None:
    with World(1) as world:
        host = world.host()
        process = host.process("driver")
        checkpoint = on(process.environment.disk)
        run(checkpoint, 2, 0, [])
        host.disk.capacity_bytes = 0
        with pytest.raises(CheckpointError, match=f"offsets/2 of the checkpoint {PATH}"):
            checkpoint.write_batch(batch_of(2))
        checkpoint.close()
        host.disk.capacity_bytes = None
        found = start(on(process.environment.disk))
        assert found == Resumption(None, after(batch_of(1)))


# --- what is kept ---------------------------------------------------------------------------------


def test_the_layout_is_that_of_spark(tmp_path: Path) -> None:
    filled(tmp_path / "c", 2)
    files = {str(one.relative_to(tmp_path / "c")) for one in (tmp_path / "c").rglob("*")}
    assert files == {
        "lock", "metadata", "offsets", "offsets/0", "offsets/1", "commits", "commits/0", "commits/1",
    }  # fmt: skip
    text = (tmp_path / "c/offsets/1").read_text()
    assert text.startswith("rayq offsets 1 ") and '["flights"' in text


def test_old_batches_are_forgotten(tmp_path: Path) -> None:
    filled(tmp_path, BATCHES_KEPT + 5)
    names = sorted(int(one.name) for one in (tmp_path / "offsets").iterdir())
    assert names == list(range(5, BATCHES_KEPT + 5))
    (tmp_path / "offsets/1").write_bytes(b"left by a crash")
    checkpoint = at_local(tmp_path)
    assert start(checkpoint).progress.next_id == BATCHES_KEPT + 5
    assert not (tmp_path / "offsets/1").exists()


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["metadata", "offsets/1", "commits/1"])
@pytest.mark.parametrize("how", ["flip", "cut", "empty"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, how: str) -> None:
    filled(tmp_path)
    data = bytearray((tmp_path / name).read_bytes())
    if how == "flip":
        data[-5] ^= 1
    (tmp_path / name).write_bytes({"flip": data, "cut": data[:-4], "empty": b""}[how])
    checkpoint = at_local(tmp_path)
    with pytest.raises(CheckpointDamagedError, match=f"{name} cannot be used.*Restore it"):
        start(checkpoint)
    checkpoint.close()


@pytest.mark.parametrize("missing", ["metadata", "offsets/1", "commits/0 commits/1"])
def test_a_missing_file_is_damage(tmp_path: Path, missing: str) -> None:
    filled(tmp_path)
    for name in missing.split():
        (tmp_path / name).unlink()
    checkpoint = at_local(tmp_path)
    with pytest.raises(CheckpointDamagedError):
        start(checkpoint)


def test_a_batch_of_another_query_is_damage(tmp_path: Path) -> None:
    filled(tmp_path / "one")
    other = at_local(tmp_path / "other")
    other.create(QueryMetadata("other", "cluster", ["flights"], None, 1, START))
    other.resume(METADATA)
    other.write_batch(batch_of(0))
    (tmp_path / "one/offsets/1").write_bytes((tmp_path / "other/offsets/0").read_bytes())
    with pytest.raises(CheckpointDamagedError, match="of query other"):
        start(at_local(tmp_path / "one"))


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    filled(tmp_path)
    data = (tmp_path / "offsets/1").read_bytes()
    (tmp_path / "offsets/1").write_bytes(data.replace(b"rayq offsets 1", b"rayq offsets 2", 1))
    with pytest.raises(UnsupportedFormatError, match="has format 2"):
        start(at_local(tmp_path))


def test_a_path_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        at_local(tmp_path / "file")


# --- the lock -------------------------------------------------------------------------------------


def test_a_second_query_is_refused_and_told_who_is_first(tmp_path: Path) -> None:
    first = at_local(tmp_path, "first")
    with pytest.raises(CheckpointInUseError, match=rf"process {os.getpid()} .*run first"):
        at_local(tmp_path, "second")
    first.close()
    at_local(tmp_path, "third").close()


def test_a_child_of_the_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    first = at_local(tmp_path, "first")
    waits, ends = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ends)
        os.read(waits, 1)
        os._exit(0)
    try:
        os.close(waits)
        first.close()
        at_local(tmp_path, "second").close()
    finally:
        os.close(ends)
        os.waitpid(child, 0)


def test_a_child_of_the_process_does_not_give_the_lock_away(tmp_path: Path) -> None:
    first = at_local(tmp_path, "first")
    child = os.fork()
    if child == 0:
        first.close()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(CheckpointInUseError):
        at_local(tmp_path, "second")
    first.close()


HOLD = """
import sys, time
from rayq.spark.checkpoint_store import open_store
store = open_store(sys.argv[1], "child")
store.lock()
print("locked", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "lease"])
def test_the_lock_of_a_killed_process_blocks_nobody(tmp_path: Path, kind: str) -> None:
    # The URL names an fsspec file system that we do not take for a plain directory, but that
    # processes share.
    url = str(tmp_path) if kind == "local" else f"dir::file://{tmp_path}"
    with subprocess.Popen([sys.executable, "-c", HOLD, url], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"locked\n"
        try:
            if kind == "local":
                with pytest.raises(CheckpointInUseError, match=f"process {holder.pid} .*run child"):
                    Checkpoint.open(url, "second")
        finally:
            os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    checkpoint = Checkpoint.open(url, "third")
    assert start(checkpoint).progress.next_id == 0
    checkpoint.close()


# --- fsspec ---------------------------------------------------------------------------------------


def in_memory(name: str, holder: CheckpointHolder) -> FsspecStore:
    url = f"memory://{name}"
    files, root = fsspec.core.url_to_fs(url)
    return FsspecStore(files, root, url, holder)


def test_a_checkpoint_may_be_anywhere_fsspec_reaches() -> None:
    url = f"memory://{uuid.uuid4()}/query"
    for count in (2, 4):
        checkpoint = Checkpoint.open(url, f"run {count}")
        run(checkpoint, count, 0, [])
        checkpoint.close()
    checkpoint = Checkpoint.open(url, "last")
    assert start(checkpoint) == Resumption(None, after(batch_of(3)))
    checkpoint.close()
    with pytest.raises(CheckpointError, match="cannot be opened"):
        Checkpoint.open("nosuch://bucket/query", "run")


@pytest.mark.parametrize(
    "url", ["s3:/bucket/query", "dbfs:/query", "file:/query", Path("s3://b/q")]
)
def test_a_url_with_one_slash_is_no_local_directory(
    url: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="://"):
        Checkpoint.open(url, "run")
    assert list(tmp_path.iterdir()) == []
    Checkpoint.open(f"./{url}", "run").close()  # as a path it is accepted


ELSEWHERE = CheckpointHolder("elsewhere", 7, 7, "first")


def lease(store: Store, holder: CheckpointHolder, sleep: object = lambda _: None) -> LeaseLock:
    return LeaseLock(store, holder, sleep=sleep)  # type: ignore[arg-type]


def test_a_lease_that_is_renewed_is_in_use() -> None:
    store = in_memory(str(uuid.uuid4()), ELSEWHERE)
    first = lease(store, ELSEWHERE)
    first.take()
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:  # the holder renews it meanwhile
            first._beat += 1
            first._write()

    with pytest.raises(CheckpointInUseError, match="elsewhere"):
        lease(store, this_process("second"), sleep).take()
    assert sum(slept) < 15
    first.release()
    second = lease(store, this_process("second"))
    second.take()
    second.release()
    assert store.read("lock") is None


def test_a_lease_that_stands_still_is_over_and_its_holder_may_write_no_more() -> None:
    store = in_memory(str(uuid.uuid4()), ELSEWHERE)
    first, second = lease(store, ELSEWHERE), lease(store, this_process("second"))
    first.take()
    second.take()
    second.check()
    with pytest.raises(CheckpointInUseError, match="run second"):
        first.check()
    first.release()
    second.check()
    second.release()


def test_a_lease_is_waited_for_unless_its_holder_is_of_this_boot_and_these_pids() -> None:
    me = this_process("first")
    assert me.boot_id is not None and me.pid_namespace is not None
    ended = msgspec.structs.replace(me, pid=2**22 + 1, started=1)  # above pid_max

    def waited_for(holder: CheckpointHolder) -> bool:
        store = in_memory(str(uuid.uuid4()), holder)
        lease(store, holder)._write()
        slept: list[float] = []
        second = lease(store, this_process("second"), slept.append)
        second.take()
        second.release()
        return sum(slept) > 10

    assert not waited_for(ended)
    # Hosts and containers may share a name, and pids mean nothing across them.
    assert waited_for(msgspec.structs.replace(ended, boot_id="of another machine"))
    assert waited_for(msgspec.structs.replace(ended, pid_namespace="of another container"))
    assert waited_for(msgspec.structs.replace(ended, boot_id=None, pid_namespace=None))


def test_the_lease_of_a_version_without_boot_and_namespace_is_read() -> None:
    store = in_memory(str(uuid.uuid4()), ELSEWHERE)
    store.make_directories("")
    old = b'{"holder":{"host":"%b","pid":1,"started":1,"run_id":"old"},"beat":3}'
    store.write("lock", old % socket.gethostname().encode())
    with pytest.raises(CheckpointInUseError, match="run old"):
        lease(store, this_process("second")).check()


def test_of_two_that_take_a_lease_at_once_one_gets_it() -> None:
    store = in_memory(str(uuid.uuid4()), ELSEWHERE)
    second = lease(store, this_process("second"))
    first = lease(store, ELSEWHERE, lambda _: second.take())
    with pytest.raises(CheckpointInUseError, match="run second"):
        first.take()
    second.check()
    second.release()


def test_a_batch_that_another_query_wrote_meanwhile_is_not_overwritten() -> None:
    name = str(uuid.uuid4())
    one = Checkpoint(in_memory(name, ELSEWHERE))
    start(one)
    store = in_memory(name, ELSEWHERE)
    two = Checkpoint(store)
    start(two)
    for checkpoint in (one, two):
        checkpoint._store.lock = lambda: None  # type: ignore[method-assign]
        checkpoint._store.check_lock = lambda: None  # type: ignore[method-assign]
    two.write_batch(batch_of(0, 2))
    with pytest.raises(CheckpointInUseError, match="offsets/0"):
        one.write_batch(batch_of(0, 1))
