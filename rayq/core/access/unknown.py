"""Errors for a topic or queue whose id nothing has: also for what the sender may not describe, so
that both look alike."""

from __future__ import annotations

from rayq.errors import UnknownQueueError, UnknownTopicError


def unknown_topic(topic_id: str) -> UnknownTopicError:
    return UnknownTopicError(f"There is no topic with id {topic_id}.")


def unknown_partition(topic_id: str, partition: int) -> UnknownTopicError:
    """The error of a process that does not host the partition."""
    return UnknownTopicError(
        f"This process hosts no partition {partition} of a topic with id {topic_id}: it was "
        "deleted, or moved. Ask for new metadata."
    )


def unknown_queue(queue_id: str) -> UnknownQueueError:
    """The error of a partition's leader that has no such queue."""
    return UnknownQueueError(
        f"No queue with id {queue_id} reads this partition: it was deleted, or this server has not "
        "heard of it yet."
    )
