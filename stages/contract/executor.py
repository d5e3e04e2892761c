"""What `run.map` runs on: anything with the shape of `concurrent.futures.Executor`."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from typing import Any


def local(workers: int | None = None) -> Executor | None:
    """A pool of local processes, or None for one worker: the work is then done where it is asked for."""
    count = workers or os.cpu_count() or 1
    if count == 1:
        return None
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"), initializer=_start, initargs=(os.getpid(),))


def _start(parent: int) -> None:
    """Prepare a worker."""
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    # One process per core: libraries that start threads of their own would fight over the cores.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS", "ARROW_NUM_THREADS"):
        os.environ[name] = "1"
    import pyarrow as pa

    pa.set_cpu_count(1)


def _follow(parent: int) -> None:
    """End this worker when the process that started it is gone: a killed driver cannot tell its workers."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def ordered(
    executor: Executor | None, function: Callable[..., Any], items: Iterable[Any], arguments: tuple[Any, ...], ahead: int = 64
) -> Iterator[Any]:
    """Results of `function(item, *arguments)` in the order of `items`; at most `ahead` of them under way."""
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
    finally:
        for future in waiting:
            future.cancel()
