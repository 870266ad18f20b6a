"""What a program that uses Spark prints: nothing beside its results but news."""

from __future__ import annotations

import importlib
import io
import os

import pytest

pytest.importorskip("raydp")

NOISE = [
    b"[2026-11-22 03:25:25,315 I 7877 8014] gcs_client.cc:96: GcsClient has no Cluster ID set.\n",
    b"2026-11-22 03:25:26,495 INFO CoarseGrainedSchedulerBackend$DriverEndpoint "
    b"[dispatcher-CoarseGrainedScheduler]: Registered executor 0\n",
]
NEWS = [
    b"2026-11-22 03:25:26,495 WARN BlockManager [main]: A block was lost\n",
    b"2026-11-22 INFO is what the program itself prints\n",
    b"26/11/22 03:25:20 WARN TaskSetManager: Lost task 0.0 in stage 1.0\n",
    b"[2026-11-22 03:25:25,315 E 7877 8014] gcs_client.cc:96: Failed to connect to GCS.\n",
    b"without an end of line",
]


@pytest.mark.parametrize("noise", NOISE)
def test_only_the_lines_that_are_no_news_are_left_out(noise: bytes) -> None:
    from rayq.spark.driver_output import copy_without_noise

    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as copied:
        copy_without_noise(io.BytesIO(noise.join([b"", *NEWS])), write_end)
        os.close(write_end)
        assert copied.read() == b"".join(NEWS)


def test_the_users_log_settings_of_spark_take_the_place_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = importlib.import_module("rayq.spark.session")
    name = "spark.log4j.config.file.name"
    assert os.path.isfile(module._settings({})[name])
    assert module._settings({name: "/etc/mine.properties"})[name] == "/etc/mine.properties"
    monkeypatch.setenv("SPARK_LOG4J_CONFIG_FILE_NAME", "/etc/theirs.properties")
    assert module._settings({})[name] == "/etc/theirs.properties"
