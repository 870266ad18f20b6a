"""What a manifest says of producers and epochs is compared with the batches below its end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from proving.simulation.derived_state import Derived, fault_of_manifest
from rayq.storage.batch import BatchHeader
from rayq.storage.producer_state import ProducerState
from rayq.storage.remote.manifest import Manifest

END = 12


def header(offset: int, *, producer: int = 7, epoch: int = 1, leader_epoch: int = 1) -> BatchHeader:
    return BatchHeader(
        offset, 100, leader_epoch, record_count=1, producer_id=producer, producer_epoch=epoch,
        base_sequence=offset,
    )


HEADERS = [header(offset, leader_epoch=1 + offset // 5) for offset in range(END + 3)]


def state_of(headers: list[BatchHeader]) -> ProducerState:
    state = ProducerState()
    for one in headers:
        state.update(one)
    return state


def derived() -> Derived:
    below = Derived()
    for one in HEADERS[:END]:
        below.add(one)
    return below


def manifest(snapshot: bytes, **changes: Any) -> Manifest:
    found = Manifest(
        prefix="p", cluster_id="c", topic="t", topic_id="i", partition=0, partitions=1, config={},
        replication_factor=1, end=END, epochs=[(1, 0), (2, 5), (3, 10)], producer_snapshot=snapshot,
    )
    return msgspec.structs.replace(found, **changes)


def below_end() -> bytes:
    """As a log makes it that has three batches more."""
    state = state_of(HEADERS)
    state.forget_from(END)
    return state.snapshot()


def test_what_a_leader_knows_of_the_batches_below_is_right_and_may_be_less_than_all() -> None:
    leader = cast(Any, SimpleNamespace(producers=state_of(HEADERS)))
    for snapshot in (below_end(), state_of(HEADERS[:END]).snapshot()):
        assert fault_of_manifest(manifest(snapshot), derived(), leader) is None
    later = manifest(below_end(), log_start=7, epochs=[(2, 5), (3, 10)])
    assert fault_of_manifest(later, derived(), leader) is None
    nothing = manifest(b"", log_start=END, epochs=[])
    assert fault_of_manifest(nothing, derived(), None) is None


@pytest.mark.parametrize(
    ("snapshot", "changes", "fault"),
    [
        (state_of(HEADERS).snapshot(), {}, "says of producer 7"),
        (state_of(HEADERS[:4]).snapshot(), {}, "says of producer 7"),
        (b"", {}, "its leader knows"),
        (state_of([header(3, producer=3)]).snapshot(), {}, "say None"),
        (below_end(), {"epochs": [(1, 0), (3, 10)]}, "has the epochs"),
        (below_end(), {"epochs": [(3, 10)]}, "has the epochs"),
        (below_end(), {"epochs": [(1, 0), (2, 5), (3, 10), (4, 11)]}, "has the epochs"),
    ],
    ids=map(str, range(7)),
)
def test_what_no_batch_below_says_is_a_fault(
    snapshot: bytes, changes: dict[str, Any], fault: str
) -> None:
    leader = cast(Any, SimpleNamespace(producers=state_of(HEADERS)))
    found = fault_of_manifest(manifest(snapshot, **changes), derived(), leader)
    assert found is not None and fault in found
