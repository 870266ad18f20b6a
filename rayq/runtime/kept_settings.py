"""The settings that a cluster was started with, kept with its data for every later start.

Each broker's directory has them in the file `settings`: the cluster's name, its first port, and the
configs that were given. A start uses what was kept; what it is given takes precedence, and is kept
in turn. So a protection that was on, such as TLS, is never lost by leaving an option out.

A directory is formatted with the settings of its cluster, before it counts as formatted; a broker
writes them again once it serves, where they changed. So a start that has returned is kept in every
directory that it found, and one that died on the way in some of them, or in none: of directories
that differ the highest revision counts. Files (TLS keys, credentials) are kept as paths.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, get_args

import msgspec

from rayq.client.addresses import DEFAULT_PORT
from rayq.config import ClusterConfig, only_known, parse, types_of
from rayq.environment import Disk
from rayq.errors import ConfigError, StorageError
from rayq.storage import checked_file

SETTINGS = "settings"
DEFAULT_NAME = "default"
LOOPBACK = "127.0.0.1"
"""The address on which brokers listen in a Ray that runs all hosts on one machine."""
TLS_FILES = ("tls_certificate", "tls_key", "tls_ca")
PATHS = (*TLS_FILES, "tls_client_ca", "remote_storage_credentials")
_VERSION = 1


class KeptSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file `settings`."""

    revision: int
    """Raised by each start that changes anything."""
    cluster_name: str
    port: int
    config: dict[str, Any]
    """The configs given at this start and earlier ones; no defaults."""

    def parsed(self) -> ClusterConfig:
        """Keys that this version does not know are passed over: a newer one was given them, and
        they stay in the file. Raises ConfigError."""
        return parse(ClusterConfig, only_known(ClusterConfig, self.config))


def read_settings(disk: Disk, path: str) -> KeptSettings | None:
    """The settings that the broker directory `path` keeps; None where an older version wrote it.
    Raises UnsupportedFormatError, StorageError: a file that cannot be read is never passed over,
    since it may have said that TLS is on."""
    file = f"{path}/{SETTINGS}"
    try:
        content = checked_file.read(disk, file, SETTINGS, _VERSION)
        return None if content is None else msgspec.json.decode(content, type=KeptSettings)
    except OSError as error:
        raise StorageError(f"{file} cannot be read: {error}") from error
    except msgspec.DecodeError as error:
        raise StorageError(f"{file} is damaged: {error}") from error
    except StorageError as error:
        raise error.with_message(
            f"{error} It says what the cluster was started with, such as TLS: copy it from the "
            "directory of another broker, or remove it and give all of it again."
        ) from error


def write_settings(disk: Disk, path: str, settings: KeptSettings) -> None:
    """Durably, and readable by the owner only. Raises StorageError."""
    content = msgspec.json.format(msgspec.json.encode(settings)) + b"\n"
    try:
        checked_file.write(disk, f"{path}/{SETTINGS}", SETTINGS, _VERSION, content)
    except OSError as error:
        raise StorageError(f"{path}/{SETTINGS} cannot be written: {error}") from error


def newest(found: Iterable[KeptSettings | None]) -> KeptSettings | None:
    known = [settings for settings in found if settings is not None]
    return max(known, key=lambda settings: settings.revision, default=None)


def given_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configs that a start was given, under their names. Paths become absolute, since a later
    start may come from another directory. Raises ConfigError for a name that is unknown or given
    twice. Values are checked by `settings_for`, together with those they go with."""
    values: dict[str, Any] = {}
    for given, value in config.items():
        name = given.replace(".", "_")
        if name in values or name not in types_of(ClusterConfig):
            parse(ClusterConfig, config)  # Says what is wrong.
        is_path = name in PATHS and isinstance(value, str) and value
        values[name] = os.path.abspath(os.path.expanduser(value)) if is_path else value
    return values


def settings_for(
    kept: KeptSettings | None,
    *,
    name: str | None,
    port: int | None,
    given: Mapping[str, Any],
    defaults: Mapping[str, Any] = {},
) -> KeptSettings:
    """The settings of a start that is given these, and that go on what was `kept`. None as a given
    config takes back what was kept: the default counts again. `defaults` are configs for which
    nothing was given or kept. Raises ConfigError."""
    before = kept or KeptSettings(
        revision=0, cluster_name=DEFAULT_NAME, port=DEFAULT_PORT, config={}
    )
    config = {**defaults, **before.config, **given}
    for key in [key for key, value in given.items() if value is None]:
        if type(None) not in get_args(types_of(ClusterConfig)[key]):
            del config[key]
    after = msgspec.structs.replace(
        before,
        cluster_name=before.cluster_name if name is None else name,
        port=before.port if port is None else port,
        config=config,
    )
    try:
        after.parsed()
    except ConfigError as error:
        if not before.config:
            raise
        raise error.with_message(
            f"{error} What is given goes with what is kept of earlier starts: "
            f"{said(before.config)}."
        ) from error
    if kept is not None and after == kept:
        return kept
    return msgspec.structs.replace(after, revision=before.revision + 1)


def changes(before: KeptSettings | None, after: KeptSettings) -> list[str]:
    """Sentences on what is not as it was at the last start, for people; none for a first start."""
    if before is None:
        return []
    found = []
    if before.cluster_name != after.cluster_name:
        found.append(
            f"The cluster is called {after.cluster_name!r}; it was {before.cluster_name!r}."
        )
    if before.port != after.port:
        found.append(f"Brokers listen from port {after.port}; it was {before.port}.")
    old, new = before.parsed(), after.parsed()
    if bool(old.tls_ca) != bool(new.tls_ca):
        found.append(
            "TLS is on; it was off." if new.tls_ca else "TLS is OFF, as asked for; it was on."
        )
    names = sorted({*only_known(ClusterConfig, {**before.config, **after.config})})
    found += [
        f"{name} is {getattr(new, name)!r}; it was {getattr(old, name)!r}."
        for name in names
        if getattr(old, name) != getattr(new, name)
    ]
    return found


def said(config: Mapping[str, Any]) -> str:
    """Configs as the command takes them."""
    return ", ".join(
        f"{name}={'none' if value is None else value}" for name, value in sorted(config.items())
    )
