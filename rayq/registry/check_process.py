"""Checks in processes of their own, with limits: a schema of a stranger can cost any time and any
memory (a regular expression is enough), and a parser in C may crash.

A process that goes beyond a limit, or dies, is gone, and the next check starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import TypeVar

import msgspec

from rayq.errors import (
    ClosedError,
    InvalidSchemaError,
    RayqError,
    SchemaCheckTimeoutError,
    from_wire,
)
from rayq.registry.check_requests import (
    LENGTH_BYTES,
    READY,
    Canonicalize,
    Check,
    Compare,
    Reply,
    Write,
)
from rayq.registry.checks import SubjectVersion, VersionIncompatibility
from rayq.registry.levels import CompatibilityLevel
from rayq.registry.schema_text import CanonicalSchema, ResolvedSchema

T = TypeVar("T")

CHECK_SECONDS_MAX = 5.0
"""The time of a check, from the moment that a process has it."""
START_SECONDS_MAX = 60.0
"""The time in which a process has to have imported the libraries."""
PROCESSES = 2


class CheckPool:
    """Processes that check schemas, one schema each at a time; further checks wait for their turn,
    first come, first served.

    Processes are started when they are needed. All calls belong to one event loop. Each raises
    InvalidSchemaError and SchemaTooLargeError as the function of its name in `checks.py` does;
    SchemaCheckTimeoutError where the check took more than `seconds_max` or killed its process, and
    ClosedError once the pool is closed.
    """

    def __init__(
        self, processes: int = PROCESSES, *, seconds_max: float = CHECK_SECONDS_MAX
    ) -> None:
        self._processes = [_CheckProcess(seconds_max) for _ in range(processes)]
        # Last in, first out: one process is enough where checks are rare.
        self._idle: asyncio.LifoQueue[_CheckProcess] = asyncio.LifoQueue()
        for process in self._processes:
            self._idle.put_nowait(process)

    async def canonical_schema(
        self, resolved: ResolvedSchema, *, normalize: bool = False
    ) -> CanonicalSchema:
        """The schema with its canonical text and its guid."""
        return await self._run(Canonicalize(resolved, normalize), CanonicalSchema)

    async def incompatibilities(
        self, new: ResolvedSchema, versions: Sequence[SubjectVersion], level: CompatibilityLevel
    ) -> list[VersionIncompatibility]:
        """Reasons why a new schema does not fit earlier versions; an empty list if it fits."""
        check = Compare(new, tuple(versions), level)
        return await self._run(check, list[VersionIncompatibility])

    async def written(self, resolved: ResolvedSchema, text_format: str = "") -> str:
        """The text of a schema in the `format` of a request."""
        return await self._run(Write(resolved, text_format), str)

    async def close(self) -> None:
        """Ends all processes, also those that check something: these checks raise ClosedError."""
        for process in self._processes:
            process.closed = True
        for process in self._processes:
            await process.stop()

    async def __aenter__(self) -> CheckPool:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _run(self, check: Check, result_type: type[T]) -> T:
        question = _encoded(check)
        process = await self._idle.get()
        try:
            reply = await process.run(question)
        finally:
            self._idle.put_nowait(process)
        if reply.failure is not None:
            raise from_wire(*reply.failure)
        return msgspec.msgpack.decode(reply.result, type=result_type)


class _CheckProcess:
    """One process, or none until the next check starts it."""

    def __init__(self, seconds_max: float) -> None:
        self.closed = False
        self._seconds_max = seconds_max
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, question: bytes) -> Reply:
        """The answer to a check. One process may have died of something else, before or meanwhile,
        so that only a second one says that this check kills."""
        try:
            reply = await self._run_once(question)
            if reply is None:
                reply = await self._run_once(question)
        except BaseException:
            # Also where the caller was cancelled: what the process does is not wanted any more,
            # and its answer must not be taken for that to the next question.
            await self.stop()
            raise
        if reply is None:
            raise SchemaCheckTimeoutError(
                "The process that checked the schema ended before it had a result, and so did"
                " another; it may have needed too much memory. Make the schema simpler."
            )
        return reply

    async def _run_once(self, question: bytes) -> Reply | None:
        """The answer; None if the process died."""
        self._refuse_if_closed()
        process = await self._started()
        self._refuse_if_closed()  # It may have happened meanwhile.
        try:
            async with asyncio.timeout(self._seconds_max):
                return await _ask(process, question)
        except TimeoutError as error:
            raise SchemaCheckTimeoutError(
                f"Checking the schema took more than {self._seconds_max:g} s, so it was given up."
                " Make the schema simpler: smaller patterns, fewer alternatives."
            ) from error
        except (EOFError, OSError, RuntimeError):  # uvloop: a closed pipe
            await self.stop()
            return None

    def _refuse_if_closed(self) -> None:
        if self.closed:
            raise ClosedError("The checks of schemas were closed, so this schema was not checked.")

    async def stop(self) -> None:
        """Ends the process, whatever it is doing."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        while process.returncode is None:
            try:
                await process.wait()
            except asyncio.CancelledError:  # The caller is ending already.
                continue
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(OSError, RuntimeError):
            await process.stdin.wait_closed()

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "rayq.registry.check_worker",
                str(self._seconds_max),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                # Ray may have given this process more places to import from.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            assert self._process.stdout is not None
            async with asyncio.timeout(START_SECONDS_MAX):
                ready = await self._process.stdout.readexactly(len(READY))
        except (OSError, EOFError, TimeoutError) as error:
            self._refuse_if_closed()
            raise RayqError(
                f"The process that checks schemas could not be started: {error!r}. Its own output"
                " says more. The extra `registry` has to be installed."
            ) from error
        assert ready == READY
        return self._process


def _encoded(check: Check) -> bytes:
    try:
        return msgspec.msgpack.encode(check)
    except (OverflowError, RecursionError, UnicodeEncodeError) as error:
        raise InvalidSchemaError(
            f"The schema, its metadata or its rules cannot be kept: {error}. Use text in Unicode,"
            " integers of 64 bits, and objects that are not nested deeply."
        ) from error


async def _ask(process: asyncio.subprocess.Process, question: bytes) -> Reply:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(len(question).to_bytes(LENGTH_BYTES) + question)
    await process.stdin.drain()
    length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES))
    return msgspec.msgpack.decode(await process.stdout.readexactly(length), type=Reply)
