"""The cost of rights: a cached grant, and the servers' time for a produce and for a fetch.

In one process, in turns: the superuser, and a principal with 100 ACLs. A produce request has one
numbered batch of 10 records of 100 bytes, as a producer sends it; a fetch is answered by one record
of 1,000 bytes. Each request goes to the leader over one connection, `IN_FLIGHT` at a time. What
counts is the processor time of the servers' own thread. The turns are short, and each is compared
with its neighbour: the speed of a shared machine changes within a second. `--against DIR`
alternates with another checkout, for the superuser where nobody is set up.

Run: python -m benchmarks.access [--against DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rayq import messages
from rayq.client.environment import system_environment
from rayq.messages.acls import Acl
from rayq.storage.batch import encode_batch
from rayq.testing import LocalCluster
from rayq.wire.authentication import Identity
from rayq.wire.connection import Connection
from rayq.wire.tokens import draw_token, key_of_token, verifiers_of

SALT = b"0123456789abcdef"
ROUNDS, REQUESTS, IN_FLIGHT = 400, 200, 32
RECORDS, RECORD_BYTES = 10, 100
ACLS = 100
TOPICS = ("orders", "read")
TIMEOUT_S = 60.0
PAIRS = 6
"""Number of turns of each checkout."""


class Bench:
    """One broker, and connections to the leader of one partition."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.token = draw_token("anna", os.urandom)
        thread = next(thread for thread in threading.enumerate() if thread.name == "rayq-servers")
        assert thread.ident is not None
        self._clock = time.pthread_getcpuclockid(thread.ident)
        self._values = [os.urandom(RECORD_BYTES) for _ in range(RECORDS)]
        self._producer_ids = itertools.count(1)
        for topic in TOPICS:
            cluster.create_topic(topic, flush="os")
        with cluster.producer() as producer:
            producer.send("read", value=os.urandom(RECORDS * RECORD_BYTES)).result(TIMEOUT_S)

    def set_up(self) -> None:
        """Makes a principal that may use the topic, among other ACLs."""
        client, background = self.cluster.shared_client()
        rules = [Acl("anna", "allow", "read", "topic", f"other-{at}") for at in range(ACLS - 2)]
        rules += [
            Acl("anna", "allow", "write", "topic", "orders"),
            Acl("anna", "allow", "read", "topic", "read"),
        ]
        for change in (
            messages.CreatePrincipal("anna", SALT),
            messages.CreateToken("anna", "01", verifiers_of(self.token, SALT)),
            messages.CreateAcls(rules),
        ):
            background.run(client.change(change, timeout_s=TIMEOUT_S))
        time.sleep(1.0)  # The processes hear of it.

    def measure(self, principals: bool, rounds: int = ROUNDS) -> dict[str, list[float]]:
        """The servers' time for a request, in microseconds, in each round."""
        superuser = Identity(
            role="client", key=key_of_token(self.cluster.token), cluster_id=None, broker=None
        )
        identities = {"superuser": superuser}
        if principals:
            identities["principal"] = Identity.of_client(self.token, None)
        return self._measured(identities, rounds)

    def _measured(self, identities: dict[str, Identity], rounds: int) -> dict[str, list[float]]:
        client, background = self.cluster.shared_client()
        orders, read = [
            background.run(client.topic(topic, timeout_s=TIMEOUT_S)) for topic in TOPICS
        ]
        found: dict[str, list[float]] = {}

        async def work() -> None:
            environment = system_environment()
            connections: dict[tuple[str, str], Connection] = {}
            requests = {}
            for what, topic in (("produce", orders), ("fetch", read)):
                partition = topic.partitions[0]
                place = topic.topic_id, 0, partition.leader_epoch
                at = partition.replicas[0]
                assert at.host is not None and at.port is not None
                for name, identity in identities.items():
                    connections[what, name] = await Connection.open(
                        environment, at.host, at.port, identity
                    )
                requests[what] = (
                    messages.Produce(*place, 1, 30_000)
                    if what == "produce"
                    else messages.Fetch(*place, 0, None, 1 << 20, 0)
                )
            for number in range(rounds + 1):
                # Each is as often the first after the other kind of requests, whose code is warm.
                order = list(identities) if number % 2 else list(reversed(identities))
                for what, name in itertools.product(requests, order):
                    payloads = self._batches() if what == "produce" else [b""] * REQUESTS
                    used_us = await self._round(connections[what, name], requests[what], payloads)
                    if number:  # The first warms up.
                        found.setdefault(f"{what} {name}", []).append(used_us)
            for connection in connections.values():
                connection.close()

        asyncio.run(work())
        return found

    def _batches(self) -> list[bytes]:
        """Batches of a new producer."""
        producer_id = next(self._producer_ids)
        return [
            bytes(
                encode_batch(
                    self._values,
                    timestamps_ms=1,
                    compression="none",
                    producer_id=producer_id,
                    base_sequence=number * RECORDS,
                )
            )
            for number in range(REQUESTS)
        ]

    async def _round(
        self, connection: Connection, request: messages.AnyRequest, payloads: list[bytes]
    ) -> float:
        left = iter(payloads)

        async def worker() -> None:
            for payload in left:
                await connection.request(request, payload, timeout_s=TIMEOUT_S)

        began_s = time.clock_gettime(self._clock)
        await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
        return (time.clock_gettime(self._clock) - began_s) * 1e6 / REQUESTS


def cached_grant_us() -> tuple[float, float]:
    """The processor time of a check that finds its grant, and that of the loop around it."""
    from rayq.actors.access import Access
    from rayq.core.cluster.records import AclCreated, PrincipalCreated, TopicCreated
    from rayq.core.cluster.state import ClusterState
    from rayq.environment import SystemClock
    from rayq.wire.answer_room import AnswerRoom
    from rayq.wire.peer import Peer

    state = ClusterState()
    for record in (
        TopicCreated("0" * 32, "orders", {}, 1),
        PrincipalCreated("anna", SALT, 0),
        AclCreated(Acl("anna", "allow", "read", "topic", "orders")),
    ):
        state.replay(record)
    access = Access(SystemClock())
    access.update(state, state)
    access.freshness.note(time.monotonic(), 3600.0)
    closed: Any = None
    peer = Peer("client", None, "10.0.0.1:1", closed, AnswerRoom(lambda: True), "anna")
    data = messages_of(1_000)
    check, now_s = access.check, time.monotonic()

    def loop(requests: list[messages.Fetch]) -> float:
        began = time.process_time()
        for request in requests:
            check(peer, request, now_s)
        return time.process_time() - began

    def empty(requests: list[messages.Fetch]) -> float:
        began = time.process_time()
        for request in requests:
            id(request)
        return time.process_time() - began

    # Decoded again each time: the hash of an id is part of the cost.
    checks = [loop(data()) for _ in range(200)]
    nothing = [empty(data()) for _ in range(200)]
    return min(checks) * 1e6 / 1_000, min(nothing) * 1e6 / 1_000


def messages_of(count: int) -> Any:
    from rayq.wire.codec import DECODERS, ENCODER

    header = ENCODER.encode(messages.Fetch("0" * 32, 0, 1, 0, None, 1, 0))
    decoder = DECODERS[messages.Fetch]
    return lambda: [decoder.decode(header) for _ in range(count)]


def ratios(of: list[float], to: list[float]) -> str:
    """The median ratio of the pairs and their middle half; and the ratio of the least times."""
    pairs = sorted(time_us / other_us for time_us, other_us in zip(of, to, strict=True))
    quarter = len(pairs) // 4
    return (
        f"{statistics.median(pairs):.3f} ({pairs[quarter]:.3f} to {pairs[-1 - quarter]:.3f}; "
        f"least times {min(of) / min(to):.3f})"
    )


def of_one_checkout(directory: str) -> dict[str, list[float]]:
    """The times of the superuser of a cluster without principals, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": directory}
    script = str(Path(__file__).resolve())
    done = subprocess.run(
        [sys.executable, script, "--alone"],
        env=environment, cwd=directory, check=True, capture_output=True, text=True,
    )  # fmt: skip
    found: dict[str, list[float]] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", help="another checkout")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone:
        with LocalCluster(1) as cluster:
            print(json.dumps(Bench(cluster).measure(False, rounds=ROUNDS // 2)))
        return
    if arguments.against:
        here = str(Path(__file__).resolve().parents[1])
        mine: dict[str, list[float]] = {}
        theirs: dict[str, list[float]] = {}
        for pair in range(PAIRS):
            turns = [(here, mine), (arguments.against, theirs)]
            for directory, found in turns if pair % 2 else reversed(turns):
                for what, times in of_one_checkout(directory).items():
                    found.setdefault(what, []).append(min(times))
        for what, times in mine.items():
            before = min(theirs[what])
            print(
                f"{what}, nobody set up: {ratios(times, theirs[what])} of the {before:.1f} us there"
            )
        return
    hit_us, loop_us = cached_grant_us()
    print(f"a cached grant: {hit_us:.3f} us, of which the loop {loop_us:.3f}")
    with LocalCluster(1) as cluster:
        bench = Bench(cluster)
        bench.set_up()
        found = bench.measure(True)
        for what in ("produce", "fetch"):
            superuser, principal = found[f"{what} superuser"], found[f"{what} principal"]
            print(
                f"{what}: a principal takes {ratios(principal, superuser)} times the "
                f"{statistics.median(superuser):.1f} us of the superuser"
            )


if __name__ == "__main__":
    main()
