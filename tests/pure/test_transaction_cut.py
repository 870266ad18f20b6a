"""One moment over many partitions shows all or nothing of each transaction."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayq.batch.transaction_cut import (
    TRANSACTIONS_MAX,
    Cut,
    cut_of_one_pass,
    cut_of_two_passes,
)
from rayq.errors import TransactionLimitError
from rayq.messages import DescribeOpenTransactionsResponse

PARTITIONS = 3
Transaction = tuple[int, int]


def answer(
    high_watermark: int,
    *,
    open_: list[Transaction] | None = None,
    ended: list[Transaction] | None = None,
    is_cleaned: bool = False,
    is_used: bool = True,
) -> DescribeOpenTransactionsResponse:
    return DescribeOpenTransactionsResponse(
        high_watermark=high_watermark,
        last_stable_offset=0,
        open=[(*of, 0) for of in open_ or []],
        ended=None if is_cleaned else ended or [],
        is_used=is_used,
    )


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ([answer(7), answer(9)], Cut([7, 9], ())),
        ([answer(7, open_=[(1, 0)]), answer(9)], Cut([7, 9], ((1, 0),))),
        (
            [answer(7, open_=[(2, 1)]), answer(9, ended=[(1, 0), (2, 1)])],
            Cut([7, 9], ((1, 0), (2, 1))),
        ),
        ([answer(7), answer(9, is_cleaned=True)], None),
        ([answer(4), answer(9)], None),
    ],
)
def test_a_cut_ends_at_the_second_high_watermarks_and_leaves_out_what_any_partition_names(
    second: list[DescribeOpenTransactionsResponse], expected: Cut | None
) -> None:
    assert cut_of_two_passes([answer(5), answer(8)], second) == expected


def test_one_pass_is_enough_only_where_no_partition_has_held_a_transaction() -> None:
    unused = answer(5, is_used=False)
    assert cut_of_one_pass([unused, unused]) == Cut([5, 5], ())
    assert cut_of_one_pass([unused, answer(8)]) is None


def test_a_cut_leaves_out_a_limited_number_of_transactions() -> None:
    many = [(number, 0) for number in range(TRANSACTIONS_MAX + 1)]
    cut = cut_of_two_passes([answer(5)], [answer(5, open_=many[1:])])
    assert cut is not None and len(cut.without) == TRANSACTIONS_MAX
    with pytest.raises(TransactionLimitError, match="last_stable"):
        cut_of_two_passes([answer(5)], [answer(5, open_=many)])


# --- any interleaving -----------------------------------------------------------------------------


@dataclass
class Log:
    """A partition: its entries are `(transaction, None)` for a record, else with the outcome."""

    entries: list[tuple[Transaction, bool | None]] = field(default_factory=list)
    high_watermark: int = 0

    def describe(self, since: int | None) -> DescribeOpenTransactionsResponse:
        known = self.entries[: self.high_watermark]
        ended = {of for of, is_commit in known if is_commit is not None}
        recent = [] if since is None else known[since:]
        return answer(
            self.high_watermark,
            open_=sorted({of for of, _ in known} - ended),
            ended=[of for of, is_commit in recent if is_commit is not None],
            is_used=bool(self.entries),
        )

    def decided(self, of: Transaction, below: int) -> bool | None:
        return next(
            (is_commit for one, is_commit in self.entries[:below] if one == of and is_commit is not None),
            None,
        )


@dataclass
class Writing:
    """A transaction: it commits once all its records are below the high watermarks."""

    of: Transaction
    offsets: list[tuple[int, int]] = field(default_factory=list)
    decision: bool | None = None
    marked: set[int] = field(default_factory=set)


class World:
    """Three logs, transactions at random, and cuts whose questions come between their steps."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.logs = [Log() for _ in range(PARTITIONS)]
        self.writing: list[Writing] = []
        self.all: list[Writing] = []
        self.cuts: list[Cut] = []
        self._first: dict[int, DescribeOpenTransactionsResponse] = {}
        self._second: dict[int, DescribeOpenTransactionsResponse] = {}

    def step(self) -> None:
        kind = self.random.random()
        if kind < 0.2:
            self._write()
        elif kind < 0.5:
            log = self.random.choice(self.logs)
            log.high_watermark = self.random.randint(log.high_watermark, len(log.entries))
        elif kind < 0.96:
            self._end()
        else:
            self._ask()

    def _write(self) -> None:
        if len(self.writing) < 3:
            self.writing.append(Writing((len(self.all), 0)))
            self.all.append(self.writing[-1])
        one = self.random.choice(self.writing)
        if one.decision is None:
            number = self.random.randrange(PARTITIONS)
            one.offsets.append((number, len(self.logs[number].entries)))
            self.logs[number].entries.append((one.of, None))

    def _end(self) -> None:
        if not self.writing:
            return
        one = self.random.choice(self.writing)
        if one.decision is None and self.random.random() < 0.3:
            is_acked = all(at < self.logs[number].high_watermark for number, at in one.offsets)
            if is_acked or self.random.random() < 0.2:
                one.decision = is_acked and self.random.random() < 0.8
        if one.decision is None:
            return
        left = sorted({number for number, _ in one.offsets} - one.marked)
        if not left:
            self.writing.remove(one)
            return
        number = self.random.choice(left)
        self.logs[number].entries.append((one.of, one.decision))
        one.marked.add(number)

    def _ask(self) -> None:
        left = [number for number in range(PARTITIONS) if number not in self._first]
        if left:
            number = self.random.choice(left)
            self._first[number] = self.logs[number].describe(None)
            return
        first = [self._first[number] for number in range(PARTITIONS)]
        cut = cut_of_one_pass(first)
        if cut is None:
            left = [number for number in range(PARTITIONS) if number not in self._second]
            if left:
                number = self.random.choice(left)
                self._second[number] = self.logs[number].describe(first[number].high_watermark)
                return
            cut = cut_of_two_passes(first, [self._second[number] for number in range(PARTITIONS)])
        assert cut is not None
        self.cuts.append(cut)
        self._first, self._second = {}, {}

    def check(self) -> int:
        """The number of transactions that cuts show."""
        shown_in_all = 0
        for cut in self.cuts:
            for one in self.all:
                shown = 0
                for number, at in one.offsets:
                    if at >= cut.ends[number] or one.of in cut.without:
                        continue
                    is_commit = self.logs[number].decided(one.of, cut.ends[number])
                    assert is_commit is not None, "readers would have to wait"
                    shown += is_commit
                assert shown in (0, len(one.offsets)), (cut, one)
                shown_in_all += shown > 0
        return shown_in_all


@pytest.mark.slow
@settings(max_examples=150)
@given(st.integers(0, 2**32))
def test_every_cut_shows_all_or_nothing_of_each_transaction(seed: int) -> None:
    world = World(seed)
    for _ in range(1500):
        world.step()
    world.check()


def test_the_cuts_of_that_test_show_something() -> None:
    cuts = shown = 0
    for seed in range(40):
        world = World(seed)
        for _ in range(1500):
            world.step()
        cuts += len(world.cuts)
        shown += world.check()
    assert cuts > 100 and shown > 1000
