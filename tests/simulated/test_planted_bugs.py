"""Each planted bug is found by the seeds of its scenario: the simulation can fail."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from typing import Any

import pytest

from proving.mutants.catalogue import ROOT
from proving.simulation import buggify
from proving.simulation.mutations import MUTATIONS
from proving.simulation.planted import planted
from proving.simulation.situations import watched
from tests.simulated.support import found_by

SEEDS_MAX = 200
POSITIONAL, KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY

FIRST_SEEDS = {
    "epoch_kept_over_restart": 1000,
    "empty_disk_trusted": 1000,
    "shortest_log_adopted": 1000,
    "promise_not_written": 1000,
    "election_outside_the_isr": 501,
    "flush_result_from_before_a_truncation": 75,
    "isr_joined_at_a_stale_high_watermark": 1,
    "undecided_proposal_forgotten": 8,
    "closed_segment_not_synced": 1000,
    "duplicates_not_recognised": 500,
    "producers_forgotten_in_recovery": 1000,
    "producers_kept_over_truncation": 502,
    "committed_records_cut": 4,
    "uncommitted_metadata_applied": 1000,
    "body_crc_skipped": 503,
    "failed_sync_tried_again": 1000,
    "page_cache_trusted_in_recovery": 1000,
    "batch_in_doubt_numbered_again": 1000,
    "horizon_ignored": 15,
    "directory_removed_by_old_metadata": 6,
    "refusal_of_an_older_proposal_believed": 61,
    "pointer_moved_by_any_leader": 12,
    "unknown_commit_cleaned_up": 12,
    "truncated_stays_done": 5,
    "cut_within_the_state_epoch": 5,
    "purge_not_kept": 93,
    "old_leader_writes": 4,
    "deleted_by_a_leaping_clock": 3,
    "garbage_by_a_leaping_clock": 3,
    "renewed_pins_keep_their_time": 8,
    "audit_starts_over": 1,
    "revoked_stays_connected": 1,
    "deny_ignored": 1,
    "cache_outlives_change": 1,
    "held_fetch_unchecked": 1,
    "family_of_another": 1,
    "numbers_begin_again": 1,
    "patience_without_end": 1,
    "forwarded_as_superuser": 1,
    "quota_per_process": 6,
}
"""The first seed of each hunt, so that a hunt need not look for long; other seeds would do, too."""

EASY = (
    "high_watermark_without_followers",
    "end_acknowledged_instead_of_flushed",
    "nothing_is_synced",
)
SAMPLE = (
    "duplicates_not_recognised",
    "epoch_kept_over_restart",
    "empty_disk_trusted",
    "promise_not_written",
    "truncation_to_the_high_watermark",
    "committed_records_cut",
    "failed_sync_tried_again",
    "lock_ignored",
    "short_write_believed",
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "name", [*EASY, *(pytest.param(name, marks=pytest.mark.thorough) for name in SAMPLE)]
)
def test_a_planted_bug_is_found_within_a_few_seeds(name: str) -> None:
    first = FIRST_SEEDS.get(name, 0)
    assert found_by(name, f"{first}:{first + 20}")


@pytest.mark.slow
@pytest.mark.hunt
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_is_found_within_two_hundred_seeds(name: str) -> None:
    first = FIRST_SEEDS.get(name, 0)
    assert found_by(name, f"{first}:{first + SEEDS_MAX}", "--processes", "2")


def test_a_planted_bug_is_taken_out_again() -> None:
    for name, mutation in MUTATIONS.items():
        before = [getattr(target, attribute) for target, attribute, _ in mutation.patches()]
        with planted(name):
            pass
        assert [getattr(target, attribute) for target, attribute, _ in mutation.patches()] == before


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_can_be_called_like_the_code_that_it_replaces(name: str) -> None:
    for target, attribute, instead in MUTATIONS[name].patches():
        original = inspect.getattr_static(target, attribute)
        if isinstance(original, property):
            assert isinstance(instead, property | None)
            continue
        if not inspect.isfunction(code := _code(original)):
            continue
        assert isinstance(original, staticmethod) == isinstance(instead, staticmethod)
        assert inspect.iscoroutinefunction(code) == inspect.iscoroutinefunction(_code(instead))
        parameters = inspect.signature(code).parameters.values()
        positional = [parameter.name for parameter in parameters if parameter.kind <= POSITIONAL]
        keywords = {parameter.name: parameter for parameter in parameters if parameter.kind is KEYWORD}
        inspect.signature(_code(instead)).bind(*positional, **keywords)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_uses_what_its_object_has(name: str) -> None:
    for target, _, instead in MUTATIONS[name].patches():
        code = _code(instead)
        if not inspect.isclass(target) or not inspect.isfunction(code):
            continue
        source = inspect.getsource(code)
        own = set(re.findall(r"\bself\.(\w+) = ", source))
        assert set(re.findall(r"\bself\.(\w+)", source)) <= own | _names_of(target)


def test_probes_and_points_patch_what_is_there() -> None:
    with watched(), buggify.patched(frozenset(buggify.CONSTANTS)):
        pass


def test_planted_bugs_and_probes_use_no_name_that_is_gone() -> None:
    simulation = ROOT / "proving/simulation"
    known = {*dir(inspect)}
    for path in (*(ROOT / "rayq").rglob("*.py"), simulation / "planted.py"):
        known.update(re.findall(r"\w+", path.read_text()))
    gone = []
    for path in (*simulation.glob("mutations*.py"), simulation / "situations.py"):
        tree = ast.parse(path.read_text())
        attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        known_here = known | {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
        gone += [
            f"{path.name}:{node.lineno}: {ast.unparse(node)}"
            for node in attributes
            if node.attr not in known_here and not hasattr(object, node.attr)
        ]
    assert gone == []


@functools.cache
def _names_of(kind: type) -> set[str]:
    """The names that the code of a class uses of its instances."""
    sources = [inspect.getsource(base) for base in kind.__mro__ if base.__module__.startswith("rayq.")]
    return {*dir(kind)}.union(*(re.findall(r"\bself\.(\w+)", source) for source in sources))


def _code(attribute: object) -> Any:
    if isinstance(attribute, property):
        return attribute.fget
    return attribute.__func__ if isinstance(attribute, staticmethod | classmethod) else attribute


def test_there_are_sixteen_or_more_and_each_names_its_rule() -> None:
    assert len(MUTATIONS) >= 16
    assert all(mutation.rule and mutation.what for mutation in MUTATIONS.values())
