"""Principals of a chaos run: whose rights never change, and guests whose rights come and go.

The ordinary clients log in as a principal that may write and read the topics of the load, and must
not notice anything. Each guest is a process that writes to the same topic as a principal of its
own. Meanwhile its ACLs are removed, its token is revoked or rotated, and it gets rights and token
back. No answer may succeed that was asked for more than a second after a revocation was
acknowledged, or, where a fault lasts, after `access_patience_ms`.
"""

from __future__ import annotations

import multiprocessing
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from proving.chaos.faults import Injected
from proving.chaos.guests import Answers, live
from proving.chaos.load import LoadSpec
from rayq.client.cluster import Cluster
from rayq.config import ClusterConfig
from rayq.errors import RayqError, TimeoutError
from rayq.messages.acls import Acl

LOAD, GUESTS = "load", ("guest-0", "guest-1")
KNOWN_AFTER_S = 1.0
"""Time after which each server knows a revocation, where nothing is broken."""
PAUSE_S = (0.5, 4.0)
GONE_S = (1.5, 6.0)
ADMIN_TIMEOUT_S = 90.0
LAST_GONE_S = 3.0
"""Time for which the last revocations last, after all faults."""
FINISH_TIMEOUT_S = 60.0
PROGRESS_TIMEOUT_S = 20.0


@dataclass
class Revoked:
    """A time in which a guest lacked a right."""

    guest: str
    way: str
    since_s: float
    """The time at which the revocation was acknowledged."""
    until_s: float = float("inf")
    """The time at which somebody began to give it back."""


class PrincipalLoad:
    """See the module. `spec_of` makes the principal of the ordinary clients; call `start`, then
    `finish`; `abort` in any case."""

    def __init__(
        self, cluster: Cluster, spec: LoadSpec, topics: Sequence[str], leniency: float
    ) -> None:
        """`leniency` multiplies the second, for machines that others use as well."""
        self._admin = cluster.admin
        self._known_after_s = leniency * KNOWN_AFTER_S
        self._spec = spec
        self._topics = topics
        self._rng = random.Random(f"{spec.seed}/principals")
        self._context = multiprocessing.get_context("spawn")
        self._processes: list[Any] = []
        self._pipes: dict[str, Connection] = {}
        self._tokens: dict[str, str] = {}
        """The id of each guest's token."""
        self._revoked: list[Revoked] = []
        self._is_calm = threading.Event()
        self._problems: list[str] = []
        self._operator = threading.Thread(target=self._operate, daemon=True)
        self.counts: Counter[str] = Counter()
        """The revocations, and how many were judged by a second, for people."""

    def spec_of(self, spec: LoadSpec) -> LoadSpec:
        """The load of clients that log in as a principal."""
        if LOAD not in self._tokens:
            self._admin.create_principal(LOAD)
            self._admin.create_acls(self._acls(LOAD))
            created = self._admin.create_token(LOAD)
            self._tokens[LOAD] = created.token
        return replace(spec, token=self._tokens[LOAD])

    def start(self) -> None:
        for guest in GUESTS:
            self._admin.create_principal(guest)
            self._admin.create_acls(self._acls(guest))
            created = self._admin.create_token(guest)
            self._tokens[guest] = created.token_id
            here, there = self._context.Pipe()
            process: Any = self._context.Process(
                target=live, args=(self._spec, guest, created.token, there), name=guest, daemon=True
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes[guest] = here
        self._operator.start()

    def finish(self, faults: Sequence[Injected]) -> list[str]:
        """Revokes and gives back once more, while nothing is broken; then ends the guests and
        judges what they were answered."""
        self._is_calm.set()
        self._operator.join()
        for guest in GUESTS:
            for way in self._ways():
                self._revoke(guest, way, self._known_after_s + LAST_GONE_S)
        given_back_s = time.monotonic()
        time.sleep(PROGRESS_TIMEOUT_S / 4)
        for guest in GUESTS:
            answers = self._end(guest)
            if answers is not None:
                self._judge(guest, answers, faults)
                if not any(asked_s > given_back_s for asked_s in answers.asked_s):
                    self._problems.append(f"{guest} has its rights again, and gets no answer.")
        return self._problems

    def abort(self) -> None:
        self._is_calm.set()
        for process in self._processes:
            process.kill()
            process.join()

    def _acls(self, principal: str) -> list[Acl]:
        return [
            Acl(principal, "allow", operation, "topic", topic)
            for topic in self._topics
            for operation in ("write", "read")
        ]

    # --- the operator -----------------------------------------------------------------------------

    def _ways(self) -> list[Callable[[str, float], None]]:
        return [self._without_acls, self._without_token, self._with_another_token]

    def _operate(self) -> None:
        while not self._is_calm.wait(self._rng.uniform(*PAUSE_S)):
            way = self._rng.choice(self._ways())
            self._revoke(self._rng.choice(GUESTS), way, self._rng.uniform(*GONE_S))

    def _revoke(self, guest: str, way: Callable[[str, float], None], gone_s: float) -> None:
        try:
            way(guest, gone_s)
        except RayqError as error:
            self._problems.append(f"{way.__name__} of {guest}: {type(error).__name__}: {error}")

    def _without_acls(self, guest: str, gone_s: float) -> None:
        acls = self._acls(guest)
        self._again(lambda: self._admin.delete_acls(acls, timeout_s=ADMIN_TIMEOUT_S))
        self._gone(guest, "ACLs removed", gone_s)
        self._again(lambda: self._admin.create_acls(acls, timeout_s=ADMIN_TIMEOUT_S))

    def _without_token(self, guest: str, gone_s: float) -> None:
        token_id = self._tokens[guest]
        self._admin.revoke_token(guest, token_id, timeout_s=ADMIN_TIMEOUT_S)
        self._gone(guest, "token revoked", gone_s)
        self._new_token(guest)

    def _with_another_token(self, guest: str, _: float) -> None:
        """Rotates the token: the guest always has a valid one."""
        old = self._tokens[guest]
        self._new_token(guest)
        time.sleep(self._known_after_s)
        self._admin.revoke_token(guest, old, timeout_s=ADMIN_TIMEOUT_S)
        self.counts["token rotated"] += 1

    def _new_token(self, guest: str) -> None:
        created = self._admin.create_token(guest, timeout_s=ADMIN_TIMEOUT_S)
        self._tokens[guest] = created.token_id
        self._pipes[guest].send(created.token)

    def _gone(self, guest: str, way: str, gone_s: float) -> None:
        self.counts[way] += 1
        revoked = Revoked(guest, way, time.monotonic())
        self._revoked.append(revoked)
        time.sleep(gone_s)
        revoked.until_s = time.monotonic()

    def _again(self, call: Callable[[], None]) -> None:
        """Calls until it is answered: doing it twice is the same as doing it once."""
        while True:
            try:
                return call()
            except TimeoutError:
                continue

    # --- the judge --------------------------------------------------------------------------------

    def _end(self, guest: str) -> Answers | None:
        pipe = self._pipes[guest]
        try:
            pipe.send("stop")
            if pipe.poll(FINISH_TIMEOUT_S):
                answers: Answers = pipe.recv()
                return answers
        except (EOFError, BrokenPipeError):
            pass
        self._problems.append(f"The process of {guest} did not end.")
        return None

    def _judge(self, guest: str, answers: Answers, faults: Sequence[Injected]) -> None:
        patience_s = ClusterConfig().access_patience_ms / 1000
        self.counts["answers to guests"] += len(answers.asked_s)
        for revoked in self._revoked:
            if revoked.guest != guest:
                continue
            is_broken = any(
                fault.started_s < revoked.until_s and revoked.since_s < fault.settled_s
                for fault in faults
            )
            limit_s = patience_s if is_broken else self._known_after_s
            if revoked.until_s > revoked.since_s + limit_s:
                self.counts[f"judged by {limit_s:g} s"] += 1
            late = [
                asked_s - revoked.since_s
                for asked_s, answered_s in zip(answers.asked_s, answers.answered_s, strict=True)
                if revoked.since_s + limit_s < asked_s and answered_s < revoked.until_s
            ]
            if late:
                self._problems.append(
                    f"{guest} was answered {len(late)} times after {revoked.way}, the last one "
                    f"asked for {max(late):.2f} s later."
                )
