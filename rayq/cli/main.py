"""Entry point of `rayq`: turns every failure into one line on stderr and an exit code.

The imports at the top load quickly, so that `main` handles Ctrl+C before anything else is loaded.
"""

from __future__ import annotations

import errno
import os
import signal
import sys

from rayq.cli.exit_codes import (
    BROKEN_PIPE,
    FAILED,
    HUNG_UP,
    INTERRUPTED,
    OK,
    TERMINATED,
    USAGE,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM = "rayq"
COMPLETE = "_RAYQ_COMPLETE"
"""Set by a shell that wants to complete what was typed so far."""
CODES: dict[int, int] = {
    signal.SIGHUP: HUNG_UP,
    signal.SIGINT: INTERRUPTED,
    signal.SIGTERM: TERMINATED,
}
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class Terminated(KeyboardInterrupt):
    """SIGTERM, as `timeout` and service managers send it, or SIGHUP, of a terminal that goes away:
    a member leaves its group and what was begun is undone, as after Ctrl+C."""

    def __init__(self, code: int) -> None:
        self.code = code


def main() -> None:
    """The console script."""
    is_interruptible = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN  # nohup, or a `&`
    is_hung_up_on = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN  # nohup
    if is_interruptible:
        signal.signal(signal.SIGINT, _quit)
    closed = _open_standard_streams()
    from rayq.cli.streams import let_standard_streams_wait

    let_standard_streams_wait()
    if sys.argv[1:] == ["--version"]:
        from rayq import __version__

        sys.stdout.write(f"{__version__}\n")
        sys.exit(_flush(closed, OK))
    try:
        import rayq.cli.app  # noqa: F401  # An interrupt amid imports would be told, or swallowed.
    except ImportError:
        pass  # `run` says what is missing.
    try:
        try:
            if is_interruptible:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, _terminate)
            if is_hung_up_on:
                signal.signal(signal.SIGHUP, _terminate)
            code = run(sys.argv[1:], closed)
        finally:
            # There is nothing left to undo.
            if is_interruptible:
                signal.signal(signal.SIGINT, _quit)
            signal.signal(signal.SIGTERM, _quit)
            if is_hung_up_on:
                signal.signal(signal.SIGHUP, _quit)
    except KeyboardInterrupt as interrupt:
        code = _code_of(interrupt)
    code = _flush(closed, code)
    if code != OK:
        # Or the interpreter would flush once more at its end, complain, and end with 120.
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)


def run(arguments: Sequence[str], closed: Sequence[str] = ()) -> int:
    """Runs one command and returns its exit code. `closed` are the standard streams that were
    closed when the program began."""
    try:
        import rich  # noqa: F401
        import typer
    except ImportError as error:
        return _fail(f"The command needs {error.name}: pip install 'rayq[cli]'", FAILED)
    from rayq.cli.app import app
    from rayq.cli.values import WrongUseError
    from rayq.errors import ConfigError, InvalidTopicError, RayqError

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
        return _fail(_usage(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort) as interrupt:
        return _code_of(interrupt)
    except BrokenPipeError:
        return BROKEN_PIPE
    except (ConfigError, InvalidTopicError, WrongUseError) as error:
        return _fail(str(error), USAGE)
    except RayqError as error:
        return _fail(str(error), FAILED)
    except OSError as error:
        return _fail(_system_error(error, closed), FAILED)
    except UnicodeEncodeError as error:
        return _fail(f"{error.object!r} is not {error.encoding}.", FAILED)


def _quit(number: int, _frame: object) -> None:
    os._exit(CODES[number])


def _terminate(number: int, _frame: object) -> None:
    raise Terminated(CODES[number])


def _code_of(interrupt: BaseException) -> int:
    return interrupt.code if isinstance(interrupt, Terminated) else INTERRUPTED


def _open_standard_streams() -> list[str]:
    """Opens the standard streams that were closed (`>&-`), and returns their names. They stay
    useless, as with other programs, but no connection gets their numbers."""
    useless = {"stdin": os.O_WRONLY, "stdout": os.O_RDONLY, "stderr": os.O_RDONLY}
    closed = [name for name in useless if getattr(sys, name) is None]
    for number, (name, flags) in enumerate(useless.items()):
        if name in closed:
            os.open(os.devnull, flags)
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
    return closed


def _flush(closed: Sequence[str], code: int) -> int:
    """Returns the exit code once all output was written."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return BROKEN_PIPE
    except OSError as error:
        return _fail(_system_error(error, closed), FAILED)
    return code


def _system_error(error: OSError, closed: Sequence[str]) -> str:
    if error.errno == errno.EBADF and closed:
        return f"{' and '.join(closed)} {'is' if len(closed) == 1 else 'are'} closed."
    if error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror}."


def _usage(error: Exception) -> str:
    """The message for a wrong use, and where to find the command's help."""
    message = str(getattr(error, "format_message", error.__str__)())
    context = getattr(error, "ctx", None)
    if context is None or not message:
        return message
    from rayq.errors import sentence

    return f"{sentence(message)} See: {context.command_path} --help"


def _fail(message: str, code: int) -> int:
    from rayq.cli.terminal_safe import visible

    lines = [f"Error: {visible(' '.join(message.split()))}"]
    if sys.stderr.isatty():
        import shutil

        from rayq.cli.layout import fold

        lines = fold(lines[0], shutil.get_terminal_size().columns)
    try:
        sys.stderr.write("\n".join(lines) + "\n")
        sys.stderr.flush()
    except OSError:
        pass
    return code


def _quiet_logs() -> None:
    """Hides what the client logs (of a connection that broke and is made again, for example) from
    the user of a command. RAYQ_LOG=debug (or info, warning) shows it."""
    import logging

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
