"""When a holder of a queue's locks counts as gone."""

from __future__ import annotations

import asyncio

from proving.simulation import World
from rayq.actors.queues.waiting import GRACE_S, LockOwners
from rayq.wire.answer_room import AnswerRoom
from rayq.wire.peer import Peer


def test_time_in_which_nobody_could_connect_again_is_added_to_the_grace_of_a_holder() -> None:
    async def script() -> None:
        gone: set[str] = set()
        unheard_s = 7.0
        owners = LockOwners(
            on_gone=gone.update, on_closed=lambda connection: None, unheard_s=lambda: unheard_s
        )
        closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        owners.heard("a", Peer("client", None, "here", closed, AnswerRoom(lambda: True)))
        closed.set_result(None)
        await asyncio.sleep(GRACE_S / 2)
        unheard_s += 2
        await asyncio.sleep(GRACE_S / 2 + 1.9)
        assert not gone
        await asyncio.sleep(0.2)
        assert gone == {"a"}

    with World(seed=1) as world:
        world.run(world.host("a").process("queue").run(script()))


def test_a_process_that_stood_still_frees_locks_one_second_of_listening_after_the_end() -> None:
    """Its timer fires late by the time that it stood still, which is not waited for again."""
    gone: set[str] = set()
    unheard_s = 0.0

    async def script() -> None:
        owners = LockOwners(
            on_gone=gone.update, on_closed=lambda connection: None, unheard_s=lambda: unheard_s
        )
        closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        owners.heard("a", Peer("client", None, "here", closed, AnswerRoom(lambda: True)))
        closed.set_result(None)
        await asyncio.sleep(60)

    with World(seed=1) as world:
        process = world.host("a").process("queue")
        process.start(script())

        async def faults() -> None:
            nonlocal unheard_s
            await asyncio.sleep(GRACE_S / 2)
            process.pause()
            await asyncio.sleep(5)
            unheard_s += 5
            process.resume()
            await asyncio.sleep(GRACE_S / 2 - 0.1)
            assert not gone
            await asyncio.sleep(0.2)
            assert gone == {"a"}

        world.run(faults())
