"""`rayq start` and `stop`."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import sys
import time
from typing import Annotated, Any

import msgspec
import typer

from rayq.cli import output
from rayq.cli.current import TLS_FIELDS, check_answers, start_lock
from rayq.cli.local_ray import connected_to_ray, processes_of, raylets_of, start_ray, stop_ray
from rayq.cli.options import Json
from rayq.cli.values import config_values
from rayq.config import ClusterConfig
from rayq.entry import start_or_find
from rayq.errors import NoClusterError, RayqError
from rayq.runtime.current_cluster import (
    Current,
    cluster_of,
    home,
    read_current,
    remove_current,
    write_current,
)
from rayq.runtime.kept_settings import LOOPBACK, KeptSettings, given_config, said, settings_for
from rayq.runtime.layout import kept_here
from rayq.runtime.ray.connecting import cluster_of_spec
from rayq.runtime.start_checks import check_start

RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        metavar="HOST:PORT|auto",
        envvar="RAY_ADDRESS",
        help="The Ray that runs the cluster. Default: a new Ray on this machine.",
    ),
]

OtherRay = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        metavar="HOST:PORT|auto",
        envvar="RAY_ADDRESS",
        help="The Ray that runs the cluster, if there is no current cluster.",
    ),
]


LOOK_S = 1.0
"""The interval at which `rayq start` checks that the cluster still runs."""


# --- start ----------------------------------------------------------------------------------------


def start(
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="The directory on each node for its brokers' data.")
    ],
    brokers: Annotated[
        int | None,
        typer.Option(
            "-b",
            "--brokers",
            help="Number of brokers, spread over the nodes.",
            min=1,
            show_default="those found in DIR, else one for each node",
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes", min=1, help="Wait until Ray has this many nodes.", show_default=False
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="The cluster's name. Kept.", show_default="default"),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            min=1,
            max=65535,
            help="Brokers listen on the first free port from here. Kept.",
            show_default="9392",
        ),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            "-c",
            "--config",
            metavar="KEY=VALUE",
            help="Set a config of the cluster, such as session_timeout_ms=5s; may be repeated. "
            "Kept; KEY=none resets it.",
        ),
    ] = None,
    ray_address: RayAddress = None,
    node_ip: Annotated[
        str | None,
        typer.Option(
            "--node-ip-address",
            help="The address of this machine for Ray and, as bind_host, for the brokers.",
            show_default="for Ray as it finds it; 127.0.0.1 for brokers",
        ),
    ] = None,
    num_cpus: Annotated[
        int | None,
        typer.Option(
            "--num-cpus",
            min=1,
            help="CPUs that Ray offers to your tasks and actors; brokers use none of them.",
            show_default="those of this machine",
        ),
    ] = None,
    block: Annotated[
        bool,
        typer.Option(
            "--block",
            help="Stay in the foreground until the cluster stops; Ctrl+C and SIGTERM stop it. For "
            "containers and service managers.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Start a cluster: new in an empty DIR, or what DIR holds. Returns when it is ready.

    Ray and the brokers run on in the background until `rayq stop`. From then on all commands use
    this cluster. Name, port and configs are kept in DIR: the next start uses those that it is not
    given, and reports what it changes. Brokers listen on 127.0.0.1, or in a Ray that runs already
    (--ray-address) on the address of their node; -c bind_host=ADDRESS sets another, and
    bind_host=none is the address of the node in any case.
    """
    if num_cpus is not None and ray_address is not None:
        raise typer.BadParameter(
            "--num-cpus is for a Ray that is started here; --ray-address names one that runs"
        )
    if node_ip is not None and ray_address is not None:
        raise typer.BadParameter(
            "--node-ip-address is for a Ray that is started here; with --ray-address say -c "
            "bind_host=ADDRESS, or nothing: each broker listens on the address of its node"
        )
    values = given_config(config_values(ClusterConfig, config or ()))
    if node_ip is not None:
        _check_node_ip(node_ip, ray_address)
        values.setdefault("bind_host", node_ip)
    path = os.path.abspath(os.path.expanduser(directory))
    with start_lock():
        _check_nothing_runs(path, ray_address)
        if ray_address is None:
            settings = settings_for(kept_here(path), name=name, port=port, given=values)
            check_start(path, brokers, settings.parsed())
        with contextlib.ExitStack() as undo, output.waiting(f"Starting brokers on {path}"):
            session = None
            if ray_address is None:
                address, session = start_ray(node_ip, num_cpus)
                undo.callback(stop_ray, session, address)
            else:
                address = ray_address
            current, settings, changes = _start_cluster(
                path, address, session, brokers, nodes, name, port, values
            )
            write_current(current)
            undo.pop_all()
    if json:
        shown = msgspec.to_builtins(current)
        del shown["token"]
        output.print_json({**shown, "kept": settings.config, "changes": changes})
    else:
        _say_how_to_go_on(current, settings, changes)
    if block:
        _stay(current)


def _check_node_ip(node_ip: str, ray_address: str | None) -> None:
    """Ray passes a loopback address over in silence, and the brokers would listen to everybody."""
    if ray_address is not None:
        raise typer.BadParameter(
            "--node-ip-address is for a Ray that is started here; --ray-address names one that runs"
        )
    try:
        is_loopback = ipaddress.ip_address(node_ip).is_loopback
    except ValueError:
        raise typer.BadParameter(f"--node-ip-address {node_ip!r} is not an IP address") from None
    if is_loopback:
        raise typer.BadParameter(
            "Ray cannot be on a loopback address; for brokers that only this machine reaches say "
            f"-c bind_host={node_ip} instead of --node-ip-address"
        )


def _say_how_to_go_on(current: Current, settings: KeptSettings, changes: list[str]) -> None:
    output.say(
        f"Cluster {current.name!r} is up: {output.counted(len(current.brokers), 'broker')} at "
        f"{', '.join(current.brokers)}, data in {current.path}."
    )
    for change in changes:
        output.say(f"Not as at the last start: {change}")
    output.say(f"Kept for every later start: {said(settings.config) or 'no configs'}.")
    output.say("Next: rayq topic create TOPIC -p 6; rayq status; rayq stop.")
    variable = f" where RAYQ_HOME={home()}" if os.environ.get("RAYQ_HOME") else ""
    output.say(f"From Python on this machine{variable}: import rayq; cluster = rayq.connect()")
    if settings.config.get("bind_host") == LOOPBACK:
        output.say(
            f"Other machines do not reach {LOOPBACK}: for them start it with -c bind_host=ADDRESS, "
            "or bind_host=none for the address that this machine has then."
        )
    else:
        output.say(
            f'Elsewhere: rayq.connect("{current.brokers[0]}") with RAYQ_TOKEN set to what `rayq '
            "token` prints here."
        )


def _stay(current: Current) -> None:
    """Returns when the cluster is stopped, by a signal to this process or by `rayq stop` elsewhere.
    Raises RayqError where the Ray that was started with the cluster ended by itself."""
    sys.stdout.flush()
    session = current.ray_session
    try:
        while read_current() == current and (session is None or raylets_of(session)):
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        stop()
        raise
    with start_lock(wait=True):  # A `rayq stop` forgets the cluster after its Ray has ended.
        if read_current() == current:
            raise RayqError(
                f"The Ray of cluster {current.name!r} has ended by itself; its logs, in {session}, "
                f"may say why. The data stays in {current.path}: `rayq stop` ends what is left, "
                "then start again."
            )


def _check_nothing_runs(path: str, ray_address: str | None) -> None:
    """Raises RayqError where a current cluster runs already: with two of them `rayq stop` would not
    know which Ray to end.

    Every `ray up` starts the cluster again on the same path, in a Ray that `rayq start` did not
    start. Brokers of the previous Ray may still answer on other nodes, until these nodes join the
    new Ray. The start itself finds out whether the cluster runs in the new one."""
    current = read_current()
    if current is None:
        return
    is_begun_again = ray_address is not None and current.ray_session is None
    if is_begun_again and current.path == path:
        return
    if _answers(current):
        raise RayqError(
            f"Cluster {current.name!r} runs on {current.path} already, at "
            f"{', '.join(current.brokers)}: use it, or `rayq stop` it first. For a second cluster "
            "at the same time set RAYQ_HOME to another directory."
        )
    if current.ray_session is not None and processes_of(current.ray_session):
        raise RayqError(
            f"No broker of cluster {current.name!r} ({current.path}) answers, but its Ray still "
            "runs: `rayq stop` ends it, then start again."
        )


def _answers(current: Current) -> bool:
    with cluster_of(current) as cluster:
        try:
            check_answers(cluster)
        except NoClusterError:
            return False
    return True


def _start_cluster(
    path: str,
    address: str,
    session: str | None,
    brokers: int | None,
    nodes: int | None,
    name: str | None,
    port: int | None,
    config: dict[str, Any],
) -> tuple[Current, KeptSettings, list[str]]:
    """The cluster, what its data keeps, and what is not as it was at the last start."""
    with connected_to_ray(address):
        import ray

        spec, changes = start_or_find(
            path,
            brokers=brokers,
            nodes=nodes,
            name=name,
            port=port,
            exist_ok=False,
            config=config,
            defaults={} if session is None else {"bind_host": LOOPBACK},
        )
        assert spec.settings is not None
        with cluster_of_spec(spec) as cluster:
            current = Current(
                ray_address=str(ray.get_runtime_context().gcs_address),
                name=cluster.name,
                brokers=cluster.addresses,
                path=path,
                started_ray=session is not None,
                token=cluster.token,
                ray_session=session,
                config={key: getattr(spec.config, key) for key in TLS_FIELDS},
            )
        return current, spec.settings, changes


# --- stop -----------------------------------------------------------------------------------------


def stop(
    name: Annotated[
        str,
        typer.Option(
            "--name", help="The name of the cluster on RAY_ADDRESS, if there is no current cluster."
        ),
    ] = "default",
    ray_address: OtherRay = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Forget the current cluster if its Ray cannot be reached."),
    ] = False,
    json: Json = False,
) -> None:
    """Stop the current cluster, and the Ray that was started for it. The data stays."""
    with start_lock():
        current = read_current()
        if current is None:
            if ray_address is None:
                raise NoClusterError("There is no current cluster to stop.")
            _stop_cluster(ray_address, name)
            done = {"name": name, "path": None, "stopped_ray": False}
        else:
            with output.waiting(f"Stopping {current.name}"):
                _stop_current(current, force)
            done = {
                "name": current.name,
                "path": current.path,
                "stopped_ray": current.started_ray,
            }
            remove_current()
    if json:
        output.print_json(done)
    else:
        where = f"; its data stays in {done['path']}" if done["path"] else ""
        output.say(f"Cluster {done['name']!r} is stopped{where}.")


def _stop_current(current: Current, force: bool) -> None:
    session = current.ray_session
    if session is None:
        try:
            _stop_cluster(current.ray_address, current.name)
        except NoClusterError as error:
            if not force:
                raise RayqError(
                    f"{error} Where it is gone for good, `rayq stop --force` forgets the cluster."
                ) from error
        return
    # A Ray without its raylet runs nothing, and programs that join it wait forever.
    if raylets_of(session):
        # A Ray that does not answer is ended all the same: a broker may be killed at any moment.
        with contextlib.suppress(RayqError):
            _stop_cluster(current.ray_address, current.name)
    stop_ray(session, current.ray_address)


def _stop_cluster(address: str, name: str) -> None:
    with connected_to_ray(address):
        from rayq.runtime.ray import cluster as ray_cluster

        ray_cluster.stop_cluster(name)
