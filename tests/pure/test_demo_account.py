"""The demo's accounting can fail: each kind of damage shows in its figure."""

from __future__ import annotations

from array import array

import msgspec

from rayq.demo import Acknowledgements, FlightRecord, Kill, account, in_flight_at, pause_s
from rayq.records import Record, RecordMetadata

FLIGHTS = [
    FlightRecord(b"N1" if index % 3 else None, f'{{"flight":{index}}}'.encode()) for index in range(30)
]
METADATA = [
    RecordMetadata("flights", 0 if flight.key else 1, index, 0)
    for index, flight in enumerate(FLIGHTS)
]
RECORDS = [
    Record("flights", metadata.partition, index, 0, flight.key, flight.value, [])
    for index, (flight, metadata) in enumerate(zip(FLIGHTS, METADATA, strict=True))
]


def changed(index: int, **fields: object) -> list[Record]:
    records = list(RECORDS)
    records[index] = msgspec.structs.replace(records[index], **fields)
    return records


def test_a_faithful_log_holds() -> None:
    result = account(FLIGHTS, METADATA, RECORDS)
    assert result.holds
    assert (result.sent, result.acknowledged, result.read, result.keys) == (30, 30, 30, 1)


def test_an_acknowledged_record_that_is_gone_is_lost() -> None:
    result = account(FLIGHTS, METADATA, RECORDS[:-1])
    assert not result.holds
    assert result.lost == 1


def test_a_record_that_stands_twice_is_a_duplicate() -> None:
    twice = msgspec.structs.replace(RECORDS[1], offset=1000)
    result = account(FLIGHTS, METADATA, [*RECORDS, twice])
    assert not result.holds
    assert (result.lost, result.duplicated, result.disordered_keys) == (0, 1, 1)


def test_a_record_that_is_polled_twice_is_a_duplicate() -> None:
    assert account(FLIGHTS, METADATA, [*RECORDS, RECORDS[-1]]).duplicated == 1


def test_a_changed_byte_is_seen_with_and_without_a_key() -> None:
    for index in (0, 1):
        result = account(FLIGHTS, METADATA, changed(index, value=b"{}"))
        assert not result.holds
        assert result.altered == 1


def test_two_records_of_a_key_that_changed_places_are_out_of_order() -> None:
    records = list(RECORDS)
    records[1], records[2] = records[2], records[1]
    result = account(FLIGHTS, METADATA, records)
    assert not result.holds
    assert (result.altered, result.disordered_keys) == (0, 1)


def test_a_key_in_two_partitions_is_out_of_order() -> None:
    metadata = list(METADATA)
    metadata[-1] = metadata[-1]._replace(partition=2)
    result = account(FLIGHTS, metadata, changed(-1, partition=2))
    assert (result.lost, result.altered, result.disordered_keys) == (0, 0, 1)
    assert not result.holds


def test_a_write_that_was_not_acknowledged_does_not_hold() -> None:
    assert not account(FLIGHTS, [*METADATA[:-1], None], RECORDS).holds


def test_a_late_answer_of_the_dead_leader_does_not_end_the_pause() -> None:
    acknowledgements = Acknowledgements(4)
    acknowledgements.metadata = [RecordMetadata("flights", 0, index, 0) for index in range(4)]
    acknowledgements.at_s = array("d", [10.0, 10.1, 10.9, 11.0])
    kill = Kill(at_s=10.05, broker=1, pid=2, leader_epoch=0, sent=3)
    assert abs(pause_s(kill, acknowledgements) - 0.8) < 1e-9
    assert in_flight_at(kill, acknowledgements) == 2
