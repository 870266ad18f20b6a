"""What coordinators have in common, by one whose decisions are words."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from proving.simulation.process import Process
from rayq import messages
from rayq.actors.access import Access
from rayq.actors.coordinator import LOADING_WAIT_S, READ_RETRY_S, RETRY_S, Coordinator
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.core.decision import Decision
from rayq.errors import (
    CoordinatorLoadingError,
    CorruptBatchError,
    DiskFullError,
    InvalidRequestError,
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
    NotLeaderError,
    RayqError,
    UnsupportedFormatError,
)
from tests.simulated.coordinator_stage import Led, leading, now_s


class Words(Coordinator[list[str], str]):
    """Its state is the words of its log."""

    subject = "words"
    topic = "__words"

    def __init__(self, led: Told) -> None:
        self.words: list[str] = []
        self.gate = led.gate
        self.loads = self.works = 0
        self.trouble: Exception | None = None
        super().__init__(
            led.log,
            led.leader,
            led.given,
            access=Access(led.log.environment.clock),
            encode=lambda word: (word.encode(), b""),
        )

    async def _load(self) -> None:
        self.loads += 1
        await self.gate.wait()
        if self.trouble is not None:
            raise self.trouble
        words: list[str] = []
        await self._log.replay(lambda key, value: words.append((key or b"").decode()))
        self.words = words
        self._loaded()

    async def _work(self) -> None:
        generation = self._log.generation
        self.works += 1
        while generation == self._log.generation:
            await self._reset_wanted.wait(60)

    async def say(
        self, word: str, *, is_write: bool = True, is_ready: Callable[[], bool] = lambda: True
    ) -> list[str]:
        """Adds a word. Nobody may say "no"."""
        await self._begin(is_write=is_write, is_ready=is_ready)

        def decide() -> Decision[str, list[str]]:
            if word == "no":
                raise InvalidRequestError("no word")
            return Decision([word], lambda: [*self.words])

        return await self._answer(decide)

    async def heard(self, *, is_write: bool = False) -> list[str]:
        await self._begin(is_write=is_write)
        return await self._answer(lambda: Decision([], lambda: [*self.words]))

    def _replay(self, record: str) -> None:
        self.words.append(record)

    # --- what subclasses may use ---

    @property
    def generation(self) -> int:
        return self._log.generation

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        return self._tasks

    def check(self, generation: int) -> None:
        self._check(generation)

    def may_be_heard(self) -> bool:
        return self._may_be_heard()

    def look_again(self) -> None:
        self._ready.notify()


class Told(Led):
    topic, topic_id, partition = "__words", "W", 2

    def __init__(
        self, process: Process, log: ReplicaLog, given: messages.PartitionAssignment
    ) -> None:
        super().__init__(process, log, given)
        self.gate = asyncio.Event()
        self.gate.set()
        self.words = self.begin()

    def begin(self) -> Words:
        return Words(self)


def played(work: Callable[[Told], Awaitable[None]]) -> None:
    leading(Told, work)


async def outcome(waiting: asyncio.Future[list[str]]) -> RayqError | list[str]:
    try:
        return await waiting
    except RayqError as error:
        return error


def test_what_was_decided_is_there_for_the_next_coordinator() -> None:
    async def work(of: Told) -> None:
        assert await of.words.say("a") == ["a"]
        assert await asyncio.gather(of.words.say("b"), of.words.say("c")) == [
            ["a", "b"],
            ["a", "b", "c"],
        ]
        of.words.end("a test")
        of.words = of.begin()
        assert await of.words.heard() == ["a", "b", "c"]
        assert of.words.where == "__words-2"

    played(work)


def test_requests_wait_a_while_for_a_coordinator_that_begins() -> None:
    async def work(of: Told) -> None:
        of.words.end("a test")
        of.gate.clear()
        of.words = of.begin()
        early, began_s = asyncio.ensure_future(of.words.heard()), now_s()
        await asyncio.sleep(LOADING_WAIT_S / 2)
        late = asyncio.ensure_future(of.words.heard())
        with pytest.raises(CoordinatorLoadingError) as told:
            await early
        assert now_s() - began_s == pytest.approx(LOADING_WAIT_S)
        assert told.value.message == "The coordinator of __words-2 is starting: try again."
        of.gate.set()
        assert await late == []
        assert now_s() - began_s < LOADING_WAIT_S * 1.1, "it is told at once"

    played(work)


def test_a_request_waits_for_what_it_needs() -> None:
    async def work(of: Told) -> None:
        ready = False
        waiting = asyncio.ensure_future(of.words.say("a", is_ready=lambda: ready))
        await asyncio.sleep(LOADING_WAIT_S / 2)
        assert not waiting.done()
        ready = True
        of.words.look_again()
        assert await waiting == ["a"]
        ready = False
        began_s = now_s()
        with pytest.raises(CoordinatorLoadingError, match="is starting: try again"):
            await of.words.say("b", is_ready=lambda: ready)
        assert now_s() - began_s == pytest.approx(LOADING_WAIT_S)
        assert await of.words.heard() == ["a"]

    played(work)


@pytest.mark.parametrize(
    "trouble", [CorruptBatchError("bad"), DiskFullError("bad"), UnsupportedFormatError("bad")]
)
def test_a_log_that_cannot_be_read_is_told_and_read_again(
    trouble: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(of: Told) -> None:
        await of.words.say("a")
        of.words.end("a test")
        of.words = of.begin()
        of.words.trouble = trouble
        with caplog.at_level(logging.ERROR):
            await asyncio.sleep(2.5 * READ_RETRY_S)
        assert of.words.loads == 3
        assert [log.getMessage() for log in caplog.records] == ["__words-2 cannot be read: bad"]
        with pytest.raises(CoordinatorLoadingError) as told:
            await of.words.heard()
        assert told.value.message == (
            "The coordinator of __words-2 is starting and failed so far: bad: try again."
        )
        of.words.trouble = None
        await asyncio.sleep(READ_RETRY_S)
        assert await of.words.heard() == ["a"]
        with pytest.raises(CoordinatorLoadingError, match="is starting: try again"):
            await of.words.say("b", is_ready=lambda: False)
        assert of.log.failure is None

    played(work)


def test_a_coordinator_whose_work_fails_ends_its_replica() -> None:
    async def work(of: Told) -> None:
        of.words.end("a test")
        of.words = of.begin()
        of.words.trouble = ValueError("a bug")
        await asyncio.sleep(0.1)
        assert of.log.failure is not None and "a bug" in of.log.failure

    played(work)


def test_requests_are_told_that_another_process_coordinates() -> None:
    async def work(of: Told) -> None:
        await of.words.say("a")
        of.waits()
        saying, beginning = (
            asyncio.ensure_future(of.words.say(word, is_ready=lambda word=word: word == "b"))
            for word in ("b", "c")
        )
        await asyncio.sleep(0.01)
        of.words.end("it moved")
        for waiting in saying, beginning, asyncio.ensure_future(of.words.heard()):
            with pytest.raises(NotLeaderError) as told:
                await asyncio.wait_for(waiting, LOADING_WAIT_S / 2)
            assert told.value.message == (
                "Broker 1 no longer coordinates the words of __words-2 (it moved): ask for new "
                "metadata."
            )
        await asyncio.sleep(0)
        assert all(task.cancelled() for task in of.words.tasks)

    played(work)


def test_without_its_lease_it_says_nothing() -> None:
    async def work(of: Told) -> None:
        await of.words.say("a")
        assert of.words.may_be_heard()
        of.waits()
        saying, asking = (
            asyncio.ensure_future(call) for call in (of.words.say("b"), of.words.heard())
        )
        await asyncio.sleep(0.01)
        assert not saying.done() and not asking.done(), "what it knows may not be committed"
        of.has_lease = False
        of.commits()
        for waiting in saying, asking, asyncio.ensure_future(of.words.heard()):
            with pytest.raises(NotLeaderError, match="lost its broker"):
                await waiting
        assert not of.words.may_be_heard()
        of.has_lease = True
        assert await of.words.heard() == ["a", "b"]
        assert of.words.may_be_heard()

    played(work)


def test_with_too_few_replicas_it_tells_what_is_committed_and_decides_nothing() -> None:
    async def work(of: Told) -> None:
        await of.words.say("a")
        of.is_starved()
        assert not of.words.may_be_heard()
        assert await of.words.heard() == ["a"]
        for refused in of.words.say("b"), of.words.heard(is_write=True):
            with pytest.raises(NotEnoughReplicasError) as told:
                await refused
            assert told.value.message == (
                "__words-2 has too few in-sync replicas: words wait for more brokers."
            )
        assert of.end_offset == 1
        of.commits()
        assert of.words.may_be_heard()
        assert await of.words.say("b") == ["a", "b"]

    played(work)


def test_a_refusal_is_told_once_what_it_is_based_on_is_committed() -> None:
    async def work(of: Told) -> None:
        with pytest.raises(InvalidRequestError, match="no word"):
            await of.words.say("no")
        of.waits()
        saying, refused = (asyncio.ensure_future(of.words.say(word)) for word in ("a", "no"))
        await asyncio.sleep(1)
        assert not saying.done() and not refused.done()
        of.commits()
        with pytest.raises(InvalidRequestError, match="no word"):
            await refused
        assert await saying == ["a"]

    played(work)


@pytest.mark.parametrize("fails_later", [True, False])
def test_after_an_append_that_failed_it_begins_again_with_what_is_in_the_log(
    fails_later: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(of: Told) -> None:
        await of.words.say("a")
        assert (of.words.loads, of.words.works) == (1, 1)
        generation = of.words.generation
        of.words.check(generation)
        if fails_later:
            of.waits()
        else:
            of.refuse_appends(NotEnoughReplicasError("refused"))
        waiting = [asyncio.ensure_future(of.words.say(word)) for word in "bc"]
        if fails_later:
            await asyncio.sleep(0.01)
            of.is_starved()  # Whether these words are written is not known.
        found = [await outcome(answer) for answer in waiting]
        expected = NotEnoughReplicasAfterAppendError if fails_later else NotEnoughReplicasError
        assert [type(error) for error in found] == [expected] * 2
        with pytest.raises(CoordinatorLoadingError) as told:
            of.words.check(generation)
        assert told.value.message == "The coordinator of __words-2 starts over: try again."
        of.refuse_appends(None)
        of.commits()
        assert await of.words.heard() == (["a", "b", "c"] if fails_later else ["a"])
        assert (of.words.loads, of.words.works) == (2, 2)
        assert (await of.words.say("d"))[-1] == "d"
        assert of.words.generation == generation + 1

    with caplog.at_level(logging.WARNING):
        played(work)
    assert [log.getMessage()[:40] for log in caplog.records] == [
        "the coordinator of __words-2 starts over"
    ]


def test_it_pauses_before_it_begins_again() -> None:
    async def work(of: Told) -> None:
        await of.words.say("a")
        of.refuse_appends(NotEnoughReplicasError("refused"))
        began_s = now_s()
        for _ in range(20):
            await outcome(asyncio.ensure_future(of.words.say("b")))
        assert of.words.loads - 1 <= (now_s() - began_s) / RETRY_S + 1
        await asyncio.sleep(RETRY_S / 2)
        of.refuse_appends(None)
        await asyncio.sleep(RETRY_S)
        assert await of.words.heard() == ["a"]

    played(work)
