"""Where `rayq` begins and ends: every failure is one line on stderr and an exit code."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

OK, FAILED, USAGE, UNHEALTHY = 0, 1, 2, 3
INTERRUPTED, BROKEN_PIPE, TERMINATED = 130, 141, 143
"""As a shell reports programs that ended by SIGINT, SIGPIPE and SIGTERM."""
PROGRAM = "rayq"
COMPLETE = "_RAYQ_COMPLETE"
"""Set by a shell that wants to complete what was typed so far."""
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class Terminated(KeyboardInterrupt):
    """SIGTERM, as `timeout` and service managers send it: a member leaves its group and what was
    begun is undone, as after Ctrl+C."""


def main() -> None:
    """The console script."""
    _open_standard_streams()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        code = run(sys.argv[1:])
    except KeyboardInterrupt as interrupt:
        code = _code_of(interrupt)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = BROKEN_PIPE
    except OSError as error:
        code = _fail(_system_error(error), FAILED)
    if code != OK:
        # Or the interpreter would flush once more at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit code."""
    try:
        import rich  # noqa: F401
        import typer
    except ImportError as error:
        return _fail(f"The command needs {error.name}: pip install 'rayq[cli]'", FAILED)
    from rayq.cli.app import app
    from rayq.errors import RayqError

    command = typer.main.get_command(app)
    if COMPLETE in os.environ:
        command.main(list(arguments), prog_name=PROGRAM)
    try:
        _quiet_logs()
        with command.make_context(PROGRAM, list(arguments)) as context:
            command.invoke(context)
        return OK
    except typer.Exit as error:
        return error.exit_code
    except typer.TyperException as error:
        message = _usage(error)
        # Without one the help was asked for, by leaving out the verb; it is printed already.
        return _fail(message, error.exit_code) if message else error.exit_code
    except (KeyboardInterrupt, typer.Abort) as interrupt:
        return _code_of(interrupt)
    except BrokenPipeError:
        return BROKEN_PIPE
    except RayqError as error:
        return _fail(str(error), FAILED)
    except OSError as error:
        return _fail(_system_error(error), FAILED)
    except UnicodeEncodeError as error:
        return _fail(f"{error.object!r} is no {error.encoding}.", FAILED)


def _terminate(_number: int, _frame: object) -> None:
    raise Terminated


def _code_of(interrupt: BaseException) -> int:
    return TERMINATED if isinstance(interrupt, Terminated) else INTERRUPTED


def _open_standard_streams() -> None:
    """A stream that was closed (`>&-`) cannot be used, as with other programs; and its number must
    not go to the next connection."""
    useless = {"stdin": os.O_WRONLY, "stdout": os.O_RDONLY, "stderr": os.O_RDONLY}
    for number, (name, flags) in enumerate(useless.items()):
        if getattr(sys, name) is None:
            os.open(os.devnull, flags)
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _system_error(error: OSError) -> str:
    if error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror}."


def _usage(error: Exception) -> str:
    """A wrong use, and where to read how it is right."""
    message = str(getattr(error, "format_message", error.__str__)())
    context = getattr(error, "ctx", None)
    if context is None or not message:
        return message
    ended = message.rstrip(".")
    return f"{ended}{'' if ended.endswith('?') else '.'} See: {context.command_path} --help"


def _fail(message: str, code: int) -> int:
    text = " ".join(message.split())
    try:
        sys.stderr.write(f"Error: {text}\n")
        sys.stderr.flush()
    except OSError:
        pass
    return code


def _quiet_logs() -> None:
    """What the client logs on its way (a connection that broke and is made again) is no business
    of who typed a command; RAYQ_LOG=debug (or info, warning) shows it."""
    level = os.environ.get("RAYQ_LOG")
    if level:
        from rayq.errors import ConfigError

        if level.upper() not in LOG_LEVELS:
            raise ConfigError(f"RAYQ_LOG cannot be {level!r}: {', '.join(LOG_LEVELS).lower()}.")
        logging.basicConfig(stream=sys.stderr)
        logging.getLogger("rayq").setLevel(level.upper())
    else:
        log = logging.getLogger("rayq")
        log.addHandler(logging.NullHandler())
        log.propagate = False
