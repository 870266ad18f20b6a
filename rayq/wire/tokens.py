"""Tokens of named principals: `rayq2-<principal>-<43 characters>`, the last part being 32 drawn
bytes in base64url.

The cluster's own token, which makes a client the superuser, is `authentication.token_of`.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from typing import NamedTuple

from rayq.errors import ConfigError
from rayq.messages.access import Salt, TokenVerifiers
from rayq.messages.acls import PRINCIPAL_NAME
from rayq.wire import scram

PREFIX = "rayq2-"
DRAWN_BYTES = 32
_TOKEN = re.compile(rf"{PREFIX}(?P<principal>{PRINCIPAL_NAME})-[A-Za-z0-9_-]{{43}}")


class PrincipalToken(NamedTuple):
    """A principal and its whole token, which is a password: its repr hides it."""

    principal: str
    text: str

    def __repr__(self) -> str:
        return f"PrincipalToken({self.principal!r}, hidden)"


def draw_token(principal: str, token_bytes: Callable[[int], bytes]) -> PrincipalToken:
    """Draws a token for a principal. `token_bytes` is that of the environment."""
    drawn = base64.urlsafe_b64encode(token_bytes(DRAWN_BYTES)).decode().rstrip("=")
    return PrincipalToken(principal, f"{PREFIX}{principal}-{drawn}")


def is_principal_token(token: str) -> bool:
    """Returns whether a text is meant as the token of a principal, and not as the cluster's."""
    return token.strip().startswith(PREFIX)


def principal_token(token: str) -> PrincipalToken:
    """The parts of a principal's token. Raises ConfigError for a text that is none, without
    repeating it."""
    text = token.strip()
    found = _TOKEN.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"That is no token of a principal: it is {PREFIX}<principal>-<43 characters>, and "
            f"{len(text)} characters long instead. Copy the whole token that `rayq token create` "
            "printed."
        )
    return PrincipalToken(found["principal"], text)


def verifiers_of(token: PrincipalToken, salt: Salt) -> TokenVerifiers:
    """Keys that servers keep of a token, for both mechanisms."""
    sha256 = scram.client_keys(token.text, salt, mechanism="sha256").verifier
    sha512 = scram.client_keys(token.text, salt, mechanism="sha512").verifier
    return TokenVerifiers(*sha256, *sha512)
