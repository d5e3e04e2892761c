"""A sandbox for untrusted programs: separate namespaces, limits, no network, and only files of the interpreter and system libraries."""

from __future__ import annotations

import contextlib
import errno
import json
import marshal
import os
import select
import signal
import subprocess
import sys
import time
import types
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from puna.models.untrusted.bounded_process import CLOCK
from puna.stages.verifiers import sandbox_calls, sandbox_inside, sandbox_program, sandbox_tester, sandbox_wire
from puna.storage import PunaError

Mode = Literal["root", "user"]
"""Privileges that create the namespaces: root's, or a user's inside a user namespace."""
OUTPUT_BYTES = 1 << 16
GRACE_SECONDS = 10.0
MEGABYTE = 1 << 20
BEGIN = """
import marshal, sys, types
with open(0, "rb", 0, closefd=False) as given:
    size, data = int(given.read(10)), b""
    while len(data) < size:
        data += given.read(size - len(data))
modules, job = marshal.loads(data)
for name, code in modules:
    module = sys.modules[name] = types.ModuleType(name)
    exec(code, vars(module))
module.main({**job, "report": int(sys.argv[1])})
"""
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo")


@dataclass(frozen=True)
class Limits:
    """Limits of a run: CPU seconds (wall time: `CLOCK` times as much), memory and files (MiB), and the program's number of processes."""

    seconds: float = 10.0
    memory_mb: int = 512
    disk_mb: int = 64
    processes: int = 32


@dataclass(frozen=True)
class Outcome:
    """The outcome of running a program and its tests.

    results  per test None (passed) or the error; None if the run was refused, or ended before all tests did
    ended    why the run ended early, such as "time", "time by the clock", "memory", "signal 9"; otherwise empty
    output   the first 64 KiB of text printed by the program and the tests
    refused  why the sandbox could not run the program; otherwise empty"""

    results: list[str | None] | None
    ended: str
    output: str
    refused: str = ""


@cache
def mode() -> Mode:
    """Return how this machine isolates programs, after a trial run. Raise PunaError if isolation fails.

    An isolated program has no network, leaves no process, and reads only its own files and those of Python and the system."""
    if sys.platform != "linux":
        raise PunaError(f"code cannot be isolated here: there is no sandbox for {sys.platform}")
    way: Mode = "root" if os.getuid() == 0 else "user"
    trial = run("import math, random, threading", ["pass"], Limits(), way)
    if trial.results != [None]:
        reason = trial.refused or (trial.results or [None])[0] or trial.output.strip()[:200] or trial.ended or "no answer"
        raise PunaError(f"code cannot be isolated here: {reason}. Allow namespaces to this user (in a container: its seccomp profile)")
    return way


def run(program: str, tests: Sequence[str], limits: Limits, how: Mode, prefix: str = "") -> Outcome:
    """Run `prefix` + `program` in one process, `tests` in another with a copy of the prefix's `whole_statements`; return the outcome."""
    with group(limits.memory_mb * MEGABYTE) as memory:
        readable, hidden = _visible()
        procs = () if memory is None else (memory.procs,)
        job = {
            "mode": how, "readable": readable, "hidden": hidden,
            "seconds": limits.seconds, "clock_seconds": limits.seconds * CLOCK, "memory_bytes": limits.memory_mb * MEGABYTE,
            "disk_bytes": limits.disk_mb * MEGABYTE, "groups": procs,
            "processes": limits.processes + (how != "root"),
        }  # fmt: skip
        head = marshal.dumps((_modules(), job))
        tested = json.dumps({"program": f"{prefix}{program}", "prefix": prefix, "tests": list(tests)}).encode()
        message = f"{len(head):10d}".encode() + head + tested
        command = [_interpreter(), "-I", "-S", "-B", "-X", "utf8", "-c", BEGIN]
        verdict, output = _supervise(command, message, limits.seconds * CLOCK + GRACE_SECONDS, procs)
        over = memory is not None and memory.is_exceeded()
    text = output.decode("utf-8", "replace")
    if over:
        return Outcome(None, "memory", text)
    try:
        value: dict[str, Any] = json.loads(verdict.partition(b"\n")[0])
    except ValueError:
        return Outcome(None, "no report", text, "the sandbox returned no report")
    return Outcome(value.get("results"), value.get("ended", ""), text, value.get("refused", ""))


@cache
def _modules() -> list[tuple[str, types.CodeType]]:
    """Return (name, code) of the modules that run inside the sandbox; the entry module is last."""
    modules = (sandbox_wire, sandbox_calls, sandbox_program, sandbox_tester, sandbox_inside)
    return [(module.__name__, compile(Path(str(module.__file__)).read_bytes(), f"<{module.__name__}>", "exec")) for module in modules]


def _interpreter() -> str:
    return os.path.realpath(sys.executable)


@cache
def _visible() -> tuple[list[str], list[str]]:
    """Return the paths that a program may read (some are symbolic links), and the package folders inside them to hide."""
    standard = os.path.dirname(os.path.realpath(os.__file__))
    own = [standard, _interpreter(), *map(str, sorted(Path(_interpreter()).parents[1].glob("lib/libpython*")))]
    paths: list[str] = []
    for path in [*LIBRARIES, *own]:
        inside = any(path.startswith(f"{other}/") and not os.path.islink(other) for other in paths)
        if os.path.lexists(path) and not inside and path not in paths:
            paths.append(path)
    places = [f"{standard}/site-packages", f"{standard}/dist-packages", "/usr/lib/python3/dist-packages"]
    return paths, [path for path in sorted(set(places)) if os.path.isdir(path)]


def _supervise(command: list[str], job: bytes, seconds: float, handles: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Return report and output, at most 64 KiB each, of a command that reads `job` and inherits `handles`; kill it after `seconds`."""
    read, write = os.pipe()
    process = subprocess.Popen(
        [*command, str(write)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={},
        pass_fds=(write, *handles), start_new_session=True, cwd="/",
    )  # fmt: skip
    os.close(write)
    try:
        return _read(process, read, job, time.monotonic() + seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(read)


def _read(process: subprocess.Popen[bytes], report: int, job: bytes, end: float) -> tuple[bytes, bytes]:
    assert process.stdin is not None and process.stdout is not None
    with process.stdout as printed:
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(job)
        outputs = {report: b"", printed.fileno(): b""}
        open_pipes = set(outputs)
        while open_pipes and (left := end - time.monotonic()) > 0:
            for pipe in select.select(list(open_pipes), [], [], left)[0]:
                piece = os.read(pipe, 1 << 16)
                if not piece:
                    open_pipes.discard(pipe)
                outputs[pipe] += piece[: max(0, OUTPUT_BYTES - len(outputs[pipe]))]
            if report not in open_pipes:
                break
        return outputs[report], outputs[printed.fileno()]


MOUNT = "/sys/fs/cgroup"
OWN = "/proc/self/cgroup"
TRIES = 200  # maximum number of attempts, 5 ms apart, to remove a cgroup whose processes are still ending


class Group:
    """A cgroup (version 2). `procs`: a descriptor of its file `cgroup.procs`; a process joins the cgroup by writing 0 there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.procs = os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CREAT)

    def is_exceeded(self) -> bool:
        """True if the kernel killed a process because the cgroup exceeded its memory limit."""
        with contextlib.suppress(OSError):
            return int(dict(line.split() for line in (self.folder / "memory.events").read_text().splitlines())["oom_kill"]) > 0
        return False

    def close(self) -> None:
        """Kill the processes that remain in the cgroup, and remove it; give up after `TRIES` attempts."""
        os.close(self.procs)
        with contextlib.suppress(OSError):
            (self.folder / "cgroup.kill").write_text("1")
        for _ in range(TRIES):
            try:
                self.folder.rmdir()
            except OSError as error:
                if error.errno == errno.EBUSY:
                    time.sleep(0.005)
                    continue
            return


@contextlib.contextmanager
def group(memory_bytes: int) -> Iterator[Group | None]:
    """Yield a new cgroup with this memory limit, a sibling of this process's own, or None if it cannot be created; remove it afterwards."""
    folder = _beside()
    cgroup = None if folder is None else _create(folder / f"puna-code-{uuid.uuid4().hex}", memory_bytes)
    try:
        yield cgroup
    finally:
        if cgroup is not None:
            cgroup.close()


def _beside() -> Path | None:
    """Return a cgroup that allows children with memory limits: the parent of this process's cgroup, or the root cgroup; else None."""
    with contextlib.suppress(OSError):
        own = next((line[3:] for line in Path(OWN).read_text().splitlines() if line.startswith("0::")), None)
        if own is None or ".." in own:
            return None
        folder = Path(MOUNT) if own == "/" else (Path(MOUNT) / own.lstrip("/")).parent
        controllers = (folder / "cgroup.subtree_control").read_text().split()
        return folder if "memory" in controllers and os.access(folder / "cgroup.procs", os.W_OK) else None
    return None


def _create(folder: Path, memory_bytes: int) -> Group | None:
    try:
        folder.mkdir()
    except OSError:  # read-only, as in most containers
        return None
    try:
        (folder / "memory.max").write_text(str(memory_bytes))
        with contextlib.suppress(OSError):  # a kernel without swap
            (folder / "memory.swap.max").write_text("0")
        return Group(folder)
    except OSError:
        folder.rmdir()
        return None
