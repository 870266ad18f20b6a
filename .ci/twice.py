"""Runs pytest, and what failed once more, alone and one after the other: a machine that is too busy
for a test is no defect. What fails again fails the run, and so does all that is more than a failed
test: a worker that died, a file that cannot be collected, pytest's own errors.

    python .ci/twice.py PYTEST_ARGUMENTS...

The line printed last is pytest's.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

FAILED_MAX = 20
"""More than so many failures have a reason of their own."""
TESTS_FAILED = 1
_CRASHED = re.compile(r"worker '\w+' crashed|node down: ")
_LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")


def main(arguments: list[str]) -> int:
    """The exit code of pytest: of its second run, where there was one."""
    code, lines = _run(["--cache-clear", *arguments], held_back=0)
    if code != TESTS_FAILED or any(map(_CRASHED.search, lines)):
        return code
    failed = sorted(json.loads(_LAST_FAILED.read_text())) if _LAST_FAILED.exists() else []
    if not 0 < len(failed) <= FAILED_MAX or not all("::" in test for test in failed):
        return code
    print(f"\nOnce more, alone: {len(failed)} that failed.", flush=True)
    code, lines = _run(["--numprocesses", "0", *failed], held_back=1)
    if code == 0:
        print("Failed once, passed alone:", *failed, sep="\n  ")
    print("".join(lines[-1:]), end="", flush=True)
    return code


def _run(arguments: list[str], held_back: int) -> tuple[int, list[str]]:
    """Runs pytest, and prints what it says but for the last lines. Returns its exit code, and all
    lines."""
    command = [sys.executable, "-m", "pytest", *arguments]
    lines: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if len(lines) > held_back:
                print(lines[-1 - held_back], end="", flush=True)
    return process.returncode, lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
