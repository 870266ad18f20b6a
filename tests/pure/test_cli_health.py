from __future__ import annotations

import pytest

from rayq.client.admin.health import (
    DISK_FULL_BYTES,
    DISK_LOW_BYTES,
    Problem,
    disk_used,
    find_problems,
    is_healthy,
    min_insync_of,
    partition_state,
)
from rayq.config import HOUR_MS
from rayq.records import (
    BrokerInfo,
    ClusterInfo,
    GroupInfo,
    GroupMemberInfo,
    GroupOffset,
    HangingTransaction,
    ObjectStoreInfo,
    PartitionInfo,
    PrincipalInfo,
    QueueInfo,
    QueuePartitionInfo,
    Reassignment,
    RemotePartitionInfo,
    ReplicaInfo,
    TokenInfo,
    TopicInfo,
    TopicPartition,
    TransactionListing,
)


def cluster(*, down: tuple[int, ...] = (), controller: str | None = "h:1") -> ClusterInfo:
    brokers = [
        BrokerInfo(number, "h", 9392 + number, "node", number not in down) for number in (0, 1, 2)
    ]
    return ClusterInfo("c", brokers, controller, 1, [0, 1, 2])


def replica(
    broker: int, free_bytes: int | None = 100 * 2**30, trouble: str | None = None
) -> ReplicaInfo:
    return ReplicaInfo(broker, "h", 1, 2, 0, 5, 5, 1000, free_bytes, trouble)


def partition(
    isr: list[int],
    leader: int | None = 0,
    reason: str | None = None,
    replicas: list[ReplicaInfo] | None = None,
    target: list[int] | None = None,
    origin: list[int] | None = None,
) -> PartitionInfo:
    copies = replicas or [replica(0), replica(1), replica(2)]
    return PartitionInfo(0, leader, 1, isr, copies, reason, target or [], origin or [])


def topic(info: PartitionInfo, **config: object) -> TopicInfo:
    return TopicInfo("t", "id", [info], {"min_insync_replicas": None, **config})


def only(problems: list[Problem]) -> Problem:
    assert len(problems) == 1, problems
    return problems[0]


def test_a_cluster_that_is_well_has_no_problems() -> None:
    assert find_problems(cluster(), [topic(partition([0, 1, 2]))]) == []


def test_a_broker_that_says_why_it_gave_up_is_named_with_its_reason() -> None:
    found = find_problems(cluster(down=(1,)), [], troubles={1: "the data directory /d was removed"})
    problem = only([p for p in found if "Broker" in p.what])
    assert problem.what == "Broker 1 cannot use its disk" and "/d was removed" in problem.why
    assert "rayq cluster replace-disk 1" in problem.next_command


def test_a_broker_that_is_down_is_named_with_what_to_do() -> None:
    problem = only([p for p in find_problems(cluster(down=(1,)), []) if "Broker" in p.what])
    assert problem.severity == "warning"
    assert "Broker 1 is down" in problem.what
    assert "rayq cluster drain 1" in problem.next_command


def test_a_quorum_that_bears_no_further_loss_is_a_warning() -> None:
    whats = [problem.what for problem in find_problems(cluster(down=(2,)), [])]
    assert any("quorum" in what for what in whats)


def test_without_a_controller_the_cluster_is_not_healthy() -> None:
    problems = find_problems(cluster(controller=None), [])
    assert not is_healthy(problems)
    assert "recover-quorum" in only(problems).next_command


def test_a_broker_that_does_not_answer_is_told_before_its_session_ends() -> None:
    well = topic(partition([0, 1, 2]))
    severities = {
        found.what: found.severity for found in find_problems(cluster(), [well], silent={1})
    }
    assert severities["Broker 1 does not answer"] == "warning"
    problem = find_problems(cluster(), [well], silent={0})[0]
    assert problem.severity == "error"
    assert "it leads 1 partition" in problem.why


def test_without_a_majority_of_the_voters_the_controller_that_is_named_does_not_act() -> None:
    found = find_problems(cluster(down=(2,)), [], silent={1})
    assert found[0].what == "No controller acts"
    assert "1, 2 cannot be reached" in found[0].why
    assert found[0].next_command.startswith("start the nodes of 1, 2 again")


def test_a_users_topic_is_named_before_rayqs_own() -> None:
    info = partition([0, 1])
    own = TopicInfo("__own", "id", [info], {})
    problem = only(find_problems(cluster(), [own, topic(info)]))
    assert problem.what.endswith("t-0, __own-0")
    assert problem.next_command == "rayq topic describe t"


@pytest.mark.parametrize(
    ("info", "state", "severity"),
    [
        (partition([0, 1]), "under-replicated", "warning"),
        (partition([0]), "under min ISR", "error"),
        (partition([0], None, "broker 0 is waited for"), "offline", "error"),
        (partition([0], target=[0, 1, 2], origin=[0, 1]), "under min ISR", "error"),
    ],
)
def test_a_partition_that_lacks_replicas_says_how_bad_it_is(
    info: PartitionInfo, state: str, severity: str
) -> None:
    problem = only(find_problems(cluster(), [topic(info)]))
    assert problem.severity == severity
    assert state in problem.what
    assert "t-0" in problem.what
    assert "rayq topic describe t" in problem.next_command


@pytest.mark.parametrize("name", ["__consumer_offsets", "__transaction_state"])
def test_what_rayq_keeps_from_when_there_were_fewer_brokers_is_to_be_copied(name: str) -> None:
    info = partition([0], replicas=[replica(0)])
    own = TopicInfo(name, "id", [info], {})
    problem = only(find_problems(cluster(), [own, topic(info)]))
    assert is_healthy([problem])
    assert "1 replica of each partition, and there are 3 brokers" in problem.what
    assert problem.next_command == f"rayq topic set-replication-factor {name} -r 3"
    moving = partition([0], replicas=[replica(0)], target=[0, 1, 2], origin=[0])
    assert find_problems(cluster(), [TopicInfo(name, "id", [moving], {})]) == []


def test_replicas_that_are_only_added_are_nothing_to_worry_about() -> None:
    assert find_problems(cluster(), [topic(partition([0], target=[0, 1, 2], origin=[0]))]) == []


def test_an_offline_partition_gives_its_reason_and_the_last_resort() -> None:
    info = partition([0], None, "broker 0 is waited for")
    problem = only(find_problems(cluster(), [topic(info)]))
    assert problem.why == "broker 0 is waited for"
    assert "--unclean" in problem.next_command


def test_what_troubles_a_follower_is_told() -> None:
    copies = [replica(0), replica(1), replica(2, trouble="its disk is full")]
    problem = only(find_problems(cluster(), [topic(partition([0, 1], replicas=copies))]))
    assert "its disk is full" in problem.why


def test_min_insync_replicas_is_as_configured_or_the_majority() -> None:
    info = partition([0, 1])
    assert min_insync_of(topic(info), info) == 2
    assert min_insync_of(topic(info, min_insync_replicas=3), info) == 3
    assert partition_state(info, 3) == "under min ISR"


def test_while_a_partition_moves_its_target_counts() -> None:
    copies = [replica(0), replica(1), replica(2), replica(3)]
    info = partition([1, 2, 3], 1, replicas=copies, target=[1, 2, 3])
    assert partition_state(info, min_insync_of(topic(info), info)) == "in sync"


@pytest.mark.parametrize(
    ("free_bytes", "severity"), [(DISK_LOW_BYTES - 1, "warning"), (DISK_FULL_BYTES - 1, "error")]
)
def test_a_disk_that_fills_is_told_before_it_is_full(free_bytes: int, severity: str) -> None:
    copies = [replica(0), replica(1, free_bytes), replica(2)]
    problem = only(find_problems(cluster(), [topic(partition([0, 1, 2], replicas=copies))]))
    assert problem.severity == severity
    assert "broker 1" in problem.what


def test_disk_use_is_added_up_for_each_broker() -> None:
    assert disk_used([topic(partition([0])), topic(partition([0]))]) == {0: 2000, 1: 2000, 2: 2000}


def test_leaders_that_are_not_the_first_replica_are_only_a_notice() -> None:
    problems = find_problems(cluster(), [topic(partition([0, 1, 2], 1))])
    assert only(problems).severity == "notice"
    assert only(problems).next_command == "rayq cluster elect-leaders"
    assert is_healthy(problems)


def test_a_group_that_lags_without_members_is_only_a_notice() -> None:
    offsets = {TopicPartition("t", 0): GroupOffset(1, 5, 4, "", 0, None)}
    group = GroupInfo("g", "empty", 1, "uniform", [], offsets, "left", 0)
    member = GroupMemberInfo("m", "h", None, 1, [], [])
    served = GroupInfo("s", "stable", 1, "uniform", [member], offsets, "joined", 0)
    problem = only(find_problems(cluster(), [], [group, served]))
    assert problem.severity == "notice"
    assert "rayq group describe g" in problem.next_command


def test_a_move_says_what_it_waits_for_and_how_to_take_it_back() -> None:
    place = TopicPartition("t", 0)
    move = Reassignment(place, [3, 0, 1], [3], [0], [3, 1], None, "broker 3: its disk is full")
    problem = only(find_problems(cluster(), [], [], [move]))
    assert problem.severity == "notice"
    assert "its disk is full" in problem.why
    assert "--cancel" in problem.next_command


@pytest.mark.parametrize(
    ("state", "age_ms", "next_command"),
    [
        ("ready", None, None),
        ("open", 119_000, None),
        ("committing", 120_000, None),
        ("open", 121_000, "rayq transactions abort orders-7"),
        ("aborting", 900_000, "rayq transactions describe orders-7"),
    ],
)
def test_a_transaction_hangs_a_minute_after_its_time_out(
    state: str, age_ms: int | None, next_command: str | None
) -> None:
    listing = TransactionListing("orders-7", state, 2**61, 4, age_ms, 60_000, 2)
    assert listing.is_hanging == (next_command is not None)
    problems = find_problems(cluster(), [], transactions=[listing])
    assert [problem.next_command for problem in problems] == ([next_command] if next_command else [])
    for problem in problems:
        assert problem.severity == "warning" and "orders-7" in problem.what
        assert f"{state} since" in problem.why and "time-out is 60 s" in problem.why


def test_a_transaction_that_no_coordinator_knows_is_an_error_that_names_the_partition() -> None:
    found = [HangingTransaction(TopicPartition("t", 0), 2**61, epoch, 7) for epoch in (3, 4)]
    problem = only(find_problems(cluster(), [], hanging=found))
    assert problem.severity == "error"
    assert "2 transactions in t-0" in problem.what and "offset 7 of t-0" in problem.why
    assert problem.next_command.startswith("rayq transactions find-hanging t;")


def remote(
    *, start: int = 0, local_start: int = 0, lag_ms: int = 0, trouble: str | None = None
) -> RemotePartitionInfo:
    place = TopicPartition("t", 0)
    return RemotePartitionInfo(place, start, local_start, 90, 100, 1 << 30, 5 << 20, lag_ms, trouble)


def store(*, trouble: str | None = None) -> ObjectStoreInfo:
    return ObjectStoreInfo("s3://bucket", {} if trouble is None else {1: trouble}, [], [])


@pytest.mark.parametrize(
    ("local_start", "severity"), [(0, "warning"), (50, "error")], ids=["all local", "cold records"]
)
def test_a_store_out_of_reach_is_an_error_once_records_are_only_there(
    local_start: int, severity: str
) -> None:
    found = store(trouble="403 Forbidden")
    problem = only(
        find_problems(cluster(), [], store=found, remote=[remote(local_start=local_start)])
    )
    assert (problem.severity, problem.why) == (severity, "403 Forbidden")
    assert "Broker 1" in problem.what


def test_what_waits_for_the_store_is_told_once_it_is_late_or_stuck() -> None:
    def found(info: RemotePartitionInfo) -> list[Problem]:
        return find_problems(cluster(), [], store=store(), remote=[info])

    unheard = RemotePartitionInfo(
        TopicPartition("t", 0), None, None, None, None, None, None, None, trouble="no leader"
    )
    assert found(remote(lag_ms=3_600_000)) == found(unheard) == []
    late = only(found(remote(lag_ms=3_600_001)))
    assert "t-0" in late.what and "5 MiB that wait for 3,600 s" in late.why
    stuck = only(found(remote(lag_ms=7_200_000, trouble="the store does not answer")))
    assert "nothing into the object store: t-0" in stuck.what
    assert "the store does not answer" in stuck.why and "nothing is lost" in stuck.why
    assert late.severity == stuck.severity == "warning"


def test_many_partitions_are_counted_and_some_named() -> None:
    info = topic(partition([0, 1]))
    topics = [TopicInfo(f"t{number}", "id", info.partitions, info.config) for number in range(20)]
    problem = only(find_problems(cluster(), topics))
    assert problem.what.startswith("20 partitions are under-replicated: t0-0, ")
    assert problem.what.endswith("and 12 more")


def test_the_worst_comes_first() -> None:
    problems = find_problems(cluster(down=(1,)), [topic(partition([0], None, "gone"))])
    severities = [problem.severity for problem in problems]
    assert severities == sorted(severities, key=["error", "warning", "notice"].index)
    assert severities[0] == "error"


# --- queues ---------------------------------------------------------------------------------------


def queue_problems(**figures: int | str) -> list[Problem]:
    told = QueuePartitionInfo(0, **figures)  # type: ignore[arg-type]
    queues = [QueueInfo("tasks", "id", "tasks", [told], {})]
    return find_problems(cluster(), [topic(partition([0, 1, 2]))], queues=queues)


def test_a_queue_at_work_is_no_problem() -> None:
    assert queue_problems(ready=7, locked=1, waiting_takes=0, oldest_ready_ms=900_000) == []
    assert queue_problems(ready=1, locked=0, waiting_takes=0, oldest_ready_ms=1_000) == []


def test_a_queue_that_nobody_takes_from_is_noted() -> None:
    problem = only(queue_problems(ready=7, locked=0, waiting_takes=0, oldest_ready_ms=900_000))
    assert problem.severity == "notice"
    assert "7 records wait, the oldest for 900 s" in problem.why


def test_a_task_that_is_handled_for_long_is_noted_with_its_worker() -> None:
    assert queue_problems(oldest_locked_ms=290_000, oldest_holder="box:71/5f") == []
    problem = only(queue_problems(oldest_locked_ms=310_000, oldest_holder="box:71/5f"))
    assert problem.severity == "notice"
    assert problem.what == "A task of queue tasks has been handled for 310 s"
    assert "box:71/5f has it, in partition 0" in problem.why
    assert problem.next_command == "rayq queue peek tasks --in-flight"


def test_a_queue_in_trouble_says_why() -> None:
    problem = only(queue_problems(trouble="10,000 records are in flight"))
    assert problem.severity == "warning"
    assert problem.what == "Queue tasks does not work in tasks-0"
    assert problem.why.startswith("10,000 records are in flight")
    assert problem.next_command == "rayq queue describe tasks"


def test_records_that_retention_took_unsettled_are_told() -> None:
    problem = only(queue_problems(expired=3))
    assert (problem.severity, problem.what) == (
        "warning",
        "Queue tasks lost 3 records to retention",
    )


def test_dead_letters_are_noted_and_wait_for_nobody() -> None:
    letters = QueuePartitionInfo(0, ready=1, delayed=1, oldest_ready_ms=900_000)
    queues = [
        QueueInfo("tasks", "id", "tasks", [QueuePartitionInfo(0)], {}),
        QueueInfo("tasks.dead", "other", "tasks.dead", [letters], {}),
    ]
    topics = [topic(partition([0, 1, 2]))]
    problem = only(find_problems(cluster(), topics, queues=queues))
    assert problem.severity == "notice"
    assert problem.what == "Queue tasks.dead has 2 dead letters"
    assert problem.next_command == "rayq dead-letters list tasks"


@pytest.mark.parametrize(
    ("ends_h", "what"),
    [
        ([100], "The last token of principal 'anna' expires in 100 h"),
        ([-5], "The last token of principal 'anna' expired 5 h ago"),
        ([3, 20], "The last token of principal 'anna' expires in 20 h"),
        ([3, None], None),
        ([3, 24 * 8], None),
        ([-24 * 8], None),
        ([], None),
    ],
)
def test_a_principal_whose_last_token_expires_is_told_in_time(
    ends_h: list[int | None], what: str | None
) -> None:
    now_ms = 1_000 * HOUR_MS
    ends = [None if end is None else now_ms + end * HOUR_MS for end in ends_h]
    tokens = [TokenInfo(str(number), 1, end) for number, end in enumerate(ends)]
    topics, anna = [topic(partition([0, 1, 2]))], PrincipalInfo("anna", 1, tokens)
    problems = find_problems(cluster(), topics, principals=[anna], now_ms=now_ms)
    assert [problem.what for problem in problems] == ([] if what is None else [what])
    for problem in problems:
        assert (problem.severity, problem.next_command) == ("warning", "rayq token rotate anna")
