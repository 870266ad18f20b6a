"""Kafka's servers by Maven and its Python client by pip, into the ignored folder .bench/peers.

Neither becomes a dependency of rayq: the servers' jars and the client lie in folders of their own.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HOME = Path(".bench") / "peers"
KAFKA_VERSION = "4.1.1"
CLIENT = "confluent-kafka==2.16.1"
POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>peers</groupId>
  <artifactId>peers</artifactId>
  <version>1</version>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId>
      <artifactId>kafka_2.13</artifactId>
      <version>{KAFKA_VERSION}</version>
    </dependency>
    <dependency>
      <groupId>org.slf4j</groupId>
      <artifactId>slf4j-nop</artifactId>
      <version>1.7.36</version>
    </dependency>
  </dependencies>
</project>
"""


class Installed(NamedTuple):
    jars: Path
    client: Path
    """For `sys.path`."""


def why_not() -> str | None:
    """What this machine lacks to run Kafka; None: nothing."""
    missing = [name for name in ("java", "mvn") if shutil.which(name) is None]
    return f"there is no {' and no '.join(missing)} on the PATH" if missing else None


def install() -> Installed:
    """Downloads what is not there yet. Raises CalledProcessError."""
    installed = Installed((HOME / KAFKA_VERSION / "jars").resolve(), (HOME / "client").resolve())
    if not installed.jars.exists():
        project = installed.jars.parent
        project.mkdir(parents=True, exist_ok=True)
        (project / "pom.xml").write_text(POM)
        _run(
            *("mvn", "--quiet", "--batch-mode", "--file", str(project / "pom.xml")),
            *("dependency:copy-dependencies", "-DoutputDirectory=jars.part"),
        )
        (project / "jars.part").rename(installed.jars)
    if not installed.client.exists():
        part = installed.client.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        _run(*(sys.executable, "-m", "pip", "install", "--quiet", "--target", str(part), CLIENT))
        part.rename(installed.client)
    return installed


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
