"""The client of object stores against a real S3 server, and against one that fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any, ClassVar

import pytest

from rayq.client.environment import system_environment
from rayq.config import MIB
from rayq.environment import ObjectStore
from rayq.errors import (
    ConfigError,
    RayqError,
    RemoteDeniedError,
    RemoteMissingError,
    RemoteStorageError,
)
from rayq.runtime import object_store
from rayq.runtime.object_store import open_store
from tests.real.s3 import S3, SECRET, s3_server, write_credentials


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


def opened(s3: S3, prefix: str = "some/prefix") -> ObjectStore:
    return open_store(s3.url(prefix), system_environment(), credentials=str(s3.credentials))


def test_a_bucket_does_what_an_object_store_has_to(s3: S3) -> None:
    async def script() -> None:
        store = opened(s3)
        content = bytes(range(256)) * 5000
        await store.put("a/1", bytearray(content))
        assert await store.get("a/1") == content
        assert await store.get("a/1", 100, 1000) == content[100:1100]
        assert await store.get("a/1", len(content) - 5, 100) == content[-5:]
        assert await store.get("a/1", len(content) + 5, 100) == b""
        head = await store.head("a/1")
        assert (head.name, head.size_bytes) == ("a/1", len(content))
        assert abs(head.modified_ms - time.time() * 1000) < 60_000
        for name in ("a/2", "a/10", "ab/1"):
            await store.put(name, b"x")
        assert [one.name for one in await store.list("a/")] == ["a/1", "a/10", "a/2"]
        assert [one.name for one in await store.list("a/", "a/1")] == ["a/10", "a/2"]
        assert [one.name for one in await store.list("")] == ["a/1", "a/10", "a/2", "ab/1"]
        assert s3.names() == [f"some/prefix/{name}" for name in ("a/1", "a/10", "a/2", "ab/1")]
        await store.delete(["a/1", "a/nothing"])
        await store.delete([])
        for read in (store.get, store.head):
            with pytest.raises(RemoteMissingError, match="some/prefix/a/1"):
                await read("a/1")

    asyncio.run(script())


def test_long_lists_come_page_by_page(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "LIST_OBJECTS_MAX", 10)
    names = [f"many/{number:04d}" for number in range(15)]

    async def script() -> None:
        store = opened(s3, "pages")
        await asyncio.gather(*(store.put(name, b"") for name in names))
        first = await store.list("many/")
        second = await store.list("many/", first[-1].name)
        assert [one.name for one in first + second] == names
        assert len(first) == 10
        await store.delete(names[:10])
        assert [one.name for one in await store.list("many/")] == names[10:]

    asyncio.run(script())


def test_anybody_reads_by_a_signed_url_and_by_nothing_else(s3: S3) -> None:
    async def script() -> str:
        store = opened(s3)
        await store.put("signed/1", b"0123456789")
        return await store.sign("signed/1", 60)

    url = asyncio.run(script())
    assert SECRET not in url
    request = urllib.request.Request(url, headers={"Range": "bytes=2-4"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.read() == b"234"


# --- faults ---------------------------------------------------------------------------------------


class _Faulty(BaseHTTPRequestHandler):
    """Answers as `answer` says: a status and an S3 error code; None: not at all."""

    answer: ClassVar[tuple[int, str] | None] = (503, "SlowDown")
    ends: ClassVar[Event]

    def _fail(self) -> None:
        if self.answer is None:
            self.ends.wait(60)
            return
        status, code = self.answer
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _fail  # noqa: N815

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[ObjectStore]:
    _Faulty.ends = Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Faulty)
    server.daemon_threads = True
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    credentials = write_credentials(
        tmp_path / "credentials", f"http://127.0.0.1:{server.server_port}"
    )
    yield open_store("s3://b-u-c/k", system_environment(), credentials=str(credentials))
    _Faulty.ends.set()
    server.shutdown()
    server.server_close()


async def errors_of(store: ObjectStore) -> list[RayqError]:
    """The error of each kind of request."""
    found = []
    for ask in (
        lambda: store.put("a/1", b"x"),
        lambda: store.get("a/1"),
        lambda: store.get("a/1", 5, 5),
        lambda: store.list("a/"),
        lambda: store.delete(["a/1"]),
    ):
        with pytest.raises(RayqError) as caught:
            await ask()
        found.append(caught.value)
    return found


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ((503, "SlowDown"), RemoteStorageError),
        ((500, "InternalError"), RemoteStorageError),
        ((403, "AccessDenied"), RemoteDeniedError),
        ((403, "InvalidAccessKeyId"), RemoteDeniedError),
        ((404, "NoSuchBucket"), RemoteStorageError),
    ],
)
def test_each_refusal_has_its_error(
    faulty: ObjectStore, monkeypatch: pytest.MonkeyPatch, answer: Any, kind: type
) -> None:
    monkeypatch.setattr(_Faulty, "answer", answer)
    for error in asyncio.run(errors_of(faulty)):
        assert type(error) is kind, error
        assert answer[1] in str(error)


def test_an_archived_object_is_as_good_as_missing(
    faulty: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Faulty, "answer", (403, "InvalidObjectState"))
    with pytest.raises(RemoteMissingError, match="lifecycle"):
        asyncio.run(faulty.get("a/1"))


def test_a_store_that_says_nothing_is_given_up(
    faulty: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Faulty, "answer", None)
    monkeypatch.setattr(object_store, "PATIENCE_S", 0.3)
    monkeypatch.setattr(object_store, "WHOLE_BYTES_MAX", 0)
    for error in asyncio.run(errors_of(faulty)):
        assert type(error) is RemoteStorageError
        assert "not answered" in str(error)


def test_a_store_that_sends_more_than_was_asked_for_is_read_no_further(
    faulty: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send_forever(handler: Any) -> None:
        is_part = "Range" in handler.headers
        handler.send_response(206 if is_part else 200)
        if is_part:
            handler.send_header("Content-Range", "bytes 5-9/100")
        handler.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        handler.send_header("ETag", '"e"')
        handler.send_header("Content-Length", str(10**11))  # To allocate it aborts the process.
        handler.end_headers()
        with contextlib.suppress(ConnectionError):
            while True:
                handler.wfile.write(b"x" * MIB)

    monkeypatch.setattr(_Faulty, "do_GET", send_forever)
    monkeypatch.setattr(object_store, "REFUSED_WHOLE_BYTES", 4 * MIB)
    with pytest.raises(RemoteStorageError, match="more than the 4194304 bytes"):
        asyncio.run(faulty.get("a/1"))
    with pytest.raises(RemoteStorageError, match="more than the 5 bytes"):
        asyncio.run(faulty.get("a/1", 5, 5))


def test_a_store_that_keeps_other_bytes_than_it_was_sent_is_noticed(s3: S3) -> None:
    """moto takes any bytes for what they claim to be, as some stores do."""

    async def script() -> None:
        store: Any = opened(s3)
        real = store._obstore

        class Rotting:
            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

            async def put_async(self, to: Any, name: str, data: Any, **options: Any) -> Any:
                return await real.put_async(to, name, bytes(data)[:-1] + b"!", **options)

        store._obstore = Rotting()
        with pytest.raises(RemoteStorageError, match="other bytes"):
            await store.put("rotten/1", b"0123456789")

    asyncio.run(script())


# --- secrets --------------------------------------------------------------------------------------


def test_nothing_tells_the_secret(
    faulty: ObjectStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_Faulty, "answer", (403, "SignatureDoesNotMatch"))
    told = [repr(faulty), str(faulty)]
    with caplog.at_level(logging.DEBUG):
        for error in asyncio.run(errors_of(faulty)):
            logging.getLogger("test").error("failed", exc_info=error)
            told += [str(error), repr(error), str(pickle.dumps(error))]
    told.append(caplog.text)
    assert not any(SECRET in text for text in told)
    with pytest.raises(TypeError):
        pickle.dumps(faulty)


def test_credentials_that_others_may_read_are_refused(tmp_path: Path) -> None:
    path = write_credentials(tmp_path / "credentials", "http://127.0.0.1:1")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        open_store("s3://b-u-c/k", system_environment(), credentials=str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        open_store("s3://b-u-c/k", system_environment(), credentials=str(tmp_path / "none"))


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:secret@bucket/x",
        "s3://bucket/x?secret=1",
        "s3://",
        "ftp://host/x",
        "bucket",
        "file://host/path",
        "file:///",
        "file://relative",
    ],
)
def test_a_url_is_a_bucket_or_a_directory_and_nothing_more(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url, system_environment())
    assert "secret@" not in str(caught.value)


def test_google_and_azure_are_opened_by_the_same_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "credentials"
    path.touch(mode=0o600)
    path.write_text("AZURE_STORAGE_ACCOUNT_NAME=a\nAZURE_STORAGE_ACCOUNT_KEY=c2VjcmV0\n")
    assert open_store("az://container/k", system_environment(), credentials=str(path))
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    assert open_store("gs://bucket/k", system_environment())
