"""`python -m rayq.storage verify DIR`"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rayq.config import TopicConfig
from rayq.storage.__main__ import main
from rayq.storage.disk import LocalDisk
from rayq.storage.metadata_log import MetadataLog
from rayq.storage.verify import verify
from tests.storage.support import Place, append
from tests.wrong_batches import sealed


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A root with one broker's directory: metadata and two partitions."""
    root = tmp_path / "root"
    broker = root / "broker-0"
    broker.mkdir(parents=True)
    (broker / "meta.json").write_text(
        '{"format_version": 1, "cluster_id": "c", "broker": 0, "directory_id": "d",'
        ' "start_counter": 1}'
    )
    metadata = MetadataLog.open(LocalDisk(), str(broker / "metadata"))
    metadata.append([(1, 1, b"one"), (2, 1, b"two")])
    for partition in range(2):
        place = Place(broker / f"flights-{partition}")
        place.config = TopicConfig(segment_bytes=2048, index_interval_bytes=200)
        log = place.open()
        for number in range(50):
            append(log, 5, epoch=number // 20, producer_id=1, base_sequence=5 * number)
        log.close(250)
    return root


def damage_of(root: Path) -> list[str]:
    return [what for report in verify(LocalDisk(), str(root)) for what in report.damage]


def contents(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_sound_directory_is_counted_and_not_changed(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(data)
    assert main(["verify", str(data)]) == 0
    shown = capsys.readouterr().out
    assert "4 directories checked, 0 damaged." in shown
    assert shown.count("0-250") == 2
    assert contents(data) == before


def test_it_runs_as_a_module_and_prints_json(data: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "rayq.storage", "verify", str(data), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    reports = json.loads(ran.stdout)
    assert [report["kind"] for report in reports] == [
        "broker",
        "partition",
        "partition",
        "metadata",
    ]
    assert reports[1]["records"] == 250
    assert reports[1]["batches"] == 50


def test_every_damaged_byte_of_a_synced_segment_is_found(data: Path) -> None:
    path = sorted(data.rglob("*.log"))[1]
    good = path.read_bytes()
    for position in range(0, len(good), 61):
        bad = bytearray(good)
        bad[position] ^= 1
        path.write_bytes(bad)
        found = damage_of(data)
        assert found
        assert f"{path}, position" in found[0]
    path.write_bytes(good)
    assert damage_of(data) == []


@pytest.mark.parametrize(
    "name", ["checkpoint", "leader-epochs", "*.snapshot", "meta.json", "metadata.log"]
)
def test_damage_of_any_other_file_is_found(
    data: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sorted(data.rglob(name))[-1]
    path.write_bytes(b"rubbish and more" + path.read_bytes())
    if name == "metadata.log":
        path.write_bytes(b"RQML" + path.read_bytes())
    assert main(["verify", str(data)]) == 1
    shown = capsys.readouterr().out
    assert "DAMAGED" in shown
    assert f"damage: {path}" in shown


def test_missing_segments_are_damage(data: Path) -> None:
    path = sorted(data.rglob("*.log"))[1]
    path.unlink()
    assert damage_of(data)


def test_a_torn_tail_and_a_bad_index_are_notes(data: Path) -> None:
    place = Place(data / "broker-0" / "flights-1")
    log = place.open()
    append(log, 5, epoch=9)
    path = place.files(".log")[-1]
    path.write_bytes(path.read_bytes()[:-3])
    index = place.files(".index")[0]
    index.write_bytes(index.read_bytes()[:-2] + b"\xff\xff")
    place.files(".timeindex")[1].unlink()
    reports = verify(LocalDisk(), str(data))
    assert all(report.is_sound for report in reports)
    notes = [note for report in reports for note in report.notes]
    assert any("next start cuts" in note for note in notes)
    assert any(str(index) in note for note in notes)
    assert any("timeindex is missing" in note for note in notes)


def test_a_batch_that_was_written_wrong_is_no_damage_and_what_follows_is_checked(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path / "t-0")
    log = place.open()
    log.append_as_follower(sealed({}, b"\xc1garbage"))
    append(log, 5)
    log.close(6)
    (report,) = verify(LocalDisk(), str(tmp_path / "t-0"))
    assert (report.damage, report.end_offset) == ([], 6)
    (note,) = report.notes
    assert "no disk damaged it" in note


def test_nothing_to_check_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path)]) == 2
    assert main(["verify", str(tmp_path / "nowhere")]) == 2
    assert "0 directories checked" in capsys.readouterr().out
