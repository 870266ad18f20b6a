"""`rayq.connect()`: the cluster that it finds in a test, on Ray, and after `rayq start`."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import rayq
from rayq import Cluster, Record
from rayq.client.addresses import parse_address
from rayq.config import ClusterConfig
from rayq.errors import (
    AuthenticationError,
    AuthorizationError,
    ConfigError,
    NoClusterError,
    TimeoutError,
)
from rayq.runtime.current_cluster import Current, write_current
from rayq.runtime.ray import connecting
from rayq.runtime.ray.specs import ClusterSpec
from rayq.testing import LocalCluster
from tests.local.support import read_all, values

RAY_ADDRESS = "127.0.0.1:1"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of a user who has no cluster, in a process that has none."""
    monkeypatch.setattr(Cluster, "_running_here", [])
    if (ray := sys.modules.get("ray")) is not None:  # Other tests may have started one here.
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
    for name in ("RAY_ADDRESS", "RAYQ_TOKEN", "RAYQ_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAYQ_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def started(home: Path, cluster: LocalCluster) -> Current:
    """The state that `rayq start` leaves behind; the brokers are those of a LocalCluster."""
    current = Current(
        ray_address=RAY_ADDRESS,
        name="flights",
        brokers=cluster.addresses,
        path="/data",
        started_ray=True,
        token=cluster.token,
    )
    write_current(current)
    return current


def test_connect_finds_the_cluster_that_was_started_here(
    started: Current, cluster: LocalCluster, topic: str
) -> None:
    for name in (None, "flights"):
        with rayq.connect(name=name) as found:
            assert found.name == "flights"
            assert topic in found.admin.list_topics()
    with pytest.raises(NoClusterError, match="No cluster named 'other' was started"):
        rayq.connect(name="other")


def test_connect_by_address_finds_the_token(
    started: Current, home: Path, cluster: LocalCluster, topic: str
) -> None:
    # This holds also beside the token of another cluster.
    (home / "token").write_text("rayq-" + "A" * 43)
    with rayq.connect(cluster.addresses[0]) as found:
        assert topic in found.admin.list_topics()


def test_a_token_that_was_put_down_is_found_by_connect(
    home: Path, cluster: LocalCluster, topic: str
) -> None:
    address = cluster.addresses[0]
    with pytest.raises(AuthenticationError, match="`rayq token`"):
        rayq.connect(address)
    (home / "token").write_text(cluster.token + "\n")
    with rayq.connect(address) as found:
        assert topic in found.admin.list_topics()
    with rayq.connect(address, token=cluster.token) as found:
        assert topic in found.admin.list_topics()


def test_a_damaged_note_of_another_cluster_keeps_nobody_from_an_address(
    home: Path, cluster: LocalCluster, topic: str
) -> None:
    (home / "current.json").write_text("{ half")
    with pytest.raises(AuthenticationError, match=r"A token is needed.*current\.json is damaged"):
        rayq.connect(cluster.addresses[0])
    (home / "token").write_text(cluster.token)
    with rayq.connect(cluster.addresses[0]) as found:
        assert topic in found.admin.list_topics()


def test_a_script_of_another_shell_finds_it_without_loading_ray(
    started: Current, topic: str
) -> None:
    program = (
        "import sys, rayq; cluster = rayq.connect();"
        "print(*cluster.admin.list_topics()); assert 'ray' not in sys.modules"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert topic in ran.stdout.split() and ran.stderr == ""


def test_without_any_cluster_connect_says_what_to_do(home: Path) -> None:
    with pytest.raises(NoClusterError, match="give the address of a broker"):
        rayq.connect()


# --- in the process of a LocalCluster -------------------------------------------------------------


def test_code_under_test_connects_to_the_local_cluster(
    rayq_cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", RAY_ADDRESS)  # code in a test must not connect there
    with rayq.connect() as found:
        found.create_topic("orders")
        with rayq.connect(name="local") as again:
            assert again.cluster_id == rayq_cluster.cluster_id
    assert rayq_cluster.admin.list_topics() == ["orders"]
    assert Cluster.current() is rayq_cluster

    def connects() -> None:
        assert Cluster.running_here() is None

    child = multiprocessing.get_context("fork").Process(target=connects)
    child.start()
    child.join(30)
    assert child.exitcode == 0


def test_the_last_local_cluster_that_runs_is_found_or_the_one_named(
    cluster: LocalCluster,
) -> None:
    with LocalCluster(brokers=1, name="audit"), LocalCluster(brokers=1) as inner:
        assert rayq.connect().cluster_id == inner.cluster_id
        assert rayq.connect(name="audit").name == "audit"
        elsewhere = rayq.connect(cluster.addresses[0], token=cluster.token)
        assert cluster.admin.list_topics() == elsewhere.admin.list_topics()
        rayq.connect().stop()
        assert rayq.connect().name == "audit"
    assert rayq.connect().cluster_id == cluster.cluster_id


def test_the_handler_of_a_pool_connects_though_whoever_started_it_is_gone(
    cluster: LocalCluster, topic: str
) -> None:
    found: concurrent.futures.Future[str | None] = concurrent.futures.Future()

    def handle(_records: list[Record]) -> None:
        with rayq.connect() as connected:
            found.set_result(connected.cluster_id)

    with rayq.connect() as starter:
        pool = starter.consumer_pool(topic, f"group-of-{topic}", handle)
        with starter.producer() as producer:
            producer.send(topic, b"x")
    assert found.result(60) == cluster.cluster_id
    pool.stop()
    assert cluster.consumer_pools() == {}


# --- on Ray ---------------------------------------------------------------------------------------


class ControllerActor:
    """The controller's actor as Ray hands it out: so many calls fail before one is answered."""

    def __init__(self, failures: float, answer: object = "there it is") -> None:
        self.failures = failures
        self.answer = answer
        self.spec = self.prepare_stop = self

    def remote(self) -> ControllerActor:
        return self

    def future(self) -> concurrent.futures.Future[object]:
        from ray.exceptions import ActorUnavailableError

        answer: concurrent.futures.Future[object] = concurrent.futures.Future()
        self.failures -= 1
        if self.failures >= 0:
            answer.set_exception(ActorUnavailableError("The actor is restarting", None))
        else:
            answer.set_result(self.answer)
        return answer


def test_connect_waits_while_ray_starts_the_controller_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rayq.runtime.ray import lookup as ray_lookup

    monkeypatch.setattr(ray_lookup, "CONNECT_PAUSE_S", 0.001)
    actor = ControllerActor(failures=3)
    monkeypatch.setattr(ray_lookup.ray, "get_actor", lambda *_args, **_options: actor)
    assert ray_lookup.find_cluster("flights", timeout_s=30.0) == "there it is"
    actor.failures = float("inf")
    with pytest.raises(TimeoutError, match=r"'flights'.* not answered for 0.05 s.*restarting"):
        ray_lookup.find_cluster("flights", timeout_s=0.05)


def test_a_stop_waits_while_ray_starts_the_controller_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rayq.runtime.ray import cluster as ray_cluster
    from rayq.runtime.ray import lookup as ray_lookup

    monkeypatch.setattr(ray_lookup, "CONNECT_PAUSE_S", 0.001)
    actor, killed = ControllerActor(failures=3, answer=[]), list[ControllerActor]()
    monkeypatch.setattr(ray_lookup.ray, "get_actor", lambda *_args, **_options: actor)
    monkeypatch.setattr(ray_lookup.ray, "kill", killed.append)
    ray_cluster.stop_cluster("flights")
    assert (actor.failures, killed) == (-1, [actor])


def test_connect_finds_the_only_cluster_of_a_ray_whatever_it_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rayq.runtime.ray import lookup as ray_lookup

    names = ["rayq:shop:broker-0", "rayq:shop:controller", "rayq:shop:pool-controller"]
    monkeypatch.setattr(ray_lookup, "names_with", lambda _prefix: names)
    assert ray_lookup.likely_name("default") == "shop"
    names.append("rayq:other:controller")
    assert ray_lookup.likely_name("default") == "default"
    names.clear()
    assert ray_lookup.likely_name("default") == "default"


# --- a process that has no cluster yet ------------------------------------------------------------


@pytest.fixture
def fresh(started: Current, monkeypatch: pytest.MonkeyPatch) -> Current:
    """What `rayq start` has left behind, in a process that has neither a cluster nor a Ray."""
    monkeypatch.setattr(Cluster, "_current", None)
    monkeypatch.setattr(connecting, "has_ray", lambda: False)
    return started


def test_the_current_cluster_is_the_one_that_rayq_start_has_started(
    fresh: Current, topic: str
) -> None:
    found = Cluster.current()
    assert found.addresses == fresh.brokers
    assert topic in found.admin.list_topics()
    found.close()
    assert Cluster.current().addresses == fresh.brokers


def test_a_job_joins_the_ray_of_its_cluster_unless_it_has_another(
    fresh: Current, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[tuple[str | None, bool]] = []
    monkeypatch.setattr(
        connecting, "join_ray", lambda known, may_start: joined.append((known, may_start))
    )
    connecting.ray_for(None)
    connecting.ray_for(Cluster.current())
    with rayq.connect(fresh.brokers[0], token=fresh.token) as outside:
        connecting.ray_for(outside)
    monkeypatch.setattr(connecting, "has_ray", lambda: True)
    connecting.ray_for(None)
    assert joined == [(RAY_ADDRESS, True)] * 2 + [(None, True)] * 2


def test_a_process_proves_itself_to_ray_also_where_ray_was_imported_first() -> None:
    program = (
        "import ray; from ray._raylet import AuthenticationMode, get_authentication_mode\n"
        "from rayq.runtime.ray.token import use_ray_token\n"
        "assert get_authentication_mode() != AuthenticationMode.TOKEN\n"
        "use_ray_token(); assert get_authentication_mode() == AuthenticationMode.TOKEN"
    )
    rest = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    subprocess.run(
        [sys.executable, "-c", program],
        env={**rest, "RAY_AUTH_TOKEN": "0" * 64},
        check=True,
        timeout=120,
    )


# --- as whom --------------------------------------------------------------------------------------


@pytest.fixture
def in_ray(
    home: Path, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str | None], None]:
    """Has this process be a program in the Ray of a cluster with such an `inside_ray_principal`."""
    from rayq.runtime.ray import lookup as ray_lookup

    def become(principal: str | None) -> None:
        spec = ClusterSpec(
            cluster_name="flights",
            cluster_id=str(cluster.cluster_id),
            secret=cluster._servers.secret,  # type: ignore[union-attr]
            brokers=tuple(parse_address(address) for address in cluster.addresses),
            config=ClusterConfig(inside_ray_principal=principal),
            root="/data",
            port=9392,
            placed={},
            nodes=(),
        )
        monkeypatch.setattr(ray_lookup, "find_cluster", lambda *_, **__: spec)

    monkeypatch.setattr(connecting, "has_ray", lambda: True)
    monkeypatch.setattr(connecting, "join_ray", lambda: None)
    monkeypatch.setattr(ray_lookup, "likely_name", lambda name: name)
    return become


def is_of(connection: Cluster) -> str:
    """The principal of a connection, by what it may."""
    try:
        connection.admin.list_acls(principal="nobody-at-all")
        return "superuser"
    except AuthorizationError as error:
        return str(error).split("'")[1]
    finally:
        connection.close()


def test_a_program_in_ray_is_the_superuser_unless_the_config_or_a_token_names_a_principal(
    in_ray: Callable[[str | None], None], cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("inside", "anna-of-ray"):
        cluster.admin.create_principal(name, exist_ok=True)
    token = cluster.admin.create_token("anna-of-ray").token
    in_ray(None)
    assert is_of(rayq.connect()) == "superuser"
    assert is_of(rayq.connect(token=token)) == "anna-of-ray"
    in_ray("inside")
    assert is_of(rayq.connect()) == "inside"
    cluster.admin.create_acls(rayq.Acl("inside", "allow", "all", "topic", "of-inside"))
    with rayq.connect() as connection:
        connection.create_topic("of-inside")
        with connection.producer() as producer:
            producer.send("of-inside", b"v").result(60)
        assert values(read_all(connection, "of-inside")) == [b"v"]
    assert is_of(pickle.loads(pickle.dumps(rayq.connect()))) == "inside", "as tasks get it"
    assert is_of(rayq.connect(token=cluster.token)) == "superuser"
    with pytest.raises(ConfigError, match="rayq token create inside"):
        _ = rayq.connect().token
    monkeypatch.setenv("RAYQ_TOKEN", token)
    assert is_of(rayq.connect()) == "anna-of-ray"
    monkeypatch.setenv("RAYQ_TOKEN", cluster.token)
    assert is_of(rayq.connect()) == "superuser", "an operator"


def test_the_principal_of_programs_in_ray_has_to_exist(
    in_ray: Callable[[str | None], None],
) -> None:
    in_ray("not-created")
    with rayq.connect() as connection, pytest.raises(AuthenticationError, match="'not-created'"):
        connection.admin.list_acls(principal="not-created")
    for name in ("superuser", "two words", ""):
        with pytest.raises(ConfigError, match="inside_ray_principal is the name"):
            ClusterConfig(inside_ray_principal=name)


def test_a_principals_token_wins_over_the_clusters_own(
    started: Current, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.admin.create_principal("anna-here", exist_ok=True)
    token = cluster.admin.create_token("anna-here").token
    assert is_of(rayq.connect()) == "superuser"
    assert is_of(rayq.connect(token=token)) == "anna-here"
    monkeypatch.setenv("RAYQ_TOKEN", token)
    assert is_of(rayq.connect()) == "anna-here"
    monkeypatch.setattr(Cluster, "_running_here", [cluster])
    assert is_of(rayq.connect(client_id="a test")) == "anna-here"


def test_a_damaged_token_in_the_environment_makes_nobody_the_superuser(
    started: Current, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.admin.create_principal("anna-here", exist_ok=True)
    token = cluster.admin.create_token("anna-here").token
    for running_here in ([], [cluster]):
        monkeypatch.setattr(Cluster, "_running_here", running_here)
        for damaged in (f'"{token}"', token.removeprefix("ra"), token[:-1], " "):
            monkeypatch.setenv("RAYQ_TOKEN", damaged)
            with pytest.raises(ConfigError, match="^RAYQ_TOKEN is not a rayq token") as caught:
                rayq.connect()
            assert token[-20:-1] not in str(caught.value)
        monkeypatch.setenv("RAYQ_TOKEN", "")
        assert is_of(rayq.connect()) == "superuser", "as if it were not set"


@pytest.mark.parametrize("way", ["argument", "environment", "file"])
def test_a_text_that_is_no_token_says_where_it_was_given(
    home: Path, cluster: LocalCluster, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, where = cluster.addresses[0], {"argument": "token=", "environment": "RAYQ_TOKEN"}.get(way)
    if way == "environment":
        monkeypatch.setenv("RAYQ_TOKEN", "rayq-cut")
    elif way == "file":
        (home / "token").write_text("rayq-cut")
        where = f"What is in {home / 'token'}"
    with pytest.raises(ConfigError) as caught:
        rayq.connect(at, token="rayq-cut" if way == "argument" else None)
    assert str(caught.value).startswith(f"{where} is not a rayq token: it begins with 'rayq-'")
