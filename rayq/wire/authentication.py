"""The handshake that opens and authenticates every connection, as pure state machines.

The cluster has one secret. Servers hold it. Clients hold a key derived from it, which only proves
that they may be clients. The handshake has four frames (api 0, at most 1 KiB each):

    client -> server   Hello      versions, role, nonce, own ids, the broker that it expects
    server -> client   Challenge  the agreed version, nonce
    client -> server   Proof      HMAC-SHA256 over Hello and Challenge
    server -> client   Accepted   cluster id, broker id, HMAC-SHA256 over all of the above

A client with the token of a principal names it in Hello, gets the principal's salt in Challenge,
and proves the token by SCRAM-SHA-256 over the same bytes (`scram`). Then the principal's key signs
Accepted. A principal that does not exist gets a salt as well, so that it looks like a wrong token.
A server that acts for a principal names it in Hello, and proves the secret; so does a client inside
Ray, which proves a key that is derived from the secret for that principal alone. Over TLS a client
may show a certificate that names its principal, and proves nothing more (`certificates`).

Each proof covers the bytes of all frames before it, so both nonces, the role, the ids and the
versions, under a label for its direction. So recorded, reflected or altered frames do not verify.
The server shows nothing but a nonce before the client has proven itself.

A man in the middle who relays the handshake can read and alter the frames after it: only TLS
prevents that. Anybody who holds the client key can also pose as a server towards clients.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec

from rayq.errors import (
    AuthenticationError,
    ConfigError,
    UnsupportedVersionError,
    WrongClusterError,
)
from rayq.messages import BrokerId
from rayq.messages.access import Salt
from rayq.messages.acls import SUPERUSER, PrincipalName
from rayq.wire.codec import ENCODER, decode
from rayq.wire.scram import ITERATIONS, Verifier, client_keys, decoy_salt, prove, proven
from rayq.wire.tokens import (
    PrincipalToken,
    is_principal_token,
    key_of_token,
    principal_token,
    token_of_key,
)

HANDSHAKE_VERSION = 1
"""The version byte of handshake frames. Their layout (append-only arrays) never changes."""

VERSION_MIN = 1
VERSION_MAX = 1
"""This rayq speaks the protocol versions from the first to the second."""

HANDSHAKE_FRAME_BYTES_MAX = 1024
ITERATIONS_MAX = 100_000
"""A client computes no more rounds than this for a server that it cannot trust yet."""
NONCE_BYTES = 32
KEY_BYTES = 32

_CLIENT_LABEL = b"rayq 1 client to server"
_SERVER_LABEL = b"rayq 1 server to client"

Role = Literal["server", "client"]
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
ShortName = Annotated[str, msgspec.Meta(max_length=64)]
Version = Annotated[int, msgspec.Meta(ge=1, le=255)]
CLIENT_ID_LENGTH_MAX = 64
ClientId = Annotated[
    str, msgspec.Meta(max_length=CLIENT_ID_LENGTH_MAX, pattern=r"^[^\x00-\x1f\x7f]*$")
]


def client_key(secret: bytes) -> bytes:
    """The key of the cluster's clients. It is derived from the secret, and does not reveal it."""
    return hmac.digest(secret, b"rayq client key", hashlib.sha256)


def token_of(secret: bytes) -> str:
    """The client key as text, for clients outside the cluster. Treat it as a password."""
    return token_of_key(client_key(secret))


class PrincipalKey(NamedTuple):
    """A key that is derived from the cluster's secret for a principal. Programs that can read the
    secret are that principal by it, without a token."""

    principal: str
    key: bytes

    def __repr__(self) -> str:
        return f"PrincipalKey({self.principal!r}, hidden)"


def principal_key(secret: bytes, principal: str) -> PrincipalKey:
    """The key of a principal. It reveals neither the secret nor the keys of others."""
    text = b"rayq principal key\0" + principal.encode()
    return PrincipalKey(principal, hmac.digest(secret, text, hashlib.sha256))


ClientKey = bytes | PrincipalToken | PrincipalKey
"""Key that a client proves: the cluster's client key, which makes it the superuser, or the token or
key of a principal."""


def client_key_of(token: str, given_by: str = "That") -> ClientKey:
    """The key that the text of a token stands for. Raises ConfigError, which says where the text
    came from (`given_by`) and does not repeat it."""
    parse = principal_token if is_principal_token(token) else key_of_token
    return parse(token, given_by)


CERTIFICATE_KEY = hashlib.sha256(b"rayq login by a certificate").digest()
"""Key of a client that logs in by its TLS certificate. Everybody knows it: TLS has proven who both
sides are, and protects the handshake."""


def text_of(key: ClientKey) -> str:
    """The token that `client_key_of` takes. Raises ConfigError where there is none."""
    if key == CERTIFICATE_KEY:
        raise ConfigError("This connection logs in by its TLS certificate, and has no token.")
    if isinstance(key, PrincipalKey):
        raise ConfigError(
            f"This connection is principal {key.principal!r} as inside_ray_principal says, and has "
            f"no token: create one for clients outside (rayq token create {key.principal})."
        )
    return token_of_key(key) if isinstance(key, bytes) else key.text


class HasSecret(msgspec.Struct, frozen=True):
    """Base of the structs that carry the cluster's `secret` or a `token`. Their repr hides both,
    since it ends up in logs, tracebacks and notebooks."""

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.__rich_repr__())
        return f"{type(self).__name__}({shown})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [
            (name, "hidden" if name in ("secret", "token") else getattr(self, name))
            for name in self.__struct_fields__
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """The identity that this process proves in handshakes."""

    role: Role
    key: bytes = field(repr=False)
    """The cluster's secret for a server, the `client_key` for a client."""
    cluster_id: str | None
    """None for a client that does not know it yet, and accepts any server's cluster."""
    broker: int | None
    """The broker id of a broker and of its replica processes."""
    token: PrincipalToken | None = field(default=None, repr=False)
    """The token of a client that is not a superuser; its `key` is then not used."""
    acts_for: str | None = None
    """The principal whose rights the connection has: a server opens it for one, or a client whose
    key is a `principal_key`."""
    client_id: str = ""
    """A name that the client gives itself, for quotas and for people. Nothing proves it."""

    @classmethod
    def of_client(
        cls, key: ClientKey, cluster_id: str | None, *, client_id: str = ""
    ) -> Identity:
        """The identity of a client. Raises ConfigError for a client id that is none."""
        if len(client_id) > CLIENT_ID_LENGTH_MAX or re.search(r"[\x00-\x1f\x7f]", client_id):
            raise ConfigError(
                f"client_id {client_id[:CLIENT_ID_LENGTH_MAX]!r} is none: use at most "
                f"{CLIENT_ID_LENGTH_MAX} characters, without control characters."
            )
        token = key if isinstance(key, PrincipalToken) else None
        derived = key if isinstance(key, PrincipalKey) else None
        return cls(
            role="client",
            key=key if isinstance(key, bytes) else b"" if derived is None else derived.key,
            cluster_id=cluster_id,
            broker=None,
            token=token,
            acts_for=None if derived is None else derived.principal,
            client_id=client_id,
        )

    def handshake_key(self, role: Role) -> bytes:
        """The key of both proofs in a handshake whose client has this `role`."""
        if role == "server":
            assert self.role == "server", "a client cannot prove that it is a server"
            return hmac.digest(self.key, b"rayq server key", hashlib.sha256)
        return client_key(self.key) if self.role == "server" else self.key


class Hello(msgspec.Struct, array_like=True, frozen=True):
    version_min: Version
    version_max: Version
    role: Role
    nonce: Nonce
    cluster_id: ShortName | None
    broker: BrokerId | None
    expect_broker: BrokerId | None


class NamedHello(Hello, frozen=True):
    """Hello of a client that is a principal or names itself, or of a server that acts for a
    principal. (Others send `Hello`, as older clients do. An older server passes over the further
    fields.)"""

    principal: PrincipalName | None = None
    acts_for: PrincipalName | None = None
    client_id: ClientId = ""


class Challenge(msgspec.Struct, array_like=True, frozen=True):
    version: Version
    nonce: Nonce


class NamedChallenge(Challenge, frozen=True):
    """Challenge to a client that names a principal."""

    salt: Salt | None = None
    iterations: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)] = ITERATIONS


class Proof(msgspec.Struct, array_like=True, frozen=True):
    digest: Digest


class Accepted(msgspec.Struct, array_like=True, frozen=True):
    cluster_id: ShortName | None
    broker: BrokerId | None
    digest: Digest


class ValidToken(NamedTuple):
    """A token that is neither revoked nor expired, as a server checks it."""

    token_id: str
    verifier: Verifier
    expires_ms: int | None = None
    """Time by the wall clock at which it expires. None: never."""

    @property
    def key(self) -> bytes:
        """Key that proofs of it are checked with: no other token has it."""
        return self.verifier.stored_key


class Credentials(NamedTuple):
    """The salt and valid tokens of a principal."""

    salt: bytes
    tokens: Sequence[ValidToken]


CredentialsOf = Callable[[str], Credentials | None]
"""Looks up a principal by name. None: there is none."""

_HELLO = msgspec.msgpack.Decoder(NamedHello)
_CHALLENGE = msgspec.msgpack.Decoder(NamedChallenge)
_NOBODY = Verifier(bytes(32), bytes(32))
"""Verifier that no proof fits."""
TOKENS_TRIED = 8
"""Each proof is tried with as many verifiers, whether the principal has none, one or this many, its
maximum: the time does not tell who exists."""
_PROOF = msgspec.msgpack.Decoder(Proof)
_ACCEPTED = msgspec.msgpack.Decoder(Accepted)

Message = TypeVar("Message")


def _decode(decoder: msgspec.msgpack.Decoder[Message], header: bytes) -> Message:
    return decode(decoder, header, "handshake")


def _digest(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, _joined(*parts), hashlib.sha256)


def _joined(*parts: bytes) -> bytes:
    """The parts, each behind its length, so that no part can run into the next."""
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def _server_digest(
    key: bytes, transcript: tuple[bytes, ...], cluster_id: str | None, broker: int | None
) -> bytes:
    return _digest(key, _SERVER_LABEL, *transcript, ENCODER.encode([cluster_id, broker]))


class ClientHandshake:
    """The client's side: `hello`, then `answer(Challenge)`, then `finish(Accepted)`."""

    def __init__(self, identity: Identity, nonce: bytes, expect_broker: int | None) -> None:
        self._identity = identity
        self._expect_broker = expect_broker
        self._token = token = identity.token
        self._key = b"" if token is not None else identity.handshake_key(identity.role)
        """Key of both proofs; for a token, once `answer` knows the salt, that of the server's."""
        hello = Hello(
            version_min=VERSION_MIN,
            version_max=VERSION_MAX,
            role=identity.role,
            nonce=nonce,
            cluster_id=identity.cluster_id,
            broker=identity.broker,
            expect_broker=expect_broker,
        )
        if token is not None or identity.acts_for is not None or identity.client_id:
            hello = NamedHello(
                **msgspec.structs.asdict(hello),
                principal=None if token is None else token.principal,
                acts_for=identity.acts_for,
                client_id=identity.client_id,
            )
        self._hello = ENCODER.encode(hello)
        self._transcript: tuple[bytes, ...] = (self._hello,)
        self.version: int | None = None

    def hello(self) -> bytes:
        return self._hello

    def answer(self, header: bytes) -> bytes:
        """Takes the Challenge, returns the Proof. Raises ProtocolError, UnsupportedVersionError."""
        challenge = _decode(_CHALLENGE, header)
        if not VERSION_MIN <= challenge.version <= VERSION_MAX:
            raise UnsupportedVersionError(
                f"The server chose protocol version {challenge.version}; this rayq offered "
                f"{VERSION_MIN} to {VERSION_MAX}."
            )
        self.version = challenge.version
        if self._token is None:
            digest = _digest(self._key, _CLIENT_LABEL, self._hello, header)
        else:
            digest = self._prove_token(self._token, challenge, header)
        self._transcript = (self._hello, header, digest)
        return ENCODER.encode(Proof(digest))

    def _prove_token(
        self, token: PrincipalToken, challenge: NamedChallenge, header: bytes
    ) -> bytes:
        if challenge.salt is None:
            raise UnsupportedVersionError(
                f"The server does not know principals, and the token is that of "
                f"{token.principal!r}: it is an older rayq. Update the servers first."
            )
        if not ITERATIONS <= challenge.iterations <= ITERATIONS_MAX:
            raise AuthenticationError(
                f"The server asks for {challenge.iterations} rounds of the token's hash, and "
                f"rayq's servers ask for {ITERATIONS}: is this the right address?"
            )
        keys = client_keys(token.text, challenge.salt, iterations=challenge.iterations)
        self._key = keys.verifier.server_key
        return prove(keys, _joined(_CLIENT_LABEL, self._hello, header))

    def finish(self, header: bytes) -> Accepted:
        """Takes Accepted. Raises AuthenticationError, WrongClusterError or ProtocolError."""
        accepted = _decode(_ACCEPTED, header)
        expected = _server_digest(self._key, self._transcript, accepted.cluster_id, accepted.broker)
        if not hmac.compare_digest(expected, accepted.digest):
            raise AuthenticationError(
                "The server could not prove that it holds the cluster's secret: is this the right "
                "address?"
            )
        _check_ids(
            self._identity.cluster_id, accepted.cluster_id, self._expect_broker, accepted.broker
        )
        return accepted


class ServerHandshake:
    """The server's side: `challenge(Hello)`, then `accept(Proof)`."""

    def __init__(
        self,
        identity: Identity,
        nonce: bytes,
        credentials_of: CredentialsOf = lambda principal: None,
        certified: str | None = None,
    ) -> None:
        """`certified` is the principal that the client's TLS certificate names."""
        self._identity = identity
        self._nonce = nonce
        self._credentials_of = credentials_of
        self._certified = certified
        self._is_by_certificate = False
        self._transcript: tuple[bytes, ...] = ()
        self.hello: NamedHello | None = None
        self.version: int | None = None
        self.token: ValidToken | None = None
        """The token that the client has proven, if it named a principal."""

    @property
    def principal(self) -> str | None:
        """The principal whose rights the connection has. None: a superuser, or a server itself."""
        assert self.hello is not None
        if self._is_by_certificate:
            return self._certified
        is_client = self.hello.role == "client"
        return self.hello.principal if is_client and self.hello.principal else self.hello.acts_for

    @property
    def claimed(self) -> str:
        """Name, for people, of what the other side says it is."""
        assert self.hello is not None
        return self.principal or (SUPERUSER if self.hello.role == "client" else "a server")

    @property
    def role(self) -> Role:
        """The role of the connection: a server that acts for a principal is a client."""
        assert self.hello is not None
        return "client" if self.principal is not None else self.hello.role

    def challenge(self, header: bytes) -> bytes:
        """Takes Hello, returns the Challenge. Raises ProtocolError, UnsupportedVersionError."""
        hello = _decode(_HELLO, header)
        version = min(hello.version_max, VERSION_MAX)
        if version < max(hello.version_min, VERSION_MIN):
            raise UnsupportedVersionError(
                f"The client speaks protocol versions {hello.version_min} to {hello.version_max}, "
                f"this server {VERSION_MIN} to {VERSION_MAX}: use the same rayq on both sides."
            )
        self.hello, self.version = hello, version
        answer = Challenge(version, self._nonce)
        if hello.role == "client" and hello.principal is not None:
            known = self._credentials_of(hello.principal)
            salt = known.salt if known else decoy_salt(self._identity.key, hello.principal)
            answer = NamedChallenge(version, self._nonce, salt, ITERATIONS)
        challenge = ENCODER.encode(answer)
        self._transcript = (header, challenge)
        return challenge

    def accept(self, header: bytes) -> bytes:
        """Takes the Proof, returns Accepted. Raises AuthenticationError, WrongClusterError or
        ProtocolError."""
        assert self.hello is not None, "challenge comes first"
        proof = _decode(_PROOF, header)
        if self.hello.role == "client" and self.hello.principal is not None:
            key = self._check_token(self.hello.principal, proof.digest)
        else:
            key = self._identity.handshake_key(self.hello.role)
            if self.hello.role == "client" and self.hello.acts_for is not None:
                key = principal_key(self._identity.key, self.hello.acts_for).key
            elif self.hello.role == "client" and self._proves(CERTIFICATE_KEY, proof):
                key = self._check_certificate()
            if not self._proves(key, proof):
                raise AuthenticationError(
                    f"The {self.hello.role} did not prove that it holds the cluster's "
                    f"{'secret' if self.hello.role == 'server' else 'client key'}: check the token "
                    "(argument token=, RAYQ_TOKEN, ~/.rayq/token) or the secret in the data "
                    "directory."
                )
            self._check_exists(self.hello.acts_for)
        mine = self._identity
        _check_ids(self.hello.cluster_id, mine.cluster_id, self.hello.expect_broker, mine.broker)
        digest = _server_digest(
            key, (*self._transcript, proof.digest), mine.cluster_id, mine.broker
        )
        return ENCODER.encode(Accepted(mine.cluster_id, mine.broker, digest))

    def _check_exists(self, acts_for: str | None) -> None:
        """Raises AuthenticationError unless there is the principal for which a server opens the
        connection. Only who has proven the secret, or a key derived from it, is told that."""
        if acts_for is not None and self._credentials_of(acts_for) is None:
            raise AuthenticationError(
                f"There is no principal {acts_for!r} to act for: it was deleted, or never created "
                "(rayq principal create)."
            )

    def _proves(self, key: bytes, proof: Proof) -> bool:
        expected = _digest(key, _CLIENT_LABEL, *self._transcript)
        return hmac.compare_digest(expected, proof.digest)

    def _check_certificate(self) -> bytes:
        """The key that signs Accepted. Raises AuthenticationError."""
        if self._certified is None:
            raise AuthenticationError(
                "The client gave no token, and shows no TLS certificate that tls_client_ca has "
                "signed and that names one principal as tls_principals says: give a token "
                "(argument token=, RAYQ_TOKEN, ~/.rayq/token) or such a certificate."
            )
        if self._credentials_of(self._certified) is None:
            raise AuthenticationError(
                f"The client's certificate names {self._certified!r}, and there is no such "
                f"principal: rayq principal create {self._certified}"
            )
        self._is_by_certificate = True
        return CERTIFICATE_KEY

    def _check_token(self, principal: str, proof: bytes) -> bytes:
        """The key that signs Accepted. Raises AuthenticationError. Whether the principal is
        unknown, or its token wrong, revoked or expired, cannot be told from outside."""
        known = self._credentials_of(principal)
        tokens = {token.verifier: token for token in known.tokens} if known else {}
        text = _joined(_CLIENT_LABEL, *self._transcript)
        tried = [*tokens, *[_NOBODY] * (TOKENS_TRIED - len(tokens))]
        verifier = proven(proof, text, tried)
        if verifier is None:
            raise AuthenticationError(
                f"The client did not prove a valid token of principal {principal!r}: it may be "
                "another's, revoked or expired. Ask an administrator of the cluster for a new one "
                "(rayq token create)."
            )
        self.token = tokens[verifier]
        return verifier.server_key


def _check_ids(
    cluster_expected: str | None,
    cluster_found: str | None,
    broker_expected: int | None,
    broker_found: int | None,
) -> None:
    if cluster_expected is not None and cluster_expected != cluster_found:
        raise WrongClusterError(
            f"The server belongs to cluster {cluster_found}, and {cluster_expected} was expected: "
            "check the address."
        )
    if broker_expected is not None and broker_expected != broker_found:
        raise WrongClusterError(
            f"Broker {broker_found} answers where broker {broker_expected} was expected: its "
            "address has changed, look it up again."
        )
