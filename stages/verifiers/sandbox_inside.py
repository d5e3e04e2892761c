"""Running one program and its tests inside a sandbox, started by `sandbox` as a script. Imports only the standard library.

The steps: enter new namespaces, and build a root file system of the interpreter and an empty folder. Run the program in one child and its
tests in another; each drops all privileges, sets limits and installs a system call filter. Monitor their time and memory. All processes end
with PID 1. The report goes to the file descriptor given as first argument, printed text to file descriptor 1.

Modes: `root` creates the namespaces with root's privileges, `user` inside a user namespace."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from typing import TypedDict

from puna.stages.verifiers.sandbox_calls import become_nobody, build_root, call, enter, refuse_calls
from puna.stages.verifiers.sandbox_program import Program
from puna.stages.verifiers.sandbox_tester import run_tests

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
FIRST_USER = 1_000_000_000
WATCH_SECONDS = 0.02
OPEN_FILES = 64
PIPES_BYTES = OPEN_FILES << 16  # maximum bytes in the pipes of one process: 64 KiB per open file
LOCK_BYTES = 256
AREA_BYTES, AREAS = 256, 65_530
"""Kernel memory per memory mapping (of a page or more) in bytes, and maximum number of mappings per process (`vm.max_map_count`)."""
INODE_BYTES = 1024  # kernel memory per file in addition to its content, in bytes


class Job(TypedDict):
    """A job: the program's isolation and limits. `user`: the program's user id; `socket_bytes`: default buffer of a Unix socket.

    `groups`: descriptor of `cgroup.procs`, through which a process joins the cgroup that limits its memory; empty without a cgroup."""

    report: int
    mode: str
    readable: list[str]
    hidden: list[str]
    seconds: float
    clock_seconds: float
    memory_bytes: int
    disk_bytes: int
    processes: int
    groups: tuple[int, ...]
    user: int
    socket_bytes: int


def main(job: Job) -> None:
    """Run the job, and report an OSError in setting up the sandbox. The tests' process reads program and tests from standard input."""
    try:
        supervise(job)
    except OSError as error:
        report(job, {"refused": str(error)})


def report(job: Job, value: dict[str, object]) -> None:
    with contextlib.suppress(OSError):
        os.write(job["report"], json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")[: 1 << 16] + b"\n")


def supervise(job: Job) -> None:
    """Set the job's `user` and `socket_bytes`, create the namespaces, start PID 1 in them, and wait until it ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the parent may have set it to be ignored
    job["user"] = FIRST_USER + 4 * os.getpid()  # no other process has this user id or the next two
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)  # no process can trace this one, or its descendants until they change user
    with open("/proc/sys/net/core/wmem_default") as handle:  # this file does not exist in the sandbox
        job["socket_bytes"] = int(handle.read())
    enter(job["mode"] == "user")
    first = os.fork()
    if first == 0:
        try:
            call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            init(job)
        except BaseException as error:  # noqa: BLE001  the process ends here, whatever happened
            report(job, {"refused": f"{type(error).__name__}: {error}"})
        finally:
            os._exit(0)
    os.waitpid(first, 0)


def init(job: Job) -> None:
    """Build the root file system, start the tests and the program, monitor them, and report. This process is PID 1: all end with it."""
    build_root(job["readable"], job["hidden"], job["disk_bytes"])
    (read, verdict), (asked, asks), (told, tells) = os.pipe(), os.pipe(), os.pipe()
    tester = fork(lambda: run_tester(job, told, asks, verdict, (job["report"], read, asked, tells)))
    program = fork(lambda: run_program(job, asked, tells, (job["report"], read, verdict, asks, told)))
    for handle in (0, verdict, asked, asks, told, tells):
        os.close(handle)
    if job["mode"] == "root":
        become_nobody("root", job["user"] + 1)
    report(job, watch(tester, program, read, job))


def fork(work: Callable[[], None]) -> int:
    """Run `work` in a child process and return its process id. On an exception, the child prints it and exits with status 1."""
    process = os.fork()
    if process == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:  # noqa: BLE001  the process ends here, whatever happened
            os.write(1, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(1)
    return process


def limit(job: Job) -> None:
    """Limit CPU time, address space, file size and open files of each process, and the user's processes; no core dumps or locked memory."""
    for kind, value in (
        (resource.RLIMIT_CPU, int(job["seconds"]) + 1), (resource.RLIMIT_AS, job["memory_bytes"]),
        (resource.RLIMIT_FSIZE, job["disk_bytes"]), (resource.RLIMIT_NPROC, job["processes"]), (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0), (resource.RLIMIT_MEMLOCK, 0), (resource.RLIMIT_SIGPENDING, OPEN_FILES),
    ):  # fmt: skip
        hard = resource.getrlimit(kind)[1]
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (allowed, allowed))


def run_program(job: Job, read: int, write: int, foreign: tuple[int, ...]) -> None:
    """Turn this process into the program under test, which has no tests, no input, and only its own ends of the pipes."""
    for handle in foreign:
        os.close(handle)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    confine(job, job["user"])
    os.dup2(1, 2)
    os.setsid()
    Program(read, write).run()


def run_tester(job: Job, read: int, write: int, verdict: int, foreign: tuple[int, ...]) -> None:
    """Turn this process into the tests' process. It cannot be traced, and only it has the standard input, which contains the tests."""
    for handle in foreign:
        os.close(handle)
    confine(job, job["user"] + 2)
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    run_tests(read, write, verdict)


def confine(job: Job, user: int) -> None:
    """Join the cgroup, if any; drop privileges, set limits and filter system calls, for this process and its children."""
    for procs in job["groups"]:
        os.write(procs, b"0")
        os.close(procs)
    become_nobody(job["mode"], user)
    limit(job)
    refuse_calls()


def watch(tester: int, program: int, read: int, job: Job) -> dict[str, object]:
    """Wait until the tests end or exceed a time or memory limit; return their results, or the reason for an early end."""
    end = time.monotonic() + job["clock_seconds"]
    message = b""
    while True:
        # End of file means that the tester, the only writer, is done.
        if select.select([read], [], [], WATCH_SECONDS)[0]:
            piece = os.read(read, 1 << 16)
            message += piece
            if piece:
                continue
            # On a busy machine, the time limit may be exceeded between two checks.
            if usage_of(job)[1] > job["seconds"]:
                return {"ended": "time"}
            break
        if time.monotonic() > end:
            return {"ended": "time by the clock"}
        memory, seconds = usage_of(job)
        if seconds > job["seconds"]:
            return {"ended": "time"}
        if memory > job["memory_bytes"]:
            return {"ended": "memory"}
    try:
        verdict: dict[str, object] = json.loads(message)
    except ValueError:
        return {"ended": _how(os.waitpid(tester, 0)[1]) or "the tests gave no result"}
    if "ended" in verdict and (status := os.waitpid(program, os.WNOHANG)[1]):
        verdict["ended"] = _how(status)
    return verdict


def _how(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}"
    return f"exit status {os.WEXITSTATUS(status)}" if status else ""


def usage_of(job: Job) -> tuple[int, float]:
    """Return the memory in bytes and the CPU seconds of all processes except PID 1. Memory: resident pages, files, sockets, locks, and the
    maximum that pipes and the kernel's records of memory mappings can use. CPU seconds include ended children."""
    page, total, ticks = resource.getpagesize(), files_in_memory() + kernel_holds(job["socket_bytes"]), 0
    for process in (name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()):
        total += PIPES_BYTES
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{process}/stat", "rb") as handle:
            fields = list(map(int, handle.read().rpartition(b")")[2].split()[1:23]))
            total += fields[20] * page + min(fields[19] // page, AREAS) * AREA_BYTES
            ticks += sum(fields[10:14])
    return total, ticks / os.sysconf("SC_CLK_TCK")


def files_in_memory() -> int:
    """Return the number of bytes used by the files in `/work`, a file system in memory: contents and inodes."""
    size = os.statvfs("/work")
    return (size.f_blocks - size.f_bfree) * size.f_frsize + (size.f_files - size.f_ffree) * INODE_BYTES


def kernel_holds(socket_bytes: int) -> int:
    """Return the number of bytes counted for file locks and Unix sockets: per socket a full buffer and as large a message."""
    with open("/proc/net/unix", "rb") as sockets, open("/proc/locks", "rb") as locks:  # bytes: programs choose socket names
        return sum(2 * socket_bytes for _ in sockets) + sum(LOCK_BYTES for _ in locks)
