"""Ray's own token: the Ray that `rayq start` starts lets no other process in without it."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path


def token_path() -> Path:
    """The path at which Ray looks for its token."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()


def has_ray_token() -> bool:
    return bool(os.environ.get("RAY_AUTH_TOKEN")) or token_path().exists()


def use_ray_token() -> None:
    """Has this process prove itself with its token, where it has one and nobody said otherwise: as
    Ray does for a Ray of its own. Ray reads the setting when it is imported, so it is told where
    that has happened already."""
    if "RAY_AUTH_MODE" in os.environ or not has_ray_token():
        return
    os.environ["RAY_AUTH_MODE"] = "token"
    if "ray" in sys.modules:
        from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()


def ensure_ray_token() -> None:
    if has_ray_token():
        return
    path = token_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(secrets.token_hex(32))
