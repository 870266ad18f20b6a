"""The process of one group member, which never imports Ray, and its start and end.

The member works at-least-once, as the documentation shows it: poll, deal with the records, commit.
All that it does and sees goes to the history.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from array import array
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

from proving.chaos.load import LoadSpec
from rayq.errors import CommitRefusedError, RayqError
from rayq.records import TopicPartition
from rayq.testing.checker import Recorder

POLL_TIMEOUT_S = 0.5
HANDLE_RECORD_S = 0.0002
"""The time that the handler takes for a record."""
END_TIMEOUT_S = 60.0


@dataclass
class MemberReport:
    """The final answer of a member's process. Times are `time.monotonic`, one clock for all
    processes of a machine."""

    name: str
    polled_s: array[float] = field(default_factory=lambda: array("d"))
    """The time of each poll's return."""
    moved_s: array[float] = field(default_factory=lambda: array("d"))
    """The times at which partitions came or went."""
    problems: list[str] = field(default_factory=list)


class Joined(NamedTuple):
    """The message that a member's process sends before it joins."""

    at_s: float


class Member:
    """A member's process."""

    def __init__(self, spec: LoadSpec, group: str, name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._pipe, theirs = context.Pipe()
        self._process: Any = context.Process(
            target=run_member, args=(spec, group, name, theirs), name=name, daemon=True
        )
        self._process.start()
        theirs.close()

    def wait_joined(self) -> float:
        """The time when the member joined. Raises TimeoutError, EOFError."""
        if not self._pipe.poll(END_TIMEOUT_S):
            raise TimeoutError(f"{self.name} did not start.")
        joined: Joined = self._pipe.recv()
        return joined.at_s

    def kill(self) -> None:
        """Sends SIGKILL, and returns when the process is gone."""
        self._process.kill()
        self._process.join()

    def ask_to_leave(self) -> None:
        self._pipe.send("leave")

    def report(self) -> MemberReport:
        """The member's answer after `ask_to_leave`. Raises TimeoutError, EOFError."""
        if not self._pipe.poll(END_TIMEOUT_S):
            raise TimeoutError(f"{self.name} did not leave within {END_TIMEOUT_S:.0f} s.")
        report: MemberReport = self._pipe.recv()
        self._process.join(10)
        return report

    def abort(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def run_member(spec: LoadSpec, group: str, name: str, pipe: Connection) -> None:
    """The work of the member's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    report = MemberReport(name)
    try:
        _consume(spec, group, name, pipe, report)
    except RayqError as error:
        report.problems.append(f"{name} failed with {type(error).__name__}: {error}")
    except EOFError:
        return  # The parent process is gone.
    pipe.send(report)


def _consume(spec: LoadSpec, group: str, name: str, pipe: Connection, report: MemberReport) -> None:
    recorder = spec.recorder()
    how: Literal["revoked", "closed"] = "revoked"

    def on_assigned(places: set[TopicPartition]) -> None:
        report.moved_s.append(time.monotonic())
        recorder.owns(name, group, consumer.group_membership().member_epoch, places)
        recorder.commits_seen(name, group, consumer.committed(places))

    def on_revoked(places: set[TopicPartition]) -> None:
        report.moved_s.append(time.monotonic())
        recorder.released(name, places, how)

    def on_lost(places: set[TopicPartition]) -> None:
        report.moved_s.append(time.monotonic())
        recorder.released(name, places, "lost")

    with spec.connect() as cluster:
        pipe.send(Joined(time.monotonic()))
        consumer = cluster.consumer(
            spec.topic,
            group=group,
            auto_offset_reset="earliest",
            on_assigned=on_assigned,
            on_revoked=on_revoked,
            on_lost=on_lost,
        )
        with consumer:
            while not pipe.poll(0):
                records = consumer.poll(timeout_s=POLL_TIMEOUT_S)
                report.polled_s.append(time.monotonic())
                recorder.polled(name, records)
                time.sleep(HANDLE_RECORD_S * len(records))
                offsets = {
                    TopicPartition(record.topic, record.partition): record.offset + 1
                    for record in records
                }
                if offsets:
                    _commit(consumer, recorder, name, group, offsets)
            pipe.recv()
            how = "closed"


def _commit(
    consumer: Any, recorder: Recorder, name: str, group: str, offsets: dict[TopicPartition, int]
) -> None:
    number = recorder.committing(name, group, offsets)
    try:
        consumer.commit(offsets)
    except CommitRefusedError as error:
        recorder.not_committed(name, number, error)
    else:
        recorder.committed(name, number)
