"""The columns of a read, and JSON values as typed columns."""

from __future__ import annotations

from typing import NamedTuple

from pyspark.errors import ParseException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as fn
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
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
"""The names and types of Spark's Kafka source."""


def read_schema(columns: tuple[str, ...]) -> StructType:
    return StructType([StructField(name, COLUMN_TYPES[name]) for name in columns])


class Parsed(NamedTuple):
    """The two parts of a parsed JSON column. Both are lazy, and each reads its input again:
    `cache()` the input where you use both."""

    rows: DataFrame
    dead_letters: DataFrame


ERROR = "error"
"""The column of dead letters that says why a record does not parse."""

_PARSED = "_rayq_parsed"
_CORRUPT = "_rayq_corrupt"
_PAIR = "_rayq_pair"
_END = "_rayq_end"
"""Marker at the end of the parsed text. Spark's parser stops after the first JSON value, whatever
follows. So it gets an array of two items: the text, and an item with the field `_rayq_end`. The
text was exactly one value only if exactly these two come out. A text that contains these names
could get past the check, but no text does so by accident."""


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
    parse, with all columns of `df` and a column `error` (which replaces such a column of an earlier
    attempt), ready for `rayq.spark.write`: a value that is not UTF-8, or not exactly one JSON
    object, or null (a tombstone), or that has a field of another type than `schema` says. A field
    that is missing, or null, is null. A string field takes any JSON: a value that is not a string
    becomes its text, such as `7` or `{"x":1}`. Numbers may be NaN and Infinity. Raises
    InvalidRequestError.
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
    text = fn.col(_quoted(column)).cast("string")
    # An array of one, filtered and exploded: a plain `where` would be pushed below the columns, and
    # each record would be parsed again for every use of the parsed columns.
    parsed = fn.array(fn.when(_is_utf8(text), _parsed(text, fields)))
    record = fn.col(_PARSED)[_PAIR][0]
    rows = df.select("*", fn.explode(fn.filter(parsed, _is_good)).alias(_PARSED)).select(
        *(fn.col(_quoted(name)) for name in keep),
        *(record.getField(name).alias(name) for name in fields.names),
    )
    kept = [_quoted(name) for name in df.columns if name.lower() != ERROR]
    dead = df.select(
        "*", fn.explode(fn.filter(parsed, lambda pair: ~_is_good(pair))).alias(_PARSED)
    )
    return Parsed(rows, dead.select(*kept, _why(text).alias(ERROR)))


def _is_good(parsed: Column) -> Column:
    pair = parsed[_PAIR]
    return fn.coalesce(
        parsed[_CORRUPT].isNull()
        & (fn.size(pair) == 2)
        & pair[0].isNotNull()
        & pair[1][_END],
        fn.lit(False),
    )


def _parsed(text: Column, fields: StructType) -> Column:
    item = StructType([*fields.fields, StructField(_END, BooleanType())])
    return fn.from_json(
        fn.concat(fn.lit(f'{{"{_PAIR}":['), text, fn.lit(f',{{"{_END}":true}}]}}')),
        StructType([StructField(_PAIR, ArrayType(item)), StructField(_CORRUPT, StringType())]),
        {
            "mode": "PERMISSIVE",
            "columnNameOfCorruptRecord": _CORRUPT,
            "allowSingleQuotes": "false",
        },
    )


def _is_utf8(text: Column) -> Column:
    """Returns whether the text is UTF-8: decoding replaces other bytes, which then do not come
    back."""
    data = text.cast("binary")
    return fn.encode(fn.decode(data, "UTF-8"), "UTF-8") == data


def _why(text: Column) -> Column:
    return (
        fn.when(text.isNull(), "the value is null")
        .when(~_is_utf8(text), "not UTF-8")
        .when(~text.rlike(r"^[ \t\r\n]*\{"), "not a JSON object")
        .otherwise("not one JSON object, or a field is of another type than the schema says")
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
            f"{schema!r} is not a schema: give a StructType, or DDL such as 'carrier string, delay "
            f"double'. {error}"
        ) from error
