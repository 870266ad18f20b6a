from __future__ import annotations

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayq.cli.formats import Given, formatter, json_lines, parse_json, parser, unescape
from rayq.cli.produce import Source
from rayq.cli.terminal_safe import visible, visible_json
from rayq.errors import InvalidRequestError
from rayq.records import Record

RECORD = Record("flights", 3, 41, 1_700_000_000_000, b"N1", b"late", [("a", b"1"), ("b", b"2")])
TOMBSTONE = Record("flights", 0, 7, 0, None, None, [])


def test_a_format_prints_what_kcat_prints() -> None:
    write = formatter(r"%k %s %o %p %T %h\n")
    assert write([RECORD]) == b"N1 late 41 3 1700000000000 a=1,b=2\n"
    assert write([RECORD, TOMBSTONE]).splitlines()[1] == b"  7 0 0 "
    assert formatter(r"%t[%p]:%K,%S%%\t\x41\0")([RECORD]) == b"flights[3]:2,4%\tA\0"
    assert formatter("%K %S %R")([TOMBSTONE]) == b"-1 -1 \xff\xff\xff\xff"
    assert formatter("%k=%v", null=b"NULL")([TOMBSTONE]) == b"NULL=NULL"


def test_a_format_keeps_text_that_is_not_ascii() -> None:
    assert formatter("→%s←")([RECORD]) == "→late←".encode()


@pytest.mark.parametrize("template", ["%x", "50%", r"%s\q", "%s\\"])
def test_a_wrong_format_is_refused(template: str) -> None:
    with pytest.raises(InvalidRequestError):
        formatter(template)


def test_escapes_are_bytes() -> None:
    assert unescape(r"\n\t\\\x00\xfe") == b"\n\t\\\x00\xfe"


def test_an_argument_that_is_no_text_stays_what_was_typed() -> None:
    assert unescape(os.fsdecode(b"\xff:")) == b"\xff:"


def test_a_template_takes_a_line_apart() -> None:
    assert parser(r"%k\t%s\n", b"\n")(b"N1\ta\tb") == Given(b"a\tb", b"N1")
    assert parser("%p %T %k %h %s", b"\n")(b"2 99 k x=1,y=2 the rest of it") == Given(
        b"the rest of it", b"k", [("x", b"1"), ("y", b"2")], 2, 99
    )
    assert parser("[%k] %s", b"\n")(b"[] v") == Given(b"v", b"")


@pytest.mark.parametrize("line", [b"no tab", b"", b"x[k] v"])
def test_a_line_that_is_not_as_the_template_says_is_refused(line: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        parser(r"[%k]\t%s", b"\n")(line)


def test_what_is_missing_in_a_line_is_told_as_text() -> None:
    with pytest.raises(InvalidRequestError, match=r"^'no colon' is not as '%k:%s': no ':'\.$"):
        parser("%k:%s", b"\n")(b"no colon")


@pytest.mark.parametrize("partition", [b"one", b"-1", b"9" * 30])
def test_a_partition_that_is_no_number_is_refused(partition: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="partition"):
        parser("%p %s", b"\n")(partition + b" v")


@pytest.mark.parametrize("template", ["%k%s", "%k", "", "%x %s"])
def test_a_template_that_cannot_be_read_by_is_refused(template: str) -> None:
    with pytest.raises(InvalidRequestError):
        parser(template, b"\n")


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"text",
        b"[1]",
        b'{"key": "k"}',
        b'{"value": 5}',
        b'{"value": {"a": 1}}',
        b'{"value": {"base64": "?"}}',
        b'{"value": "v", "headers": ["a"]}',
        b'{"value": "v", "partition": "0"}',
        b'{"value": "v", "kee": "k"}',
        b'{"value": "\xff"}',
        b'{"value": "v", "value": "w"}',
        b'{"value": "v", "key": "k", "key": null}',
        b'{"partition": 1, "value": "v", "partition": 2}',
        b'{"value": "v", "headers": {"a": "1", "a": "2"}}',
    ],
)
def test_json_that_is_no_record_is_refused(line: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        parse_json(line)


def test_what_an_option_says_of_every_record_holds_for_records_in_json() -> None:
    line = b'{"value": "v", "key": "k", "partition": 3, "timestamp_ms": 5, "headers": [["a", "1"]]}'
    plain = Source(parse_json, None, None, None, None, None, null_when_empty=False)
    assert plain.record(line) == Given(b"v", b"k", [("a", b"1")], 3, 5)
    told = Source(parse_json, None, b"all", [("b", b"2")], 0, 7, null_when_empty=False)
    assert told.record(line) == Given(b"v", b"all", [("b", b"2"), ("a", b"1")], 0, 7)


def test_a_name_in_a_text_is_not_there_twice() -> None:
    line = b'{"key": "\\"key\\"", "value": "value", "headers": [["value", "key"], ["value", "x"]]}'
    headers = [("value", b"key"), ("value", b"x")]
    assert parse_json(line) == Given(b"value", b'"key"', headers)


def test_json_headers_may_be_an_object() -> None:
    given = parse_json(b'{"value": "v", "headers": {"a": "1"}, "timestamp_ms": 5}')
    assert given == Given(b"v", None, [("a", b"1")], None, 5)


data = st.none() | st.binary(max_size=20) | st.text(max_size=10).map(lambda text: text.encode())


@given(
    key=data,
    value=data,
    headers=st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=5)), max_size=3),
    timestamp_ms=st.integers(0, 2**45),
)
def test_what_is_printed_as_json_is_read_back_as_it_was(
    key: bytes | None,
    value: bytes | None,
    headers: list[tuple[str, bytes]],
    timestamp_ms: int,
) -> None:
    line = json_lines([Record("t", 1, 2, timestamp_ms, key, value, headers)])
    assert line.count(b"\n") == 1
    assert json.loads(line)["offset"] == 2
    found = parse_json(line.strip(b"\n"))
    assert found == Given(value, key, headers, 1, timestamp_ms)


def test_what_a_terminal_would_obey_is_shown_instead() -> None:
    assert visible("red \x1b[31m \x9b2J\x07\r\n\x7f") == r"red \x1b[31m \x9b2J\x07\r\n\x7f"
    assert visible("a\u202eb\u2028\udcff") == r"a\u202eb\u2028\udcff"
    assert visible("Zürich 東京 🛫") == "Zürich 東京 🛫"
    text = '{\n  "a\x9b\x7f\u202e": 1\n}'
    assert json.loads(visible_json(text)) == json.loads(text)
    assert visible_json(text).isascii()
