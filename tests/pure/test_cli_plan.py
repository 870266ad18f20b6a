"""`rayq plan`: units, files, what it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rayq.cli.app import app
from rayq.cli.formats import InputError
from rayq.cli.plan import network_bytes_per_s, records_per_s
from rayq.cli.values import WrongUseError

LOAD = ("plan", "--rate", "1M/s", "--size", "1KB", "--retention", "7d")


def ran(*arguments: str) -> str:
    outcome = CliRunner().invoke(app, [*LOAD, *arguments])
    if outcome.exception is not None:
        raise outcome.exception
    return outcome.output


def answer(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ran(*arguments, "--json"))
    return found


@pytest.mark.parametrize(
    ("text", "expected"), [("500/s", 500), ("20k/s", 20_000), ("1.5M/s", 1_500_000)]
)
def test_a_rate_of_records_has_thousands(text: str, expected: float) -> None:
    assert records_per_s(text) == expected


@pytest.mark.parametrize("text", ["", "fast", "-1/s", "1m/s", "1M/h", "1e6", "nan/s"])
def test_what_is_no_rate_of_records_is_refused(text: str) -> None:
    with pytest.raises(WrongUseError, match="not a rate of records"):
        records_per_s(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [("1M", "per second, hour or day: say 1M/s"), ("500", "500/s"), ("1GB/s", "counts bytes"), ("20MiB", "counts bytes")],
)
def test_a_rate_without_its_time_or_in_bytes_is_refused(text: str, said: str) -> None:
    with pytest.raises(WrongUseError, match=said):
        records_per_s(text)


@pytest.mark.parametrize(
    ("text", "expected"), [("25Gbit", 3.125e9), ("25Gbit/s", 3.125e9), ("3GB/s", 3e9), ("1GiB", 2**30)]
)
def test_a_network_has_bits_or_bytes(text: str, expected: float) -> None:
    assert network_bytes_per_s(text) == expected


@pytest.mark.parametrize("text", ["25Gb", "25G", "25g/s"])
def test_bits_that_could_be_bytes_are_refused(text: str) -> None:
    with pytest.raises(WrongUseError, match="bits or bytes"):
        network_bytes_per_s(text)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--rate", f"{10**400}/s"),
        ("--rate", "0/s"),
        ("--size", "0"),
        ("--retention", "0"),
        ("--peak", "nan"),
        ("--peak", "1e400"),
        ("--fan-out", "-1"),
        ("--growth", "0"),
        ("--consumers", "-1"),
        ("-r", "0"),
        ("--cores", "inf"),
        ("--disk", "30"),
        ("--net", "25"),
        ("--memory", "64"),
        ("--local", "0"),
    ],
    ids=" ".join,
)
def test_a_number_that_can_never_be_right_is_wrong_use(arguments: tuple[str, ...]) -> None:
    with pytest.raises(WrongUseError, match="must be from"):
        ran(*arguments)


def test_more_time_on_disks_than_records_are_kept_is_refused() -> None:
    with pytest.raises(WrongUseError, match="--local 8d is longer than --retention 7d"):
        ran("--local", "8d")
    assert answer("--local", "7d")["store_bytes"] > 0


def test_an_outage_without_an_object_store_is_refused() -> None:
    with pytest.raises(WrongUseError, match="give --local"):
        ran("--outage", "6h")


def test_the_units_are_those_that_are_written() -> None:
    kb, kib = answer(), answer("--size", "1KiB")
    assert kib["retained_bytes"] / kb["retained_bytes"] == pytest.approx(1.024)


def test_it_says_what_binds_and_each_assumption_with_its_source(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text('{"partition_write_bytes_per_s": 100000000}')
    assumptions = answer("--cores", "8", "--profile", str(profile))["assumptions"]
    assert assumptions["cores"] == {"value": 8, "source": "given"}
    assert assumptions["partition_write_bytes_per_s"]["source"] == "profile"
    assert assumptions["skew"]["source"] == "default"
    shown = ran()
    assert "What binds is disk, then" in shown
    assert "--local 6h" in shown


def test_the_json_has_these_keys() -> None:
    planned = answer("--local", "6h")
    page = (Path(__file__).resolve().parents[2] / "docs" / "scale.md").read_text()
    assert list(planned) == [
        *("brokers", "brokers_least", "partitions", "partitions_for_rate"),
        *("average_bytes_per_s", "peak_bytes_per_s", "retained_bytes", "disk_bytes"),
        *("store_bytes", "puts_per_s", "uses", "recovery_s", "start_s", "binds", "assumptions"),
    ]
    assert set(planned["uses"][0]) == {"resource", "used", "allowed", "halves", "share"}
    assert [name for name in planned if f"`{name}`" not in page] == []


def test_a_time_to_measure_without_a_check_is_refused() -> None:
    with pytest.raises(WrongUseError, match="give --check"):
        ran("--seconds", "3")


def test_a_price_is_told_only_where_prices_are_given(tmp_path: Path) -> None:
    prices = tmp_path / "prices.json"
    prices.write_text('{"disk_gb": 0.08}')
    assert "price" not in ran()
    planned = answer("--prices", str(prices))
    assert planned["price_a_month"] == pytest.approx(0.08 * planned["disk_bytes"] / 1e9)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "not a JSON object"),
        ("{", "cannot be read"),
        ('{"disk": 1}', "unknown key 'disk'"),
        ('{"disk_gb": "dear"}', "must be a number"),
        ('{"disk_gb": true}', "must be a number"),
        ('{"disk_gb": -1}', "must be from 0"),
        ('{"disk_gb": NaN}', "must be from 0 .* not nan"),
        ('{"disk_gb": 1e400}', "not inf"),
        ('{"disk_gb": 1, "disk_gb": 2}', "occurs twice"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_a_file_of_prices_that_is_none_is_refused(tmp_path: Path, text: str, said: str) -> None:
    prices = tmp_path / "prices.json"
    prices.write_text(text)
    with pytest.raises(InputError, match=said):
        ran("--prices", str(prices))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"write_cpu_ms_per_mb": 1.5}', "unknown key 'write_cpu_ms_per_mb'. Known: partition_write"),
        ('{"write_cpu_s_per_byte": 1.5}', "write_cpu_s_per_byte must be from .* Check its unit"),
        ('{"partition_write_bytes_per_s": 0}', "must be from 1000 "),
        ('{"partition_write_bytes_per_s": NaN}', "not nan"),
        ('{"replicas_max": -3}', "not -3"),
    ],
)
def test_a_profile_that_is_none_is_refused(tmp_path: Path, text: str, said: str) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(text)
    with pytest.raises(InputError, match=said):
        ran("--profile", str(profile))


def test_what_no_cluster_carries_is_refused_with_the_reason() -> None:
    with pytest.raises(WrongUseError, match="split the key"):
        ran("--hottest-key", "0.2")
