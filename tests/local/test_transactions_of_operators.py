"""What operators see of transactions and do about them: the admin, and the command."""

from __future__ import annotations

import asyncio

import pytest

from rayq import HangingTransaction, TopicPartition
from rayq.actors.peers import Peers
from rayq.errors import (
    InvalidRequestError,
    ProducerFencedError,
    RayqError,
    TransactionAbortedError,
)
from rayq.messages.transaction_ids import make_family
from rayq.testing import LocalCluster
from tests.local.cli_support import Command
from tests.local.conftest import NewTopic
from tests.local.support import eventually, read_all, values
from tests.local.test_reading_transactions import Writer

ESCAPES = "\x1b[31mred\x1b]0;title\x07\x9b2J\u202eback"
SHOWN = r"\x1b[31mred\x1b]0;title\x07\x9b2J\u202eback"
UNHEARD_OF = (make_family(0, 1 << 30), 3)


def listed(cluster: LocalCluster) -> dict[str, str]:
    return {info.transactional_id: info.state for info in cluster.admin.list_transactions()}


def test_a_transaction_is_listed_described_and_aborted(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    topic, admin = new_topic(partitions=2), cluster.admin
    with cluster.producer(transactional_id="described") as producer:
        with producer.transaction(name="first") as tx:
            tx.send(topic, b"kept", partition=0)
        producer.begin_transaction()
        for partition in (0, 1):
            producer.send(topic, b"dropped", partition=partition).result()
        (open_now,) = [
            transaction
            for transaction in admin.list_transactions()
            if transaction.transactional_id == "described"
        ]
        assert (open_now.state, open_now.partitions, open_now.is_hanging) == ("open", 2, False)
        assert open_now.age_ms is not None and open_now.transaction_timeout_ms == 60_000
        info = admin.describe_transaction("described")
        assert info.last_name == "first"
        assert [(each.state, each.epoch) for each in info.transactions] == [("open", open_now.epoch)]
        assert [(each.topic_partition, each.has_marker) for each in info.participants] == [
            (TopicPartition(topic, 0), False),
            (TopicPartition(topic, 1), False),
        ]
        admin.abort_transaction("described")
        with pytest.raises((TransactionAbortedError, ProducerFencedError)):
            producer.commit_transaction()
        with producer.transaction() as tx:
            tx.send(topic, b"kept too", partition=1)
    eventually(lambda: "described" not in listed(cluster), "all markers are written")
    idle = {
        transaction.transactional_id: transaction.state
        for transaction in admin.list_transactions(idle=True)
    }
    assert idle["described"] == "ready"
    assert sorted(values(read_all(cluster, topic))) == [b"kept", b"kept too"]


def test_what_is_not_open_cannot_be_aborted(cluster: LocalCluster, topic: str) -> None:
    with (
        cluster.producer(transactional_id="aborted-late") as producer,
        producer.transaction() as tx,
    ):
        tx.send(topic, b"v")
    with pytest.raises(InvalidRequestError, match="no open transaction"):
        cluster.admin.abort_transaction("aborted-late")
    for wrong in ("unheard of", "", "x" * 257, "\ud800"):
        for call in (cluster.admin.describe_transaction, cluster.admin.abort_transaction):
            with pytest.raises(InvalidRequestError, match="transactional id"):
                call(wrong)
    with pytest.raises(TypeError):
        cluster.admin.describe_transaction(b"bytes")  # type: ignore[arg-type]


def test_before_the_first_transaction_nothing_is_listed_and_nothing_is_made() -> None:
    with LocalCluster(brokers=1) as cluster:
        assert cluster.admin.list_transactions(idle=True) == []
        assert cluster.admin.find_hanging_transactions() == []
        for call in (cluster.admin.describe_transaction, cluster.admin.abort_transaction):
            with pytest.raises(InvalidRequestError, match="no transaction was begun so far"):
                call("unheard of")
        assert "__transaction_state" not in cluster.admin.list_topics(internal=True)


def test_on_an_event_loop_it_is_the_same(cluster: LocalCluster) -> None:
    async def look() -> None:
        async with cluster.async_admin() as admin:
            assert [info for info in await admin.list_transactions() if info.is_hanging] == []
            with pytest.raises(InvalidRequestError):
                await admin.describe_transaction("unheard of")

    asyncio.run(look())


def test_what_no_coordinator_knows_is_found_and_aborted(
    cluster: LocalCluster, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, admin = new_topic(partitions=2), cluster.admin

    async def join(*_: object, principal: object) -> None:
        """The coordinator agrees, and forgets it."""

    with cluster.producer(transactional_id="known") as producer:
        producer.begin_transaction()
        producer.send(topic, b"known", partition=0).result()
        with monkeypatch.context() as patch:
            patch.setattr(Peers, "join", join)
            Writer(cluster, topic).write(UNHEARD_OF, [b"hangs"], partition=1)
        hanging = HangingTransaction(TopicPartition(topic, 1), *UNHEARD_OF, 0)
        assert admin.find_hanging_transactions(topic) == [hanging]
        (known,) = [
            transaction
            for transaction in admin.list_transactions()
            if transaction.transactional_id == "known"
        ]
        with pytest.raises(InvalidRequestError, match="its coordinator knows it"):
            admin.abort_hanging_transaction(
                HangingTransaction(TopicPartition(topic, 0), known.producer_id, known.epoch, 0)
            )
        for _ in range(2):  # The second time there is nothing to do.
            admin.abort_hanging_transaction(hanging)
        assert admin.find_hanging_transactions([topic]) == []
        producer.commit_transaction()
    assert values(read_all(cluster, topic)) == [b"known"]


@pytest.mark.parametrize("outcome, position", [("unknown", None), ("committed", 1)])
def test_positions_of_a_transaction_that_its_coordinator_forgot_hang_no_group(
    cluster: LocalCluster,
    new_topic: NewTopic,
    monkeypatch: pytest.MonkeyPatch,
    outcome: str,
    position: int | None,
) -> None:
    topic, admin = new_topic(partitions=1), cluster.admin
    group, place = f"of-{topic}", TopicPartition(topic, 0)

    async def join(*_: object, principal: object) -> None:
        """The coordinator agrees, and forgets it."""

    async def told(*_: object) -> str:
        return outcome

    producer = cluster.producer(transactional_id=f"id-{topic}")
    with monkeypatch.context() as patch:
        patch.setattr(Peers, "join", join)
        producer.begin_transaction()
        producer._begun.send_offsets({place: 1}, group=group)  # type: ignore[union-attr]
    (hanging,) = admin.find_hanging_transactions("__consumer_offsets")
    assert hanging in admin.find_hanging_transactions()
    with pytest.raises(RayqError, match="pending|transaction"):
        admin.delete_group(group, timeout_s=1)
    with monkeypatch.context() as patch:
        patch.setattr(Peers, "outcome", told)
        for _ in range(2):  # The second time there is nothing to do.
            admin.abort_hanging_transaction(hanging)
    assert admin.find_hanging_transactions() == []
    with cluster.consumer(group=group) as consumer:
        assert consumer.committed([place])[place] == position
    producer.close()


# --- the command ----------------------------------------------------------------------------------


def test_the_command_lists_describes_and_aborts(
    rayq_command: Command, cluster: LocalCluster, topic: str
) -> None:
    rayq = rayq_command
    with cluster.producer(transactional_id=ESCAPES) as producer:
        producer.begin_transaction()
        producer.send(topic, b"v").result()
        (row,) = [
            found
            for found in rayq.well("transactions", "list", "--json").json
            if found["transactional_id"] == ESCAPES
        ]
        assert (row["state"], row["partitions"], row["is_hanging"]) == ("open", 1, False)
        shown = rayq.well("transactions", "describe", ESCAPES, "--json").json
        assert [participant["topic"] for participant in shown["participants"]] == [topic]
        assert rayq("transactions", "abort", ESCAPES).code == 2, "there is no terminal to ask on"
        for line in (
            ("list", "--all"),
            ("describe", ESCAPES),
            ("describe", ESCAPES + "?"),
            ("abort", ESCAPES, "-y"),
            ("abort", ESCAPES, "-y"),
        ):
            ran = rayq("transactions", *line)
            assert SHOWN in ran.out + ran.err, ran
            assert "\x1b" not in ran.out + ran.err and "\u202e" not in ran.out + ran.err, ran
        with pytest.raises((TransactionAbortedError, ProducerFencedError)):
            producer.commit_transaction()
    rayq.well("transactions", "list")


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        (("describe",), 2, "TRANSACTIONAL-ID"),
        (("describe", ""), 1, "1 to 256 characters"),
        (("describe", "x" * 300), 1, "1 to 256 characters"),
        (("describe", "cli-unheard-of"), 1, "cli-unheard-of"),
        (("abort", "cli-unheard-of"), 2, "--yes"),
        (("abort", "cli-unheard-of", "-y"), 1, "cli-unheard-of"),
        (("find-hanging", "--abort"), 2, "--yes"),
    ],
)
def test_a_wrong_line_is_one_line(
    rayq_command: Command, line: tuple[str, ...], code: int, said: str
) -> None:
    ran = rayq_command("transactions", *line)
    assert ran.code == code and said in ran.err and ran.err.count("\n") <= 2, ran
    assert "Traceback" not in ran.err and ran.out == "", ran


def test_the_command_finds_what_hangs(
    rayq_command: Command, cluster: LocalCluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rayq = rayq_command

    async def join(*_: object, principal: object) -> None:
        """The coordinator agrees, and forgets it."""

    with monkeypatch.context() as patch:
        patch.setattr(Peers, "join", join)
        Writer(cluster, topic).write(UNHEARD_OF, [b"hangs"])
    find = ("transactions", "find-hanging", topic)
    (row,) = rayq.well(*find, "--json").json
    assert (row["topic"], row["partition"], row["first_offset"]) == (topic, 0, 0)
    assert (row["producer_id"], row["epoch"], row["aborted"]) == (*UNHEARD_OF, False)
    assert str(UNHEARD_OF[0]) in rayq.well(*find).out
    assert "Aborted 1 transaction." in rayq.well(*find, "--abort", "-y").out
    assert "No transaction hangs." in rayq.well(*find).out
