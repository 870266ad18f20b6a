"""The files that users deploy with: by the schemas of the programs that read them, and by rayq."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from rayq.cli.app import app
from rayq.config import ClusterConfig, parse

ROOT = Path(__file__).resolve().parents[2]
LAUNCHED = ["cluster.yaml", "deploy/local.yaml"]
RAYCLUSTER = json.loads((Path(__file__).parent / "raycluster_schema.json").read_text())


def _launched(name: str) -> dict[str, Any]:
    config: dict[str, Any] = prepare_config(yaml.safe_load((ROOT / name).read_text()))
    return config


@pytest.mark.parametrize("page", ["README.md", "docs/operations.md", *LAUNCHED])
def test_whoever_is_told_to_launch_is_told_to_make_what_the_files_copy(page: str) -> None:
    """Each of `file_mounts` has to be there before `ray up`."""
    for name in LAUNCHED:
        assert set(_launched(name)["file_mounts"].values()) == {"dist", "~/.ray/auth_token"}
    before, made, _ = (ROOT / page).read_text().partition("get-auth-token --generate")
    assert made and "pip install 'ray[default]'" in before
    assert "pip wheel --no-deps -w dist ." in before and "CHANGE" in before


def _kuberay() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "deploy/kuberay.yaml").read_text()))


@pytest.mark.parametrize("name", LAUNCHED)
def test_rays_own_check_takes_it(name: str) -> None:
    validate_config(_launched(name))


@pytest.mark.parametrize("name", LAUNCHED)
def test_a_typo_would_be_noticed(name: str) -> None:
    config = _launched(name)
    config["head_start_ray_comands"] = config.pop("head_start_ray_commands")
    with pytest.raises(jsonschema.ValidationError, match="head_start_ray_comands"):
        validate_config(config)


def test_only_nodes_of_type_broker_offer_the_resource_and_consumers_begin_at_none() -> None:
    types = _launched("cluster.yaml")["available_node_types"]
    offering = [name for name, one in types.items() if "rayq_broker" in one["resources"]]
    assert offering == ["broker"]
    assert types["broker"]["min_workers"] == types["broker"]["max_workers"] == 3
    assert types["consumer"]["min_workers"] == 0 < types["consumer"]["max_workers"]


def test_the_kubernetes_file_keeps_to_the_schema_of_raycluster() -> None:
    (cluster,) = (one for one in _kuberay() if one["kind"] == "RayCluster")
    jsonschema.validate(cluster, RAYCLUSTER)
    cluster["spec"]["headGroupSpec"]["rayStartParam"] = {}
    with pytest.raises(jsonschema.ValidationError, match="rayStartParam"):
        jsonschema.validate(cluster, RAYCLUSTER)


def test_each_broker_on_kubernetes_has_a_claim_of_its_own() -> None:
    claims = [one["metadata"]["name"] for one in _kuberay() if one["kind"].endswith("Claim")]
    (cluster,) = (one for one in _kuberay() if one["kind"] == "RayCluster")
    brokers = [one for one in cluster["spec"]["workerGroupSpecs"] if "rayq" in str(one["rayStartParams"])]
    assert [one["replicas"] for one in brokers] == [1, 1, 1]
    assert claims == [
        volume["persistentVolumeClaim"]["claimName"]
        for one in brokers
        for volume in one["template"]["spec"]["volumes"]
    ]


def test_every_container_on_kubernetes_has_rays_token_the_autoscaler_too() -> None:
    (cluster,) = (one for one in _kuberay() if one["kind"] == "RayCluster")
    spec = cluster["spec"]
    pods = [group["template"]["spec"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    containers = [*(one for pod in pods for one in pod["containers"]), spec["autoscalerOptions"]]
    for container in containers:
        assert {one["name"] for one in container["env"]} == {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"}


@pytest.mark.parametrize("name", [*LAUNCHED, "deploy/kuberay.yaml"])
def test_the_command_that_starts_brokers_is_one_that_rayq_has(name: str) -> None:
    text = " ".join((ROOT / name).read_text().split())
    _, _, rest = text.partition("rayq start /")
    words = shlex.split(rest.split("'")[0].split("#")[0])[:5]
    start = typer.main.get_command(app).commands["start"]  # type: ignore[attr-defined]
    values = start.make_context("start", ["/" + words[0], *words[1:]]).params
    assert values["nodes"] == 3
    config = dict(one.split("=") for one in values["config"])
    assert parse(ClusterConfig, config).broker_resource == "rayq_broker"
