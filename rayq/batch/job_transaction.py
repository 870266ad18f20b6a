"""Transaction of a batch write, for its driver: one owner, and a writer for each task.

Task `n` writes as the `n`-th producer of the transaction's family, so however many tasks there are,
each partition joins once and gets one marker. The end has two parts. The coordinator *seals* the
transaction, then the leaders of its partitions do: no batch is appended any longer, and each leader
reports the records of every writer there. The controller confirms that they lead, because a
replaced leader may not know all. The driver commits only if the counts match the reports of the
tasks. So a copy of a task that runs for longer than the job adds nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from rayq.batch.job_partition import JobPartition
from rayq.batch.taking_cuts import still_lead, together
from rayq.client.client import Client
from rayq.client.coordinator import TransactionsCoordinator
from rayq.config import ProducerConfig
from rayq.errors import (
    AlreadyCommittedError,
    ProducerFencedError,
    RayqError,
    TimeoutError,
    TransactionAbortedError,
    TransactionCommittedError,
    TransactionEndedError,
    TransactionOutcomeUnknownError,
)
from rayq.messages import (
    AnyRequest,
    EndTransaction,
    EndTransactionResponse,
    InitProducer,
    InitProducerResponse,
    SealPartition,
    SealPartitionResponse,
    SealTransaction,
    SealTransactionResponse,
    TouchTransaction,
)
from rayq.records import TopicPartition

logger = logging.getLogger(__name__)

TRANSACTION_TIMEOUT_MS = 60_000
"""Timeout after which a silent driver is dead: its transaction is aborted."""
TOUCH_INTERVAL_S = 10.0
ABORT_TIMEOUT_S = 10.0
MARKERS_WAIT_MS = 1000
"""Maximum time a commit waits for the markers after it was decided."""


class JobTransaction(NamedTuple):
    """See the module. `timeout_s` is for each request, with its retries."""

    client: Client
    transactional_id: str
    name: str | None
    owner: str
    family: int
    epoch: int
    timeout_s: float

    @staticmethod
    async def begin(
        client: Client, transactional_id: str, name: str | None, *, timeout_s: float
    ) -> tuple[JobTransaction, str | None]:
        """Begins a transaction; an open one of an earlier driver is aborted. Returns it with the
        last name that committed under the id. Raises AlreadyCommittedError, TransactionLimitError,
        InvalidRequestError, TimeoutError."""
        owner = client.environment.new_id()
        coordinator = TransactionsCoordinator(client, transactional_id, ProducerConfig())
        answer: InitProducerResponse = await coordinator.ask(
            lambda topic_id, partition, leader_epoch: InitProducer(
                topic_id, partition, leader_epoch, transactional_id, owner, TRANSACTION_TIMEOUT_MS
            ),
            timeout_s=timeout_s,
        )
        if name is not None and name == answer.last_name:
            raise AlreadyCommittedError(
                f"The batch write {name!r} of {transactional_id!r} is committed, and a name "
                "commits once: nothing was written. Continue with what comes after it."
            )
        transaction = JobTransaction(
            client, transactional_id, name, owner, answer.family, answer.epoch, timeout_s
        )
        return transaction, answer.last_name

    async def keep_open(self) -> None:
        """Makes the coordinator keep the transaction open, until this is cancelled."""
        while True:
            await asyncio.sleep(TOUCH_INTERVAL_S)
            try:
                await self.touch()
            except (ProducerFencedError, TransactionEndedError) as error:
                logger.warning("the transaction of %r has ended: %s", self.transactional_id, error)
                return  # The tasks learn of it, and so does `finish`.
            except RayqError as error:
                logger.warning("keeping %r open: %s", self.transactional_id, error)

    async def touch(self) -> None:
        """Keeps the transaction open, and confirms that it is. Raises ProducerFencedError,
        TransactionEndedError, TimeoutError."""
        await self._ask(
            lambda topic_id, partition, leader_epoch: TouchTransaction(
                topic_id,
                partition,
                leader_epoch,
                self.transactional_id,
                self.owner,
                self.family,
                self.epoch,
            )
        )

    async def seal(self, topic: str) -> dict[int, dict[int, int]]:
        """Stops accepting records. Returns the number of records of each writer in each partition
        of the topic, to which all tasks write. Raises TransactionAbortedError,
        TransactionCommittedError, TransactionOutcomeUnknownError, UnknownTopicError,
        PartitionOfflineError, TimeoutError."""

        async def seal_partition(partition: JobPartition) -> SealPartitionResponse:
            number = partition.place.partition
            answer, _ = await partition.exchange(
                lambda leader_epoch: SealPartition(
                    partition.topic_id, number, leader_epoch, self.family, self.epoch
                )
            )
            return answer

        deadline = self.client.now + self.timeout_s
        try:
            sealed: SealTransactionResponse = await self._ask(
                lambda topic_id, partition, leader_epoch: SealTransaction(
                    topic_id,
                    partition,
                    leader_epoch,
                    self.transactional_id,
                    self.owner,
                    self.family,
                    self.epoch,
                )
            )
            partitions = [
                JobPartition(self.client, TopicPartition(topic, number), topic_id, self.timeout_s)
                for topic_id, number in sealed.participants
            ]
            while self.client.now < deadline:
                answers = await together(map(seal_partition, partitions))
                epochs = [answer.leader_epoch for answer in answers]
                if await still_lead(self.client, partitions, epochs, deadline):
                    return {
                        partition.place.partition: {
                            producer_id - self.family: records
                            for producer_id, records in answer.written
                        }
                        for partition, answer in zip(partitions, answers, strict=True)
                    }
        except (ProducerFencedError, TransactionEndedError) as error:
            raise await self.how_it_ended(error) from error
        raise TimeoutError(
            f"What a batch write of {self.transactional_id!r} has in {topic} was not confirmed "
            f"within {self.timeout_s:g} s: the leaders of its partitions change all the time."
        )

    async def commit(self) -> None:
        """Commits. Raises TransactionAbortedError, AlreadyCommittedError,
        TransactionOutcomeUnknownError."""
        try:
            answer = await self._end(is_commit=True)
        except AlreadyCommittedError:
            raise
        except RayqError as error:
            raise TransactionOutcomeUnknownError(
                f"The commit of a batch write of {self.transactional_id!r} was asked for, and no "
                f"answer says what became of it: {error} It is committed whole or not at all. With "
                "a name it can be run again, and commits once."
            ) from error
        if not answer.is_committed:
            raise aborted("its end came before its commit was asked for.")

    async def abort(self) -> None:
        """Ends the transaction without its records, if it has not ended. Tries for
        `ABORT_TIMEOUT_S` at most, because it ends by its timeout anyway. Raises
        TransactionCommittedError if it is committed."""
        impatient = self._replace(timeout_s=min(self.timeout_s, ABORT_TIMEOUT_S))
        if (await impatient._end(is_commit=False)).is_committed:
            raise _committed(self.transactional_id)

    async def told_to_task(self, cause: RayqError) -> RayqError:
        """The error of a task after a leader reported, by `cause`, that the transaction takes no
        more records. The task may be a late copy, and ends nothing that the driver has open."""
        try:
            await self.touch()
        except (ProducerFencedError, TransactionEndedError):
            return await self.how_it_ended(cause)
        except RayqError as error:
            return _unknown(self.transactional_id, error)
        return _unknown(self.transactional_id, cause)

    async def how_it_ended(self, cause: RayqError) -> RayqError:
        """The error after a server reported, by `cause`, that the transaction has ended. It cannot
        be committed any longer: at worst this request aborts it."""
        try:
            answer = await self._end(is_commit=False)
        except ProducerFencedError as error:
            return aborted(error)
        except RayqError as error:
            return _unknown(self.transactional_id, error)
        return _committed(self.transactional_id) if answer.is_committed else aborted(cause)

    async def _end(self, *, is_commit: bool) -> EndTransactionResponse:
        wait_ms = MARKERS_WAIT_MS if is_commit else 0
        answer: EndTransactionResponse = await self._ask(
            lambda topic_id, partition, leader_epoch: EndTransaction(
                topic_id,
                partition,
                leader_epoch,
                self.transactional_id,
                self.owner,
                self.family,
                self.epoch,
                is_commit,
                self.name if is_commit else None,
                wait_ms,
            ),
            hold_s=wait_ms / 1000,
        )
        return answer

    async def _ask(
        self, build: Callable[[str, int, int], AnyRequest], *, hold_s: float = 0.0
    ) -> Any:
        coordinator = TransactionsCoordinator(self.client, self.transactional_id, ProducerConfig())
        return await coordinator.ask(build, timeout_s=self.timeout_s, hold_s=hold_s)


def aborted(cause: RayqError | str) -> TransactionAbortedError:
    """The error of a task, or of the end of a job, whose transaction has ended."""
    return TransactionAbortedError(
        "The transaction of this batch write is aborted: its driver was not heard of for "
        f"{TRANSACTION_TIMEOUT_MS // 1000} s, or it was open for an hour, or an operator aborted "
        f"it, or another run of the job has begun. None of it is visible: run it again. ({cause})"
    )


def _committed(transactional_id: str) -> TransactionCommittedError:
    return TransactionCommittedError(
        f"The transaction of this batch write, of {transactional_id!r}, is committed, and takes no "
        "more records: this is a late copy of a task or of the job, or another process knows its "
        "owner. Read what is there before you run it again; with a name it commits once."
    )


def _unknown(transactional_id: str, cause: RayqError) -> TransactionOutcomeUnknownError:
    return TransactionOutcomeUnknownError(
        f"The transaction of this batch write, of {transactional_id!r}, takes no more records: its "
        "driver ends it just now, or ended it, and how is not known. It is committed whole or not "
        f"at all; with a name it can be run again, and commits once. ({cause})"
    )
