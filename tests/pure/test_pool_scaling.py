"""How many consumers a pool wants, against a topic and consumers that a test plays."""

from __future__ import annotations

import itertools
import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayq.core.pool_scaling import (
    POINTS_MAX,
    SETTLE_S,
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


def test_a_pool_that_starts_anew_keeps_the_consumers_it_finds_for_a_cool_down() -> None:
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


def test_a_topic_that_was_made_anew_is_dated_anew() -> None:
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
