"""Which node of Ray a broker's new disk is on."""

from __future__ import annotations

import pytest

from rayq.errors import RayqError
from rayq.runtime.ray import operations as ray_operations


def test_a_machine_is_known_by_its_address_when_ray_gave_it_a_new_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = {"a1": "10.0.0.1", "b1": "10.0.0.2", "c1": "10.0.0.3", "c2": "10.0.0.3"}
    monkeypatch.setattr(ray_operations, "live_nodes", lambda: nodes)
    assert ray_operations._live_node(["b1", "10.0.0.1"], 1) == "b1"
    assert ray_operations._live_node(["before", "10.0.0.2"], 1) == "b1"
    assert ray_operations._live_node(["10.0.0.1"], 1) == "a1"
    for unclear in ("10.0.0.3", "10.0.0.9", ""):
        with pytest.raises(RayqError, match="Node before of broker 1 is not there.*--node"):
            ray_operations._live_node(["before", unclear], 1)
