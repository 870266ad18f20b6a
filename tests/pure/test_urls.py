"""URLs hold no credentials wherever rayq takes one, and no error shows what they hold."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

import rayq
from rayq.client.addresses import parse_address
from rayq.client.environment import system_environment
from rayq.client.large.collect import collect_values
from rayq.config import (
    ClusterConfig,
    ConsumerConfig,
    ProducerConfig,
    check_remote_storage_url,
    check_values_url,
    parse,
)
from rayq.config.urls import check_url, without_credentials
from rayq.errors import CheckpointError, ConfigError, RemoteStorageError
from rayq.runtime import object_store
from rayq.spark.checkpoint_store import open_store as open_checkpoint
from rayq.wire.object_urls import open_object_url

SECRET = "s3cret"
WITH_CREDENTIALS = [
    f"s3://key:{SECRET}@bucket/prefix", f"s3://{SECRET}@bucket/prefix", f"s3://key:{SECRET}/prefix",
    f"s3://bucket/prefix?secret={SECRET}", f"s3://bucket/prefix#{SECRET}", f"s3://bucket?{SECRET}",
    f"s3://key%3A{SECRET}%40bucket/x", f"az://c/p?sv=1&sig={SECRET}", f"s3://b/../{SECRET}",
    f"file:///mnt/{SECRET}\n", f"s3://b/{SECRET}\0", f"s3://b/{SECRET}\ud800", f"//{SECRET}/x",
    f"s3:/key:{SECRET}@bucket", f"{SECRET}", f"s3://[::1]{SECRET}@b/x", f"s3://[{SECRET}", "",
    f"http://user:{SECRET}@proxy:3128", f"s3://bucket/a/key:{SECRET}@b",
]

TAKES_URL: dict[str, Callable[[str], Any]] = {
    "ClusterConfig.remote_storage_url": lambda url: ClusterConfig(remote_storage_url=url),
    "ProducerConfig.large_values": lambda url: ProducerConfig(large_values=url),
    "ConsumerConfig.large_values": lambda url: ConsumerConfig(large_values=url),
    "a config of keywords": lambda url: parse(ConsumerConfig, {"large.values": url}),
    "a stored config": lambda url: parse(ClusterConfig, {"remote_storage_url": url}),
    "check_values_url": check_values_url,
    "check_remote_storage_url": check_remote_storage_url,
    "open_store": lambda url: object_store.open_store(url, system_environment()),
    "collect_values": lambda url: asyncio.run(collect_values(cast(Any, None), url)),
}


@pytest.mark.parametrize("url", WITH_CREDENTIALS, ids=ascii)
@pytest.mark.parametrize("takes", TAKES_URL)
def test_a_url_with_more_than_a_place_is_refused_and_not_shown(takes: str, url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        TAKES_URL[takes](url)
    assert SECRET not in str(refused.value) and refused.value.__cause__ is None


@pytest.mark.parametrize(
    "url",
    [f"s3://key:{SECRET}@b/x", f"s3://b/x?{SECRET}", f"ftp://u:{SECRET}@h/x", f"s3:/k:{SECRET}@b/x"],
)
def test_a_checkpoint_is_no_place_for_a_password_either(url: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        open_checkpoint(url, "run")
    assert SECRET not in str(refused.value)


def test_a_name_before_an_at_is_part_of_the_place_where_that_is_said() -> None:
    for url in ("abfs://container@account.dfs.core.windows.net/path", "sftp://user@host/path"):
        check_url("checkpoint", url, allows_user=True)
        with pytest.raises(ConfigError):
            check_url("large_values", url)


@pytest.mark.parametrize(
    "url",
    ["s3://bucket", "s3://bucket/a b/c%20d", "gs://b/p", "az://c/p", "file:///mnt/store", "memory://x",
     "hdfs://namenode:8020/x", "http://[::1]:9000/x", "simplecache::s3://bucket/x", "s3://b/key=1/x"],
)
def test_a_url_that_says_only_where(url: str) -> None:
    check_url("large_values", url)
    assert ConsumerConfig(large_values=url).large_values == url


def test_an_endpoint_with_a_password_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://key:{SECRET}@127.0.0.1:1")
    with pytest.raises(ConfigError, match="AWS_ENDPOINT_URL") as refused:
        object_store.open_store("s3://bucket", system_environment())
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "address", [f"rayq://user:{SECRET}@host:1", f"user:{SECRET}@host:1", (f"{SECRET}@host", 1)]
)
def test_an_address_has_no_password(address: Any) -> None:
    with pytest.raises(ConfigError, match="token=") as refused:
        parse_address(address)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "said",
    [
        f"error sending request for url (http://key:{SECRET}@host:9000/b/o)",
        f"GET https://b.s3/o?X-Amz-Credential=k&X-Amz-Signature={SECRET} failed",
        f"URL can't contain control characters. '/b/o x?X-Amz-Signature={SECRET}'",
        f"connect to proxy http://user:{SECRET}@proxy:3128: refused",
        f"az://c/p?sig={SECRET}", f"s3:/k:{SECRET}@b",
    ],
)
def test_what_libraries_say_is_shown_without_what_grants_access(said: str) -> None:
    assert SECRET not in without_credentials(said)
    assert SECRET not in object_store._said(Exception(said))
    assert without_credentials("plain: a@b, what? nothing") == "plain: a@b, what? nothing"


def test_a_signed_url_is_not_shown() -> None:
    for url in (f"http://[{SECRET}/o", f"http://127.0.0.1:1/a b?X-Amz-Signature={SECRET}"):
        with pytest.raises(RemoteStorageError) as failed:
            open_object_url(url, 0, 1)
        assert SECRET not in str(failed.value)


# --- every place --------------------------------------------------------------------------------------

SOURCES = Path(str(rayq.__file__)).parent
NAMES = {"url", "large_values", "remote_storage_url"}
INSIDE = {
    # They get what was checked: by a config, or by who stored it.
    "batch/range_reader.py: read_range", "client/large/objects.py: is_below",
    "client/large/objects.py: object_uri", "client/large/objects.py: read_object",
    "client/large/objects.py: prefix_of",
    "actors/broker/metadata_answers.py: object_store", "spark/read.py: read_ranges",
    "environment.py: opens_no_objects", "config/urls.py: check_url", "wire/object_urls.py: open_object_url",
}
CHECKED = {
    "cli/large_values.py: collect", "client/cluster_methods.py: async_queue", "client/cluster_methods.py: create_queue",
    "client/cluster_methods.py: queue", "client/cluster.py: queue_pool", "client/large/collect.py: collect_values",
    "config/servers.py: check_remote_storage_url", "config/clients.py: check_values_url", "data/source.py: read_topic",
    "runtime/object_store.py: open_store", "spark/read.py: read",
    "spark/stream.py: stream",
    "config/servers.py: ClusterConfig", "config/clients.py: ConsumerConfig",
    "config/clients.py: ProducerConfig",
    "client/consumer_pool.py: PoolSpec",
}
"""What a user calls. A new one is checked by `check_url` before anything is kept or shown."""


def takers() -> set[str]:
    """The public functions that take a URL, by their parameters' names, and the classes with it."""
    found = set()
    for path in SOURCES.rglob("*.py"):
        text = path.read_text()
        if not any(f"{name}:" in text for name in NAMES):
            continue
        for node in ast.walk(ast.parse(text)):
            names: set[str] = set()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = {one.arg for one in node.args.args + node.args.kwonlyargs}
            elif isinstance(node, ast.ClassDef) and "messages" not in path.parts:
                names = {
                    one.target.id for one in node.body
                    if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
                }
            else:
                continue
            if NAMES & names and not node.name.startswith("_"):
                found.add(f"{path.relative_to(SOURCES)}: {node.name}")
    return found


def test_each_place_that_takes_a_url_is_one_that_checks_it() -> None:
    assert takers() - INSIDE - CHECKED - {
        # Answers of servers, which have it from a config; the same keys for editors.
        "records.py: ObjectStoreInfo", "core/cluster/facts.py: ObjectStoreFacts",
        "config/keywords.py: ConsumerKeywords", "config/keywords.py: ProducerKeywords",
        "config/keywords.py: ClusterKeywords",
    } == set()
    assert takers() >= INSIDE | CHECKED
