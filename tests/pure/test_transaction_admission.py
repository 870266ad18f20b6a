"""What a leader does with batches and markers of transactions (docs/protocol.md, rules 25, 26)."""

from __future__ import annotations

import random

import pytest

from rayq.core.transactions.admission import OPEN_TRANSACTIONS_MAX, Step, TransactionAdmission
from rayq.errors import (
    FencedEpochError,
    TransactionEndedError,
    TransactionLimitError,
    TransactionOrderError,
)
from rayq.messages.transaction_ids import make_family

FAMILY, OTHER, OTHER_COORDINATOR = make_family(0, 3), make_family(0, 4), make_family(1, 3)


def admission(*joined: int) -> TransactionAdmission:
    """One in which these epochs of the family have joined."""
    made = TransactionAdmission()
    for epoch in joined:
        made.joined(FAMILY, epoch, principal=None, ended_epoch=-1)
    return made


def step(
    made: TransactionAdmission, epoch: int, *, open_epoch: int | None = None, ended: int = -1,
    count: int = 0, family: int = FAMILY, principal: str | None = None,
) -> Step:
    return made.batch(
        family,
        epoch,
        principal=principal,
        open_epoch=open_epoch,
        ended_epoch=ended,
        open_count=count,
    )


def is_appended(
    made: TransactionAdmission, epoch: int, *, open_epoch: int | None = None, ended: int = -1,
    coordinator: int = 7, family: int = FAMILY,
) -> bool:
    return made.marker(family, epoch, coordinator, open_epoch=open_epoch, ended_epoch=ended)


@pytest.mark.parametrize(
    "open_epoch, ended, joined, found",
    [
        (None, -1, False, Step.JOIN),
        (None, -1, True, Step.APPEND),
        (None, 4, False, Step.JOIN),
        (None, 4, True, Step.APPEND),
        (None, 5, True, TransactionEndedError),
        (None, 6, True, TransactionEndedError),
        (5, -1, False, Step.JOIN),  # Its first batches came in an earlier leader epoch.
        (5, 4, True, Step.APPEND),
        (4, -1, False, Step.WAIT),
        (4, 3, True, Step.WAIT),
        (6, -1, True, TransactionEndedError),
    ],
)
def test_what_a_batch_of_epoch_5_needs(
    open_epoch: int | None, ended: int, joined: bool, found: Step | type[Exception]
) -> None:
    made = admission(5) if joined else admission(4)
    if isinstance(found, Step):
        assert step(made, 5, open_epoch=open_epoch, ended=ended) is found
    else:
        with pytest.raises(found, match="Nothing was written"):
            step(made, 5, open_epoch=open_epoch, ended=ended)


@pytest.mark.parametrize(
    "open_epoch, ended, found",
    [
        (5, -1, True),
        (5, 4, True),
        (None, -1, True),  # A late batch of it is refused from now on.
        (None, 4, True),
        (None, 5, False),
        (None, 6, False),
        (6, -1, False),
        (6, 5, False),
        (4, -1, TransactionOrderError),
        (4, 3, TransactionOrderError),
    ],
)
def test_what_becomes_of_a_marker_of_epoch_5(
    open_epoch: int | None, ended: int, found: bool | type[Exception]
) -> None:
    if isinstance(found, bool):
        assert is_appended(admission(5), 5, open_epoch=open_epoch, ended=ended) is found
    else:
        with pytest.raises(found):
            is_appended(admission(5), 5, open_epoch=open_epoch, ended=ended)


def test_a_membership_is_of_one_epoch_and_goes_with_its_marker() -> None:
    made = admission(5)
    assert step(made, 6) is Step.JOIN
    assert step(made, 5, family=OTHER) is Step.JOIN
    assert is_appended(made, 5)
    assert step(made, 5) is Step.JOIN, "a leader that cuts the marker off asks again"


@pytest.mark.parametrize("has_joined", [True, False])
def test_a_partition_joins_a_sealed_transaction_again_before_it_takes_more(has_joined: bool) -> None:
    """Its coordinator lets nobody join what it has sealed. Where it has not, a stranger asked."""
    made = admission(5) if has_joined else admission()
    made.seal(FAMILY, 5, open_epoch=5, ended_epoch=4)
    for open_epoch in (5, None):
        assert step(made, 5, open_epoch=open_epoch, ended=3) is Step.JOIN
    made.joined(FAMILY, 5, principal=None, ended_epoch=4)
    assert step(made, 5) is Step.APPEND
    assert is_appended(made, 5, open_epoch=5, ended=4)
    with pytest.raises(TransactionEndedError):
        step(made, 5, ended=5)


@pytest.mark.parametrize("open_epoch, ended", [(None, 5), (6, -1)])
def test_what_has_ended_is_not_sealed(open_epoch: int | None, ended: int) -> None:
    with pytest.raises(TransactionEndedError):
        admission(5).seal(FAMILY, 5, open_epoch=open_epoch, ended_epoch=ended)


def test_a_refused_marker_leaves_the_membership() -> None:
    made = admission(5)
    with pytest.raises(TransactionOrderError):
        is_appended(made, 5, open_epoch=4)
    assert step(made, 5) is Step.APPEND


def test_who_speaks_after_the_end_does_not_make_a_member() -> None:
    made = admission()
    made.joined(FAMILY, 5, principal=None, ended_epoch=5)
    assert step(made, 5) is Step.JOIN


def test_a_coordinator_that_was_replaced_writes_no_marker() -> None:
    made = admission()
    assert is_appended(made, 5, coordinator=8)
    with pytest.raises(FencedEpochError):
        is_appended(made, 6, coordinator=7)
    with pytest.raises(FencedEpochError):
        is_appended(made, 0, coordinator=7, family=OTHER)
    assert is_appended(made, 0, coordinator=7, family=OTHER_COORDINATOR)
    assert is_appended(made, 6, coordinator=8) and is_appended(made, 7, coordinator=9)


def test_a_marker_that_is_too_early_fences_the_coordinator_before_all_the_same() -> None:
    made = admission()
    with pytest.raises(TransactionOrderError):
        is_appended(made, 5, open_epoch=4, coordinator=8)
    with pytest.raises(FencedEpochError):
        is_appended(made, 4, open_epoch=4, coordinator=7)


@pytest.mark.parametrize(
    "epoch, open_epoch, ended, is_sealed",
    [
        (5, 5, 4, True),
        (5, None, 4, True),
        (5, None, -1, True),
        (5, 4, 3, True),  # It waits for the marker of an older one, and is sealed all the same.
        (5, None, 5, False),
        (5, None, 6, False),
        (5, 6, 4, False),
        (0, None, -1, True),
    ],
)
def test_what_is_over_is_not_sealed_and_the_rest_is(
    epoch: int, open_epoch: int | None, ended: int, is_sealed: bool
) -> None:
    made = admission(epoch)
    if not is_sealed:
        with pytest.raises(TransactionEndedError, match=f"{FAMILY}:{epoch} has ended"):
            made.seal(FAMILY, epoch, open_epoch=open_epoch, ended_epoch=ended)
        assert step(made, epoch) is Step.APPEND
        return
    made.seal(FAMILY, epoch, open_epoch=open_epoch, ended_epoch=ended)
    assert step(made, epoch) is Step.JOIN
    assert step(made, epoch, family=OTHER) is Step.JOIN
    assert step(made, epoch + 1) is Step.JOIN


def test_a_seal_of_what_nobody_has_leaves_nothing() -> None:
    made = admission(7)
    before = {name: len(table) for name, table in vars(made).items()}
    for epoch in range(10 * OPEN_TRANSACTIONS_MAX):
        made.seal(OTHER, epoch, open_epoch=None, ended_epoch=-1)
    assert {name: len(table) for name, table in vars(made).items()} == before
    made.seal(FAMILY, 7, open_epoch=None, ended_epoch=-1)
    assert step(made, 7) is Step.JOIN


def test_a_marker_or_a_seal_ends_the_membership_of_its_transaction_alone() -> None:
    made = admission(4, 5, 6)
    made.joined(OTHER, 5, principal=None, ended_epoch=-1)
    made.joined(OTHER, 6, principal=None, ended_epoch=-1)
    made.seal(FAMILY, 6, open_epoch=None, ended_epoch=-1)
    assert is_appended(made, 5)
    assert [step(made, epoch) for epoch in (4, 5, 6)] == [Step.APPEND, Step.JOIN, Step.JOIN]
    assert [step(made, epoch, family=OTHER) for epoch in (5, 6)] == [Step.APPEND, Step.APPEND]


@pytest.mark.parametrize("ended, is_member", [(-1, True), (4, True), (5, False), (6, False)])
def test_a_partition_joins_what_has_not_ended(ended: int, is_member: bool) -> None:
    made = admission()
    made.joined(FAMILY, 5, principal=None, ended_epoch=ended)
    assert step(made, 5) is (Step.APPEND if is_member else Step.JOIN)
    assert step(made, 5, family=OTHER) is Step.JOIN


def test_the_membership_of_one_principal_is_not_that_of_another() -> None:
    made = admission(5)  # A superuser's.
    assert step(made, 5, principal="orders") is Step.JOIN
    made.joined(FAMILY, 5, principal="orders", ended_epoch=-1)
    assert step(made, 5, principal="orders") is Step.APPEND
    assert step(made, 5, principal="billing") is Step.JOIN
    assert step(made, 5) is Step.APPEND
    assert is_appended(made, 5)
    assert step(made, 5, principal="orders") is Step.JOIN


@pytest.mark.parametrize("coordinator, is_heard", [(6, False), (7, True), (8, True)])
def test_a_marker_counts_from_the_latest_coordinator_that_was_heard(
    coordinator: int, is_heard: bool
) -> None:
    made = admission()
    assert is_appended(made, 4, coordinator=0) and is_appended(made, 5, coordinator=7)
    if is_heard:
        assert not is_appended(made, 5, ended=5, coordinator=coordinator)
        with pytest.raises(FencedEpochError):
            is_appended(made, 6, coordinator=coordinator - 1)
        return
    with pytest.raises(FencedEpochError, match="0 is in leader epoch 7, the marker is from 6"):
        is_appended(made, 5, coordinator=coordinator)
    assert is_appended(made, 5, coordinator=7), "who is refused is not heard"


def test_one_transaction_too_many_is_refused_before_it_joins_and_those_open_go_on() -> None:
    made = admission(5)
    for epoch in (5, 6):
        with pytest.raises(TransactionLimitError, match="the limit"):
            step(made, epoch, count=OPEN_TRANSACTIONS_MAX)
    assert step(made, 5, open_epoch=5, count=OPEN_TRANSACTIONS_MAX) is Step.APPEND
    assert step(made, 5, count=OPEN_TRANSACTIONS_MAX - 1) is Step.APPEND
    assert is_appended(made, 6), "a marker opens nothing"


@pytest.mark.parametrize("seed", range(20))
def test_no_data_follow_their_marker_and_no_two_transactions_of_a_family_overlap(seed: int) -> None:
    chance = random.Random(seed)
    made = TransactionAdmission()
    open_epoch: int | None = None
    markers: list[int] = []
    for _ in range(2_000):
        epoch = chance.randrange(12)
        ended = max(markers, default=-1)
        try:
            if chance.random() < 0.3:
                if made.marker(FAMILY, epoch, 1, open_epoch=open_epoch, ended_epoch=ended):
                    assert open_epoch in (None, epoch) and epoch not in markers
                    markers.append(epoch)
                    open_epoch = None
                continue
            needed = step(made, epoch, open_epoch=open_epoch, ended=ended)
        except (TransactionEndedError, TransactionOrderError):
            continue
        if needed is Step.APPEND:
            assert open_epoch in (None, epoch) and epoch not in markers
            open_epoch = epoch
        elif needed is Step.JOIN and chance.random() < 0.5:
            made.joined(FAMILY, epoch, principal=None, ended_epoch=ended)
        if chance.random() < 0.02:  # Another leads, by the same log.
            made = TransactionAdmission()
    assert markers == sorted(markers)
