"""When a verb says what it waits for, and when it is silent."""

from __future__ import annotations

import time
from concurrent.futures import Future

import pytest

from rayq.cli import output
from rayq.cli.produce import Answers
from rayq.errors import DiskFullError
from rayq.records import RecordMetadata


def test_writes_are_waited_for_while_none_of_them_is_acknowledged() -> None:
    answers = Answers(10, lambda: DiskFullError("There is no room."))
    assert answers.waits_for() is None, "it waits for its input"
    futures: list[Future[RecordMetadata]] = [Future() for _ in range(3)]
    for future in futures:
        answers.add(future)
    said = answers.waits_for()
    assert said is not None
    assert said.startswith("Waiting for 3 writes to be acknowledged: There is no room. `rayq")
    futures[0].set_result(RecordMetadata("t", 0, 0, 0))
    answers.take_those_there()
    assert answers.waits_for() is None, "some came"
    assert "2 writes" in str(answers.waits_for())
    for future in futures[1:]:
        future.set_result(RecordMetadata("t", 0, 0, 0))
    assert answers.waits_for() is None, "all are there"
    assert answers.all() == {0: 3}


def test_it_is_said_once_and_not_to_who_knows(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "PATIENCE_S", 0.01)
    said = ""
    texts = iter([None, None, "for this", "for that"])
    with output.patience(lambda: next(texts)):
        while not said:
            said += capfd.readouterr().err
        time.sleep(0.05)
    monkeypatch.setattr(output, "PATIENCE_S", 0.4)
    with output.patience(lambda: "for them"):
        output.hush()
        time.sleep(0.5)
    with output.patience(lambda: "for a moment"):
        pass
    assert said + capfd.readouterr().err == "for this\n"
