"""The command line, with one module per group of commands."""

from __future__ import annotations

import atexit
import os
import sys

if os.path.basename(sys.argv[0]) in ("puna", "-m"):  # the program: Ctrl-C during its imports ends it without a traceback
    _hook = sys.excepthook
    sys.excepthook = lambda kind, *error: None if issubclass(kind, KeyboardInterrupt) else _hook(kind, *error)
status: list[int] = []
"""Statuses of the program `puna`, of which the last is the one that it ends with; empty in other programs."""


@atexit.register  # before all others, so that it runs last
def _end() -> None:
    """End the program `puna` after all threads and handlers. Python's own end would collect and free every object, which takes about two
    seconds of CPU time after a run that used torch."""
    if status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status[-1])
