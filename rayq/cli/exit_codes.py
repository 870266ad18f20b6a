"""Exit codes of `rayq`; documented in docs/command.md."""

from __future__ import annotations

OK, FAILED, USAGE, UNHEALTHY = 0, 1, 2, 3
HUNG_UP, INTERRUPTED, BROKEN_PIPE, TERMINATED = 129, 130, 141, 143
"""The codes by which a shell reports programs that ended by SIGHUP, SIGINT, SIGPIPE and SIGTERM."""
