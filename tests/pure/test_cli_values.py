from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayq.cli.dead_letters import filter_of, rate_per_s
from rayq.cli.formats import parse_json, parser
from rayq.cli.values import (
    Where,
    WrongUseError,
    config_values,
    default_of,
    duration_ms,
    pair,
    partition_numbers,
    rate_bytes_per_s,
    size_bytes,
    time_ms,
    topic_partition,
    where,
)
from rayq.config import ClusterConfig, ProducerConfig, QueueConfig, TopicConfig
from rayq.errors import ConfigError, InvalidRequestError
from rayq.records import TopicPartition

NOW_MS = 1_700_000_000_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("250ms", 250), ("1_000ms", 1000), ("1.5s", 1500), ("2m", 120_000), ("7d", 604_800_000)],
)
def test_a_duration_has_a_unit_or_is_in_milliseconds(text: str, expected: int) -> None:
    assert duration_ms(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4096", 4096), ("64k", 65536), ("64KiB", 65536), ("50MB", 50_000_000), ("1.5k", 1536)],
)
def test_a_size_has_a_binary_or_a_decimal_unit(text: str, expected: int) -> None:
    assert size_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "soon", "-5", "7 days", "3x", "9" * 400 + "w", "9" * 15 + "w"])
def test_what_is_no_duration_or_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"e\.g\.|too large"):
        duration_ms(text)
    with pytest.raises(InvalidRequestError, match=r"e\.g\.|too large"):
        size_bytes(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1700000000", 1_700_000_000_000),
        ("1700000000123", 1_700_000_000_123),
        ("-1h", NOW_MS - 3_600_000),
        ("2013-01-31T12:00:00Z", 1_359_633_600_000),
        ("2013-01-31T13:00:00+01:00", 1_359_633_600_000),
    ],
)
def test_a_time_is_unix_time_iso_8601_or_a_while_ago(text: str, expected: int) -> None:
    assert time_ms(text, NOW_MS) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("beginning", Where("beginning")),
        ("start", Where("beginning")),
        ("END", Where("end")),
        ("17", Where("offset", 17)),
        ("-17", Where("last", 17)),
        ("@-1m", Where("time", NOW_MS - 60_000)),
        ("@1700000000000", Where("time", NOW_MS)),
    ],
)
def test_a_position_is_a_word_an_offset_a_count_or_a_time(text: str, expected: Where) -> None:
    assert where(text, NOW_MS) == expected


@pytest.mark.parametrize(
    "text", ["", "middle", "--1", "@", "@noon", "1.5", "9" * 30, "-" + "9" * 30, "@" + "9" * 30]
)
def test_what_is_no_position_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        where(text, NOW_MS)


def test_partitions_are_listed_and_ranged() -> None:
    assert partition_numbers("0,2,5-7") == [0, 2, 5, 6, 7]
    for wrong in ("all", "3-1", "0-", "0-99999999999"):
        with pytest.raises(InvalidRequestError):
            partition_numbers(wrong)


def test_a_partition_is_written_as_path_or_as_directory() -> None:
    assert topic_partition("a-b/3") == topic_partition("a-b-3") == TopicPartition("a-b", 3)
    with pytest.raises(InvalidRequestError):
        topic_partition("flights")


def test_a_header_is_a_name_and_a_value() -> None:
    assert pair("source=faa:1", "header") == ("source", "faa:1")
    assert pair("source:12", "header") == ("source", "12")
    assert pair("source=", "header") == ("source", "")
    with pytest.raises(InvalidRequestError, match="name=value"):
        pair("source", "header")


def test_configs_take_units_none_and_dotted_names() -> None:
    values = config_values(
        TopicConfig,
        [
            "retention.ms=7d",
            "segment_bytes=64MiB",
            "retention_bytes=none",
            "unclean_leader_election=true",
            "cleanup_policy=compact,delete",
            "min_cleanable_dirty_ratio=0.1",
        ],
    )
    assert values == {
        "retention_ms": 604_800_000,
        "segment_bytes": 64 * 2**20,
        "retention_bytes": None,
        "unclean_leader_election": True,
        "cleanup_policy": "compact,delete",
        "min_cleanable_dirty_ratio": 0.1,
    }
    assert config_values(ProducerConfig, ["acks=1"]) == {"acks": 1}
    assert config_values(ProducerConfig, ["acks=all"]) == {"acks": "all"}
    assert config_values(ClusterConfig, ["session_timeout_ms=5s"]) == {"session_timeout_ms": 5000}


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("retenton_ms=7d", "Did you mean 'retention_ms'"),
        ("retention_ms", "key=value"),
        ("retention_ms=-1", "retention_ms=none"),
        ("retention_ms=soon", "retention_ms cannot be 'soon'"),
        ("segment_bytes=1x", "segment_bytes cannot be"),
        ("flush=tape", "'disk' or 'os'"),
    ],
)
def test_a_wrong_config_says_what_would_be_right(assignment: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_values(TopicConfig, [assignment])


def test_the_default_of_an_unknown_key_suggests_the_nearest() -> None:
    assert default_of("flush", TopicConfig) == "disk"
    with pytest.raises(ConfigError, match="retention_ms"):
        default_of("retention_m", TopicConfig)


READERS: dict[str, Callable[[str], object]] = {
    "duration": duration_ms,
    "size": size_bytes,
    "rate": rate_bytes_per_s,
    "time": lambda text: time_ms(text, NOW_MS),
    "position": lambda text: where(text, NOW_MS),
    "partitions": partition_numbers,
    "partition": topic_partition,
    "header": lambda text: pair(text, "header"),
    "config": lambda text: config_values(TopicConfig, text.split()),
    "config of a queue": lambda text: config_values(QueueConfig, text.split()),
    "filter": lambda text: filter_of(text.split(), NOW_MS),
    "letters a second": rate_per_s,
}
NO_NUMBER = ("", " ", "-", "+1", "0x10", "1e3", "1__0", "_1", "1_", "\u0663", "\u00b2", "nan")


@pytest.mark.parametrize(
    "what, text, said",
    [
        ("duration", "6M", "minutes or months"),
        ("duration", "6MS", "milliseconds or megaseconds"),
        ("duration", "6D", "lower case"),
        ("duration", "6", "6s or 6ms"),
        ("duration", "6mo", "is not a duration"),
        ("duration", "6y", "is not a duration"),
        ("duration", "0.4ms", "not a whole number of milliseconds"),
        ("size", "50Mb", "50MB"),
        ("size", "1.5", "not a whole number of bytes"),
        ("size", "50MB/s", "is not a size"),
        ("rate", "50Mb/s", "bits or bytes"),
        ("time", "20270101", "Unix time or a date"),
        ("time", "20270101120000", "Unix time or a date"),
        ("time", "1700000000123456", "Unix time or a date"),
        ("time", "12", "Unix time or a date"),
        ("time", "00001700000000", "Unix time or a date"),
        ("time", "-1M", "minutes or months"),
        ("time", "-5", "5s or 5ms"),
        ("time", "5m", "is not a time"),
        ("time", "01/02/2027", "is not a time"),
        ("position", "@20270101", "Unix time or a date"),
        ("position", "@-1M", "minutes or months"),
        ("position", "1.0", "is not a position"),
        ("partitions", "0-", "is not a list of partitions"),
        ("partitions", "0,,1", "is not a list of partitions"),
        ("partitions", "0:3", "is not a list of partitions"),
        ("header", "a:b=c", "'a' with 'b=c', or 'a:b' with 'c'"),
        ("header", "a: b", "a=b, or a= b"),
        ("header", "=c", "name=value"),
        ("header", ":c", "name=value"),
        ("config", "retention_ms=6M", "minutes or months"),
        ("config", "retention_ms=1d retention.ms=2d", "twice"),
        ("config", "retention_ms=1d retention_ms=1d", "twice"),
        ("config", "retention_ms=0.5ms", "whole number"),
        ("config", "segment_bytes=64Mb", "bits or bytes"),
        ("config", "segment_bytes=64MiB/s", "is not a size"),
        ("config", "min_insync_replicas=1.0", "whole number"),
        ("config", "min_insync_replicas=\u0663", "min_insync_replicas"),
        ("config", "min_insync_replicas=true", "min_insync_replicas"),
        ("config", "min_cleanable_dirty_ratio=nan", "min_cleanable_dirty_ratio"),
        ("config", "min_cleanable_dirty_ratio=\u0660.5", "min_cleanable_dirty_ratio"),
        ("config", "min_cleanable_dirty_ratio=", "min_cleanable_dirty_ratio"),
        ("config", "unclean_leader_election=1", "unclean_leader_election"),
        ("config", "unclean_leader_election=", "unclean_leader_election"),
        ("config", "=1", "Unknown topic config ''"),
        ("config of a queue", "backoff_s=5M", "minutes or months"),
        ("config of a queue", "backoff_s=inf", "backoff_s"),
        ("filter", "since=20270101", "Unix time or a date"),
        ("filter", "since=-1M", "minutes or months"),
        ("filter", "since=", "not a condition"),
        ("filter", "header==x", "names no header"),
        ("letters a second", "6/M", "not a rate"),
        *(
            (what, text, "")
            for what in ("duration", "size", "rate", "time", "position", "partitions", "letters a second")
            for text in NO_NUMBER
        ),
        *(("config", f"retention_ms={text}", "") for text in NO_NUMBER),
        *(("config", f"min_insync_replicas={text}", "") for text in NO_NUMBER),
        *(("partition", f"flights/{text}", "") for text in NO_NUMBER),
    ],
)
def test_what_could_mean_something_else_is_refused(what: str, text: str, said: str) -> None:
    with pytest.raises((WrongUseError, ConfigError), match=re.escape(said)):
        READERS[what](text)


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as changed:
        changed.setenv("TZ", "Europe/Berlin")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize("text", ["2026-10-25T02:30", "2026-10-25 02:00:00", "2026-03-29T02:30"])
def test_a_time_of_this_machine_that_comes_twice_or_never_is_refused(
    berlin: None, text: str
) -> None:
    for reader in ("time", "position", "filter"):
        prefix = {"time": "", "position": "@", "filter": "since="}[reader]
        with pytest.raises(WrongUseError, match=r"could be .*\+0[12]:00 or .*: give the zone"):
            READERS[reader](prefix + text.replace(" ", "T"))
    assert time_ms(text + "+01:00", NOW_MS) == time_ms(text + "+02:00", NOW_MS) + 3_600_000
    assert time_ms("2026-10-25T03:00", NOW_MS) == time_ms("2026-10-25T02:00Z", NOW_MS)


@given(st.sampled_from(sorted(READERS)), st.text("0123456789mMsSdDkKbBiT-+:=/,.@_ \u0663", max_size=12))
def test_no_reader_fails_in_another_way(what: str, text: str) -> None:
    try:
        READERS[what](text)
    except (WrongUseError, ConfigError):
        pass


def test_headers_in_a_line_are_read_as_they_were_written_or_refused() -> None:
    def headers(line: bytes) -> object:
        return parser("%h|%s", b"\n")(line).headers

    assert headers(b"a=1,b=2|v") == [("a", b"1"), ("b", b"2")]
    for wrong in (b"a=1,2|v", b"a|v", b"\xff=1|v"):
        with pytest.raises(InvalidRequestError):
            headers(wrong)
    with pytest.raises(InvalidRequestError, match="pairs"):
        parse_json(b'{"value": "v", "headers": [["a", null]]}')
