"""The output of `rayq` fits a terminal, and breaks no word and no number."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from rayq.cli.app import app
from rayq.cli.layout import fold, lay_out, width_of
from rayq.cli.main import run

WORDS = st.text("abc_-./:=", min_size=1, max_size=12)
CELLS = st.lists(st.one_of(WORDS, st.integers(0, 10**12).map(str)), max_size=4).map(" ".join)


def test_a_line_folds_where_words_end_and_hangs() -> None:
    assert fold("a line of words", 80) == ["a line of words"]
    assert fold("  why:  one two three", 12, hang=6) == ["  why:  one", "        two", "        three"]
    assert fold("", 10) == [""]
    assert fold("aWordThatIsTooLong in a line", 10) == ["aWordThatIsTooLong", "in a line"]
    assert fold("12.5 MiB of 1,234 records", 8) == ["12.5 MiB", "of 1,234", "records"]
    assert fold("topic=t,partition=0,brokers=1,2", 18) == ["topic=t,", "partition=0,", "brokers=1,2"]
    assert fold("漢字 漢字", 8) == ["漢字", "漢字"]


@given(CELLS, st.integers(1, 40))
def test_a_folded_line_has_the_same_words_and_no_needless_ends(text: str, width: int) -> None:
    lines = fold(text, width)
    assert " ".join(lines) == text
    for line, after in zip(lines, lines[1:], strict=False):
        assert width_of(f"{line} {after.split(' ')[0]}") > width


def laid(
    rows: list[list[str]], width: int | None, *optional: str
) -> tuple[list[str], list[list[str]], list[str]]:
    head = ["name", "size", "what it is"][: len(rows[0])]
    found = lay_out(head, rows, is_number=[False, True, False], width=width, optional=optional)
    return found.head, found.rows, found.left_out


def test_a_table_folds_then_leaves_out_then_goes_below_each_other() -> None:
    rows = [["flights", "12", "a topic of records"], ["t", "1048576", "-"]]
    assert laid(rows, None) == laid(rows, 40)
    assert laid(rows, 40)[1] == [
        ["flights       12  a topic of records"],
        ["t        1048576  -"],
    ]
    assert laid(rows, 28)[1][0] == ["flights       12  a topic of", "                  records"]
    head, folded, left_out = laid(rows, 20, "what it is", "size")
    assert (head, left_out) == (["name        size"], ["what it is"])
    assert folded[1] == ["t        1048576"]
    assert laid(rows, 20)[1][0] == [
        "name        flights",
        "size        12",
        "what it is  a topic",
        "            of",
        "            records",
        "",
    ]


@given(st.lists(st.lists(CELLS, min_size=3, max_size=3), min_size=1, max_size=4), st.data())
def test_no_word_of_a_table_is_broken_and_no_line_too_long(
    rows: list[list[str]], data: st.DataObject
) -> None:
    width = data.draw(st.integers(30, 80))
    optional = data.draw(st.sampled_from([(), ("size",), ("name", "size")]))
    head, lines, left_out = laid(rows, width, *optional)
    words = {word for row in rows for cell in row for word in cell.split()}
    longest = max(map(width_of, words), default=0)
    for row, shown in zip(rows, lines, strict=True):
        assert set(" ".join(shown).split()) <= words | {"name", "size", "what", "it", "is"}
        if not left_out:
            assert {word for cell in row for word in cell.split()} <= set(" ".join(shown).split())
        assert all(width_of(line) <= max(width, longest + 14) for line in shown)
    if head:
        assert all(width_of(line) <= width for row in lines for line in row)


def verbs(command: object, *path: str) -> Iterator[tuple[str, ...]]:
    yield path
    for name, below in getattr(command, "commands", {}).items():
        yield from verbs(below, *path, name)


@pytest.mark.slow
@pytest.mark.parametrize("verb", list(verbs(typer.main.get_command(app))))
def test_help_fits_80_columns_and_nothing_of_it_is_cut(
    verb: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run([*verb, "-h"])
    out = capsys.readouterr().out
    assert "Usage: rayq" in out and "…" not in out
    assert max(map(len, out.splitlines())) <= 80
