"""The helper that compacts a log, seen by the process that starts it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import uvloop

from rayq.errors import RayqError
from rayq.runtime.cleaner_process import run_cleaner_process
from rayq.storage.cleaner import CleaningJob


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_helper_that_dies_before_it_knows_its_job_is_an_error_to_try_again(
    new_loop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is no failure of the replica: with uvloop it once ended the replica for good."""
    job = CleaningJob(
        directory=str(tmp_path),
        groups=(),
        dirty_offset=0,
        tombstones_below=0,
        aborted=frozenset(),
        producer_batches=(),
        index_interval_bytes=4096,
        memory_bytes=1 << 20,
        bytes_per_s=1 << 20,
    )
    start = asyncio.create_subprocess_exec

    async def start_and_kill(*arguments: Any, **options: Any) -> Any:
        process = await start(*arguments, **options)
        process.kill()
        await process.wait()
        await asyncio.sleep(0.1)  # The loop notices that the helper's pipes are closed.
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_and_kill)
    with asyncio.Runner(loop_factory=new_loop) as runner, pytest.raises(RayqError, match="process"):
        runner.run(run_cleaner_process(job))
