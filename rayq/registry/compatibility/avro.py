"""Compatibility of Avro schemas: the schema resolution of the specification, as Apache's library
decides it."""

from __future__ import annotations

from avro.compatibility import ReaderWriterCompatibilityChecker, SchemaCompatibilityType

from rayq.errors import InvalidSchemaError
from rayq.registry.compatibility.incompatibility import Incompatibility
from rayq.registry.formats.avro import parse_avro
from rayq.registry.schema_text import ResolvedSchema

_REASONS = {
    "name_mismatch": "the reader's type has another name, and no alias that fits",
    "fixed_size_mismatch": "the sizes of a fixed type differ",
    "missing_enum_symbols": "the reader's enum lacks symbols and has no default",
    "reader_field_missing_default_value": "the writer lacks fields for which the reader has no"
    " default",
    "type_mismatch": "the reader's type does not take the writer's",
    "missing_union_branch": "the reader's union lacks types of the writer",
}


def avro_incompatibilities(reader: ResolvedSchema, writer: ResolvedSchema) -> list[Incompatibility]:
    """Reasons why `reader` does not read what `writer` writes. Raises InvalidSchemaError.

    The library collects kinds, messages and places each for itself, so where there are several,
    they are one reason that names all of them.
    """
    checker = ReaderWriterCompatibilityChecker()  # type: ignore[no-untyped-call]
    try:
        result = checker.get_compatibility(parse_avro(reader), parse_avro(writer))
    except RecursionError as error:
        raise InvalidSchemaError(
            "The Avro schemas are nested too deeply to be compared. Give inner types names, and"
            " refer to them."
        ) from error
    if result.compatibility is SchemaCompatibilityType.compatible:
        return []
    kinds = sorted({kind.value for kind in result.incompatibilities})
    why = "; ".join(_REASONS[kind] for kind in kinds)
    return [
        Incompatibility(
            ", ".join(kinds),
            ", ".join(sorted(result.locations)),
            f"{why}: {'; '.join(sorted(result.messages))}",
        )
    ]
