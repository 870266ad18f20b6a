"""The audit's account of changes of the metadata, and the ids under which they are remembered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rayq import messages
from rayq.core.cluster import state as cluster_state
from rayq.core.cluster.audited_changes import (
    TOLD_LENGTH_MAX,
    audited_change,
    done_id,
    told,
)
from rayq.core.cluster.records import (
    RequestDone,
    decode_record,
    decode_records,
    encode_record,
    encode_records,
)
from rayq.core.cluster.state import ClusterState
from rayq.messages import REQUESTS
from rayq.messages.access import TokenVerifiers
from rayq.messages.acls import Acl
from tests.pure.test_cluster_state import apply

SECRETS = TokenVerifiers(b"s" * 32, b"t" * 32, b"u" * 64, b"v" * 64)


def asked_by(principal: str | None) -> messages.Forward:
    token_id = None if principal is None else "token-1"
    return messages.Forward(principal, "10.0.0.2", "notebook", token_id, 3, b"")


SUPERUSER, ANNA = asked_by(None), asked_by("anna")
CREATE = messages.CreateTopic("orders", 3, None, {}, request_id="r1")


@pytest.fixture
def state() -> ClusterState:
    return ClusterState()


def test_a_request_id_belongs_to_one_principal() -> None:
    origins = [None, SUPERUSER, ANNA, asked_by("bert")]
    assert done_id("r", None) == done_id("r", SUPERUSER)
    assert len({done_id("r", origin) for origin in origins}) == 3
    assert done_id("x r", asked_by("a")) != done_id("r", asked_by("a"))


def test_each_change_has_a_later_time_and_the_next_number_although_the_clock_goes_back(
    state: ClusterState,
) -> None:
    changes = []
    for number, now_ms in enumerate([100, 100, 50, 200]):
        changes.append(audited_change(state, ANNA, CREATE, now_ms))
        apply(state, [RequestDone(f"r{number}", changes[-1]), RequestDone(f"plain{number}")])
    assert [change.time_ms for change in changes] == [100, 101, 102, 200]
    assert [change.number for change in changes] == [1, 2, 3, 4]
    assert state.changes_after(101, 10) == changes[2:]
    assert state.changes_after(0, 3) == changes[:3]
    assert state.changes_after(200, 3) == []


def test_a_snapshot_keeps_the_changes_that_the_audit_tells(
    state: ClusterState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_state, "REQUESTS_REMEMBERED_MAX", 3)
    monkeypatch.setattr(cluster_state, "CHANGES_REMEMBERED_MAX", 6)
    for number in range(4):
        apply(state, [RequestDone(f"plain{number}")])
    assert len(state.requests_done) == 3
    for number in range(10):
        change = audited_change(state, ANNA, CREATE, number)
        apply(state, [RequestDone(f"r{number}", change)])
    assert list(state.requests_done) == [f"r{number}" for number in range(4, 10)]
    rebuilt = ClusterState()
    apply(rebuilt, decode_records(encode_records(state.snapshot())))
    assert rebuilt.requests_done == state.requests_done
    assert [change.number for change in rebuilt.changes_after(0, 100)] == [5, 6, 7, 8, 9, 10]


def test_older_software_reads_a_change_as_it_did_and_its_records_are_read() -> None:
    change = audited_change(ClusterState(), ANNA, CREATE, 5)
    record = RequestDone("r", change)
    assert decode_record(encode_record(record)) == record
    assert decode_record(b"\x92\xabRequestDone\xa1r") == RequestDone("r")


def changes() -> list[type[Any]]:
    return [
        kind
        for kind in REQUESTS.values()
        if issubclass(kind, messages.Change) and kind.__module__.startswith("rayq.")
    ]


def test_each_change_of_a_client_that_needs_a_right_is_one_that_is_checked_again() -> None:
    for kind in REQUESTS.values():
        if "controller" in kind.answered_by and kind.rights:
            assert issubclass(kind, messages.Change), kind


def test_a_change_is_told_by_its_fields_without_secrets() -> None:
    token = messages.CreateToken("anna", "token-1", SECRETS, 77, request_id="r")
    assert json.loads(told(token)) == {
        "principal": "anna", "token_id": "token-1", "expires_ms": 77,
    }  # fmt: skip
    principal = messages.CreatePrincipal("anna", b"0123456789abcdef")
    assert json.loads(told(principal)) == {"name": "anna"}
    acls = messages.CreateAcls([Acl("anna", "deny", "read", "topic", "x", "prefixed")])
    assert json.loads(told(acls)) == {
        "acls": ["deny 'anna' read on each topic that begins with 'x'"]
    }
    moves = messages.AlterReassignments([("t", 0, [1, 2]), ("t", 1, None)])
    assert json.loads(told(moves)) == {"moves": [["t", 0, [1, 2]], ["t", 1, None]]}
    long = messages.AlterTopicConfig("t", {"x" * 200: "y" * 4000})
    assert len(told(long)) == TOLD_LENGTH_MAX
    assert len(changes()) > 15
