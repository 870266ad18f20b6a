"""Planting of a bug in this process, which knows all of them: a pool of processes imports this.

A bug that replaces something which is not there cannot be planted, so no run takes correct code for
code with a bug.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from unittest import mock

from proving.simulation.mutations import MUTATIONS
from proving.simulation.patches import applied


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Plants a bug for the length of a `with` block."""
    with applied(MUTATIONS[name].patches()):
        yield


def plant(name: str) -> None:
    """Plants a bug for the whole life of this process, which runs seeds for a hunt."""
    logging.getLogger("rayq").setLevel(logging.CRITICAL + 1)
    for target, attribute, instead in MUTATIONS[name].patches():
        mock.patch.object(target, attribute, instead).start()
