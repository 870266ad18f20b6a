"""What `rayq` exports: this list, and nothing by accident."""

from __future__ import annotations

import subprocess
import sys
import types

import rayq
from rayq import errors

NAMES = {
    "Cluster",
    "ConsumerPool",
    "DrainProgress",
    "GroupInfo",
    "GroupListing",
    "GroupMemberInfo",
    "GroupMembership",
    "GroupOffset",
    "OffsetAndMetadata",
    "OffsetRange",
    "PoolConsumer",
    "PoolStatus",
    "Reassignment",
    "Record",
    "RecordMetadata",
    "TopicPartition",
    "connect",
    "start",
}
ERRORS = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.RayqError)
}


def test_the_package_exports_its_face_and_every_error() -> None:
    assert set(rayq.__all__) == NAMES | ERRORS | {"__version__"}


def test_every_export_exists_and_is_documented() -> None:
    for name in rayq.__all__:
        exported = getattr(rayq, name)
        assert name == "__version__" or exported.__doc__, name


def test_the_package_holds_no_other_public_name() -> None:
    public = {
        name
        for name, value in vars(rayq).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public - {"annotations"} == NAMES | ERRORS


def test_every_error_says_when_it_is_raised() -> None:
    for name in ERRORS:
        assert getattr(errors, name).__doc__


def test_importing_rayq_does_not_import_ray_or_any_extra() -> None:
    # Ray takes a second to import; a unit test on LocalCluster shall not pay for it.
    heavy = ("ray", "numpy", "pyarrow", "pandas", "rich", "typer", "pytest")
    program = f"import sys, rayq; print([name for name in {heavy!r} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout.strip() == "[]", ran.stdout + ran.stderr
