"""When chaos may go on to the next fault."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from proving.chaos import cluster as chaos


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> chaos.ChaosCluster:
    """A cluster that is well by its metadata: the sessions of its three brokers go on."""
    replicas = [SimpleNamespace(pid=1)] * 3
    admin = SimpleNamespace(
        describe_cluster=lambda **_: SimpleNamespace(
            brokers=[SimpleNamespace(broker=number, live=True) for number in range(3)]
        ),
        describe_topic=lambda _: SimpleNamespace(
            partitions=[SimpleNamespace(partition=0, isr=[0, 1, 2], leader=0, replicas=replicas)]
        ),
    )
    made = chaos.ChaosCluster(tmp_path)
    monkeypatch.setattr(made, "_cluster", SimpleNamespace(admin=admin))
    return made


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (True, None),
        (False, "brokers [0, 1] are registered"),
        (ActorUnavailableError("it is being started again", None), "brokers [0, 1] are registered"),
    ],
)
def test_a_killed_broker_whose_session_goes_on_is_not_settled(
    cluster: chaos.ChaosCluster, monkeypatch: pytest.MonkeyPatch, answer: Any, expected: str | None
) -> None:
    def get(name: str, **_: object) -> Any:
        if isinstance(name, Exception):
            raise name
        return name

    def get_actor(name: str, **_: object) -> Any:
        is_registered = answer if name.endswith("broker-2") else True
        return SimpleNamespace(is_registered=SimpleNamespace(remote=lambda: is_registered))

    monkeypatch.setattr(chaos.ray, "get_actor", get_actor)
    monkeypatch.setattr(chaos.ray, "get", get)
    assert cluster.unsettled() == expected
