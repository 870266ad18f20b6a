"""A Spark session on the Ray that rayq runs on, through RayDP.

RayDP waits forever if Ray has no room or a node has no Java. So both are checked first: the
executors' CPUs and memory are reserved as a placement group, which is either there within
`PATIENCE_S`, or is an error that says what is missing.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import ray
import raydp
from pyspark import SparkContext
from pyspark.sql import SparkSession
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from raydp.utils import parse_memory_size

from rayq.config import MIB
from rayq.errors import (
    ConfigError,
    JavaError,
    NotEnoughResourcesError,
    SparkSessionError,
)
from rayq.runtime.ray.connecting import ray_for
from rayq.spark.driver_output import without_noise
from rayq.spark.streaming_query import stop_active_queries

JAVA_MIN = 17
"""Minimum version of Java: RayDP gives its JVMs options that Java needs from this version on, and
may refuse before it."""
JAVA_END = 24
"""First version of Java without the security manager, which Spark 3.5 still uses."""
JAVA_INSTALL = "apt-get install -y openjdk-17-jre-headless"
MEMORY_MIN_BYTES = 450 * MIB
"""Minimum memory of an executor: Spark refuses less. This is one and a half times the memory that
it reserves for itself."""
PATIENCE_S = 20.0
"""Maximum time Ray may take to find room. It frees the room of an earlier session after a
moment."""
NODE_CHECK_TIMEOUT_S = 60.0

_OPENED = (
    "java.io",
    "java.lang",
    "java.lang.invoke",
    "java.lang.reflect",
    "java.math",
    "java.net",
    "java.nio",
    "java.text",
    "java.util",
    "java.util.concurrent",
    "java.util.concurrent.atomic",
    "sun.nio.ch",
    "sun.nio.cs",
    "sun.security.action",
    "sun.util.calendar",
)
"""The packages of the JDK whose internals Spark, Arrow and Ray's Java worker use."""
_JAVA_OPTIONS = " ".join(f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in _OPENED)
_JAVA_OPTION_KEYS = (
    "spark.driver.extraJavaOptions",
    "spark.executor.extraJavaOptions",
    "spark.ray.raydp_app_master.extraJavaOptions",
)
_LOG4J_KEY, _LOG4J_VARIABLE = "spark.log4j.config.file.name", "SPARK_LOG4J_CONFIG_FILE_NAME"
"""RayDP reads the log4j settings of the driver's JVM from the key, else from the variable."""
_LOG4J_FILE = os.path.join(os.path.dirname(__file__), "log4j2.properties")
_DEFAULTS = {
    # The master takes no CPU: otherwise it would wait for the CPUs that the executors reserve.
    "spark.ray.raydp_spark_master.actor.resource.CPU": "0",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.ui.showConsoleProgress": "false",
}


@contextlib.contextmanager
def session(
    app_name: str,
    executors: int = 1,
    cores: int = 2,
    memory: str = "1g",
    **conf: Any,
) -> Iterator[SparkSession]:
    """A `SparkSession` whose executors are Ray actors, for the length of a `with` block. Its end
    stops the active streaming queries.

    There are `executors` processes, each with `cores` tasks at once and a JVM with `memory` (such
    as "512m" or "2g"; Spark takes no less than 450 MiB). They are spread over the nodes of the Ray
    that this process is connected to, else of RAY_ADDRESS, else of the cluster that
    `rayq.connect()` finds, else of a local Ray, and reserve that many of its CPUs. `conf` are
    further Spark settings, with `_` for each `.` (`spark_sql_shuffle_partitions=8`) or, unchanged,
    `**{"spark.memory.fraction": 0.5}`.

    Every node needs Java 17 and the same Python environment at the same path. A process may have
    one session at a time. Raises JavaError, NotEnoughResourcesError (within 20 s, instead of
    waiting forever), SparkSessionError (another session is up, or RayDP failed), ConfigError,
    MissingExtraError.
    """
    memory_bytes = _check(executors, cores, memory)
    settings = _settings(conf)
    _check_no_other()
    check_java()
    ray_for(None)
    group = _reserve(executors, cores, memory, memory_bytes)
    try:
        _check_nodes(group)
        with _environment(), without_noise():
            spark = _start(app_name, executors, cores, memory, group, settings)
        try:
            yield spark
        finally:
            try:
                stop_active_queries()
            # Even after Ctrl+C, because a Spark that stays up would block the next session.
            finally:
                raydp.stop_spark()
    finally:
        ray.util.remove_placement_group(group)


def _check(executors: int, cores: int, memory: str) -> int:
    for name, value in (("executors", executors), ("cores", cores)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}.")
    try:
        found = int(parse_memory_size(memory))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(
            f"memory must be a size such as '1g' or '512m', not {memory!r}."
        ) from None
    if found < MEMORY_MIN_BYTES:
        raise ConfigError(
            "memory must be at least 450m, which is what Spark needs in an executor, not "
            f"{memory!r} ({found} bytes)."
        )
    return found


def _settings(conf: Mapping[str, Any]) -> dict[str, str]:
    """The settings of Spark. Those of the user override those of rayq."""
    settings = {_LOG4J_KEY: os.environ.get(_LOG4J_VARIABLE, _LOG4J_FILE), **_DEFAULTS}
    for given, value in conf.items():
        name = given if "." in given else given.replace("_", ".")
        if not name.startswith(("spark.", "raydp.")):
            raise ConfigError(
                f"{given!r} is not a Spark setting: those are named spark_... or 'spark....'."
            )
        settings[name] = str(value).lower() if isinstance(value, bool) else str(value)
    for name in _JAVA_OPTION_KEYS:
        settings[name] = f"{_JAVA_OPTIONS} {settings.get(name, '')}".strip()
    return settings


def _check_no_other() -> None:
    if SparkContext._active_spark_context is not None:
        name = SparkContext._active_spark_context.appName
        raise SparkSessionError(
            f"A Spark session ({name!r}) is up in this process, and there can be only one: leave "
            "its `with rayq.spark.session(...)` block, or call its stop(), first."
        )


# --- Java -----------------------------------------------------------------------------------------


def check_java() -> int:
    """The major version of the Java that Spark would use here. Raises JavaError."""
    home = os.environ.get("JAVA_HOME")
    places = [os.path.join(home, "bin", "java")] if home else []
    # RayDP's app master takes the Java on the PATH, Spark's driver the Java of JAVA_HOME.
    on_path = shutil.which("java")
    if on_path is None:
        raise JavaError(
            f"Spark needs Java {JAVA_MIN}, and there is no `java` on the PATH of this process. On "
            f"Debian or Ubuntu: {JAVA_INSTALL}"
        )
    found = 0
    for place in [*places, on_path]:
        found = _major_version(place)
        if not JAVA_MIN <= found < JAVA_END:
            why = "is too old" if found < JAVA_MIN else "is newer than Spark 3.5 can run on"
            raise JavaError(
                f"{place} is Java {found}, which {why}: Spark on Ray needs Java {JAVA_MIN} (or "
                f"one below {JAVA_END}). On Debian or Ubuntu: {JAVA_INSTALL}; then point PATH"
                f"{' and JAVA_HOME' if home else ''} to it."
            )
    return found


def _major_version(java: str) -> int:
    try:
        ran = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JavaError(
            f"{java} does not run: {error}. Spark needs Java {JAVA_MIN}; on Debian or Ubuntu: "
            f"{JAVA_INSTALL}"
        ) from error
    matched = re.search(r'version "(?:1\.)?(\d+)', ran.stderr + ran.stdout)
    if ran.returncode != 0 or matched is None:
        said = (ran.stderr or ran.stdout).strip()
        raise JavaError(f"{java} -version failed: {said!r}. Install Java again: {JAVA_INSTALL}")
    return int(matched[1])


# --- Ray ------------------------------------------------------------------------------------------


def _check_nodes(group: PlacementGroup) -> None:
    """Checks Java on the executors' nodes, whose JVMs use the `java` on the PATH of their raylet.
    Without it RayDP would wait forever."""
    here = ray.get_runtime_context().get_node_id()
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in _nodes()}
    placed = ray.util.placement_group_table(group)["bundles_to_node_id"]
    check = ray.remote(num_cpus=0, max_retries=0)(check_java)
    asked = {
        node: check.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        for node in {*placed.values()} - {here}
    }
    answers = {node: remote.remote() for node, remote in asked.items()}
    for node, answer in answers.items():
        try:
            ray.get(answer, timeout=NODE_CHECK_TIMEOUT_S)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, JavaError):
                raise JavaError(f"On the node {addresses.get(node)}: {error.cause}") from error
            raise SparkSessionError(
                f"The node {addresses.get(node)} could not be checked for Java: {error.cause}"
            ) from error
        except ray.exceptions.RayError as error:
            raise SparkSessionError(
                f"The node {addresses.get(node)} did not say whether it has Java: {error}"
            ) from error


def _reserve(executors: int, cores: int, memory: str, memory_bytes: int) -> PlacementGroup:
    bundles = [{"CPU": cores, "memory": memory_bytes} for _ in range(executors)]
    group: PlacementGroup = ray.util.placement_group(bundles, strategy="SPREAD")
    if group.wait(PATIENCE_S):
        return group
    free = ray.available_resources()  # type: ignore[no-untyped-call]
    total = ray.cluster_resources()  # type: ignore[no-untyped-call]
    ray.util.remove_placement_group(group)
    nodes = "; ".join(
        f"{node['NodeManagerAddress']}: {node['Resources'].get('CPU', 0):g} CPUs, "
        f"{_gigabytes(node['Resources'].get('memory', 0))}"
        for node in _nodes()
    )
    raise NotEnoughResourcesError(
        f"Ray has no room for {executors} Spark executor(s) with {cores} CPU(s) and {memory} of "
        f"memory each: {free.get('CPU', 0):g} of its {total.get('CPU', 0):g} CPUs and "
        f"{_gigabytes(free.get('memory', 0))} of its {_gigabytes(total.get('memory', 0))} are free "
        f"after {PATIENCE_S:g} s (nodes: {nodes}; an executor has to fit on one). Ask for fewer "
        "executors, cores or less memory, stop what holds the CPUs, or give Ray more: "
        "ray.init(num_cpus=...) or ray start --num-cpus."
    )


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def _address_here() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _gigabytes(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"


# --- Spark ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Sets the variables that Spark reads while it starts, and removes them afterwards."""
    wanted = {
        "PYSPARK_PYTHON": sys.executable,  # The executors have it at the same path.
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        # Without it the JVM looks up the name of its host, which may not resolve.
        "SPARK_LOCAL_IP": _address_here(),
    }
    added = [name for name in wanted if name not in os.environ]
    os.environ.update({name: wanted[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _start(
    app_name: str,
    executors: int,
    cores: int,
    memory: str,
    group: PlacementGroup,
    settings: dict[str, str],
) -> SparkSession:
    try:
        spark: SparkSession = raydp.init_spark(
            app_name, executors, cores, memory, placement_group=group, configs=settings
        )
    except Exception as error:  # RayDP and Py4J raise bare exceptions.
        raise SparkSessionError(
            f"RayDP could not start Spark {app_name!r}: {error}. The logs of its JVMs are in "
            "Ray's session directory, in logs/java-*.log."
        ) from error
    return spark
