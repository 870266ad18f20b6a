"""A queue of pictures: eight worker processes make thumbnails, two of them are killed with SIGKILL.

    python examples/queue_resize_images.py        # needs Pillow

The pictures are generated: PNG files of 1600 x 1200 pixels, each another part of the Mandelbrot
set, which Pillow draws. Each is a task. What the killed workers had in hand comes to the others
about a second later, as delivery number 2, and in the end each picture has its thumbnail. A
thumbnail is written beside its place and renamed, so that doing a task twice does no harm.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from PIL import Image

import rayq
from rayq.testing import LocalCluster

PICTURES = 48
WORKERS = 8
KILLED = 2
SIZE = (1600, 1200)
THUMBNAIL_WIDTH = 160
TIMEOUT_S = 120.0


def draw(directory: Path) -> list[Path]:
    """Pictures that differ: each is another part of the Mandelbrot set."""
    paths = []
    for number in range(PICTURES):
        left, top = -2 + number % 8 / 4, -1 + number // 8 / 4
        path = directory / f"picture-{number:02}.png"
        Image.effect_mandelbrot(SIZE, (left, top, left + 0.5, top + 0.375), 40).save(path)
        paths.append(path)
    return paths


def make_thumbnail(path: Path, out: Path) -> None:
    with Image.open(path) as picture:
        height = picture.height * THUMBNAIL_WIDTH // picture.width
        small = picture.resize((THUMBNAIL_WIDTH, height), Image.Resampling.LANCZOS)
    part = out / f".{path.name}.{os.getpid()}"
    small.save(part, "PNG")
    part.rename(out / path.name)


def work(address: str, out: Path) -> None:
    """One worker: a process of its own, which runs until it is killed."""
    with rayq.connect(address) as cluster, cluster.queue("pictures", prefetch=2) as q:
        print("ready", flush=True)
        while True:
            for task in q.take(1, timeout_s=60):
                with task:  # an error would be a nack, and the task come again
                    make_thumbnail(Path(task.value.decode()), out)
                    print(task.delivery_count, task.value.decode(), flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as directory, LocalCluster(brokers=3) as cluster:
        out = Path(directory, "out")
        out.mkdir()
        q = cluster.create_queue("pictures", partitions=4, replication_factor=3)
        command = [sys.executable, __file__, "work", cluster.addresses[0], str(out)]
        environment = {**os.environ, "RAYQ_TOKEN": cluster.token}
        workers = [
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            for _ in range(WORKERS)
        ]
        pictures = draw(Path(directory))
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"

        for path in pictures:
            q.put(str(path).encode())
        until(lambda: count(out) >= PICTURES // 6)
        for worker in workers[:KILLED]:
            worker.kill()  # SIGKILL: it says goodbye to nobody
        print(f"killed {KILLED} of {WORKERS} workers, with {count(out)} pictures done")

        until(lambda: is_done(cluster))
        for worker in workers[KILLED:]:
            worker.terminate()
        handled = [line for worker in workers for line in worker.communicate()[0].splitlines()]
        again = sum(not line.startswith("1 ") for line in handled)
        print(f"{count(out)} of {PICTURES} pictures are done; {again} tasks were given out again")
        for path in pictures:
            with Image.open(out / path.name) as thumbnail:
                assert thumbnail.width == THUMBNAIL_WIDTH


def count(out: Path) -> int:
    return len(list(out.glob("picture-*.png")))


def is_done(cluster: LocalCluster) -> bool:
    partitions = cluster.admin.describe_queue("pictures").partitions
    return all(one.start_offset == one.end_offset for one in partitions)


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
