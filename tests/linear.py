"""A guard for work that must be linear: without it, a test of quadratic work would run for minutes, hours or years."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stopped_if_quadratic(cpu_seconds: float = 25) -> Iterator[None]:
    """Raise TimeoutError after `cpu_seconds`: at least ten times what linear work on the test's input needs, and less than other work."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"the work has taken {cpu_seconds} CPU seconds: it does not grow linearly with its input")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
