"""Schemas at the edge: the columns that a read has, and JSON values as typed columns."""

from __future__ import annotations

from typing import NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from rayq.errors import InvalidRequestError

HEADERS_TYPE = ArrayType(
    StructType([StructField("key", StringType()), StructField("value", BinaryType())])
)
COLUMN_TYPES = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "headers": HEADERS_TYPE,
}
"""Names and types of Spark's Kafka source."""


def read_schema(columns: tuple[str, ...]) -> StructType:
    return StructType([StructField(name, COLUMN_TYPES[name]) for name in columns])


class Parsed(NamedTuple):
    """What became of a JSON column. Both are lazy, and each reads its input anew: `cache()` the
    input where both are used."""

    rows: DataFrame
    dead_letters: DataFrame


_CORRUPT = "_rayq_corrupt"
_PARSED = "_rayq_parsed"


def from_json(
    df: DataFrame,
    schema: StructType | str,
    *,
    column: str = "value",
    keep: tuple[str, ...] = (),
) -> Parsed:
    """Turns a column of JSON objects (binary or string, UTF-8) into the typed columns of `schema`.

    `rows` has the fields of `schema` (a StructType, or DDL such as "carrier string, delay double"),
    behind those columns of `df` that `keep` names. `dead_letters` has the records that do not
    parse, with all columns of `df` and a column `error`, ready for `rayq.spark.write`: what is not
    JSON, is not an object, has a field of another type than `schema` says, or is null (a
    tombstone). A field that is missing, or null, is null. Raises InvalidRequestError.
    """
    fields = _struct_of(schema)
    if column not in df.columns:
        raise InvalidRequestError(f"There is no column {column!r}: {', '.join(df.columns)}.")
    missing = [name for name in keep if name not in df.columns]
    if missing:
        raise InvalidRequestError(f"keep names {missing}, which the DataFrame does not have.")
    twice = sorted(set(keep) & set(fields.names))
    if twice:
        raise InvalidRequestError(
            f"{twice} would be there twice, kept and from the JSON: rename it before, with "
            "withColumnRenamed, or leave it out of one of the two."
        )
    text = F.col(column).cast("string")
    tried = df.withColumn(
        _PARSED,
        F.from_json(
            text,
            StructType([*fields.fields, StructField(_CORRUPT, StringType())]),
            {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT},
        ),
    )
    is_object = F.ltrim(text).startswith("{")
    is_good = F.coalesce(
        F.col(column).isNotNull()
        & is_object
        & F.col(_PARSED).isNotNull()
        & F.col(f"{_PARSED}.{_CORRUPT}").isNull(),
        F.lit(False),
    )
    rows = tried.where(is_good).select(
        *(F.col(_quoted(name)) for name in keep),
        *(F.col(f"{_PARSED}.{_quoted(name)}").alias(name) for name in fields.names),
    )
    dead = tried.where(~is_good).select(*map(_quoted, df.columns), _why(column, is_object))
    return Parsed(rows, dead)


def _why(column: str, is_object: Column) -> Column:
    return (
        F.when(F.col(column).isNull(), "the value is null")
        .when(~is_object, "not a JSON object")
        .otherwise("not JSON, or a field is of another type than the schema says")
        .alias("error")
    )


def _quoted(name: str) -> str:
    return f"`{name}`"


def _struct_of(schema: StructType | str) -> StructType:
    if isinstance(schema, StructType):
        return schema
    found = StructType.fromDDL(schema)
    return found
