"""Proof of a token without sending it: the keys and proofs of SCRAM (RFC 5802, RFC 7677).

A server keeps a `Verifier` of each token, from which the token cannot be computed. The client
derives its keys from the token and the principal's salt, and proves that it has them over a text
that both sides know. rayq's own handshake and Kafka's SASL/SCRAM use the same keys.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
from collections.abc import Iterable
from typing import Literal, NamedTuple

ITERATIONS = 4096
"""Rounds of PBKDF2. A token has 256 bits of chance, so no number of rounds makes it harder to
guess; this is the least that Kafka's clients accept."""
SALT_BYTES = 16

Mechanism = Literal["sha256", "sha512"]
MECHANISMS: tuple[Mechanism, ...] = ("sha256", "sha512")
"""Those of SCRAM-SHA-256 and SCRAM-SHA-512."""


class Verifier(NamedTuple):
    """The server's side of one token and mechanism."""

    stored_key: bytes
    """Hash of the client's key. Whoever has it can check a proof, and cannot make one."""
    server_key: bytes
    """Key of the server's own proof."""


class ClientKeys(NamedTuple):
    """The client's side of one token and mechanism."""

    client_key: bytes
    verifier: Verifier


@functools.lru_cache(maxsize=64)
def client_keys(
    token: str, salt: bytes, *, mechanism: Mechanism = "sha256", iterations: int = ITERATIONS
) -> ClientKeys:
    """The keys of a token. Takes about 2 ms of processor time; a process computes them once."""
    salted = hashlib.pbkdf2_hmac(mechanism, token.encode(), salt, iterations)
    client_key = hmac.digest(salted, b"Client Key", mechanism)
    stored_key = hashlib.new(mechanism, client_key).digest()
    return ClientKeys(
        client_key, Verifier(stored_key, hmac.digest(salted, b"Server Key", mechanism))
    )


def prove(keys: ClientKeys, text: bytes, *, mechanism: Mechanism = "sha256") -> bytes:
    """The client's proof that it has the keys, over a text that both sides know."""
    signature = hmac.digest(keys.verifier.stored_key, text, mechanism)
    return _xor(keys.client_key, signature)


def proven(
    proof: bytes,
    text: bytes,
    verifiers: Iterable[Verifier],
    *,
    mechanism: Mechanism = "sha256",
) -> Verifier | None:
    """The verifier whose client made the proof, or None. Each verifier is tried, whichever fits, so
    that the time does not tell which did."""
    found: Verifier | None = None
    for verifier in verifiers:
        if len(proof) != len(verifier.stored_key):
            continue
        signature = hmac.digest(verifier.stored_key, text, mechanism)
        client_key = _xor(proof, signature)
        stored_key = hashlib.new(mechanism, client_key).digest()
        if hmac.compare_digest(stored_key, verifier.stored_key):
            found = verifier
    return found


def server_signature(
    verifier: Verifier, text: bytes, *, mechanism: Mechanism = "sha256"
) -> bytes:
    """The server's proof that it has the verifier."""
    return hmac.digest(verifier.server_key, text, mechanism)


def decoy_salt(secret: bytes, principal: str) -> bytes:
    """The salt of a principal that does not exist: the same each time, as a real one is, so that an
    unknown name looks like a wrong token."""
    text = b"rayq salt of nobody\0" + principal.encode()
    return hmac.digest(secret, text, "sha256")[:SALT_BYTES]


def _xor(left: bytes, right: bytes) -> bytes:
    number = int.from_bytes(left, "big") ^ int.from_bytes(right, "big")
    return number.to_bytes(len(left), "big")
