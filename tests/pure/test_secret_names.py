"""How much of a name that authorises is shown."""

from __future__ import annotations

from rayq.messages.secret_names import SHOWN_MAX, shown_holder, shown_part


def test_a_name_that_authorises_is_never_shown_whole() -> None:
    for length in range(2, 65):
        name = "0123456789abcdef" * 4
        part = shown_part(name[:length])
        assert name.startswith(part)
        assert 1 <= len(part) <= min(SHOWN_MAX, length / 2)
    assert shown_part("f" * 32) == "f" * 8, "the names that rayq draws"


def test_of_a_holder_the_host_and_process_are_shown_and_not_what_was_drawn() -> None:
    assert shown_holder("node-1:4711/" + "f" * 32) == "node-1:4711/" + "f" * 8
    for guessable in ("node-1:4711/", "node-1:4711/1", "f" * 32, "/x"):
        assert shown_holder(guessable) == shown_part(guessable)
