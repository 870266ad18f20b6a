"""How many consumers a pool wants, against a topic and consumers that a test plays."""

from __future__ import annotations

import itertools
import math
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayq.core.pool_scaling import (
    POINTS_MAX,
    SETTLE_S,
    WINDOW_S,
    Decision,
    Growth,
    Limits,
    Look,
    PartitionProgress,
    PoolScaling,
)


class Played:
    """A topic whose records come evenly into its partitions, and consumers of equal speed that
    start after a while. One step is one second."""

    def __init__(
        self,
        limits: Limits,
        *,
        partitions: int = 8,
        speed: float = 5_000,
        start_s: float = 2.0,
        backlog: int = 0,
    ) -> None:
        self.scaling = PoolScaling(limits)
        self.partitions = partitions
        self.speed = speed
        self.start_s = start_s
        self.now_s = 0.0
        self.rate = 0.0
        self.produced = float(backlog)
        self.handled = 0.0
        self.busy_s = 0.0
        self.started_s: list[float] = []
        self.history: list[Decision] = []

    @property
    def running(self) -> int:
        return sum(self.now_s - since >= self.start_s for since in self.started_s)

    def step(self) -> Decision:
        self.now_s += 1
        self.produced += self.rate
        could = self.running * self.speed
        done = min(self.produced - self.handled, could)
        self.handled += done
        self.busy_s += done / self.speed
        decision = self.scaling.decide(
            Look(
                at_s=self.now_s,
                partitions={
                    number: PartitionProgress(
                        int(self.handled / self.partitions), int(self.produced / self.partitions)
                    )
                    for number in range(self.partitions)
                },
                consumers=len(self.started_s),
                running=self.running,
                handled=int(self.handled),
                busy_s=self.busy_s,
            )
        )
        del self.started_s[decision.wanted :]
        self.started_s += [self.now_s] * (decision.wanted - len(self.started_s))
        self.history.append(decision)
        return decision

    def run(self, seconds: int, rate: float) -> list[Decision]:
        self.rate = rate
        return [self.step() for _ in range(seconds)]


LIMITS = Limits(consumers_min=0, consumers_max=None, target_lag_s=5.0, cool_down_s=20.0)


def test_nothing_runs_while_nothing_comes_in() -> None:
    assert {one.wanted for one in Played(LIMITS).run(60, rate=0)} == {0}


def test_one_record_wakes_a_pool_and_after_the_cool_down_it_sleeps_again() -> None:
    pool = Played(LIMITS)
    pool.run(5, 0)
    pool.produced += 8
    assert pool.step().wanted == 1
    after = [one.wanted for one in pool.run(60, 0)]
    assert set(after) == {0, 1}
    asleep = after.index(0)
    assert 20 <= asleep <= 30
    assert not any(after[asleep:])


def test_a_step_up_is_followed_and_a_step_down_after_the_cool_down() -> None:
    pool = Played(LIMITS)
    quiet = pool.run(60, 100)
    assert {one.wanted for one in quiet[5:]} == {1}
    loud = pool.run(60, 20_000)
    # Four could handle the load; a quarter on top leaves room to catch up.
    assert loud[-1].wanted == 5
    assert max(one.lag_s for one in loud) < 10
    assert max(one.lag_slope for one in loud) > 0 > min(one.lag_slope for one in loud)
    rises = [n for n, (one, two) in enumerate(itertools.pairwise(loud)) if two.wanted > one.wanted]
    assert all(two - one >= SETTLE_S for one, two in itertools.pairwise(rises))
    within = next(n for n, one in enumerate(loud) if all(o.lag_s < 5 for o in loud[n:]))
    assert within < 20
    assert loud[-1].lag_s < 1.5
    after = pool.run(60, 0)
    assert after[10].wanted == 5
    assert after[-1].wanted == 0


def test_a_backlog_is_worked_off_in_about_the_target_time() -> None:
    pool = Played(LIMITS, backlog=100_000)
    history = pool.run(60, 0)
    assert max(one.wanted for one in history) >= 3
    done = next(n for n, one in enumerate(history) if one.lag == 0)
    assert done < 20
    assert history[-1].wanted == 0


def test_there_are_never_more_than_partitions_nor_than_the_user_said() -> None:
    pool = Played(LIMITS, partitions=3, speed=10)
    assert max(one.wanted for one in pool.run(60, 10_000)) == 3
    assert "no more partitions" in pool.history[-1].reason
    pool = Played(LIMITS._replace(consumers_max=2), speed=10)
    assert max(one.wanted for one in pool.run(60, 10_000)) == 2
    assert "max_consumers" in pool.history[-1].reason


def test_a_minimum_runs_from_the_first_look() -> None:
    pool = Played(LIMITS._replace(consumers_min=3))
    assert [one.wanted for one in pool.run(60, 0)] == [3] * 60


def test_a_minimum_above_the_partitions_is_as_many_as_partitions() -> None:
    pool = Played(LIMITS._replace(consumers_min=5), partitions=2)
    assert {one.wanted for one in pool.run(10, 0)} == {2}


def test_consumers_that_wait_for_a_node_bring_no_further_ones() -> None:
    pool = Played(LIMITS, start_s=1e9)
    assert {one.wanted for one in pool.run(100, 1_000)} == {1}


def test_where_the_sum_says_enough_and_the_lag_stays_one_more_is_added_at_a_time() -> None:
    scaling = PoolScaling(LIMITS)
    # Consumers say that they could handle 10,000/s each, and yet only 100/s are handled.
    wanted, counts = 1, []
    for now_s in range(60):
        decision = scaling.decide(
            Look(
                at_s=float(now_s),
                partitions={n: PartitionProgress(100 * now_s // 8, 200 * now_s // 8) for n in range(8)},
                consumers=wanted,
                running=wanted,
                handled=100 * now_s,
                busy_s=0.01 * now_s,
            )
        )
        wanted = decision.wanted
        counts.append(wanted)
    steps = [n for n in range(1, 60) if counts[n] != counts[n - 1]]
    assert counts[-1] == 8
    assert all(counts[n] == counts[n - 1] + 1 for n in steps)
    assert min(b - a for a, b in zip(steps, steps[1:], strict=False)) >= SETTLE_S


def test_a_pool_that_starts_again_keeps_the_consumers_it_finds_for_a_cool_down() -> None:
    scaling = PoolScaling(LIMITS)
    for now_s in range(20):
        look = Look(float(now_s), {0: PartitionProgress(5, 5), 1: PartitionProgress(5, 5)}, 2, 2, 100, 1.0)
        assert scaling.decide(look).wanted == 2
    assert scaling.decide(look._replace(at_s=30.0)).wanted == 0


def test_doubling_is_the_most_at_a_time() -> None:
    pool = Played(LIMITS, partitions=64, speed=10)
    wanted = [one.wanted for one in pool.run(60, 1_000)]
    assert wanted[-1] == 64
    assert all(later <= max(2 * sooner, 1) for sooner, later in zip(wanted, wanted[1:], strict=False))


def test_noise_seldom_moves_the_count() -> None:
    pool, random = Played(LIMITS, partitions=16), Random(1)
    for _ in range(600):
        pool.speed = 5_000 * random.uniform(0.6, 1.4)
        pool.run(1, 20_000 * random.uniform(0.5, 1.5))
    settled = pool.history[60:]
    changes = sum(a.wanted != b.wanted for a, b in itertools.pairwise(settled))
    assert changes < 540 / LIMITS.cool_down_s  # less than once in a cool-down
    assert max(one.lag_s for one in settled) < 1


# --- how old a record is --------------------------------------------------------------------------


def test_a_record_is_as_old_as_the_growth_of_the_log_past_it() -> None:
    growth = Growth()
    growth.add(0.0, 100, 100)
    growth.add(1.0, 200, 100)
    growth.add(2.0, 300, 100)
    assert growth.age_s(150, 2.0) == pytest.approx(1.5)
    assert growth.age_s(250, 4.0) == pytest.approx(2.5)
    assert growth.age_s(300, 4.0) == 0.0


def test_what_was_there_before_the_first_look_is_at_least_as_old_as_that() -> None:
    growth = Growth()
    growth.add(10.0, 500, 20)
    assert growth.age_s(20, 17.0) == 7.0


def test_a_topic_that_is_quiet_for_long_and_then_grows_is_dated_by_its_growth() -> None:
    growth = Growth()
    for now_s in range(1000):
        growth.add(float(now_s), 5, 5)
    growth.add(1000.0, 6, 5)
    assert growth.age_s(5, 1000.0) <= 1.0


def test_a_topic_that_was_made_again_has_a_new_date() -> None:
    growth = Growth()
    growth.add(0.0, 100, 0)
    growth.add(50.0, 10, 0)
    assert growth.age_s(3, 51.0) == pytest.approx(1.0)


@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.integers(0, 1000)), min_size=1, max_size=50),
    st.floats(0, 1),
)
def test_ages_never_rise_with_the_offset_and_lie_within_what_was_seen(
    steps: list[tuple[float, int]], share: float
) -> None:
    growth, now_s, end = Growth(), 0.0, 0
    for passed_s, added in steps:
        now_s, end = now_s + passed_s, end + added
        growth.add(now_s, end, 0)
    ages = [growth.age_s(position, now_s) for position in range(0, end + 1, max(end // 20, 1))]
    assert all(0 <= age <= now_s + 1e-9 for age in ages)
    assert all(later <= sooner + 1e-9 for sooner, later in zip(ages, ages[1:], strict=False))


def test_memory_is_bounded_however_long_nothing_is_handled() -> None:
    growth = Growth()
    for now_s in range(10 * POINTS_MAX):
        growth.add(float(now_s), now_s, 0)
    assert len(growth._points) <= POINTS_MAX
    assert growth.age_s(0, 10.0 * POINTS_MAX) == pytest.approx(10.0 * POINTS_MAX, rel=0.01)


@given(st.lists(st.floats(0, 50_000), min_size=1, max_size=40), st.integers(1, 20))
def test_whatever_comes_in_the_count_stays_within_its_limits(
    rates: list[float], partitions: int
) -> None:
    limits = Limits(consumers_min=1, consumers_max=6, target_lag_s=2.0, cool_down_s=5.0)
    pool = Played(limits, partitions=partitions)
    for rate in rates:
        (decision,) = pool.run(1, rate)
        assert min(1, partitions) <= decision.wanted <= min(6, partitions)
        assert math.isfinite(decision.lag_s)


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from([0, 0, 1, 2, 5, 9, -2]), st.integers(0, 3)),
        min_size=1,
        max_size=12,
    )
)
def test_ages_are_those_that_all_looks_together_tell(steps: list[tuple[int, int, int]]) -> None:
    growth, now_s, end, position = Growth(), 0.0, 0, 0
    seen: list[tuple[float, int]] = []
    for passed_s, added, handled in steps:
        now_s += passed_s
        if added < 0 and end + added >= 0:  # The log is cut.
            end += added
            position, seen = min(position, end), []
        else:
            end += abs(added)
        position = min(position + handled, end)
        seen.append((now_s, end))
        growth.add(now_s, end, position)
        for asked in range(position, end + 2):
            after = next((n for n, (_, ended) in enumerate(seen) if ended > asked), None)
            if after is None:
                expected = 0.0
            elif after == 0:
                expected = now_s + 1 - seen[0][0]
            else:
                (before_s, before), (after_s, ended) = seen[after - 1], seen[after]
                share = (asked - before) / (ended - before)
                expected = now_s + 1 - before_s - share * (after_s - before_s)
            assert growth.age_s(asked, now_s + 1) == pytest.approx(expected)


def test_nothing_has_an_age_before_the_first_look() -> None:
    assert Growth().age_s(0, 5.0) == 0.0


def test_a_record_is_dated_from_the_end_of_a_quiet_time_whoever_asks() -> None:
    growth = Growth()
    for at_s, end in [(0.0, 3), (1.0, 5), (2.0, 5), (6.0, 5), (7.0, 9)]:
        growth.add(at_s, end, 0)
    ages = [growth.age_s(position, 8.0) for position in range(10)]
    assert ages == [8.0, 8.0, 8.0, 8.0, 7.5, 2.0, 1.75, 1.5, 1.25, 0.0]


def test_what_is_handled_or_did_not_grow_takes_no_memory() -> None:
    waiting, idle, busy = Growth(), Growth(), Growth()
    for now_s in range(100):
        waiting.add(float(now_s), 5, 0)
        idle.add(float(now_s), 5, 5)
        busy.add(float(now_s), 10 * now_s, 10 * now_s - 5)
    assert list(waiting._points) == [(0.0, 5), (99.0, 5)]
    assert list(idle._points) == [(99.0, 5)]
    assert list(busy._points) == [(98.0, 980), (99.0, 990)]


def test_beyond_so_many_points_every_second_one_goes_and_both_ends_stay() -> None:
    growth = Growth()
    points = [(float(number), number * number) for number in range(POINTS_MAX + 1)]
    for at_s, end in points[:-1]:
        growth.add(at_s, end, 0)
    assert list(growth._points) == points[:-1]
    growth.add(*points[-1], 0)
    assert list(growth._points) == [*points[:-1:2], points[-1]]


# --- what one look shows -------------------------------------------------------------------------


def look(at_s: float, *partitions: tuple[Any, ...], **changes: Any) -> Look:
    """Of partitions as `(position, end)` or `(position, end, oldest_s)`."""
    values: dict[str, Any] = {"consumers": 1, "running": 1, "handled": 0, "busy_s": 0.0, **changes}
    seen = {number: PartitionProgress(*one) for number, one in enumerate(partitions)}
    return Look(at_s, seen, **values)


def test_a_decision_has_all_that_it_is_based_on() -> None:
    scaling = PoolScaling(LIMITS)
    assert scaling.decide(look(10.0, (5, 5), (7, 27), handled=4)) == Decision(
        wanted=1, lag=20, lag_s=0.0, lag_slope=0.0, incoming_per_s=0.0, handled_per_s=0.0,
        capacity_per_s=None,
        reason="0/s come in, 20 wait (0.0 s), how fast a consumer is has yet to be seen",
    )
    found = scaling.decide(look(14.0, (5, 45), (9, 27), (3, 3), handled=24, busy_s=2.0))
    assert found == Decision(
        wanted=2, lag=58, lag_s=4.0, lag_slope=1.0, incoming_per_s=10.0, handled_per_s=5.0,
        capacity_per_s=12.0,
        reason="10/s come in, 58 wait (4.0 s), one consumer handles 12/s",
    )


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.5, 1.0, 2.0, 5.0, 7.0]),
            st.tuples(st.integers(-3, 9), st.integers(-3, 9)),
            st.tuples(st.integers(0, 5), st.integers(0, 5)),
            st.tuples(st.none() | st.floats(0, 20), st.none() | st.floats(0, 20)),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_rates_and_slopes_are_those_of_the_last_seconds(
    steps: list[tuple[float, tuple[int, int], tuple[int, int], tuple[Any, Any]]]
) -> None:
    scaling, growths = PoolScaling(LIMITS), (Growth(), Growth())
    now_s, produced, ends, positions = 0.0, 0, [20, 30], [5, 10]
    totals: list[tuple[float, int, int, float]] = []
    for number, (passed_s, added, handled, oldest) in enumerate(steps):
        now_s += passed_s
        ends = [end + more for end, more in zip(ends, added, strict=True)]
        positions = [position + more for position, more in zip(positions, handled, strict=True)]
        # What was there at the first look came in at no known rate, and a cut takes nothing back.
        produced += sum(max(more, 0) for more in added) if number else 0
        waiting = []
        for growth, position, end, age_s in zip(growths, positions, ends, oldest, strict=True):
            growth.add(now_s, end, position)
            if end > position:
                waiting.append(growth.age_s(position, now_s) if age_s is None else age_s)
        lag_s = max(waiting, default=0.0)
        totals.append((now_s, produced, sum(positions), lag_s))
        found = scaling.decide(look(
            now_s, *zip(positions, ends, oldest, strict=True), handled=sum(positions)))
        old = [one for one in totals[:-1] if one[0] <= now_s - WINDOW_S]
        then_s, produced_then, handled_then, lag_then_s = old[-1] if old else totals[0]
        since_s = now_s - then_s
        rates = [
            change / since_s if since_s else 0.0
            for change in (
                produced - produced_then, sum(positions) - handled_then, lag_s - lag_then_s
            )
        ]
        assert [found.incoming_per_s, found.handled_per_s, found.lag_slope] == rates
        assert found.lag == sum(
            max(end - position, 0) for position, end in zip(positions, ends, strict=True)
        )
        assert found.lag_s == lag_s


def test_a_capacity_is_measured_over_enough_work_and_a_new_one_counts_for_a_fifth() -> None:
    scaling, found = PoolScaling(LIMITS), []
    for number, (handled, busy_s) in enumerate([
        (0, 0.0), (0, 1.0), (10, 1.01), (51, 2.04), (51, 9.0), (52, 2.06), (72, 2.29), (72, 2.29),
    ]):
        decision = scaling.decide(look(float(number), (0, 9), handled=handled, busy_s=busy_s))
        found.append(decision.capacity_per_s)
    first = 10 / 1.01
    second = first + 0.2 * (41 / 1.03 - first)
    third = second + 0.2 * (21 / 0.25 - second)
    assert found == [
        None, None, first, pytest.approx(second), pytest.approx(second), pytest.approx(second),
        pytest.approx(third), pytest.approx(third),
    ]


@pytest.mark.parametrize(("busy_s", "capacity"), [(0.0499, None), (0.05, 200.0), (0.1, 100.0)])
def test_too_little_work_measures_nothing(busy_s: float, capacity: float | None) -> None:
    found = PoolScaling(LIMITS).decide(look(0.0, (0, 9), handled=10, busy_s=busy_s))
    assert found.capacity_per_s == capacity


# --- what follows from it ------------------------------------------------------------------------

QUEUE = Limits(0, None, target_lag_s=10.0, cool_down_s=5.0, one_each=False)


def decide(
    limits: Limits = QUEUE, *, incoming: int = 0, lag: int = 0, lag_s: float = 0.0,
    slope: float = 0.0, partitions: int = 1, **changes: Any,
) -> Decision:
    """The second look, where the first is long over: one consumer handles 100 records a second."""
    scaling = PoolScaling(limits)
    rest = [(0, 0)] * (partitions - 1)
    scaling.decide(look(0.0, (0, 1, lag_s - 10 * slope), *rest, handled=100, busy_s=1.0))
    end = 1 + 10 * incoming
    values = {"handled": 100, "busy_s": 1.0, **changes}
    return scaling.decide(look(10.0, (end - lag, end, lag_s), *rest, **values))


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        ({}, 0),
        ({"lag": 1}, 1),
        ({"incoming": 1}, 1),
        ({"incoming": 80}, 1),
        # A tenth above what one can do is noise, while the lag is below its target.
        ({"incoming": 80, "lag": 10}, 1),
        ({"incoming": 88}, 1),
        ({"incoming": 88, "lag": 10}, 2),
        ({"incoming": 89}, 2),
        ({"incoming": 80, "lag": 10, "lag_s": 10.0}, 1),
        ({"incoming": 80, "lag": 10, "lag_s": 10.1}, 2),
        ({"incoming": 160, "lag": 10, "consumers": 2}, 2),
        ({"incoming": 160, "lag": 10}, 2),
        ({"incoming": 160, "lag": 10, "consumers": 3}, 3),
        ({"incoming": 400, "consumers": 5}, 5),
        ({"incoming": 400, "consumers": 9}, 5),
        ({"lag": 1000}, 1),
        ({"lag": 1101}, 2),
        ({"lag": 5000, "consumers": 4}, 5),
        # The lag stays above its target, though there seem to be enough: one more.
        ({"lag": 1, "lag_s": 10.1}, 2),
        ({"lag": 1, "lag_s": 10.1, "slope": 0.1}, 2),
        ({"lag": 1, "lag_s": 10.1, "slope": -0.1}, 1),
        ({"lag": 1, "lag_s": 10.0}, 1),
        ({"lag": 1, "lag_s": 10.1, "consumers": 4, "running": 4}, 5),
        ({"lag": 1, "lag_s": 10.1, "consumers": 4, "running": 3}, 1),
        ({"lag": 3000, "lag_s": 10.1, "consumers": 3, "running": 3}, 4),
    ],
)
def test_so_many_are_needed_for_what_comes_in_and_what_waits(
    seen: dict[str, Any], wanted: int
) -> None:
    decision = decide(**seen)
    assert decision.wanted == wanted
    assert ("the lag stays above 10 s" in decision.reason) == (
        decision.lag_s > 10
        and decision.lag_slope >= 0
        and seen.get("running", 1) == seen.get("consumers", 1)
        and decision.incoming_per_s * 1.25 + decision.lag / 10 <= 100 * seen.get("consumers", 1)
    )


@pytest.mark.parametrize(
    ("limits", "lag", "partitions", "wanted", "why"),
    [
        ({"one_each": True}, 12_000, 20, 12, "0/s"),
        ({"one_each": True}, 12_000, 12, 12, "0/s"),
        ({"one_each": True}, 12_000, 5, 5, "there are no more partitions: 12 would be better; 0/s"),
        ({"one_each": True, "consumers_max": 5}, 12_000, 5, 5, "there are no more partitions: 12 w"),
        ({"one_each": True, "consumers_max": 7}, 12_000, 5, 5, "there are no more partitions: 12 w"),
        ({"one_each": True, "consumers_max": 4}, 12_000, 5, 4, "max_consumers: 12 would be better; 0"),
        ({"one_each": True, "consumers_max": 12}, 12_000, 20, 12, "0/s"),
        ({}, 12_000, 5, 12, "0/s"),
        ({"consumers_max": 5}, 12_000, 5, 5, "max_consumers: 12 would be better; 0/s"),
        ({"consumers_max": 11}, 12_000, 5, 11, "max_consumers: 12 would be better; 0/s"),
        ({"consumers_max": 12}, 12_000, 5, 12, "0/s"),
        ({"consumers_min": 3}, 0, 5, 3, "min_consumers; nothing waits and nothing comes in"),
        ({"consumers_min": 3, "one_each": True}, 0, 5, 3, "min_consumers; nothing waits"),
        ({"consumers_min": 3, "one_each": True}, 0, 2, 2, "min_consumers; nothing waits"),
        ({"consumers_min": 3}, 0, 2, 3, "min_consumers; nothing waits"),
        ({"consumers_min": 3}, 2500, 5, 3, "0/s"),
        ({"consumers_min": 3}, 3500, 5, 4, "0/s"),
        ({"consumers_min": 0}, 0, 5, 0, "nothing waits and nothing comes in"),
        ({"consumers_min": 3, "consumers_max": 3}, 12_000, 5, 3, "max_consumers: 12 would"),
    ],
)
def test_the_limits_are_kept_and_the_reason_says_which(
    limits: dict[str, Any], lag: int, partitions: int, wanted: int, why: str
) -> None:
    decision = decide(QUEUE._replace(**limits), lag=lag, partitions=partitions, consumers=8)
    assert (decision.wanted, decision.reason[: len(why)]) == (wanted, why)


@pytest.mark.parametrize(
    ("least", "consumers", "wanted"),
    [(0, 0, 1), (0, 1, 2), (0, 2, 4), (0, 5, 10), (0, 7, 12), (3, 0, 3), (5, 2, 5), (3, 2, 4)],
)
def test_at_most_twice_as_many_come_at_once_but_the_minimum_comes_whole(
    least: int, consumers: int, wanted: int
) -> None:
    limits = QUEUE._replace(consumers_min=least)
    assert decide(limits, lag=12_000, consumers=consumers).wanted == wanted


@pytest.mark.parametrize(
    ("least", "passed_s", "consumers", "wanted"),
    [
        (0, SETTLE_S, 4, 8), (0, SETTLE_S - 0.1, 4, 4), (0, 1.0, 4, 4), (0, 1.0, 1, 1),
        (0, 1.0, 0, 1), (3, 1.0, 2, 3), (6, 1.0, 4, 6), (3, 1.0, 4, 4),
    ],
)
def test_after_an_increase_the_next_one_waits_until_it_has_settled(
    least: int, passed_s: float, consumers: int, wanted: int
) -> None:
    scaling = PoolScaling(QUEUE._replace(consumers_min=least))
    busy = {"handled": 100, "busy_s": 1.0}
    first = scaling.decide(look(0.0, (0, 12_000, 0.0), consumers=2, **busy))
    assert first.wanted == max(4, least)
    now = look(passed_s, (0, 12_000, 0.0), consumers=consumers, **busy)
    assert scaling.decide(now).wanted == wanted
    # What is no increase starts no new wait.
    later = look(SETTLE_S, (0, 12_000, 0.0), consumers=4, **busy)
    if wanted == consumers:
        assert scaling.decide(later).wanted == 8


def test_lag_that_stays_brings_one_more_each_time_the_last_one_has_settled() -> None:
    scaling = PoolScaling(QUEUE)
    busy = {"handled": 100, "busy_s": 1.0}
    consumers, found = 1, []
    for half_s in range(16):
        consumers = scaling.decide(look(
            half_s / 2, (0, 1, 20.0), consumers=consumers, running=consumers, **busy)).wanted
        found.append(consumers)
    assert found == [2] * 6 + [3] * 6 + [4] * 4


def test_lag_that_ends_before_the_last_one_has_settled_brings_no_further_one() -> None:
    scaling = PoolScaling(QUEUE)
    busy = {"handled": 100, "busy_s": 1.0}
    late = look(0.0, (0, 1, 20.0), **busy)
    assert scaling.decide(late).wanted == 2
    assert scaling.decide(late._replace(at_s=1.0, consumers=2, running=2)).wanted == 2
    for at_s in (2.0, 3.5, 4.5):
        assert scaling.decide(look(at_s, (1, 1), consumers=2, running=2, **busy)).wanted == 2
    assert scaling.decide(look(6.5, (1, 1), consumers=2, running=2, **busy)).wanted == 0


@settings(max_examples=40)
@given(
    st.integers(0, 9),
    st.lists(st.tuples(st.sampled_from([1.0, 2.0, 5.0, 6.0]), st.integers(0, 9)), max_size=12),
)
def test_as_many_stay_as_were_needed_at_any_time_of_the_cool_down(
    first: int, steps: list[tuple[float, int]]
) -> None:
    """One consumer handles a record a second, so as many are needed as wait."""
    scaling = PoolScaling(QUEUE._replace(target_lag_s=1.0))
    now_s, needed = 0.0, [(0.0, 10)]  # Those that run at the first look were needed.
    for passed_s, lag in [(0.0, first), *steps]:
        now_s += passed_s
        needed.append((now_s, lag))
        decision = scaling.decide(look(
            now_s, (100 - lag, 100, 0.0), consumers=10, running=10, handled=1, busy_s=1.0))
        wanted = max(count for at_s, count in needed if at_s >= now_s - 5.0)
        assert decision.wanted == wanted
        is_held = decision.reason == f"{wanted} were needed within the last 5 s"
        assert is_held == (wanted > lag)
