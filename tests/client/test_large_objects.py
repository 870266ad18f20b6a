"""Large values as objects, against a fake cluster: who reads them, and the sweep."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rayq import messages as m
from rayq.batch.offset_ranges import Split
from rayq.batch.range_reader import read_range
from rayq.client.cluster import Cluster
from rayq.client.consuming.consumer import Consumer
from rayq.client.large import objects
from rayq.client.large import reader as reader_module
from rayq.client.large.collect import CollectedValues, collect_values
from rayq.client.large.objects import (
    is_below,
    list_objects,
    object_uri,
    prefix_of,
    read_object,
    write_object,
)
from rayq.core.large.values import crc_of, manifest_of_object, read_manifest
from rayq.errors import (
    CorruptBatchError,
    InvalidRequestError,
    LargeValueError,
    LargeValueRefusedError,
    LargeValueUnavailableError,
    OffsetNotAvailableError,
    RemoteDeniedError,
    RemoteListError,
    RemoteStorageError,
)
from tests.client.fake_broker import FakeCluster
from tests.client.large_values import ID, LIMIT, T0, bytes_of, read, write_manifest


@pytest.fixture
def topic(fake: FakeCluster) -> str:
    fake.create_topic("t", max_message_bytes=LIMIT)
    return "t"


@pytest.fixture
def consumer(cluster: Cluster, topic: str) -> Iterator[Consumer]:
    with cluster.consumer(auto_offset_reset="earliest") as made:
        made.assign([T0])
        yield made


def test_a_value_is_an_object_that_only_readers_who_say_so_read(
    fake: FakeCluster, cluster: Cluster, consumer: Consumer, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/values"
    large = bytes_of(3 * LIMIT)
    with cluster.producer(large_values=url) as producer:
        producer.send("t", b"small").result(30)
        offset = producer.send("t", large, key=b"k").result(30).offset
        producer.send("t", b"after").result(30)
    assert offset == 1 and not any(header.is_chunk for header in fake.headers("t"))
    with cluster.consumer(auto_offset_reset="earliest", large_values=url) as reader:
        reader.assign([T0])
        assert [value for _, value in read(reader)] == [b"small", large, b"after"]
    assert cluster.cluster_id is not None
    (stored,) = list_objects(prefix_of(url, cluster.cluster_id))
    assert stored.size_bytes == len(large) and "/t/" in stored.uri
    with pytest.raises(LargeValueRefusedError, match="reads no objects"):
        read(consumer)
    with (
        cluster.consumer(auto_offset_reset="earliest", large_values=f"{url}/other") as elsewhere,
        pytest.raises(LargeValueRefusedError, match="below"),
    ):
        elsewhere.assign([T0])
        read(elsewhere)
    split = Split("t", fake.topics["t"].topic_id, 0, 0, 3)
    (batch,) = read_range(cluster, split, large_values=url)
    assert batch.column("value").to_pylist() == [b"small", large, b"after"]
    with pytest.raises(LargeValueRefusedError):
        list(read_range(cluster, split))


def test_directories_that_are_made_for_an_object_are_durable_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(objects, "_sync_directory", synced.append)
    new = tmp_path / "values" / "of all"
    write_object(object_uri(f"file://{new}", "c1", "t", ID), b"v")
    topic, root = new / "c1" / "t", new.parent.parent
    assert synced == [str(path) for path in (topic, new / "c1", new, new.parent, root)]
    synced.clear()
    write_object(object_uri(f"file://{new}", "c1", "t", ID), b"v")
    assert synced == [str(path) for path in (topic, new / "c1", new)]


def test_an_object_that_is_gone_or_another_is_an_error(
    fake: FakeCluster, cluster: Cluster, topic: str, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}"
    value = bytes_of(300)
    path = tmp_path / "v.value"
    write_manifest(fake, manifest_of_object(300, crc_of(value), ID, f"{url}/v.value"))
    with cluster.consumer(auto_offset_reset="earliest", large_values=url) as consumer:
        consumer.assign([T0])
        for content, told in (
            (None, "gone"),
            (value[:-1] + b"x", "CRC32C"),
            (value + b"x", "301 bytes"),
            (b"", "0 bytes"),
        ):
            if content is not None:
                path.write_bytes(content)
            consumer.seek(T0, 0)
            with pytest.raises(LargeValueError, match=told):
                consumer.poll(timeout_s=30)
        path.write_bytes(value)
        consumer.seek(T0, 0)
        assert read(consumer) == [(0, value)]


@pytest.mark.parametrize("on_corrupt", ["raise", "skip"])
def test_a_store_that_is_away_keeps_no_record_waiting_before_it_and_skips_none(
    fake: FakeCluster, cluster: Cluster, topic: str, tmp_path: Path, on_corrupt: str
) -> None:
    store = tmp_path / "store"
    url, value = f"file://{store}", bytes_of(300)
    fake.write("t", [b"before"])
    write_manifest(fake, manifest_of_object(300, crc_of(value), ID, f"{url}/v.value"))
    fake.write("t", [b"after"])
    with cluster.consumer(
        "t", auto_offset_reset="earliest", large_values=url, on_corrupt=on_corrupt
    ) as consumer:
        assert [record.value for record in consumer.poll(30)] == [b"before"]
        assert consumer.poll(0.2) == []
        store.mkdir()
        (store / "v.value").write_bytes(value)
        assert [record.value for record in consumer.until_end()] == [value, b"after"]


def test_a_store_that_refuses_the_reader_is_told_and_never_skipped(
    fake: FakeCluster, cluster: Cluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, value = f"file://{tmp_path}", bytes_of(300)
    write_manifest(fake, manifest_of_object(300, crc_of(value), ID, f"{url}/v.value"))
    fake.write("t", [b"after"])
    (tmp_path / "v.value").write_bytes(value)
    errors: list[BaseException] = [PermissionError("expired"), MemoryError()]

    def refused(uri: str, size_bytes: int, url: str) -> bytes:
        if errors:
            error = errors.pop()
            raise RemoteDeniedError(str(error)) if isinstance(error, OSError) else error
        return read_object(uri, size_bytes, url)

    monkeypatch.setattr(reader_module, "read_object", refused)
    with cluster.consumer(
        "t", auto_offset_reset="earliest", large_values=url, on_corrupt="skip"
    ) as consumer:
        for _ in range(2):
            with pytest.raises(LargeValueUnavailableError) as caught:
                consumer.poll(30)
            assert (caught.value.offset, caught.value.next_offset) == (0, 1)
            consumer.seek(T0, 0)
        assert [record.value for record in consumer.until_end()] == [value, b"after"]


def test_a_store_that_fails_is_an_error_of_send(
    fake: FakeCluster, cluster: Cluster, topic: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    with cluster.producer(large_values=f"file://{tmp_path}/file/values") as producer:
        with pytest.raises(RemoteStorageError):
            producer.send("t", bytes_of(2 * LIMIT))
        producer.send("t", b"small").result(30)
    assert fake.values("t") == [b"small"]


def test_a_record_cannot_name_what_is_not_below_the_readers_url() -> None:
    url = "s3://bucket/values"
    assert is_below("s3://bucket/values/c/t/1.value", url)
    for uri in (
        "s3://bucket/valuesx/1",
        "s3://bucket/values/../secret",
        "s3://bucket/values/%2e%2e/secret",
        "s3://bucket/values//secret",
        "s3://bucket/values/",
        "s3://bucket/values/a?versionId=1",
        "s3://bucket/values/x::file:///etc/passwd",
        "file:///etc/passwd",
        "S3://bucket/values/1",
    ):
        assert not is_below(uri, url), uri


def test_any_store_that_fsspec_knows_will_do(
    fake: FakeCluster, cluster: Cluster, topic: str
) -> None:
    url = f"memory://{os.getpid()}/values"
    large = bytes_of(3 * LIMIT)
    with cluster.producer(large_values=url) as producer:
        producer.send("t", large).result(30)
    with cluster.consumer(auto_offset_reset="earliest", large_values=url) as consumer:
        consumer.assign([T0])
        assert read(consumer) == [(0, large)]
    assert cluster.cluster_id is not None
    (stored,) = list_objects(prefix_of(url, cluster.cluster_id))
    assert stored.size_bytes == len(large)
    assert stored.uri.encode() in (fake.values("t")[0] or b"")


# --- the sweep ------------------------------------------------------------------------------------


def sweep(cluster: Cluster, url: str, **options: Any) -> CollectedValues:
    client, background = cluster.shared_client()
    return background.run(collect_values(client, url, **options))


def test_the_sweep_removes_old_objects_that_no_record_stands_for(
    fake: FakeCluster, cluster: Cluster, topic: str, tmp_path: Path
) -> None:
    fake.create_topic("dead")
    url = f"file://{tmp_path}/values"
    with cluster.producer(large_values=url) as producer:
        for number in range(4):
            producer.send("t", bytes_of(2 * LIMIT, number)).result(30)
    assert cluster.cluster_id is not None
    prefix = prefix_of(url, cluster.cluster_id)
    by_id = {one.uri.rpartition("/")[2].removesuffix(".value"): one for one in list_objects(prefix)}
    ids = [read_manifest(value).value_id.hex() for value in fake.values("t")]
    young = ids[3]
    for value_id in ids[:3]:
        _make_old(by_id[value_id].uri)
    left = Path(by_id[ids[0]].uri.removeprefix("file://")).with_suffix(".value.tmp")
    left.write_bytes(b"half")
    _make_old(f"file://{left}")
    stranger = tmp_path / "values" / "another-cluster" / "t" / "1.value"
    stranger.parent.mkdir(parents=True)
    stranger.write_bytes(b"x")
    _make_old(f"file://{stranger}")
    # The first one expired, the second became a dead letter before it did.
    fake.write("dead", [fake.values("t")[1]], is_large=True)  # type: ignore[list-item]
    fake.delete_before("t", 0, 2)

    looked = sweep(cluster, url + "/", dry_run=True)
    gone = {by_id[ids[0]].uri, f"file://{left}"}
    assert {one.uri for one in looked.removed} == gone
    assert (looked.kept, looked.young) == (2, 1)
    assert len(list(list_objects(prefix))) == 5
    swept = sweep(cluster, url)
    assert {one.uri for one in swept.removed} == gone
    assert {one.uri for one in list_objects(prefix)} == {
        by_id[one].uri for one in (ids[1], ids[2], young)
    }
    assert stranger.exists()
    with pytest.raises(InvalidRequestError, match="at least"):
        sweep(cluster, url, older_than_s=60)


def test_the_sweep_leaves_alone_what_rayq_did_not_name_and_what_may_be_restored(
    fake: FakeCluster,
    cluster: Cluster,
    topic: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = f"file://{tmp_path}/values"
    cluster.admin.list_topics()
    assert cluster.cluster_id is not None
    folder = tmp_path / "values" / cluster.cluster_id
    value_id = "0123456789abcdef" * 2
    mine = [f"t/{value_id}.value", f"gone/{'f' * 32}.value", f"t/{value_id}.value.tmp"]
    strangers = [
        "notes.value", "t/notes.value", f"t/{value_id.upper()}.value", f"t/x/{value_id}.value",
        f"t/{value_id}.values", f"{value_id}.value", f"t/{value_id}.value.tmp.tmp", "t/deep/x.value.tmp",
        f"a b/{value_id}.value",
    ]
    for name in mine + strangers:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
        _make_old(f"file://{folder / name}")
    garbage = [m.GarbageSummary("id", "gone", 1)]
    describe = m.DescribeObjectStoreResponse(None, [], garbage, None, None, 1 << 40)
    monkeypatch.setattr(m, "DescribeObjectStoreResponse", lambda *arguments: describe)
    assert [one.uri.rpartition(f"{cluster.cluster_id}/")[2] for one in sweep(cluster, url).removed] == [
        mine[0], mine[2]
    ]
    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert left == {*strangers, mine[1]}


def test_a_store_that_lists_what_is_elsewhere_has_nothing_removed(
    fake: FakeCluster, cluster: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec = pytest.importorskip("fsspec")
    cluster.admin.list_topics()
    files = fsspec.filesystem("memory")
    elsewhere = f"/elsewhere/t/{'0' * 32}.value"
    files.pipe_file(elsewhere, b"x")
    root = f"/listed/{cluster.cluster_id}"
    files.pipe_file(f"{root}/t/{'1' * 32}.value", b"x")
    info = {"size": 1, "created": 1.0}
    for wrong in (elsewhere, f"{root}x/t/{'0' * 32}.value", f"{root}/../../elsewhere/t/{'0' * 32}.value"):
        found = {wrong: info, f"{root}/t/{'1' * 32}.value": info}
        monkeypatch.setattr(type(files), "find", lambda *given, found=found, **options: found)
        if ".." in wrong:  # It begins as it should, and is no name of a value.
            sweep(cluster, "memory://listed", dry_run=True)
        else:
            with pytest.raises(RemoteListError, match="nothing is removed"):
                sweep(cluster, "memory://listed")
        assert files.exists(elsewhere) and files.exists(f"{root}/t/{'1' * 32}.value")


def _make_old(uri: str) -> None:
    then_s = time.time() - 3 * 86_400
    os.utime(uri.removeprefix("file://"), (then_s, then_s))


def test_the_sweep_removes_nothing_where_a_log_cannot_be_read(
    fake: FakeCluster, cluster: Cluster, topic: str, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/values"
    with cluster.producer(large_values=url) as producer:
        producer.send("t", bytes_of(2 * LIMIT)).result(30)
    fake.delete_before("t", 0, 1)
    assert cluster.cluster_id is not None
    (stored,) = list_objects(prefix_of(url, cluster.cluster_id))
    _make_old(stored.uri)
    fake.write("t", [b"x"], is_large=True)
    _, data = fake.topics["t"].partitions[0].batches[-1]
    fake.replace_batch("t", -1, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CorruptBatchError):
        sweep(cluster, url)
    fake.delete_before("t", 0, 2)
    fake.write("t", [msgspec.msgpack.encode([2, "of a newer rayq"])], is_large=True)
    with pytest.raises(LargeValueRefusedError, match="newer rayq"):
        sweep(cluster, url)
    assert list(list_objects(prefix_of(url, cluster.cluster_id))) == [stored._replace(
        time_s=os.stat(stored.uri.removeprefix("file://")).st_mtime
    )]


def test_the_sweep_removes_nothing_where_a_log_is_read_in_part(
    fake: FakeCluster,
    cluster: Cluster,
    topic: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = f"file://{tmp_path}/values"
    with cluster.producer(large_values=url) as producer:
        producer.send("t", bytes_of(2 * LIMIT)).result(30)
    assert cluster.cluster_id is not None
    (stored,) = list_objects(prefix_of(url, cluster.cluster_id))
    _make_old(stored.uri)
    fetch = FakeCluster.fetch

    async def gives_nothing(self: FakeCluster, broker: int, request: m.Fetch) -> Any:
        answer, _ = await fetch(self, broker, request)
        return msgspec.structs.replace(answer, next_offset=request.offset), b""

    monkeypatch.setattr(FakeCluster, "fetch", gives_nothing)
    with pytest.raises(OffsetNotAvailableError, match="Nothing was removed"):
        sweep(cluster, url)
    assert list(list_objects(prefix_of(url, cluster.cluster_id)))
