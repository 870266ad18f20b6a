"""A replica process whose broker is played: what it tells its broker and takes from it, when it
serves, and its end."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import msgspec
import pytest

from proving.simulation.process import ProcessClock, ProcessThreads
from rayq import messages
from rayq.actors.replica.replica import Replica
from rayq.errors import (
    NotLeaderError,
    RayqError,
    StaleBrokerError,
    TimeoutError,
    UnknownTopicError,
)
from rayq.storage.data_directory import PartitionDirectory
from rayq.wire.connection import SILENT_PEER_S
from rayq.wire.peer import Peer
from rayq.wire.server import Server
from tests.simulated.followed import LEADER_EPOCH
from tests.simulated.played_broker import (
    CLUSTER_ID,
    CONFIG,
    DATA,
    IDS,
    INCARNATION,
    Broker,
    assigned,
    playing,
)
from tests.storage.support import make_batch

SESSION_S = CONFIG.session_timeout_ms / 1000
WAIT_MS = CONFIG.heartbeat_interval_ms


def status(flushed: int = 0, last_epoch: int | None = None, topic: str = "t") -> Any:
    return messages.ReplicaStatus(IDS[topic], 0, last_epoch, flushed)


# --- attaching and heartbeats ---------------------------------------------------------------------


def test_it_presents_itself_and_says_what_it_has() -> None:
    async def script(broker: Broker) -> None:
        await asyncio.sleep(1.0)
        server = broker.host._server
        assert broker.attached == [
            messages.AttachReplicaHost(
                INCARNATION, broker.replicas.pid, 77, server.host, server.port, [], []
            )
        ]
        first, *others = broker.beats
        assert first == messages.ReplicaHostHeartbeat(INCARNATION, 0, [], 0, 0)
        assert len(others) >= 2
        assert set(map(repr, others)) == {
            repr(messages.ReplicaHostHeartbeat(INCARNATION, 0, [], WAIT_MS, 0))
        }
        await broker.tell(assigned(), version=5)
        await broker.tell(version=3)
        await asyncio.sleep(0.6)
        assert broker.beats[-1] == messages.ReplicaHostHeartbeat(
            INCARNATION, 5, [status()], WAIT_MS, 0
        )

    playing(script)


def test_what_is_news_here_is_told_while_the_broker_holds_a_heartbeat() -> None:
    async def script(broker: Broker) -> None:
        await broker.tell(assigned(), version=2)
        urgent = [beat for beat in broker.beats[1:] if beat.wait_ms == 0]
        assert urgent == [messages.ReplicaHostHeartbeat(INCARNATION, 2, [status()], 0, 0)]
        await asyncio.sleep(1.0)
        assert len([beat for beat in broker.beats[1:] if beat.wait_ms == 0]) == 1
        broker.host.replicas[0].fail(RayqError("it broke"))
        await asyncio.sleep(0.1)
        (told,) = [beat for beat in broker.beats[1:] if beat.wait_ms == 0][1:]
        assert told.replicas[0].failure == "it broke"

    playing(script)


def test_a_heartbeat_names_the_replicas_that_have_changed() -> None:
    async def script(broker: Broker) -> None:
        broker.refusals = [StaleBrokerError("who are you?")]
        broker.session = 7
        await asyncio.sleep(1.0)
        await broker.tell(assigned(), assigned("u"), version=2)
        await asyncio.sleep(0.6)
        since = len(broker.beats)
        await broker.produce()
        await asyncio.sleep(1.2)
        written, *others = broker.beats[since:]
        assert (written.replicas, written.has_all) == ([status(1, LEADER_EPOCH)], False)
        assert len(others) >= 2
        assert all(not beat.replicas and not beat.closed and not beat.has_all for beat in others)
        assert {beat.session for beat in others} == {7}
        await broker.tell(removed=[(IDS["u"], 0)])
        await asyncio.sleep(0.6)
        assert [beat.closed for beat in broker.beats if beat.closed] == [[(IDS["u"], 0)]]

    playing(script)


@pytest.mark.parametrize("error", [RayqError("not now"), StaleBrokerError("who are you?")])
def test_after_a_failure_all_replicas_are_named(error: RayqError) -> None:
    """The broker may have taken note of that heartbeat or not."""

    async def script(broker: Broker) -> None:
        broker.refusals = [StaleBrokerError("who are you?")]
        broker.session = 7
        await asyncio.sleep(1.0)
        await broker.tell(assigned(), assigned("u"), version=2)
        await asyncio.sleep(0.6)
        broker.refusals = [error]
        begun = len(broker.received)
        await asyncio.sleep(1.2)
        told = [request for _, request in broker.received[begun:]]
        whole = [len(beat.replicas) for beat in told if getattr(beat, "has_all", True)]
        assert whole == [2]

    playing(script)


def test_the_lease_lasts_a_session_from_the_last_heartbeat_that_was_answered() -> None:
    async def script(broker: Broker) -> None:
        await broker.tell(assigned())
        await broker.produce()
        has_lease = broker.host.has_lease
        broker.is_silent = True
        await asyncio.sleep(0.7)  # The one that was held is answered.
        *_, answered_s, _ = (at_s for at_s, _ in broker.received)
        until_s = broker.host._lease_until_s
        assert until_s == pytest.approx(answered_s + SESSION_S, abs=0.01)
        had_lease: list[bool] = []
        for at_s in (until_s - 0.001, until_s):
            asyncio.get_running_loop().call_at(at_s, lambda: had_lease.append(has_lease()))
        await asyncio.sleep(until_s - broker.now_s + 0.1)
        assert had_lease == [True, False]
        with pytest.raises(NotLeaderError, match="lost its broker"):
            await broker.produce()
        broker.is_silent = False
        await asyncio.sleep(SESSION_S)
        assert has_lease()
        await broker.produce()
        assert len(broker.host.replicas) == 1, "its log stayed open"

    playing(script)


def test_a_broker_process_that_is_new_gives_a_lease_as_soon_as_it_is_attached_to() -> None:
    async def script(broker: Broker) -> None:
        await broker.tell(assigned())
        broker.is_silent = True
        await asyncio.sleep(2 * SESSION_S)
        assert not broker.host.has_lease()
        begun = len(broker.attached)
        broker.is_silent, broker.refusals = False, [StaleBrokerError("who are you?")]
        while len(broker.attached) == begun:
            assert not broker.host.has_lease()
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert broker.host.has_lease(), "the heartbeat after it was not held"
        await broker.produce()

    playing(script)


def test_a_broker_that_does_not_know_it_yet_is_attached_to_again() -> None:
    async def script(broker: Broker) -> None:
        await broker.tell(assigned())
        await asyncio.sleep(0.6)
        broker.refusals = [StaleBrokerError("who are you?")] * 2
        await asyncio.sleep(1.0)
        assert [attach.replicas for attach in broker.attached] == [[], [status()], [status()]]
        beats = len(broker.beats)
        broker.refusals = [RayqError("not now")] * 3
        await asyncio.sleep(1.0)
        assert len(broker.attached) == 3, "it is known"
        assert beats + 4 <= len(broker.beats) <= beats + 7

    playing(script)


def test_a_broker_that_comes_back_elsewhere_is_found() -> None:
    async def script(broker: Broker) -> None:
        await broker.start()
        await asyncio.sleep(1.0)
        assert broker.received == [], "it is not said where the broker listens"
        assert not broker.host.has_lease()
        server = await broker.listen()
        await asyncio.sleep(0.15)
        assert len(broker.attached) == 1, "it looks again soon"
        await broker.tell(assigned(), removed=[(IDS["u"], 0), (IDS["u"], 1), (IDS["t"], 9)])
        server.close()
        await asyncio.sleep(1.0)
        await broker.listen()
        await asyncio.sleep(1.0)
        assert len(broker.attached) == 2
        assert broker.attached[1].replicas == [status()]
        assert broker.attached[1].let_go == [(IDS["t"], 9), (IDS["u"], 0), (IDS["u"], 1)]
        assert broker.attached[1].incarnation == broker.attached[0].incarnation
        await broker.produce()

    playing(script, is_started=False)


def test_no_error_ends_the_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(broker: Broker) -> None:
        calls: list[float] = []

        def fail() -> list[Any]:
            calls.append(broker.now_s)
            raise OSError(errno.EMFILE, "too many open files")

        with monkeypatch.context() as patch:
            patch.setattr(broker.host, "_statuses", fail)
            await asyncio.sleep(2.6)
        assert 3 <= len(calls) <= 6, "it pauses in between"
        beats = len(broker.beats)
        await asyncio.sleep(1.0)
        assert len(broker.beats) > beats
        assert broker.host.has_lease()

    playing(script)


def test_what_the_broker_says_of_the_object_store_is_known_to_its_replicas() -> None:
    async def script(broker: Broker) -> None:
        await broker.tell(object_server=("store", 9), remote_halt="no", remote_backlog_bytes=7)
        objects = broker.host._objects
        assert (objects.endpoint, objects.halt, objects.backlog_bytes) == (("store", 9), "no", 7)
        assert objects.cluster_id == CLUSTER_ID
        await broker.tell()
        assert (objects.endpoint, objects.halt, objects.backlog_bytes) == (None, None, 0)

    playing(script)


def test_what_waits_for_the_object_store_is_told() -> None:
    async def script(broker: Broker) -> None:
        stored = {"remote_storage": True, "segment_bytes": 1024}
        await broker.tell(assigned(config=stored), assigned("u", config=stored))
        for topic in ("t", "t", "t", "t", "u", "u", "u", "u"):
            request = messages.Produce(IDS[topic], 0, LEADER_EPOCH, -1, 1000)
            await broker.ask(request, make_batch(0, size=500))
        await asyncio.sleep(1.0)
        backlogs = [replica.remote_backlog_bytes() for replica in broker.host.replicas]
        assert min(backlogs) > 500
        assert broker.beats[-1].remote_backlog_bytes == sum(backlogs)

    playing(script)


# --- what it hosts --------------------------------------------------------------------------------


def test_newer_metadata_go_to_the_replica_that_is_there() -> None:
    async def script(broker: Broker) -> None:
        await broker.tell(assigned(), assigned("u"))
        before = broker.host.replicas
        await broker.produce("t")
        await broker.tell(assigned(leader_epoch=LEADER_EPOCH + 1, partition_epoch=2))
        assert broker.host.replicas == before
        assert (await broker.describe()).leader_epoch == LEADER_EPOCH + 1
        assert (await broker.describe("u")).leader_epoch == LEADER_EPOCH

    playing(script)


def test_an_assignment_that_cannot_be_taken_holds_up_no_other() -> None:
    async def script(broker: Broker) -> None:
        await broker.tell(assigned("t", config={"retention_ms": "soon"}), assigned("u"), version=4)
        assert [replica.where for replica in broker.host.replicas] == ["u-0"]
        await asyncio.sleep(0.6)
        assert broker.beats[-1].version == 4

    playing(script)


def test_what_was_removed_is_dropped_and_never_hosted_again() -> None:
    async def script(broker: Broker) -> None:
        await broker.tell(assigned(), assigned("u"))
        await broker.tell(removed=[(IDS["t"], 0)])
        assert [replica.where for replica in broker.host.replicas] == ["u-0"]
        with pytest.raises(UnknownTopicError):
            await broker.describe()
        directory = open_directory(broker, "t")  # Nobody holds it.
        directory.close()
        await broker.tell(assigned(partition_epoch=2))
        assert [replica.where for replica in broker.host.replicas] == ["u-0"]
        await broker.produce("u")

    playing(script)


def open_directory(broker: Broker, topic: str) -> PartitionDirectory:
    return PartitionDirectory.open(
        broker.environment, f"{DATA}/{topic}-0", topic=topic, topic_id=IDS[topic], partition=0,
        incarnation="2" * 32, pid_start_time=1,
    )


def test_a_directory_that_another_process_holds_is_waited_for() -> None:
    async def script(broker: Broker) -> None:
        held = open_directory(broker, "t")
        await broker.tell(assigned(), assigned("u"))
        await asyncio.sleep(1.0)
        assert broker.beats[-1].replicas == [status(-1), status(topic="u")]
        held.close()
        await asyncio.sleep(0.7)
        assert broker.beats[-1].replicas == [status(), status(topic="u")]
        await broker.produce()

    playing(script)


def test_a_replica_that_was_removed_while_it_waited_is_not_opened() -> None:
    async def script(broker: Broker) -> None:
        held = open_directory(broker, "t")
        await broker.tell(assigned())
        await broker.tell(removed=[(IDS["t"], 0)])
        held.close()
        broker.environment.disk.remove_tree(f"{DATA}/t-0")
        await asyncio.sleep(0.5)
        assert broker.node.disk.find(f"{DATA}/t-0") is None, "it is not made again"
        assert broker.host.replicas == []

    playing(script)


def test_a_lack_of_descriptors_heals() -> None:
    async def script(broker: Broker) -> None:
        limit = broker.replicas.environment
        object.__setattr__(limit, "has_descriptors_for_replica", lambda: False)
        await broker.tell(assigned())
        await asyncio.sleep(1.5)
        (replica,) = broker.host.replicas
        assert replica.status() == status(-1)
        with pytest.raises(NotLeaderError, match="is not opened.*ulimit"):
            await broker.describe()
        open_directory(broker, "t").close()  # Nobody holds it.
        object.__setattr__(limit, "has_descriptors_for_replica", lambda: True)
        await asyncio.sleep(1.5)
        assert (await broker.describe()).trouble is None

    playing(script)


@pytest.mark.parametrize("trouble", ["a log that is cut off", "a disk that fails", "a newer rayq"])
def test_a_directory_that_cannot_be_used_ends_its_replica_and_no_other(trouble: str) -> None:
    async def script(broker: Broker) -> None:
        await broker.tell(assigned())
        await broker.produce()
        await broker.ask(messages.StopReplicaHost())
        await asyncio.sleep(0.5)
        disk = broker.environment.disk
        if trouble == "a log that is cut off":
            (path,) = [name for name in broker.node.disk.paths() if name.endswith(".log")]
            file = disk.open(path)
            file.truncate(10)
            file.close()
        elif trouble == "a newer rayq":
            file = disk.open(f"{DATA}/t-0/partition.json")
            meta = msgspec.json.decode(file.pread(file.size(), 0))
            file.truncate(file.pwrite(msgspec.json.encode(meta | {"format_version": 999}), 0))
            file.close()
        else:
            broker.node.disk.fail("open", path_part="t-0", error=errno.EIO)
        await broker.start()
        await broker.tell(assigned(), assigned("u"))
        await asyncio.sleep(0.6)
        failed, sound = broker.beats[-1].replicas
        assert failed.failure is not None
        assert failed.is_damaged is (trouble == "a log that is cut off")
        assert sound == status(topic="u")
        await broker.produce("u")

    playing(script)


def test_replicas_are_opened_some_at_a_time() -> None:
    async def script(broker: Broker) -> None:
        broker.node.disk.stall(2.0)
        await broker.tell(*partitions(40))
        begun = {path.split("/")[2] for path in broker.node.disk.paths() if "/t-" in path}
        assert 10 <= len(begun) <= 16
        await asyncio.sleep(20)
        assert len(broker.beats[-1].replicas) == 40
        assert all(replica.flushed == 0 for replica in broker.beats[-1].replicas)

    playing(script)


def test_others_have_their_turn_while_many_assignments_are_taken() -> None:
    async def script(broker: Broker) -> None:
        counts: set[int] = set()
        broker.watch = lambda: counts.add(len(broker.host.replicas))
        await broker.tell(*partitions(120))
        assert counts == {0, 49, 99, 120}

    playing(script)


def test_others_have_their_turn_while_many_replicas_are_looked_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks, tick = 0, Replica.tick

    def counted(replica: Replica, now_s: float) -> None:
        nonlocal ticks
        ticks += 1
        tick(replica, now_s)

    async def script(broker: Broker) -> None:
        nonlocal ticks
        await broker.tell(*partitions(250))
        await asyncio.sleep(2)
        monkeypatch.setattr(Replica, "tick", counted)
        counts: set[int] = set()
        broker.watch = lambda: counts.add(ticks)
        await asyncio.sleep(WAIT_MS / 1000 / 2)
        assert {99, 199, 250} <= counts

    playing(script)


def test_a_replica_that_nobody_uses_seldom_looks_at_clocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process may have a thousand of them."""
    looks, wall_ms = 0, ProcessClock.wall_ms

    def counted(clock: ProcessClock) -> int:
        nonlocal looks
        looks += 1
        return wall_ms(clock)

    async def script(broker: Broker) -> None:
        nonlocal looks
        await broker.tell(*partitions(20))
        await asyncio.sleep(2)
        monkeypatch.setattr(ProcessClock, "wall_ms", counted)
        await asyncio.sleep(30)
        assert looks <= 20 * 30, "one for each replica and second"

    playing(script)


def test_replicas_are_closed_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(broker: Broker) -> None:
        await broker.tell(*partitions(20))
        now, counts, close = set[Replica](), list[int](), Replica.close

        async def counted(replica: Replica) -> messages.ReplicaStatus:
            now.add(replica)
            counts.append(len(now))
            try:
                return await close(replica)
            finally:
                now.remove(replica)

        monkeypatch.setattr(Replica, "close", counted)
        answer = await broker.ask(messages.StopReplicaHost())
        assert (len(answer.replicas), len(counts), max(counts)) == (20, 20, 16)

    playing(script)


def partitions(count: int) -> list[messages.PartitionAssignment]:
    return [msgspec.structs.replace(assigned(), partition=number) for number in range(count)]


def test_the_loop_waits_for_no_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside syncs of thousands of logs a disk takes long to make or to look up a file."""
    is_in_thread = False
    calls: list[tuple[str, bool]] = []

    def noted(name: str, method: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            calls.append((name, is_in_thread))
            return method(*arguments, **keywords)

        return call

    def in_thread(job: Any) -> Any:
        def work(*arguments: Any) -> Any:
            nonlocal is_in_thread
            is_in_thread = True
            try:
                return job(*arguments)
            finally:
                is_in_thread = False

        return work

    async def script(broker: Broker) -> None:
        run = ProcessThreads.run
        monkeypatch.setattr(
            ProcessThreads,
            "run",
            lambda self, job, *arguments: run(self, in_thread(job), *arguments),
        )
        opened, checked = PartitionDirectory.open, PartitionDirectory.check_here
        monkeypatch.setattr(PartitionDirectory, "open", staticmethod(noted("open", opened)))
        monkeypatch.setattr(PartitionDirectory, "check_here", noted("check", checked))
        await broker.tell(assigned(), assigned("u"), version=2)
        await asyncio.sleep(2)
        assert {name for name, _ in calls} == {"open", "check"}
        assert all(is_there for _, is_there in calls)

    playing(script)


def test_its_replicas_are_looked_after_in_time() -> None:
    async def script(broker: Broker) -> None:
        others = {"isr": [(3, INCARNATION), (4, "4" * 32)]}
        others["replicas"] = others["isr"]
        await broker.tell(assigned(**others))
        began_s = broker.now_s
        with pytest.raises(TimeoutError, match="did not confirm"):
            await broker.produce(timeout_ms=1500)
        assert 1.5 <= broker.now_s - began_s < 2.1
        await asyncio.sleep(11)  # Longer than a follower may lag.
        proposed = broker.all(messages.AlterPartition)[0]
        assert proposed == messages.AlterPartition(
            IDS["t"], 0, 3, INCARNATION, LEADER_EPOCH, 1, [(3, INCARNATION)]
        )

    playing(script)


LAGGING: dict[str, Any] = {
    "isr": [(3, INCARNATION), (4, "4" * 32)], "replicas": [(3, INCARNATION), (4, "4" * 32)],
}


async def many_lag(broker: Broker, count: int) -> None:
    """The process leads partitions whose follower has never been heard."""
    await broker.tell(
        *(
            msgspec.structs.replace(assigned(**LAGGING), partition=number)
            for number in range(count)
        )
    )
    await asyncio.sleep(CONFIG.replica_lag_time_max_ms / 1000 + 1)


def test_in_sync_sets_that_are_proposed_at_the_same_time_are_one_request() -> None:
    async def script(broker: Broker) -> None:
        broker.refused_partitions = {3, 7}
        await many_lag(broker, 60)
        first, *later = broker.all(messages.AlterPartitions)
        asked = [proposal.partition for proposal in first.proposals]
        asked += [proposal.partition for proposal in broker.all(messages.AlterPartition)[:1]]
        assert len(asked) >= 59 and len(set(asked)) == len(asked)
        again = {proposal.partition for batch in later for proposal in batch.proposals}
        assert again <= {3, 7}, "what was taken is not proposed again"
        undecided = [
            replica.assignment.partition
            for replica in broker.host.replicas
            if replica._role.state.undecided  # type: ignore[union-attr]
        ]
        assert not {3, 7} & set(undecided) or again == {3, 7}

    playing(script)


def test_a_controller_that_takes_no_batches_is_sent_single_proposals() -> None:
    async def script(broker: Broker) -> None:
        broker.takes_batches = False
        await many_lag(broker, 20)
        assert len(broker.all(messages.AlterPartitions)) <= 4
        assert {proposal.partition for proposal in broker.all(messages.AlterPartition)} == set(
            range(20)
        )

    playing(script)


def test_a_connection_to_a_leader_that_is_gone_without_a_word_is_given_up() -> None:
    async def script(broker: Broker) -> None:
        other = broker.world.host("other")
        process = other.process("leader")
        fetched: list[Any] = []

        def hold(_peer: Peer, request: Any, _payload: memoryview) -> asyncio.Future[Any]:
            fetched.append(request)
            return asyncio.get_running_loop().create_future()

        server = Server(process.environment, broker.identity, hold, CONFIG)
        await process.run(server.start(other.address, 0))
        leader = {"leader": 4, "leader_incarnation": "4" * 32, "isr": [(4, "4" * 32)]}
        await broker.tell(
            assigned(**leader, leader_host=server.host, leader_port=server.port)
        )
        connection = broker.host._pool.current(server.host, server.port)
        assert connection is not None and not connection.closed
        assert fetched[0].broker == 3
        broker.world.network.cut([broker.node], [other])
        await asyncio.sleep(SILENT_PEER_S + 3)
        assert connection.closed

    playing(script)


# --- its end --------------------------------------------------------------------------------------


def test_a_stop_says_where_each_log_ends_and_then_the_process_is_over() -> None:
    async def script(broker: Broker) -> None:
        await broker.tell(assigned(), assigned("u"))
        await broker.produce(acks=1)
        answer = await broker.ask(messages.StopReplicaHost())
        assert answer.replicas == [status(1, LEADER_EPOCH), status(0, topic="u")]
        assert await broker.ask(messages.StopReplicaHost()) == answer
        assert not broker.is_over, "the answer leaves first"
        await broker.tell(assigned("u", partition=1))
        assert len(broker.host.replicas) == 2, "it takes nothing more"
        await asyncio.sleep(0.5)
        assert broker.is_over
        beats = len(broker.beats)
        await asyncio.sleep(2.0)
        assert len(broker.beats) <= beats
        with pytest.raises(RayqError):
            await broker.ask(messages.DescribeMetrics())
        open_directory(broker, "t").close()

    playing(script)


def test_a_process_that_ends_at_once_lets_go_of_everything() -> None:
    async def script(broker: Broker) -> None:
        await broker.tell(assigned())
        broker.replicas.call(broker.host.abort)
        await asyncio.sleep(0.5)
        with pytest.raises(RayqError):
            await broker.ask(messages.DescribeMetrics())
        open_directory(broker, "t").close()
        count = len(broker.received)
        await asyncio.sleep(2.0)
        assert len(broker.received) == count, "its connections are closed"

    playing(script)
