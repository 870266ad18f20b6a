"""Requests of each class that clients send, made from the declarations of its fields."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import inspect

from rayq import messages
from rayq.messages import REQUESTS, AnyRequest

OF_CLIENTS = [
    kind
    for kind in REQUESTS.values()
    if kind.sent_by_clients and kind.__module__.startswith(messages.__name__)
]
NOT_HELD = ("wait_ms", "version_min")
"""Fields for which a server waits."""


class Generator:
    """Makes requests whose fields name what exists: `values` are by field, and `words` for all
    other texts. `leader_epochs` are by topic id."""

    def __init__(
        self,
        seed: int,
        *,
        values: Mapping[str, Sequence[Any]],
        words: Sequence[str],
        leader_epochs: Mapping[str, int],
    ) -> None:
        self._random = random.Random(seed)
        self._values = values
        self._words = words
        self._leader_epochs = leader_epochs

    def make(self, kind: type[AnyRequest], **fixed: Any) -> Any:
        """A request of this class, in which fields have the given values."""
        types = {field.name: field.type for field in inspect.type_info(kind).fields}  # type: ignore[attr-defined]
        made = {
            name: fixed[name] if name in fixed else self._value(name, of)
            for name, of in types.items()
        }
        if "leader_epoch" in made:
            made["leader_epoch"] = self._leader_epochs.get(made["topic_id"], 0)
            made["partition"] = 0
        return msgspec.convert(list(made.values()), kind, str_keys=True)

    def _value(self, name: str, of: inspect.Type) -> Any:
        if name in NOT_HELD:
            return 0
        if name in self._values:
            value = self._random.choice(self._values[name])
            is_list = isinstance(of, inspect.ListType) and not isinstance(value, list)
            return [value] if is_list else value
        match of:
            case inspect.BoolType():
                return self._random.random() < 0.5
            case inspect.IntType():
                low = 0 if of.ge is None else of.ge
                high = low + 3 if of.le is None else of.le
                return self._random.randint(low, max(low, min(low + 3, high)))
            case inspect.FloatType():
                return 1.5
            case inspect.StrType():
                most = of.max_length or 1 << 16
                fit = [word for word in self._words if len(word) <= most]
                return self._random.choice(fit)
            case inspect.BytesType():
                return b"b" * (of.min_length or 1)
            case inspect.LiteralType():
                return self._random.choice(list(of.values))
            case inspect.AnyType():
                return self._random.choice([1, True, "x"])
            case inspect.NoneType():
                return None
            case inspect.UnionType():
                return self._value(name, self._random.choice(of.types))
            case inspect.ListType() | inspect.VarTupleType() | inspect.SetType():
                count = self._random.randint(of.min_length or 0, max(of.min_length or 0, 2))
                return [self._value("", of.item_type) for _ in range(count)]
            case inspect.TupleType():
                return [self._value("", item) for item in of.item_types]
            case inspect.DictType():
                return {self._value("", of.key_type): self._value("", of.value_type)}
            case inspect.StructType() | inspect.NamedTupleType():
                fields = {field.name: self._value(field.name, field.type) for field in of.fields}
                is_array = getattr(of, "array_like", True)
                return list(fields.values()) if is_array else fields
        raise AssertionError(f"{name} is {of}: say here what an example of it is.")
