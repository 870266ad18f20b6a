"""Ten hostile clients, with and without the cluster's token: what they do, again and again.

They run in a process of its own at the idle priority (nice 19 would not do: Ray has servers at 15).
So a run measures what they cost the servers, and not what they cost the machine that they share
with the servers here.
"""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import msgspec

from proving.raw_socket import RawSocket
from rayq.errors import RayqError
from rayq.messages import Fetch, ListOffsets, Metadata, Produce
from rayq.storage.batch import encode_batch
from rayq.wire.authentication import KEY_BYTES
from rayq.wire.frames import PREFIX, encode_head
from rayq.wire.tokens import key_of_token

MIB = 1024**2
PAUSE_S = 0.1
"""The pause between two rounds of one attacker."""
STOP_TIMEOUT_S = 30.0
HALF_OPEN_MAX = 300
"""The number of sockets that an attacker keeps open and silent."""


@dataclass(frozen=True)
class Leader:
    """One partition, its leader, and the epoch in which that broker leads."""

    host: str
    port: int
    topic_id: str
    partition: int
    leader_epoch: int


@dataclass(frozen=True)
class Targets:
    """The arguments of the process of attackers."""

    token: str = field(repr=False)
    brokers: tuple[tuple[str, int], ...]
    read_from: tuple[Leader, ...]
    """The leaders of the honest clients' topic. Attackers only read it."""
    write_to: tuple[Leader, ...]
    """The leaders of the attackers' own topic."""
    seed: int


class Attacker:
    """Each method that `ATTACKS` names is one round of one attack."""

    def __init__(self, targets: Targets, rng: random.Random, stop: threading.Event) -> None:
        self._targets = targets
        self._key = key_of_token(targets.token)
        self._rng = rng
        self._stop = stop
        self._open: deque[RawSocket] = deque()

    def _anybody(self) -> tuple[str, int]:
        leaders = [(server.host, server.port) for server in self._targets.read_from]
        return self._rng.choice([*self._targets.brokers, *leaders])

    @contextlib.contextmanager
    def _connected(self, at: tuple[str, int]) -> Iterator[RawSocket]:
        with contextlib.closing(RawSocket(at)) as connected:
            connected.authenticate(self._key)
            yield connected

    def half_open(self) -> None:
        """Sockets that never send a byte."""
        for _ in range(20):
            self._open.append(RawSocket(self._anybody()))
            if len(self._open) > HALF_OPEN_MAX:
                self._open.popleft().close()

    def garbage(self) -> None:
        """Bytes that are no frame, before and after the handshake."""
        with contextlib.closing(RawSocket(self._anybody())) as connected:
            connected.write(self._rng.randbytes(3000))
        with self._connected(self._anybody()) as connected:
            connected.write(self._rng.randbytes(3000))

    def wrong_token(self) -> None:
        with contextlib.closing(RawSocket(self._anybody())) as connected:
            connected.authenticate(self._rng.randbytes(KEY_BYTES))

    def come_and_go(self) -> None:
        """Connections that are authenticated and then left open."""
        for _ in range(5):
            with self._connected(self._anybody()):
                pass

    def fetches_never_read(self) -> None:
        leader = self._rng.choice(self._targets.read_from)
        with self._connected((leader.host, leader.port)) as connected:
            where = (leader.topic_id, leader.partition, leader.leader_epoch)
            connected.ask([Fetch(*where, 0, None, 16 * MIB, 0)] * 100)
            connected.ask([Fetch(*where, 0, None, 16 * MIB, 60_000)] * 400)
            self._stop.wait(3)

    def metadata_never_read(self) -> None:
        """Requests for all metadata, and for one name very often."""
        with self._connected(self._rng.choice(self._targets.brokers)) as connected:
            connected.ask([Metadata(["chaos"] * 50_000)] * 5)
            connected.ask([Metadata()] * 200)
            self._stop.wait(2)

    def parts_of_frames(self) -> None:
        leader = self._rng.choice(self._targets.read_from)
        with self._connected((leader.host, leader.port)) as connected:
            connected.write(PREFIX.pack(60 * MIB, 1, 0, Produce.api, 1, 100))
            connected.write(bytes(8 * MIB))
            self._stop.wait(3)

    def bombs(self) -> None:
        """A small batch that claims to be large, and bytes that are no batch."""
        leader = self._rng.choice(self._targets.write_to)
        with self._connected((leader.host, leader.port)) as connected:
            request = Produce(leader.topic_id, leader.partition, leader.leader_epoch, 1, 1000)
            now_ms = time.time_ns() // 1_000_000
            bomb = encode_batch([bytes(8 * MIB)], timestamps_ms=now_ms, compression="lz4")
            connected.ask([request], bytes(bomb))
            connected.ask([request], self._rng.randbytes(1000))
            for _ in range(2):
                with contextlib.suppress(RayqError):
                    connected.read_header()

    def many_requests(self) -> None:
        """Small requests, faster than the server can answer them."""
        leader = self._rng.choice(self._targets.read_from)
        with self._connected((leader.host, leader.port)) as connected:
            where = (leader.topic_id, leader.partition, leader.leader_epoch)
            connected.ask([ListOffsets(*where, -1)] * 2000)
            self._stop.wait(1)

    def enormous_headers(self) -> None:
        with self._connected(self._rng.choice(self._targets.brokers)) as connected:
            connected.ask([Metadata([f"topic-{number}" for number in range(60_000)])] * 3)
            connected.write(encode_head(1, 0, Metadata.api, 9, bytes(5 * MIB), 0))
            self._stop.wait(1)


ATTACKS: tuple[Callable[[Attacker], None], ...] = (
    Attacker.half_open,
    Attacker.garbage,
    Attacker.wrong_token,
    Attacker.come_and_go,
    Attacker.fetches_never_read,
    Attacker.metadata_never_read,
    Attacker.parts_of_frames,
    Attacker.bombs,
    Attacker.many_requests,
    Attacker.enormous_headers,
)
"""Each name is one hostile client."""


def attack(targets: Targets, stop: threading.Event) -> dict[str, int]:
    """Attacks until `stop` is set. Returns the number of rounds of each attack."""
    rounds = {attack.__name__: 0 for attack in ATTACKS}

    def go_on(repeated: Callable[[Attacker], None]) -> None:
        attacker = Attacker(targets, random.Random(f"{targets.seed}/{repeated.__name__}"), stop)
        while not stop.wait(PAUSE_S):
            with contextlib.suppress(OSError, RayqError, msgspec.ValidationError):
                repeated(attacker)  # A refusal or a disconnection is right.
            rounds[repeated.__name__] += 1

    threads = [threading.Thread(target=go_on, args=(attack,), daemon=True) for attack in ATTACKS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return rounds


def serve(targets: Targets, pipe: Connection) -> None:
    """A process of attackers. It ends when it is told to, or when its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop = threading.Event()
    done: list[dict[str, int]] = []
    runner = threading.Thread(target=lambda: done.append(attack(targets, stop)), daemon=True)
    runner.start()
    try:
        pipe.recv()
    except EOFError:
        return
    stop.set()
    runner.join(STOP_TIMEOUT_S)
    pipe.send(done[0] if done else {})
