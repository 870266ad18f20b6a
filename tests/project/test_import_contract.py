"""Which packages may import which (pyproject.toml, docs/architecture.md)."""

from __future__ import annotations

import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]
FACE = ("demo", "entry", "cli", "spark", "data", "testing")


@pytest.fixture(scope="module")
def imports() -> grimp.ImportGraph:
    return grimp.build_graph("rayq", include_external_packages=True, cache_dir=None)


def is_face(module: str) -> bool:
    parts = module.split(".")
    return parts == ["rayq"] or parts[1] in FACE


def test_the_contracts_of_pyproject_hold() -> None:
    command = Path(sys.executable).with_name("lint-imports")
    ran = subprocess.run(
        [command, "--no-cache", "--no-logo"], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_no_files_import_each_other_in_a_circle() -> None:
    """Nor where only type checkers see it: a reader of the one file would have to read the
    other."""
    graph = grimp.build_graph("rayq", "proving", cache_dir=None)
    imported = {
        module: graph.find_modules_directly_imported_by(module) for module in graph.modules
    }
    TopologicalSorter(imported).prepare()


def test_the_rooms_of_the_client_import_one_way(imports: grimp.ImportGraph) -> None:
    rooms = ("rayq.client.producing", "rayq.client.consuming")
    for one, other in (rooms, rooms[::-1]):
        assert not imports.direct_import_exists(importer=one, imported=other, as_packages=True)


def test_among_the_servers_only_the_ray_runtimes_import_ray(imports: grimp.ImportGraph) -> None:
    importers = imports.find_modules_that_directly_import("ray") if "ray" in imports.modules else ()
    servers = {module for module in importers if not is_face(module)}
    assert all(module.startswith("rayq.runtime.ray.") for module in servers), servers


def test_nothing_below_the_face_imports_the_package_itself(imports: grimp.ImportGraph) -> None:
    importers = imports.find_modules_that_directly_import("rayq")
    assert not {module for module in importers if not is_face(module)}
