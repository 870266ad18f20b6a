"""The faults of processes and machines: they die, lose their power, stand still."""

from __future__ import annotations

import asyncio

from proving.simulation.faults import Faults
from proving.simulation.server_view import replicas_of, role_of
from rayq import messages
from rayq.actors.replica.leader import Leader
from rayq.errors import RayqError
from rayq.wire.authentication import Identity
from rayq.wire.pool import ConnectionPool


async def kill_a_replica(faults: Faults) -> None:
    number = faults.any_broker()
    processes = faults.cluster.replica_processes(number)
    if processes:
        victim = faults.rng.choice(processes)
        faults.begin(f"kill {victim.name}")
        victim.kill()


async def kill_a_leader(faults: Faults) -> None:
    await faults.moment()
    leaders = [
        process
        for number in range(len(faults.cluster.hosts))
        for process in faults.cluster.replica_processes(number)
        if (host := faults.cluster.replica_hosts.get(process)) is not None
        and any(isinstance(role_of(replica), Leader) for replica in replicas_of(host).values())
    ]
    if leaders:
        victim = faults.rng.choice(leaders)
        faults.begin(f"kill the leader {victim.name}")
        victim.kill()


async def kill_a_broker(faults: Faults) -> None:
    """Kills only the broker's process. Its replicas run on."""
    number = faults.any_broker()
    faults.begin(f"kill broker {number}'s process")
    faults.cluster.kill_broker(number)
    await faults.last()
    faults.ensure_broker(number)


async def kill_a_host(faults: Faults) -> None:
    """Kills all processes of a host at once. The page cache survives."""
    await faults.moment()
    number = faults.any_broker()
    faults.begin(f"kill all of broker {number}")
    await faults.crash_host(number)
    await faults.last()
    faults.ensure_broker(number)


async def power_loss(faults: Faults) -> None:
    await faults.moment()
    number = faults.any_broker()
    faults.begin(f"power loss of broker {number}")
    faults.cluster.hosts[number].power_loss()
    await faults.last()
    faults.ensure_broker(number)


async def power_loss_of_all(faults: Faults) -> None:
    await faults.moment()
    faults.begin("power loss of all")
    hosts = [*faults.cluster.hosts, faults.cluster.controller_host]
    faults.rng.shuffle(hosts)
    for host in hosts:
        host.power_loss()
        if faults.rng.random() < 0.3:
            await asyncio.sleep(faults.rng.uniform(0, 0.05))
    await faults.last(0.1, 3.0)
    numbers = list(range(len(faults.cluster.hosts)))
    faults.rng.shuffle(numbers)
    for number in numbers:
        faults.ensure_broker(number)
        if faults.rng.random() < 0.6:
            await asyncio.sleep(faults.rng.uniform(0, 4))
    faults.ensure_controller()


async def crash_at_a_disk_operation(faults: Faults) -> None:
    """Ends a process, or its whole host, in the middle of one of its next writes or syncs."""
    await _crash_at_an_operation(faults, only_names=False)


async def crash_at_a_change_of_names(faults: Faults) -> None:
    """The same at operations where names and lengths of files change: snapshots, checkpoints,
    new and removed segments, swaps, truncations."""
    await _crash_at_an_operation(faults, only_names=True)


async def _crash_at_an_operation(faults: Faults, *, only_names: bool) -> None:
    processes = faults.servers()
    if not processes:
        return
    victim = faults.rng.choice(processes)
    power_loss = faults.rng.random() < 0.5
    how = "power loss" if power_loss else "crash"
    where = "a change of names" if only_names else "a disk operation"
    faults.begin(f"{how} of {victim.name} in {where} to come")
    victim.kill_at_disk_operation(
        faults.rng.randint(1, 6 if only_names else 30),
        power_loss=power_loss,
        only_names=only_names,
    )
    await faults.last(1.0, 8.0)
    victim.spare_disk_operations()
    for number in range(len(faults.cluster.hosts)):
        faults.ensure_broker(number)
    faults.ensure_controller()


async def kill_the_controller(faults: Faults) -> None:
    """Ends the controller, perhaps in the middle of a write of metadata."""
    faults.begin("kill the controller")
    await asyncio.sleep(faults.rng.choice((0.0, faults.rng.uniform(0, 0.5))))
    cluster = faults.cluster
    hosting = [
        number
        for number, broker in cluster.brokers.items()
        if cluster.broker_processes[number].alive
        and broker.controller_host.controller is not None
    ]
    if cluster.controller_process is not None and cluster.controller_process.alive:
        cluster.controller_process.kill()
    for number in hosting:
        cluster.kill_broker(number)
    await faults.last()
    for number in range(len(cluster.hosts)):
        faults.ensure_broker(number)
    if faults.rng.random() < 0.5:
        await faults.last()
    faults.ensure_controller()


async def stop_a_broker(faults: Faults) -> None:
    """Stops a broker in a controlled way. It comes back with exactly the logs that it
    reported."""
    number = faults.any_broker()
    process = faults.cluster.broker_processes[number]
    broker = faults.cluster.brokers.get(number)
    if not process.alive or broker is None or faults.cluster.broker_of.get(process) is None:
        return
    faults.begin(f"controlled stop of broker {number}")
    operator = faults.cluster.controller_host.process("operator")

    async def ask() -> None:
        identity = Identity(
            role="server",
            key=faults.cluster.secret,
            cluster_id=faults.cluster.cluster_id,
            broker=None,
        )
        pool = ConnectionPool(operator.environment, identity, faults.cluster.config)
        try:
            await pool.request(*broker.endpoint, messages.StopBroker(), timeout_s=20.0)
        except RayqError as error:
            faults.note(f"broker {number} did not stop: {error}")
        pool.close()

    await asyncio.wait(
        [operator.start(ask()), operator.exited], return_when=asyncio.FIRST_COMPLETED
    )
    operator.kill()
    await faults.last(0.3, 5.0)
    await faults.crash_host(number)
    faults.ensure_broker(number)


async def pause_a_process(faults: Faults) -> None:
    processes = faults.servers()
    if processes:
        victim = faults.rng.choice(processes)
        faults.begin(f"pause {victim.name}")
        victim.pause()
        await faults.last(0.5, 9.0)
        victim.resume()


async def pause_a_host(faults: Faults) -> None:
    host = faults.rng.choice([*faults.cluster.hosts, faults.cluster.controller_host])
    faults.begin(f"pause all of {host.name}")
    victims = list(host.processes)
    for victim in victims:
        victim.pause()
    await faults.last(0.5, 9.0)
    for victim in victims:
        victim.resume()


async def pause_replicas_while_their_broker_restarts(faults: Faults) -> None:
    """The new broker process finds directories that are held by paused processes."""
    number = faults.any_broker()
    faults.begin(f"pause broker {number}'s replicas, and restart the broker")
    victims = faults.cluster.replica_processes(number)
    for victim in victims:
        victim.pause()
    faults.cluster.kill_broker(number)
    await faults.last(0.1, 1.0)
    faults.ensure_broker(number)
    await faults.last(0.5, 8.0)
    for victim in victims:
        victim.resume()


async def pause_at_a_disk_operation(faults: Faults) -> None:
    """Pauses a process just after one of its next writes or syncs: the change is on disk, and
    the process has neither heard of that nor told any other process."""
    processes = faults.servers()
    if processes:
        victim = faults.rng.choice(processes)
        faults.begin(f"pause {victim.name} in a disk operation to come")
        victim.pause_at_disk_operation(faults.rng.randint(1, 30))
        await faults.last(1.0, 12.0)
        victim.resume()
