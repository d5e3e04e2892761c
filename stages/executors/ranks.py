"""Processes of distributed stages: rank 0 runs the flow, and the other ranks, called followers, join it in each stage with `ranks=True`.

torchrun, srun, or `start` on this machine, starts all processes with the same command line. Rank 0 sends jobs to the followers through the
key-value store of torch.distributed; results are exchanged within the stage, not through that store."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import math
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from puna.models.training.parallel.layout import Layout
from puna.stages.executors.processes import cores
from puna.storage import PunaError, errors_at

if TYPE_CHECKING:
    from puna.models.training.parallel.mesh import Mesh

T = TypeVar("T")

RESTARTS = 3  # maximum number of times that all processes are restarted after one was killed; they resume from the last saved state
LOOK = 0.05  # seconds between a follower's polls for its next job
LAST_WORDS = 5.0  # seconds that a failed follower waits, so that rank 0, whose error is more informative, can end first
JOINED = "PUNA_JOINED"  # environment variable with a pipe of `start`, which each rank closes when it has joined
END, GONE = "end", "the process with the key-value store of all ranks is gone: rank 0, or an agent of torchrun"
ONE = Layout()
_jobs = itertools.count()  # numbers of the jobs that rank 0 sends
_lines: Counter[int] = Counter()  # lines of each rank's log that were sent or received


def number(name: str, default: int = 0, least: int = 0) -> int:
    """Return an environment variable of the launch. Raise PunaError if it is set, but not to a whole number of at least `least`."""
    text = os.environ.get(name, str(default)) or "(empty)"
    if not text.isdecimal() or int(text) < least:
        raise PunaError(f"{name}={text}: must be a whole number of at least {least}; unset it, or let torchrun or --processes set it")
    return int(text)


def slurm() -> dict[str, str]:
    """Return torch's variables for this task of a Slurm step: none if the step has one task or WORLD_SIZE is set. Raise PunaError if one of
    Slurm's variables is missing."""
    tasks = 1 if "WORLD_SIZE" in os.environ else number("SLURM_STEP_NUM_TASKS", 1)
    if tasks == 1:
        return {}
    names = (f"SLURM_{name}" for name in ["JOB_ID", "STEP_ID", "STEP_NODELIST", "STEP_TASKS_PER_NODE", "NODEID", "PROCID", "LOCALID"])
    if missing := ", ".join(name for name in names if not os.environ.get(name)):
        raise PunaError(f"this is one of {tasks} tasks of a Slurm step, and cannot join the others without {missing}: start all with srun, "
                        "or set WORLD_SIZE=1 for a run of its own")  # fmt: skip
    node, job, step = (number(f"SLURM_{name}") for name in ("NODEID", "JOB_ID", "STEP_ID"))
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ["SLURM_STEP_TASKS_PER_NODE"])  # 8(x2),4: 8 tasks on two nodes, then 4
    here = [size for size, times in counts for _ in range(int(times or 1))][node : node + 1]
    # Of n[07-09,12]-ib,m1 the first host is n07-ib. The port is below those that the system gives out, and differs between steps.
    host = re.sub(r"\[([^],-]+)[^]]*\]", r"\1", os.environ["SLURM_STEP_NODELIST"]).split(",")[0]
    own = {
        "MASTER_ADDR": host, "MASTER_PORT": str(10_000 + (31 * job + step) % 10_000), "LOCAL_WORLD_SIZE": here[0] if here else "1",
        "WORLD_SIZE": str(tasks), "RANK": os.environ["SLURM_PROCID"], "LOCAL_RANK": os.environ["SLURM_LOCALID"],
        "OMP_NUM_THREADS": os.environ.get("SLURM_CPUS_PER_TASK", "1"),
    }  # fmt: skip
    return {name: value for name, value in own.items() if name not in os.environ}


def count() -> int:
    """Return the number of processes in this launch."""
    return number("WORLD_SIZE", 1, 1)


def follows() -> bool:
    """True in every process except rank 0."""
    return count() > 1 and number("RANK") > 0


def join() -> None:
    """Join the process group of this launch, if there is one. Raise PunaError if an environment variable or another rank is missing."""
    if count() == 1:
        return
    for name in ("MASTER_PORT", "LOCAL_RANK"):
        number(name)
    if number("RANK") >= count():
        raise PunaError(f"RANK={number('RANK')}: the ranks of WORLD_SIZE={count()} processes are 0 to {count() - 1}; number them so")
    if JOINED in os.environ and sys.platform == "linux":
        if not number("RANK"):
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: if the launcher is killed, rank 0 stops, and so do the others
        (launcher := select.poll()).register(int(os.environ[JOINED]), 0)
        if launcher.poll(0):  # it was killed before: the pipe has no reader
            raise SystemExit(1)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else each lost connection is a page of C++ frames; our errors name the rank
    import torch

    from puna.models.training.parallel import mesh

    with errors_at("", ValueError, ConnectionError):
        mesh.join("cuda" if torch.cuda.is_available() else "cpu")
    if pipe := os.environ.pop(JOINED, None):
        os.close(int(pipe))


@contextlib.contextmanager
def together(job: dict[str, Any] | None) -> Iterator[None]:
    """Run a stage on all processes inside the `with` block. Rank 0 sends `job` to the followers, which pass None. Raise PunaError if an
    exchange with another rank fails."""
    from puna.models.training.parallel import mesh

    mesh.together = True
    try:
        if job is not None:
            _say(json.dumps(job))
        yield
    except RuntimeError as error:
        if not mesh.is_of_exchange(error):
            raise
        line = f"an exchange with another rank failed: {str(error).splitlines()[0]}"
        raise PunaError(line if job is None else f"rank 0: {line}; {_last_words()}") from error
    finally:
        mesh.together = False


def mesh(layout: Layout = ONE) -> Mesh:
    """Return the mesh of the processes that run a stage together; a mesh of one if a single process runs it."""
    from puna.models.training.parallel.mesh import Mesh, layout_of

    return Mesh(layout_of(layout))


def agree(wish: bool) -> bool:
    """True if `wish` is true on any rank that runs the stage."""
    return wish if count() == 1 else mesh().agree(wish)


def first(value: T) -> T:
    """Return rank 0's JSON value on all ranks that run the stage. Their own values may differ by rounding, but all must decide alike."""
    return cast("T", json.loads(mesh().gather_texts(json.dumps(value))[0]))


def dealt(
    items: Sequence[T], compute: Callable[[list[T]], list[Any]], layout: Layout, key: Callable[[T], Hashable] = lambda item: item
) -> list[Any]:
    """Return `compute(items)`, a JSON value per item in order, on every rank. Each rank (or group of a layout) computes a share of the
    items; items with equal keys are in the same share."""
    return mesh(layout).dealt(items, compute, key)


def _last_words() -> str:
    """Return, after `LAST_WORDS` / 2 seconds, the errors that other ranks have reported, and the ranks that have reported none."""
    from puna.models.training.parallel import mesh

    time.sleep(LAST_WORDS / 2)
    keys = {rank: f"words-{rank}" for rank in range(1, count())}
    try:
        words = [mesh.store().get(key).decode() if mesh.store().check([key]) else f"rank {rank}: no report" for rank, key in keys.items()]
    except RuntimeError:
        return GONE
    return "; ".join(words) + f" (a rank without a report hangs, which the others notice after {mesh.TIMEOUT}, or its machine is gone)"


def tell(line: str) -> None:
    """Send a line of this process's log to rank 0."""
    from puna.models.training.parallel import mesh

    rank = number("RANK")
    if _lines[rank] >= 0:
        _lines[rank] += 1
        try:
            mesh.store().set(f"line-{rank}-{_lines[rank]}", line)
        except RuntimeError:
            _lines[rank] = -1  # the store is gone; torch may log each further try, in lines to be sent


def lines_of_ranks() -> list[str]:
    """Return the log lines that other ranks have sent to rank 0 since the last call, each prefixed with `rank N: `."""
    if count() == 1:
        return []
    from puna.models.training.parallel import mesh

    lines, store = [], mesh.store()
    for rank in range(1, count() if store is not None else 1):  # no store: this process has not joined a group
        while store.check([key := f"line-{rank}-{_lines[rank] + 1}"]):
            _lines[rank] += 1
            lines.append(f"rank {rank}: {store.get(key).decode()}")
    return lines


def follow(do: Callable[[dict[str, Any]], None]) -> None:
    """Run the jobs that rank 0 sends, until it sends `END`. If a job fails or rank 0 is gone, report it and exit with status 1."""
    from puna.models.training.parallel import mesh

    for number in itertools.count():
        try:
            while not mesh.store().check([f"job-{number}"]):  # `wait` would block this process's log lines
                time.sleep(LOOK)
            text = mesh.store().get(f"job-{number}").decode()
            if text == END:
                return mesh.Mesh(Layout(data=count())).wait()
            do(json.loads(text))
        except SystemExit as error:  # rank 0 says that the run was stopped
            raise SystemExit(1) from error
        except Exception as error:
            gone = isinstance(error, RuntimeError) and mesh.is_of_exchange(error)
            time.sleep(LAST_WORDS * gone)  # rank 0's own error is more informative
            words = f"rank {os.environ['RANK']}: {GONE if gone else f'{type(error).__name__}: {error}'}"
            print(words, file=sys.stderr)
            with contextlib.suppress(RuntimeError):
                mesh.store().set(f"words-{os.environ['RANK']}", words.splitlines()[0])
            time.sleep(LAST_WORDS)
            raise SystemExit(1) from error


def finish() -> None:
    """Tell the followers to end, and wait for them, since they may still use the key-value store, which may end with this rank."""
    if count() > 1:
        from puna.models.training.parallel import mesh

        _say(END)
        mesh.Mesh(Layout(data=count())).wait()


def _say(text: str) -> None:
    from puna.models.training.parallel import mesh

    mesh.store().set(f"job-{next(_jobs)}", text)


def start(command: Sequence[str], processes: int) -> int:
    """Run a command in `processes` processes on this machine, like torchrun, and return an exit status.

    If a signal kills one process, all are killed and restarted, at most `RESTARTS` times. Ctrl-C, SIGTERM and SIGHUP stop rank 0, which
    saves its state; a second one ends all after `LAST_WORDS`. Only rank 0 has stdin and stdout; all ranks have stderr."""
    for attempt in range(RESTARTS + 1):
        status = _attempt(command, processes, attempt)
        if status >= 0:
            return status
        end = "all restart from the last saved state" if attempt < RESTARTS else f"the run ends after {RESTARTS} restarts; start it again"
        print(f"a process was ended by {signal.Signals(-status).name}: {end}", file=sys.stderr)
    return 1


def _attempt(command: Sequence[str], processes: int, attempt: int) -> int:
    """Run all ranks. Return the exit status of rank 0, else of another failed rank, else 0; 128 plus the number of the signal to this
    process that ended them. If a signal killed a rank and no stop was requested, return minus that signal's number."""
    joined, pipe = os.pipe()
    workers, stops, deadline = list[subprocess.Popen[bytes]](), list[int](), math.inf

    def stop(number: int, _: Any) -> None:
        nonlocal deadline
        stops.append(number)
        if not select.select([joined], [], [], 0)[0]:
            deadline = 0.0  # no rank has begun to work
        elif len(stops) == 1:
            workers[0].send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
        elif signal.SIGHUP not in (number, stops[0]):  # a terminal that closes sends it twice, and a logout also SIGTERM
            deadline = min(deadline, time.monotonic() + LAST_WORDS)
            workers[0].send_signal(number)

    def wait(done: Callable[[], bool]) -> None:
        while not done() and time.monotonic() < deadline:
            time.sleep(0.2)

    numbers = [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        for worker in _spawned(command, processes, attempt, pipe):
            workers.append(worker)
        wait(lambda: any(worker.poll() for worker in workers) or all(worker.poll() == 0 for worker in workers))
        statuses = [worker.poll() for worker in workers]
        killed = next((status for status in statuses if status is not None and status < 0), None)
        # Rank 0's next exchange fails with an error that is more informative than a follower's.
        wait(lambda: (killed is not None and not stops) or workers[0].poll() is not None)
        status = workers[0].poll()
    finally:
        for worker in reversed(workers):  # rank 0 last: the others would say that it is gone
            worker.kill()
        for worker in workers:
            worker.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(joined)
    if killed is not None and not stops:
        return killed
    if stops and not deadline:
        with contextlib.suppress(OSError):  # of a closed terminal
            print("stopped before all processes had started; start the same command again", file=sys.stderr, flush=True)
    if stops and (status is None or status < 0):
        return 128 + stops[0]
    return abs(status or 0) or next((abs(one) for one in statuses if one), 0)


def _spawned(command: Sequence[str], processes: int, attempt: int, pipe: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start the ranks, in separate sessions: a terminal's Ctrl-C would reach all at once, in the middle of different steps."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // processes)))
    own = {
        "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(attempt), "OMP_NUM_THREADS": threads, JOINED: str(pipe),
    }  # fmt: skip
    with os.fdopen(pipe, "wb"):
        for rank in map(str, range(processes)):
            file, environment = None if rank == "0" else subprocess.DEVNULL, os.environ | own | {"RANK": rank, "LOCAL_RANK": rank}
            yield subprocess.Popen(command, env=environment, start_new_session=True, stdin=file, stdout=file, pass_fds=[pipe])
