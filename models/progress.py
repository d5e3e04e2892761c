"""The progress of this process's work, from which other processes see that it does not hang."""

from __future__ import annotations

import time
from collections.abc import Callable

BEAT = 5.0  # seconds between looks at the progress
count, until = 0, 0.0
leave: Callable[[], object] = bool  # called while a training step waits for a server; may end the step by an exception


def advance(seconds: float = 0.0) -> None:
    """Count a step of work: a micro-batch, a token, a scored answer. `seconds`: the longest time that the next step may take."""
    global count, until
    count += 1
    until = time.monotonic() + seconds
