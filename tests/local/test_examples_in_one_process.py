"""The examples that need no Ray, run as a reader would run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import rayq
from rayq import Record
from rayq.testing import LocalCluster

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 170.0
"""The longest example takes 8 s of processor time, beside all other work of the machine."""


def run(*arguments: str) -> str:
    ran = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_arrow_batches_counts_all_clicks() -> None:
    counts = [line.split() for line in run("examples/arrow_batches.py").splitlines()[1:]]
    assert {page for page, _ in counts} == {f"/page/{number}" for number in range(7)}
    assert sum(int(count) for _, count in counts) == 50_000


def test_async_producer_sells_and_ships_every_order() -> None:
    printed = run("examples/async_producer.py")
    assert "sold 100, the last at offset 99" in printed
    assert "shipped 100" in printed


def test_at_least_once_books_every_order_after_a_crash() -> None:
    printed = run("examples/at_least_once.py")
    assert "the first worker died with 25 orders booked" in printed
    assert re.search(r"booked 100 of 100 orders; \d+ records came twice", printed), printed
    assert "the group is 0 records behind" in printed


def test_at_most_once_rings_no_bell_twice() -> None:
    printed = run("examples/at_most_once.py")
    assert re.search(r"rung (9\d|100) of 100 bells, 0 of them twice", printed), printed


def test_consumer_pool_charges_all_orders_but_the_one_that_cannot_be() -> None:
    printed = run("examples/consumer_pool.py")
    assert "nothing waits: 0 consumers" in printed
    assert "charged 199 of 200 orders, 1 dead letter" in printed
    assert "'rayq.error.class': 'KeyError', 'rayq.error.message': \"'cups'\"" in printed


@pytest.mark.thorough
def test_last_flight_finds_what_pandas_finds() -> None:
    printed = run("examples/last_flight.py")
    assert "4,043 aircraft, from 4,043 records instead of 334,264" in printed
    assert "the same as pandas finds: True" in printed


def test_outbox_tells_of_every_order_once() -> None:
    printed = run("examples/outbox.py")
    assert "the first relay died after a commit" in printed
    assert "the second one found 1 batch in the log already" in printed
    assert "50 messages of 50 orders, 0 of them twice" in printed


@pytest.mark.thorough  # eight processes start
def test_queue_resize_images_makes_each_thumbnail_though_workers_are_killed() -> None:
    printed = run("examples/queue_resize_images.py")
    assert "killed 2 of 8 workers" in printed
    assert re.search(r"32 of 32 pictures are done; \d+ tasks were given out again", printed), printed


def test_tiered_storage_reads_from_the_store_and_comes_back_from_it() -> None:
    printed = run("examples/tiered_storage.py")
    stored = re.search(r"the store has the readings up to (\d+), the disks the rest", printed)
    assert stored is not None, printed
    assert "read 2000 of 2000 from the beginning" in printed
    assert "Restored topic readings" in printed
    assert f"read {stored[1]} of {stored[1]} that were stored" in printed


def test_typed_orders_brews_all_orders_and_puts_aside_what_is_none() -> None:
    printed = run("examples/typed_orders.py")
    assert """no order: b'{"item": "tea", "cups": "two"}': Expected `int`, got `str`""" in printed
    assert f"brewed {sum(1 + number % 3 for number in range(100))} cups" in printed
    assert "the group is 0 records behind" in printed


def test_in_a_pytest_passes_under_pytest() -> None:
    # The test has a project of its own: only the installed plugin, without our configuration and
    # conftest.
    example = str(ROOT / "examples" / "in_a_pytest.py")
    assert "1 passed" in run("-m", "pytest", "-q", "-c", "/dev/null", "--rootdir=/tmp", example)


def test_the_group_of_the_readme_runs_as_it_stands(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text[text.index("## Groups") :], re.DOTALL)
    handled: list[bytes | None] = []

    def handle(record: Record) -> None:
        if record.value == b"stop":
            raise KeyboardInterrupt
        handled.append(record.value)

    with LocalCluster(data_dir=tmp_path) as cluster:
        cluster.create_topic("flights")
        with cluster.producer() as producer:
            producer.send_many("flights", [b"1", b"2", b"3", b"stop"]).result(timeout=60)
        with pytest.raises(KeyboardInterrupt):
            exec(block, {"rayq": rayq, "handle": handle})
    assert handled == [b"1", b"2", b"3"]
