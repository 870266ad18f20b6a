"""Runs what the README and the pages below docs/ tell readers to type, in order.

Fences of `python`, `py` and `bash` are run, those of a page in one namespace and one directory, with a
`cluster` of three brokers in this process. The title of a fence says what is not so:

- a file name: the fence is that file, which a later fence runs or imports;
- `Output`, of a `text`: what the fence before it prints, where `...` stands for anything;
- `Output, in any order`: these lines;
- `On Ray`, `On Ray, with ...`: tests/real/test_pages_on_ray.py runs it against `rayq start`;
- `Not run: why`: it cannot be run here.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

import rayq
from rayq.runtime.current_cluster import Current, write_current
from rayq.testing import LocalCluster

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r'^```(\w+)(?: title="([^"]*)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"[\w./-]+\.\w+")
NOT_RUN = re.compile(r"Not run: \w+ \w+")
TIMEOUT_S = 170.0


class Fence(NamedTuple):
    page: Path
    line: int
    language: str
    title: str
    text: str

    @property
    def is_file(self) -> bool:
        return FILE_NAME.fullmatch(self.title) is not None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def fences(page: Path) -> list[Fence]:
    text = page.read_text(encoding="utf-8")
    return [
        Fence(page, text.count("\n", 0, found.start()) + 1, found[1], found[2] or "", found[3])
        for found in FENCE.finditer(text)
    ]


def is_run(fence: Fence) -> bool:
    runs = fence.language in ("python", "py", "bash")
    return (runs or fence.is_file) and not fence.title.startswith(("Not run", "On Ray"))


# --- what pages presuppose ------------------------------------------------------------------------


class Enough(BaseException):
    """Ends a loop that a reader would run forever."""


def of_the_readme(cluster: rayq.Cluster) -> dict[str, Any]:
    cluster.create_topic("dead")

    def handle(given: Any) -> None:
        if isinstance(given, rayq.Record):
            raise Enough

    return {"handle": handle}


def of_consumer_pools(cluster: rayq.Cluster) -> dict[str, Any]:
    cluster.create_topic("flights", partitions=2)
    cluster.create_topic("flights.dead")
    with cluster.producer() as producer:
        producer.send_many("flights", [b"1", b"2", b"3"]).result(timeout=60)
    return {"parse": lambda record: record.value, "database": SimpleNamespace(insert=list)}


def of_replicas_and_disks(cluster: rayq.Cluster) -> dict[str, Any]:
    cluster.create_topic("orders", replication_factor=2)
    with cluster.consumer("orders", group="baristas") as consumer:
        consumer.poll(timeout_s=0.1)  # makes the topic of the groups' positions
    return {}


PREPARED: dict[str, Callable[[rayq.Cluster], dict[str, Any]]] = {
    "README.md": of_the_readme,
    "docs/consumer-pools.md": of_consumer_pools,
    "docs/how-to/replicas-and-disks.md": of_replicas_and_disks,
}


# --- running --------------------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[rayq.Cluster]:
    """Three brokers in this process, which `rayq.start` and the `rayq` command find as well."""
    monkeypatch.setenv("RAYQ_HOME", str(tmp_path / "home"))
    for name in ("RAYQ_CLUSTER", "RAYQ_TOKEN", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.syspath_prepend(str(tmp_path / "work"))
    with LocalCluster(brokers=3, data_dir=tmp_path / "data") as local:
        write_current(
            Current(
                ray_address="127.0.0.1:1",
                name=local.name,
                brokers=local.addresses,
                path=local.data_dir,
                started_ray=False,
                token=local.token,
            )
        )
        connection = local.connection()
        # A `with` block of one fence ends before the next.
        monkeypatch.setattr(connection, "close", lambda: None)
        monkeypatch.setattr(rayq, "start", lambda *_, **__: connection)
        yield connection
        monkeypatch.undo()
        connection.close()


def run_python(fence: Fence, names: dict[str, Any]) -> str:
    printed = io.StringIO()
    code = compile("\n" * fence.line + fence.text, str(fence.page), "exec")
    with contextlib.redirect_stdout(printed), contextlib.suppress(Enough):
        exec(code, names)
    return printed.getvalue()


def run_bash(fence: Fence) -> str:
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", fence.text],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert ran.returncode == 0, f"{fence}\n{ran.stdout}{ran.stderr}"
    return ran.stdout


def is_alike(output: Fence, printed: str) -> bool:
    if output.title == "Output, in any order":
        return sorted(output.text.splitlines()) == sorted(printed.splitlines())
    assert output.title == "Output", output
    return doctest.OutputChecker().check_output(output.text, printed, doctest.ELLIPSIS)


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(map(is_run, fences(page)))],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_what_a_page_says_runs(page: Path, cluster: rayq.Cluster) -> None:
    prepare = PREPARED.get(page.relative_to(ROOT).as_posix(), lambda _: {})
    names = {"__name__": "__main__", "rayq": rayq, "cluster": cluster, **prepare(cluster)}
    printed = ""
    for fence in fences(page):
        if fence.title.startswith("Output"):
            assert is_alike(fence, printed), f"{fence}: it printed\n{printed}"
        elif not is_run(fence):
            continue
        elif fence.is_file:
            Path(fence.title).parent.mkdir(parents=True, exist_ok=True)
            Path(fence.title).write_text(fence.text)
        elif fence.language == "bash":
            printed = run_bash(fence)
        else:
            printed = run_python(fence, names)


def test_what_is_not_run_says_why() -> None:
    silent = [
        str(fence)
        for page in PAGES
        for fence in fences(page)
        if fence.title.startswith("Not run") and not NOT_RUN.match(fence.title)
    ]
    assert silent == []


def test_every_file_of_a_page_is_used_by_it() -> None:
    for page in PAGES:
        found = fences(page)
        for number, fence in enumerate(found):
            later = "".join(other.text for other in found[number + 1 :])
            user = "pytest" if fence.title == "conftest.py" else Path(fence.title).stem
            assert not fence.is_file or user in later, f"{fence}: {fence.title}"
