"""The validity of signed URLs, and the clients that get any."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayq.config import ClusterConfig
from rayq.core.remote.urls import VALID_MS_MAX, VALID_MS_MIN, DirectReads, url_validity_ms
from rayq.errors import ConfigError

NOW_MS = 1_700_000_000_000
times = st.integers(-10 * VALID_MS_MAX, 10 * VALID_MS_MAX)


@given(
    wanted_ms=st.integers(0, 3_600_000),
    principal=st.sampled_from([None, "anna"]),
    left_ms=st.none() | times,
    direct_reads=st.sampled_from(get_args(DirectReads)),
)
def test_urls_are_valid_for_no_longer_than_asked_for_a_quarter_of_an_hour_or_the_token(
    wanted_ms: int, principal: str | None, left_ms: int | None, direct_reads: DirectReads
) -> None:
    valid_ms = url_validity_ms(
        wanted_ms,
        direct_reads=direct_reads,
        principal=principal,
        token_expires_ms=None if left_ms is None else NOW_MS + left_ms,
        now_ms=NOW_MS,
    )
    most_ms = min(wanted_ms, 15 * 60_000, wanted_ms if left_ms is None else left_ms)
    gets_any = direct_reads == "all" or (direct_reads == "superuser" and principal is None)
    assert valid_ms == (most_ms if gets_any and most_ms >= VALID_MS_MIN else 0)


def test_each_client_reads_directly_unless_the_cluster_says_otherwise() -> None:
    assert ClusterConfig().remote_direct_reads == "all"


@pytest.mark.parametrize("wrong", ["", "everybody"])
def test_another_word_is_no_config(wrong: object) -> None:
    with pytest.raises(ConfigError, match="remote_direct_reads"):
        ClusterConfig(remote_direct_reads=wrong)  # type: ignore[arg-type]
