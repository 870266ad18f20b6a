"""Proofs of tokens, against the examples of the RFCs and against forgers."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayq.wire.scram import (
    MECHANISMS,
    ClientKeys,
    Mechanism,
    Verifier,
    client_keys,
    decoy_salt,
    prove,
    proven,
    server_signature,
)

SALT = b"0123456789abcdef"
TEXT = b"all frames before the proof"


def test_the_example_of_rfc_7677() -> None:
    salt = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
    nonce = b"rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
    text = (
        b"n=user,r=rOprNGfwEbeRWgbNEkqO,"
        b"r=" + nonce + b",s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096,"
        b"c=biws,r=" + nonce
    )
    keys = client_keys("pencil", salt)
    proof = base64.b64decode("dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=")
    assert prove(keys, text) == proof
    assert proven(proof, text, [keys.verifier]) is keys.verifier
    signature = base64.b64decode("6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=")
    assert server_signature(keys.verifier, text) == signature


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_of_two_tokens_of_a_principal_each_is_recognised(mechanism: Mechanism) -> None:
    old = client_keys("old", SALT, mechanism=mechanism)
    new = client_keys("new", SALT, mechanism=mechanism)
    kept = [old.verifier, new.verifier]
    for keys in (old, new):
        proof = prove(keys, TEXT, mechanism=mechanism)
        assert proven(proof, TEXT, kept, mechanism=mechanism) is keys.verifier
    stranger = client_keys("stranger", SALT, mechanism=mechanism)
    assert proven(prove(stranger, TEXT, mechanism=mechanism), TEXT, kept) is None


@settings(max_examples=50)
@given(st.binary(max_size=80), st.sampled_from(MECHANISMS))
def test_no_bytes_pass_for_a_proof(forged: bytes, mechanism: Mechanism) -> None:
    verifier = client_keys("token", SALT, mechanism=mechanism).verifier
    assert proven(forged, TEXT, [verifier], mechanism=mechanism) is None


def test_a_proof_holds_for_its_text_only() -> None:
    keys = client_keys("token", SALT)
    assert proven(prove(keys, TEXT), TEXT + b".", [keys.verifier]) is None


def test_who_has_a_verifier_cannot_prove_the_token() -> None:
    verifier = client_keys("token", SALT).verifier
    for guess in (verifier.stored_key, verifier.server_key):
        forged = ClientKeys(guess, Verifier(*verifier))
        assert proven(prove(forged, TEXT), TEXT, [verifier]) is None


def test_a_name_that_nobody_has_gets_the_same_salt_each_time_and_each_its_own() -> None:
    salts = {decoy_salt(b"s" * 32, name) for name in ("anna", "ben", "anna")}
    assert len(salts) == 2 and {len(salt) for salt in salts} == {16}
    assert decoy_salt(b"t" * 32, "anna") not in salts
