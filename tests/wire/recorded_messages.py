"""One example of each message, and their bytes as earlier versions wrote them.

`python -m tests.wire.recorded_messages` adds new messages to `recorded_messages.json`. Its entries
are never changed: servers and clients of those versions send these bytes.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from rayq import messages
from rayq.messages import REQUESTS
from rayq.wire.codec import ENCODER

FILE = Path(__file__).with_name("recorded_messages.json")


def kinds() -> dict[str, type[Any]]:
    """Each request of rayq's and each answer, by name."""
    requests = [one for one in REQUESTS.values() if one.__module__.startswith(messages.__name__)]
    found = [kind for request in requests for kind in (request, request.response)]
    return {kind.__name__: kind for kind in found}


def example_of(kind: type[Any]) -> Any:
    """An example with another value in each field that takes a number."""
    numbers = itertools.count(1)

    def value_of(of: inspect.Type) -> Any:
        match of:
            case inspect.BoolType():
                return True
            case inspect.IntType():
                number = max(next(numbers), of.ge or 0)
                return number if of.le is None else min(number, of.le)
            case inspect.FloatType():
                return next(numbers) + 0.5
            case inspect.StrType():
                return f"text {next(numbers)}"
            case inspect.BytesType():
                return (b"bytes %d" % next(numbers)).ljust(of.min_length or 0, b".")
            case inspect.LiteralType():
                return of.values[0]
            case inspect.AnyType():
                return next(numbers)
            case inspect.NoneType():
                return None
            case inspect.UnionType():
                return value_of(next(one for one in of.types if not isinstance(one, inspect.NoneType)))
            case inspect.ListType() | inspect.VarTupleType() | inspect.SetType():
                return [value_of(of.item_type)]
            case inspect.TupleType():
                return [value_of(one) for one in of.item_types]
            case inspect.DictType():
                return {value_of(of.key_type): value_of(of.value_type)}
            case inspect.StructType() | inspect.NamedTupleType():
                return [value_of(field.type) for field in of.fields]
        raise AssertionError(f"{kind.__name__} has {of}: say here what an example of it is.")

    return msgspec.convert(value_of(inspect.type_info(kind)), kind, str_keys=True)


def recorded() -> dict[str, bytes]:
    if not FILE.exists():
        return {}
    return {name: bytes.fromhex(data) for name, data in json.loads(FILE.read_text()).items()}


if __name__ == "__main__":
    known = recorded()
    known |= {
        name: ENCODER.encode(example_of(kind)) for name, kind in kinds().items() if name not in known
    }
    lines = json.dumps({name: data.hex() for name, data in sorted(known.items())}, indent=1)
    FILE.write_text(lines + "\n")
