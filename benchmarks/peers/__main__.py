"""`make bench-peers`: Kafka and rayq on this machine, one after the other, as a table of ratios.

    python -m benchmarks.peers [--only SECTION ...]

Both have three brokers on this machine, and records have three replicas. Each section runs on a new
cluster of each side, never on both at once. The table is also in .bench/peers.md, the samples are
in .bench/peers.json. Exit code 1 when a section failed; 0 where there is no Java or no Maven.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import msgspec

from benchmarks import machine
from benchmarks.peers.kafka_install import HOME, KAFKA_VERSION, install, why_not
from benchmarks.peers.loads import SECTIONS, Figure
from benchmarks.peers.table import SIDES, Row, markdown, rows_of
from proving.chaos.processes import MARK, sweep

OUTPUT = Path(".bench")


def run_section(side: str, section: str) -> tuple[list[Figure], str | None]:
    """The figures of one side, and why there are not all of them (None: there are). Leaves no
    process behind."""
    run_id = uuid.uuid4().hex
    directory = Path(tempfile.mkdtemp(prefix="run-", dir=HOME)).resolve()
    log_path = HOME / f"{side}-{section}.log"
    command = [sys.executable, "-m", "benchmarks.peers.one_side", side, section, str(directory)]
    failure = None
    try:
        with open(log_path, "wb") as log, open(directory / "figures", "w+b") as figures:
            running = subprocess.Popen(
                command, stdout=figures, stderr=log, env={**os.environ, MARK: run_id}
            )
            try:
                code = running.wait(SECTIONS[section].timeout_s)
                if code != 0:
                    failure = f"exit code {code}, {_last_line(log_path)}"
            except subprocess.TimeoutExpired:
                failure = f"not done within {SECTIONS[section].timeout_s:.0f} s"
            finally:
                sweep(run_id)
                running.wait()
            figures.seek(0)
            return [msgspec.json.decode(line, type=Figure) for line in figures], failure
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _last_line(path: Path) -> str:
    """Of a traceback this is the error. Lines of librdkafka's own begin with a percent sign."""
    lines = path.read_text(errors="replace").strip().splitlines()
    return next((line for line in reversed(lines) if not line.startswith("%")), "no error is told")


def write(about: str, rows: list[Row]) -> None:
    (OUTPUT / "peers.md").write_text(markdown(rows) + "\n")
    content = {
        "date": datetime.date.today().isoformat(),
        "machine": about,
        "rows": msgspec.to_builtins(rows),
    }
    (OUTPUT / "peers.json").write_text(json.dumps(content, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    sections = parser.parse_args().only
    if (reason := why_not()) is not None:
        print(
            f"bench-peers is skipped: {reason}, and Kafka needs Java and Maven (on Debian: "
            "apt-get install openjdk-17-jre-headless maven)."
        )
        return 0
    HOME.mkdir(parents=True, exist_ok=True)
    install()
    about = f"{machine.describe()}, Kafka {KAFKA_VERSION}, load {os.getloadavg()[0]:.1f} before"
    print(about)
    rows: list[Row] = []
    for section in sections:
        figures, failures = {}, {}
        for side in SIDES:
            print(f"measuring {section} of {side} ...", end=" ", flush=True)
            started_s = time.monotonic()
            figures[side], failure = run_section(side, section)
            print(f"{time.monotonic() - started_s:.0f} s", flush=True)
            if failure is not None:
                failures[f"{section} of {side}"] = failure
        rows += rows_of(figures, failures)
        write(about, rows)
    print(f"\n{markdown(rows)}")
    return 1 if any(row.failure is not None for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
