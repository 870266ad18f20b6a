"""State of a run, from which the next one continues: `.mutants/` in the working tree.

`verdicts.jsonl` gets a line for each verdict as soon as it is known; the latest verdict on a mutant
counts. `checks.json` says what each test and each seed runs. A run may be killed at any point: half
a line is not read, and no file is overwritten in place.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from proving.mutants.catalogue import ROOT

STATE = ROOT / ".mutants"
EQUIVALENT = Path(__file__).with_name("equivalent.toml")


@dataclass(frozen=True)
class Verdict:
    """`floor` is the floor that killed the mutant, "tests" or "simulation"; None where the mutant
    survived `tests` tests and `seeds` seeds. `how` tells which check failed and why; or it is
    "hang", or "crash"."""

    key: str
    floor: str | None
    how: str = ""
    tests: int = 0
    seeds: int = 0
    cpu_s: float = 0.0


class State:
    """The directory of one run at a time. Raises RuntimeError where another run uses it."""

    def __init__(self, directory: Path = STATE) -> None:
        self.directory = directory
        self._path = directory / "verdicts.jsonl"
        self._checks = directory / "checks.json"

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self.directory.mkdir(parents=True, exist_ok=True)
        with open(self.directory / "lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                message = f"Another run works in {self.directory}: end it first."
                raise RuntimeError(message) from None
            yield

    def verdicts(self) -> dict[str, Verdict]:
        """The latest verdict on each mutant, by its key."""
        found: dict[str, Verdict] = {}
        if self._path.exists():
            for line in self._path.read_text().split("\n"):
                with contextlib.suppress(json.JSONDecodeError):
                    verdict = Verdict(**json.loads(line))
                    found[verdict.key] = verdict
        return found

    def add(self, verdict: Verdict) -> None:
        # The line before may have been cut short, so this line begins with a line break.
        with open(self._path, "a") as file:
            file.write("\n" + json.dumps(asdict(verdict)) + "\n")

    def checks(
        self,
        digests: Mapping[str, str],
        watch: Callable[[Sequence[str]], Mapping[str, list[dict[str, Any]]]],
    ) -> list[dict[str, Any]]:
        """The checks of these parts, each by its digest. Calls `watch(parts)` now for the parts
        whose checks are not known under that digest."""
        known = json.loads(self._checks.read_text()) if self._checks.exists() else {}
        due = [part for part in digests if known.get(part, {}).get("digest") != digests[part]]
        if due:
            watched = watch(due)
            for part in due:
                known[part] = {"digest": digests[part], "checks": watched.get(part, [])}
            new = self._checks.with_suffix(".new")
            new.write_text(json.dumps(known))
            os.replace(new, self._checks)
        return [check for part in digests for check in known[part]["checks"]]


def equivalents(path: Path = EQUIVALENT) -> dict[str, str]:
    """Mutants that change nothing that matters: the reason by key."""
    return {
        mutant["key"]: mutant["why"] for mutant in tomllib.loads(path.read_text()).get("mutant", [])
    }
