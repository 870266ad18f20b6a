"""After a failed sync the page cache is no witness (found by seeds 36 of `ordinary` and 74
of `moves`)."""

from __future__ import annotations

import errno

import pytest

from proving.simulation import World
from proving.simulation.process import Process
from rayq.config import TopicConfig
from rayq.errors import StorageError
from rayq.storage import checked_file
from rayq.storage.batch import encode_batch, read_header
from rayq.storage.data_directory import PartitionDirectory
from rayq.storage.log import Log
from rayq.storage.metadata_log import MetadataLog

CONFIG = TopicConfig()
PATH = "/data/t-0"


def opened(process: Process) -> Log:
    disk = process.environment.disk
    return process.call(
        lambda: Log.open(disk, PATH, CONFIG, checkpoint_bytes=1 << 30, now_ms=1_000)
    )


def named(process: Process) -> PartitionDirectory:
    return process.call(
        lambda: PartitionDirectory.open(
            process.environment,
            PATH,
            topic="t",
            topic_id="id",
            partition=0,
            incarnation="i",
            pid_start_time=process.environment.pid,
        )
    )


def append(log: Log, count: int) -> None:
    for number in range(count):
        batch = encode_batch([b"%d" % number * 200], None, None, 1_000, compression="none")
        log.append_as_leader(batch, read_header(batch), leader_epoch=1, now_ms=1_000)


@pytest.mark.parametrize("seed", range(40))
def test_what_the_next_process_takes_for_written_survives_a_power_loss(seed: int) -> None:
    with World(seed) as world:
        host = world.host()
        process = host.process("first")
        process.call(checked_file.make_directory, process.environment.disk, "/data")
        log = opened(process)
        process.call(append, log, 60)
        fault = host.disk.fail("sync", path_part=".log", error=errno.EIO)
        plan = log.plan_flush(0)
        assert plan is not None
        with pytest.raises(OSError, match="Input/output"):
            process.call(plan.run)
        process.kill()
        fault.heal()
        taken_for_written = opened(host.process("second")).flushed_offset
        host.power_loss()
        assert opened(host.process("third")).end_offset == taken_for_written


@pytest.mark.parametrize("seed", range(10))
def test_a_directory_whose_name_could_not_be_synced_gets_it_from_the_next_process(
    seed: int,
) -> None:
    with World(seed) as world:
        host = world.host()
        process = host.process("first")
        process.call(checked_file.make_directory, process.environment.disk, "/data")
        fault = host.disk.fail("sync", path_part="partition.json", error=errno.EIO)
        directory = named(process)
        with pytest.raises(StorageError, match="Input/output"):
            process.call(directory.sync, process.environment.disk)
        process.kill()
        fault.heal()
        second = host.process("second")
        second.call(named(second).sync, second.environment.disk)
        opened(second)
        host.power_loss()
        assert named(host.process("third")).meta.topic_id == "id"


@pytest.mark.parametrize("seed", range(40))
def test_the_metadata_log_does_not_believe_the_page_cache_either(seed: int) -> None:
    with World(seed) as world:
        host = world.host()
        process = host.process("first")
        log = process.call(MetadataLog.open, process.environment.disk, "/metadata")
        process.call(log.append, [(1, 1, b"kept")])
        fault = host.disk.fail("sync", path_part="/metadata", error=errno.EIO)
        with pytest.raises(Exception, match="could not be written"):
            process.call(log.append, [(2, 1, b"x" * 5000)])
        process.kill()
        fault.heal()
        process = host.process("second")
        held = process.call(MetadataLog.open, process.environment.disk, "/metadata").last_index
        host.power_loss()
        process = host.process("third")
        log = process.call(MetadataLog.open, process.environment.disk, "/metadata")
        assert log.last_index == held
