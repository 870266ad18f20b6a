"""Reads objects by URLs that a server has signed, with the standard library alone. No message of an
error has the part of a URL that grants access."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit

from rayq.config.urls import without_credentials
from rayq.environment import ObjectBytes
from rayq.errors import RemoteDeniedError, RemoteMissingError, RemoteStorageError

SOCKET_TIMEOUT_S = 10.0
"""A store that sends nothing for so long is away."""


def open_object_url(url: str, position: int, length: int) -> ObjectBytes:
    """`length` bytes from `position` on of `http://...`, `https://...` or `file:///...`; see
    `rayq.environment.OpenObject`. Proxies are those of the environment (`https_proxy`)."""
    try:
        parts = urlsplit(url)
        shown = urlunsplit((parts.scheme, parts.hostname or "", parts.path, "", ""))
    except ValueError:
        raise RemoteStorageError(
            "The URL that a server gave for an object is none. (It is not shown here.)"
        ) from None
    if parts.scheme == "file":
        return _FileBytes(parts.path, shown, position, length)
    if parts.scheme not in ("http", "https"):
        raise RemoteStorageError(f"{shown}: objects are read by http, https and file URLs.")
    return _UrlBytes(url, shown, position, length)


class _UrlBytes:
    def __init__(self, url: str, shown: str, position: int, length: int) -> None:
        # It takes a while to import, and few processes read objects.
        from http.client import HTTPException
        from urllib.error import HTTPError
        from urllib.request import Request, urlopen

        self._failures = (OSError, HTTPException, ValueError)
        self._shown = shown
        last = position + length - 1
        request = Request(url, headers={"Range": f"bytes={position}-{last}"})
        try:
            self._answer = urlopen(request, timeout=SOCKET_TIMEOUT_S)
        except HTTPError as error:
            error.close()
            kind = {401: RemoteDeniedError, 403: RemoteDeniedError, 404: RemoteMissingError}.get(
                error.code, RemoteStorageError
            )
            raise kind(f"{shown}: the object store answered {error.code} {error.reason}.") from None
        except self._failures as error:
            said = without_credentials(str(error))
            raise RemoteStorageError(f"{shown}: {said}.") from None
        if self._answer.status != 206:
            self._answer.close()
            raise RemoteStorageError(
                f"{shown}: {self._answer.status} for a part of the object, not 206."
            )

    def read(self, length: int) -> bytes:
        try:
            data: bytes = self._answer.read(length)
        except self._failures as error:
            said = without_credentials(str(error))
            raise RemoteStorageError(f"{self._shown}: {said}.") from None
        return data

    def close(self) -> None:
        self._answer.close()


class _FileBytes:
    def __init__(self, quoted: str, shown: str, position: int, length: int) -> None:
        from urllib.request import url2pathname

        self._shown = shown
        self._left = length
        try:
            self._file = open(url2pathname(quoted), "rb", buffering=0)  # noqa: SIM115
        except FileNotFoundError as error:
            raise RemoteMissingError(f"{shown} is not there: is it mounted here?") from error
        except PermissionError as error:
            raise RemoteDeniedError(f"{shown}: {error.strerror}.") from error
        except OSError as error:
            raise RemoteStorageError(f"{shown}: {error}.") from error
        self._file.seek(position)

    def read(self, length: int) -> bytes:
        try:
            data = self._file.read(min(length, self._left))
        except OSError as error:
            raise RemoteStorageError(f"{self._shown}: {error}.") from error
        self._left -= len(data)
        return data

    def close(self) -> None:
        self._file.close()
