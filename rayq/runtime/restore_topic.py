"""Brings a topic back from what the object store alone has of it: `rayq topic restore`.

The newest manifest of each partition whose objects are all there says what the topic was. A new
manifest is stored beside it, and a topic is created whose partitions point to it: their leaders
begin where the manifest ends. Nothing is read of the records. What producers had sent is not
remembered: a producer id of the new cluster may be one of the old, and its batches would pass for
repetitions.

The new topic takes the objects over: what its retention deletes is gone for any other. So a mark is
left for the cluster that had them, which stores and deletes nothing from then on. Or they are
copied first.

A crash leaves manifests that nothing refers to, and copies; the store has the topic as before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import google_crc32c
import msgspec

from rayq.client.admin.topics import until_ready
from rayq.client.client import Client
from rayq.environment import Environment, ObjectMeta, ObjectStore
from rayq.errors import (
    InvalidRequestError,
    RayqError,
    RemoteDamagedError,
    RemoteMissingError,
)
from rayq.remote_pointer import RemotePointer
from rayq.storage.remote.manifest import (
    Manifest,
    RemoteObject,
    RemoteObjects,
    decode_manifest,
    page_names,
)
from rayq.storage.remote.names import (
    ObjectKind,
    new_name,
    owners_prefix,
    parse_name,
    partition_prefix,
)
from rayq.wire.messages import (
    DescribeObjectStore,
    DescribeObjectStoreResponse,
    RestoreTopic,
)

EPOCH_LEAP = 1000
"""The leader epochs of the new topic begin so far above those of the old one, whose leaders may not
know yet that they lost it."""
MARK_EPOCH = 2**31 - 1
"""The controller epoch of the mark: above any of the old cluster."""
CREATE_TIMEOUT_S = 60.0
OnProgress = Callable[[int], None]
"""Called with how many objects are copied."""


class StoredTopic(NamedTuple):
    """A topic as the object store has it: the newest manifest of each partition, whose objects may
    be there or not."""

    cluster_id: str
    topic_id: str
    name: str
    partitions: int
    config: Mapping[str, Any]
    replication_factor: int
    manifests: dict[int, Manifest]
    """By partition. One that never had a closed segment has none."""


class RestoredPartition(NamedTuple):
    """What a partition of the new topic has: records from `start_offset` up to `end_offset`
    (exclusive), of which the last was appended at `last_append_ms`."""

    partition: int
    start_offset: int
    end_offset: int
    data_bytes: int
    last_append_ms: int | None


async def find_topics(store: ObjectStore) -> list[StoredTopic]:
    """All topics that have a manifest there, by name. Raises RemoteStorageError."""
    newest: dict[tuple[str, str], dict[int, Manifest]] = {}
    for prefix in await _prefixes(store):
        manifest = await _newest_readable(store, prefix)
        if manifest is not None:
            cluster_id, topic_id, number, _ = prefix.split("/")
            newest.setdefault((cluster_id, topic_id), {})[int(number)] = manifest
    topics = []
    for (cluster_id, topic_id), manifests in newest.items():
        last = max(manifests.values(), key=lambda one: one.written_ms)
        topics.append(
            StoredTopic(
                cluster_id=cluster_id,
                topic_id=topic_id,
                name=last.topic,
                partitions=max(last.partitions, *(number + 1 for number in manifests)),
                config=last.config,
                replication_factor=last.replication_factor,
                manifests=manifests,
            )
        )
    return sorted(topics, key=lambda one: (one.name, one.cluster_id, one.topic_id))


async def check_topic(store: ObjectStore, topic: StoredTopic) -> StoredTopic:
    """The topic with, for each partition, the newest manifest whose objects are all there. Raises
    RemoteMissingError where a partition has none: it names objects that the newest lacks."""
    whole = {
        number: await _newest_whole(
            store, partition_prefix(topic.cluster_id, topic.topic_id, number)
        )
        for number in topic.manifests
    }
    return topic._replace(manifests=whole)


def described(topic: StoredTopic) -> list[RestoredPartition]:
    """What each partition has, as far as manifests tell."""
    found = []
    for number in range(topic.partitions):
        one = topic.manifests.get(number)
        if one is None:
            found.append(RestoredPartition(number, 0, 0, 0, None))
        else:
            start = max(one.log_start, one.start)
            last_ms = one.objects[-1].last_append_ms if one.objects else None
            found.append(RestoredPartition(number, start, one.end, one.data_bytes, last_ms))
    return found


async def restore_topic(
    client: Client,
    store: ObjectStore,
    topic: StoredTopic,
    name: str,
    *,
    config: Mapping[str, Any],
    replication_factor: int | None,
    copy_to: ObjectStore | None = None,
    on_progress: OnProgress | None = None,
) -> None:
    """Creates the topic `name` of what `check_topic` found; returns when it is ready. `config` has
    what is to differ from the old topic's config. `copy_to` is the cluster's own store, where
    objects are copied to first; None: `store` is the cluster's own, and they stay.

    Raises what `create_topic` raises, RemoteStorageError, RemoteDamagedError.
    """
    environment = client.environment
    own_cluster_id = (await client.fetch_all(timeout_s=CREATE_TIMEOUT_S)).cluster_id
    pointers: list[RemotePointer | None] = [None] * topic.partitions
    copied_topic_id, copied = environment.new_id(), 0
    for number, manifest in sorted(topic.manifests.items()):
        target, taken = store, manifest
        if copy_to is not None:
            target = copy_to
            taken = _moved(manifest, partition_prefix(own_cluster_id, copied_topic_id, number))
            for old, new in zip(manifest.objects, taken.objects, strict=True):
                await _copy(store, old, copy_to, new.name)
                copied += 1
                if on_progress is not None:
                    on_progress(copied)
        pointers[number] = await _store_new_manifest(target, environment, taken, name)
    if copy_to is None and topic.cluster_id != own_cluster_id:
        mark = f"{owners_prefix(topic.cluster_id)}{MARK_EPOCH:020d}-{own_cluster_id}"
        await store.put(mark, b"A topic was restored from here by another cluster.")
    request = RestoreTopic(
        name=name,
        partitions=topic.partitions,
        replication_factor=replication_factor or topic.replication_factor,
        config={**topic.config, **config},
        pointers=pointers,
    )
    await client.change(request, timeout_s=CREATE_TIMEOUT_S)
    await until_ready(client, name, topic.partitions, timeout_s=CREATE_TIMEOUT_S)


async def cluster_store_url(client: Client) -> str:
    """Raises InvalidRequestError where the cluster has no object store."""
    found: DescribeObjectStoreResponse = await client.ask_any(
        DescribeObjectStore(), timeout_s=CREATE_TIMEOUT_S
    )
    if found.url is None:
        raise InvalidRequestError(
            "This cluster has no object store to keep the topic in: start it with "
            "remote_storage_url=..."
        )
    return found.url


# --- manifests ------------------------------------------------------------------------------------


async def _prefixes(store: ObjectStore) -> list[str]:
    """Those of all partitions, in order. The data objects, which are most, are not listed."""
    found: dict[str, None] = {}
    after = ""
    while page := await store.list("", after):
        after = page[-1].name
        for one in page:
            name = parse_name(one.name)
            if name is not None:
                found[name.prefix] = None
        last = parse_name(after)
        if last is not None:
            after = max(after, f"{last.prefix}{last.kind}/~")  # Behind the rest of its kind.
    return list(found)


async def _manifest_names(store: ObjectStore, prefix: str) -> list[str]:
    """The newest first."""
    listed = await _list_all(store, f"{prefix}{ObjectKind.MANIFEST}/")
    names = [name for one in listed if (name := parse_name(one.name)) is not None]
    return [
        str(one) for one in sorted(names, key=lambda one: (-one.leader_epoch, -one.number))
    ]


async def _list_all(store: ObjectStore, folder: str) -> list[ObjectMeta]:
    found: list[ObjectMeta] = []
    while page := await store.list(folder, found[-1].name if found else ""):
        found += page
    return found


async def _load(store: ObjectStore, name: str) -> Manifest:
    root = await store.get(name)
    pages = {page: await store.get(page) for page in page_names(root, name)}
    return decode_manifest(root, pages, name)


async def _newest_readable(store: ObjectStore, prefix: str) -> Manifest | None:
    for name in await _manifest_names(store, prefix):
        try:
            return await _load(store, name)
        except (RemoteMissingError, RemoteDamagedError):
            continue
    return None


async def _newest_whole(store: ObjectStore, prefix: str) -> Manifest:
    """One that was stored may have come too late to count: then what it lists may be gone."""
    problem: RayqError = RemoteMissingError(f"There is no manifest below {prefix}.")
    for number, name in enumerate(await _manifest_names(store, prefix)):
        try:
            manifest = await _load(store, name)
            await _check_objects(store, manifest)
        except (RemoteMissingError, RemoteDamagedError) as error:
            problem = problem if number else error
            continue
        return manifest
    raise problem


async def _check_objects(store: ObjectStore, manifest: Manifest) -> None:
    """Raises RemoteMissingError unless all objects are there with their sizes."""
    listed = await _list_all(store, f"{manifest.prefix}{ObjectKind.DATA}/")
    sizes = {one.name: one.size_bytes for one in listed}
    for one in manifest.objects:
        if sizes.get(one.name) == one.object_bytes:
            continue
        found = await store.head(one.name)  # The list may be a minute old.
        if found.size_bytes != one.object_bytes:
            raise RemoteMissingError(
                f"{one.name} has {found.size_bytes} bytes, not {one.object_bytes}."
            )


async def _store_new_manifest(
    store: ObjectStore, environment: Environment, manifest: Manifest, topic: str
) -> RemotePointer:
    """Stores the manifest with which the new topic begins."""
    epoch, version = manifest.leader_epoch + EPOCH_LEAP, manifest.version + 1

    def named(kind: ObjectKind, number: int) -> str:
        return new_name(environment, manifest.prefix, kind, number, epoch)

    changed, pages = msgspec.structs.replace(
        manifest,
        topic=topic,
        version=version,
        leader_epoch=epoch,
        producer_snapshot=b"",
        written_ms=environment.clock.wall_ms(),
    ).paged(lambda start: named(ObjectKind.PAGE, start))
    name = named(ObjectKind.MANIFEST, version)
    for page, content in [*pages, (name, changed.encode())]:
        await store.put(page, content)
    return changed.pointer(name)


# --- copies ---------------------------------------------------------------------------------------


def _moved(manifest: Manifest, prefix: str) -> Manifest:
    """The manifest of a copy below another prefix."""
    return msgspec.structs.replace(
        manifest,
        prefix=prefix,
        objects=RemoteObjects(manifest.objects.rows(), prefix),
        pages=(),
        packed_removed=b"",
    )


async def _copy(
    source: ObjectStore, one: RemoteObject, target: ObjectStore, new_name: str
) -> None:
    data = await source.get(one.name)
    if google_crc32c.value(data) != one.crc32c:
        raise RemoteDamagedError(f"{one.name} is damaged: its CRC32C is not {one.crc32c:08x}.")
    await target.put(new_name, data)
