"""Removes a useless line from the stderr of the driver's JVM.

Ray's client in that JVM logs at level INFO how it connects, before it has read any setting. So no
setting keeps the line off the console, where it would stand amid the results of every program.
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

STDERR = 2
NOISE = re.compile(rb"\[[^]]* I [^]]*\] gcs_client\.cc:\d+: GcsClient has no Cluster ID set")


@contextlib.contextmanager
def without_noise() -> Iterator[None]:
    """Filters the stderr of a JVM that PySpark launches in this block, and of no other."""
    module: Any = context
    launch = module.launch_gateway
    read_end, write_end = os.pipe()
    lines = os.fdopen(read_end, "rb")
    # The thread runs until the JVM ends, which outlives the session.
    threading.Thread(
        target=copy_without_noise, args=(lines, STDERR), name="spark-stderr", daemon=True
    ).start()
    module.launch_gateway = partial(launch, popen_kwargs={"stderr": write_end})
    try:
        yield
    finally:
        module.launch_gateway = launch
        os.close(write_end)


def copy_without_noise(lines: IO[bytes], descriptor: int) -> None:
    """Copies `lines` to their end without the noise, and closes them."""
    with lines:
        for line in lines:
            if not NOISE.match(line):
                os.write(descriptor, line)
