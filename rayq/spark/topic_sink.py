"""A topic as the sink of a streaming query: each batch is a transaction, committed once.

The transactional id is that of the query, the name of a transaction is the number of its batch. The
cluster keeps the last name that committed. So a batch that is run again, after any crash, writes
nothing if an earlier run of it has committed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from rayq.batch.task_writer import begin_write
from rayq.batch.write_job import WriteJob
from rayq.client.cluster import Cluster
from rayq.errors import AlreadyCommittedError, CheckpointMismatchError

logger = logging.getLogger(__name__)


class TopicSink:
    """The function of a query, called for each batch, in order."""

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        query_id: str,
        write: Callable[[Any, WriteJob], object],
        *,
        timeout_s: float,
    ) -> None:
        """`write(df, job)` writes the rows of the batch as the job, and finishes it."""
        self._cluster = cluster
        self._topic = topic
        self._transactional_id = f"rayq-stream-{query_id}"
        self._write = write
        self._timeout_s = timeout_s

    def __str__(self) -> str:
        return f"rayq[{self._topic}]"

    def __call__(self, df: Any, batch_id: int) -> None:
        try:
            job = begin_write(
                self._cluster,
                self._topic,
                transactional_id=self._transactional_id,
                name=str(batch_id),
                timeout_s=self._timeout_s,
            )
        except AlreadyCommittedError:
            logger.info("batch %d is committed to %s already", batch_id, self._topic)
            return
        if job.last_name is not None and not job.last_name.isdecimal():
            raise CheckpointMismatchError(
                f"The last transaction of {self._transactional_id!r} has the name "
                f"{job.last_name!r}, which is not a batch of this query: another program uses the "
                "id of the query, so nobody knows which batches are written. Begin with a new "
                "checkpoint."
            )
        if job.last_name is not None and batch_id < int(job.last_name):
            raise CheckpointMismatchError(
                f"The checkpoint is at batch {batch_id}, and batch {job.last_name} of this query "
                "is committed: it is an older copy, or another query uses a copy of it. Continuing "
                f"would write records to {self._topic} again. Use the newest checkpoint, or begin "
                "with a new one where the query is to start over."
            )
        self._write(df, job)
