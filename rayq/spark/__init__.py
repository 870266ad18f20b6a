"""Spark jobs over the log, on Ray through RayDP. Needs the extra `spark`, and Java 17.

`session` starts Spark, `read` and `write` are its batch source and sink, `stream` reads in
micro-batches, `from_json` turns JSON values into typed columns. See docs/spark.md.
"""

from rayq.errors import MissingExtraError

try:
    import pyspark as _pyspark  # noqa: F401
    import ray as _ray  # noqa: F401
    import raydp as _raydp  # noqa: F401
except ImportError as _error:
    raise MissingExtraError(
        f"rayq.spark needs {_error.name}, which is not installed: pip install 'rayq[spark]'."
    ) from _error

from rayq.batch.task_writer import begin_write
from rayq.batch.write_job import WriteJob
from rayq.runtime.ray import connecting as _connecting  # noqa: F401  # It finds a cluster.
from rayq.spark.read import read
from rayq.spark.schema import Parsed, from_json
from rayq.spark.session import session
from rayq.spark.stream import stream
from rayq.spark.write import Written, write

__all__ = [
    "Parsed",
    "WriteJob",
    "Written",
    "begin_write",
    "from_json",
    "read",
    "session",
    "stream",
    "write",
]
