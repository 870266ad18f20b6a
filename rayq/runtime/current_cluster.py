"""The cluster that `rayq start` has started on this machine, as a file tells.

`$RAYQ_HOME/current.json` (by default in `~/.rayq`) is replaced as a whole and readable by its owner
only: it holds the token. The command's verbs and `rayq.connect()` find the cluster by it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import msgspec

from rayq.client.addresses import format_address, parse_addresses
from rayq.client.cluster import Cluster, Lifecycle
from rayq.config import ClusterConfig, parse_stored
from rayq.errors import AuthenticationError, ConfigError, RayqError
from rayq.wire.authentication import ClientKey, HasSecret, client_key_of


class Current(HasSecret, frozen=True, kw_only=True):
    """The record that `rayq start` keeps of the cluster that it started."""

    ray_address: str
    name: str
    brokers: list[str]
    path: str
    started_ray: bool
    token: str
    ray_session: str | None = None
    """The session of the Ray that was started along, by which `rayq stop` knows its processes."""
    config: dict[str, str | bool | None] = msgspec.field(default_factory=dict)
    """The TLS fields of the cluster's config."""


def home() -> Path:
    try:
        return Path(os.environ.get("RAYQ_HOME") or "~/.rayq").expanduser()
    except RuntimeError as error:
        raise RayqError("This user has no home directory: set RAYQ_HOME to a directory.") from error


def read_current() -> Current | None:
    """None where no cluster was started. Raises RayqError for a file that is none of ours."""
    path = home() / "current.json"
    try:
        current = msgspec.json.decode(path.read_bytes(), type=Current)
        cluster_of(current)  # Checks what stands there.
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ConfigError) as error:
        raise RayqError(
            f"{path} is damaged ({error}): remove it, and name the cluster by its address."
        ) from error
    return current


def write_current(current: Current) -> None:
    directory = home()
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / f"current.json.{os.getpid()}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(current)) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(directory / "current.json")


def remove_current() -> None:
    (home() / "current.json").unlink(missing_ok=True)


def cluster_of(
    current: Current,
    lifecycle: Lifecycle | None = None,
    key: ClientKey | None = None,
    client_id: str = "",
) -> Cluster:
    """Asks no server yet. `key` None: that of the token in `current`. Raises ConfigError for what
    is not an address, token or config."""
    return Cluster(
        current.brokers,
        client_key_of(current.token) if key is None else key,
        name=current.name,
        config=parse_stored(ClusterConfig, current.config),
        lifecycle=lifecycle,
        client_id=client_id,
    )


def key_given(token: str | None) -> ClientKey | None:
    """The key of a token that a caller gives, or RAYQ_TOKEN where that is a principal's: they count
    also where this process could find the cluster's own token. None: neither is given. Raises
    ConfigError: whoever was to be a principal by a damaged RAYQ_TOKEN is not the superuser."""
    if token is not None:
        return client_key_of(token, "token=")
    key = _key_in_environment()
    return None if isinstance(key, bytes) else key


def _key_in_environment() -> ClientKey | None:
    token = os.environ.get("RAYQ_TOKEN")
    return client_key_of(token, "RAYQ_TOKEN") if token else None


def saved_access(address: str) -> tuple[ClientKey, dict[str, Any]]:
    """The key for a cluster at an address, and the TLS fields of its config where they are known:
    RAYQ_TOKEN, else those of the current cluster if this is one of its brokers, else
    `$RAYQ_HOME/token`, else the token of the current cluster. Raises AuthenticationError,
    ConfigError."""
    key = _key_in_environment()
    if key is not None:
        return key, {}
    damage = ""
    try:
        current = read_current()
    except RayqError as error:  # Any cluster may be meant.
        current, damage = None, f" {error}"
    given = map(format_address, parse_addresses(address))
    if current is not None and not set(current.brokers).isdisjoint(given):
        return client_key_of(current.token), dict(current.config)
    path = home() / "token"
    with contextlib.suppress(FileNotFoundError):
        return client_key_of(path.read_text(errors="replace"), f"What is in {path}"), {}
    if current is None:
        raise AuthenticationError(
            "A token is needed to connect from outside Ray: pass token=, set RAYQ_TOKEN, or put it "
            f"into {path}. `rayq token` shows it where the cluster was started, and "
            f"`cluster.token` in a process that is connected.{damage}"
        )
    return client_key_of(current.token), {}
