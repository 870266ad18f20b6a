from __future__ import annotations

import pytest

from rayq.cli.values import (
    Where,
    config_values,
    default_of,
    duration_ms,
    pair,
    partition_numbers,
    size_bytes,
    time_ms,
    topic_partition,
    where,
)
from rayq.config import ClusterConfig, ProducerConfig, TopicConfig
from rayq.errors import ConfigError, InvalidRequestError
from rayq.records import TopicPartition

NOW_MS = 1_700_000_000_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [("250", 250), ("250ms", 250), ("1.5s", 1500), ("2m", 120_000), ("7d", 604_800_000)],
)
def test_a_duration_has_a_unit_or_is_in_milliseconds(text: str, expected: int) -> None:
    assert duration_ms(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4096", 4096), ("64k", 65536), ("64KiB", 65536), ("50MB", 50_000_000), ("50MB/s", 50_000_000)],
)
def test_a_size_has_a_binary_or_a_decimal_unit(text: str, expected: int) -> None:
    assert size_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "soon", "-5", "7 days", "3x", "9" * 400, "9" * 15 + "w"])
def test_what_is_no_duration_or_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="such as"):
        duration_ms(text)
    with pytest.raises(InvalidRequestError, match="such as"):
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
    assert pair("source:a=b", "header") == ("source", "a=b")
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
