"""`rayq principal`, `rayq token` and `rayq acl`, against servers of their own process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from rayq.testing import LocalCluster
from rayq.wire.tokens import principal_token
from tests.local.cli_support import Command

_numbers = itertools.count(1)


@pytest.fixture
def anna(rayq_command: Command) -> Iterator[str]:
    name = f"cli-anna-{next(_numbers)}"
    rayq_command.well("principal", "create", name)
    yield name
    rayq_command.cluster.admin.delete_principal(name)


def test_a_principal_from_create_to_delete(rayq_command: Command) -> None:
    rayq, name = rayq_command, f"cli-{next(_numbers)}@example.com"
    assert rayq.well("principal", "create", name, "--json").json == [
        {"principal": name, "created": True}
    ]
    ran = rayq("principal", "create", name)
    assert ran.code == 1 and "exists already" in ran.err and ran.err.count("\n") == 1
    assert "exists already" in rayq.well("principal", "create", name, "--if-not-exists").out
    shown = rayq.well("principal", "describe", name).out
    assert f"rayq token create {name}" in shown and f"rayq acl add {name}" in shown
    rayq.well("token", "create", name)
    rayq.well("acl", "add", name, "read,write", "topic", "orders.", "--prefix")
    described = rayq.well("principal", "describe", name, "--json").json
    assert [acl["operation"] for acl in described["acls"]] == ["read", "write"]
    [token] = described["tokens"]
    assert token["token_id"] in rayq.well("principal", "describe", name).out
    [listed] = [
        row for row in rayq.well("principal", "list", "--json").json if row["name"] == name
    ]
    assert (listed["acls"], len(listed["tokens"])) == (2, 1)
    assert name in rayq.well("principal", "list").out
    assert rayq("principal", "delete", name).code == 2, "nobody can be asked"
    rayq.well("principal", "delete", name, "-y")
    ran = rayq("principal", "describe", name)
    assert ran.code == 1 and "`rayq principal list` shows" in ran.err


def test_the_clusters_own_token_cannot_be_removed(rayq_command: Command) -> None:
    for line in (("principal", "delete", "superuser", "-y"), ("acl", "add", "superuser", "all")):
        ran = rayq_command(*line, *(("topic", "*", "--deny") if line[0] == "acl" else ()))
        assert ran.code == 1 and ran.err.count("\n") == 1 and "superuser" in ran.err
    for line in (
        ("token", "create", "superuser"),
        ("token", "revoke", "superuser", "1", "-y"),
        ("token", "list", "superuser"),
        ("principal", "describe", "superuser"),
    ):
        ran = rayq_command(*line)
        assert ran.code == 1 and "cannot be removed" in ran.err and ran.err.count("\n") == 1
    ran = rayq_command("principal", "create", "superuser")
    assert ran.code == 1 and "the cluster's own token" in ran.err


def test_the_clusters_own_token_is_printed_as_before(
    rayq_command: Command, cluster: LocalCluster
) -> None:
    assert rayq_command.well("token").out.strip() == cluster.token
    assert rayq_command.well("token", "--json").json["token"] == cluster.token
    ran = rayq_command("token", "--json", "list")
    assert ran.code == 2 and "put --json after list" in ran.err


def test_a_token_alone_is_printed_so_that_a_script_can_take_it(
    rayq_command: Command, anna: str
) -> None:
    ran = rayq_command.well("token", "create", anna, "--expires", "90d")
    assert principal_token(ran.out).principal == anna and ran.out.count("\n") == 1
    assert "not shown again" in ran.err and "expires at 20" in ran.err
    made = rayq_command.well("token", "create", anna, "--expires", "never", "--json").json
    assert principal_token(made["token"]).principal == anna and made["expires_ms"] is None
    listed = rayq_command.well("token", "list", anna, "--json").json
    assert [token["token_id"] for token in listed][1] == made["token_id"]
    secret = made["token"].rpartition("-")[2]
    for line in (("list",), ("list", anna), ("list", anna, "--json")):
        shown = rayq_command.well("token", *line).out
        assert made["token_id"] in shown and secret not in shown


def test_tokens_are_rotated_and_revoked(rayq_command: Command, anna: str) -> None:
    rayq = rayq_command
    old = rayq.well("token", "create", anna, "--json").json
    ran = rayq.well("token", "rotate", anna, "--overlap", "12h")
    assert principal_token(ran.out).principal == anna and "other tokens expire at 20" in ran.err
    first, second = rayq.well("token", "list", anna, "--json").json
    assert first["token_id"] == old["token_id"] and second["expires_ms"] is None
    assert abs(first["expires_ms"] - second["created_ms"] - 12 * 3_600_000) < 60_000
    assert rayq("token", "revoke", anna, first["token_id"]).code == 2, "nobody can be asked"
    rayq.well("token", "revoke", anna, first["token_id"], "-y")
    ran = rayq("token", "revoke", anna, first["token_id"], "-y")
    assert ran.code == 1 and second["token_id"] in ran.err, "it says which there are"
    assert rayq.well("token", "revoke", anna, "--all", "-y", "--json").json == {
        "principal": anna, "revoked": [second["token_id"]],
    }  # fmt: skip
    assert "no token" in rayq.well("token", "revoke", anna, "-a", "-y").out


def test_a_token_that_expires_soon_is_a_problem_of_health_and_a_metric(
    rayq_command: Command, cluster: LocalCluster, anna: str
) -> None:
    def seconds_left() -> list[float]:
        return [
            sample.value
            for sample in cluster.metrics()
            if sample.name == "rayq_token_expires_seconds" and sample.labels["principal"] == anna
        ]

    rayq_command.well("token", "create", anna, "--expires", "3d")
    [left_s] = seconds_left()
    assert 3 * 86_400 - 60 < left_s <= 3 * 86_400
    ran = rayq_command("cluster", "health")
    assert ran.code == 3 and f"next: rayq token rotate {anna}" in ran.out
    assert f"last token of principal '{anna}' expires in" in rayq_command("status").out
    rayq_command.well("token", "rotate", anna, "--expires", "never")
    assert anna not in rayq_command("cluster", "health").out and seconds_left() == []


def test_rules_are_added_listed_and_removed(rayq_command: Command, anna: str) -> None:
    rayq = rayq_command
    added = rayq.well("acl", "add", anna, "all", "queue", "mail.", "--prefix", "--deny")
    assert added.out == f"Added: deny '{anna}' all on each queue that begins with 'mail.'.\n"
    rayq.well("acl", "add", anna, "alter-configs", "cluster", "--host", "10.0.0.1")
    assert len(rayq.well("acl", "list", anna, "--json").json) == 2
    for options in (("--type", "queue"), ("--name", "mail.out")):
        [found] = rayq.well("acl", "list", anna, *options, "--json").json
        assert (found["name"], found["pattern"], found["permission"]) == (
            "mail.", "prefixed", "deny",
        )  # fmt: skip
    assert "mail. --prefix" in rayq.well("acl", "list", anna).out
    ran = rayq("acl", "remove", anna, "all", "queue", "mail.", "--prefix", "-y")
    assert ran.code == 1 and f"rayq acl list {anna}" in ran.err, "that one would allow"
    rule = ("acl", "remove", anna, "all", "queue", "mail.", "--prefix", "--deny")
    assert rayq(*rule).code == 2, "nobody can be asked"
    rayq.well(*rule, "-y")
    assert len(rayq.well("acl", "list", anna, "--json").json) == 1
    ran = rayq("acl", "add", "nobody-at-all", "read", "topic", "t")
    assert ran.code == 1 and "`rayq principal list`" in ran.err


def test_an_operation_of_another_resource_type_is_refused_with_those_of_this_one(
    rayq_command: Command, anna: str
) -> None:
    ran = rayq_command("acl", "add", anna, "read", "cluster")
    assert ran.code == 2 and "It is one of all, create, alter, describe," in ran.err
    ran = rayq_command("acl", "add", anna, "descibe", "cluster")
    assert ran.code == 2 and "Did you mean 'describe'?" in ran.err


def test_a_check_says_which_rule_decides_and_the_command_that_changes_it(
    rayq_command: Command, anna: str
) -> None:
    rayq = rayq_command
    asked = ("acl", "check", anna, "write", "topic", "orders")
    ran = rayq(*asked)
    assert ran.code == 3 and ran.out == (
        f"Denied: no rule allows it. To allow it: rayq acl add {anna} write topic orders\n"
    )
    command = ran.out.strip().rpartition("rayq ")[2].split()
    rayq.well(*command)
    assert f"remove {anna} write topic orders" in rayq.well(*asked).out
    rayq.well("acl", "add", anna, "write", "topic", "ord", "--prefix", "--deny")
    ran = rayq(*asked)
    assert ran.code == 3 and ran.out.startswith("Denied: a rule says deny")
    rayq.well(*ran.out.strip().rpartition("rayq ")[2].split(), "-y")
    assert rayq.well(*asked, "--json").json["acl"]["permission"] == "allow"
    assert rayq.well("acl", "check", anna, "alter", "principal", anna).out.startswith("Allowed:")
    assert "everything" in rayq.well("acl", "check", "superuser", "alter", "cluster").out


def test_a_check_of_rayqs_own_topics_suggests_no_rule(
    rayq_command: Command, anna: str
) -> None:
    rayq_command.well("acl", "add", anna, "all", "topic", "*")
    ran = rayq_command("acl", "check", anna, "write", "topic", "__consumer_offsets")
    assert ran.code == 3 and "nobody can write it" in ran.out and "rayq acl add" not in ran.out


def test_a_refused_write_ends_with_the_command_that_would_allow_it(
    rayq_command: Command, anna: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rayq_command.well("topic", "create", topic := f"of-{anna}")
    rayq_command.well("acl", "add", anna, "describe", "topic", topic)
    with monkeypatch.context() as hers:
        hers.setenv("RAYQ_TOKEN", rayq_command.well("token", "create", anna).out.strip())
        ran = rayq_command("topic", "produce", topic, stdin=b"line\n")
    assert ran.code == 1 and "Acknowledged 0 records before this error: " in ran.err
    assert ran.err.endswith(f"rayq acl add {anna} write topic {topic}\n")


def test_principals_are_completed(rayq_command: Command, anna: str) -> None:
    from rayq.cli.options import offered

    assert offered(rayq_command.cluster.admin.list_principals(), anna) == [anna]
