"""`python -m rayq.spark` says whether Spark can run on this machine, or what it lacks."""

from __future__ import annotations

import sys
from importlib.metadata import version

from rayq.errors import JavaError
from rayq.spark.session import check_java


def main() -> int:
    try:
        java = check_java()
    except JavaError as error:
        print(f"Spark cannot run here: {error}")
        return 1
    print(f"Spark {version('pyspark')} on Java {java}, with RayDP {version('raydp')}:")
    return 0


if __name__ == "__main__":
    sys.exit(main())
