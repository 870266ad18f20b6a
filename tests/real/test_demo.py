"""`make demo`, whole: the main job of the project."""

from __future__ import annotations

import pytest

from tests.ahead import Done


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.ahead("-m", "rayq.demo")
def test_the_demo_accounts_for_every_flight_and_cleans_up(ahead: Done) -> None:
    assert ahead.returncode == 0, ahead.stdout + ahead.stderr
    assert "336,776" in ahead.stdout
    assert "paused for" in ahead.stdout
    assert "All of it held." in ahead.stdout
    assert ahead.left == []
