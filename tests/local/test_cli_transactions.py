"""`rayq transaction`, against a cluster in this process."""

from __future__ import annotations

import pytest

import rayq
from rayq.testing import LocalCluster
from tests.local.cli_support import Command


def test_what_is_open_is_listed_described_and_aborted(
    cluster: LocalCluster, topic: str, rayq_command: Command
) -> None:
    command = rayq_command
    with cluster.producer(transactional_id="by hand") as producer:
        with pytest.raises(rayq.TransactionAbortedError), producer.transaction() as tx:
            tx.send(topic, b"v").result(timeout=30)
            (row,) = (
                line
                for line in command.well("transaction", "list").out.splitlines()
                if line.startswith("by hand")
            )
            assert row.split()[2] == "open" and row.split()[4] == "1"
            said = command.well("transaction", "describe", "by hand").out
            assert said.startswith("by hand: 1 transaction under way, time-out 60 s\n")
            assert topic in said
            (one,) = command.well("transaction", "describe", "by hand", "--json").json["transactions"]
            assert one["state"] == "open" and one["unmarked"] == [{"topic": topic, "partition": 0}]
            assert command("transaction", "abort", "by hand").code == 2, "nobody can be asked"
            command.well("transaction", "abort", "by hand", "--yes")
        with producer.transaction(name="batch 7") as tx:
            tx.send(topic, b"v")
    assert "last name batch 7" in command.well("transaction", "describe", "by hand").out
    listed = command.well("transaction", "list", "--json").json
    (one,) = (one for one in listed if one["transactional_id"] == "by hand")
    assert (one["state"], one["age_ms"]) == ("ready", None)
    assert "no open transaction" in command("transaction", "abort", "by hand", "--yes").err
    assert "no transactional id" in command("transaction", "describe", "nobody").err
