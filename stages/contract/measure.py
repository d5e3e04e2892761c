"""Measurement of a stage's time and memory, in its own process and in all workers, local or remote."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Executor
from pathlib import Path
from types import TracebackType

import psutil

from puna.stages.executors import PartExecutor

EVERY_SECONDS = 0.2
CPU_FILE = "cpu_seconds"  # in a stage's scratch folder; other ranks add their number
LOOKS = 10  # number of memory samples between two listings of the child processes; a listing takes milliseconds


class Meter:
    """A meter of the code inside its `with` block: `seconds`, `cpu_seconds` and `peak_bytes`.

    They cover this process, its `multiprocessing` workers and the processes started inside the block, but not older ones, such as a server.
    `cpu_seconds` is user plus system time. `peak_bytes` is the largest sum of resident memory, sampled every 0.2 seconds; shared memory is
    counted once per process. New processes are found within two seconds. Workers of a cluster report to `executor`, and other ranks to
    `rank_jobs.call`: all their CPU time counts, but only the memory of the largest. `file`: a file of the CPU seconds so far, to which the
    seconds of this attempt are added, every two seconds and at the end, if it can be written."""

    def __init__(self, executor: Executor | None = None, file: Path | None = None) -> None:
        self._file, self._earlier = file, 0.0
        with contextlib.suppress(OSError, ValueError):
            self._earlier = float(file.read_text()) if file else 0.0
        self._cluster = executor if isinstance(executor, PartExecutor) and not executor.below else None

    def __enter__(self) -> Meter:
        self._me = psutil.Process()
        workers = {process.pid for process in multiprocessing.active_children()}
        family = _children(self._me)
        self._beside = {p.pid for p in family if p.pid not in workers}
        self.peak_bytes = 0
        if self._cluster is not None:
            self._earlier -= self._cluster.cpu_seconds
            self._cluster.resident_bytes = 0
        self._wall, self._cpu, self._others = time.perf_counter(), time.process_time(), self._cpu_of(p for p in family if p.pid in workers)
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._watch_memory, name="memory of the stage", daemon=True)
        self._watch.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.seconds = time.perf_counter() - self._wall
        cpu = time.process_time()
        self._ended.set()
        self._watch.join()
        below = self._below()
        self._look(below)
        self._count(cpu, below)
        if self._cluster is not None:
            self.peak_bytes = max(self.peak_bytes, self._cluster.resident_bytes)

    def _count(self, cpu: float, below: list[psutil.Process]) -> None:
        """Set `cpu_seconds`, and write it to the file. `cpu`: the CPU seconds of this process."""
        self.cpu_seconds = self._earlier + cpu - self._cpu + max(0.0, self._cpu_of(below) - self._others)
        self.cpu_seconds += 0.0 if self._cluster is None else self._cluster.cpu_seconds
        if self._file is not None:
            with contextlib.suppress(OSError):
                (temporary := self._file.with_name(f".{self._file.name}")).write_text(str(self.cpu_seconds))
                os.replace(temporary, self._file)

    def _watch_memory(self) -> None:
        looks, below = 0, list[psutil.Process]()
        while not self._ended.wait(EVERY_SECONDS):
            if looks % LOOKS == 0:
                below = self._below()
                self._count(time.process_time(), below)
            self._look(below)
            looks += 1

    def _look(self, below: list[psutil.Process]) -> None:
        self.peak_bytes = max(self.peak_bytes, sum(_resident(p) for p in (self._me, *below)))

    def _below(self) -> list[psutil.Process]:
        processes = [process for process in _children(self._me) if process.pid not in self._beside]
        for process in processes:  # the list grows during the loop
            processes += _children(process)
        return processes

    def _cpu_of(self, below: Iterable[psutil.Process]) -> float:
        # A process that ends adds its CPU time to its parent's, so no time is lost between samples.
        mine = self._me.cpu_times()
        return float(mine.children_user + mine.children_system) + sum(_cpu(p) for p in below)


def _children(process: psutil.Process) -> list[psutil.Process]:
    """Return the child processes. Linux lists them; elsewhere all processes are scanned, which takes milliseconds."""
    processes: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        try:
            listed = [pid for one in Path(f"/proc/{process.pid}/task").iterdir() for pid in (one / "children").read_text().split()]
        except OSError:  # not Linux, or the process has just ended
            return list(process.children())
        for pid in listed:
            with contextlib.suppress(psutil.Error):
                processes.append(psutil.Process(int(pid)))
    return processes


def _resident(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return int(process.memory_info().rss)
    return 0


def _cpu(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system + times.children_user + times.children_system)
    return 0.0
