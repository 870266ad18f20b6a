"""Ends every process of a run when the run ends, however it ends.

The guard is a process of its own that waits until its standard input closes: by `Guard.close`, or
because the kernel closed it after a SIGKILL of the run itself. Without a guard a stopped process
would outlive its parent.
"""

from __future__ import annotations

import os
import subprocess
import sys

from proving.chaos.processes import MARK, sweep

SWEEP_TIMEOUT_S = 30.0


class Guard:
    """See the module. Make it before anything else is started."""

    def __init__(self, run_id: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "proving.chaos.guard", run_id],
            stdin=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )

    def close(self) -> bool:
        """Ends all processes of the run. Returns whether no process is left."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(SWEEP_TIMEOUT_S) == 0


def main(arguments: list[str]) -> int:
    (run_id,) = arguments
    while sys.stdin.buffer.read(4096):
        pass
    return 0 if sweep(run_id) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
