"""A process that runs a user's code, one job at a time. If a job takes too long, the process and its children are killed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from puna.models.untrusted import bounded_process
from puna.models.untrusted.bounded_process import LimitError, Process
from puna.stages import plugins

Work = Callable[[dict[str, Any]], dict[str, Any]]


class Apart:
    """A process that runs the function `work`, which returns JSON. It starts with the first job, and again after errors or new modules."""

    def __init__(self, work: Work) -> None:
        names = [work.__module__, work.__name__]
        added = plugins.added_modules
        self._process = Process(__name__, own=True, arguments=lambda: [*names, *(file or name for name, file in added().items())])
        self.close = self._process.end

    def ask(self, job: dict[str, Any], seconds: float, memory_mb: int | None = None) -> dict[str, Any] | str:
        """Return a job's result, or a message if it exceeds a limit. `seconds`: maximum CPU time. `memory_mb`: maximum MiB in addition to
        the memory in use at the first job (Linux only)."""
        try:
            return self._process.ask((job, memory_mb), b"", None, seconds)
        except LimitError as error:
            return str(error)


def serve() -> None:
    """Run the jobs on standard input. The command line has the work function's module and name, then the modules to add."""
    module, name, *modules = sys.argv[1:]
    for plugin in modules:
        plugins.add(plugin)
    work: Work = getattr(importlib.import_module(module), name)
    bounded = False

    def answer(key: bytes, context: Any, request: tuple[dict[str, Any], int | None]) -> dict[str, Any]:
        nonlocal bounded
        job, memory_mb = request
        if memory_mb is not None and not bounded:
            with suppress(OSError, ValueError):
                bounded_process.bound_memory(memory_mb << 20)
            bounded = True
        return work(job)

    bounded_process.serve(answer, own=True)
