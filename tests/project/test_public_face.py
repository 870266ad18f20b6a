"""What `rayq` exports: this list, and nothing by accident."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import rayq
from rayq import errors

NAMES = {
    "Acl",
    "AclVerdict",
    "Admin",
    "AsyncAdmin",
    "AsyncConsumer",
    "AsyncProducer",
    "AsyncQueue",
    "AsyncTransaction",
    "AuditLine",
    "AuditPage",
    "BrokerInfo",
    "CapacityCheck",
    "CapacityPlan",
    "Cluster",
    "ClusterConfig",
    "ClusterInfo",
    "Consumer",
    "ConsumerConfig",
    "ConsumerPool",
    "DeletedRemoteTopic",
    "DeliveryFuture",
    "DrainProgress",
    "GroupInfo",
    "GroupListing",
    "GroupMemberInfo",
    "GroupMembership",
    "GroupOffset",
    "HangingTransaction",
    "ManyDeliveryFuture",
    "MovedRecords",
    "NewToken",
    "ObjectStoreInfo",
    "OffsetAndMetadata",
    "OffsetRange",
    "Outgoing",
    "PartitionInfo",
    "PoolConfig",
    "PoolConsumer",
    "PoolStatus",
    "PrincipalInfo",
    "Producer",
    "ProducerConfig",
    "Queue",
    "Quota",
    "QuotaInfo",
    "QueueConfig",
    "QueueInfo",
    "QueuePartitionInfo",
    "QueueRecordInfo",
    "QueueTask",
    "Reassignment",
    "Record",
    "RecordMetadata",
    "RemotePartitionInfo",
    "RemoteProblem",
    "RemoteVerification",
    "ReplicaInfo",
    "Sample",
    "SnapshotPin",
    "TaskFunction",
    "TokenInfo",
    "TopicConfig",
    "TopicInfo",
    "TopicPartition",
    "Transaction",
    "TransactionInfo",
    "TransactionListing",
    "TransactionParticipant",
    "connect",
    "json_deserializer",
    "json_serializer",
    "start",
    "typed_json_deserializer",
}
ERRORS = {
    "AlreadyCommittedError",
    "AuthenticationError",
    "AuthorizationError",
    "BufferFullError",
    "CommitRefusedError",
    "ConfigError",
    "DeliveryError",
    "DeliveryTimeoutError",
    "DeserializationError",
    "LockLostError",
    "OffsetOutOfRangeError",
    "OutcomeUnknownError",
    "ProducerFencedError",
    "QueueExistsError",
    "QuotaLimitError",
    "RayqError",
    "RecordTooLargeError",
    "SerializationError",
    "TimeoutError",
    "TopicExistsError",
    "TransactionAbortedError",
    "TransactionCommittedError",
    "TransactionOutcomeUnknownError",
    "UnknownQueueError",
    "UnknownTopicError",
    "UnreadableRecordError",
}
"""The errors that programs often catch; all errors are in `rayq.errors`."""


def test_the_package_exports_its_face_and_the_errors_that_programs_catch() -> None:
    assert set(rayq.__all__) == NAMES | ERRORS | {"__version__"}


def test_every_export_exists_and_is_documented() -> None:
    for name in rayq.__all__:
        exported = getattr(rayq, name)
        assert name == "__version__" or exported.__doc__, name


def test_the_package_holds_no_other_public_name() -> None:
    for name in rayq.__all__:
        getattr(rayq, name)
    public = {
        name
        for name, value in vars(rayq).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public - {"annotations"} == NAMES | ERRORS
    assert set(rayq.__all__) | {"data", "errors", "spark"} <= set(dir(rayq))
    with pytest.raises(AttributeError, match="nonsense"):
        getattr(rayq, "nonsense")  # noqa: B009


def test_type_checkers_see_every_name_that_is_imported_at_its_first_use() -> None:
    tree = ast.parse(Path(str(rayq.__file__)).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.name: statement.module
        for statement in block.body
        if isinstance(statement, ast.ImportFrom) and statement.module not in ("typing", "rayq")
        for alias in statement.names
    }
    assert set(imported) == NAMES | ERRORS
    for name, module in imported.items():
        assert getattr(importlib.import_module(str(module)), name) is getattr(rayq, name)


def test_every_error_says_when_it_is_raised() -> None:
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.RayqError):
            assert value.__doc__, name


def test_every_error_is_found_when_only_the_package_was_imported() -> None:
    assert loaded("import rayq; rayq.errors.NullKeyError", ("rayq.errors",)) == "['rayq.errors']"


def test_what_public_methods_return_is_exported() -> None:
    inside = {"new_client", "shared_client", "begin_until_end", "positions_to_send"}  # for rayq
    for face in (getattr(rayq, name) for name in NAMES):
        for name, method in inspect.getmembers(face, inspect.isfunction):
            if name.startswith("_") or name in inside:
                continue
            known = inspect.unwrap(method).__globals__
            for word in re.findall(r"\w+", str(inspect.signature(method).return_annotation)):
                found = known.get(word)
                if isinstance(found, type) and found.__module__.startswith("rayq."):
                    assert word in NAMES, f"{face.__name__}.{name} returns {word}"


def loaded(program: str, heavy: tuple[str, ...]) -> str:
    """Those of `heavy` that a program has imported at its end."""
    program = f"import sys; {program}; print([name for name in {heavy!r} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return ran.stdout.strip() + ran.stderr


def test_using_rayq_does_not_import_ray_or_any_extra() -> None:
    # Ray takes a second to import; a unit test on LocalCluster shall not pay for it.
    heavy = ("ray", "numpy", "pyarrow", "pandas", "rich", "typer", "pytest")
    assert loaded("import rayq; rayq.Cluster", heavy) == "[]"


def test_importing_rayq_or_its_command_imports_nothing_else() -> None:
    # Neither `rayq --version` nor a module that merely names rayq shall pay for the whole of it.
    heavy = ("msgspec", "asyncio", "typer", "rich", "logging", "importlib.metadata", "rayq.errors")
    assert loaded("import rayq", heavy) == "[]"
    assert loaded("import rayq.cli.main", heavy) == "[]"
