"""One section on one side, in a process of its own.

    python -m benchmarks.peers.one_side kafka|rayq SECTION DIRECTORY

Starts the cluster in DIRECTORY and prints each figure as a line of JSON.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import msgspec

from benchmarks.peers.kafka_side import kafka
from benchmarks.peers.loads import SECTIONS
from benchmarks.peers.rayq_side import on_ray


def main(name: str, section_name: str, directory: str) -> None:
    section = SECTIONS[section_name]
    root = Path(directory)
    figures = sys.stdout.buffer
    # Ray prints on stdout about each process that dies.
    with contextlib.redirect_stdout(io.StringIO()):
        cluster = kafka(root) if name == "kafka" else on_ray(root)
        with cluster as side:
            for figure in section.measure(side):
                figures.write(msgspec.json.encode(figure) + b"\n")
                figures.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
