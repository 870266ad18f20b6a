"""The texts of tokens: `rayq-<43 characters>` is the cluster's own, which makes a client the
superuser, and `rayq2-<principal>-<43 characters>` is that of a named principal. The 43 characters
are 32 bytes in base64url: of the cluster's client key, or drawn.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable
from typing import NamedTuple

from rayq.errors import ConfigError
from rayq.messages.access import Salt, TokenVerifiers
from rayq.messages.acls import PRINCIPAL_NAME
from rayq.wire import scram

CLUSTER_PREFIX = "rayq-"
PREFIX = "rayq2-"
KEY_BYTES = 32
DRAWN_BYTES = 32
_TOKEN = re.compile(rf"{PREFIX}(?P<principal>{PRINCIPAL_NAME})-[A-Za-z0-9_-]{{43}}")
_LATER = re.compile(r"rayq\d+-")
_QUOTES = "'\"`"


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


def principal_token(token: str, given_by: str = "That") -> PrincipalToken:
    """The parts of a principal's token. Raises ConfigError, as `no_token`."""
    text = token.strip()
    found = _TOKEN.fullmatch(text)
    if found is None:
        raise no_token(text, given_by)
    return PrincipalToken(found["principal"], text)


def token_of_key(key: bytes) -> str:
    """The cluster's client key as its token. Treat it as a password."""
    return CLUSTER_PREFIX + base64.urlsafe_b64encode(key).decode().rstrip("=")


def key_of_token(token: str, given_by: str = "That") -> bytes:
    """The client key in the cluster's token. Raises ConfigError, as `no_token`."""
    text = token.strip()
    encoded = text.removeprefix(CLUSTER_PREFIX)
    try:
        key = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
    except (ValueError, binascii.Error):
        key = b""
    if encoded == text or len(key) != KEY_BYTES:
        raise no_token(text, given_by)
    return key


def no_token(text: str, given_by: str) -> ConfigError:
    """The error for a text that is not a token. It never repeats the text, which may be most of a
    password. `given_by` says where it came from, such as "RAYQ_TOKEN"."""
    return ConfigError(
        f"{given_by} is not a rayq token: {_why_not(text)}. A token is "
        f"{CLUSTER_PREFIX}<43 characters> (the cluster's own: `rayq token` prints it) or "
        f"{PREFIX}<principal>-<43 characters> (a principal's: `rayq token create` printed it). "
        "Copy the whole of it."
    )


def _why_not(text: str) -> str:
    if not text:
        return "it is empty"
    if text[0] in _QUOTES or text[-1] in _QUOTES:
        return "it has quotes around it, which do not belong to it"
    if any(character.isspace() for character in text):
        return f"it has spaces or line breaks among its {len(text)} characters"
    for prefix, owner in ((PREFIX, "a principal"), (CLUSTER_PREFIX, "a cluster")):
        if text.startswith(prefix):
            return (
                f"it begins with {prefix!r} as that of {owner}, and what follows in its "
                f"{len(text)} characters is cut or altered"
            )
    if _LATER.match(text):
        return "it may be one of a later rayq, which this one does not know: update rayq here"
    return f"its {len(text)} characters begin with neither {CLUSTER_PREFIX!r} nor {PREFIX!r}"


def verifiers_of(token: PrincipalToken, salt: Salt) -> TokenVerifiers:
    """Keys that servers keep of a token, for both mechanisms."""
    sha256 = scram.client_keys(token.text, salt, mechanism="sha256").verifier
    sha512 = scram.client_keys(token.text, salt, mechanism="sha512").verifier
    return TokenVerifiers(*sha256, *sha512)
