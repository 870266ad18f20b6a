"""The floors of the tests: one folder each, run fastest first.

Every test carries the mark of its floor, so that `pytest -m local` selects it and `make test-fast`
leaves the slow ones out. Below the floor `real` no test may start Ray. Where several processes run the
tests side by side (pytest-xdist), those that need Ray share one of them, and one Ray cluster.
"""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# A shell's background jobs and nohup ignore SIGINT, and programs that tests start and interrupt
# would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The time of an example depends on the load of the machine, so no test fails for it. Each run tries
# the same examples: otherwise one run in many would fail by chance.
settings.register_profile(
    "rayq", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("rayq")

FLOORS = ("pure", "storage", "wire", "client", "simulated", "local", "real", "project")
ROOT = Path(__file__).resolve().parent


def floor_of(path: Path) -> str:
    floor = path.relative_to(ROOT).parts[0]
    if floor not in FLOORS:
        raise pytest.UsageError(f"{path} stands on no floor: use one of {', '.join(FLOORS)}.")
    return floor


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(floor_of(item.path))
    items.sort(key=lambda item: FLOORS.index(floor_of(item.path)))


def pytest_collection_finish() -> None:
    """Each full collection would look through all modules and tests again, for 0.3 s."""
    gc.collect()
    gc.freeze()


class OneWorkerForRay(LoadScopeScheduling):
    """All tests of the floor `real` are one piece of work, begun first. Any other test is a piece
    of its own."""

    def _split_scope(self, nodeid: str) -> str:
        return "real" if nodeid.startswith("tests/real/") else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> OneWorkerForRay:
    return OneWorkerForRay(config, log)


def ray_runs_here() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


@pytest.fixture(autouse=True)
def ray_belongs_to_the_floor_real(request: pytest.FixtureRequest) -> Iterator[None]:
    before = ray_runs_here()
    yield
    if floor_of(request.path) not in ("real", "project") and not before and ray_runs_here():
        sys.modules["ray"].shutdown()
        pytest.fail("This test started Ray: it belongs to tests/real.")
