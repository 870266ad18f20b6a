"""Schemas at the edge: the columns that a read has, and JSON values as typed columns."""

from __future__ import annotations

from typing import NamedTuple

from pyspark.errors import ParseException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as fn
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
    fields = _struct_of(df.sparkSession, schema)
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
    text = fn.col(column).cast("string")
    tried = df.withColumn(
        _PARSED,
        fn.from_json(
            text,
            StructType([*fields.fields, StructField(_CORRUPT, StringType())]),
            {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT},
        ),
    )
    is_object = fn.ltrim(text).startswith("{")
    is_good = fn.coalesce(
        fn.col(column).isNotNull()
        & is_object
        & fn.col(_PARSED).isNotNull()
        & fn.col(f"{_PARSED}.{_CORRUPT}").isNull(),
        fn.lit(False),
    )
    rows = tried.where(is_good).select(
        *(fn.col(_quoted(name)) for name in keep),
        *(fn.col(f"{_PARSED}.{_quoted(name)}").alias(name) for name in fields.names),
    )
    dead = tried.where(~is_good).select(*map(_quoted, df.columns), _why(column, is_object))
    return Parsed(rows, dead)


def _why(column: str, is_object: Column) -> Column:
    return (
        fn.when(fn.col(column).isNull(), "the value is null")
        .when(~is_object, "not a JSON object")
        .otherwise("not JSON, or a field is of another type than the schema says")
        .alias("error")
    )


def _quoted(name: str) -> str:
    return f"`{name}`"


def _struct_of(spark: SparkSession, schema: StructType | str) -> StructType:
    if isinstance(schema, StructType):
        return schema
    try:
        return spark.createDataFrame([], schema).schema
    except ParseException as error:
        raise InvalidRequestError(
            f"{schema!r} is no schema: give a StructType, or DDL such as 'carrier string, delay "
            f"double'. {error}"
        ) from error
