"""Which brokers start on a node that joins a cluster, or returns to it."""

from __future__ import annotations

from rayq.runtime.layout import Directory, directories_to_serve, placed_now

MINE = [Directory(number, f"/data/broker-{number}", "c", f"d{number}") for number in range(3)]
PLACED = {0: "a", 1: "b", 2: "c"}


def serve(
    found: list[Directory], live: str, idle: list[Directory], node_id: str = "new"
) -> list[Directory] | None:
    return directories_to_serve(
        found, cluster_id="c", node_id=node_id, placed=PLACED, live=[*live, "new"], idle=idle
    )


def test_an_empty_node_has_nothing_to_serve() -> None:
    assert serve([], "abc", []) == []


def test_a_node_that_returns_with_its_disk_gets_its_broker_back() -> None:
    assert serve(MINE[1:2], "ac", MINE[1:2]) == MINE[1:2]


def test_a_node_that_returns_before_its_loss_was_noticed_waits_for_that() -> None:
    assert serve(MINE[1:2], "abc", MINE[1:2]) is None


def test_brokers_that_serve_elsewhere_from_a_shared_path_stay_there() -> None:
    assert serve(MINE, "abc", []) == []
    assert serve(MINE, "ac", MINE[1:2]) == MINE[1:2]


def test_a_node_that_has_its_broker_already_gets_no_other() -> None:
    assert serve(MINE, "abc", MINE[1:2], node_id="a") == []


def test_a_node_that_has_a_broker_takes_none_that_is_lost_where_all_share_the_path() -> None:
    assert serve(MINE, "ac", MINE[1:2], node_id="a") == []
    # On a disk of its own it is the rest of those that it returned with.
    assert serve(MINE[:2], "a", MINE[1:2], node_id="a") == MINE[1:2]


def test_directories_of_another_cluster_are_left_alone() -> None:
    stranger = Directory(1, "/data/broker-1", "other", "d")
    assert serve([stranger], "ac", [stranger]) == []


def test_a_broker_that_was_just_started_is_not_started_on_the_next_node_too() -> None:
    """Where nodes share the path, each of them finds its directory; and until it has registered,
    the cluster names the node that is gone."""
    live = ["new", "other"]
    known = placed_now({0: "new", 1: "other"}, {0: "gone", 1: "other"}, live)
    assert known == {0: "new", 1: "other"}
    assert placed_now(known, {0: "new", 1: "other"}, live) == known


def test_what_registered_last_counts_unless_its_node_is_gone() -> None:
    assert placed_now({0: "a"}, {0: "b", 1: "c"}, ["a", "b"]) == {0: "b", 1: "c"}
    assert placed_now({0: "a", 2: "d"}, {0: "b"}, ["d"]) == {0: "b", 2: "d"}
