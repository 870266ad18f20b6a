"""Log files of rayq's processes on Ray: one each, beside Ray's own, `rayq-<cluster>-<what>.log`.

Ray copies what an actor prints to the driver that started the cluster, so only warnings are
printed. The files also have the lines that people look up: elections, in-sync sets, rebalances.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
import time
from io import TextIOWrapper

from ray._private import worker

logger = logging.getLogger(__name__)

FILE_BYTES_MAX = 10 * 1024**2
OLD_FILES_MAX = 2
FILE_MODE = 0o600
"""The lines name topics, groups, clients and addresses, and Ray's directory is open to all."""


class _LogFile(logging.handlers.RotatingFileHandler):
    """Log files that their owner alone reads."""

    def _open(self) -> TextIOWrapper:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, FILE_MODE)
        os.fchmod(descriptor, FILE_MODE)  # An older file may be open to all.
        return TextIOWrapper(open(descriptor, "ab"), encoding="utf-8", line_buffering=True)


def log_to_session(process_name: str) -> None:
    """Makes this process write rayq's log, from INFO on, into a file in the directory of Ray's logs
    (`ray logs` and the dashboard show it). The name is that of the actor."""
    node = worker.global_worker.node
    if node is None:
        return
    name = process_name.replace(":", "-")
    path = f"{node.get_logs_dir_path()}/{name}.log"
    try:
        handler = _LogFile(path, maxBytes=FILE_BYTES_MAX, backupCount=OLD_FILES_MAX)
    except OSError as error:
        logger.warning("no log file for %s: %s", process_name, error)
        return
    formatter = logging.Formatter(
        "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    handler.setLevel(logging.INFO)
    ours = logging.getLogger("rayq")
    ours.setLevel(logging.INFO)
    ours.addHandler(handler)
    if not logging.getLogger().handlers:  # As if rayq had no handler: warnings are printed.
        printing = logging.StreamHandler()
        printing.setLevel(logging.WARNING)
        ours.addHandler(printing)
