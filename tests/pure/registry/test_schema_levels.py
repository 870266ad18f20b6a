"""Levels of compatibility over the versions of a subject."""

from __future__ import annotations

import json

import pytest

from rayq.errors import IncompatibleSchemaError, InvalidSchemaError, SchemaTooLargeError
from rayq.registry.checks import REASONS_MAX, SubjectVersion, incompatibilities, incompatible
from rayq.registry.levels import CompatibilityLevel
from rayq.registry.schema_text import ResolvedSchema
from tests.pure.registry.support import AVRO, JSON, PROTOBUF, alone

INT, LONG, STRING = (alone(AVRO, json.dumps(name)) for name in ("int", "long", "string"))


def refused(
    level: str, new: ResolvedSchema, *earlier: ResolvedSchema, deleted: tuple[int, ...] = ()
) -> list[tuple[int, str]]:
    """The versions that do not fit, and in which direction. The first version is 1."""
    versions = [
        SubjectVersion(version=number, resolved=schema, deleted=number in deleted)
        for number, schema in enumerate(earlier, 1)
    ]
    found = incompatibilities(new, versions, CompatibilityLevel(level))
    return [(version.version, version.direction) for version in found]


@pytest.mark.parametrize(
    "level, widened, narrowed",
    [
        ("NONE", [], []),
        ("BACKWARD", [], [(1, "BACKWARD")]),
        ("BACKWARD_TRANSITIVE", [], [(1, "BACKWARD")]),
        ("FORWARD", [(1, "FORWARD")], []),
        ("FORWARD_TRANSITIVE", [(1, "FORWARD")], []),
        ("FULL", [(1, "FORWARD")], [(1, "BACKWARD")]),
        ("FULL_TRANSITIVE", [(1, "FORWARD")], [(1, "BACKWARD")]),
    ],
)
def test_each_level_has_its_direction(
    level: str, widened: list[tuple[int, str]], narrowed: list[tuple[int, str]]
) -> None:
    assert refused(level, LONG, INT) == widened
    assert refused(level, INT, LONG) == narrowed
    assert refused(level, INT, INT) == refused(level, INT) == []


def test_only_transitive_levels_look_beyond_the_latest_version() -> None:
    history = (STRING, INT, INT)
    for level in ("BACKWARD", "FORWARD", "FULL"):
        assert refused(level, INT, *history) == []
    assert refused("BACKWARD_TRANSITIVE", INT, *history) == [(1, "BACKWARD")]
    assert refused("FORWARD_TRANSITIVE", INT, *history) == [(1, "FORWARD")]
    assert refused("FULL_TRANSITIVE", INT, *history) == [(1, "BACKWARD"), (1, "FORWARD")]


def test_the_latest_version_is_that_of_the_highest_number() -> None:
    versions = [
        SubjectVersion(version=number, resolved=schema)
        for number, schema in ((7, INT), (9, STRING), (8, INT))
    ]
    found = incompatibilities(INT, versions, CompatibilityLevel.BACKWARD)
    assert [version.version for version in found] == [9]


def test_a_deleted_version_does_not_count() -> None:
    assert refused("BACKWARD", INT, INT, STRING) == [(2, "BACKWARD")]
    assert refused("BACKWARD", INT, INT, STRING, deleted=(2,)) == []
    assert refused("BACKWARD", INT, STRING, STRING, deleted=(2,)) == [(1, "BACKWARD")]
    assert refused("FULL_TRANSITIVE", INT, STRING, INT, deleted=(1,)) == []
    assert refused("FULL_TRANSITIVE", INT, STRING, STRING, deleted=(1, 2)) == []


def test_a_schema_of_another_type_never_fits() -> None:
    schemas = (alone(JSON, "{}"), alone(PROTOBUF, "message M {}"))
    for new, earlier in zip(schemas, schemas[::-1], strict=True):
        for level in ("BACKWARD", "FORWARD_TRANSITIVE"):
            (found,) = incompatibilities(
                new, [SubjectVersion(version=1, resolved=earlier)], CompatibilityLevel(level)
            )
            assert found.reason.kind == "schema_type_changed"
        assert refused("NONE", new, earlier) == []


def test_the_error_names_the_subject_the_level_and_each_reason() -> None:
    versions = [SubjectVersion(version=3, resolved=STRING), SubjectVersion(version=4, resolved=INT)]
    level = CompatibilityLevel.BACKWARD_TRANSITIVE
    error = incompatible("a-value", level, incompatibilities(INT, versions, level))
    assert isinstance(error, IncompatibleSchemaError) and error.error_code == 409
    assert error.message == (
        "The schema is incompatible with earlier versions of subject 'a-value', whose compatibility"
        " level is BACKWARD_TRANSITIVE. Version 3: the new schema cannot read all that it wrote: the"
        " reader's type does not take the writer's: reader type: int not compatible with writer"
        " type: string (type_mismatch at /). Change the schema, or the level of the subject."
    )


def test_no_more_reasons_are_told_than_help() -> None:
    history = [STRING] * (REASONS_MAX + 10)
    found = refused("BACKWARD_TRANSITIVE", INT, *history)
    assert found[0] == (REASONS_MAX + 10, "BACKWARD") and len(found) == REASONS_MAX


def test_a_new_schema_is_looked_at_whatever_the_level() -> None:
    with pytest.raises(SchemaTooLargeError):
        refused("NONE", alone(AVRO, "x" * 2_000_000))
    with pytest.raises(InvalidSchemaError, match="^The Avro schema is no JSON"):
        refused("BACKWARD", alone(AVRO, "{"), INT)


def test_an_earlier_version_that_cannot_be_read_is_named() -> None:
    """It came from a registry that looks at less."""
    with pytest.raises(InvalidSchemaError, match="^Version 2, which .* Delete that version"):
        refused("BACKWARD", INT, INT, alone(AVRO, '{"type": "int", "type": "int"}'))
