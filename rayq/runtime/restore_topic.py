"""Brings a topic back from what the object store alone has of it: `rayq topic restore`.

The newest manifest of each partition whose objects are all there says what the topic was. The same
without producers is stored beside it, and a topic is created whose partitions point to that: their
leaders begin where it ends. Nothing is read of the records. What producers had sent is forgotten: a
producer id of the new cluster may be one of the old, and its batches would pass for repetitions.

The new topic takes the objects over: what its retention deletes is gone for any other. So a mark is
left for the cluster that had them, which stores and deletes nothing from then on. Or they are
copied first.

A crash leaves manifests that nothing refers to, and copies. The manifests have epoch and version of
those that they were made of, so that nobody takes them for later ones.
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
    ConfigError,
    InvalidPartitionsError,
    InvalidReplicationFactorError,
    InvalidRequestError,
    InvalidTopicError,
    RayqError,
    RemoteDamagedError,
    RemoteListError,
    RemoteMissingError,
    ReplicaLimitError,
    TopicExistsError,
)
from rayq.messages import (
    DescribeObjectStore,
    DescribeObjectStoreResponse,
    MetadataResponse,
    RestoreTopic,
)
from rayq.messages.remote_names import (
    TAKEOVER_EPOCH,
    ObjectKind,
    new_name,
    owner_mark,
    owners_prefix,
    parse_name,
    partition_prefix,
    takeover_mark,
    topic_prefix,
)
from rayq.messages.remote_pointer import RemotePointer
from rayq.storage.remote.listing import LISTED_MAX, check_page, pages
from rayq.storage.remote.manifest import (
    Manifest,
    RemoteObjects,
    decode_manifest,
    page_names,
)

EPOCH_LEAP = 1000
"""The leader epochs of the new topic begin so far above those of the manifest: the old cluster may
still elect leaders, who do not know yet that they lost it."""
STORE = "The object store"
CREATE_TIMEOUT_S = 60.0
REFUSALS = (
    ConfigError,
    InvalidPartitionsError,
    InvalidReplicationFactorError,
    InvalidRequestError,
    InvalidTopicError,
    ReplicaLimitError,
    TopicExistsError,
)
"""The errors that the controller answers where it creates no topic."""
DELETED_AT_ONCE = 1000
MARK = b"A topic was restored from here by another cluster."
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
    """The content of a partition of the new topic: records from `start_offset` up to `end_offset`
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
        last = max(manifests.values(), key=lambda manifest: manifest.written_ms)
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
    return sorted(topics, key=lambda topic: (topic.name, topic.cluster_id, topic.topic_id))


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
    """The content of each partition, as far as manifests tell."""
    found = []
    for number in range(topic.partitions):
        manifest = topic.manifests.get(number)
        if manifest is None:
            found.append(RestoredPartition(number, 0, 0, 0, None))
        else:
            start = max(manifest.log_start, manifest.start)
            last_ms = manifest.objects[-1].last_append_ms if manifest.objects else None
            found.append(
                RestoredPartition(number, start, manifest.end, manifest.data_bytes, last_ms)
            )
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

    Raises what `create_topic` raises, InvalidRequestError where a topic of the cluster has these
    objects or they are being removed, RemoteStorageError, RemoteDamagedError. What was stored for a
    topic that is refused is deleted again. RemoteMissingError: the topic is there, and an object
    was deleted after `check_topic` had found it.
    """
    cluster = await client.fetch_all(timeout_s=CREATE_TIMEOUT_S)
    if any(stored.name == name for stored in cluster.topics):
        raise TopicExistsError(f"Topic {name!r} exists already: restore under another name.")
    target = store if copy_to is None else copy_to
    request = RestoreTopic(
        name=name,
        partitions=topic.partitions,
        replication_factor=replication_factor or topic.replication_factor,
        config={**topic.config, **config},
        pointers=[None] * topic.partitions,
    )
    stored: list[str] = []
    is_asked = False
    try:
        manifests = topic.manifests
        if copy_to is not None:
            prefix = topic_prefix(cluster.cluster_id, client.environment.new_id())
            manifests = await _copied(store, manifests, copy_to, prefix, stored, on_progress)
        else:
            _check_unused(topic, cluster)
        takes_over = copy_to is None and topic.cluster_id != cluster.cluster_id
        mark = takeover_mark(topic.cluster_id, cluster.cluster_id)
        if takes_over:
            if not await _exists(store, mark):  # Else another topic was restored from there.
                stored.append(mark)
            await store.put(mark, MARK)
            await _check_alone(store, topic.cluster_id, mark)
        for number, manifest in manifests.items():
            request.pointers[number] = await _store_without_producers(
                target, client.environment, manifest, name, stored
            )
        is_asked = True
        await client.change(request, timeout_s=CREATE_TIMEOUT_S)
        if takes_over:  # Another restore, which was refused, may have deleted it.
            await store.put(mark, MARK)
    except RayqError as error:
        if not is_asked or isinstance(error, REFUSALS):  # Else the topic may be there.
            for first in range(0, len(stored), DELETED_AT_ONCE):
                await target.delete(stored[first : first + DELETED_AT_ONCE])
        raise
    await _check_still_there(target, manifests, name)
    await until_ready(client, name, topic.partitions, timeout_s=CREATE_TIMEOUT_S)


async def _exists(store: ObjectStore, name: str) -> bool:
    try:
        await store.head(name)
    except RemoteMissingError:
        return False
    return True


async def _check_alone(store: ObjectStore, cluster_id: str, mark: str) -> None:
    """Checks that no other cluster takes over the folder: of several at once at most one may change
    it. Raises InvalidRequestError where another one has left its mark."""
    first = owner_mark(cluster_id, TAKEOVER_EPOCH, "")
    listed = [meta.name for meta in await _list_all(store, owners_prefix(cluster_id))]
    others = [name for name in listed if name >= first and name != mark]
    if others:
        raise InvalidRequestError(
            f"Another cluster has taken over the objects in the folder {cluster_id}, or is about "
            f"to, by the mark {others[0]}: two would delete each other's objects. Restore with "
            "--copy; or, where that cluster is gone for good, delete its mark first."
        )


async def _check_still_there(
    store: ObjectStore, manifests: Mapping[int, Manifest], name: str
) -> None:
    """Checks that all objects are still there. The former owner may have deleted some after they
    were looked at. From the creation of the topic on nobody does, so what is there now stays.
    Raises RemoteMissingError."""
    for number, manifest in manifests.items():
        try:
            await _check_objects(store, manifest)
        except RemoteMissingError as error:
            raise RemoteMissingError(
                f"Topic {name!r} was restored, and its partition {number} is not whole: while that "
                f"was done an object was deleted. ({error}) `rayq storage verify-remote {name}` "
                "names all that is gone; delete the topic where that is too much."
            ) from error


async def used_prefixes(client: Client) -> dict[str, str]:
    """The topics of the cluster, by the prefix of their objects."""
    return _used_prefixes(await client.fetch_all(timeout_s=CREATE_TIMEOUT_S))


def _used_prefixes(cluster: MetadataResponse) -> dict[str, str]:
    return {
        parsed.prefix: topic.name
        for topic in cluster.topics
        for partition in topic.partitions
        if partition.remote is not None
        and (parsed := parse_name(partition.remote.manifest)) is not None
    }


def _check_unused(topic: StoredTopic, cluster: MetadataResponse) -> None:
    """Raises InvalidRequestError where a topic of the cluster has objects of this one."""
    used = _used_prefixes(cluster)
    for manifest in topic.manifests.values():
        if manifest.prefix in used:
            raise InvalidRequestError(
                f"Topic {used[manifest.prefix]!r} of this cluster has these objects, and two "
                "topics cannot share them: --copy copies them."
            )


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
    after, count = "", 0
    while page := await store.list("", after):
        check_page(page, "", after, STORE)
        count += len(page)
        if count > LISTED_MAX:
            raise RemoteListError(f"{STORE} has listed {count} names, and continues.")
        after = page[-1].name
        for item in page:
            name = parse_name(item.name)
            if name is not None:
                found[name.prefix] = None
        last = parse_name(after)
        if last is not None:
            after = max(after, f"{last.prefix}{last.kind}/~")  # Behind the rest of its kind.
    return list(found)


async def _manifest_names(store: ObjectStore, prefix: str) -> list[str]:
    """The newest first."""
    listed = await _list_all(store, f"{prefix}{ObjectKind.MANIFEST}/")
    names = [name for item in listed if (name := parse_name(item.name)) is not None]
    return [
        str(parsed)
        for parsed in sorted(names, key=lambda parsed: (-parsed.leader_epoch, -parsed.number))
    ]


async def _list_all(store: ObjectStore, folder: str) -> list[ObjectMeta]:
    found: list[ObjectMeta] = []
    async for page in pages(lambda after: store.list(folder, after), folder, STORE):
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
    sizes = {item.name: item.size_bytes for item in listed}
    for item in manifest.objects:
        if sizes.get(item.name) == item.object_bytes:
            continue
        found = await store.head(item.name)  # The list may be a minute old.
        if found.size_bytes != item.object_bytes:
            raise RemoteMissingError(
                f"{item.name} has {found.size_bytes} bytes, not {item.object_bytes}."
            )


async def _store_without_producers(
    store: ObjectStore,
    environment: Environment,
    manifest: Manifest,
    topic: str,
    stored: list[str],
) -> RemotePointer:
    """Stores the manifest with which the new topic begins; adds to `stored` what is stored."""

    def named(kind: ObjectKind, number: int) -> str:
        return new_name(environment.random, manifest.prefix, kind, number, manifest.leader_epoch)

    changed, pages = msgspec.structs.replace(
        manifest, topic=topic, producer_snapshot=b"", written_ms=environment.clock.wall_ms()
    ).paged(lambda start: named(ObjectKind.PAGE, start))
    name = named(ObjectKind.MANIFEST, manifest.version)
    for object_name, content in [*pages, (name, changed.encode())]:
        stored.append(object_name)
        await store.put(object_name, content)
    pointer = changed.pointer(name)
    return msgspec.structs.replace(pointer, leader_epoch=pointer.leader_epoch + EPOCH_LEAP)


# --- copies ---------------------------------------------------------------------------------------


async def _copied(
    source: ObjectStore,
    manifests: Mapping[int, Manifest],
    target: ObjectStore,
    prefix: str,
    stored: list[str],
    on_progress: OnProgress | None,
) -> dict[int, Manifest]:
    """Copies all objects below another topic's prefix; adds to `stored` what is stored. Returns the
    manifests of the copies."""
    copied = {
        number: _moved(manifest, f"{prefix}{number}/") for number, manifest in manifests.items()
    }
    pairs = [
        (old, new)
        for number, manifest in manifests.items()
        for old, new in zip(manifest.objects, copied[number].objects, strict=True)
    ]
    for done, (old, new) in enumerate(pairs, start=1):
        data = await source.get(old.name)
        if google_crc32c.value(data) != old.crc32c:
            raise RemoteDamagedError(f"{old.name} is damaged: its CRC32C is not {old.crc32c:08x}.")
        stored.append(new.name)
        await target.put(new.name, data)
        if on_progress is not None:
            on_progress(done)
    return copied


def _moved(manifest: Manifest, prefix: str) -> Manifest:
    """The manifest of a copy below another prefix."""
    return msgspec.structs.replace(
        manifest,
        prefix=prefix,
        objects=RemoteObjects(manifest.objects.rows(), prefix),
        pages=(),
        packed_removed=b"",
    )
