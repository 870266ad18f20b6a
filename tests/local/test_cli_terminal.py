"""The command in a real terminal: Ctrl+C, Ctrl+D, progress, colors."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pexpect
import pytest

from tests.local.cli_support import Command, program
from tests.local.support import eventually

TIMEOUT_S = 60


@pytest.fixture
def shell(rayq_command: Command) -> pexpect.spawn:
    """A bash in a terminal of its own, in which `rayq` is this checkout's command."""
    environment = {**rayq_command.environment, "PS1": "READY>", "TERM": "xterm-256color"}
    child = pexpect.spawn(
        "bash",
        ["--norc", "--noediting"],
        env=environment,
        timeout=TIMEOUT_S,
        encoding="utf-8",
        dimensions=(40, 150),
        echo=False,
        # The servers of this process have more descriptors than select can watch.
        use_poll=True,
    )
    child.expect_exact("READY>")
    ask(child, f'rayq() {{ {program()} "$@"; }}')
    yield child
    child.close(force=True)


def ask(shell: pexpect.spawn, line: str) -> str:
    """Types a line, waits for the next prompt, and returns the output."""
    shell.sendline(line)
    shell.expect_exact("READY>")
    return str(shell.before)


def code(shell: pexpect.spawn) -> int:
    return int(ask(shell, "echo $?").split()[-1])


def records(command: Command, topic: str) -> list[str]:
    return command.well("topic", "consume", topic, "-e").out.split()


def test_ctrl_c_ends_consume_quietly_with_130(
    shell: pexpect.spawn, rayq_command: Command, topic: str
) -> None:
    rayq_command.well("topic", "produce", topic, stdin=b"first\n")
    shell.sendline(f"rayq topic consume {topic}")
    shell.expect_exact("first")
    # The reader waits on and shows new records; an interrupt during the wait leaves nothing behind.
    rayq_command.well("topic", "produce", topic, stdin=b"second\n")
    shell.expect_exact("second")
    shell.sendintr()
    shell.expect_exact("READY>")
    assert "Traceback" not in shell.before and "Error" not in shell.before
    assert shell.before.replace("^C", "").strip() == ""
    assert code(shell) == 130


def test_ctrl_c_in_a_group_leaves_it_at_once(
    shell: pexpect.spawn, rayq_command: Command, topic: str
) -> None:
    group = f"terminal-{topic}"
    rayq_command.well("topic", "produce", topic, stdin=b"first\n")
    shell.sendline(f"rayq topic consume {topic} -g {group}")
    shell.expect_exact("first")
    admin = rayq_command.cluster.admin
    eventually(lambda: admin.describe_group(group).lag == 0, "what was shown is committed")
    shell.sendintr()
    shell.expect_exact("READY>")
    assert shell.before.replace("^C", "").strip() == ""
    assert code(shell) == 130
    assert admin.describe_group(group).members == []


def test_typed_lines_are_records_at_once_and_ctrl_d_ends_them(
    shell: pexpect.spawn, rayq_command: Command, topic: str
) -> None:
    shell.sendline(f"rayq topic produce {topic}")
    for number, line in enumerate(("hello", "world"), start=1):
        shell.sendline(line)
        eventually(lambda n=number: len(records(rayq_command, topic)) == n, "the line is a record")
    shell.sendeof()
    shell.expect_exact("Produced 2 records")
    shell.expect_exact("READY>")
    assert code(shell) == 0
    assert records(rayq_command, topic) == ["hello", "world"]


def test_ctrl_c_in_produce_delivers_what_was_typed(
    shell: pexpect.spawn, rayq_command: Command, topic: str
) -> None:
    shell.sendline(f"rayq topic produce {topic}")
    shell.sendline("typed")
    eventually(lambda: records(rayq_command, topic) == ["typed"], "the line is a record")
    shell.sendintr()
    shell.expect_exact("READY>")
    assert "Traceback" not in shell.before and "Error" not in shell.before
    assert code(shell) == 130
    assert records(rayq_command, topic) == ["typed"]


def test_ctrl_c_while_it_connects_is_quiet(shell: pexpect.spawn) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(TIMEOUT_S)
        shell.sendline(f"rayq topic list --cluster 127.0.0.1:{silent.getsockname()[1]}")
        with silent.accept()[0]:
            shell.sendintr()
            shell.expect_exact("READY>")
    assert shell.before.replace("^C", "").strip() == ""
    assert code(shell) == 130


@pytest.mark.thorough
def test_a_bar_moves_on_the_terminal_and_not_in_the_pipe(
    shell: pexpect.spawn, rayq_command: Command, topic: str, tmp_path: Path
) -> None:
    rayq_command.well("topic", "produce", topic, stdin=b"line\n" * 50_000)
    shown = ask(shell, f"rayq topic consume {topic} -e > {tmp_path}/out")
    assert "consuming" in shown and "50000" in shown.replace(",", "")
    assert Path(tmp_path / "out").read_bytes() == b"line\n" * 50_000
    shown = ask(shell, f"rayq topic produce {topic} < {tmp_path}/out")
    assert "producing" in shown and "Produced 50,000 records" in shown
    shown = ask(shell, f"rayq topic consume {topic} -e -n 2")
    assert shown.split() == ["line", "line"]
    shown = ask(shell, f"rayq topic consume {topic} -e 2> {tmp_path}/err | tail -1")
    assert shown.split() == ["line"]
    assert Path(tmp_path / "err").read_bytes() == b""


@pytest.mark.thorough
def test_tables_have_colors_on_a_terminal_and_none_in_a_pipe(
    shell: pexpect.spawn, topic: str
) -> None:
    assert "\x1b[" in ask(shell, f"rayq topic describe {topic}")
    assert "\x1b[" not in ask(shell, f"rayq topic describe {topic} | cat")


def test_what_deletes_asks_and_no_changes_nothing(
    shell: pexpect.spawn, rayq_command: Command, topic: str
) -> None:
    shell.sendline(f"rayq topic delete {topic}")
    shell.expect_exact(f"Delete {topic} with all records? [y/N] ")
    shell.sendline("n")
    shell.expect_exact("Nothing was changed.")
    shell.expect_exact("READY>")
    assert code(shell) == 1
    assert topic in rayq_command.cluster.admin.list_topics()


def test_a_group_is_shown_where_it_would_go_on_before_it_is_asked(
    shell: pexpect.spawn, rayq_command: Command, topic: str
) -> None:
    rayq_command.well("topic", "produce", topic, stdin=b"a\nb\n")
    shell.sendline(f"rayq group seek asked -t {topic} --to end")
    shell.expect_exact("Set the positions of group asked so? [y/N] ")
    assert "before" in shell.before and "after" in shell.before
    shell.sendline("y")
    shell.expect_exact("READY>")
    assert code(shell) == 0
    assert rayq_command.cluster.admin.describe_group("asked").lag == 0


def test_the_command_is_the_same_as_the_module() -> None:
    script = Path(sys.executable).with_name("rayq")
    assert "rayq.cli.main" in script.read_text()
