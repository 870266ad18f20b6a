"""`make mutants`: each operator, keys and samples, verdicts that outlive a killed run."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from proving.mutants import checks, report
from proving.mutants.catalogue import (
    MODULES,
    NOT_MUTATED,
    ROOT,
    Mutant,
    files,
    mutants_of,
    mutated,
    sample,
)
from proving.mutants.child import import_instead, is_imported_instead, run, scratch_directory
from proving.mutants.judge import reaching
from proving.mutants.operators import OPERATORS
from proving.mutants.planting import plant
from proving.mutants.state import State, Verdict, equivalents


def mutants(operator: str, source: str) -> list[str]:
    """The mutants of a snippet, each as its whole source."""
    return [
        ast.unparse(mutated(mutant, source))
        for mutant in mutants_of("a.py", source)
        if mutant.operator == operator
    ]


@pytest.mark.parametrize(
    "operator, source, expected",
    [
        ("bound_off_by_one", "a < b >= c", ["a <= b >= c", "a < b > c"]),
        ("comparison_negated", "a in b", ["a not in b"]),
        ("comparison_negated", "a < b", ["a >= b"]),
        ("condition_fixed", "if a:\n    b()", ["if True:\n    b()", "if False:\n    b()"]),
        ("condition_fixed", "a if b else c", ["a", "c"]),
        ("condition_fixed", "while a:\n    b()", ["while False:\n    b()"]),
        ("condition_fixed", "while True:\n    b()", []),
        ("condition_fixed", "[a for a in b if c if d]", ["[a for a in b if d]", "[a for a in b if c]"]),
        ("operand_dropped", "a and b and c", ["b and c", "a and c", "a and b"]),
        ("operand_dropped", "a or b", ["b", "a"]),
        ("negation_dropped", "not a", ["a"]),
        ("statement_dropped", "flush()", ["pass"]),
        ("statement_dropped", "async def f():\n    await flush()", ["async def f():\n    pass"]),
        ("statement_dropped", "self.a = b", ["pass"]),
        ("statement_dropped", "a = b", []),
        ("statement_dropped", "raise Wrong(f(1))", ["pass"]),
        ("statement_dropped", "def f():\n    return", []),
        ("lock_left_out", "with lock:\n    a()\n    b()", ["a()\nb()"]),
        ("lock_left_out", "with open() as file:\n    a()", []),
        ("arguments_swapped", "f(a, b, c)", ["f(b, a, c)", "f(a, c, b)"]),
        ("arguments_swapped", "f(a, a)", []),
        ("arguments_swapped", "f(a, *b)", []),
        ("field_not_carried", "replace(v, a=1, b=2)", ["replace(v, b=2)", "replace(v, a=1)"]),
        ("field_not_carried", "Request(a=1)", ["Request()"]),
        ("field_not_carried", "settle(a=1)", []),
        ("number_changed", "a = 7", ["a = 8"]),
        ("number_changed", "a = True", ["a = False"]),
        ("number_changed", "a = 'text'", []),
        ("sum_turned", "a + b", ["a - b"]),
        ("sum_turned", "'text' + b", []),
        ("sum_turned", "min(a, b)", ["max(a, b)"]),
    ],
)
def test_an_operator_makes_one_small_mistake_at_a_time(
    operator: str, source: str, expected: list[str]
) -> None:
    assert mutants(operator, source) == expected


def test_each_operator_has_a_snippet() -> None:
    (marked,) = test_an_operator_makes_one_small_mistake_at_a_time.pytestmark  # type: ignore[attr-defined]
    assert {case[0] for case in marked.args[1]} == set(OPERATORS)


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring."""',
        "logger.info('%d left', left + 1)",
        "self._metrics.counter(name, 1)",
        "log_event(logger, 1, 'ended', at=1)",
        "assert a < b",
        "def f(a: Literal[1]) -> tuple[2]:\n    ...",
        "@dataclass(slots=True)\nclass A:\n    ...",
        "class A(Struct, frozen=True):\n    ...",
        "import a",
    ],
)
def test_what_only_tells_or_declares_is_left_alone(source: str) -> None:
    assert mutants_of("a.py", source) == []


def test_a_key_survives_lines_that_move_and_tells_equal_code_apart() -> None:
    source = "def f():\n    if a < b:\n        g()\n    return a < b\n"
    moved = "# One more line.\n\n\nx = y\n" + source
    keys = [mutant.key for mutant in mutants_of("a.py", source)]
    assert len(set(keys)) == len(keys)
    assert keys == [mutant.key for mutant in mutants_of("a.py", moved)]
    assert "a.py:f: bound_off_by_one: a < b => a <= b #2" in keys


def test_a_mutant_whose_code_is_gone_is_not_planted() -> None:
    (mutant, *_) = mutants_of("a.py", "if a < b: pass")
    with pytest.raises(LookupError, match="any more"):
        mutated(mutant, "if a == b: pass")


def test_a_larger_sample_begins_with_the_smaller_one() -> None:
    found = mutants_of("a.py", "\n".join(f"if a{n} < b: f({n})" for n in range(50)))
    assert sample(found, 10, seed=1) == sample(found[::-1], 20, seed=1)[:10]
    assert sample(found, 10, seed=1) != sample(found, 10, seed=2)
    assert len(sample(found, None, seed=1)) == len(found)


def test_modules_are_named_as_files_folders_or_dotted(tmp_path: Path) -> None:
    (tmp_path / "rayq" / "core" / "cluster").mkdir(parents=True)
    (tmp_path / "rayq" / "core" / "cluster" / "election.py").touch()
    expected = ["rayq/core/cluster/election.py"]
    for name in ("rayq", "rayq/core", "rayq/core/cluster/election.py", "rayq.core.cluster.election"):
        assert files([name], tmp_path) == expected
    with pytest.raises(ValueError, match="no module rayq/core/elections"):
        files(["rayq/core/elections.py"], tmp_path)


def test_verdicts_outlive_a_run_that_was_killed_while_it_wrote(tmp_path: Path) -> None:
    state = State(tmp_path)
    state.add(Verdict("a", "tests", "hang"))
    with open(tmp_path / "verdicts.jsonl", "a") as file:
        file.write('{"key": "b", "flo')
    state.add(Verdict("c", None))
    state.add(Verdict("a", None))
    assert State(tmp_path).verdicts() == {"a": Verdict("a", None), "c": Verdict("c", None)}


def test_what_the_checks_run_is_watched_again_only_where_the_code_has_changed(
    tmp_path: Path,
) -> None:
    asked: list[list[str]] = []

    def watch(parts: Sequence[str]) -> dict[str, list[dict[str, str]]]:
        asked.append(list(parts))
        return {part: [{"name": part}] for part in parts if part != "empty"}

    for digests in ({"a": "1", "empty": "1"}, {"a": "1", "empty": "1"}, {"a": "2", "empty": "1"}):
        assert State(tmp_path).checks(digests, watch) == [{"name": "a"}]
    assert asked == [["a", "empty"], ["a"]]


def test_a_test_is_watched_again_with_its_file_and_with_what_its_floor_shares(
    tmp_path: Path,
) -> None:
    floor = tmp_path / "tests" / "pure"
    floor.mkdir(parents=True)
    for name in ("test_a.py", "test_b.py", "support.py"):
        (floor / name).touch()
    before = checks.digests_of_tests("pure", "1", tmp_path)
    (floor / "test_a.py").write_text("a = 1")
    after = checks.digests_of_tests("pure", "1", tmp_path)
    assert [after[file] == before[file] for file in sorted(after)] == [False, True]
    assert set(checks.digests_of_tests("pure/test_b.py", "1", tmp_path)) == {"tests/pure/test_b.py"}
    with pytest.raises(ValueError, match="no tests of pure/test_c.py"):
        checks.digests_of_tests("pure/test_c.py", "1", tmp_path)
    (floor / "support.py").write_text("a = 1")
    assert checks.digests_of_tests("pure", "1", tmp_path)["tests/pure/test_b.py"] not in (
        before.values()
    )


def test_two_runs_do_not_share_their_state(tmp_path: Path) -> None:
    with State(tmp_path).held(), pytest.raises(RuntimeError, match="Another run"):
        with State(tmp_path).held():
            pass


def test_a_mutant_is_judged_by_what_runs_its_function() -> None:
    in_function, in_class = mutants_of(
        "a.py", "def f():\n    if not g: pass\n\nclass A:\n    left = 1\n"
    )[-2:]
    assert (in_function.function, in_class.function) == ("f", "A.<class>")
    known = [
        checks.Check("ordinary:0", 3.0, 3.0, frozenset({"a.py:f", "a.py:A.g"})),
        checks.Check("tests/slow", 2.0, 2.0, frozenset({"a.py:f"})),
        checks.Check("tests/quick", 1.0, 1.0, frozenset({"a.py:f"})),
        checks.Check("tests/other", 1.0, 1.0, frozenset({"b.py:f"})),
    ]
    names = [one.name for one in reaching(in_function, known)]
    assert names == ["tests/quick", "tests/slow", "ordinary:0"]
    assert "tests/other" not in [one.name for one in reaching(in_class, known)]


def test_code_notes_the_functions_that_it_runs_under_the_names_of_the_catalogue() -> None:
    source = (
        '"""A docstring."""\n'
        "class A:\n"
        "    def f(self):\n"
        '        """Another one."""\n'
        "        def g():\n"
        "            return [h for h in ()]\n"
        "        return g()\n"
        "    def never(self): pass\n"
        "def loop():\n"
        "    while True:\n"
        "        yield\n"
        "running = loop()\n"
    )
    ran: list[str] = []
    names: dict[str, Any] = {checks.NOTE: ran.append}
    exec(compile(checks.noting("a.py", ast.parse(source)), "a.py", "exec"), names)
    assert ran == []
    names["A"]().f()
    assert ran == ["a.py:A.f", "a.py:A.f.g"]
    assert names["A"].f.__doc__ == "Another one."
    next(names["running"])
    ran.clear()
    next(names["running"])
    assert ran == ["a.py:loop"]


def test_the_table_counts_each_mutant_once() -> None:
    found = [Mutant("a.py", "f", "o", line, f"{line}", "x", 0) for line in range(5)]
    verdicts = {
        found[0].key: Verdict(found[0].key, "tests", "hang"),
        found[1].key: Verdict(found[1].key, "simulation", "ordinary:0: lost"),
        found[2].key: Verdict(found[2].key, None, tests=1, seeds=2),
        found[3].key: Verdict(found[3].key, None),
    }
    module, total = report.rows(found, verdicts, {found[3].key: "the same"})
    assert (module.mutants, module.judged, module.tests, module.simulation) == (5, 3, 1, 1)
    assert (module.survived, module.never_run, module.equivalent, module.hung) == (1, 0, 1, 1)
    assert total.judged == 3
    assert "| 67% (21% to 94%) |" in report.table([module])
    assert report.survivors(found[:3], verdicts) == ["a.py:2 f: o: 2 => x (1 tests, 2 seeds)"]


def test_each_equivalent_mutant_says_why() -> None:
    assert all(why for why in equivalents().values())


@pytest.mark.parametrize("path", sorted({key.partition(":")[0] for key in equivalents()}))
def test_each_equivalent_mutant_is_still_one(path: str) -> None:
    keys = {key for key in equivalents() if key.partition(":")[0] == path}
    found = {mutant.key for mutant in mutants_of(path, (ROOT / path).read_text())}
    assert keys - found == set(), "Name the code as it is now, or take it out of equivalent.toml."


def test_each_file_that_is_not_mutated_is_there() -> None:
    paths = [path for module in MODULES for path in (ROOT / module).rglob("*.py")]
    for name in NOT_MUTATED:
        assert any(path.match(name) for path in paths), name


def test_only_the_process_of_a_mutant_imports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "one_module_more.py"
    file.write_text("limit = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (mutant,) = mutants_of("one_module_more.py", file.read_text())

    def limit(directory: Path) -> list[object]:
        import_instead(mutant.module, mutated(mutant, "limit = 1\n"))
        module = importlib.import_module(mutant.module)
        return [module.limit, is_imported_instead(mutant.module)]

    with scratch_directory(tmp_path / "state") as scratch:
        ended = run(limit, scratch=scratch, cpu_limit_s=9, limit_s=90)
        assert (ended.returned, ended.why) == ([2, True], "")
    assert importlib.import_module("one_module_more").limit == 1
    assert not is_imported_instead("one_module_more")
    assert file.read_text() == "limit = 1\n"


def test_a_mutant_is_planted_into_a_module_that_is_imported_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "limit = 5\n\ndef is_below(number):\n    return number < limit\n"
    (tmp_path / "one_imported_module.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("one_imported_module")
    is_below = module.is_below
    mutants = {one.operator: one for one in mutants_of("one_imported_module.py", source)}

    def planted(operator: str, directory: Path) -> list[bool]:
        mutant = mutants[operator]
        is_planted = plant(mutant, mutated(mutant, source))
        return [is_planted, is_below(4), is_below(5), module.limit == 5]

    with scratch_directory(tmp_path / "state") as scratch:
        for operator, expected in (
            ("bound_off_by_one", [True, True, True, True]),
            ("comparison_negated", [True, False, True, True]),
            ("number_changed", [False, True, False, True]),  # It is outside of functions.
        ):
            ended = run(partial(planted, operator), scratch=scratch, cpu_limit_s=9, limit_s=90)
            assert (ended.returned, ended.why) == (expected, "")
    assert is_below(4) and not is_below(5)


def test_a_process_that_hangs_or_crashes_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    def hang(directory: Path) -> None:
        while True:
            pass

    def crash(directory: Path) -> None:
        raise ValueError("wrong")

    with scratch_directory(tmp_path) as scratch:
        assert run(lambda _: "fine", scratch=scratch, cpu_limit_s=9, limit_s=90).returned == "fine"
        assert run(hang, scratch=scratch, cpu_limit_s=90, limit_s=0.2).why == "hang"
        ended = run(crash, scratch=scratch, cpu_limit_s=9, limit_s=90)
        assert (ended.returned, ended.why) == (None, "crash: ValueError: wrong")
        assert list(scratch.iterdir()) == []
    assert list(tmp_path.iterdir()) == []
