"""Handshakes of named principals: by the state machines, without a network."""

from __future__ import annotations

import dataclasses
import os
import traceback
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayq.core.cluster.access_changes import TOKENS_MAX
from rayq.errors import (
    AuthenticationError,
    ConfigError,
    ProtocolError,
    RayqError,
    UnsupportedVersionError,
)
from rayq.wire import authentication
from rayq.wire.authentication import (
    HANDSHAKE_FRAME_BYTES_MAX,
    Accepted,
    Challenge,
    ClientHandshake,
    Credentials,
    Hello,
    Identity,
    NamedChallenge,
    ServerHandshake,
    ValidToken,
    client_key,
    client_key_of,
    principal_key,
)
from rayq.wire.codec import ENCODER
from rayq.wire.scram import Verifier, client_keys, proven
from rayq.wire.tokens import (
    PrincipalToken,
    draw_token,
    is_principal_token,
    principal_token,
    verifiers_of,
)

SECRET, SALT, DRAWN = b"s" * 32, b"0123456789abcdef", b"d" * 32
SERVER = Identity(role="server", key=SECRET, cluster_id="c" * 32, broker=3)
OLD, NEW = draw_token("anna", lambda count: b"o" * count), draw_token("anna", lambda count: DRAWN)
KNOWN = {
    "anna": Credentials(
        SALT,
        [ValidToken("01", client_keys(OLD.text, SALT).verifier),
         ValidToken("02", client_keys(NEW.text, SALT).verifier, 7_000)],
    ),
    "ben": Credentials(SALT, []),
}  # fmt: skip


def holder_of(token: PrincipalToken) -> Identity:
    return Identity(role="client", key=b"", cluster_id=None, broker=None, token=token)


def exchange(client: Identity, server: Identity = SERVER) -> ServerHandshake:
    ours = ClientHandshake(client, b"1" * 32, None)
    theirs = ServerHandshake(server, b"2" * 32, KNOWN.get)
    ours.finish(theirs.accept(ours.answer(theirs.challenge(ours.hello()))))
    return theirs


@pytest.mark.parametrize(("token", "token_id"), [(OLD, "01"), (NEW, "02")])
def test_each_token_of_a_principal_is_known_by_its_id(
    token: PrincipalToken, token_id: str
) -> None:
    theirs = exchange(holder_of(token))
    assert theirs.token is not None
    assert (theirs.principal, theirs.role, theirs.token.token_id) == ("anna", "client", token_id)
    assert theirs.token.expires_ms == (7_000 if token is NEW else None)


def test_who_has_the_clusters_token_is_nobody_by_name() -> None:
    superuser = Identity(role="client", key=client_key(SECRET), cluster_id=None, broker=None)
    theirs = exchange(superuser)
    assert (theirs.principal, theirs.role, theirs.token) == (None, "client", None)


def test_a_server_acts_for_a_principal_as_its_client_and_a_client_with_a_key_of_its_own() -> None:
    gateway = Identity(
        role="server", key=SECRET, cluster_id="c" * 32, broker=None, acts_for="anna"
    )
    theirs = exchange(gateway)
    assert (theirs.principal, theirs.role) == ("anna", "client")
    pretender = Identity(
        role="client", key=client_key(SECRET), cluster_id=None, broker=None, acts_for="ben"
    )
    assert "client key" in refusal(pretender)
    inside = Identity.of_client(principal_key(SECRET, "ben"), None)
    theirs = exchange(inside)
    assert (theirs.principal, theirs.role, theirs.token) == ("ben", "client", None)
    assert "client key" in refusal(dataclasses.replace(inside, acts_for="anna"))
    assert "client key" in refusal(dataclasses.replace(inside, acts_for=None))
    assert "hidden" in repr(principal_key(SECRET, "ben"))
    assert exchange(dataclasses.replace(holder_of(NEW), acts_for="ben")).principal == "anna"


def refusal(client: Identity) -> str:
    with pytest.raises(AuthenticationError) as caught:
        exchange(client)
    return str(caught.value)


def test_unknown_revoked_and_wrong_look_alike() -> None:
    drawn = draw_token("anna", os.urandom).text.removeprefix("rayq2-anna-")
    texts = {
        refusal(holder_of(PrincipalToken(name, f"rayq2-{name}-{drawn}"))).replace(name, "NAME")
        for name in ("anna", "ben", "nobody")
    }
    assert len(texts) == 1, texts
    salts = {}
    for name in ("anna", "nobody", "nobody", "somebody"):
        theirs = ServerHandshake(SERVER, b"2" * 32, KNOWN.get)
        ours = ClientHandshake(holder_of(PrincipalToken(name, "x")), b"1" * 32, None)
        challenge = msgspec.msgpack.decode(theirs.challenge(ours.hello()), type=NamedChallenge)
        assert challenge.salt is not None and len(challenge.salt) == len(SALT)
        assert salts.setdefault(name, challenge.salt) == challenge.salt
    assert len(set(salts.values())) == 3


def test_each_refusal_takes_the_same_number_of_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    trials: list[int] = []

    def counted(proof: bytes, text: bytes, verifiers: list[Verifier]) -> Verifier | None:
        trials.append(len(verifiers))
        return proven(proof, text, verifiers)

    monkeypatch.setattr(authentication, "proven", counted)
    for name in ("anna", "ben", "nobody"):
        refusal(holder_of(PrincipalToken(name, f"rayq2-{name}-{'x' * 43}")))
    assert trials == [TOKENS_MAX] * 3


@pytest.mark.parametrize(
    "name",
    [b"", b"x" * 250, b"\xff\xfe", b"an\nna", b"an\0na", b"an na", "Łódź".encode(), b"\xed\xa0\x80"],
)  # fmt: skip
@pytest.mark.parametrize("role", ["client", "server"])
def test_a_hello_with_an_illegal_name_gets_no_answer(name: bytes, role: str) -> None:
    fields = [1, 1, role, b"1" * 32, None, None, None]
    if role == "server":
        fields.append(None)  # Its principal; `acts_for` is the next.
    head = bytes([0x91 + len(fields)]) + ENCODER.encode(fields)[1:]
    theirs = ServerHandshake(SERVER, b"2" * 32, KNOWN.get)
    with pytest.raises(ProtocolError):
        theirs.challenge(head + b"\xda" + len(name).to_bytes(2, "big") + name)
    theirs.challenge(head + ENCODER.encode("anna"))


def test_a_token_proves_nothing_for_another_principal_or_cluster() -> None:
    refusal(holder_of(PrincipalToken("ben", NEW.text)))
    theirs = ServerHandshake(SERVER, b"2" * 32)  # It knows nobody.
    ours = ClientHandshake(holder_of(NEW), b"1" * 32, None)
    with pytest.raises(AuthenticationError):
        theirs.accept(ours.answer(theirs.challenge(ours.hello())))


def test_a_proof_that_was_heard_does_not_work_again() -> None:
    ours = ClientHandshake(holder_of(NEW), b"1" * 32, None)
    first = ServerHandshake(SERVER, b"2" * 32, KNOWN.get)
    proof = ours.answer(first.challenge(ours.hello()))
    second = ServerHandshake(SERVER, b"3" * 32, KNOWN.get)
    second.challenge(ours.hello())
    with pytest.raises(AuthenticationError):
        second.accept(proof)


def test_a_server_that_does_not_know_the_principal_is_refused() -> None:
    ours = ClientHandshake(holder_of(NEW), b"1" * 32, None)
    ours.answer(ENCODER.encode(NamedChallenge(1, b"2" * 32, SALT)))
    with pytest.raises(AuthenticationError, match="could not prove"):
        ours.finish(ENCODER.encode(Accepted("c" * 32, 3, b"0" * 32)))


@pytest.mark.parametrize("iterations", [1, 4095, 100_001, 1 << 31])
def test_a_client_computes_no_rounds_beyond_reason(iterations: int) -> None:
    ours = ClientHandshake(holder_of(NEW), b"1" * 32, None)
    with pytest.raises(AuthenticationError, match="rounds"):
        ours.answer(ENCODER.encode(NamedChallenge(1, b"2" * 32, SALT, iterations)))


def test_an_older_server_is_named_as_such() -> None:
    ours = ClientHandshake(holder_of(NEW), b"1" * 32, None)
    with pytest.raises(UnsupportedVersionError, match="Update the servers first"):
        ours.answer(ENCODER.encode(Challenge(1, b"2" * 32)))


def test_who_names_no_principal_sends_what_older_versions_send() -> None:
    superuser = Identity(role="client", key=client_key(SECRET), cluster_id=None, broker=None)
    ours = ClientHandshake(superuser, b"1" * 32, None)
    theirs = ServerHandshake(SERVER, b"2" * 32, KNOWN.get)
    assert ours.hello() == ENCODER.encode(Hello(1, 1, "client", b"1" * 32, None, None, None))
    assert theirs.challenge(ours.hello()) == ENCODER.encode(Challenge(1, b"2" * 32))


def test_a_client_may_name_itself() -> None:
    named = dataclasses.replace(holder_of(NEW), client_id="orders of Łódź")
    hello = exchange(named).hello
    assert hello is not None and hello.client_id == "orders of Łódź"
    superuser = Identity(
        role="client", key=client_key(SECRET), cluster_id=None, broker=None, client_id="c"
    )
    theirs = exchange(superuser)
    assert theirs.hello is not None
    assert (theirs.principal, theirs.hello.client_id) == (None, "c")


@pytest.mark.parametrize("name", ["x" * 65, "a\nb", "\x7f", "\x00"])
def test_a_client_id_that_is_long_or_no_text_is_refused(name: str) -> None:
    with pytest.raises(ProtocolError):
        exchange(dataclasses.replace(holder_of(NEW), client_id=name))


def test_the_longest_name_fits_its_frame() -> None:
    name = "x" * 249
    ours = ClientHandshake(
        Identity(
            role="server",
            key=SECRET,
            cluster_id="c" * 64,
            broker=2**31 - 1,
            acts_for=name,
            client_id="\U0001d54f" * 64,
        ),
        b"1" * 32,
        2**31 - 1,
    )
    assert len(ours.hello()) + 16 < HANDSHAKE_FRAME_BYTES_MAX


@given(st.integers(0, 3), st.data())
def test_no_handshake_of_a_principal_with_an_altered_byte_succeeds(
    step: int, data: st.DataObject
) -> None:
    def pass_on(now: int, message: bytes) -> bytes:
        if now != step:
            return message
        changed = bytearray(message)
        changed[data.draw(st.integers(0, len(message) - 1))] ^= data.draw(st.integers(1, 255))
        return bytes(changed)

    ours = ClientHandshake(holder_of(NEW), b"1" * 32, 3)
    theirs = ServerHandshake(SERVER, b"2" * 32, KNOWN.get)
    with pytest.raises(RayqError):
        challenge = pass_on(1, theirs.challenge(pass_on(0, ours.hello())))
        ours.finish(pass_on(3, theirs.accept(pass_on(2, ours.answer(challenge)))))


# --- tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["anna", "a-b-c", "spiffe://x/y", "x" * 249, "rayq2-a"])
def test_a_token_says_whose_it_is(name: str) -> None:
    token = draw_token(name, os.urandom)
    assert principal_token(f" {token.text}\n") == token
    assert is_principal_token(token.text) and token.text.rpartition("-")[2]
    assert token.text not in repr(token) and token.text not in repr(holder_of(token))
    assert draw_token(name, os.urandom) != token


Change = Callable[[str], str]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-1],
        lambda text: text + "x",
        lambda text: text.replace("rayq2-anna-", "rayq2--"),
        lambda text: text.replace("anna", "an na"),
        lambda text: text.replace("rayq2", "rayq"),
        lambda text: text[:-1] + "+",
        lambda text: "",
    ],
)
def test_a_text_that_is_no_token_is_refused_without_being_repeated(change: Change) -> None:
    text = change(NEW.text)
    with pytest.raises(ConfigError, match="not a rayq token") as caught:
        principal_token(text)
    assert not text or text not in str(caught.value)


DRAWN = "s3cret-s3cret_s3cret-s3cret_s3cret-s3cret_s"


@pytest.mark.parametrize(
    "text, why",
    [
        ("", "it is empty"),
        (" \n", "it is empty"),
        (f"'rayq2-anna-{DRAWN}'", "quotes around it"),
        (f"rayq2-anna-{DRAWN}\nrayq2-bob-{DRAWN}", "line breaks among its 108 characters"),
        (f"rayq2-anna-{DRAWN[:-5]}", "begins with 'rayq2-'.*49 characters is cut or altered"),
        (f"rayq-{DRAWN[:-1]}", "begins with 'rayq-'.*47 characters is cut or altered"),
        (f"rayq-{DRAWN}=é", "begins with 'rayq-'"),
        (f"rayq3-anna-{DRAWN}", "later rayq.*update rayq here"),
        (DRAWN, "its 43 characters begin with neither 'rayq-' nor 'rayq2-'"),
        (f"/home/anna/{DRAWN}", "begin with neither"),
    ],
)
def test_who_gives_no_token_is_told_where_why_and_what_to_do(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"^RAYQ_TOKEN is not a rayq token: .*{why}") as caught:
        client_key_of(text, "RAYQ_TOKEN")
    said = "".join(traceback.format_exception(caught.value))
    assert "s3cret" not in said and "anna" not in said
    for known in ("rayq-<43 characters>", "rayq2-<principal>-<43 characters>"):
        assert known in str(caught.value)
    for command in ("`rayq token`", "`rayq token create`"):
        assert command in str(caught.value)


def test_verifiers_do_not_show_the_token() -> None:
    kept = verifiers_of(NEW, SALT)
    keys = client_keys(NEW.text, SALT)
    assert keys.verifier == (kept.stored_key_sha256, kept.server_key_sha256)
    assert keys.client_key not in msgspec.structs.astuple(kept)
    assert NEW.text.encode() not in ENCODER.encode(kept)
