"""Reads and writes of manifests and their pages in the object store."""

from __future__ import annotations

from rayq import messages
from rayq.actors.remote.object_link import ObjectLink
from rayq.storage.remote.manifest import Manifest, decode_manifest, page_names


async def load_manifest(objects: ObjectLink, name: str) -> Manifest:
    """Loads the manifest `name`, with its pages. Raises RemoteStorageError, RemoteMissingError,
    RemoteDamagedError."""
    root = await _get(objects, name)
    pages = {page: await _get(objects, page) for page in page_names(root, name)}
    return decode_manifest(root, pages, name)


async def store_manifest(
    objects: ObjectLink, manifest: Manifest, pages: list[tuple[str, bytes]], name: str
) -> None:
    """Stores the new pages, then the manifest as `name`. Raises RemoteStorageError."""
    for page, content in pages:
        await objects.ask(messages.PutBlob(page), content)
    await objects.ask(messages.PutBlob(name), manifest.encode())


async def _get(objects: ObjectLink, name: str) -> bytes:
    _, payload = await objects.ask(messages.GetBlob(name))
    return bytes(payload)
