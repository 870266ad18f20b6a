"""The object store behind `remote_storage_url`. Only this module knows obstore.

Credentials are those of the node: variables of the environment (AWS_ACCESS_KEY_ID,
GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY, ...), the same names in a file, or the
instance's role. They stay in this process: a store is not pickled, and its errors do not have them.
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
from collections.abc import Awaitable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast
from urllib.parse import unquote, urlsplit

from rayq.config import MIB, check_remote_storage_url
from rayq.config.urls import check_url, without_credentials
from rayq.environment import Buffer, Environment, ObjectMeta, ObjectStore
from rayq.errors import (
    ConfigError,
    RayqError,
    RemoteDeniedError,
    RemoteMissingError,
    RemoteStorageError,
)
from rayq.runtime.file_store import REFUSED_WHOLE_BYTES, FileStore

T = TypeVar("T")

CONNECT_PATIENCE_S = 5
PATIENCE_S = 15.0
PATIENT_BYTES_PER_S = MIB
"""The deadline of a request is `PATIENCE_S`, and as long as its bytes take at this pace."""
WHOLE_BYTES_MAX = 32 * MIB
"""The maximum size of an object that is read whole, such as a manifest."""
REQUEST_S_MAX = 600
LIST_OBJECTS_MAX = 1000
_COMPARED_BYTES = MIB
_ERROR_CHARACTERS_MAX = 300
_SCHEMES = {"s3": "aws_", "gs": "google_", "az": "azure_"}
_CODE = re.compile(r"<Code>(\w+)</Code>")
_DENIED = re.compile(r"status code: 40[13]\b")
"""Matches a denied list request: obstore has no dedicated error for lists."""
_ARCHIVED = "InvalidObjectState"


def open_store(
    url: str, environment: Environment, *, credentials: str | None = None
) -> ObjectStore:
    """The store that a URL names: `s3://bucket/prefix`, `gs://bucket/prefix`,
    `az://container/prefix`, `file:///path`. Nothing is asked of it yet. `credentials` is the path
    of a file (see `remote_storage_credentials`); what it says goes before the environment.

    Raises ConfigError: another URL, credentials in it, no package for it, or a file of credentials
    that others may read.
    """
    check_remote_storage_url(url)
    parts = urlsplit(url)
    if parts.scheme == "file":
        return FileStore(environment, unquote(parts.path))
    try:
        import obstore
        import obstore.store
    except ImportError as error:
        raise ConfigError(
            f"remote_storage_url {url!r} needs obstore on each node: pip install 'rayq[remote]'."
        ) from error
    library: Any = obstore
    config: dict[str, Any] = _settings(credentials, _SCHEMES[parts.scheme])
    endpoint = _aws_endpoint(config)
    shared: dict[str, Any] = {
        "prefix": parts.path.strip("/") or None,
        "client_options": {
            "connect_timeout": timedelta(seconds=CONNECT_PATIENCE_S),
            "timeout": timedelta(seconds=REQUEST_S_MAX),
            # An endpoint that was given without TLS is used without it on purpose.
            "allow_http": parts.scheme == "s3" and endpoint.startswith("http://"),
        },
        "retry_config": {"max_retries": 0},
    }
    opened: Any
    try:
        if parts.scheme == "s3":
            # Signing the payload needs its SHA-256: 5 s of a core for each GiB.
            config.update(aws_unsigned_payload=True, aws_checksum_algorithm="crc64nvme")
            opened = library.store.S3Store(parts.netloc, config=config, **shared)
        elif parts.scheme == "gs":
            opened = library.store.GCSStore(parts.netloc, config=config, **shared)
        else:
            opened = library.store.AzureStore(parts.netloc, config=config, **shared)
    except Exception as error:  # noqa: BLE001 - of whatever kind, it is about what was configured
        raise ConfigError(f"{url} cannot be used: {_said(error)}") from None
    # S3 itself refuses an object whose checksum is wrong; others may ignore it.
    checks_puts = parts.scheme == "s3" and not endpoint
    return _BucketStore(library, opened, url.rstrip("/"), reads_back=not checks_puts)


def _aws_endpoint(config: Mapping[str, str]) -> str:
    """The endpoint of S3, if it is not Amazon's own. Raises ConfigError where it holds credentials.
    """
    for name in ("aws_endpoint_url_s3", "aws_endpoint_url", "aws_endpoint"):
        if found := config.get(name) or os.environ.get(name.upper()):
            check_url(name.upper(), found, schemes=("https", "http"))
            return found
    return ""


def _settings(path: str | None, prefix: str) -> dict[str, Any]:
    """The settings in the credentials file for this kind of store; {} without one."""
    if path is None:
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(
            f"remote_storage_credentials={path!r} cannot be read: {reason}."
        ) from None
    if mode & 0o077:
        raise ConfigError(
            f"{path} has credentials, and mode {mode:04o}: others may read it. chmod 600 it."
        )
    pairs = [line.partition("=") for line in lines if line.strip() and line[0] != "#"]
    settings = {name.strip().lower(): value.strip() for name, _, value in pairs}
    return {name: value for name, value in settings.items() if name.startswith(prefix)}


class _BucketStore:
    """`environment.ObjectStore` by obstore."""

    def __init__(self, library: Any, store: Any, url: str, *, reads_back: bool) -> None:
        self._obstore = library
        self._store = store
        self._url = url
        self._reads_back = reads_back

    def __reduce__(self) -> Any:
        raise TypeError("A store has credentials: it is not pickled.")

    async def put(self, name: str, data: Buffer) -> None:
        await self._run(
            name,
            len(data),
            self._obstore.put_async(self._store, name, data, use_multipart=False),
        )
        if self._reads_back:
            await self._run(name, len(data), self._compare(name, memoryview(data)))

    async def _compare(self, name: str, data: memoryview) -> None:
        answer = await self._obstore.get_async(self._store, name)
        position = 0
        async for chunk in answer.stream(min_chunk_size=_COMPARED_BYTES):
            if bytes(chunk) != bytes(data[position : position + len(chunk)]):
                break
            position += len(chunk)
        if position != len(data):
            raise RemoteStorageError(
                f"{self._url}/{name} was stored with other bytes at {position} than were sent."
            )

    async def get(self, name: str, position: int = 0, length: int | None = None) -> bytes:
        if length is not None:
            if length == 0:
                return b""
            return await self._run(name, length, self._get_range(name, position, length))
        found = await self._run(name, WHOLE_BYTES_MAX, self._get_whole(name))
        return found[position:]

    async def _get_whole(self, name: str) -> bytes:
        answer = await self._obstore.get_async(self._store, name)
        return await self._read(name, answer, REFUSED_WHOLE_BYTES)

    async def _read(self, name: str, answer: Any, bytes_max: int) -> bytes:
        """The body of an answer, as far as the store keeps to what was asked for."""
        pieces: list[bytes] = []
        left_bytes = bytes_max
        async for chunk in answer.stream(min_chunk_size=_COMPARED_BYTES):
            left_bytes -= len(chunk)
            if left_bytes < 0:
                raise RemoteStorageError(
                    f"{self._url}/{name} is sent with more than the {bytes_max} bytes that were "
                    "asked for, and is read no further."
                )
            pieces.append(bytes(chunk))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _get_range(self, name: str, position: int, length: int) -> bytes:
        asked = {"range": (position, position + length)}
        try:
            answer = await self._obstore.get_async(self._store, name, options=asked)
            return await self._read(name, answer, length)
        except RemoteStorageError:
            raise
        except Exception as error:
            if " 416 " in str(error):
                return b""  # It begins behind the object's end.
            raise

    async def head(self, name: str) -> ObjectMeta:
        found = await self._run(name, 0, self._obstore.head_async(self._store, name))
        return _meta(found, name)

    async def _first_page(self, prefix: str, after: str) -> Sequence[Any]:
        stream = self._obstore.list(
            self._store, prefix, offset=after or None, chunk_size=LIST_OBJECTS_MAX
        )
        async for page in stream:
            return cast(Sequence[Any], page)
        return ()

    async def list(self, prefix: str, after: str = "") -> list[ObjectMeta]:
        page = await self._run(prefix, 0, self._first_page(prefix, after))
        return sorted(_meta(item, item["path"]) for item in page)

    async def delete(self, names: Sequence[str]) -> None:
        if not names:
            return
        try:
            await self._run(
                names[0], 0, self._obstore.delete_async(self._store, [*names])
            )
        except RemoteMissingError:
            if len(names) == 1:
                return
            for name in names:
                await self.delete([name])

    async def sign(self, name: str, expires_s: float) -> str:
        expires = timedelta(seconds=expires_s)
        url: str = await self._run(
            name, 0, self._obstore.sign_async(self._store, "GET", name, expires)
        )
        return url

    async def _run(self, name: str, size_bytes: int, request: Awaitable[T]) -> T:
        """The answer to a request within its deadline; its errors are rayq's. The library's own
        tell in many lines what it was made with: they are not kept."""
        patience_s = PATIENCE_S + size_bytes / PATIENT_BYTES_PER_S
        whole = f"{self._url}/{name}"
        try:
            async with asyncio.timeout(patience_s):
                return await request
        except RemoteStorageError:
            raise
        except TimeoutError:
            raise RemoteStorageError(
                f"{whole} was not answered within {patience_s:.0f} s."
            ) from None
        except Exception as error:  # noqa: BLE001 - the library has errors of its own, and others
            raise self._translated(whole, error) from None

    def _translated(self, whole: str, error: Exception) -> RayqError:
        exceptions = self._obstore.exceptions
        said = _said(error)
        if _ARCHIVED in said:
            return RemoteMissingError(
                f"{whole} was moved to an archive, where it cannot be read: restore it, and take "
                f"rayq's objects out of the bucket's lifecycle rules. ({said})"
            )
        denied = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
        if isinstance(error, denied) or _DENIED.search(said):
            return RemoteDeniedError(f"{whole} is denied to this node's credentials. ({said})")
        if isinstance(error, FileNotFoundError) and "NoSuchBucket" not in said:
            return RemoteMissingError(f"{whole} does not exist. ({said})")
        return RemoteStorageError(f"{whole} failed. ({said})")


def _meta(found: Any, name: str) -> ObjectMeta:
    return ObjectMeta(name, found["size"], int(found["last_modified"].timestamp() * 1000))


def _said(error: Exception) -> str:
    """The message of an error of the library, in one line without its inner state."""
    text = without_credentials(str(error).partition("\n\nDebug source")[0])
    code = _CODE.search(text)
    first = text.partition("\n")[0].partition("<?xml")[0].strip()[:_ERROR_CHARACTERS_MAX]
    return f"{first} {code[1]}" if code else first
