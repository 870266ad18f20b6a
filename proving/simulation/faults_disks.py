"""The faults of wall clocks and disks, and disks that are gone."""

from __future__ import annotations

import asyncio
import errno

from proving.simulation.faults import Faults

CLOCK_JUMPS_MS = (-1_200_000, -60_000, -1_000, 1_000, 60_000, 1_200_000)


async def jump_a_clock(faults: Faults) -> None:
    host = faults.rng.choice(faults.cluster.hosts)
    jump_ms = faults.rng.choice(CLOCK_JUMPS_MS)
    faults.begin(f"the clock of {host.name} jumps by {jump_ms} ms")
    host.jump_clock(jump_ms)
    await faults.last()
    host.jump_clock(-jump_ms)


async def disk_errors(faults: Faults) -> None:
    """Gives one broker's partitions EIO: such a replica stops, and is started again later."""
    await _fail_disk(faults, faults.rng.choice(("write", "read", "rename")))


async def failed_syncs(faults: Faults) -> None:
    """Fails syncs of one broker's partitions. Afterwards the page cache shows bytes that the disk
    does not hold."""
    await _fail_disk(faults, "sync")


async def _fail_disk(faults: Faults, operation: str) -> None:
    number = faults.any_broker()
    host = faults.cluster.hosts[number]
    times = faults.rng.choice((1, 1, 3, None))
    topic = f"/{faults.rng.choice(faults.topics)}-"
    faults.begin(f"disk errors of broker {number}: {operation} below {topic}")
    fault = host.disk.fail(operation, path_part=topic, error=errno.EIO, times=times)
    faults.disk_faults.append(fault)
    await faults.last(0.5, 6.0)
    fault.heal()
    if faults.has_failed_replicas(number):
        await faults.crash_host(number)
        await asyncio.sleep(faults.rng.uniform(0, 1))
        faults.ensure_broker(number)


async def disk_full(faults: Faults) -> None:
    number = faults.any_broker()
    disk = faults.cluster.hosts[number].disk
    faults.begin(f"the disk of broker {number} is full")
    fault = disk.fail("write", path_part=f"/{faults.topics[0]}-", error=errno.ENOSPC, times=20)
    faults.disk_faults.append(fault)
    if faults.rng.random() < 0.5:
        # Not all writes fail: the metadata still has its reserve.
        fault.heal()
        disk.capacity_bytes = (1 << 40) - disk.free_bytes() + (32 << 20)
    disk.short_writes = 0.2
    await faults.last(0.5, 12.0)
    fault.heal()
    disk.capacity_bytes, disk.short_writes = None, 0.0


async def disk_stall(faults: Faults) -> None:
    number = faults.any_broker()
    seconds = faults.rng.uniform(0.5, 6.0)
    faults.begin(f"the disk of broker {number} stalls for {seconds:.1f} s")
    faults.cluster.hosts[number].disk.stall(seconds)
    await asyncio.sleep(seconds)


async def lose_a_disk(faults: Faults) -> None:
    """Takes a disk away. No other fault may meet this one: where a partition has two replicas, and
    the other replica restarts now, it waits for the disk that is gone (rule 2)."""
    faults.cluster.loses_a_disk = True
    await faults.calm()
    number = faults.any_broker()
    if faults.rng.random() < 0.5:
        await _return_with_an_empty_disk(faults, number)
    else:
        await _return_with_an_old_copy(faults, number)
    await faults.calm()
    faults.cluster.loses_a_disk = False


async def _return_with_an_empty_disk(faults: Faults, number: int) -> None:
    """Starts the victim again, sometimes before any server has noticed that it was gone."""
    faults.begin(f"broker {number} loses its disk")
    faults.cluster.hosts[number].power_loss()
    await faults.last(*faults.rng.choice(((0.05, 1.0), (0.1, 8.0))))
    faults.cluster.format_empty_disk(number)
    faults.ensure_broker(number)


async def _return_with_an_old_copy(faults: Faults, number: int) -> None:
    """Gives a broker its disk as it was before its last start, as a restored backup does."""
    host = faults.cluster.hosts[number]
    faults.begin(f"broker {number} returns with an old copy of its disk")
    host.power_loss()
    copy = host.disk.copy(f"{host.name}.copy")
    await faults.last(0.1, 2.0)
    faults.ensure_broker(number)
    await faults.calm()
    await faults.last(0.5, 6.0)
    await faults.calm()
    host.power_loss()
    host.swap_disk(copy)
    await faults.last(0.1, 3.0)
    faults.ensure_broker(number)
