"""Parameters of one batch write that its driver and its tasks share."""

from __future__ import annotations

from typing import NamedTuple

from rayq.batch.job_transaction import JobTransaction
from rayq.client.client import Client


class WriteJob(NamedTuple):
    """One batch write, the same in every process that writes. It has plain values only: it can be
    pickled, and `WriteJob(*list)` makes it from its JSON."""

    topic: str
    topic_id: str
    start_offsets: list[int]
    """The end of each partition when the job began."""
    first_producer_id: int
    timestamp_ms: int
    """The timestamp of records without their own time: the job's, not the attempt's, because the
    CRC by which attempts are compared covers it."""
    batch_bytes: int
    append_time: bool
    """True if the topic's records carry the leader's time (`message_timestamp_type`)."""
    transactional_id: str | None = None
    """The transactional id of the job; None if it is not a transaction. With one, the producer ids
    are the transaction's family."""
    name: str | None = None
    """The name under which it commits once."""
    last_name: str | None = None
    """The last name that committed under the transactional id when the job began."""
    owner: str = ""
    epoch: int = 0

    def transaction(self, client: Client, timeout_s: float) -> JobTransaction | None:
        """The job's transaction; None: its records become visible one after the other."""
        if self.transactional_id is None:
            return None
        return JobTransaction(
            client,
            self.transactional_id,
            self.name,
            self.owner,
            self.first_producer_id,
            self.epoch,
            timeout_s,
        )
