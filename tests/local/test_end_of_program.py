"""Programs that end while all of it is open: the cluster, producers, consumers, sends."""

from __future__ import annotations

import pytest

from tests.programs import run_to_its_end


@pytest.mark.slow
def test_events_that_come_after_the_interpreter_has_ended_harm_nobody() -> None:
    """The libraries of a process may take their time once its interpreter has ended: here they
    sleep for as many seconds as the exit code says. An event that reached an event loop then ended
    the process by SIGSEGV."""
    ended = run_to_its_end(
        "import ctypes, sys\n"
        "library = ctypes.CDLL(None)\n"
        "library.on_exit(library.sleep, None)\n"
        "from rayq.testing import LocalCluster\n"
        "cluster = LocalCluster()\n"
        "cluster.create_topic('t')\n"
        "producer = cluster.producer()\n"
        "producer.send('t', b'v').result(60)\n"
        "consumer = cluster.consumer('t', group='g', auto_offset_reset='earliest')\n"
        "print([record.value for record in consumer.poll(60)])\n"
        "sys.exit(2)\n"
    )
    assert ended == (2, "[b'v']\n", "")


@pytest.mark.slow
def test_what_is_asked_when_the_loop_has_been_left_is_refused_and_waits_for_nothing() -> None:
    exit_code, told, complained = run_to_its_end(
        "import atexit\n"
        "from rayq.errors import ClosedError, OutcomeUnknownError\n"
        "@atexit.register\n"
        "def called_last():\n"
        "    for ask in (future.result, consumer.close, cluster.admin.list_topics, cluster.stop):\n"
        "        try:\n"
        "            ask()\n"
        "        except (ClosedError, OutcomeUnknownError) as error:\n"
        "            print(error)\n"
        "    producer.close()\n"
        "from rayq.client import finalizers\n"
        "from rayq.testing import LocalCluster\n"
        "finalizers.LAST_PATIENCE_S = 0.3\n"
        "cluster = LocalCluster()\n"
        "cluster.create_topic('t')\n"
        "consumer = cluster.consumer('t')\n"
        "producer = cluster.producer()\n"
        "producer.send('t', b'v').result(60)\n"
        "cluster.kill_broker(0)\n"
        "future = producer.send('t', b'w')\n"
    )
    assert exit_code == 0, complained
    lost, *refused = told.splitlines()
    # The broker may have gone just before, or just after it was sent.
    assert "It was not written." in lost or "may or may not be written" in lost
    assert len(refused) == 3 and all("The program is ending" in line for line in refused)
    assert "1 record was not delivered before the program ended" in complained
    assert "Traceback" not in complained
