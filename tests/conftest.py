"""The floors of the tests: one folder each, run fastest first.

Every test carries the mark of its floor, so that `pytest -m local` selects it and `make test-fast`
leaves the slow ones out. Below the floor `real` no test may start Ray.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ahead import Ahead, Done

# In the background of a shell, or under nohup, SIGINT is ignored, and so it would be by the programs
# that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

FLOORS = ("pure", "storage", "wire", "client", "simulated", "local", "real", "project")
ROOT = Path(__file__).resolve().parent
AHEAD = pytest.StashKey[Ahead]()


def floor_of(path: Path) -> str:
    floor = path.relative_to(ROOT).parts[0]
    if floor not in FLOORS:
        raise pytest.UsageError(f"{path} stands on no floor: use one of {', '.join(FLOORS)}.")
    return floor


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(floor_of(item.path))
    items.sort(key=place_of)


def place_of(item: pytest.Item) -> tuple[int, bool]:
    """Who waits for a command that runs ahead comes when it had time: last before Ray's tests, which
    need the cores themselves."""
    if item.get_closest_marker("ahead") is not None:
        return FLOORS.index("local"), True
    return FLOORS.index(floor_of(item.path)), False


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[AHEAD] = commands = Ahead()
    if session.config.option.collectonly:
        return
    for item in session.items:
        mark = item.get_closest_marker("ahead")
        if mark is not None:
            commands.begin(mark.args, **mark.kwargs)


def pytest_sessionfinish(session: pytest.Session) -> None:
    commands = session.config.stash.get(AHEAD, None)
    if commands is not None:
        commands.end()


@pytest.fixture
def ahead(request: pytest.FixtureRequest) -> Done:
    """What the command of the test's mark `ahead` returned and printed."""
    mark = request.node.get_closest_marker("ahead")
    return request.config.stash[AHEAD].begin(mark.args, **mark.kwargs).result()


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
