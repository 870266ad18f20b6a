"""Ray Data over the log: a source, a sink, and JSON values as typed columns. Needs the extra
`data`.

`snapshot` fixes the offsets to read, `read_topic` reads them as a `ray.data.Dataset`, `write_topic`
writes a Dataset, `from_json` turns JSON values into typed columns. See docs/ray-data.md.
"""

from rayq.errors import MissingExtraError

try:
    import pyarrow as _pyarrow  # noqa: F401
    import ray.data as _ray_data  # noqa: F401
except ImportError as _error:
    raise MissingExtraError(
        f"rayq.data needs {_error.name}, which is not installed: pip install 'rayq[data]'."
    ) from _error

from rayq.batch.task_writer import begin_write
from rayq.batch.write_job import WriteJob
from rayq.data.json_columns import Parsed, from_json
from rayq.data.sink import TopicDatasink, Written, write_topic
from rayq.data.source import Snapshot, TopicDatasource, read_topic, snapshot
from rayq.runtime.ray import connecting as _connecting  # noqa: F401  # It finds a cluster.

__all__ = [
    "Parsed",
    "Snapshot",
    "TopicDatasink",
    "TopicDatasource",
    "WriteJob",
    "Written",
    "begin_write",
    "from_json",
    "read_topic",
    "snapshot",
    "write_topic",
]
