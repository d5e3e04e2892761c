"""What `run.map` runs on: anything with the shape of `concurrent.futures.Executor`."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

from puna.storage import PunaError

# What numpy, torch, numba, Arrow and tokenizers read when they are loaded, and not again.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMBA_NUM_THREADS", "RAYON_NUM_THREADS")


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local(workers: int | None = None) -> Executor | None:
    """A pool of local processes that share the cores evenly, or None for one worker: it then works where it is asked."""
    count = workers or cores()
    if count == 1:
        return None
    return ProcessPoolExecutor(count, mp_context=_Context(max(1, cores() // count)), initializer=_start, initargs=(os.getpid(),))


class _Worker(SpawnProcess):
    """A process whose libraries use `threads` threads each: its environment says so before they are loaded."""

    threads = 1

    def start(self) -> None:
        """Start it with an environment of its own."""
        before = {name: os.environ.get(name) for name in THREADS}
        os.environ.update(dict.fromkeys(THREADS, str(self.threads)))
        try:
            super().start()
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


class _Context(SpawnContext):
    """Starts workers of `threads` threads each."""

    def __init__(self, threads: int) -> None:
        super().__init__()
        self._threads = threads

    def Process(self, *args: Any, **kwargs: Any) -> SpawnProcess:  # type: ignore[override]
        """A worker that is to be started."""
        made = _Worker(*args, **kwargs)
        made.threads = self._threads
        return made


def _start(parent: int) -> None:
    """Prepare a worker."""
    # Ctrl-C reaches every process of a terminal: the worker ends at once, and the driver alone says so.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()


def _follow(parent: int) -> None:
    """End this worker when the process that started it is gone: a killed driver cannot tell its workers."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def ordered(
    executor: Executor | None, function: Callable[..., Any], items: Iterable[Any], arguments: tuple[Any, ...], ahead: int = 64
) -> Iterator[Any]:
    """Results of `function(item, *arguments)` in the order of `items`; at most `ahead` of them under way.

    PunaError when a worker is gone: what it did is not known, and the pool takes no more work.
    """
    if executor is None:
        for item in items:
            yield function(item, *arguments)
        return
    waiting: deque[Future[Any]] = deque()
    try:
        for item in items:
            waiting.append(executor.submit(function, item, *arguments))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenExecutor as error:
        raise _gone(error) from error
    finally:
        for future in waiting:
            future.cancel()


def _gone(error: BrokenExecutor) -> PunaError:
    return PunaError(
        f"a worker process ended in the middle of its work ({error}); mostly the system did so for want of memory: "
        "use fewer workers, or a machine with more memory; what is finished is kept"
    )
