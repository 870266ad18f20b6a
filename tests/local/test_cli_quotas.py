"""`rayq quota`, against servers of their own process."""

from __future__ import annotations

import itertools

import pytest

from tests.local.cli_support import Command

_numbers = itertools.count(1)


@pytest.fixture
def anna(rayq_command: Command) -> str:
    name = f"quota-anna-{next(_numbers)}"
    rayq_command.well("principal", "create", name)
    return name


def limits_of(rayq: Command, principal: str | None) -> list[tuple[str | None, dict[str, float]]]:
    found = rayq.well("quota", "list", "--json").json
    return [
        (quota["client_id"], quota["limits"])
        for quota in found
        if quota["principal"] == principal
    ]


def test_a_quota_from_set_to_remove(rayq_command: Command, anna: str) -> None:
    rayq = rayq_command
    ran = rayq.well("quota", "set", anna, "producer_byte_rate=5e6", "max-topics=3")
    again = rayq.well("quota", "set", anna, "producer_byte_rate=5MB/s", "max-topics=3")
    assert ran.out == again.out == (
        f"Set producer_byte_rate of {anna} to 5000000.\nSet max_topics of {anna} to 3.\n"
    )
    rayq.well("quota", "set", anna, "take_rate=10", "--client-id", "etl")
    assert limits_of(rayq, anna) == [
        (None, {"producer_byte_rate": 5e6, "max_topics": 3}),
        ("etl", {"take_rate": 10}),
    ]
    shown = rayq.well("quota", "list", anna).out
    assert "5000000" in shown and "etl" in shown
    assert rayq("quota", "remove", anna).code == 2, "nobody can be asked"
    rayq.well("quota", "remove", anna, "producer_byte_rate", "-y")
    assert limits_of(rayq, anna)[0] == (None, {"max_topics": 3})
    rayq.well("quota", "remove", anna, "-y")
    assert limits_of(rayq, anna) == [("etl", {"take_rate": 10})]
    rayq.well("principal", "delete", anna, "-y")
    assert limits_of(rayq, anna) == []


def test_the_default_has_no_principal(rayq_command: Command, anna: str) -> None:
    rayq = rayq_command
    rayq.well("quota", "set", "--default", "max_partitions=100000")
    assert limits_of(rayq, None) == [(None, {"max_partitions": 100_000})]
    assert "by default" in rayq.well("quota", "list", anna).out
    rayq.well("quota", "remove", "--default", "-y")
    assert limits_of(rayq, None) == []
    ran = rayq.well("quota", "remove", "--default", "-y")
    assert ran.out == "each principal by default has none.\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("producer_byte_rate=1",), "Give a principal first"),
        (("ANNA",), "Give a limit"),
        (("ANNA", "producer_byte_rate"), "is not NAME=VALUE"),
        (("ANNA", "producer_byte_rate=fast"), "'fast' is not a size"),
        (("ANNA", "take_rate=5MB"), "'5MB' is not a number"),
        (("ANNA", "producer_bytes_rate=1"), "Did you mean 'producer_byte_rate'?"),
        (("ANNA", "x=1"), "It is one of producer_byte_rate, "),
    ],
)
def test_wrong_arguments_are_refused_before_any_request(
    rayq_command: Command, words: tuple[str, ...], says: str
) -> None:
    ran = rayq_command("quota", "set", *words)
    assert ran.code == 2 and says in ran.err


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "1e16", "1e400"])
def test_an_impossible_limit_is_refused(
    rayq_command: Command, anna: str, value: str
) -> None:
    ran = rayq_command("quota", "set", anna, f"producer_byte_rate={value}")
    assert ran.code == 1 and "producer_byte_rate" in ran.err and ran.err.count("\n") == 1
    assert limits_of(rayq_command, anna) == []


def test_the_superuser_and_unknown_principals_get_no_quotas(rayq_command: Command) -> None:
    ran = rayq_command("quota", "set", "nobody-here", "take_rate=1")
    assert ran.code == 1 and "no principal 'nobody-here'" in ran.err
    ran = rayq_command("quota", "set", "superuser", "take_rate=1")
    assert ran.code == 1 and "has no quotas" in ran.err


def test_limits_are_described_with_how_far_they_are_used_up(
    rayq_command: Command, anna: str
) -> None:
    rayq = rayq_command
    assert "\n" not in rayq.well("quota", "describe", anna).out.strip()
    rayq.well("quota", "set", anna, "producer_byte_rate=5e6", "max_topics=3")
    rayq.well("quota", "set", anna, "take_rate=0", "--client-id", "etl")
    lines = rayq.well("quota", "describe", anna).out.splitlines()
    assert [line.split()[:4] for line in lines[1:]] == [
        ["producer_byte_rate", "5000000", "the", "principal"],
        ["max_topics", "3", "the", "principal"],
        ["take_rate", "0", "client", "id"],
    ]
    found = rayq.well("quota", "describe", anna, "--json").json
    assert found[0] == {
        "name": "producer_byte_rate", "value": 5e6, "client_id": None, "is_default": False,
        "throttled_s": 0.0, "wait_s": 0.0,
    }  # fmt: skip
    for verb in ("list", "describe"):
        ran = rayq("quota", verb, "nobody-here")
        assert ran.code == 1 and "no principal 'nobody-here'" in ran.err
