"""Faults that take rights of guests away, and give them back.

Two kinds are aimed at what a server does that does not know of it yet. One broker is cut off from
all other servers, for longer than it may go by what it knows. Or it is so slow to hear of anything
that the right is gone while a change, which that broker has let in, is on its way to the
controller.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from proving.simulation.faults import Faults, Injection
from proving.simulation.faults_aimed import found_soon
from proving.simulation.link import NetworkHost
from proving.simulation.principals import TAKING, WAYS, Login, Principals, Way
from proving.simulation.server_view import server_of_broker

GONE_S = (0.1, 5.0)
"""The least and the greatest time for which a right is gone."""
OVERTIME_S = (2.0, 4.0)
"""The least and the greatest time for which a broker is cut off beyond its patience."""
NO_MAJORITY_S = 5.0
"""The longest wait for a revocation, before the time of a cut begins: the other servers may be no
majority, so that nothing is revoked before it ends."""
LATE_S = (0.3, 1.0)
"""The delay of what a slow broker sends and hears."""
CHANGES_MAX = 4
"""Number of times that a right is gone while one broker is slow."""
SOON_BACK_S = (0.1, 2.0)
AT_ONCE = (Principals.remove_acls, Principals.revoke_token, Principals.delete_principal)
"""The ways that take the right to a change by one change of their own."""


def taking_rights(principals: Principals, *, cuts_brokers: bool) -> Injection:
    """A fault: a guest loses a right or its token, and gets it back. With `cuts_brokers` a broker
    may hear of it late, or not at all. A seed has few of these faults, so their kinds take
    turns, in another order each time."""
    turns: list[Kind] = []

    async def strike(faults: Faults) -> None:
        guests = [guest for guest in principals.guests if not guest.is_revoked]
        if not guests:
            return
        if not turns:
            turns.extend(KINDS if cuts_brokers else [_anywhere])
            faults.rng.shuffle(turns)
        await turns.pop()(principals, faults, faults.rng.choice(guests))

    return strike


async def _anywhere(principals: Principals, faults: Faults, guest: Login) -> None:
    way = faults.rng.choice(WAYS)
    faults.begin(_what(guest, way))
    await principals.revoke(guest, way, gone=partial(faults.last, *GONE_S))


async def _behind_a_cut(principals: Principals, faults: Faults, guest: Login) -> None:
    way, number, network = faults.rng.choice(TAKING), faults.any_broker(), faults.world.network
    broker, others = _broker_and_others(faults, number)
    faults.begin(f"{_what(guest, way)}, while broker {number} is cut off")
    network.cut([broker], others, both_ways=faults.rng.random() < 0.7)
    patience_s = faults.cluster.config.access_patience_ms / 1000
    lasts_s = patience_s + faults.rng.uniform(*OVERTIME_S)
    is_gone = asyncio.Event()

    async def gone() -> None:
        is_gone.set()
        await asyncio.sleep(lasts_s)

    async def heal() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(is_gone.wait(), NO_MAJORITY_S)
        await asyncio.sleep(lasts_s)
        network.heal([broker], others)

    await asyncio.gather(heal(), principals.revoke(guest, way, gone=gone))


async def _while_a_change_is_on_its_way(
    principals: Principals, faults: Faults, guest: Login
) -> None:
    number, network = faults.any_broker(), faults.world.network
    broker, others = _broker_and_others(faults, number)
    faults.begin(f"broker {number} is slow, and passes changes of {guest.name} on")
    network.slow([broker], others, delay_s=LATE_S)
    for _ in range(faults.rng.randint(1, CHANGES_MAX)):
        begin_s = faults.world.now_s

        def asked() -> list[Login]:
            known = faults.cluster.brokers.get(number)
            server, at_s = principals.judge.asked_at.get(guest.name, (None, 0.0))
            is_here = known is not None and server is server_of_broker(known)
            return [guest] if is_here and at_s > begin_s else []  # noqa: B023

        if not await found_soon(faults, asked) or guest.is_revoked:
            break
        way = faults.rng.choice(AT_ONCE)
        faults.note(_what(guest, way))
        await principals.revoke(guest, way, gone=partial(faults.last, *SOON_BACK_S))
    network.heal([broker], others)


Kind = Callable[[Principals, Faults, Login], Coroutine[Any, Any, None]]
KINDS: list[Kind] = [_anywhere, _behind_a_cut, _while_a_change_is_on_its_way]


def _what(guest: Login, way: Way) -> str:
    return f"{way.__name__.replace('_', ' ')}: {guest.name}"


def _broker_and_others(
    faults: Faults, number: int
) -> tuple[NetworkHost, list[NetworkHost]]:
    """The host of a broker, and those of all other servers."""
    cluster = faults.cluster
    broker = cluster.hosts[number]
    others = [host for host in (*cluster.hosts, cluster.controller_host) if host is not broker]
    return broker, [*others]
