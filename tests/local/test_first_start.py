"""The first start of a cluster dies at any point: a later start completes it, and nothing that a
broker has opened is ever formatted again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proving.simulation import ProcessDied, World
from rayq.client.environment import system_environment
from rayq.core.cluster.records import VotersChanged, decode_record
from rayq.environment import Disk, Environment
from rayq.errors import InvalidRequestError, RayqError, StorageError, WrongClusterError
from rayq.runtime.layout import (
    Directory,
    find_directories,
    format_broker,
    is_blank,
    metadata_path,
    of_one_cluster,
)
from rayq.runtime.local_runtime import open_or_format
from rayq.runtime.ray import cluster as ray_cluster
from rayq.runtime.start_checks import check_start
from rayq.storage.data_directory import META, DataDirectory, read_secret
from rayq.storage.disk import LocalDisk
from rayq.storage.metadata_log import MetadataLog
from rayq.testing import LocalCluster, local_cluster
from tests.local.support import FAST, read_all, values

ENVIRONMENT = system_environment(None)
ROOT = "/data"


def check_can_start(places: list[tuple[Disk, Directory]]) -> None:
    """These directories are one cluster, and some voter's log names all of its voters."""
    assert [one.broker for _, one in places] == [*range(len(places))]
    assert len({read_secret(disk, one.path) for disk, one in places}) == 1
    assert len({one.cluster_id for _, one in places}) == 1
    records = set()
    for disk, one in places:
        log = MetadataLog.inspect(disk, metadata_path(one.path))
        records |= {data for _, _, data in log.read(1, 1 << 20)}
    (record,) = records
    voters = decode_record(record)
    assert isinstance(voters, VotersChanged)
    known = {(one.broker, one.directory_id) for _, one in places}
    assert {(voter.broker, voter.directory_id) for voter in voters.voters} <= known


# --- at each disk operation ---------------------------------------------------------------------


@pytest.mark.parametrize("then", [3, 2, 5])
def test_a_start_that_dies_at_any_disk_operation(then: int) -> None:
    """The next start may ask for another number of brokers, and may die as well."""
    count, is_through, wholes = 0, False, 0
    while not is_through:
        count += 1
        for power_loss in (False, True):
            with World(1000 * count + power_loss) as world:
                host = world.host()
                for brokers, dies_at in ((3, count), (then, 1 + count * 7 % 60)):
                    first = host.process("layout")
                    first.kill_at_disk_operation(dies_at, power_loss=power_loss)
                    try:
                        open_or_format(first.environment, ROOT, brokers)
                        is_through = is_through or dies_at == count
                    except ProcessDied:
                        pass
                    except RayqError as error:
                        assert "holds 3 brokers, 5 were asked for" in str(error)
                    if first.alive:
                        first.kill()
                    host.boot()
                environment = host.process("layout").environment
                found = of_one_cluster(find_directories(environment, ROOT), ROOT)
                wholes += bool(found)
                opened = open_or_format(environment, ROOT, len(found) or then)
                assert not found or opened == found
                check_can_start([(environment.disk, one) for one in opened])
    assert count > 60 and 0 < wholes < 2 * count


# --- a whole cluster ----------------------------------------------------------------------------


class Died(BaseException):
    """No code of the servers catches it, as with a SIGKILL."""


class DyingDisk(LocalDisk):
    """A disk on which the program that wants to write this path dies."""

    def __init__(self, path: str) -> None:
        self._path = path

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> Any:
        if create and path.endswith(self._path):
            raise Died
        return super().open(path, create=create, writable=writable)


@pytest.mark.parametrize(
    "dies_at",
    [
        "broker-0/secret.tmp",
        "broker-0/meta.json.tmp",
        "broker-1/secret.tmp",
        "broker-2/meta.json.tmp",
        "broker-0/metadata/metadata.log",
        "broker-1/metadata/metadata.log",
        "broker-2/metadata/metadata.log",
        "broker-0/broker.lock",
        "broker-0/endpoint.tmp",
        "broker-1/broker.lock",
    ],
)
def test_the_next_start_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: str
) -> None:
    with monkeypatch.context() as dying:
        dying.setattr(
            local_cluster,
            "system_environment",
            lambda config: replace(system_environment(config), disk=DyingDisk(dies_at)),
        )
        with pytest.raises(Died):
            LocalCluster(3, data_dir=tmp_path, **FAST)
    check_start(str(tmp_path), 3, local_cluster.parse(local_cluster.ClusterConfig, {}))
    with LocalCluster(3, data_dir=tmp_path, **FAST) as cluster:
        cluster.create_topic("t")
        with cluster.producer() as producer:
            producer.send("t", b"kept").result(60)
    with LocalCluster(3, data_dir=tmp_path, **FAST) as cluster:
        assert values(read_all(cluster, "t")) == [b"kept"]


# --- on the nodes of Ray ------------------------------------------------------------------------


class Nodes:
    """Hosts with a disk each, in the place of Ray's nodes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._environments: dict[str, Environment] = {}
        self.jobs_left: int | None = None
        """The program that starts the cluster dies after so many jobs."""

    def run(self, node: str, job: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.jobs_left is not None:
            if self.jobs_left == 0:
                raise Died
            self.jobs_left -= 1
        return job(self.environment(node), *args, **kwargs)

    def environment(self, node: str) -> Environment:
        if node not in self._environments:
            self._environments[node] = self._world.host().process(node).environment
        return self._environments[node]

    def start(self, names: str, brokers: int | None) -> list[tuple[Disk, Directory]]:
        """The directories that a start finds or makes, by broker. The nodes are one letter each."""
        nodes = {name: name for name in names}
        found = {name: self.run(name, find_directories, ROOT) for name in names}
        placed, cluster_id, _ = ray_cluster._open_or_format(nodes, found, ROOT, brokers)
        return [
            (self.environment(node).disk, one)
            for broker, node in sorted(placed.items())
            for one in find_directories(self.environment(node), ROOT)
            if (one.broker, one.cluster_id) == (broker, cluster_id)
        ]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    with World(1) as world:
        nodes = Nodes(world)
        monkeypatch.setattr(ray_cluster, "on_node", nodes.run)
        yield nodes


JOBS_BEFORE_RECORDS = 3 + 4
"""The jobs: three nodes are looked at, four directories formatted, three voters' records
written."""


@pytest.mark.parametrize(
    ("names", "brokers", "jobs"),
    [
        (names, brokers, jobs)
        for names, brokers in [("abc", 4), ("abc", None), ("cab", 2), ("bd", None), ("bd", 5)]
        for jobs in range(JOBS_BEFORE_RECORDS + 1)
    ]
    + [("abc", brokers, JOBS_BEFORE_RECORDS + jobs) for brokers in (4, None) for jobs in (1, 2, 3)],
)
def test_a_start_that_dies_between_the_jobs_on_the_nodes(
    nodes: Nodes, names: str, brokers: int | None, jobs: int
) -> None:
    """The next start may find other nodes, in another order."""
    nodes.jobs_left = jobs
    with pytest.raises(Died):
        nodes.start("abc", 4)
    nodes.jobs_left = None
    made = nodes.start(names, brokers)
    assert len(made) == (4 if jobs > JOBS_BEFORE_RECORDS else brokers or len(names))
    check_can_start(made)
    assert nodes.start(names, brokers) == made
    names_all = "".join(sorted({*names, *"abc"}))
    assert nodes.start(names_all, None) == made  # leftovers of the first start do no harm


def test_a_file_in_the_place_of_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "broker-0").touch()
    with pytest.raises(StorageError, match="broker-0 cannot be read: "):
        open_or_format(ENVIRONMENT, str(tmp_path), 1)


def test_two_clusters_are_told_apart_from_what_a_start_left(tmp_path: Path) -> None:
    one, other = (
        format_broker(ENVIRONMENT, str(tmp_path), broker, cluster_id=cluster, secret=b"s")
        for broker, cluster in ((0, "c"), (1, "d"))
    )
    held = one._replace(is_blank=False)
    beside = other._replace(broker=2, cluster_id="c")
    assert of_one_cluster([one, other], ROOT) == []
    assert of_one_cluster([held, other, beside], ROOT) == [held, beside]
    with pytest.raises(WrongClusterError, match="2 clusters"):
        of_one_cluster([held, other._replace(is_blank=False)], ROOT)


# --- directories that hold data -------------------------------------------------------------------


def _open(path: str) -> None:
    DataDirectory.open(ENVIRONMENT, path).close()


def _with_log(change: Callable[[MetadataLog], None]) -> Callable[[str], None]:
    def act(path: str) -> None:
        log = MetadataLog.open(ENVIRONMENT.disk, metadata_path(path))
        change(log)
        log.close()

    return act


@pytest.mark.parametrize("is_formatted", [True, False])
@pytest.mark.parametrize(
    "put",
    [
        _open,
        _with_log(lambda log: log.append([(1, 0, b"record")])),
        _with_log(lambda log: log.promise(1)),
        _with_log(lambda log: log.install_snapshot(1, 0, b"snapshot")),
        lambda path: Path(path, "t-0").mkdir(),
        lambda path: Path(path, "quarantine").mkdir(),
    ],
    ids=["opened", "record", "promise", "snapshot", "partition", "quarantine"],
)
def test_a_directory_that_holds_anything_is_not_formatted(
    tmp_path: Path, put: Callable[[str], None], is_formatted: bool
) -> None:
    root = str(tmp_path)
    path = format_broker(ENVIRONMENT, root, 0, cluster_id="c", secret=b"s").path
    assert is_blank(ENVIRONMENT.disk, path)
    put(path)
    if not is_formatted:
        Path(path, META).unlink()
    before = sorted(
        (one, one.read_bytes() if one.is_file() else b"") for one in tmp_path.rglob("*")
    )
    assert not is_blank(ENVIRONMENT.disk, path)
    with pytest.raises(InvalidRequestError, match="not empty .* move it away first"):
        format_broker(ENVIRONMENT, root, 0, cluster_id="c", secret=b"t")
    if is_formatted:
        assert len(open_or_format(ENVIRONMENT, root, None)) == 1
    else:
        with pytest.raises(InvalidRequestError, match="move it away first"):
            open_or_format(ENVIRONMENT, root, 1)
    assert before == sorted(
        (one, one.read_bytes() if one.is_file() else b"") for one in tmp_path.rglob("*")
    )
