"""The lines of Ray that reach a driver: all but those that are no news."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
from ray._private import ray_logging

from rayq.runtime.ray.noise import leave_out_noise, without_token_warning

NOISE = [
    "WARNING: 8 PYTHON worker processes have been started on node: 8e6f with address: 192.0.2.2",
    "[2026-11-22 06:29:34,886 I 4839 4871] gcs_client.cc:96: GcsClient has no Cluster ID set, and",
]
NEWS = [
    "partition_offline topic=flights partition=0",
    "[2026-11-22 06:29:34,886 E 4839 4871] gcs_client.cc:96: Failed to connect to GCS.",
]


@pytest.mark.parametrize("users", [None, "spam|eggs"])
def test_only_what_is_no_news_is_left_out(
    users: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    skipped = None if users is None else re.compile(users)
    for name in ("stdout_deduplicator", "stderr_deduplicator"):
        made = ray_logging.LogDeduplicator(5, None, users)
        assert made.skip_re == skipped
        monkeypatch.setattr(ray_logging, name, made)
    leave_out_noise()
    leave_out_noise()  # each call of rayq.connect() does this
    batch: Any = {"ip": "192.0.2.2", "pid": "raylet", "lines": [*NOISE, "spam", *NEWS]}
    for deduplicator in (ray_logging.stdout_deduplicator, ray_logging.stderr_deduplicator):
        said = [line for one in deduplicator.deduplicate(batch) for line in one["lines"]]
        assert said == (["spam"] if users is None else []) + NEWS


def test_the_warning_of_the_token_is_back_afterwards() -> None:
    logger = logging.getLogger("ray._private.authentication.authentication_token_setup")
    with without_token_warning():
        assert not logger.isEnabledFor(logging.WARNING)
    assert logger.isEnabledFor(logging.WARNING)
