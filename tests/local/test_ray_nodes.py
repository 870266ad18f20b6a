"""Small jobs on the nodes of Ray: this process does those on its own node itself."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray._private import worker

from rayq.environment import Environment
from rayq.runtime.ray import nodes as ray_nodes
from rayq.runtime.ray.nodes import on_node, on_nodes, own_node


def pid_after(environment: Environment, word: str) -> tuple[str, int]:
    assert isinstance(environment, Environment)
    return word, os.getpid()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The nodes on which Ray was asked to do a job."""
    asked: list[str] = []

    def run_on_node(node: str, *_: Any) -> str:
        asked.append(node)
        return node

    monkeypatch.setattr(ray_nodes, "run_on_node", run_on_node)
    monkeypatch.setattr(ray_nodes, "result_of", lambda started: (started, 0))
    return asked


def test_jobs_on_the_own_node_need_no_process_of_ray(
    elsewhere: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_nodes, "own_node", lambda: "here")
    done = ("looked", os.getpid())
    assert on_node("here", pid_after, "looked") == done
    assert elsewhere == []
    found = on_nodes(["a", "here", "b"], pid_after, "looked")
    assert found == {"a": ("a", 0), "here": done, "b": ("b", 0)}
    assert elsewhere == ["a", "b"]


def test_another_user_leaves_all_jobs_to_ray(
    elsewhere: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What this process made would not be the brokers' to use."""
    socket = tmp_path / "raylet"
    socket.touch()
    node = SimpleNamespace(raylet_socket_name=str(socket))
    monkeypatch.setattr(worker.global_worker, "node", node)
    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    assert own_node() == "here"
    monkeypatch.setattr(os, "geteuid", lambda: socket.stat().st_uid + 1)
    assert own_node() is None
    on_node("here", pid_after, "looked")
    assert elsewhere == ["here"]


def test_a_process_that_is_on_no_node_leaves_all_jobs_to_ray(
    elsewhere: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker.global_worker, "node", None)
    on_node("here", pid_after, "looked")
    assert elsewhere == ["here"]
