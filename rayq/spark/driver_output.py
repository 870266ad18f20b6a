"""Filter for useless lines that the driver's JVM prints.

Ray's client in that JVM logs at level INFO, before it has read any setting: its connection to
stderr, and Spark's log of that time to stdout. So no setting keeps these lines off the console,
where they would mix with the results of every program.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator
from functools import partial
from typing import IO, Any

from pyspark import context

STDOUT, STDERR = 1, 2
NOISE = re.compile(
    rb"\[[^]]* I [^]]*\] gcs_client\.cc:\d+: GcsClient has no Cluster ID set"
    rb"|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO) \S+ \[[^]]*\]: "
)
"""The second alternative is the pattern of the log4j2.xml in Ray's jar."""


@contextlib.contextmanager
def without_noise() -> Iterator[None]:
    """Filters stdout and stderr of a JVM that PySpark launches in this block, and of no other."""
    module: Any = context
    launch = module.launch_gateway
    with _filtered(STDOUT, "spark-stdout") as out, _filtered(STDERR, "spark-stderr") as err:
        module.launch_gateway = partial(launch, popen_kwargs={"stdout": out, "stderr": err})
        try:
            yield
        finally:
            module.launch_gateway = launch


@contextlib.contextmanager
def _filtered(descriptor: int, thread: str) -> Iterator[int]:
    """The end of a pipe whose lines go to `descriptor`, for a process that is started in this
    block."""
    read_end, write_end = os.pipe()
    lines = os.fdopen(read_end, "rb")
    # The thread runs until the JVM ends, which outlives the session.
    threading.Thread(
        target=copy_without_noise, args=(lines, descriptor), name=thread, daemon=True
    ).start()
    try:
        yield write_end
    finally:
        os.close(write_end)


def copy_without_noise(lines: IO[bytes], descriptor: int) -> None:
    """Copies `lines` to their end without the noise, and closes them."""
    with lines:
        for line in lines:
            if not NOISE.match(line):
                os.write(descriptor, line)
