"""Reading objects by URLs: parts of files and of what a store serves, and errors without secrets."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rayq.errors import (
    RayqError,
    RemoteDeniedError,
    RemoteMissingError,
    RemoteStorageError,
)
from rayq.wire.object_urls import open_object_url

DATA = bytes(range(256)) * 40


class Store(BaseHTTPRequestHandler):
    """Answers `/whole`, `/short` (it breaks off), `/deaf` (it ignores ranges), and `/<status>`."""

    def do_GET(self) -> None:
        what = self.path.split("?")[0].strip("/")
        if what.isdigit():
            self.send_error(int(what))
            return
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
        assert found is not None
        first, last = map(int, found.groups())
        body = DATA if what == "deaf" else DATA[first : last + 1]
        self.send_response(200 if what == "deaf" else 206)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if what == "short" else body)

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Store)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def read_all(url: str, position: int, length: int) -> bytes:
    opened = open_object_url(url, position, length)
    data = b""
    try:
        while piece := opened.read(1000):
            data += piece
    finally:
        opened.close()
    return data


def test_a_part_of_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "an object"
    path.write_bytes(DATA)
    assert read_all(path.as_uri(), 3, 5000) == DATA[3:5003]
    assert read_all(path.as_uri(), 10_000, 5000) == DATA[10_000:]
    with pytest.raises(RemoteMissingError, match="mounted"):
        open_object_url((tmp_path / "gone").as_uri(), 0, 10)
    with pytest.raises(RemoteStorageError):
        read_all(tmp_path.as_uri(), 0, 10)


def test_a_part_of_what_a_store_serves_is_read(url: str) -> None:
    assert read_all(f"{url}/whole?signature=secret", 3, 5000) == DATA[3:5003]


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("403", RemoteDeniedError),
        ("404", RemoteMissingError),
        ("503", RemoteStorageError),
        ("deaf", RemoteStorageError),
    ],
)
def test_an_answer_that_is_no_part_is_a_typed_error_without_the_signature(
    url: str, what: str, error: type[RayqError]
) -> None:
    with pytest.raises(error) as caught:
        open_object_url(f"{url}/{what}?signature=secret", 3, 5000)
    assert type(caught.value) is error
    assert f"/{what}" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_store_that_breaks_off_or_is_away_is_told(url: str) -> None:
    try:
        assert len(read_all(f"{url}/short", 0, 5000)) < 5000
    except RemoteStorageError as error:
        assert "/short" in str(error)
    with pytest.raises(RemoteStorageError):
        open_object_url("http://127.0.0.1:1/closed?signature=secret", 0, 10)
    with pytest.raises(RemoteStorageError, match="http, https and file"):
        open_object_url("ftp://somewhere/else", 0, 10)
