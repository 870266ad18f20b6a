"""A guest of a chaos run: a process that writes, reads and asks as a principal, whose rights come
and go (`principals`).

It notes when each answer was asked for, and when it came, by `time.monotonic`, which is one clock
for all processes of a machine.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection

from proving.chaos.load import LoadSpec
from rayq.client.cluster import Cluster
from rayq.errors import DeliveryError, RayqError
from rayq.records import RecordMetadata
from rayq.wire.authentication import client_key_of

RECORDS_PER_S = 50
ASK_S = 0.1
"""Interval at which a guest asks where the partitions end."""
ASK_TIMEOUT_S = 5.0
RETRY_S = 0.2
DELIVERY_TIMEOUT_MS = 4_000
LIFE_S = (5.0, 15.0)
"""Range of the time for which a guest keeps its connections; with another token it needs others at
once."""


@dataclass
class Answers:
    """The times of what succeeded: asked for, and answered."""

    asked_s: array[float] = field(default_factory=lambda: array("d"))
    answered_s: array[float] = field(default_factory=lambda: array("d"))

    def note(self, asked_s: float) -> None:
        self.asked_s.append(asked_s)
        self.answered_s.append(time.monotonic())


class _Guest:
    """The guest's lives, one after the other."""

    def __init__(self, spec: LoadSpec, name: str, token: str) -> None:
        self.spec = spec
        self.name = name
        self.token = token
        self.answers = Answers()
        self.stop = threading.Event()
        self.has_news = threading.Event()
        """Set when there is another token."""
        self._recorder = spec.recorder()
        self._rng = random.Random(f"{spec.seed}/{name}")
        self._lives = 0

    def live(self) -> None:
        while not self.stop.is_set():
            self._lives += 1
            self.has_news.clear()
            until_s = time.monotonic() + self._rng.uniform(*LIFE_S)

            def lasts(until_s: float = until_s) -> bool:
                is_over = self.stop.is_set() or self.has_news.is_set()
                return not is_over and time.monotonic() < until_s

            with Cluster(self.spec.addresses.split(","), client_key_of(self.token)) as cluster:
                name = f"{self.name}.{self._lives}"
                threads = [
                    threading.Thread(target=work, args=(cluster, name, lasts))
                    for work in (self._write, self._read, self._ask)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()

    def _write(self, cluster: Cluster, name: str, lasts: Callable[[], bool]) -> None:
        recorder = self._recorder
        recorder.opened(name)
        producer = cluster.producer(acks="all", delivery_timeout_ms=DELIVERY_TIMEOUT_MS)
        count = 0
        while lasts():
            count += 1
            value = b"%s/%d" % (name.encode(), count)
            number = recorder.sending(name, self.spec.topic, None, value)
            note = partial(self._note, name, number, time.monotonic())
            try:
                producer.send(self.spec.topic, value, on_delivery=note)
            except RayqError as error:
                recorder.not_delivered(name, number, error)
                time.sleep(RETRY_S)
            time.sleep(1 / RECORDS_PER_S)
        try:
            producer.close()
        except DeliveryError:
            pass  # The record's own outcome has the error.

    def _note(
        self,
        name: str,
        number: int,
        sent_s: float,
        metadata: RecordMetadata | None,
        error: BaseException | None,
    ) -> None:
        self._recorder.outcome(name, number, metadata, error)
        if metadata is not None:
            self.answers.note(sent_s)

    def _read(self, cluster: Cluster, name: str, lasts: Callable[[], bool]) -> None:
        with cluster.consumer(auto_offset_reset="latest") as consumer:
            is_assigned = False
            while lasts():
                try:
                    if not is_assigned:
                        consumer.assign(self.spec.places)
                        is_assigned = True
                        for place in self.spec.places:
                            self._recorder.assigned(name, *place)
                    self._recorder.polled(name, consumer.poll(timeout_s=0.5))
                except RayqError:
                    time.sleep(RETRY_S)

    def _ask(self, cluster: Cluster, name: str, lasts: Callable[[], bool]) -> None:
        with cluster.consumer(default_api_timeout_ms=int(ASK_TIMEOUT_S * 1000)) as consumer:
            while lasts():
                asked_s = time.monotonic()
                try:
                    consumer.end_offsets(self.spec.places)
                except RayqError:
                    time.sleep(RETRY_S)
                else:
                    self.answers.note(asked_s)
                    time.sleep(ASK_S)


def live(spec: LoadSpec, name: str, token: str, pipe: Connection) -> None:
    """Lives until the parent says "stop", or is gone; anything else that it says is a new token.
    Answers with the times of what succeeded."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guest = _Guest(spec, name, token)
    runner = threading.Thread(target=guest.live, daemon=True)
    runner.start()
    while True:
        try:
            said: str = pipe.recv()
        except EOFError:
            return
        if said == "stop":
            break
        guest.token = said
        guest.has_news.set()
    guest.stop.set()
    runner.join()
    pipe.send(guest.answers)
