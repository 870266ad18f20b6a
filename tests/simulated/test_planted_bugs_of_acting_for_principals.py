"""Planted bugs that let a server do for a principal what the principal may not do: the tests find
each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rayq.actors.queues import moves
from rayq.actors.queues.moves import QueueMoves
from rayq.actors.replica import leader_reads
from rayq.core.transactions import changes
from rayq.core.transactions.admission import TransactionAdmission
from tests.pure import test_transaction_decisions, test_url_validity
from tests.simulated import (
    test_leader_reads,
    test_leader_transactions,
    test_queue_moves,
)

Plant = Callable[[pytest.MonkeyPatch], None]


def redrive_by_header(planting: pytest.MonkeyPatch) -> None:
    """A letter goes where its header says, whoever sends it there."""
    find = QueueMoves._find

    async def found(self: QueueMoves, topic: str, check: Any) -> Any:
        return await find(self, topic, lambda topic: None)

    planting.setattr(QueueMoves, "_find", found)
    planting.setattr(moves, "_refusal", lambda check, aim: None)


def redrive_outlives_the_right(planting: pytest.MonkeyPatch) -> None:
    """The rights of a redrive are looked at when it begins, and never again."""
    planting.setattr(moves, "_refusal", lambda check, aim: None)


def family_of_another(planting: pytest.MonkeyPatch) -> None:
    """The coordinator lets each principal write in each transaction."""
    planting.setattr(changes, "_check_principal", lambda state, key, principal: None)


def joined_for_everybody(planting: pytest.MonkeyPatch) -> None:
    """A leader asks the coordinator for the first principal of a transaction alone."""
    batch = TransactionAdmission.batch

    def as_any(self: Any, family: int, epoch: int, *, principal: str | None, **log: Any) -> Any:
        joined = self._joined.get((family, epoch))
        return batch(self, family, epoch, principal=min(joined) if joined else principal, **log)

    planting.setattr(TransactionAdmission, "batch", as_any)


def url_outlives_token(planting: pytest.MonkeyPatch) -> None:
    """URLs live for a quarter of an hour, whatever is left of the token."""
    validity_ms = leader_reads.url_validity_ms

    def valid_ms(wanted_ms: int, **of: Any) -> int:
        return validity_ms(wanted_ms, **{**of, "token_expires_ms": None})

    planting.setattr(leader_reads, "url_validity_ms", valid_ms)
    planting.setattr(test_url_validity, "url_validity_ms", valid_ms)


@pytest.mark.parametrize(
    ("plant", "test"),
    [
        (
            redrive_by_header,
            test_queue_moves.test_a_header_sends_no_record_to_where_the_redriver_may_not_write,
        ),
        (
            redrive_outlives_the_right,
            lambda: test_queue_moves.test_a_redrive_ends_with_the_right_of_the_principal_that_asked_for_it(
                "no append"
            ),
        ),
        (
            family_of_another,
            lambda: (
                test_transaction_decisions.test_only_its_principal_and_superusers_write_in_a_transaction(
                    None
                )
            ),
        ),
        (
            joined_for_everybody,
            test_leader_transactions.test_a_stranger_does_not_write_in_a_transaction_that_has_joined,
        ),
        (
            url_outlives_token,
            test_leader_reads.test_bytes_behind_urls_count_when_they_are_handed_out_and_a_debt_delays_the_next,
        ),
        (
            url_outlives_token,
            test_url_validity.test_urls_are_valid_for_no_longer_than_asked_for_a_quarter_of_an_hour_or_the_token,
        ),
    ],
    ids=lambda value: getattr(value, "__name__", "test"),
)
def test_a_planted_bug_is_found(
    plant: Plant, test: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    test()
    plant(monkeypatch)
    # (A forged batch that is appended waits for its copy.)
    with pytest.raises((AssertionError, pytest.fail.Exception, asyncio.InvalidStateError)):
        test()
