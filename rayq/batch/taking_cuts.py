"""Requests to the leaders of partitions for a cut over all of them: see
`rayq.batch.transaction_cut`."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from rayq.batch.job_partition import JobPartition
from rayq.batch.transaction_cut import Cut, cut_of_one_pass, cut_of_two_passes
from rayq.client.client import Client
from rayq.errors import TimeoutError
from rayq.messages import ConfirmMetadata, DescribeOpenTransactionsResponse

T = TypeVar("T")


async def take_cut(
    client: Client,
    partitions: Sequence[JobPartition],
    first: list[DescribeOpenTransactionsResponse],
    timeout_s: float,
) -> Cut:
    """Takes a cut: one moment over these partitions. `first` are the answers of the first pass.
    Raises TimeoutError, TransactionLimitError, and as `JobPartition.exchange` does."""
    deadline = client.now + timeout_s
    while client.now < deadline:
        if (cut := cut_of_one_pass(first)) is not None:
            return cut
        second = await together(
            partition.open_transactions(log.high_watermark)
            for partition, log in zip(partitions, first, strict=True)
        )
        cut = cut_of_two_passes(first, second)
        if cut is None:
            first = second
        elif await still_lead(client, partitions, [log.leader_epoch for log in second], deadline):
            return cut
        else:
            first = await together(partition.open_transactions() for partition in partitions)
    raise TimeoutError(
        f"No moment of all partitions was found within {timeout_s:g} s: their leaders change all "
        "the time, or compaction removes markers of transactions at once, because "
        "delete_retention_ms of a topic is too short."
    )


async def still_lead(
    client: Client,
    partitions: Sequence[JobPartition],
    leader_epochs: Sequence[int],
    deadline: float,
) -> bool:
    """Returns whether the leaders that answered in these leader epochs certainly led when they did.
    A leader that is cut off from the other servers continues to answer for a session, and its view
    may be older than what the next leader has committed meanwhile."""
    await client.change(ConfirmMetadata(), timeout_s=max(deadline - client.now, 0.001))
    topics = sorted({partition.place.topic for partition in partitions})
    await client.refresh(topics, timeout_s=max(deadline - client.now, 0.001))
    for partition, leader_epoch in zip(partitions, leader_epochs, strict=True):
        place = partition.place
        found = client.metadata.partition(place.topic, partition.topic_id, place.partition)
        if found is None or found.leader_epoch != leader_epoch:
            return False
    return True


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order; the first error cancels the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
