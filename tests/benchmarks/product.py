"""How soon `puna up` can be used, and what its watching costs a run.

    PYTHONPATH=.pkg python tests/benchmarks/product.py --json [--steps 20]

Starts `puna up` on a new store, then again on the same one, and times the address, the forms, and a run of reused steps with the
server beside it and without. Processor seconds stand beside the seconds of the clock, which a loaded machine stretches.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from puna.flows.server import read_note
from puna.flows.session import session
from puna.stages.align.prompts import PromptsConfig, prompts
from puna.storage import Store

CONFIG = PromptsConfig(tasks=[{"task": "chain_sum"}], train=5, heldout=2)


def started(store: Store, log: Path) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    """`puna up` with all forms offered, and how long that took."""
    began = time.perf_counter()
    with log.open("w") as file:
        words = [sys.executable, "-m", "puna.flows.cli", "up", "--port", "0", "--store", str(store.root)]
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)
    found: dict[str, Any] = {}
    for name, ready in (("address_seconds", lambda: read_note(store.root)), ("forms_seconds", lambda: "are offered at" in log.read_text())):
        while not ready():
            if process.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.05)
        found[name] = round(time.perf_counter() - began, 1)
    both = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
    found["processor_seconds"] = [round(sum(one.cpu_times()[:2]), 1) for one in both]
    found["resident_mb"] = [round(one.memory_info().rss / 1e6) for one in both]
    return process, found


def reused(store: Store, steps: int) -> float:
    """Seconds of a run of so many steps that are all there."""
    began = time.perf_counter()
    with session(store, flow="prompts", workers=1, json=True) as now:
        for number in range(steps):
            now.perform(prompts, CONFIG, {}, f"step_{number}")
    return time.perf_counter() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(Path(folder) / "store")
        found: dict[str, Any] = {"load": os.getloadavg()[0], "steps": asked.steps}
        with Path(os.devnull).open("w") as quiet:
            sys.stdout, told = quiet, sys.stdout
            reused(store, 1)
            found["run_without_server_seconds"] = round(statistics.median(reused(store, asked.steps) for _ in range(3)), 2)
            for name in ("first", "again"):
                process, found[name] = started(store, Path(folder) / "log")
                if name == "again":
                    found["run_with_server_seconds"] = round(statistics.median(reused(store, asked.steps) for _ in range(3)), 2)
                process.send_signal(signal.SIGINT)
                process.wait()
            sys.stdout = told
    print(json.dumps(found) if asked.json else "\n".join(f"{name}: {value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
