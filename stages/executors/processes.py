"""An executor that runs local processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import BrokenExecutor, CancelledError, Future, ProcessPoolExecutor
from functools import partial
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

from puna.stages.executors.parts import Part, PartExecutor
from puna.stages.executors.worker import Answer, compute

# Thread counts that numpy, torch, numba, Arrow and tokenizers read only at import.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMBA_NUM_THREADS", "RAYON_NUM_THREADS")
_environment = threading.Lock()
SAVE_SECONDS = 20.0  # maximum seconds to wait for the workers of a stopped run; Prefect kills the whole run after 30 s


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Processes(PartExecutor):
    """Local processes that share the cores evenly. Each process is a pool of its own, so if one is killed, the others continue."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        self._workers = workers
        self._context = _Context(max(1, cores() // workers))
        self._idle: list[ProcessPoolExecutor] = []
        self._busy: set[ProcessPoolExecutor] = set()

    @property
    def slots(self) -> int:
        return self._workers

    def _begin(self, part: Part) -> None:
        with self._lock:
            start = (os.getpid(),)
            pool = self._idle.pop() if self._idle else ProcessPoolExecutor(1, self._context, initializer=_start, initargs=start)
            self._busy.add(pool)
        try:
            pool.submit(compute, part.payload).add_done_callback(partial(self._complete, part, pool))
        except BrokenExecutor as error:  # the process was killed while it was idle
            self._discard(pool)
            self._retry(part, str(error))

    def _discard(self, pool: ProcessPoolExecutor) -> None:
        with self._lock:
            self._busy.discard(pool)
        pool.shutdown(wait=False)

    def _complete(self, part: Part, pool: ProcessPoolExecutor, future: Future[Answer]) -> None:
        try:
            answer = future.result()
        except (BrokenExecutor, CancelledError) as error:
            self._discard(pool)
            self._retry(part, str(error))
            return
        with self._lock:
            self._busy.discard(pool)
            self._idle.append(pool)
        self._deliver(part, answer)

    def _end(self) -> None:
        """Stop the workers. A worker that trains a model has `SAVE_SECONDS` to save its state first."""
        workers = [worker for worker in self._context.made if worker.is_alive()]
        deadline = time.monotonic() + SAVE_SECONDS
        try:
            for worker in workers:
                worker.terminate()
            while any(worker.is_alive() for worker in workers) and time.monotonic() < deadline:
                time.sleep(0.02)
        finally:
            for worker in workers:
                worker.kill()

    def _close(self) -> None:
        with self._lock:
            idle, busy = list(self._idle), list(self._busy)
        for pool in idle + busy:
            pool.shutdown(wait=pool in idle, cancel_futures=True)


class _Worker(SpawnProcess):
    """A process whose environment limits its libraries to `threads` threads before they are loaded."""

    threads = 1

    def start(self) -> None:
        with _environment:
            before = {name: os.environ[name] for name in THREADS if name in os.environ}
            os.environ.update(dict.fromkeys(THREADS, str(self.threads)))
            try:
                super().start()
            finally:
                for name in THREADS:
                    del os.environ[name]
                os.environ.update(before)


class _Context(SpawnContext):
    """A multiprocessing context that starts workers with `threads` threads each, and keeps a list of them."""

    def __init__(self, threads: int) -> None:
        super().__init__()
        self._threads = threads
        self.made: list[SpawnProcess] = []

    def Process(self, *args: Any, **kwargs: Any) -> SpawnProcess:  # type: ignore[override]
        worker = _Worker(*args, **kwargs)
        worker.threads = self._threads
        self.made = [*(one for one in self.made if one.exitcode is None), worker]
        return worker


def _start(parent: int) -> None:
    # Ctrl-C reaches every process of a terminal. A worker must end without a traceback, since the driver reports the stop.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()


def _follow(parent: int) -> None:
    """End this worker when its parent process is gone, since a killed driver cannot stop its workers."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
