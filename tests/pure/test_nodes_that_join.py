"""Which brokers start on a node that joins a cluster, or returns to it."""

from __future__ import annotations

from rayq.runtime.layout import Directory, directories_to_serve

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


def test_directories_of_another_cluster_are_left_alone() -> None:
    stranger = Directory(1, "/data/broker-1", "other", "d")
    assert serve([stranger], "ac", [stranger]) == []
