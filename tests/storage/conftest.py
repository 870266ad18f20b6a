from __future__ import annotations

from pathlib import Path

import pytest

from tests.storage.support import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "topic-0")
