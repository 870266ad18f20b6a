"""What the driver's JVM says on stderr, but for a line that is no news.

Ray's client in that JVM logs how it connects, at level INFO, before it has read any setting: so no
setting keeps it off the console, and it comes amid the results of each program that uses Spark.
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
    """For a JVM that PySpark launches in this block; one that runs already is left as it is."""
    module: Any = context
    launch = module.launch_gateway
    read_end, write_end = os.pipe()
    lines = os.fdopen(read_end, "rb")
    # Until the JVM has ended: it outlives the session. What it writes comes out as it did before.
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
    """Up to the end of `lines`, and closes them."""
    with lines:
        for line in lines:
            if not NOISE.match(line):
                os.write(descriptor, line)
