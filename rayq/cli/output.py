"""Output of commands: tables for people, columns for pipes, JSON for programs; progress bars.

All output is `visible`: no name or message acts on a terminal. (`consume` prints the bytes of
records unchanged.)
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

from rayq.cli.layout import fold, lay_out
from rayq.cli.terminal_safe import visible, visible_json
from rayq.errors import counted as counted

# Rich is imported only where a terminal shows its output: it takes as long to load as the rest of a
# verb does.

Advance = Callable[[int], None]
"""Called with the total that is done so far."""
Cell = object
PATIENCE_S = 5.0
"""The time after which a person is told what a command waits for."""
_patient: list[threading.Event] = []
STYLES = {"error": "bold red", "warning": "yellow", "notice": "cyan", "ok": "green"}


def say(text: str = "", *, hang: int = 0) -> None:
    """Prints one line on stdout. On a terminal it folds at the terminal's width, and `hang` spaces
    stand before each further line."""
    for line in _folded(text, sys.stdout, hang):
        sys.stdout.write(line + "\n")


def note(text: str) -> None:
    """Prints one line on stderr, folded likewise."""
    for line in _folded(text, sys.stderr):
        sys.stderr.write(line + "\n")


def _folded(text: str, stream: TextIO, hang: int = 0) -> list[str]:
    shown = visible(text)
    return fold(shown, terminal_width(), hang) if stream.isatty() else [shown]


def terminal_width() -> int:
    """The terminal's width in characters. COLUMNS gives it where the terminal does not."""
    return shutil.get_terminal_size().columns


def print_json(value: Any) -> None:
    text = msgspec.json.format(msgspec.json.encode(value)).decode()
    sys.stdout.write(visible_json(text) + "\n")


def print_json_line(value: Any) -> None:
    sys.stdout.write(visible_json(msgspec.json.encode(value).decode()) + "\n")


def print_json_of(asked: Sequence[str], found: Sequence[Any]) -> None:
    """Prints what was found for each name that was asked for: an object for one name, a list for
    several."""
    print_json(found[0] if len(asked) == 1 else found)


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    styles: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> None:
    """Prints a table. On a terminal it is as wide as that, and leaves out `optional` columns, the
    first of them first, where they have no room. In a pipe it has all columns, never folded.
    `styles` are the styles of the rows, by their names in `STYLES`."""
    listed = list(rows)
    cells = [[_text(cell) for cell in row] for row in listed]
    numeric = [
        all(row[column] is None or _is_number(row[column]) for row in listed)
        for column in range(len(head))
    ]
    is_terminal = sys.stdout.isatty()
    laid = lay_out(
        head,
        cells,
        is_number=numeric,
        width=terminal_width() if is_terminal else None,
        optional=optional,
    )
    if not is_terminal:
        for line in (*laid.head, *(line for row in laid.rows for line in row)):
            sys.stdout.write(line + "\n")
        return
    _print_styled(laid.head, "bold")
    for number, lines in enumerate(laid.rows):
        _print_styled(lines, STYLES.get(styles[number], "") if number < len(styles) else "")
    if laid.left_out:
        say(f"(No room here for {', '.join(laid.left_out)}: a wider terminal, or --json.)")


def heading(text: str) -> None:
    _say_styled(text, "bold")


def verdict(text: str, kind: str) -> None:
    """Prints a line in the color of its `kind`, one of `STYLES`."""
    _say_styled(text, STYLES[kind])


def _say_styled(text: str, style: str) -> None:
    if sys.stdout.isatty():
        _print_styled(_folded(text, sys.stdout), style)
    else:
        say(text)


def _print_styled(lines: Iterable[str], style: str) -> None:
    """Prints lines that fit a terminal's width."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout)
    for line in lines:
        console.print(Text(line, style=style), soft_wrap=True)


def human_size(size_bytes: int | None) -> str:
    if size_bytes is None:
        return "-"
    size, units = float(size_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def moment(timestamp_ms: int | None) -> str:
    if timestamp_ms is None:
        return "-"
    try:
        at = datetime.fromtimestamp(timestamp_ms / 1000, tz=UTC)
    except (ValueError, OverflowError):  # A record's time is what its producer says.
        return f"{timestamp_ms} ms"
    return at.isoformat(sep=" ", timespec="milliseconds").replace("+00:00", "Z")


def config_text(value: object) -> str:
    """The value of a config as a user would type it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)


def config_table(config: Mapping[str, object], defaults: Mapping[str, object], kind: str) -> None:
    """Prints each key, its value, and whether the topic or queue (`kind`) has one of its own."""
    table(
        ("config", "value", "source"),
        [
            (key, config_text(value), "default" if value == defaults.get(key) else kind)
            for key, value in config.items()
        ],
    )


def numbers(values: Iterable[int]) -> str:
    return ",".join(map(str, values)) or "-"


@contextlib.contextmanager
def progress(what: str, total: int | None, *, wanted: bool = True) -> Iterator[Advance]:
    """Shows a bar on stderr while work is under way; no bar where stderr is not a terminal."""
    if not wanted or not sys.stderr.isatty():
        yield lambda _: None
        return
    hush()
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    count = MofNCompleteColumn() if total is not None else TextColumn("{task.completed:,}")
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),  # Or the numbers are cut where there are 80 columns.
        TaskProgressColumn(),
        count,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as bar:
        task = bar.add_task(visible(what), total=total)
        yield lambda done: bar.update(task, completed=done)


@contextlib.contextmanager
def patience(waits_for: Callable[[], str | None]) -> Iterator[None]:
    """Prints once on stderr what is waited for: the first text that `waits_for` returns, which is
    asked every PATIENCE_S seconds, in another thread."""
    ended = threading.Event()
    _patient.append(ended)

    def watch() -> None:
        while not ended.wait(PATIENCE_S):
            text = waits_for()
            if text is not None and not ended.is_set():
                with contextlib.suppress(OSError, ValueError):  # stderr is closed, or gone
                    note(text)
                return

    threading.Thread(target=watch, name="rayq-patience", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        _patient.remove(ended)


def hush() -> None:
    """The person knows what is waited for, or it is for the person: `patience` says nothing."""
    for ended in _patient:
        ended.set()


@contextlib.contextmanager
def waiting(what: str, *, wanted: bool = True) -> Iterator[None]:
    """Shows on stderr that work is under way which cannot be counted."""
    if not wanted or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.text import Text

    hush()
    with Console(stderr=True).status(Text(visible(what))):
        yield


def _is_number(cell: Cell) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return f"{cell:.2f}" if isinstance(cell, float) else visible(str(cell))
