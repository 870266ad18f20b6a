"""The Dockerfile against the files that it is built from and that run it; no Docker is needed."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage, as (word, rest), with continued lines joined."""
    lines = re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    stages: dict[str, list[tuple[str, str]]] = {}
    for line in filter(str.strip, lines):
        word, rest = line.split(maxsplit=1)
        if word == "FROM":
            stages[rest.split(" AS ")[1]] = []
        stages[list(stages)[-1]].append((word, rest))
    return stages


def test_what_is_copied_is_there_and_nothing_else_is_sent_to_the_build() -> None:
    copied = {
        source
        for stage in _stages().values()
        for word, rest in stage
        if word == "COPY" and not rest.startswith("--from=")
        for source in shlex.split(rest)[:-1]
    }
    assert all((ROOT / source).exists() for source in copied)
    ignored = [line for line in (ROOT / ".dockerignore").read_text().split() if line[0] in "*!"]
    assert ignored[0] == "*" and ignored[-1] == "**/__pycache__"
    assert {line[1:] for line in ignored[1:-1]} == copied


def test_a_stage_takes_only_from_stages_before_it() -> None:
    seen: list[str] = []
    for name, instructions in _stages().items():
        for _, rest in instructions:
            assert set(re.findall(r"from=([\w-]+)", rest)) <= set(seen), rest
        seen.append(name)


def test_both_images_run_as_a_user_that_is_not_root_and_kubernetes_can_tell() -> None:
    stages = _stages()
    assert list(stages)[-1] == "rayq"  # `docker build` makes it where no target is named.
    for name in ("rayq", "spark"):
        *_, last = stages[name]
        assert last == ("USER", "1000:1000")
    assert "useradd --uid 1000 --user-group" in TEXT


def test_its_python_is_one_that_rayq_takes_and_the_packages_are_those_of_the_lock() -> None:
    bases = set(re.findall(r"^FROM (debian:\S+)", TEXT, flags=re.MULTILINE))
    assert bases == {"debian:bookworm-slim"}  # the Python of bookworm is 3.11
    assert "Programming Language :: Python :: 3.11" in PROJECT["classifiers"]
    installs = [
        rest for stage in _stages().values() for _, rest in stage if "pip install" in rest
    ]
    assert all("--constraint requirements.lock" in one or "--no-deps" in one for one in installs)
    assert set(re.findall(r"--extra (\w+)", TEXT)) == set(PROJECT["optional-dependencies"]) - {
        "arrow",  # part of `data`
        "dev",
        "docs",
    }


def test_kubernetes_runs_that_image_as_that_user() -> None:
    tag = f"rayq:{PROJECT['version']}"
    documents = yaml.safe_load_all((ROOT / "deploy/kuberay.yaml").read_text())
    (cluster,) = (one for one in documents if one["kind"] == "RayCluster")
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    for pod in (group["template"]["spec"] for group in groups):
        assert [container["image"] for container in pod["containers"]] == [tag]
        user = pod["securityContext"]
        assert user["runAsNonRoot"] and user["fsGroup"] == user["runAsUser"] == 1000
    for text in (TEXT, (ROOT / "docs/docker.md").read_text()):
        assert f"docker build -t {tag} ." in text
