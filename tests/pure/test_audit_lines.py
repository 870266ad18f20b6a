"""Lines of the audit: their bound, their counts, and what is in them."""

from __future__ import annotations

import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from rayq.core.access import audit
from rayq.core.access.audit import AuditLine, AuditLines, decode_line, encode_line, line_of
from rayq.messages.audit import AuditedChange


def line(principal: str = "anna", kind: str = "denied", **fields: int) -> AuditLine:
    return AuditLine(time_ms=1, kind=kind, principal=principal, **fields)


def written(lines: AuditLines, now_s: float) -> list[AuditLine]:
    due = lines.due(now_s, 10_000)
    lines.written(len(due))
    return due


def test_each_kind_and_principal_has_one_line_a_second_with_the_number_of_the_others() -> (
    None
):
    lines = AuditLines()
    for number in range(100):
        lines.add(line(), number / 1000)
    assert [found.left_out for found in written(lines, 0.1)] == [0]
    assert lines and not written(lines, 0.5)
    assert [found.left_out for found in written(lines, 1.0)] == [98]
    lines.add(line(), 1.1)
    assert not written(lines, 1.2)
    assert [found.left_out for found in written(lines, 2.0)] == [0]
    assert not lines and not written(lines, 100.0)
    lines.add(line(), 100.0)
    assert [found.left_out for found in written(lines, 100.0)] == [0]


def test_each_kind_and_principal_has_a_bound_of_its_own() -> None:
    lines = AuditLines()
    for principal in ("anna", "bert"):
        for kind in ("denied", "login"):
            for _ in range(5):
                lines.add(line(principal, kind), 0.0)
    assert len(written(lines, 0.0)) == 4
    assert sorted(found.left_out for found in written(lines, 1.0)) == [3, 3, 3, 3]


def test_sums_include_the_events_that_were_left_out() -> None:
    lines = AuditLines()
    for _ in range(4):
        lines.add(line(kind="urls", objects=2, bytes=10), 0.0)
    first, rest = [*written(lines, 0.0), *written(lines, 1.0)]
    assert (first.objects, first.bytes, first.left_out) == (2, 10, 0)
    assert (rest.objects, rest.bytes, rest.left_out) == (6, 30, 2)


def test_many_names_share_a_line_so_that_memory_and_rate_are_bounded() -> None:
    lines = AuditLines()
    for number in range(10 * audit.KEYS_MAX):
        lines.add(line(f"name-{number}"), 0.0)
        written(lines, 0.0)
    rest = written(lines, 1.0)
    assert len(rest) == 1 and rest[0].left_out == 9 * audit.KEYS_MAX - 2


def test_what_waits_is_bounded_and_what_is_dropped_is_counted() -> None:
    lines = AuditLines()
    for number in range(audit.LINES_MAX + 1):
        lines.add(line(f"name-{number // 2}", "denied" if number % 2 else "login"), 0.0)
    now_s = 0.0
    for _ in range(5):
        now_s += 1
        lines.add(line("flood", left_out=7), now_s)
    assert len(lines.due(now_s, 10_000)) == audit.LINES_MAX
    assert lines.dropped["denied"] > 0
    assert written(lines, now_s) and not lines.due(now_s, 10)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["anna", "bert"]), st.integers(0, 3), st.floats(0, 0.4)
        )
    )
)
def test_no_event_gets_lost_where_there_is_room(events: list[tuple[str, int, float]]) -> None:
    lines, now_s, told = AuditLines(), 0.0, 0
    for principal, left_out, pause_s in events:
        now_s += pause_s
        lines.add(line(principal, left_out=left_out), now_s)
        told += sum(1 + found.left_out for found in written(lines, now_s))
    told += sum(1 + found.left_out for found in written(lines, now_s + 1))
    assert told == sum(1 + left_out for _, left_out, _ in events)
    assert not lines and not lines.dropped


def test_a_line_is_json_with_the_fields_that_have_a_value() -> None:
    change = AuditedChange(7, 3, "CreateTopic", '{"name":"x"}', None, None, "10.0.0.1", "deploy")
    told = line_of(change)
    assert json.loads(encode_line(told)) == {
        "time_ms": 7,
        "kind": "change",
        "principal": "superuser",
        "address": "10.0.0.1",
        "client_id": "deploy",
        "request": "CreateTopic",
        "what": '{"name":"x"}',
        "id": "change-7",
    }
    assert decode_line(encode_line(told)) == told
    later = msgspec.json.encode({**json.loads(encode_line(told)), "field_of_tomorrow": [1]})
    assert decode_line(later) == told
