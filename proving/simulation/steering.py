"""Seeds of `swarm` that are steered towards situations which few seeds have met.

A seed alone draws its features (clients, kinds of faults, points of `buggify`) by even chances.
Steered, it prefers those which were there when rare situations were met, and those that were
seldom tried. What it chose is printed with a failure: the seed and its features are the run.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from proving.simulation.buggify import POINTS, POINTS_MAX
from proving.simulation.run import Outcome, run_watched
from proving.simulation.situations import SITUATIONS
from proving.simulation.workload_swarm import CLIENTS, FAULT_KINDS_MAX, FAULTS

BATCH_SEEDS = 4
"""Number of seeds whose features are chosen by what earlier seeds met, on any number of cores."""
EVEN_WEIGHT = 0.1
"""A feature's weight in any case: no feature is given up."""
Task = tuple[int, frozenset[str]]
Runs = Callable[[Callable[[Task], Outcome], Iterable[Task]], Iterable[Outcome]]
"""`map`, or that of a pool."""


class Steering:
    """Counts of the situations that seeds with each feature have met."""

    def __init__(self) -> None:
        self._met: Counter[str] = Counter()
        self._tried: Counter[str] = Counter()
        self._together: Counter[tuple[str, str]] = Counter()

    def heard(self, features: Iterable[str], situations: Iterable[str]) -> None:
        """Learns of one seed."""
        met = list(situations)
        self._met.update(met)
        for feature in features:
            self._tried[feature] += 1
            self._together.update((feature, situation) for situation in met)

    def weight(self, feature: str) -> float:
        """Score of a feature: the sum over all situations of how rare the situation is, times how
        often it was met with the feature."""
        tried = self._tried[feature] + 1
        return EVEN_WEIGHT + sum(
            (self._together[feature, situation] + 0.5) / tried / (1 + self._met[situation]) ** 2
            for situation in SITUATIONS
        )

    def choose(self, seed: int) -> frozenset[str]:
        """The features of a seed, by random numbers of their own."""
        rng = random.Random(f"{seed}/steering")
        return frozenset(
            [
                *self._some(CLIENTS, rng.randint(1, len(CLIENTS)), rng),
                *self._some(list(FAULTS), rng.randint(1, FAULT_KINDS_MAX), rng),
                *self._some(list(POINTS), rng.randint(0, POINTS_MAX), rng),
            ]
        )

    def _some(self, features: Sequence[str], count: int, rng: random.Random) -> list[str]:
        # The greatest of u ** (1 / weight) are a sample by weights without putting back.
        drawn = {feature: rng.random() ** (1 / self.weight(feature)) for feature in features}
        return sorted(features, key=lambda feature: -drawn[feature])[:count]


def run_steered(task: Task) -> Outcome:
    """Runs a seed with its features, and watches which situations it meets."""
    seed, features = task
    return run_watched(seed, "swarm", features)


def outcomes(seeds: Sequence[int], runs: Runs) -> Iterator[Outcome]:
    """Runs the seeds in batches. The features of a batch follow from all batches before it."""
    steering = Steering()
    for first in range(0, len(seeds), BATCH_SEEDS):
        tasks = [(seed, steering.choose(seed)) for seed in seeds[first : first + BATCH_SEEDS]]
        for (_, features), outcome in zip(tasks, runs(run_steered, tasks), strict=True):
            steering.heard(features, outcome.situations)
            yield outcome
