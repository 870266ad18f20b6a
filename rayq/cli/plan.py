"""`rayq plan`: the brokers, disks and partitions that a load needs. With `--check` it compares the
running cluster with them; else it asks no cluster."""

from __future__ import annotations

import dataclasses
import json as json_module
import math
import re
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from rayq.cli import output
from rayq.cli.current import connected
from rayq.cli.exit_codes import UNHEALTHY
from rayq.cli.formats import InputError
from rayq.cli.options import ClusterAddress, Json
from rayq.cli.values import WrongUseError, duration_ms, once, rate_bytes_per_s, size_bytes
from rayq.client.admin.capacity import CHECK_S, SECONDS_MAX, SECONDS_MIN
from rayq.core.capacity.check import CapacityCheck
from rayq.core.capacity.plan import DAY_S, RANGES, CapacityPlan, Costs, Load, Machine, ResourceUse
from rayq.core.capacity.plan import plan as plan_capacity
from rayq.errors import InvalidRequestError

_RATE = re.compile(r"(\d+(?:\.\d+)?)([kKMG]?)/s", re.ASCII)
_NO_TIME = re.compile(r"\d+(?:\.\d+)?[kKMG]?", re.ASCII)
_BYTES = re.compile(r"\d+(?:\.\d+)?[kKMGT]?i?B(/s)?", re.ASCII)
_BITS = re.compile(r"(\d+(?:\.\d+)?)([KMG])bit(/s)?", re.ASCII)
_BARE_LETTER = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])(/s)?", re.ASCII)
_THOUSANDS = {"": 1, "k": 1000, "K": 1000, "M": 1000**2, "G": 1000**3}
PRICES = ("broker", "disk_gb", "store_gb", "put_1000")
"""The keys of a file of prices: a broker, a GB on its disks, a GB in the object store, each for a
month, and 1,000 PUTs."""
PRICE_MAX = 1e12
MONTH_S = 30 * DAY_S
Values = TypeVar("Values", Load, Machine, Costs)


def plan(
    rate: Annotated[
        str,
        typer.Option("--rate", help="Records per second on average, e.g. 20000/s or 1M/s."),
    ],
    size: Annotated[str, typer.Option("-s", "--size", help="Size of a record, e.g. 1KB.")],
    retention: Annotated[str, typer.Option("--retention", help="How long records are kept, e.g. "
    "7d.")],
    replication_factor: Annotated[
        int, typer.Option("-r", "--replication-factor", help="Replicas of each partition.")
    ] = 3,
    peak: Annotated[
        float | None, typer.Option("--peak", help="The busiest hour as a multiple of the average.")
    ] = None,
    fan_out: Annotated[
        float | None, typer.Option("--fan-out", help="Number of groups that read every record.")
    ] = None,
    compression: Annotated[
        float | None,
        typer.Option("--compression", help="The factor by which compression shrinks records."),
    ] = None,
    skew: Annotated[
        float | None,
        typer.Option("--skew", help="The busiest partition as a multiple of the average one."),
    ] = None,
    growth: Annotated[
        float | None, typer.Option("--growth", help="The rate to plan for as a multiple of --rate.")
    ] = None,
    consumers: Annotated[
        int | None,
        typer.Option("--consumers", help="Number of members that the largest group needs."),
    ] = None,
    hottest_key: Annotated[
        float | None,
        typer.Option("--hottest-key", help="The share of bytes of the most frequent key, e.g. "
        "0.02."),
    ] = None,
    local: Annotated[
        str | None,
        typer.Option(
            "--local",
            help="How long records stay on brokers' disks, e.g. 6h; older ones are in an object "
            "store only.",
        ),
    ] = None,
    outage: Annotated[
        str | None,
        typer.Option("--outage", help="How long the object store may be unreachable, e.g. 6h."),
    ] = None,
    disk: Annotated[
        str | None, typer.Option("--disk", help="A broker's disk space, e.g. 30TB.")
    ] = None,
    net: Annotated[
        str | None,
        typer.Option("--net", help="A broker's network bandwidth in each direction, e.g. 25Gbit."),
    ] = None,
    cores: Annotated[float | None, typer.Option("--cores", help="A broker's cores.")] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", help="A broker's memory, e.g. 64GB.")
    ] = None,
    prices: Annotated[
        Path | None,
        typer.Option("--prices", help="A JSON file: broker, disk_gb, store_gb, put_1000."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", help="A JSON file of costs that you measured."),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Compare the running cluster with the plan; exit 3 if it exceeds the plan.",
        ),
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds",
            help="How long --check measures.",
            min=SECONDS_MIN,
            max=SECONDS_MAX,
            show_default=f"{CHECK_S:g}",
        ),
    ] = None,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Compute the brokers, disks and partitions for a load. KB are 1,000 bytes, KiB 1,024."""
    given_load = {
        "records_per_s": records_per_s(rate),
        "record_bytes": size_bytes(size),
        "retention_s": duration_ms(retention) / 1000,
        "replication_factor": replication_factor,
        "peak": peak,
        "fan_out": fan_out,
        "compression": compression,
        "skew": skew,
        "growth": growth,
        "consumers": consumers,
        "hottest_key_share": hottest_key,
        "local_s": None if local is None else duration_ms(local) / 1000,
        "outage_s": None if outage is None else duration_ms(outage) / 1000,
    }
    given_machine = {
        "disk_bytes": None if disk is None else size_bytes(disk),
        "network_bytes_per_s": None if net is None else network_bytes_per_s(net),
        "cores": cores,
        "memory_bytes": None if memory is None else size_bytes(memory),
    }
    measured = {} if profile is None else _numbers_in(profile, _names(Costs))
    load, machine = _made(Load, given_load), _made(Machine, given_machine)
    costs = _made(Costs, dict(measured))
    if outage is not None and local is None:
        raise WrongUseError("--outage is about the object store: give --local, too.")
    if load.local_s is not None and load.local_s > load.retention_s:
        raise WrongUseError(
            f"--local {local} is longer than --retention {retention}: no record would be in the "
            "object store alone. Leave --local out, or keep records for longer."
        )
    if seconds is not None and not check:
        raise WrongUseError("--seconds says for how long --check measures: give --check, too.")
    planned = _planned(load, machine, costs)
    month = None if prices is None else price_of(planned, _numbers_in(prices, PRICES))
    sources = [
        *_sources(load, given_load, "given"),
        *_sources(machine, given_machine, "given"),
        *_sources(costs, measured, "profile"),
    ]
    checked = _checked(planned, CHECK_S if seconds is None else seconds, cluster) if check else None
    if json:
        answer = _answer(planned)
        answer["assumptions"] = {
            name: {"value": value, "source": source} for name, value, source in sources
        }
        if month is not None:
            answer["price_a_month"] = month
        if checked is not None:
            answer["check"] = _check_answer(checked)
        output.print_json(answer)
    elif checked is not None:
        _show_check(checked)
    else:
        _show(planned, load, month)
        output.say()
        output.heading("Assumptions")
        output.table(
            ("NAME", "VALUE", "SOURCE"),
            [(name, f"{value:,.12g}", source) for name, value, source in sources],
        )
    if checked is not None and not checked.is_within:
        raise typer.Exit(UNHEALTHY)


def records_per_s(text: str) -> float:
    """Reads `500/s`, `20k/s`, `1M/s`. Raises WrongUseError."""
    given = text.strip()
    if _NO_TIME.fullmatch(given):
        raise WrongUseError(f"{text!r} could be records per second, hour or day: say {given}/s.")
    if _BYTES.fullmatch(given):
        raise WrongUseError(
            f"{text!r} counts bytes: --rate counts records, such as 1M/s, and --size says how "
            "large one is."
        )
    found = _RATE.fullmatch(given)
    if found is None:
        raise WrongUseError(f"{text!r} is not a rate of records, e.g. 500/s, 20k/s or 1M/s.")
    return float(Decimal(found[1]) * _THOUSANDS[found[2]])


def network_bytes_per_s(text: str) -> float:
    """Reads `25Gbit` or `3GB/s`. Raises WrongUseError."""
    found = _BITS.fullmatch(text.strip())
    if found is not None:
        return float(Decimal(found[1]) * _THOUSANDS[found[2]] / 8)
    bare = _BARE_LETTER.fullmatch(text.strip())
    if bare is not None:
        number, letter = bare[1], bare[2].upper()
        raise WrongUseError(
            f"{text!r} could be bits or bytes: say {number}{letter}bit or {number}{letter}B/s."
        )
    return rate_bytes_per_s(text)


def price_of(planned: CapacityPlan, prices: dict[str, float]) -> float:
    """The price of a month, by the prices that there are."""
    puts = planned.puts_per_s * MONTH_S
    return (
        prices.get("broker", 0) * planned.brokers
        + prices.get("disk_gb", 0) * planned.disk_bytes / 1e9
        + prices.get("store_gb", 0) * planned.store_bytes / 1e9
        + prices.get("put_1000", 0) * puts / 1000
    )


def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def _planned(load: Load, machine: Machine, costs: Costs) -> CapacityPlan:
    try:
        return plan_capacity(load, machine, costs)
    except InvalidRequestError as error:
        raise WrongUseError(str(error)) from error


def _checked(planned: CapacityPlan, seconds: float, address: str | None) -> CapacityCheck:
    with (
        connected(address) as cluster,
        output.waiting(f"measuring the cluster for {seconds:g} s"),
    ):
        return cluster.admin.check_plan(planned, seconds=seconds)


def _answer(planned: CapacityPlan) -> dict[str, Any]:
    """The plan for programs; its load, machine and costs are the assumptions."""
    answer = {
        field.name: getattr(planned, field.name)
        for field in dataclasses.fields(planned)
        if field.name not in ("load", "machine", "costs")
    }
    answer["uses"] = [{**use._asdict(), "share": use.share} for use in planned.uses]
    answer["binds"] = None if planned.binds is None else planned.binds.resource
    return answer


def _check_answer(checked: CapacityCheck) -> dict[str, Any]:
    return {
        "is_within": checked.is_within,
        "over": [figure.what for figure in checked.over],
        "next": None if checked.next is None else checked.next.what,
        "figures": [figure._asdict() for figure in checked.figures],
        "unknown": checked.unknown,
        "measured": dataclasses.asdict(checked.measured),
    }


def _made(kind: type[Values], given: dict[str, Any]) -> Values:
    return kind(**{name: value for name, value in given.items() if value is not None})


def _numbers_in(path: Path, names: tuple[str, ...]) -> dict[str, float]:
    """Reads a JSON object of numbers. Raises InputError, OSError."""
    data = path.read_bytes()
    try:
        found = json_module.loads(data, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} is not a JSON object of numbers.")
    for name, value in found.items():
        if name not in names:
            raise InputError(f"{path}: unknown key {name!r}. Known: {', '.join(names)}.")
        low, high = RANGES.get(name, (0, PRICE_MAX))
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"{path}: {name} must be a number, not {value!r:.40}.")
        if not low <= value <= high:  # NaN is in no range.
            raise InputError(
                f"{path}: {name} must be from {low:g} to {high:g}, not {value!r:.20}. Check its "
                "unit."
            )
    return found


def _sources(values: Any, given: dict[str, Any], source: str) -> list[tuple[str, Any, str]]:
    return [
        (name, value, source if given.get(name) is not None else "default")
        for name in _names(type(values))
        if (value := getattr(values, name)) is not None
    ]


def _show(planned: CapacityPlan, load: Load, month: float | None) -> None:
    output.say(
        f"{planned.brokers:,} brokers, {planned.partitions:,} partitions. The rate and the readers "
        f"need {planned.partitions_for_rate:,}; a multiple of the brokers spreads them evenly."
    )
    binds = planned.binds
    if binds is None:
        output.say(f"Replication asks for {planned.brokers_least}: they carry the load.")
    else:
        after = planned.uses[1]
        output.say(f"What binds is {binds.resource}, then {after.resource}.")
        output.say(f"To need about half of it: {binds.halves}.")
    copies = "in one copy" if load.local_s is not None else f"in {load.replication_factor} copies"
    rows = [
        ("written on average", f"{_size(planned.average_bytes_per_s)}/s", "one copy, compressed"),
        ("written at the peak", f"{_size(planned.peak_bytes_per_s)}/s", "one copy, compressed"),
        ("kept by retention", _size(planned.retained_bytes), copies),
        ("on all disks", _size(planned.disk_bytes), f"in {load.replication_factor} copies"),
    ]
    if load.local_s is not None:
        rows.append(("in the object store", _size(planned.store_bytes), "in one copy"))
        rows.append(("PUTs to it", f"{planned.puts_per_s:,.1f}/s", "objects and lists"))
    rows.append(("copying a lost broker", _duration(planned.recovery_s), "by the spare network"))
    rows.append(("a start of all brokers", _duration(planned.start_s), "until all partitions lead"))
    if month is not None:
        rows.append(("price of a month", f"{month:,.0f}", "by the prices that were given"))
    output.table(("WHAT", "HOW MUCH", "OF WHAT"), rows)
    output.say()
    output.heading("One broker, while another is away")
    output.table(
        ("RESOURCE", "USED", "ALLOWED", "SHARE"),
        [(use.resource, *_used(use), f"{use.share:.0%}") for use in planned.uses],
    )


def _show_check(checked: CapacityCheck) -> None:
    output.table(
        ("WHAT", "WHERE", "MEASURED", "PLANNED", "ALLOWED", "SHARE"),
        [
            (
                figure.what,
                figure.where or None,
                _amount(figure.what, figure.measured),
                _amount(figure.what, figure.planned),
                ("at least " if figure.is_least else "") + _amount(figure.what, figure.allowed),
                f"{figure.share:.0%}" if math.isfinite(figure.share) else None,
            )
            for figure in checked.figures
        ],
        styles=["error" if figure.share > 1 else "" for figure in checked.figures],
        optional=("PLANNED",),
    )
    output.say(
        f"Measured for {checked.measured.seconds:.1f} s. Resources are those of the most used "
        "broker while another is away."
    )
    if checked.unknown:
        output.say(f"The servers do not tell: {', '.join(checked.unknown)}.")
    for figure in checked.over:
        place = f" of {figure.where}" if figure.where else ""
        measured, allowed = (
            _amount(figure.what, amount) for amount in (figure.measured, figure.allowed)
        )
        limit = f"needs at least {allowed}" if figure.is_least else f"allows {allowed}"
        output.verdict(f"error: {figure.what}{place}: {measured}; the plan {limit}", "error")
        output.say(f"  next: {figure.remedy}", hang=6)
    if checked.is_within:
        output.verdict("Within the plan.", "ok")
    if checked.next is not None:
        output.say(f"What comes next is {checked.next.what}. Then: {checked.next.remedy}.", hang=2)


def _amount(what: str, amount: float) -> str:
    if what in ("cores", "replicas", "brokers", "partitions"):
        return f"{amount:,.1f}" if what == "cores" else f"{amount:,.0f}"
    return _size(amount) + ("" if what in ("disk", "disk size", "memory") else "/s")


def _used(use: ResourceUse) -> tuple[str, str]:
    if use.resource in ("cores", "replicas"):
        return f"{use.used:,.1f}", f"{use.allowed:,.1f}"
    unit = "/s" if use.resource.startswith("network") else ""
    return _size(use.used) + unit, _size(use.allowed) + unit


def _size(size_bytes: float) -> str:
    """A size in decimal units, as disks and networks are sold."""
    for power, unit in ((15, "PB"), (12, "TB"), (9, "GB"), (6, "MB"), (3, "KB")):
        if size_bytes >= 10**power:
            return f"{size_bytes / 10**power:.3g} {unit}"
    return f"{size_bytes:.0f} B"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
