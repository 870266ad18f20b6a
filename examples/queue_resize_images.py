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
from pathlib import Path

from PIL import Image

import rayq
from rayq.testing import LocalCluster

PICTURES = 32
WORKERS = 8
KILLED = 2
SIZE = (1600, 1200)
THUMBNAIL_WIDTH = 160


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
        for task in q:
            with task:  # an error would give it back, to be tried again
                print(f"delivery {task.delivery_count}", flush=True)
                make_thumbnail(Path((task.value or b"").decode()), out)


def main() -> None:
    with tempfile.TemporaryDirectory() as directory, LocalCluster(brokers=3) as cluster:
        out = Path(directory, "out")
        out.mkdir()
        cluster.admin.create_queue("pictures", partitions=4, replication_factor=3)
        command = [sys.executable, __file__, "work", cluster.addresses[0], str(out)]
        environment = {**os.environ, "RAYQ_TOKEN": cluster.token}
        workers = [
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            for _ in range(WORKERS)
        ]
        try:
            pictures = draw(Path(directory))
            for worker in workers:
                wait_for(worker, "ready")
            with cluster.queue("pictures") as q:
                q.put_many([str(path).encode() for path in pictures])
            for worker in workers[:KILLED]:
                wait_for(worker, "delivery 1")
                worker.kill()  # SIGKILL, in the middle of its first picture
            print(f"killed {KILLED} of {WORKERS} workers")
            while not is_done(cluster):
                time.sleep(0.1)
        finally:
            for worker in workers:
                worker.kill()

        again = sum(worker.communicate()[0].count("delivery 2") for worker in workers)
        done = [path for path in pictures if is_thumbnail(out / path.name)]
        print(f"{len(done)} of {PICTURES} pictures are done; {again} tasks were given out again")


def wait_for(worker: subprocess.Popen[str], line: str) -> None:
    assert worker.stdout is not None
    assert worker.stdout.readline() == f"{line}\n"


def is_thumbnail(path: Path) -> bool:
    with Image.open(path) as picture:
        return picture.width == THUMBNAIL_WIDTH


def is_done(cluster: LocalCluster) -> bool:
    partitions = cluster.admin.describe_queue("pictures").partitions
    return all(one.start_offset == one.end_offset for one in partitions)


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
