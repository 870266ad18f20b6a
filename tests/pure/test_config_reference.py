"""Every config key is explained, in the documentation and by `help`."""

from __future__ import annotations

import dataclasses
import pydoc

import pytest

import rayq
from rayq.config import DAY_MS, GIB, KIB, MIB, Bounds, parse, range_of, types_of
from rayq.config.reference import KINDS, keys
from rayq.errors import ConfigError


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_has_a_meaning_and_help_shows_it(kind: type) -> None:
    shown = pydoc.plain(pydoc.render_doc(getattr(rayq, kind.__name__)))
    found = keys(kind)
    assert [key.name for key in found] == [field.name for field in dataclasses.fields(kind)]
    for key in found:
        assert len(key.meaning.split()) >= 3, key
        assert f"{key.name}: {key.takes}, {key.default} by default" in shown
        assert key.meaning.split()[0] in shown


def test_a_key_has_type_default_and_range() -> None:
    (segment,) = (key for key in keys(rayq.TopicConfig) if key.name == "segment_bytes")
    assert segment[1:4] == ("int", "1 GiB", "from 1 KiB to 2 GiB")
    (flush,) = (key for key in keys(rayq.TopicConfig) if key.name == "flush")
    assert flush[1:4] == ("'disk' or 'os'", "'disk'", "")
    (lag,) = (key for key in keys(rayq.PoolConfig) if key.name == "target_lag_s")
    assert lag[1:4] == ("float", "10.0", "positive")


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_in_range_and_what_is_not_is_refused(kind: type) -> None:
    kind()
    for name, hint in types_of(kind).items():
        allowed = range_of(hint)
        if allowed is None:
            continue
        too_little = 0 if allowed.above_zero else allowed.least - 1
        if "float" in str(hint) and "int" not in str(hint):
            too_little = float(too_little)
        with pytest.raises(ConfigError, match=f"{name} must be .*, not {too_little}"):
            parse(kind, {name: too_little})  # type: ignore[type-var]


def test_ranges_say_what_they_hold() -> None:
    assert str(Bounds(1)) == str(Bounds(0, above_zero=True)) == "positive"
    assert str(Bounds(0)) == "at least 0" and str(Bounds(100, 4096)) == "from 100 to 4,096"
    assert str(Bounds(65 * MIB, in_bytes=True)) == "at least 65 MiB"
    assert str(Bounds(KIB, 2 * GIB, in_bytes=True)) == "from 1 KiB to 2 GiB"
    assert str(Bounds(0, DAY_MS, above_zero=True)) == "above 0 to 86,400,000"
    assert 0 in Bounds() and 0 not in Bounds(0, above_zero=True) and 2 * GIB in Bounds(KIB, 2 * GIB)
    assert float("nan") not in Bounds() and float("inf") in Bounds()
