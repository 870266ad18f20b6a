"""Formats of records on stdout and stdin: kcat's formats, and JSON. Pure.

Tokens: `%s` (or `%v`) value, `%S` its length, `%k` key, `%K` its length, `%t` topic, `%p`
partition, `%o` offset, `%T` timestamp in milliseconds, `%h` headers as name=value with commas, `%R`
the value's length as four bytes, big endian, `%%` a percent sign; `\\n`, `\\t`, `\\r`, `\\0`,
`\\\\` and `\\xHH` stand for bytes. The length of a null is -1.

As JSON a record is one object on one line: topic, partition, offset, timestamp_ms, key, value and
headers (a list of pairs). A key or value is text, null, or `{"base64": "..."}` where its bytes are
no UTF-8. What `consume --json` writes, `produce -f json` reads.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec

from rayq.cli.values import WrongUseError, is_number
from rayq.errors import InvalidRequestError, RayqError
from rayq.records import Headers, Record

NULL = b"NULL"
JSON = "json"
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|.)|\\$", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\", "a": "\a"}
_TOKEN = re.compile(r"%(.)|%$", re.DOTALL)
_LENGTH = struct.Struct(">i")



class InputError(RayqError):
    """The content of a file or of stdin is invalid. (A mistyped argument is a WrongUseError, or a
    ConfigError.)"""


Field = Callable[[Record], bytes]
Formatter = Callable[[Iterable[Record]], bytes]


def unescape(text: str) -> bytes:
    """The bytes that `\\n` and its like stand for. Raises WrongUseError."""

    def replace(found: re.Match[str]) -> str:
        code = found[1] or ""
        if len(code) == 3:
            return chr(int(code[1:], 16))
        if code not in _ESCAPES:
            raise WrongUseError(
                f"{text!r}: after a backslash stands one of n, t, r, 0, xHH or a backslash."
            )
        return _ESCAPES[code]

    pieces: list[bytes] = []
    position = 0
    for found in _ESCAPE.finditer(text):
        pieces += [to_bytes(text[position : found.start()]), replace(found).encode("latin-1")]
        position = found.end()
    return b"".join([*pieces, to_bytes(text[position:])])


def to_bytes(argument: str) -> bytes:
    """The bytes that were typed, even where they are not UTF-8."""
    return argument.encode(errors="surrogateescape")


# --- out ------------------------------------------------------------------------------------------


def formatter(template: str, *, null: bytes = b"") -> Formatter:
    """Returns the function that turns records into bytes: by a template, or as JSON for the
    template `json`. `null` stands for a key or value that is null. Raises WrongUseError."""
    if template == JSON:
        return json_lines
    parts = tuple(_fields(template, null))

    def format_records(records: Iterable[Record]) -> bytes:
        return b"".join([part(record) for record in records for part in parts])

    return format_records


def _fields(template: str, null: bytes) -> Iterable[Field]:
    fields = _output_fields(null)
    for piece in _pieces(template):
        if isinstance(piece, bytes):
            yield _constant(piece)
        elif piece in fields:
            yield fields[piece]
        else:
            raise _unknown(piece, fields)


def _pieces(template: str) -> Iterable[bytes | str]:
    """Literal bytes, and the letters of tokens, in their order."""
    literal, position = b"", 0
    for found in _TOKEN.finditer(template):
        literal += unescape(template[position : found.start()])
        position = found.end()
        if found[1] == "%":
            literal += b"%"
            continue
        if literal:
            yield literal
            literal = b""
        yield found[1] or ""
    literal += unescape(template[position:])
    if literal:
        yield literal


def _unknown(letter: str, known: Iterable[str]) -> WrongUseError:
    listed = " ".join(f"%{each}" for each in known)
    return WrongUseError(f"%{letter} is unknown in a format: there are {listed} and %%.")


def _constant(literal: bytes) -> Field:
    return lambda _: literal


def _output_fields(null: bytes) -> dict[str, Field]:
    def value(record: Record) -> bytes:
        return null if record.value is None else record.value

    def key(record: Record) -> bytes:
        return null if record.key is None else record.key

    def headers(record: Record) -> bytes:
        return b",".join(
            name.encode() + b"=" + (NULL if data is None else data)
            for name, data in record.headers
        )

    return {
        "s": value,
        "v": value,
        "S": lambda record: b"%d" % _length(record.value),
        "k": key,
        "K": lambda record: b"%d" % _length(record.key),
        "t": lambda record: record.topic.encode(),
        "p": lambda record: b"%d" % record.partition,
        "o": lambda record: b"%d" % record.offset,
        "T": lambda record: b"%d" % record.timestamp_ms,
        "h": headers,
        "R": lambda record: _LENGTH.pack(_length(record.value)),
    }


def _length(data: bytes | None) -> int:
    return -1 if data is None else len(data)


def json_lines(records: Iterable[Record]) -> bytes:
    encode = msgspec.json.encode
    return b"".join([encode(as_json(record)) + b"\n" for record in records])


def as_json(record: Record) -> dict[str, Any]:
    return {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp_ms": record.timestamp_ms,
        "key": _text(record.key),
        "value": _text(record.value),
        "headers": [[name, _text(data)] for name, data in record.headers],
    }


def _text(data: bytes | None) -> str | dict[str, str] | None:
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


# --- in -------------------------------------------------------------------------------------------


class Given(NamedTuple):
    """A record as read from stdin; the options and the producer choose what is None."""

    value: bytes | None
    key: bytes | None = None
    headers: Headers | None = None
    partition: int | None = None
    timestamp_ms: int | None = None


Parser = Callable[[bytes], Given]
_INPUT_FIELDS = ("s", "v", "k", "p", "T", "h", "t", "o")
_IGNORED_FIELDS = ("t", "o")
_JSON_FIELDS = ("topic", "partition", "offset", "timestamp_ms", "key", "value", "headers")
_JSON_NAMES = tuple(name.encode() for name in _JSON_FIELDS)


def field_letters(template: str) -> set[str]:
    """The letters of the tokens of an input template. Raises WrongUseError."""
    return {piece for piece in _pieces(template) if isinstance(piece, str)}




def parser(template: str, delimiter: bytes) -> Parser:
    """Returns the function that turns one line into a record. The template's literal texts separate
    the fields, each at its first occurrence; the last field takes the rest. `%t` and `%o` are read
    and ignored. Raises WrongUseError."""
    if template == JSON:
        return parse_json
    pieces = list(_pieces(template))
    if pieces and isinstance(pieces[-1], bytes):
        pieces[-1] = pieces[-1].removesuffix(delimiter)
        if not pieces[-1]:
            del pieces[-1]
    last: bytes | str = b""
    for piece in pieces:
        if isinstance(piece, str) and piece not in _INPUT_FIELDS:
            raise _unknown(piece, _INPUT_FIELDS)
        if isinstance(piece, str) and isinstance(last, str):
            raise WrongUseError(
                f"{template!r}: put something between %{last} and %{piece}, or nobody can tell "
                "where one ends."
            )
        last = piece
    fields = Counter("s" if piece == "v" else piece for piece in pieces if isinstance(piece, str))
    for letter, count in fields.items():
        if count > 1 and letter not in _IGNORED_FIELDS:
            raise WrongUseError(f"{template!r} has %{letter} {count} times: which one counts?")
    if "s" not in fields:
        raise WrongUseError(f"{template!r} has no %s: where is the value?")
    return lambda line: _parse_line(line, pieces, template)


def _parse_line(line: bytes, pieces: list[bytes | str], template: str) -> Given:
    found: dict[str, bytes] = {}
    position, name = 0, ""
    for piece in pieces:
        if isinstance(piece, str):
            name = piece
            continue
        end = line.find(piece, position)
        if end < 0 or (not name and end > position):
            raise InvalidRequestError(f"{shown(line)} is not as {template!r}: no {shown(piece)}.")
        if name:
            found[name] = line[position:end]
        position, name = end + len(piece), ""
    if name:
        found[name] = line[position:]
    elif position < len(line):
        raise InvalidRequestError(f"{shown(line)} is longer than {template!r}.")
    headers = found.get("h")
    return Given(
        value=found.get("s", found.get("v")),
        key=found.get("k"),
        headers=None if headers is None else _headers(headers),
        partition=_number(found.get("p"), "partition"),
        timestamp_ms=_number(found.get("T"), "timestamp"),
    )


def _headers(text: bytes) -> Headers:
    """Reads headers as `%h` writes them: `name=value,name=value`."""
    found: Headers = []
    for pair in text.split(b",") if text else []:
        name, equals, value = pair.partition(b"=")
        if not equals:
            raise InvalidRequestError(
                f"{shown(text)} are not headers: {shown(pair)} has no =. Where a value has a "
                "comma, give records in JSON."
            )
        try:
            found.append((name.decode(), value))
        except UnicodeDecodeError:
            raise InvalidRequestError(f"The name of header {shown(pair)} is not UTF-8.") from None
    return found


def _number(text: bytes | None, what: str) -> int | None:
    if text is None:
        return None
    if not is_number(text.strip()):
        raise InvalidRequestError(f"{shown(text)} is not a valid {what}.")
    return int(text)


def shown(line: bytes) -> str:
    """The beginning of a line, for an error message."""
    text = line[:60].decode(errors="replace")
    return repr(text + "..." if len(line) > 60 else text)


def parse_json(line: bytes) -> Given:
    """Parses an object with `value`, and optionally key, headers (pairs, or an object), partition
    and timestamp_ms; topic and offset are ignored. Raises InvalidRequestError."""
    try:
        given = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{shown(line)} is not JSON: {error}") from None
    except RecursionError:
        raise InvalidRequestError(f"{shown(line)} is nested too deeply.") from None
    if not isinstance(given, dict) or "value" not in given:
        raise InvalidRequestError(f'{shown(line)} is not an object with a "value".')
    unknown = given.keys() - set(_JSON_FIELDS)
    if unknown:
        raise InvalidRequestError(f"{shown(line)}: {min(unknown)!r} is not a field of a record.")
    headers = given.get("headers")
    # `decode` returns only the last value of a name that occurs twice.
    if isinstance(headers, dict) or any(line.count(b'"%b"' % field) > 1 for field in _JSON_NAMES):
        _check_names(line)
    pairs = list(headers.items()) if isinstance(headers, dict) else headers
    if pairs is not None and not (
        isinstance(pairs, list)
        and all(
            isinstance(pair, list | tuple)
            and len(pair) == 2
            and isinstance(pair[0], str)
            and pair[1] is not None
            for pair in pairs
        )
    ):
        raise InvalidRequestError(f"{shown(line)}: headers are pairs of a name and a value.")
    for name in ("partition", "timestamp_ms"):
        if type(given.get(name)) not in (int, type(None)):
            raise InvalidRequestError(f"{shown(line)}: {name} is a number.")
    return Given(
        value=_bytes(given["value"], line),
        key=_bytes(given.get("key"), line),
        headers=pairs and [(name, _bytes(value, line) or b"") for name, value in pairs],
        partition=given.get("partition"),
        timestamp_ms=given.get("timestamp_ms"),
    )


def _check_names(line: bytes) -> None:
    """Raises InvalidRequestError where a name occurs twice in one object."""

    def once(pairs: list[tuple[str, Any]]) -> None:
        names = Counter(name for name, _ in pairs)
        for name, count in names.items():
            if count > 1:
                raise InvalidRequestError(
                    f"{shown(line)} has {name!r} {count} times: which one counts? (Headers of one "
                    "name stand in a list of pairs.)"
                )

    json.loads(line, object_pairs_hook=once)


def _bytes(value: Any, line: bytes) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and value.keys() == {"base64"}:
        try:
            return base64.b64decode(value["base64"], validate=True)
        except (TypeError, ValueError, binascii.Error):
            pass
    raise InvalidRequestError(
        f'{shown(line)}: a key or value is text, null or {{"base64": "..."}}; JSON inside of it '
        "goes as text."
    )
