"""A client repeats a change whose answer was lost: the change happened once, and is no error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rayq.actors.controller.controller import Controller
from rayq.errors import (
    ControllerUnavailableError,
    DisconnectedError,
    TopicExistsError,
    UnknownBrokerError,
    UnknownTopicError,
)
from rayq.messages import (
    REQUESTS,
    AlterReassignments,
    AlterTopicConfig,
    AnyRequest,
    CreatePartitions,
    CreateTopic,
    DeleteTopic,
    Forward,
    RemoveBroker,
)
from rayq.records import TopicPartition
from rayq.testing import LocalCluster
from tests.local.support import eventually

Lose = Callable[..., None]


@pytest.fixture
def lose(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lose]:
    """`lose(kind)`: the next such change is carried out, and its answer is lost.
    `after(controller)` is called in between."""
    lost: dict[type[AnyRequest], Callable[[Controller], None]] = {}
    handle = Controller.handle

    async def handle_and_lose(controller: Controller, request: AnyRequest) -> Any:
        answer = await handle(controller, request)
        kind = REQUESTS[request.kind] if isinstance(request, Forward) else type(request)
        after = lost.pop(kind, None)
        if after is None:
            return answer
        after(controller)
        raise ControllerUnavailableError("The controller is changing: the test lost an answer.")

    monkeypatch.setattr(Controller, "handle", handle_and_lose)

    def arm(
        kind: type[AnyRequest], after: Callable[[Controller], None] = lambda _controller: None
    ) -> None:
        lost[kind] = after

    yield arm
    assert not lost, "an answer was to be lost and was never asked for"


def test_a_change_whose_answer_is_lost_between_broker_and_controller_succeeds_once(
    cluster: LocalCluster, lose: Lose
) -> None:
    admin = cluster.admin
    lose(CreateTopic)
    cluster.create_topic("repeated", 2)
    with pytest.raises(TopicExistsError):
        cluster.create_topic("repeated", 2)
    lose(CreatePartitions)
    admin.create_partitions("repeated", 3)
    assert len(admin.describe_topic("repeated").partitions) == 3
    lose(AlterReassignments)
    place = TopicPartition("repeated", 0)
    before = [replica.broker for replica in admin.describe_topic("repeated").partitions[0].replicas]
    admin.reassign_partitions({place: before[::-1]})
    lose(DeleteTopic)
    admin.delete_topic("repeated")
    with pytest.raises(UnknownTopicError):
        admin.delete_topic("repeated")


def test_a_change_that_its_controller_does_not_live_to_answer_succeeds_once(
    fragile: LocalCluster, lose: Lose
) -> None:
    lose(CreateTopic, lambda controller: controller.end("the test ends it"))
    fragile.create_topic("t", 2)
    assert len(fragile.admin.describe_topic("t").partitions) == 2
    lose(DeleteTopic, lambda controller: controller.end("the test ends it"))
    fragile.admin.delete_topic("t")
    with pytest.raises(UnknownTopicError):
        fragile.admin.delete_topic("t")


def test_a_delete_that_is_repeated_spares_a_topic_created_again_meanwhile(
    cluster: LocalCluster, topic: str, lose: Lose
) -> None:
    created: list[Any] = []

    def create_again(controller: Controller) -> None:
        request = CreateTopic(topic, 1, None, {}, request_id="another-caller")
        records, answer = controller._decide(request)
        assert answer() is None
        created.append(controller._append(records, "the test asked for it"))

    lose(DeleteTopic, create_again)
    cluster.admin.delete_topic(topic)
    assert created and topic in cluster.admin.list_topics()


def test_a_config_that_somebody_changed_meanwhile_is_not_changed_back_by_a_repetition(
    cluster: LocalCluster, topic: str, lose: Lose
) -> None:
    def change_it(controller: Controller) -> None:
        controller._decide(AlterTopicConfig(topic, {"retention_ms": 222_222}))

    lose(AlterTopicConfig, change_it)
    cluster.admin.alter_topic_config(topic, retention_ms=111_111)
    assert cluster.admin.describe_topic(topic).config["retention_ms"] == 222_222


def test_an_answer_that_takes_too_long_on_its_way_does_not_make_an_error(
    cluster: LocalCluster, lose: Lose
) -> None:
    def disconnect(_controller: Controller) -> None:
        raise DisconnectedError("The test broke the connection to the controller.")

    lose(CreateTopic, disconnect)
    cluster.create_topic("broken-off")
    cluster.admin.delete_topic("broken-off")


def test_a_broker_whose_removal_is_repeated_is_removed(fragile: LocalCluster, lose: Lose) -> None:
    fragile.kill_broker(2)
    admin = fragile.admin
    eventually(
        lambda: not admin.describe_cluster().brokers[2].live, "the session of the broker ends"
    )
    lose(RemoveBroker)
    admin.remove_broker(2)
    with pytest.raises(UnknownBrokerError):
        admin.remove_broker(2)
