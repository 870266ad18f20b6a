"""Checks of schemas in processes of their own: what takes too long or dies is one error, and the
next check finds a process again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rayq.errors import (
    ClosedError,
    InvalidSchemaError,
    SchemaCheckTimeoutError,
    SchemaTooLargeError,
)
from rayq.registry.check_process import CheckPool
from rayq.registry.check_requests import LENGTH_BYTES, READY, Compare
from rayq.registry.checks import (
    SubjectVersion,
    VersionIncompatibility,
    canonical_schema,
    incompatibilities,
    written,
)
from rayq.registry.levels import CompatibilityLevel
from rayq.registry.schema_text import NamedSchema, ResolvedSchema, SchemaText, SchemaType

AVRO, JSON, PROTOBUF = SchemaType.AVRO, SchemaType.JSON, SchemaType.PROTOBUF


def resolved(schema_type: SchemaType, text: str) -> ResolvedSchema:
    return ResolvedSchema(schema=SchemaText(type=schema_type, text=text))


STRING = resolved(AVRO, '"string"')
NAME = "a" * 60 + "!"
EXPLODING = resolved(JSON, json.dumps({"patternProperties": {"^(a+)+$": {"type": "string"}}}))
"""Python would look for a match of this pattern with `NAME` for years."""
EARLIER = (
    SubjectVersion(version=1, resolved=resolved(JSON, json.dumps({"properties": {NAME: {}}}))),
)
BACKWARD = CompatibilityLevel.BACKWARD


def with_pool(
    check: Callable[[CheckPool], Awaitable[None]], processes: int = 1, seconds_max: float = 60.0
) -> None:
    async def run() -> None:
        async with CheckPool(processes, seconds_max=seconds_max) as pool:
            await check(pool)

    asyncio.run(run())


def children() -> list[int]:
    """Processes that check for this one."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *_ = status.read_text().rpartition(")")[2].split()
            command = status.with_name("cmdline").read_bytes()
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z" and b"check_worker" in command:
            found.append(int(status.parent.name))
    return found


def busy_s(process: int) -> float:
    """The processor time that a process has had."""
    ticks = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11]
    return int(ticks) / os.sysconf("SC_CLK_TCK")


async def begun(pool: CheckPool) -> tuple[int, asyncio.Task[list[VersionIncompatibility]]]:
    """A check that goes on until somebody ends it, and the process that is busy with it."""
    await pool.incompatibilities(EXPLODING, (), BACKWARD)
    (process,) = children()
    idle_s = busy_s(process)
    going_on = asyncio.create_task(pool.incompatibilities(EXPLODING, EARLIER, BACKWARD))
    while busy_s(process) < idle_s + 0.2:  # noqa: ASYNC110 - it is another process that acts
        await asyncio.sleep(0.02)
    return process, going_on


def test_checks_are_the_same_as_in_this_process() -> None:
    base = SchemaText(type=PROTOBUF, text='syntax = "proto3"; message B {}')
    top = SchemaText(type=PROTOBUF, text='import "b.proto"; message A { optional B b = 1; }')
    metadata = {"properties": {"a": "b"}}
    schemas = [
        ResolvedSchema(schema=SchemaText(type=AVRO, text='{"type": "int"}', metadata=metadata)),
        resolved(JSON, '{ "type": "string" }'),
        ResolvedSchema(schema=top, referenced=(NamedSchema("b.proto", base),)),
    ]

    async def check(pool: CheckPool) -> None:
        for schema in schemas:
            canonical = await pool.canonical_schema(schema, normalize=True)
            assert canonical == canonical_schema(schema, normalize=True)
            assert await pool.written(schema) == written(schema)
            versions = [SubjectVersion(version=7, resolved=STRING)]
            found = await pool.incompatibilities(schema, versions, CompatibilityLevel.FULL)
            assert found == incompatibilities(schema, versions, CompatibilityLevel.FULL) != []
        assert len(children()) == 1

    with_pool(check)
    assert children() == []


def test_each_of_many_checks_has_its_own_answer() -> None:
    names = [f"Name{number}" for number in range(40)]
    texts = [f'{{"type": "enum", "name": "{name}", "symbols": []}}' for name in names]

    async def check(pool: CheckPool) -> None:
        checks = [pool.canonical_schema(resolved(AVRO, text)) for text in texts]
        for name, canonical in zip(names, await asyncio.gather(*checks), strict=True):
            assert name in canonical.schema.text
        assert len(children()) == 2

    with_pool(check, processes=2)


def test_a_pattern_that_explodes_ends_with_its_time() -> None:
    async def check(pool: CheckPool) -> None:
        await pool.canonical_schema(EXPLODING)
        with pytest.raises(SchemaCheckTimeoutError, match="more than 1 s, so it was given up"):
            await pool.incompatibilities(EXPLODING, EARLIER, BACKWARD)
        assert children() == []
        assert (await pool.canonical_schema(STRING)).schema == STRING.schema

    with_pool(check, seconds_max=1.0)


def test_a_check_that_kills_its_process_is_an_error() -> None:
    """Once it has killed a second one: the first may have died of something else."""

    async def check(pool: CheckPool) -> None:
        first, lost = await begun(pool)
        enough_s = busy_s(first) + 0.3  # It had to import its libraries, too.
        os.kill(first, signal.SIGSEGV)
        while not lost.done():
            for process in children():
                if process != first and busy_s(process) > enough_s:
                    os.kill(process, signal.SIGSEGV)
            await asyncio.sleep(0.02)
        with pytest.raises(SchemaCheckTimeoutError, match="ended before it had a result"):
            await lost
        assert (await pool.canonical_schema(STRING)).schema == STRING.schema

    with_pool(check)


def test_a_process_that_was_killed_between_two_checks_is_not_missed() -> None:
    async def check(pool: CheckPool) -> None:
        await pool.canonical_schema(STRING)
        os.kill(children()[0], signal.SIGKILL)
        assert (await pool.canonical_schema(STRING)).schema == STRING.schema

    with_pool(check)


def test_a_check_that_nobody_waits_for_any_more_ends() -> None:
    async def check(pool: CheckPool) -> None:
        _, unwanted = await begun(pool)
        waiting = asyncio.create_task(pool.canonical_schema(STRING))
        await asyncio.sleep(0)
        unwanted.cancel()
        with pytest.raises(asyncio.CancelledError):
            await unwanted
        assert (await waiting).schema == STRING.schema

    with_pool(check)


def test_a_pool_that_is_closed_ends_its_checks() -> None:
    async def check(pool: CheckPool) -> None:
        _, going_on = await begun(pool)
        waiting = asyncio.create_task(pool.canonical_schema(STRING))
        await asyncio.sleep(0)
        await pool.close()
        for lost in (going_on, waiting, pool.canonical_schema(STRING)):
            with pytest.raises(ClosedError):
                await lost
        assert children() == []

    with_pool(check)


def test_a_check_ends_where_its_pool_does_not_end_it() -> None:
    """The pool may be gone itself, so the kernel does it."""
    question = msgspec.msgpack.encode(Compare(EXPLODING, EARLIER, BACKWARD))
    worker = subprocess.Popen(
        [sys.executable, "-m", "rayq.registry.check_worker", "0.1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    output, _ = worker.communicate(len(question).to_bytes(LENGTH_BYTES) + question, timeout=120)
    assert (output, worker.returncode) == (READY, -signal.SIGALRM)


def nested_records(depth: int) -> str:
    opening = "".join(
        f'{{"type":"record","name":"R{number}","fields":[{{"name":"f","type":'
        for number in range(depth)
    )
    return opening + '"int"' + "}]}" * depth


def nested_metadata(depth: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(depth):
        metadata = {"a": metadata}
    return metadata


def test_bad_input_is_refused_and_kills_nobody() -> None:
    bad = [
        (AVRO, '"' + "x" * 2_000_000 + '"', SchemaTooLargeError),
        (AVRO, nested_records(10_000), InvalidSchemaError),
        (JSON, '{"items":' * 10_000 + "{}" + "}" * 10_000, InvalidSchemaError),
        (PROTOBUF, "message M {" * 10_000, InvalidSchemaError),
        (JSON, "[" * 1_000_000, InvalidSchemaError),
        (AVRO, "", InvalidSchemaError),
        (PROTOBUF, "AAAA", InvalidSchemaError),
        (AVRO, '"a\\ud800"', InvalidSchemaError),
    ]

    async def check(pool: CheckPool) -> None:
        await pool.canonical_schema(STRING)
        (process,) = children()
        for schema_type, text, error in bad:
            with pytest.raises(error):
                await pool.canonical_schema(resolved(schema_type, text))
        for metadata in ({"a": 1 << 70}, {"a": "\ud800"}, nested_metadata(100_000)):
            schema = SchemaText(type=AVRO, text='"string"', metadata=metadata)
            with pytest.raises(InvalidSchemaError):
                await pool.canonical_schema(ResolvedSchema(schema=schema))
        with pytest.raises(InvalidSchemaError, match="cannot be kept"):
            await pool.canonical_schema(resolved(AVRO, '"\udfff"'))
        assert children() == [process]

    with_pool(check)


def test_what_is_nested_as_deep_as_it_may_be_is_checked() -> None:
    """Within the stacks of the libraries."""
    deep = [
        resolved(AVRO, nested_records(160)),
        resolved(JSON, '{"items":' * 240 + "{}" + "}" * 240),
        resolved(JSON, '{"anyOf":[' * 240 + "{}" + "]}" * 240),
    ]

    async def check(pool: CheckPool) -> None:
        for schema in deep:
            await pool.canonical_schema(schema)
            versions = [SubjectVersion(version=1, resolved=schema)]
            assert await pool.incompatibilities(schema, versions, CompatibilityLevel.FULL) == []

    with_pool(check)
