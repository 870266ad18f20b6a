"""`rayq topic restore` and what others do to the store meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rayq.actors.broker import remote_garbage
from rayq.client.environment import system_environment
from rayq.environment import Buffer, ObjectMeta
from rayq.errors import InvalidTopicError, RayqError, RemoteListError, RemoteMissingError
from rayq.messages.remote_names import takeover_mark
from rayq.runtime import restore_topic as restoring
from rayq.runtime.file_store import FileStore
from rayq.storage.remote import listing
from rayq.testing import LocalCluster
from tests.local.support import FAST, eventually, read_all

TIERED = {"remote_storage": True, "segment_bytes": 1024, "remote_max_lag_ms": 1}


class Watched:
    """The store, in which a test does something as the tool goes on."""

    def __init__(self, path: Path) -> None:
        self._store = FileStore(system_environment(), str(path))
        self.on_put: Callable[[str], None] = lambda name: None
        self.on_list: Callable[[str, str, list[ObjectMeta]], list[ObjectMeta]] = (
            lambda prefix, after, page: page
        )
        self.lists = 0

    async def put(self, name: str, data: Buffer) -> None:
        await self._store.put(name, data)
        self.on_put(name)

    async def get(self, name: str, position: int = 0, length: int | None = None) -> bytes:
        return await self._store.get(name, position, length)

    async def head(self, name: str) -> ObjectMeta:
        return await self._store.head(name)

    async def list(self, prefix: str, after: str = "") -> list[ObjectMeta]:
        self.lists += 1
        assert self.lists < 100, "it is listed forever"
        return self.on_list(prefix, after, await self._store.list(prefix, after))

    async def delete(self, names: Sequence[str]) -> None:
        await self._store.delete(names)

    async def sign(self, name: str, expires_s: float) -> str:
        raise AssertionError


@pytest.fixture
def deleted(tmp_path: Path, store: Path) -> Iterator[tuple[LocalCluster, list[bytes]]]:
    """A cluster with a topic `t` that was deleted, and the values that are in the store of it."""
    with LocalCluster(
        brokers=1, data_dir=tmp_path / "data", remote_storage_url=f"file://{store}", **FAST
    ) as cluster:
        cluster.create_topic("t", **TIERED)
        with cluster.producer(linger_ms=0) as producer:
            values = [os.urandom(100) for _ in range(40)]
            for value in values:
                producer.send("t", value).result(60)
        remote = cluster.admin.describe_remote_storage
        eventually(lambda: (one := remote("t")[0]).lag_bytes == 0 and one.remote_end_offset,
                   "it is stored")
        end = remote("t")[0].remote_end_offset
        cluster.admin.delete_topic("t")
        yield cluster, values[:end]


def restore(cluster: LocalCluster, store: Any, name: str = "t", **options: Any) -> None:
    client, background = cluster.shared_client()

    async def work() -> None:
        (found,) = await restoring.find_topics(store)
        whole = await restoring.check_topic(store, found)
        await restoring.restore_topic(
            client, store, whole, name, config={}, replication_factor=None, **options
        )

    background.run(work())


def data_files(store: Path) -> list[Path]:
    return sorted(store.glob("*/*/*/data/*"))


def test_an_object_that_goes_while_its_topic_is_restored_is_no_success(
    deleted: tuple[LocalCluster, list[bytes]], store: Path
) -> None:
    """As where somebody looked at a topic one day, and said yes the next."""
    cluster, _ = deleted
    watched = Watched(store)

    def lose(name: str) -> None:
        data_files(store)[0].unlink(missing_ok=True)

    watched.on_put = lose
    with pytest.raises(RemoteMissingError, match="'t' was restored, and its partition 0 is not whole"):
        restore(cluster, watched)
    assert cluster.admin.describe_topic("t")


@pytest.mark.parametrize("kind", ["begins again", "elsewhere", "goes back"])
def test_nothing_is_restored_by_a_list_that_cannot_be(
    deleted: tuple[LocalCluster, list[bytes]], store: Path, kind: str
) -> None:
    cluster, values = deleted
    watched = Watched(store)
    before = sorted(store.rglob("*"))

    def wrong(prefix: str, after: str, page: list[ObjectMeta]) -> list[ObjectMeta]:
        if kind == "begins again" and after:
            return [ObjectMeta(f"{prefix}0", 1, 1)]
        if kind == "elsewhere" and prefix:
            return [*page, ObjectMeta("somewhere/else", 1, 1)]
        return page[::-1] if kind == "goes back" else page

    watched.on_list = wrong
    with pytest.raises(RemoteListError):
        restore(cluster, watched)
    assert sorted(store.rglob("*")) == before and cluster.admin.list_topics() == []
    watched.on_list = lambda prefix, after, page: page
    watched.lists = 0
    restore(cluster, watched)
    assert [record.value for record in read_all(cluster, "t")] == values


def test_a_list_without_an_end_is_given_up(
    deleted: tuple[LocalCluster, list[bytes]], store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, _ = deleted
    monkeypatch.setattr(listing, "LISTED_MAX", 50)
    monkeypatch.setattr(restoring, "LISTED_MAX", 50)
    watched = Watched(store)
    watched.on_list = lambda prefix, after, page: [ObjectMeta(f"{prefix}~{watched.lists:09d}", 1, 1)]
    with pytest.raises(RemoteListError, match="continues"):
        restore(cluster, watched)


def test_what_strangers_left_in_the_store_is_no_topic_and_sizes_nothing(
    deleted: tuple[LocalCluster, list[bytes]], store: Path
) -> None:
    cluster, values = deleted
    for name in ("notes.txt", f"{'a' * 32}/{'b' * 32}/9999999999/manifest/{1:020d}-{1:010d}-{1:016x}",
                 f"{'a' * 32}/{'b' * 32}/0/manifest/{1:020d}-{1:010d}-{1:016x}",
                 f"{'a' * 32}/{'b' * 32}/007/manifest/x", "z/../x"):
        path = store / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"no manifest")
    restore(cluster, Watched(store))
    assert [record.value for record in read_all(cluster, "t")] == values


def test_a_restore_that_is_refused_leaves_the_mark_of_one_that_was_not(
    deleted: tuple[LocalCluster, list[bytes]],
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the mark the cluster that had the objects would go on to delete them, and the one
    that has them now would not when its topic ends."""
    cluster, values = deleted
    cluster.abort()
    monkeypatch.setattr(remote_garbage, "CHECK_INTERVAL_S", 0.1)
    monkeypatch.setattr(remote_garbage, "LATE_PUTS_MS", 0)
    with LocalCluster(
        brokers=1,
        data_dir=tmp_path / "new",
        remote_storage_url=f"file://{store}",
        remote_delete_delay_ms=0,
        **FAST,
    ) as new:
        watched = Watched(store)
        mark = store / takeover_mark(cluster.cluster_id, new.cluster_id)
        with pytest.raises(InvalidTopicError):
            restore(new, watched, "__own")
        assert not mark.exists()
        restore(new, watched)
        assert mark.exists()
        for refused in ("__own", "t2"):
            with pytest.raises(RayqError):
                restore(new, watched, refused)
        assert mark.exists()
        assert [record.value for record in read_all(new, "t")] == values
        new.admin.delete_topic("t")
        eventually(lambda: not new.admin.describe_object_store().garbage, "it is removed")
        assert data_files(store) == []
