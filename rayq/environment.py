"""The interfaces to the outside world: clock, randomness, disk, network, threads, tasks.

Everything impure reaches core, storage, wire, client and actors through an `Environment` that the
runtime makes. So the same code runs on a real machine and in a simulation. Timers are those of the
event loop (`asyncio.sleep`, `loop.call_later`): the simulation's loop runs on virtual time.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from rayq.errors import RemoteStorageError
from rayq.metrics import Metrics

logger = logging.getLogger(__name__)
T = TypeVar("T")
Buffer = bytes | bytearray | memoryview


class Clock(Protocol):
    """Two clocks: `monotonic` for durations, `wall_ms` for dates."""

    def monotonic(self) -> float:
        """Seconds since some start. It never goes back, and is the same clock as `loop.time()`."""
        ...

    def wall_ms(self) -> int:
        """Unix time in milliseconds. It may leap."""
        ...


class File(Protocol):
    """One open file. All methods are synchronous; each may raise OSError."""

    def pwrite(self, data: Buffer, position: int) -> int:
        """Writes at `position`. Returns how many bytes it wrote: a full disk may write fewer."""
        ...

    def pread(self, length: int, position: int) -> bytes:
        """`length` bytes from `position`, or fewer at the end of the file."""
        ...

    def pread_cached(self, length: int, position: int) -> bytes | None:
        """Like `pread`, but None where the call would have to wait for the disk."""
        ...

    def size(self) -> int: ...

    def truncate(self, size: int) -> None: ...

    def sync_data(self) -> None:
        """fdatasync: the bytes and the length are on disk when it returns."""
        ...

    def try_lock(self) -> bool:
        """Takes the exclusive lock (flock). Returns False when another process holds it. The lock
        lasts until `close` or the end of the process."""
        ...

    def is_at(self, path: str) -> bool:
        """Returns whether this file is the one that `path` names now. It is not where the file, or
        a directory above it, was removed or replaced, or its disk was unmounted. Raises OSError."""
        ...

    def close(self) -> None: ...


class Disk(Protocol):
    """The file system of one node. Paths are absolute strings. All methods are synchronous."""

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File: ...

    def exists(self, path: str) -> bool: ...

    def list(self, path: str) -> list[str]:
        """The names in a directory, sorted. [] when there is no such directory."""
        ...

    def make_dirs(self, path: str, *, syncs: bool = True) -> None:
        """Makes a directory and its parents, and syncs each parent that changed, unless the caller
        does that."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Renames atomically, over an existing file. Durable after `sync_dir` of the parent."""
        ...

    def remove(self, path: str) -> None: ...

    def remove_tree(self, path: str) -> None: ...

    def sync_dir(self, path: str) -> None: ...

    def free_bytes(self, path: str) -> int: ...


Address = tuple[str, int]
"""`(host, port)`"""

Accept = Callable[[str, Callable[[], None]], asyncio.BaseProtocol | None]
"""`accept(host, give_up)` makes the protocol of a connection that comes from `host`. It is called
at once: before TLS, and before a byte was read. None refuses the connection. `give_up()` ends the
connection as long as `connection_made` was not called. `connection_lost` is called in any case."""


class Listener(Protocol):
    """A listening socket."""

    host: str
    port: int

    def close(self) -> None: ...


class Network(Protocol):
    """Makes stream connections for asyncio protocols, as `loop.create_connection` does."""

    async def connect(
        self, host: str, port: int, protocol_factory: Callable[[], asyncio.BaseProtocol]
    ) -> asyncio.BaseProtocol:
        """The connected protocol (`connection_made` was called). Raises OSError."""
        ...

    async def listen(self, host: str, port: int, accept: Accept) -> Listener:
        """Listens on `port`, or on any free port where it is 0. Raises OSError when it is taken."""
        ...


class ObjectMeta(NamedTuple):
    """An object as the store lists it."""

    name: str
    size_bytes: int
    modified_ms: int
    """The modification time by the store's clock."""


class ObjectStore(Protocol):
    """Objects below one prefix of a bucket, or files below one directory. Names are relative to it
    and have `/` between their parts. Objects are immutable: no name is written twice with other
    bytes. Each call has a deadline of its own, and raises RemoteStorageError (its outcome is not
    known), RemoteDeniedError, and, where it reads, RemoteMissingError."""

    async def put(self, name: str, data: Buffer) -> None:
        """Stores an object durably: all of it is stored when this returns. The store has checked
        the bytes, or this has read them back."""
        ...

    async def get(self, name: str, position: int = 0, length: int | None = None) -> bytes:
        """`length` bytes from `position` (None: all), or fewer at the object's end."""
        ...

    async def head(self, name: str) -> ObjectMeta: ...

    async def list(self, prefix: str, after: str = "") -> list[ObjectMeta]:
        """Up to 1,000 objects by name, behind `after`; what was written or deleted a moment ago may
        be missing or there still. `prefix` is empty or ends with `/`."""
        ...

    async def delete(self, names: Sequence[str]) -> None:
        """Deletes up to 1,000 objects; a missing one is not an error."""
        ...

    async def sign(self, name: str, expires_s: float) -> str:
        """A URL for reading one object without credentials."""
        ...


class ObjectBytes(Protocol):
    """The bytes of an object as they arrive. Both methods are synchronous."""

    def read(self, length: int) -> bytes:
        """The next `length` bytes, or fewer at the end. Raises RemoteStorageError."""
        ...

    def close(self) -> None: ...


OpenObject = Callable[[str, int, int], ObjectBytes]
"""`open_object(url, position, length)` begins to read an object by a URL that `ObjectStore.sign`
made, without credentials. Synchronous. Raises RemoteStorageError, RemoteDeniedError,
RemoteMissingError."""


def opens_no_objects(url: str, position: int, length: int) -> ObjectBytes:
    """`open_object` of processes that ask their object server instead."""
    raise RemoteStorageError("This process reads no objects by their URLs.")


class Threads(Protocol):
    """Runs blocking jobs off the event loop. A job gets immutable arguments, and touches no object
    that the loop uses. Its result is applied on the loop."""

    def run(self, job: Callable[..., T], *arguments: Any) -> Awaitable[T]:
        """The job's result. A job that is cancelled before a thread takes it does not run."""
        ...


class Tasks(Protocol):
    """Owns the background tasks of one process, so that a runtime can end them all at once."""

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Starts a task and keeps it alive. An exception that nobody awaits is logged once."""
        ...

    def cancel_all(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The world as one process sees it.

    `pid` and `boot_id` name the process in lock files. A simulation makes them up. `metrics` has
    the figures of this process. `has_descriptors_for_replica` says whether the process may open the
    files of one more replica. `open_object` is for batch jobs, which have no credentials.
    """

    clock: Clock
    random: random.Random
    disk: Disk
    network: Network
    threads: Threads
    tasks: Tasks
    pid: int
    boot_id: str
    metrics: Metrics = field(default_factory=Metrics)
    has_descriptors_for_replica: Callable[[], bool] = lambda: True
    open_object: OpenObject = opens_no_objects

    def new_id(self) -> str:
        """A new 128-bit id in hex for a cluster, directory, incarnation or topic."""
        return f"{self.random.getrandbits(128):032x}"

    def token_bytes(self, length: int) -> bytes:
        """Random bytes for nonces and secrets. They are cryptographic on a real machine."""
        return self.random.randbytes(length)


# --- the real machine's clock, threads and tasks (disk: storage.disk, network: wire.network) ------


class SystemClock:
    """The machine's clocks."""

    monotonic = staticmethod(time.monotonic)

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000


_Job = tuple[
    asyncio.AbstractEventLoop,
    "asyncio.Future[Any]",
    Callable[..., None],
    Callable[..., Any],
    tuple[Any, ...],
]


class ThreadPool:
    """Daemon threads of this process, for the jobs of one event loop. A disk that hangs holds one
    thread for each partition at most.

    Each record waits for the flushes of all its replicas. By an executor, whose futures asyncio
    wraps in its own, a flush costs several times as much of the processor as by these few lines.
    """

    def __init__(self, workers: int) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._workers_max = workers
        self._workers = 0
        self._unfinished = 0
        # The threads do not refer to the pool, and end when it is collected.
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def run(self, job: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._unfinished += 1
        if self._workers < min(self._unfinished, self._workers_max):
            name = f"rayq_{self._workers}"
            Thread(target=_work, args=(self._jobs,), name=name, daemon=True).start()
            self._workers += 1
        self._jobs.put((loop, future, self._finish, job, arguments))
        return future

    def _finish(
        self, future: asyncio.Future[T], result: T | None, error: BaseException | None
    ) -> None:
        self._unfinished -= 1
        if future.done():
            return  # It was cancelled.
        if isinstance(error, StopIteration):  # Futures refuse it, as coroutines do.
            future.set_exception(RuntimeError("the job raised StopIteration"))
        elif error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast(T, result))


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (taken := jobs.get()) is not None:
        _run(*taken)
        del taken  # It refers to the pool.
    jobs.put(None)  # For the next thread.


def _run(
    loop: asyncio.AbstractEventLoop,
    future: asyncio.Future[T],
    finish: Callable[[asyncio.Future[T], T | None, BaseException | None], None],
    job: Callable[..., T],
    arguments: tuple[Any, ...],
) -> None:
    result, error = None, None
    if not future.cancelled():
        try:
            result = job(*arguments)
        except BaseException as raised:  # noqa: BLE001 - raised where the job is awaited
            error = raised
    try:
        loop.call_soon_threadsafe(finish, future, result, error)
    except RuntimeError:
        return  # The loop is closed: nothing awaits the job.


class LoopTasks:
    """Tasks of the running event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("task %s failed", task.get_name(), exc_info=error)

    def cancel_all(self) -> None:
        for task in list(self._tasks):
            task.cancel()
