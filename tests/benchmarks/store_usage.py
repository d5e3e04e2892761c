"""Runs `puna` in this process and prints its cost on the last line of standard error.

    python tests/benchmarks/store_usage.py [--stages] run curate --recipe demo …

`driver_cpu_s`: CPU seconds of this process, imports included; `workers_cpu_s`: of its children; `peak_mb`: peak resident memory of this
process and of the largest child; `code`: the path of the `puna` that ran. `--stages`: first prints a line for each stage, and for the time
between and after stages (mainly the report), with CPU seconds of this process and its resident memory: before, and at its peak (Linux).
"""

from __future__ import annotations

import functools
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Watch:
    """A recorder of this process's cost by section."""

    def __init__(self) -> None:
        self.peak = 0.0
        self._begin()

    def _begin(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # this resets the process's peak memory
        self._before, self._cpu = _resident("VmRSS"), time.process_time()

    def lap(self, name: str) -> None:
        """Print the cost since the previous call."""
        peak = _resident("VmHWM")
        self.peak = max(self.peak, peak)
        found = {"stage": name, "cpu_s": time.process_time() - self._cpu, "before_mb": self._before, "peak_mb": peak}
        print(json.dumps({key: round(value, 2) if isinstance(value, float) else value for key, value in found.items()}), file=sys.stderr)
        self._begin()

    def around(self, function: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
        """Return `function` measured as a separate section, which `name` names from the arguments."""

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.lap("-")
            try:
                return function(*args, **kwargs)
            finally:
                self.lap(name(*args, **kwargs))

        return watched


def _resident(what: str) -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{what}:")[1].split()[0]) / 1024


def main() -> None:
    """Run the command and print its cost."""
    watch = None
    if "--stages" in sys.argv:
        sys.argv.remove("--stages")
        watch = Watch()
    from puna.flows.cli.main import main as puna

    if watch is not None:
        from puna.flows.engine import session

        session.Session.perform = watch.around(session.Session.perform, lambda *args: str(args[-1]))  # type: ignore[method-assign]
        session._report = watch.around(session._report, lambda *args: "report")
        session.Session.refresh = watch.around(session.Session.refresh, lambda *args: "puna.duckdb")  # type: ignore[method-assign]
    started = time.perf_counter()
    status = 0
    try:
        puna()
    except SystemExit as ended:
        status = int(ended.code or 0) if isinstance(ended.code, int) or ended.code is None else 1
    own, others = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    # On Linux ru_maxrss starts at the value of the parent process: a benchmark that has just written a corpus.
    peak = _resident("VmHWM") if sys.platform == "linux" else own.ru_maxrss / 1024
    if watch is not None:
        watch.lap("-")
        peak = watch.peak
    print(json.dumps({
        "seconds": time.perf_counter() - started, "driver_cpu_s": own.ru_utime + own.ru_stime,
        "workers_cpu_s": others.ru_utime + others.ru_stime, "driver_peak_mb": peak, "worker_peak_mb": others.ru_maxrss / 1024,
        "load": os.getloadavg()[0], "code": sys.modules["puna.flows.cli.main"].__file__,
    }), file=sys.stderr)  # fmt: skip
    sys.exit(status)


if __name__ == "__main__":
    main()
