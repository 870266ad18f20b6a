"""What operators do with dead letters where something is in the way: each goes back once."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections import Counter
from collections.abc import Iterable

import pytest

from rayq.actors.queues.moves import QueueMoves
from rayq.client.admin.dead_letters import Aim, DeadLetter, DeadLetters, Filter, Progress
from rayq.core.queues.moves import FailedRecord
from rayq.errors import UnknownQueueError
from rayq.testing import LocalCluster
from tests.local.cli_support import Command
from tests.local.support import eventually, read_all

ALL = Filter()
_numbers = itertools.count(1)


@pytest.fixture
def queue() -> str:
    return f"failed-{next(_numbers)}"


class Operator:
    def __init__(self, cluster: LocalCluster, name: str) -> None:
        client, self._background = cluster.shared_client()
        self._letters = DeadLetters(client, name, timeout_s=60.0)

    def listed(self, which: Filter = ALL) -> list[DeadLetter]:
        return self._background.run(self._letters.listed(which, 1_000))

    def settle(self, which: Filter = ALL, to: str | None = "", dry_run: bool = False) -> Progress:
        return self._background.run(
            self._letters.settle(which, to_topic=to, dry_run=dry_run)
        )

    def at_once(self, *targets: str | None) -> list[Progress]:
        async def together() -> list[Progress]:
            return await asyncio.gather(
                *(self._letters.settle(ALL, to_topic=target) for target in targets)
            )

        return self._background.run(together())


def rejected(cluster: LocalCluster, name: str, values: Iterable[bytes]) -> Operator:
    """A queue all whose records were rejected."""
    left = list(values)
    with cluster.create_queue(name, exist_ok=True) as queue:
        queue.put_many(left)
        while left:
            for task in queue.take(len(left), timeout_s=10.0):
                task.reject("broken")
                left.remove(task.value or b"")
        queue.flush()
    operator = Operator(cluster, name)
    return operator


def copies(cluster: LocalCluster, topic: str) -> Counter[bytes]:
    return Counter(record.value or b"" for record in read_all(cluster, topic))


@pytest.mark.thorough
def test_a_redrive_that_was_killed_moves_the_rest_when_it_runs_again(
    cluster: LocalCluster, rayq_command: Command, queue: str
) -> None:
    values = [b"%d" % number for number in range(80)]
    operator = rejected(cluster, queue, values)
    eventually(lambda: len(operator.listed()) == len(values), "all are dead letters")
    redrive = ("dead-letters", "redrive", queue, "-y", "--json")
    process = rayq_command.popen(*redrive, "--rate", "20/s")
    eventually(lambda: len(operator.listed()) < len(values), "some are sent back")
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    rest = rayq_command.well(*redrive).json
    assert 0 < rest["moved"] < len(values) and rest["refused"] == {}
    assert copies(cluster, queue) == dict.fromkeys(values, 2)
    assert operator.listed() == []


def test_redrives_and_discards_of_the_same_letters_at_once_settle_each_one_way(
    cluster: LocalCluster, queue: str
) -> None:
    values = [b"%d" % number for number in range(60)]
    operator = rejected(cluster, queue, values)
    eventually(lambda: len(operator.listed()) == len(values), "all are dead letters")
    before = operator.listed()
    assert operator.settle(dry_run=True) == Progress(60, 60, 0, {}, {queue: Aim(60, 0)})
    assert operator.listed() == before
    for outcome in operator.at_once("", None, "", None):
        assert not outcome.refused
    assert set(copies(cluster, queue).values()) <= {1, 2}
    assert operator.listed() == [] and operator.settle() == Progress(0, 0, 0, {}, {})


def test_a_record_that_dies_again_has_the_headers_of_its_last_death_only(
    cluster: LocalCluster, queue: str
) -> None:
    operator = rejected(cluster, queue, [b"v"])
    headers = []
    for _ in range(3):
        eventually(lambda: bool(operator.listed()), "it is a dead letter")
        headers.append(operator.listed()[0].record.headers)
        assert operator.settle().moved == 1
        with cluster.queue(queue) as opened:
            (task,) = opened.take(1, timeout_s=10.0)
            assert task.headers == [] and task.delivery_count == 1
            task.fail(ValueError("broken"), retries=0)
            opened.flush()
    assert {tuple(name for name, _ in header) for header in headers} == {
        ("rayq.source", "rayq.reason", "rayq.count", "rayq.error")
    }
    reasons = [dict(header)["rayq.reason"] for header in headers]
    assert reasons == [b"rejected", b"deliveries", b"deliveries"]
    assert [dict(header)["rayq.source"] for header in headers] == [
        b"%s/0/%d" % (queue.encode(), offset) for offset in range(3)
    ]


def test_a_bug_in_a_move_costs_one_opening_and_no_dead_letter(
    cluster: LocalCluster, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bury, failures = QueueMoves._move_to_dead_letters, [KeyError("planted")]

    async def fails_once(self: QueueMoves, failed: list[FailedRecord]) -> None:
        if failures:
            raise failures.pop()
        await bury(self, failed)

    monkeypatch.setattr(QueueMoves, "_move_to_dead_letters", fails_once)
    operator = rejected(cluster, queue, [b"v"])
    eventually(lambda: len(operator.listed()) == 1, "it is a dead letter")
    assert not failures


def test_what_cannot_go_back_says_why_and_stays(
    cluster: LocalCluster, rayq_command: Command, queue: str
) -> None:
    pool = queue + "-pool"
    gone, smaller = queue + "-gone", queue + "-smaller"
    for name in (pool, gone):
        cluster.create_topic(name)
    cluster.create_topic(smaller, partitions=2)
    places = {
        b"no source": None,
        b"no topic": b"\xff\xfe/0/1",
        b"too long": b"x" * 100_000 + b"/0/1",
        b"internal": b"__consumer_offsets/0/1",
        b"own": pool.encode() + b"/0/1",
        b"gone": gone.encode() + b"/0/1",
        b"fits": smaller.encode() + b"/5/1",
    }
    with cluster.producer() as producer:
        for value, place in places.items():
            source = [] if place is None else [("rayq.source", place)]
            producer.send(pool, value, headers=[*source, ("odd", b"\xff\x00"), ("odd", b"")])
    cluster.admin.delete_topic(gone)
    operator = Operator(cluster, pool)
    # To look changes nothing: there is no queue yet.
    assert operator.settle(dry_run=True).matched == len(places)
    with pytest.raises(UnknownQueueError):
        cluster.admin.describe_queue(pool + ".dead")
    assert not operator.listed(Filter(headers=(("absent", b""),)))
    assert not operator.listed(Filter(headers=(("odd", b"\xff"),)))
    assert not operator.listed(Filter(keys=(b"",)))
    typed = rayq_command.well("dead-letters", "list", pool, "--where", "header=odd=\udcff\0")
    assert typed.out.count("ready") == 7
    assert "header odd: \\xff" in rayq_command.well("dead-letters", "show", pool, "0/0").out
    assert len(operator.listed(Filter(headers=(("odd", b"\xff\x00"), ("odd", b""))))) == 7

    outcome = operator.settle()
    assert (outcome.moved, sum(outcome.refused.values())) == (1, 6)
    assert all(len(why) < 400 for why in outcome.refused), outcome.refused
    assert copies(cluster, smaller) == {b"fits": 1}
    assert {letter.record.value for letter in operator.listed()} == places.keys() - {b"fits"}
    # A topic of that name, made again, takes it.
    cluster.create_topic(gone)
    assert operator.settle().moved == 1 and copies(cluster, gone) == {b"gone": 1}
    assert operator.settle(to=None).moved == 5 and operator.listed() == []
