"""Connections up to the limit of file descriptors cost no replica its files."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time

from proving.raw_socket import RawSocket
from rayq.errors import OverloadedError
from rayq.wire.tokens import key_of_token

CONNECTIONS = 320


def test_connections_up_to_the_limit_stop_no_replica_and_topics_that_do_not_fit_are_refused() -> None:
    servers = subprocess.Popen(
        [sys.executable, "-m", "tests.local.few_descriptors"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert servers.stdin is not None and servers.stdout is not None
    opened: list[RawSocket] = []
    refused = 0
    try:
        told = json.loads(servers.stdout.readline())
        key = key_of_token(told["token"])
        for number in range(CONNECTIONS):
            try:
                client = RawSocket(tuple(told["endpoints"][number % 2]), timeout_s=60)
                client.authenticate(key)
                opened.append(client)
            except (OverloadedError, OSError):
                refused += 1
        time.sleep(0.2)  # Segments are rolled meanwhile.
        for client in opened:
            client.close()
        output, errors = servers.communicate(timeout=400)
    finally:
        with contextlib.suppress(ProcessLookupError):
            servers.kill()
        servers.wait()
    assert servers.returncode == 0, errors
    assert "Traceback" not in errors
    result = json.loads(output)
    assert len(opened) > 100
    assert refused > 0
    assert result["read"] == result["acknowledged"] > 0
    assert "ulimit -n" in result["refusal"]
