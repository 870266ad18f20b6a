"""Clients that log in as principals: seeds whose rights come and go, and the judge of them."""

from __future__ import annotations

import pytest

from proving.simulation.invariants_access import AccessState
from proving.simulation.principals import PRINCIPALS_SHARE, has_principals
from rayq.core.access.rights import Needed
from rayq.messages.acls import Acl
from tests.simulated.support import found_by, passing

WRITE = Needed("write", "topic", "orders")


def state(*acls: Acl) -> AccessState:
    return AccessState(1, frozenset(["team"]), frozenset(), frozenset(acls))


def allows(*acls: Acl, host: str = "10.0.0.1") -> bool:
    return state(*acls).allows("team", host, WRITE)


def test_a_quarter_of_the_seeds_has_principals_and_chosen_features_say_so_themselves() -> None:
    count = sum(has_principals(seed, None) for seed in range(4000))
    assert abs(count - 4000 * PRINCIPALS_SHARE) < 150
    assert has_principals(2, frozenset(["principals"]))
    assert not has_principals(1, frozenset(["group"]))


def test_the_judge_allows_what_an_acl_allows_and_none_denies() -> None:
    allow = Acl("team", "allow", "write", "topic", "ord", "prefixed")
    assert not allows()
    assert allows(allow)
    assert not allows(allow, Acl("*", "deny", "all", "topic", "*"))
    assert allows(allow, Acl("team", "deny", "read", "topic", "orders"))
    assert not allows(Acl("team", "allow", "write", "topic", "orders", host="10.0.0.2"))
    assert not state(allow).allows("nobody", "10.0.0.1", WRITE)


def test_the_judge_opens_no_topic_of_rayq_by_acls_of_topics() -> None:
    everything = state(Acl("team", "allow", "all", "topic", "*"))
    operator = state(Acl("team", "allow", "describe", "cluster", "cluster"))
    read = Needed("read", "topic", "__consumer_offsets")
    assert not everything.allows("team", "10.0.0.1", read)
    assert operator.allows("team", "10.0.0.1", read)


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_nobody_is_served_without_a_right_while_rights_come_and_go() -> None:
    assert "all passed" in passing("1")


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("scenario", "seeds"),
    [
        ("ordinary", "6,10"),
        ("groups", "1"),
        ("queues", "6"),
        ("transactions", "1"),
        ("metadata", "6"),
        ("swarm", "6"),
    ],
)
def test_principals_are_served_what_they_may_in_each_scenario(scenario: str, seeds: str) -> None:
    assert "all passed" in passing("--scenario", scenario, seeds)


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        ("cache_outlives_change", "1,6,9"),
        ("revoked_stays_connected", "1,6,9"),
        ("deny_ignored", "1,6,9"),
        ("held_fetch_unchecked", "1,6,9"),
        ("family_of_another", "1,6"),
        ("numbers_begin_again", "1,6"),
        ("quota_per_process", "6,9,10"),
        ("patience_without_end", "1,6,9"),
        ("forwarded_as_superuser", "1,6,9"),
    ],
)
def test_a_planted_bug_in_access_control_is_found_within_a_few_seeds(name: str, seeds: str) -> None:
    assert found_by(name, seeds)
