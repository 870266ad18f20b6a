"""A running streaming query: it decides the next batch, writes it ahead, runs it and commits it.

One thread does this as long as the query is active. It uses Spark only through an `Engine`, so that
tests can run it without Spark.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar

from rayq.batch.offset_ranges import Split
from rayq.client.timeouts import seconds
from rayq.errors import InvalidRequestError, RayqError, StreamingQueryError
from rayq.records import TopicPartition
from rayq.spark.batches import MicroBatch, Resumption, after, next_batch
from rayq.spark.checkpoint import Checkpoint
from rayq.spark.topic_sink import TopicSink
from rayq.spark.topic_source import TopicSource, advice
from rayq.spark.trigger import Trigger
from rayq.user_functions import check_ran, told

logger = logging.getLogger(__name__)
T = TypeVar("T")

ATTEMPT_TIMEOUT_S = 5.0
"""Timeout of one request to the cluster, before the query checks whether it was stopped."""
RETRY_PAUSE_S = 0.5
CANCEL_AGAIN_S = 1.0
"""Interval at which jobs are cancelled again: a batch that is being stopped may start further Spark
jobs."""
PROGRESS_KEPT = 100
"""The default of Spark's numRecentProgressUpdates."""

BatchFunction = Callable[[Any, int], object]

_active: set[StreamingQuery] = set()
"""The active queries of this process."""


class Engine(Protocol):
    """Runs batches."""

    def thread(
        self,
        work: Callable[[], None],
        never_ran: Callable[[BaseException], None],
        name: str,
    ) -> threading.Thread:
        """A thread that may use the engine, not started. It calls `work`, or `never_ran` with the
        error that kept it from that."""
        ...

    def begin(self, group: str, description: str) -> None:
        """Makes the jobs that this thread starts from now on belong to this group. Called in the
        engine's thread."""
        ...

    def frame(self, ranges: Sequence[Split]) -> Any:
        """The records of the ranges, to be read when the user's function asks for them."""
        ...

    def cancel(self, group: str) -> None:
        """Ends the running jobs of a group. Call it from any thread."""
        ...


class StreamingQuery:
    """A streaming query that was started. Its methods have the names and meanings of PySpark's
    class. May be used from any thread."""

    def __init__(
        self,
        *,
        query_id: str,
        run_id: str,
        name: str | None,
        source: TopicSource,
        checkpoint: Checkpoint,
        resumption: Resumption,
        engine: Engine,
        function: BatchFunction,
        trigger: Trigger,
        offsets_max: int | None,
        group: str | None,
        retry_timeout_s: float,
    ) -> None:
        """`rayq.spark.stream(...).foreach_batch(...).start()` makes and starts it."""
        self._id = query_id
        self._run_id = run_id
        self._name = name
        self._source = source
        self._checkpoint = checkpoint
        self._replay = resumption.replay
        self._progress = resumption.progress
        self._engine = engine
        self._function = function
        self._trigger = trigger
        self._offsets_max = offsets_max
        self._group = group
        self._retry_timeout_s = retry_timeout_s

        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._changed = threading.Condition()
        self._looks_begun = 0
        self._idle_look = 0
        """The numbers of the last look at the log, and of the last look that found nothing new."""
        self._error: StreamingQueryError | None = None
        self._last_trigger_s: float | None = None
        self._status = _status("Initializing")
        self._recent: deque[dict[str, Any]] = deque(maxlen=PROGRESS_KEPT)
        title = f"rayq stream {name or query_id}"
        self._thread = engine.thread(self._run, self._never_ran, title)

    def __repr__(self) -> str:
        state = "active" if self.isActive else "ended"
        return f"StreamingQuery({self._name or self._id}, of {self._source}, {state})"

    # --- PySpark's face -------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """The id of the query, the same after every restart from its checkpoint."""
        return self._id

    @property
    def runId(self) -> str:  # noqa: N802
        """The id of this run of the query."""
        return self._run_id

    @property
    def name(self) -> str | None:
        return self._name

    @property
    def isActive(self) -> bool:  # noqa: N802
        return not self._ended.is_set()

    @property
    def status(self) -> dict[str, Any]:
        """`message` (the present step, or what the query waits for), `isDataAvailable`,
        `isTriggerActive`."""
        return dict(self._status)

    @property
    def lastProgress(self) -> dict[str, Any] | None:  # noqa: N802
        """The progress of the last committed batch; None before the first. Its keys are those of
        Spark's progress, without `stateOperators` and the sink's `numOutputRows`. `numInputRows`
        counts offsets, of which a compacted log may lack some."""
        recent = self.recentProgress
        return recent[-1] if recent else None

    @property
    def recentProgress(self) -> list[dict[str, Any]]:  # noqa: N802
        """The progress of the last 100 batches of this run."""
        with self._changed:
            return list(self._recent)

    def exception(self) -> StreamingQueryError | None:
        """The error that ended the query; None while it is active and after a `stop`. Its
        `__cause__` is the original error."""
        return self._error

    def awaitTermination(self, timeout: float | None = None) -> bool | None:  # noqa: N802
        """Waits until the query has ended. With `timeout` (in seconds) it returns whether the query
        has ended. Raises the StreamingQueryError that ended the query."""
        has_ended = self._ended.wait(None if timeout is None else seconds(timeout))
        if has_ended and self._error is not None:
            raise self._error
        return None if timeout is None else has_ended

    def processAllAvailable(self) -> None:  # noqa: N802
        """Waits until all records that are in the topics now have been processed and committed.
        Raises the StreamingQueryError that ended the query."""
        self._check_not_inside("processAllAvailable")
        with self._changed:
            # A look that has already begun may have missed the newest records.
            wanted = self._looks_begun + 1
            self._changed.wait_for(lambda: self._idle_look >= wanted or self._ended.is_set())
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Ends the query and waits until it has ended. The Spark jobs of the running batch are
        cancelled, and the next start runs that batch again, unless its function still returns. If
        the function itself calls it, the query ends after this batch. Idempotent."""
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        if threading.current_thread() is self._thread:
            return
        while not self._ended.is_set():
            self._engine.cancel(self._run_id)
            self._ended.wait(CANCEL_AGAIN_S)
        self._thread.join()

    def _check_not_inside(self, what: str) -> None:
        if threading.current_thread() is self._thread:
            raise InvalidRequestError(
                f"{what}() inside the query's own function would wait for itself."
            )

    # --- the thread -----------------------------------------------------------------------------

    def begin(self) -> None:
        _active.add(self)
        try:
            self._thread.start()
        except BaseException:
            _active.discard(self)
            raise

    def _run(self) -> None:
        try:
            self._engine.begin(self._run_id, f"rayq stream of {self._source}")
            self._work()
            self._status = _status("Stopped")
        except BaseException as error:  # noqa: BLE001 - kept, and raised by awaitTermination
            self._failed(error)
        finally:
            self._end()

    def _never_ran(self, error: BaseException) -> None:
        """Handles a thread that failed before `_run`; called instead of it."""
        try:
            self._failed(error)
        finally:
            self._end()

    def _end(self) -> None:
        try:
            self._checkpoint.close()
        finally:
            _active.discard(self)
            with self._changed:
                self._ended.set()
                self._changed.notify_all()

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, _StoppedError):
            self._status = _status("Stopped")
            return
        self._error = StreamingQueryError(
            f"The streaming query {self._name or self._id} of {self._source} ended at batch "
            f"{self._at}: {told(error)}\nA new start from the checkpoint "
            f"{self._checkpoint.path} continues there."
        )
        self._error.__cause__ = error
        self._status = _status(f"Terminated with exception: {told(error)}")
        logger.error("%s", self._error, exc_info=error)

    @property
    def _at(self) -> int:
        return self._progress.next_id if self._replay is None else self._replay.batch_id

    def _work(self) -> None:
        if self._replay is not None:
            self._execute(self._replay, self._begin_trigger())
            self._replay = None
        until: Mapping[TopicPartition, int] | None = None
        if self._trigger.drains:
            until = {split.place: split.end for split in self._available()}
        while not self._stopping.is_set():
            watch = self._begin_trigger()
            found_any = self._look(watch, until)
            if not found_any:
                self._status = _status("Waiting for data to arrive")
                if self._trigger.drains:
                    return
            elif self._trigger.interval_s:
                self._status = _status("Waiting for next trigger", is_data_available=True)
            next_s = self._trigger.next_s(watch.start_s, time.monotonic(), found_any=found_any)
            self._stopping.wait(max(next_s - time.monotonic(), 0))

    def _begin_trigger(self) -> _Stopwatch:
        watch = _Stopwatch(self._last_trigger_s)
        self._last_trigger_s = watch.start_s
        return watch

    def _look(self, watch: _Stopwatch, until: Mapping[TopicPartition, int] | None) -> bool:
        """Runs one trigger. Returns whether there was a batch."""
        with self._changed:
            self._looks_begun += 1
            look = self._looks_begun
        self._status = _status("Getting offsets", is_trigger_active=True)
        with watch.measure("latestOffset"):
            available = self._available()
        batch = next_batch(
            self._progress,
            available,
            offsets_max=self._offsets_max,
            until=until,
            now_ms=_now_ms(),
        )
        if batch is None:
            with self._changed:
                self._idle_look = look
                self._changed.notify_all()
            return False
        with watch.measure("walCommit"):
            self._checkpoint.write_batch(batch)
        self._execute(batch, watch, {split.place: split.end for split in available})
        return True

    def _execute(
        self,
        batch: MicroBatch,
        watch: _Stopwatch,
        latest: Mapping[TopicPartition, int] | None = None,
    ) -> None:
        """Runs and commits a written batch. Raises the errors of the user's function."""
        self._progress = after(batch)
        self._replay = batch
        self._status = _status(
            f"Processing batch {batch.batch_id}", is_data_available=True, is_trigger_active=True
        )
        with watch.measure("addBatch"):
            try:
                result = self._function(self._engine.frame(batch.ranges), batch.batch_id)
                check_ran("The function of the query", result)
            except Exception as error:
                if self._stopping.is_set():
                    logger.info("batch %d was stopped: %s", batch.batch_id, told(error))
                    raise _StoppedError from error
                raise
        with watch.measure("commitOffsets"):
            self._checkpoint.commit(batch.batch_id, _now_ms())
            self._replay = None
            group_error = self._commit_to_group()
        progress = self._progress_of(batch, watch, latest, group_error)
        with self._changed:
            self._recent.append(progress)

    def _available(self) -> list[Split]:
        return self._patiently(
            f"Looking for the ends of {self._source}",
            lambda timeout_s: self._source.available(self._progress.positions, timeout_s),
        )

    def _patiently(self, what: str, ask: Callable[[float], T]) -> T:
        """Asks the cluster, and asks again while the error is retriable."""
        return patiently(what, ask, self._retry_timeout_s, self._stopping, self._waits_for)

    def _waits_for(self, message: str) -> None:
        self._status = _status(message, is_trigger_active=True)

    def _commit_to_group(self) -> str | None:
        """Commits the position for people who look at the lag. Returns the error, if any. Only the
        checkpoint counts, so a group that cannot be reached, or that has members by now, does not
        end the query."""
        if self._group is None:
            return None
        try:
            self._source.commit(self._group, self._progress.offsets, ATTEMPT_TIMEOUT_S)
        except RayqError as error:
            logger.warning("the positions were not committed to group %r: %s", self._group, error)
            return str(error)
        return None

    def _progress_of(
        self,
        batch: MicroBatch,
        watch: _Stopwatch,
        latest: Mapping[TopicPartition, int] | None,
        group_error: str | None,
    ) -> dict[str, Any]:
        """The progress of a batch. `latest` is None for a batch that is run again, because its
        start does not ask for ends."""
        ends = {split.place: split.end for split in batch.ranges}
        latest = ends if latest is None else latest
        behind = [latest[place] - end for place, end in ends.items()] or [0]
        watch.total("triggerExecution")
        seconds = max(watch.durations_ms["triggerExecution"], 1) / 1000
        since_s = watch.since_previous_s
        input_per_s = 0.0 if since_s is None else batch.offsets / max(since_s, 0.001)
        source = {
            "description": f"rayq[{self._source}]",
            "startOffset": _nested({split.place: split.start for split in batch.ranges}),
            "endOffset": _nested(ends),
            "latestOffset": _nested(latest),
            "numInputRows": batch.offsets,
            "inputRowsPerSecond": input_per_s,
            "processedRowsPerSecond": batch.offsets / seconds,
            "metrics": {
                "avgOffsetsBehindLatest": str(sum(behind) / len(behind)),
                "maxOffsetsBehindLatest": str(max(behind)),
                "minOffsetsBehindLatest": str(min(behind)),
            },
        }
        progress: dict[str, Any] = {
            "id": self._id,
            "runId": self._run_id,
            "name": self._name,
            "timestamp": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "batchId": batch.batch_id,
            "numInputRows": batch.offsets,
            "inputRowsPerSecond": input_per_s,
            "processedRowsPerSecond": batch.offsets / seconds,
            "durationMs": dict(watch.durations_ms),
            "sources": [source],
            "sink": {"description": _description_of(self._function)},
        }
        if self._group is not None:
            progress["group"] = {"name": self._group, "error": group_error}
        return progress


def stop_active_queries() -> None:
    """Stops the queries of this process, before their Spark session ends."""
    for query in list(_active):
        query.stop()


class _StoppedError(Exception):
    """Raised for the batch that ran when the query was stopped."""


def patiently(
    what: str,
    ask: Callable[[float], T],
    timeout_s: float,
    stopping: threading.Event,
    waits_for: Callable[[str], None],
) -> T:
    """Asks the cluster until it answers. Retriable errors are retried for `timeout_s`, and
    `waits_for` is called with each."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            return ask(max(min(ATTEMPT_TIMEOUT_S, left_s), 0.1))
        except RayqError as error:
            if stopping.is_set():
                raise _StoppedError from error
            if not error.retriable:
                raise
            if time.monotonic() + RETRY_PAUSE_S >= deadline_s:
                raise advice(error, what, timeout_s) from error
            logger.info("%s: %s", what, error)
            waits_for(f"{what}: {error}")
        if stopping.wait(RETRY_PAUSE_S):
            raise _StoppedError


class _Stopwatch:
    """The durations of the steps of a trigger."""

    def __init__(self, previous_start_s: float | None) -> None:
        """`previous_start_s`: the start of the trigger before, or None for the first of the run."""
        self.start_s = time.monotonic()
        self._previous_start_s = previous_start_s
        self.durations_ms: dict[str, int] = {}

    @property
    def since_previous_s(self) -> float | None:
        return None if self._previous_start_s is None else self.start_s - self._previous_start_s

    @contextmanager
    def measure(self, step: str) -> Iterator[None]:
        start_s = time.monotonic()
        try:
            yield
        finally:
            self.durations_ms[step] = int((time.monotonic() - start_s) * 1000)

    def total(self, step: str) -> None:
        self.durations_ms[step] = int((time.monotonic() - self.start_s) * 1000)


def _status(
    message: str, *, is_data_available: bool = False, is_trigger_active: bool = False
) -> dict[str, Any]:
    return {
        "message": message,
        "isDataAvailable": is_data_available,
        "isTriggerActive": is_trigger_active,
    }


def _nested(offsets: Mapping[TopicPartition, int]) -> dict[str, dict[str, int]]:
    """The offsets as Spark's Kafka source writes them: `{topic: {partition: offset}}`."""
    found: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in offsets.items():
        found.setdefault(topic, {})[str(partition)] = offset
    return found


def _description_of(function: BatchFunction) -> str:
    if isinstance(function, TopicSink):
        return str(function)
    return f"foreach_batch({getattr(function, '__qualname__', type(function).__qualname__)})"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
