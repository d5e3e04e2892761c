"""The errors of `puna plan`'s estimates of a step, compared with the step's actual costs.

    PYTHONPATH=.pkg python tests/benchmarks/planning.py --json [--store STORE]

Without a store: `curate` runs on generated pages four times with different parameters and numbers of pages; the fourth run is estimated
from the first three. With a store: every artifact whose stage had run three times before is estimated from what the store held at that
time. Reports the median and the 90th percentile of |estimate / actual - 1| for time, disk, memory and rows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from puna.flows.cli.notebook import run_flow
from puna.flows.engine.plan import Experience, Size
from puna.storage import Artifact, Store

RUNS = ((1200, 20), (3000, 30), (2000, 40), (2500, 25))
"""For each run: number of pages, and the minimum number of words of a document."""
STEPS = ("line_dedup=null",)


class Earlier:
    """A view of a store as it was when one of its artifacts was made."""

    def __init__(self, artifacts: list[Artifact]) -> None:
        self._artifacts = artifacts

    def artifacts(self) -> list[Artifact]:
        """Return the artifacts, oldest first."""
        return self._artifacts


def errors(store: Store, least: int, last_only: bool) -> dict[str, list[float]]:
    """Return the relative errors of the estimates, by estimated quantity."""
    made = store.artifacts()
    by_key = {one.key: one for one in made}
    runs = sorted({one.manifest.run for one in made})
    found: dict[str, list[float]] = {name: [] for name in ("seconds", "bytes", "memory", "rows")}
    for number, one in enumerate(made):
        m = one.manifest
        if sum(other.manifest.stage == m.stage for other in made[:number]) < least or (last_only and m.run != runs[-1]):
            continue
        came = [Size.of(by_key[item.key]) for item in m.inputs if item.key in by_key]
        expected = Experience(Earlier(made[:number])).expect(m.stage, m.config, came)  # type: ignore[arg-type]
        taken = {"seconds": m.timings.get("seconds", 0.0), "bytes": Size.of(one).bytes, "memory": m.peak_memory_bytes, "rows": Size.of(one).rows}
        for name, value in taken.items():
            if expected is not None and value:
                found[name].append(abs(getattr(expected, name) / value - 1))
    return found


def pages(path: Path, count: int, seed: int) -> Path:
    """Write generated pages of 5 to 400 words; return the path."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(5000)]
    with path.open("w") as file:
        for number in range(count):
            lines = [" ".join(draw.choices(words, k=draw.randint(5, 40))) + "." for _ in range(draw.randint(1, 10))]
            file.write(json.dumps({"url": f"https://a.example/{seed}/{number}", "text": "\n".join(lines)}) + "\n")
    return path


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--store", type=Path)
    asked = parser.parse_args()
    load = round(os.getloadavg()[0], 1)
    with tempfile.TemporaryDirectory() as folder:
        if asked.store is None:
            store, told, sys.stdout = Store.open(Path(folder) / "store"), sys.stdout, sys.stderr
            for seed, (count, least) in enumerate(RUNS):
                changes = [*STEPS, f"select.gopher_quality.min_words={least}"]
                run_flow("curate", pages(Path(folder) / f"{seed}.jsonl", count, seed), recipe="clean", changes=changes, store=store)
            sys.stdout = told
        else:
            store = Store.existing(asked.store)
        measured = errors(store, 3, asked.store is None)
    found: dict[str, Any] = {"load": load, "expectations": len(measured["seconds"])}
    for name, values in measured.items():
        if values:
            found[name] = {"median": round(statistics.median(values), 3), "p90": round(sorted(values)[int(0.9 * (len(values) - 1))], 3)}
    print(json.dumps(found) if asked.json else "\n".join(f"{name}: {value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
