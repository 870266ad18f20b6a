"""Errors cross the wire, also those of a newer rayq."""

from __future__ import annotations

from rayq.errors import NotLeaderError, UnknownServerError, from_wire, to_wire


def test_an_error_comes_back_as_what_it_was() -> None:
    error = from_wire(*to_wire(NotLeaderError("another leads")))
    assert type(error) is NotLeaderError and error.message == "another leads"


def test_an_error_that_only_a_newer_rayq_knows_leaves_the_outcome_unknown() -> None:
    error = from_wire("ErrorOfTomorrow", "it went wrong")
    assert type(error) is UnknownServerError
    assert error.outcome_unknown and not error.retriable
    assert error.message == "ErrorOfTomorrow: it went wrong"
