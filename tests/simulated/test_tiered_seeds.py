"""Seeds of topics whose old records are in an object store, and bugs planted into that."""

from __future__ import annotations

import pytest

from tests.simulated.support import found_by, passing

TIERED = ("--scenario", "tiered")
WITH_TRANSACTIONS = ("--scenario", "tiered-transactions")
QUICK_HUNTS = {
    "pages_stored_later": "0",
    "producers_of_the_logs_end": "0",
    "producers_of_the_first_manifest": "0",
    "last_epoch_of_a_manifest": "0",
    "stored_above_the_high_watermark": "0",
    "dropped_before_the_commit": "1",
    "log_start_at_the_local_start": "0",
    "epochs_cut_at_the_local_start": "0",
    "follower_begins_at_the_high_watermark": "0",
    "deleted_before_the_list": "0",
    "deleted_without_delay": "0",
    "pins_ignored": "0",
    "pins_end_early": "0",
    "garbage_forgotten": "0",
    "aborted_transactions_not_told": "0",
    "stored_above_the_last_stable_offset": "0",
}
"""Planted bugs, and the first seeds that find them; `make hunt` plants the others."""


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_records_in_an_object_store_are_kept_under_faults() -> None:
    # 91: a list is deleted before any broker has heard what replaced it.
    assert " passed" in passing(*TIERED, "0:8,91")


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_transactions_in_an_object_store_keep_their_promises() -> None:
    assert " passed" in passing(*WITH_TRANSACTIONS, "0:2")


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", QUICK_HUNTS)
def test_a_bug_planted_into_remote_storage_is_found(name: str) -> None:
    assert found_by(name, QUICK_HUNTS[name])
