"""Requests of a streaming query to the cluster: for topics, for the starts and ends of their logs,
and, if a group shows the lag, to commit the query's position."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

from rayq.batch.offset_ranges import Split, snapshot
from rayq.client.cluster import Cluster
from rayq.client.consuming.group_consumer import pattern_text
from rayq.core.groups import topic_pattern
from rayq.errors import InvalidRequestError, OffsetOutOfRangeError, RayqError, UnknownTopicError
from rayq.records import TopicPartition
from rayq.spark.batches import check_same_topics

logger = logging.getLogger(__name__)


class TopicSource:
    """The topics of one query, by name or by pattern. Every method may raise retriable errors.
    `timeout_s` is the time of one attempt."""

    def __init__(
        self,
        cluster: Cluster,
        topics: str | Iterable[str],
        pattern: str | re.Pattern[str] | None,
        *,
        fail_on_data_loss: bool,
    ) -> None:
        """Takes the topics of the query, by name or by pattern. Raises InvalidRequestError."""
        names = [topics] if isinstance(topics, str) else list(topics)
        if bool(names) == (pattern is not None):
            raise InvalidRequestError(
                "Give the topics to read by name, or a pattern; one of the two."
            )
        self.cluster = cluster
        self.topics = sorted(set(names))
        self.pattern = None if pattern is None else pattern_text(pattern)
        self._fail_on_data_loss = fail_on_data_loss

    def __str__(self) -> str:
        return ", ".join(self.topics) if self.pattern is None else f"pattern {self.pattern!r}"

    def cluster_id(self, timeout_s: float) -> str:
        return self.cluster.admin.describe_cluster(timeout_s=timeout_s).cluster_id

    def start(self, where: Mapping[str, Any], timeout_s: float) -> list[Split]:
        """The starting positions, as empty ranges. `where` has `starting_...` keywords of
        `rayq.batch.offset_ranges.snapshot`."""
        found = snapshot(
            self.cluster,
            self.topics,
            pattern=self.pattern,
            ending_offsets="last_stable",
            fail_on_data_loss=self._fail_on_data_loss,
            timeout_s=timeout_s,
            **where,
        )
        return [split._replace(end=split.start) for split in found]

    def available(self, positions: Iterable[Split], timeout_s: float) -> list[Split]:
        """The range of each partition from the query's position to the present end, which is below
        the first undecided transaction: a later batch reads it. The range of a new partition begins
        at its log start.

        Raises OffsetOutOfRangeError if records at a position are gone (with
        `fail_on_data_loss=False` the loss is logged, and the range begins at the log start),
        UnknownTopicError for a topic that was deleted, AuthorizationError for one that may only be
        hidden, CheckpointMismatchError if it was created again.
        """
        names, kept = self._names(positions, timeout_s)
        try:
            found = snapshot(
                self.cluster,
                names,
                starting_offsets={split.place: split.start for split in kept},
                ending_offsets="last_stable",
                new_partitions="earliest",
                fail_on_data_loss=self._fail_on_data_loss,
                timeout_s=timeout_s,
            )
        except (OffsetOutOfRangeError, InvalidRequestError):
            # The cause may be a topic that was created again: it is shorter, or has fewer
            # partitions. Then this is the error to raise.
            ranges = snapshot(
                self.cluster, names, ending_offsets="last_stable", timeout_s=timeout_s
            )
            check_same_topics(kept, ranges)
            raise
        check_same_topics(kept, found)
        return found

    def _names(self, positions: Iterable[Split], timeout_s: float) -> tuple[list[str], list[Split]]:
        """The present topics, and the positions in them. Raises AuthorizationError where a topic
        may only be hidden: read from its start later, its records would come again."""
        if self.pattern is None:
            return self.topics, list(positions)
        there = self.cluster.admin.list_topics(timeout_s=timeout_s)
        missing = {split.topic for split in positions}.difference(there)
        gone = sorted(name for name in missing if not self._is_there(name, timeout_s))
        names = sorted(topic_pattern.matches(self.pattern, {*there, *missing}.difference(gone)))
        if gone:
            message = f"Topics that this query reads were deleted: {', '.join(gone)}."
            if self._fail_on_data_loss:
                raise UnknownTopicError(
                    f"{message} fail_on_data_loss=False continues with the other ones."
                )
            logger.warning("%s Continuing with the others (fail_on_data_loss=False).", message)
        if not names:
            raise UnknownTopicError(f"No topic's name matches the pattern {self.pattern!r} now.")
        return names, [split for split in positions if split.topic in set(names)]

    def _is_there(self, name: str, timeout_s: float) -> bool:
        client, background = self.cluster.shared_client()
        try:
            background.run(client.topic(name, timeout_s=timeout_s, age_max_s=0.0))
        except UnknownTopicError:
            return False
        return True

    def check_topics(self, known: Iterable[Split], timeout_s: float) -> set[str]:
        """The present topics. Raises UnknownTopicError, or CheckpointMismatchError if a topic of
        the checkpoint was created again."""
        names, kept = self._names(known, timeout_s)
        client, background = self.cluster.shared_client()
        for name in names:
            topic = background.run(client.topic(name, timeout_s=timeout_s, age_max_s=0.0))
            check_same_topics(kept, [Split(name, topic.topic_id, 0, 0, 0)])
        return set(names)

    def commit(self, group: str, positions: Mapping[TopicPartition, int], timeout_s: float) -> None:
        """Sets the group's offsets. Raises GroupNotEmptyError if the group has members."""
        self.cluster.admin.set_group_offsets(group, to=positions, timeout_s=timeout_s)


def advice(error: RayqError, what: str, after_s: float) -> RayqError:
    """The same error, with the advice that it lasted for the whole `retry_timeout_s`."""
    return type(error)(f"{error} ({what} was retried for {after_s:g} s: retry_timeout_s.)")
