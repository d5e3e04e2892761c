"""The standard error of a run and its workers, line by line: warnings, and the last words of a process that dies."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator

OURS = (" | Flow run ", " | Task run ")
"""In lines that Prefect wrote itself, which its server has."""
LAST_SECONDS = 1.0


@contextlib.contextmanager
def tee_stderr(tell: Callable[[str], None]) -> Iterator[None]:
    """Call `tell` with each line that this process or a child writes to standard error, and pass the line on.

    A process that is still there afterwards is passed on, and no longer told of.
    """
    sys.stderr.flush()
    before = os.dup(2)
    out, into = os.pipe()
    os.dup2(into, 2)
    os.close(into)
    listening = threading.Event()
    listening.set()

    def listen() -> None:
        rest = b""
        while data := os.read(out, 65536):
            with contextlib.suppress(OSError):
                os.write(before, data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                text = line.decode("utf-8", "replace").rstrip()
                if text and listening.is_set() and not any(word in text for word in OURS):
                    tell(text)

    thread = threading.Thread(target=listen, name="echo", daemon=True)
    thread.start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        thread.join(LAST_SECONDS)
        listening.clear()
