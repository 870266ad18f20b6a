"""`python -m rayq.storage verify DIR [--json]`: checks data directories offline.

Exit status: 0 when all is well, 1 when something is damaged, 2 when there is nothing to check.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys

from rayq.storage.disk import LocalDisk
from rayq.storage.verify import summary, verify


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rayq.storage", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("verify", help="check every broker and partition below DIR")
    command.add_argument("directory", metavar="DIR")
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    reports = verify(LocalDisk(), os.path.abspath(options.directory))
    if options.json:
        print(json.dumps([dataclasses.asdict(report) for report in reports], indent=2))
    else:
        print(summary(reports))
    if not reports:
        return 2
    return 0 if all(report.is_sound for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
