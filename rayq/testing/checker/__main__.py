"""`python -m rayq.testing.checker HISTORY.jsonl`: judges a history; exit 1 when it has faults."""

from __future__ import annotations

import argparse
import sys

from rayq.testing.checker.history import read_history
from rayq.testing.checker.verdict import check


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rayq.testing.checker", description="Judge a history of clients."
    )
    parser.add_argument("history", help="a file written by rayq.testing.checker.Recorder")
    options = parser.parse_args(arguments)
    try:
        with open(options.history, "rb") as file:
            verdict = check(read_history(file))
    except (OSError, ValueError) as error:
        print(f"{options.history}: {error}", file=sys.stderr)
        return 2
    print(verdict)
    return 0 if verdict.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
