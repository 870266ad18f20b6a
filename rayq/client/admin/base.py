"""Base of the classes that `AsyncAdmin` consists of, one for each subject."""

from __future__ import annotations

from rayq.client.client import Client
from rayq.client.timeouts import time_left_s

ADMIN_TIMEOUT_S = 30.0
"""Default of every call's `timeout_s`."""


class AdminMethods:
    """Methods of `AsyncAdmin`."""

    def __init__(self, client: Client, *, awaits_callbacks: bool) -> None:
        self._client = client
        self._awaits_callbacks = awaits_callbacks


class Call:
    """One call of an admin, which may ask several times within `timeout_s`."""

    def __init__(self, client: Client, timeout_s: float) -> None:
        self.client = client
        self.deadline = client.now + timeout_s

    @property
    def left_s(self) -> float:
        """The seconds that are left. Raises TimeoutError once they are over."""
        return time_left_s(self.client.now, self.deadline)
