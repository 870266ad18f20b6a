"""Levels of compatibility: which earlier versions a new one has to fit, and in which direction."""

from __future__ import annotations

import enum


class CompatibilityLevel(enum.Enum):
    """A level by its name in the API.

    BACKWARD: the new version reads what earlier ones wrote. FORWARD: earlier versions read what the
    new one writes. FULL is both. The level alone concerns the latest version; with _TRANSITIVE it
    concerns all of them.
    """

    NONE = "NONE"
    BACKWARD = "BACKWARD"
    BACKWARD_TRANSITIVE = "BACKWARD_TRANSITIVE"
    FORWARD = "FORWARD"
    FORWARD_TRANSITIVE = "FORWARD_TRANSITIVE"
    FULL = "FULL"
    FULL_TRANSITIVE = "FULL_TRANSITIVE"

    @property
    def transitive(self) -> bool:
        """True if all earlier versions count, not the latest alone."""
        return self.value.endswith("_TRANSITIVE")

    @property
    def backward(self) -> bool:
        """True if the new version has to read what earlier ones wrote."""
        return self.value.startswith(("BACKWARD", "FULL"))

    @property
    def forward(self) -> bool:
        """True if earlier versions have to read what the new one writes."""
        return self.value.startswith(("FORWARD", "FULL"))
