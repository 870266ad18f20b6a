"""Editors and type checkers know the configs that exist."""

from __future__ import annotations

from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from rayq import config
from rayq.config import keywords as config_keywords

NAMED = {"key_serializer", "value_serializer", "key_deserializer", "value_deserializer"}


@pytest.mark.parametrize("title", ["Cluster", "Consumer", "Pool", "Producer", "Queue", "Topic"])
def test_each_key_of_a_config_is_a_keyword_of_the_same_type(title: str) -> None:
    keys = get_type_hints(getattr(config, f"{title}Config"))
    keywords = get_type_hints(getattr(config_keywords, f"{title}Keywords"))
    assert {name: choices(kind) for name, kind in keys.items() if name not in NAMED} == {
        name: choices(kind) for name, kind in keywords.items()
    }


def choices(kind: Any) -> set[Any]:
    """The types that a union is of; to type checkers an int is a float, too."""
    found = set(get_args(kind)) if get_origin(kind) in (Union, UnionType) else {kind}
    return found - {int} if float in found else found
