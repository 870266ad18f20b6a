"""The handshake's state machines, without a network."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayq.errors import (
    AuthenticationError,
    ConfigError,
    ProtocolError,
    RayqError,
    UnsupportedVersionError,
    WrongClusterError,
)
from rayq.wire.authentication import (
    HANDSHAKE_FRAME_BYTES_MAX,
    Accepted,
    Challenge,
    ClientHandshake,
    HasSecret,
    Hello,
    Identity,
    Proof,
    ServerHandshake,
    client_key,
    token_of,
)
from rayq.wire.codec import ENCODER
from rayq.wire.tokens import key_of_token

SECRET = b"s" * 32
SERVER = Identity(role="server", key=SECRET, cluster_id="c" * 32, broker=3)
CLIENT = Identity(role="client", key=client_key(SECRET), cluster_id=None, broker=None)
BROKER = Identity(role="server", key=SECRET, cluster_id="c" * 32, broker=4)


def exchange(
    client: Identity = CLIENT, server: Identity = SERVER, expect_broker: int | None = None
) -> tuple[Accepted, ServerHandshake]:
    ours = ClientHandshake(client, b"1" * 32, expect_broker)
    theirs = ServerHandshake(server, b"2" * 32)
    accepted = theirs.accept(ours.answer(theirs.challenge(ours.hello())))
    return ours.finish(accepted), theirs


class Told(HasSecret, frozen=True):
    name: str
    secret: bytes
    token: str


def test_no_repr_shows_a_secret() -> None:
    told = Told("flights", SECRET, token_of(SECRET))
    assert repr(told) == "Told(name='flights', secret='hidden', token='hidden')"
    assert dict(told.__rich_repr__())["secret"] == "hidden"
    for identity in (SERVER, CLIENT):
        assert repr(SECRET) not in repr(identity)
        assert repr(client_key(SECRET)) not in repr(identity)


@pytest.mark.parametrize("client", [CLIENT, BROKER])
def test_both_sides_learn_who_the_other_is(client: Identity) -> None:
    accepted, theirs = exchange(client, expect_broker=3)
    assert (accepted.cluster_id, accepted.broker) == ("c" * 32, 3)
    assert theirs.hello is not None
    assert (theirs.hello.role, theirs.hello.broker) == (client.role, client.broker)


def test_all_handshake_messages_fit_their_frame() -> None:
    ours = ClientHandshake(
        Identity(role="server", key=SECRET, cluster_id="c" * 64, broker=2**62), b"1" * 32, 2**62
    )
    assert len(ours.hello()) + 16 < HANDSHAKE_FRAME_BYTES_MAX


def test_a_wrong_secret_is_refused() -> None:
    with pytest.raises(AuthenticationError):
        exchange(Identity(role="client", key=b"x" * 32, cluster_id=None, broker=None))


def test_a_client_key_cannot_pass_as_a_server() -> None:
    pretender = Identity(role="server", key=client_key(SECRET), cluster_id="c" * 32, broker=9)
    with pytest.raises(AuthenticationError):
        exchange(pretender)


def test_a_server_that_does_not_hold_the_secret_is_refused() -> None:
    ours = ClientHandshake(CLIENT, b"1" * 32, None)
    ours.answer(ENCODER.encode(Challenge(1, b"2" * 32)))
    with pytest.raises(AuthenticationError):
        ours.finish(ENCODER.encode(Accepted("c" * 32, 3, b"0" * 32)))


def test_a_reflected_proof_is_refused() -> None:
    ours = ClientHandshake(CLIENT, b"1" * 32, None)
    proof = ours.answer(ENCODER.encode(Challenge(1, b"1" * 32)))
    digest = proof[-32:]
    with pytest.raises(AuthenticationError):
        ours.finish(ENCODER.encode(Accepted("c" * 32, 3, digest)))


def test_a_replayed_proof_is_refused() -> None:
    ours = ClientHandshake(CLIENT, b"1" * 32, None)
    first = ServerHandshake(SERVER, b"2" * 32)
    proof = ours.answer(first.challenge(ours.hello()))
    first.accept(proof)
    second = ServerHandshake(SERVER, b"3" * 32)
    second.challenge(ours.hello())
    with pytest.raises(AuthenticationError):
        second.accept(proof)


@given(st.integers(0, 3), st.data())
def test_no_handshake_with_an_altered_byte_succeeds(step: int, data: st.DataObject) -> None:
    def pass_on(now: int, message: bytes) -> bytes:
        if now != step:
            return message
        position = data.draw(st.integers(0, len(message) - 1))
        changed = bytearray(message)
        changed[position] ^= data.draw(st.integers(1, 255))
        return bytes(changed)

    def handshake() -> None:
        ours = ClientHandshake(CLIENT, b"1" * 32, 3)
        theirs = ServerHandshake(SERVER, b"2" * 32)
        challenge = pass_on(1, theirs.challenge(pass_on(0, ours.hello())))
        accepted = pass_on(3, theirs.accept(pass_on(2, ours.answer(challenge))))
        ours.finish(accepted)

    with pytest.raises(RayqError):
        handshake()


@given(st.binary(max_size=200))
def test_garbage_in_any_step_is_a_protocol_error(garbage: bytes) -> None:
    theirs = ServerHandshake(SERVER, b"2" * 32)
    with pytest.raises(ProtocolError):
        theirs.challenge(garbage)
    ours = ClientHandshake(CLIENT, b"1" * 32, None)
    with pytest.raises(ProtocolError):
        ours.answer(garbage)
    theirs.challenge(ours.hello())
    with pytest.raises(ProtocolError):
        theirs.accept(garbage)


def test_versions_without_overlap_are_refused_by_name() -> None:
    hello = Hello(7, 9, "client", b"1" * 32, None, None, None)
    with pytest.raises(UnsupportedVersionError, match="7 to 9"):
        ServerHandshake(SERVER, b"2" * 32).challenge(ENCODER.encode(hello))
    ours = ClientHandshake(CLIENT, b"1" * 32, None)
    with pytest.raises(UnsupportedVersionError, match="version 8"):
        ours.answer(ENCODER.encode(Challenge(8, b"2" * 32)))


def test_the_highest_common_version_is_agreed() -> None:
    hello = Hello(1, 9, "client", b"1" * 32, None, None, None)
    theirs = ServerHandshake(SERVER, b"2" * 32)
    theirs.challenge(ENCODER.encode(hello))
    assert theirs.version == 1


def test_fields_that_a_newer_version_appends_are_passed_over() -> None:
    hello = ENCODER.encode([1, 2, "client", b"1" * 32, None, None, None, None, None, "new", 5])
    theirs = ServerHandshake(SERVER, b"2" * 32)
    theirs.challenge(hello)
    assert theirs.version == 1


def test_a_server_of_another_cluster_or_broker_is_refused() -> None:
    other = Identity(role="client", key=client_key(SECRET), cluster_id="other", broker=None)
    with pytest.raises(WrongClusterError, match="other"):
        exchange(other)
    with pytest.raises(WrongClusterError, match="broker 7"):
        exchange(expect_broker=7)


def test_the_ids_are_told_to_nobody_who_did_not_prove_himself() -> None:
    stranger = Identity(role="client", key=b"x" * 32, cluster_id="guess", broker=None)
    with pytest.raises(AuthenticationError):  # not WrongClusterError, which would tell
        exchange(stranger)


def test_a_token_carries_the_client_key_and_not_the_secret() -> None:
    token = token_of(SECRET)
    assert key_of_token(f" {token}\n") == client_key(SECRET)
    assert client_key(SECRET) != SECRET


@pytest.mark.parametrize("text", ["", "rayq-", "rayq-abc", "abc", "rayq-" + "!" * 43, "rayq-é"])
def test_a_text_that_is_no_token_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a rayq token"):
        key_of_token(text)


def test_an_identity_does_not_print_its_key() -> None:
    assert "sss" not in repr(SERVER)


def test_a_proof_of_the_wrong_length_is_a_protocol_error() -> None:
    theirs = ServerHandshake(SERVER, b"2" * 32)
    theirs.challenge(ClientHandshake(CLIENT, b"1" * 32, None).hello())
    with pytest.raises(ProtocolError):
        theirs.accept(ENCODER.encode(Proof(b"short")))
