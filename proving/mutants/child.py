"""Each check of the code runs in a process of its own: a copy of this one, without rayq, in which a
module may be imported with other code than its file holds.

No file of the working tree is touched. The process dies with its parent, and may use no more CPU,
memory and disk than a sane run. Its files go to a directory that is removed.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, MappingProxyType, ModuleType
from typing import Any

MEMORY_BYTES_MAX = 6 << 30
FILE_BYTES_MAX = 1 << 30
PR_SET_PDEATHSIG = 1
NO_NAMES: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True)
class Ended:
    """The end of a process: the result of its function, or None and why there is none."""

    returned: Any
    why: str
    cpu_s: float


def run(
    function: Callable[[Path], Any], *, scratch: Path, cpu_limit_s: float, limit_s: float
) -> Ended:
    """Runs `function(directory)` in a copy of this process. Its result must be JSON. The directory
    is removed at the end."""
    directory = Path(tempfile.mkdtemp(dir=scratch))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _be_the_child(function, directory, parent, cpu_limit_s)
    try:
        status = _wait(child, limit_s)
        answer = directory / "answer.json"
        returned = json.loads(answer.read_text()) if status == 0 and answer.exists() else None
        why = "" if returned is not None else _why(status, directory / "output.txt")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
        shutil.rmtree(directory, ignore_errors=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Ended(returned, why, cpu_s)


@contextlib.contextmanager
def scratch_directory(state: Path) -> Iterator[Path]:
    """A directory for all files of the processes. Removes first what a killed run has left."""
    scratch = state / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def import_instead(module: str, tree: ast.Module) -> None:
    """Makes an import of the module give the code of the tree. Raises ImportError when the module
    is imported already."""
    if module in sys.modules:
        raise ImportError(f"{module} is imported already.")
    import_changed(lambda fullname, origin: tree if fullname == module else None)


def import_changed(
    change: Callable[[str, str], ast.Module | None], names: Mapping[str, object] = NO_NAMES
) -> None:
    """Makes an import give the code of `change(module, path)`, or the file's where that is None. It
    finds these names besides its own."""
    sys.meta_path.insert(0, _Finder(change, names))


def is_imported_instead(module: str) -> bool:
    """Returns whether no code came from the module's file: also true where the module was not
    imported."""
    found = sys.modules.get(module)
    return found is None or isinstance(found.__loader__, _Loader)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(
        self, change: Callable[[str, str], ast.Module | None], names: Mapping[str, object]
    ) -> None:
        self._change = change
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        found = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if found is None or found.origin is None:
            return None
        tree = self._change(fullname, found.origin)
        if tree is None:
            return None
        return importlib.util.spec_from_file_location(
            fullname, found.origin, loader=_Loader(fullname, found.origin, tree, self._names)
        )


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(
        self, fullname: str, path: str, tree: ast.Module, names: Mapping[str, object]
    ) -> None:
        super().__init__(fullname, path)
        self._tree = tree
        self._names = names

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = compile(self._tree, self.path, "exec", dont_inherit=True)
        return code

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(self._names)
        super().exec_module(module)


def _be_the_child(
    function: Callable[[Path], Any], directory: Path, parent: int, cpu_limit_s: float
) -> None:
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        cpu_s = int(cpu_limit_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES_MAX, FILE_BYTES_MAX))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        output = os.open(directory / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for to, fd in ((0, nothing), (1, output), (2, output)):
            os.dup2(fd, to)
        sys.stdout = sys.stderr = os.fdopen(2, "w", closefd=False)
        os.environ["TMPDIR"] = str(directory)
        tempfile.tempdir = str(directory)
        # Examples that break a mutant are not to be tried on the real code later.
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(directory / "hypothesis")
        returned = function(directory)
        (directory / "answer.json").write_text(json.dumps(returned))
        status = 0
    except BaseException:  # noqa: BLE001 - whatever it is, it is how the mutant ended
        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(locals().get("status", 1))


def _wait(child: int, limit_s: float) -> int | None:
    """The exit code (of a signal: its negative number); None when the child did not end in time."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    return None


def _why(status: int | None, output: Path) -> str:
    if status is None or status == -signal.SIGXCPU:
        return "hang"
    if status < 0:
        return f"crash: {signal.Signals(-status).name}"
    lines = output.read_text(errors="replace").split("\n") if output.exists() else []
    last = next((line for line in reversed(lines) if line.strip()), "")
    return f"crash: {last.strip()[:200] or f'ended with {status}'}"
