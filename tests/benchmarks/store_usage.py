"""Runs `puna` in this process and says on the last line of standard error what it cost.

    python tests/benchmarks/store_usage.py run curate --recipe demo …

`driver_cpu_s`: CPU seconds of this process, imports included; `workers_cpu_s`: of its children; `peak_mb`: resident memory of
this process and of the largest child, at most.
"""

from __future__ import annotations

import json
import resource
import sys
import time


def main() -> None:
    """Run and tell."""
    from puna.flows.cli import main as puna

    started = time.perf_counter()
    status = 0
    try:
        puna()
    except SystemExit as ended:
        status = int(ended.code or 0) if isinstance(ended.code, int) or ended.code is None else 1
    own, others = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    print(json.dumps({
        "seconds": time.perf_counter() - started, "driver_cpu_s": own.ru_utime + own.ru_stime,
        "workers_cpu_s": others.ru_utime + others.ru_stime, "driver_peak_mb": own.ru_maxrss / 1024, "worker_peak_mb": others.ru_maxrss / 1024,
    }), file=sys.stderr)  # fmt: skip
    sys.exit(status)


if __name__ == "__main__":
    main()
