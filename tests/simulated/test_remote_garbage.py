"""What brokers remove of deleted topics, by sweeps that are slow, late, two, or on old metadata."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from proving.simulation import World
from proving.simulation.world import Host
from rayq import messages
from rayq.actors.broker.remote_garbage import CHECK_INTERVAL_S, LATE_PUTS_MS, RemoteGarbageSweep
from rayq.actors.broker.store_ownership import NOT_CHECKED, StoreOwnership
from rayq.config import DAY_MS, ClusterConfig
from rayq.core.cluster.records import RemoteGarbage
from rayq.core.cluster.state import ClusterState
from rayq.errors import InvalidRequestError, RemoteListError
from rayq.messages.remote_names import ObjectKind, RemoteName
from tests.pure.deciding import decide
from tests.pure.test_cluster_state import apply
from tests.pure.test_remote_changes import (
    CLUSTER,
    create,
    folder,
    id_of,
    manifest,
    move,
    pointer,
    tiered,
)
from tests.simulated.remote_store import PlayedObjects

DAY_S = DAY_MS / 1000


class Swept:
    """A controller's state, a store, and brokers that sweep it by metadata of their own."""

    def __init__(self) -> None:
        self.world = World(1)
        self.process = self.world.host().process("broker")
        self.environment = self.process.environment
        self.objects = PlayedObjects(self.environment)
        self.state = tiered()
        move(self.state, pointer())
        self.names = [
            str(RemoteName(folder(), ObjectKind.DATA, number, 1, 0)) for number in range(8)
        ]
        for name in [manifest(1), *self.names]:
            self.objects.put(name, b"x")
        self.asked: list[Any] = []
        self.before_answer: Callable[[], None] = lambda: None

    def delete(self, name: str = "t") -> None:
        now_ms = self.environment.clock.wall_ms()
        apply(self.state, decide(self.state, messages.DeleteTopic(name), now_ms=now_ms))

    async def ask_controller(self, request: Any) -> Any:
        await asyncio.sleep(0.01)
        self.before_answer()
        self.asked.append(request)
        apply(self.state, decide(self.state, request))
        return messages.ChangeResponse(1)

    def sweep(self, state: ClusterState | None = None) -> RemoteGarbageSweep:
        """A broker that knows this metadata; None: the newest."""

        async def check() -> None:
            return

        return RemoteGarbageSweep(
            self.environment,
            ClusterConfig(),
            cast(Any, SimpleNamespace(state=self.state if state is None else state)),
            self.objects,
            cast(Any, SimpleNamespace(check=check, halt=None)),
            broker=0,
            ask_controller=self.ask_controller,
        )

    def run(self, script: Callable[[], Awaitable[None]]) -> None:
        async def work() -> None:
            await script()

        with self.world:
            self.world.run(self.process.run(work()), limit_s=5 * DAY_S)

    def start(self, sweep: RemoteGarbageSweep) -> asyncio.Task[None]:
        return self.environment.tasks.spawn(sweep.run(), "sweep")


def test_what_a_topic_left_is_removed_after_the_delay_and_for_good_a_day_later() -> None:
    swept = Swept()
    swept.objects.put("notes.txt", b"somebody's")
    swept.objects.put(f"{folder()}notes.txt", b"somebody's")

    async def script() -> None:
        swept.delete()
        swept.start(swept.sweep())
        await asyncio.sleep(DAY_S - 2 * CHECK_INTERVAL_S)
        assert len(swept.objects.store) == 11 and swept.asked == []
        await asyncio.sleep(4 * CHECK_INTERVAL_S)
        assert sorted(swept.objects.store) == [f"{folder()}notes.txt", "notes.txt"]
        assert swept.state.garbage[id_of("t")].is_removing
        late = str(RemoteName(folder(), ObjectKind.DATA, 99, 1, 0))
        swept.objects.put(late, b"late")
        await asyncio.sleep(LATE_PUTS_MS / 1000)
        assert late not in swept.objects.store and not swept.state.garbage

    swept.run(script)


@pytest.mark.parametrize("began", ["before", "in the leap"])
def test_a_wall_clock_that_leaps_takes_nothing_of_a_deleted_topic_before_its_delay(
    began: str,
) -> None:
    swept = Swept()
    host = swept.process.host
    assert isinstance(host, Host)

    async def script() -> None:
        swept.delete()
        if began == "before":
            swept.start(swept.sweep())
            await asyncio.sleep(DAY_S / 4)
        host.jump_clock(10 * DAY_MS)
        if began == "in the leap":
            swept.start(swept.sweep())
        await asyncio.sleep(3 * CHECK_INTERVAL_S)
        assert len(swept.objects.store) == 9 and swept.asked == []
        host.jump_clock(-10 * DAY_MS)
        await asyncio.sleep(DAY_S / 2)
        assert len(swept.objects.store) == 9 and swept.asked == []
        await asyncio.sleep(DAY_S)
        assert not swept.objects.store

    swept.run(script)


def test_what_a_controller_whose_clock_was_days_ahead_deleted_goes_after_the_delay() -> None:
    swept = Swept()
    host = swept.process.host
    assert isinstance(host, Host)

    async def script() -> None:
        host.jump_clock(10 * DAY_MS)
        swept.delete()
        host.jump_clock(-10 * DAY_MS)
        swept.start(swept.sweep())
        await asyncio.sleep(DAY_S - 2 * CHECK_INTERVAL_S)
        assert len(swept.objects.store) == 9 and swept.asked == []
        await asyncio.sleep(4 * CHECK_INTERVAL_S)
        assert not swept.objects.store
        await asyncio.sleep(LATE_PUTS_MS / 1000)
        assert not swept.state.garbage

    swept.run(script)


def test_a_sweep_on_old_metadata_deletes_nothing_that_was_restored() -> None:
    swept = Swept()

    async def script() -> None:
        swept.delete()
        old = copy.deepcopy(swept.state)
        create(swept.state, "t2", restored=[pointer()])
        swept.start(swept.sweep(old))
        await asyncio.sleep(3 * DAY_S)
        assert len(swept.objects.store) == 9 and swept.asked

    swept.run(script)


@pytest.mark.parametrize("answer", range(6))
def test_a_restore_during_a_sweep_succeeds_and_all_is_there_or_it_is_refused(answer: int) -> None:
    """Whenever it comes: before the first word of the controller, between two pages, at the end."""
    swept = Swept()
    outcomes: list[bool] = []

    def restore() -> None:
        if len(swept.asked) == answer and not outcomes:
            whole = len(swept.objects.store) == 9
            try:
                create(swept.state, "t2", restored=[pointer()])
            except InvalidRequestError as error:
                assert "being removed" in str(error)
                outcomes.append(False)
            else:
                assert whole
                outcomes.append(True)

    swept.before_answer = restore

    async def script() -> None:
        swept.delete()
        swept.start(swept.sweep())
        swept.start(swept.sweep(copy.deepcopy(swept.state)))
        await asyncio.sleep(3 * DAY_S)
        assert outcomes == [answer == 0]
        assert len(swept.objects.store) == (9 if answer == 0 else 0)
        assert not swept.state.garbage

    swept.run(script)


def test_a_sweep_that_dies_is_gone_on_with_and_what_it_began_stays_refused() -> None:
    swept = Swept()

    async def script() -> None:
        swept.delete()
        first = swept.start(swept.sweep())
        swept.before_answer = lambda: None if len(swept.objects.store) == 9 else first.cancel()
        await asyncio.wait([first])
        swept.before_answer = lambda: None
        assert 0 < len(swept.objects.store) < 9
        with pytest.raises(InvalidRequestError, match="being removed"):
            create(swept.state, "t2", restored=[pointer()])
        swept.start(swept.sweep())
        await asyncio.sleep(2 * DAY_S)
        assert not swept.objects.store and not swept.state.garbage

    swept.run(script)


def test_a_late_sweep_deletes_nothing_of_a_topic_that_came_back_to_the_store() -> None:
    swept = Swept()

    async def script() -> None:
        now_ms = swept.environment.clock.wall_ms()
        apply(swept.state, decide(swept.state, messages.EndRemoteStorage(name="t"), now_ms=now_ms))
        old = copy.deepcopy(swept.state)
        swept.start(swept.sweep())
        await asyncio.sleep(2 * DAY_S + 2 * CHECK_INTERVAL_S)
        assert not swept.objects.store and not swept.state.garbage
        swept.objects.put(manifest(7), b"new")
        swept.start(swept.sweep(old))
        await asyncio.sleep(DAY_S)
        assert manifest(7) in swept.objects.store

    swept.run(script)


@pytest.mark.parametrize(
    "prefixes",
    [("",), ("/",), (f"{CLUSTER}/",), ("../",), (f"{CLUSTER}/owners/",), (f"{folder()}data/",),
     (f"{folder()}\0",), ("c",)],
)
def test_what_is_no_folder_of_rayq_is_not_swept(prefixes: tuple[str, ...]) -> None:
    """As an earlier rayq may have committed it."""
    swept = Swept()
    swept.objects.put(f"{CLUSTER}/owners/1-m", b"mark")

    async def script() -> None:
        swept.delete()
        swept.state.garbage[id_of("t")] = RemoteGarbage(
            id_of("t"), "t", swept.environment.clock.wall_ms(), prefixes
        )
        swept.start(swept.sweep())
        await asyncio.sleep(3 * DAY_S)
        assert len(swept.objects.store) == 10 and not swept.state.garbage

    swept.run(script)


# --- lists that cannot be -------------------------------------------------------------------------


def wrong_lists(swept: Swept, page: list[str]) -> list[messages.ListObjects]:
    """The object server answers each list with this page from now on."""
    sound, asked = swept.objects.ask, list[messages.ListObjects]()

    async def ask(request: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(request, messages.ListObjects):
            asked.append(request)
            await asyncio.sleep(0.01)
            listed = [(name, 1, 1) for name in page]
            return messages.ListObjectsResponse(listed, page[-1] if page else None), memoryview(b"")
        return await sound(request, *arguments, **options)

    swept.objects.ask = ask  # type: ignore[method-assign]
    return asked


@pytest.mark.parametrize("kind", ["begins again", "elsewhere", "goes back", "twice"])
def test_a_sweep_deletes_nothing_by_a_list_that_cannot_be_and_asks_seldom(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    swept = Swept()
    other = str(RemoteName(folder(0, "u"), ObjectKind.DATA, 0, 1, 0))
    page = {
        "begins again": [swept.names[0]], "elsewhere": [other],
        "goes back": swept.names[2::-1], "twice": [swept.names[0]] * 2,
    }[kind]
    swept.objects.put(other, b"of a topic that lives")
    asked = wrong_lists(swept, page)

    async def script() -> None:
        swept.delete()
        swept.start(swept.sweep())
        await asyncio.sleep(DAY_S + 10 * CHECK_INTERVAL_S)
        assert other in swept.objects.store
        assert len(swept.objects.store) >= (9 if kind == "begins again" else 10)
        assert len(asked) <= 30
        assert "was asked for the names that begin with" in caplog.text

    swept.run(script)


def test_marks_that_are_listed_forever_are_asked_for_seldom_and_told_of() -> None:
    """Nothing is stored or deleted before they were looked at, and the status says why."""
    swept = Swept()
    asked = wrong_lists(swept, [f"{CLUSTER}/owners/{1:020d}-m"])
    ownership = StoreOwnership(
        swept.environment,
        cast(Any, SimpleNamespace(
            state=swept.state,
            changed=SimpleNamespace(wait_until=lambda *arguments: asyncio.sleep(0)))),
        swept.objects,
        is_current=lambda: True,
    )

    async def script() -> None:
        swept.environment.tasks.spawn(ownership.run(), "ownership")
        await asyncio.sleep(3600)
        assert len(asked) < 200
        assert ownership.halt is not None and ownership.halt.startswith(NOT_CHECKED)
        assert "does not come after" in ownership.halt
        with pytest.raises(RemoteListError):
            await ownership.check()

    swept.run(script)
