"""Arguments of tasks: what `delay` takes a worker reads, with the same value; the rest is refused,
and the error names the argument."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import sys
import uuid
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rayq.client.queues.task_arguments import DEPTH_MAX, TaskArguments
from rayq.errors import SerializationError, TaskArgumentsError


class Colour(enum.Enum):
    RED = "red"


class Size(enum.IntEnum):
    SMALL = 1


class Kind(enum.StrEnum):
    ODD = "odd"


class Text(str):
    pass


Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Order:
    number: int
    price: Decimal
    at: datetime | None = None


@dataclasses.dataclass(eq=False)
class Plain:
    number: int


class Packed(msgspec.Struct):
    parts: list[float]


class Unknown:
    """JSON has no form for it."""


def anything(value: Any) -> None: ...
def by_name(**values: Any) -> None: ...
def several(*values: Any) -> None: ...


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def travelled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    arguments = TaskArguments("f", function)
    args, kwargs = arguments.decoded(arguments.encoded(args, kwargs))
    return args[0] if args else kwargs


def annotated(hint: Any) -> Callable[[Any], None]:
    def function(value: Any) -> None: ...

    function.__annotations__ = {"value": hint}
    return function


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=5)
    | st.binary(max_size=5)
    | st.decimals()
    | st.datetimes()
    | st.dates()
    | st.uuids()
    | st.sampled_from([Colour.RED, Size.SMALL, Text("x"), 1j, object()])
)
KEYS = st.text() | st.integers() | st.none() | st.booleans() | st.floats() | st.dates()
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.tuples(inner)
        | st.frozensets(st.integers(), max_size=2)
    ),
    max_leaves=4,
)


def is_equal(given: Any, found: Any) -> bool:
    """Independent of how the code under test compares. Floats by their bits, bools by their type."""
    if isinstance(given, float) and isinstance(found, float):
        return given.hex() == found.hex()
    if isinstance(given, bool) or isinstance(found, bool):
        return given is found
    if isinstance(given, list) and isinstance(found, list):
        return len(given) == len(found) and all(map(is_equal, given, found))
    if isinstance(given, dict) and isinstance(found, dict):
        return is_equal(list(given), list(found)) and is_equal(
            list(given.values()), list(found.values())
        )
    return bool(given == found)


@given(VALUES)
@settings(max_examples=50, deadline=None)
@example(math.nan)
@example([{"a": math.inf}])
@example({1: "a"})
@example((1, 2))
@example(-0.0)
@example(2**64)
@example(-(10**40))
@example("\ud800")
@example({"k": [True, 1, 1.0, None]})
def test_an_argument_arrives_as_it_was_given_or_is_refused_by_its_name(value: Any) -> None:
    for function, args, kwargs in (
        (anything, (value,), {}),
        (by_name, (), {"value": value}),
        (several, (value,), {}),
    ):
        try:
            found = travelled(function, *args, **kwargs)
        except SerializationError as error:
            name = "values" if function is not anything else "value"
            assert f"Argument {name!r} of f, " in str(error)
            str(error).encode()  # It can be printed.
        else:
            assert is_equal(value, found["value"] if kwargs else found)


TYPED: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (dict[int, str], st.dictionaries(st.integers(-(2**63), 2**63), st.text(), max_size=3)),
    (dict[int, dict[int, float]], st.just({1: {2: 3.0}})),
    (dict[date, int], st.dictionaries(st.dates(), st.integers(0, 9), max_size=2)),
    (tuple[int, ...], st.lists(st.integers(), max_size=3).map(tuple)),
    (tuple[int, str], st.tuples(st.integers(), st.text())),
    (set[int], st.sets(st.integers(), max_size=3)),
    (frozenset[str], st.frozensets(st.text(), max_size=3)),
    (bytes, st.binary(max_size=9)),
    (Decimal, st.decimals(allow_nan=False, allow_infinity=False)),
    (date, st.dates()),
    (datetime, st.datetimes().map(lambda at: at.replace(fold=0))),
    (datetime, st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=-3))]))),
    (time, st.times().map(lambda at: at.replace(fold=0))),
    (timedelta, st.timedeltas(timedelta(0), timedelta(days=9))),
    (uuid.UUID, st.uuids()),
    (Colour, st.just(Colour.RED)),
    (Size, st.just(Size.SMALL)),
    (Pair, st.builds(Pair, st.integers(), st.text())),
    (Order, st.builds(Order, st.integers(0, 9), st.just(Decimal("1.10")), st.none() | st.datetimes(timezones=st.just(UTC)))),
    (list[Order], st.lists(st.builds(Order, st.integers(0, 9), st.just(Decimal(1))), max_size=2)),
    (Packed, st.builds(Packed, st.lists(st.floats(allow_nan=False, allow_infinity=False)))),
    (float, st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53)),
    (int, st.integers()),
    (int | str | None, st.integers() | st.text() | st.none()),
]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_an_annotated_argument_arrives_as_what_it_is(data: st.DataObject) -> None:
    hint, values = data.draw(st.sampled_from(TYPED))
    value = data.draw(values)
    found = travelled(annotated(hint), value)
    assert found == value and (type(found) is type(value) or hint is float)


@pytest.mark.parametrize(
    "hint, value",
    [
        (float, math.nan),
        (float, 2**60 + 1),
        (list[float], [1.0, math.inf]),
        (Packed, Packed([math.nan])),
        (Decimal, Decimal("NaN")),
        (Decimal, Decimal("sNaN")),
        (int, True),
        (bool, 1),
        (int, "1"),
        (int, None),
        (str, b"x"),
        (str, date(2020, 1, 1)),
        (date, "2020-01-01"),
        (list[int], (1, 2)),
        (Order, Order(1, Decimal("NaN"))),
        (dict[str, int], {1: 2}),
        (datetime, datetime(2020, 1, 1, tzinfo=timezone(timedelta(seconds=3601)))),
        (Unknown, Unknown()),
        ("NotThere", 1),
        (bytes | str, "x"),
        (bytes, bytearray(b"x")),
        (frozenset[int], {1}),
        (set, {Size.SMALL}),
        (tuple[int, ...], Pair(1, 2)),
        (Pair, (1, 2)),
        (Decimal, 5),
        (Order, Order(1, 2)),  # type: ignore[arg-type]
        (datetime, datetime(2026, 10, 25, 2, 30, fold=1)),
        (time, time(2, 30, fold=1)),
        (time, time(2, 30, tzinfo=ZoneInfo("Europe/Berlin"))),
    ],
)
def test_what_an_annotation_would_make_something_else_of_is_refused(hint: Any, value: Any) -> None:
    with pytest.raises(SerializationError, match="^Argument 'value' of f, "):
        travelled(annotated(hint), value)


@pytest.mark.parametrize(
    "value",
    [
        OrderedDict(a=1),
        defaultdict(int, a=1),
        Counter("aab"),
        type("Dict", (dict,), {})(a=1),
        type("List", (list,), {})([1]),
        Size.SMALL,
        [Size.SMALL],
        {Kind.ODD: 1},
        Kind.ODD,
        {"a": OrderedDict()},
    ],
    ids=repr,
)
def test_a_subclass_of_what_json_knows_would_arrive_as_its_base_and_is_refused(value: Any) -> None:
    with pytest.raises(SerializationError, match="^Argument 'value' of f, "):
        travelled(anything, value)


def test_of_several_arguments_the_one_that_cannot_travel_is_named() -> None:
    def function(first: int, *, second: dict[int, str], third: Any = None) -> None: ...

    assert travelled(function, 1, second={1: "a"}, third=["x"]) == 1
    with pytest.raises(SerializationError, match="'third'.*would get \\[1, 2\\]"):
        travelled(function, 1, second={1: "a"}, third=(1, 2))
    with pytest.raises(SerializationError, match="'second'"):
        travelled(function, 1, second={"a": 1}, third=1)
    with pytest.raises(TypeError, match="second"):
        travelled(function, 1)


def test_an_hour_that_comes_twice_and_fields_without_equality_arrive() -> None:
    at = datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1)
    assert travelled(annotated(datetime), at).timestamp() == at.timestamp()
    assert travelled(annotated(Plain), Plain(7)).number == 7


def test_partials_methods_and_objects_have_annotations_too() -> None:
    class Object:
        def __call__(self, value: dict[int, str]) -> None: ...

        def method(self, value: dict[int, str]) -> None: ...

    def function(first: int, value: dict[int, str]) -> None: ...

    for one in (Object(), Object().method, functools.partial(function, 1)):
        assert travelled(one, {1: "a"}) == {1: "a"}


def test_what_is_nested_too_deep_is_refused_wherever_it_is_called() -> None:
    assert travelled(anything, nested(DEPTH_MAX)) == nested(DEPTH_MAX)
    with pytest.raises(SerializationError, match="'value'.* nested more than 100 levels"):
        travelled(anything, nested(DEPTH_MAX + 1))
    looped: list[Any] = []
    looped.append(looped)
    for value in (nested(5000), looped):
        with pytest.raises(SerializationError, match="'value'"):
            travelled(anything, value)

    def deep(left: int) -> None:
        if left:
            deep(left - 1)
        else:
            with pytest.raises(SerializationError):
                travelled(anything, nested(90))

    depth, frame = 0, sys._getframe()
    while frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    deep(sys.getrecursionlimit() - depth - 60)


def test_a_record_that_no_caller_wrote_is_no_call() -> None:
    arguments = TaskArguments("f", annotated(int))
    for value in (None, b"", b"[[1]]", b"[[1,2],{}]", b'[["x"],{}]', b"[[" + b"9" * 5000 + b"],{}]"):
        with pytest.raises(TaskArgumentsError, match="not a call of f"):
            arguments.decoded(value)
