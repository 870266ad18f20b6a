"""A real S3 server in this process, for tests: moto's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
from moto.server import ThreadedMotoServer

BUCKET = "the-bucket"
SECRET = "a-secret-that-nobody-may-see"


@dataclass(frozen=True)
class S3:
    """A server with one bucket."""

    endpoint: str
    credentials: Path
    """A file for `remote_storage_credentials`."""

    def url(self, prefix: str) -> str:
        """For `remote_storage_url`."""
        return f"s3://{BUCKET}/{prefix}"

    def names(self, prefix: str = "") -> list[str]:
        """All objects whose names begin with `prefix`."""
        pages = self.client().get_paginator("list_objects_v2").paginate(
            Bucket=BUCKET, Prefix=prefix
        )
        return [one["Key"] for page in pages for one in page.get("Contents", [])]

    def client(self) -> Any:
        """boto3's client: another than rayq's."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id="key",
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )


@contextmanager
def s3_server(directory: Path) -> Iterator[S3]:
    """Serves until the end of the block. `directory` gets the file of credentials."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    credentials = write_credentials(directory / "credentials", endpoint)
    made = S3(endpoint, credentials)
    try:
        made.client().create_bucket(Bucket=BUCKET)
        yield made
    finally:
        server.stop()


def write_credentials(path: Path, endpoint: str) -> Path:
    """A file that only its owner may read."""
    path.touch(mode=0o600)
    path.write_text(
        "# for tests\n"
        "AWS_ACCESS_KEY_ID=key\n"
        f"AWS_SECRET_ACCESS_KEY={SECRET}\n"
        f"AWS_ENDPOINT_URL={endpoint}\n"
        "AWS_REGION=us-east-1\n"
    )
    return path
