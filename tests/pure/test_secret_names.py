"""How much of a name that authorises is shown."""

from __future__ import annotations

from rayq.secret_names import SHOWN_MAX, shown_part


def test_a_name_that_authorises_is_never_shown_whole() -> None:
    for length in range(2, 65):
        name = "0123456789abcdef" * 4
        part = shown_part(name[:length])
        assert name.startswith(part)
        assert 1 <= len(part) <= min(SHOWN_MAX, length / 2)
    assert shown_part("f" * 32) == "f" * 8, "the names that rayq draws"
