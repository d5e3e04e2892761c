"""The demo over several seeds: bits per byte compared with n-grams, accuracy after each step, the reward model, wall time.

    python tests/benchmarks/demo.py --seeds 0 1 2 [--store FOLDER] [--json]

Curation does not depend on the seed of the training runs, so all seeds share one store; each run's time is the sum over its own stages when
they were computed. With --json: one object of named figures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run(seed: int, store: Path, recipe: str) -> dict[str, Any]:
    """Run the demo once; return accuracy after each evaluation, bits per byte, reward accuracy and seconds per step."""
    command = [
        sys.executable,
        "-m",
        "puna.flows.cli.main",
        "run",
        "pipeline",
        "--recipe",
        recipe,
        "--store",
        str(store),
        "--json",
        "--set",
        f"seed={seed}",
    ]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT / ".pkg")}, stdout=subprocess.PIPE, text=True, check=True
    )
    from puna.storage import Store

    opened = Store.open(store)
    found: dict[str, Any] = {"seed": seed, "accuracy": {}, "interval": {}, "seconds": 0.0}
    for line in done.stdout.splitlines():
        made = json.loads(line)
        artifact = opened.resolve(made["id"])
        found["seconds"] += artifact.manifest.timings["seconds"]
        if made["kind"] == "evaluation" and made["step"].startswith("evaluate"):
            for row in artifact.read().to_pylist():
                if row["task"] == "all" and row["metric"] == "accuracy":
                    found["accuracy"][made["step"]] = row["value"]
                    found["interval"][made["step"]] = (row["low"], row["high"])
                if row["task"] == "pages" and row["metric"] in ("document_bits_per_byte", "ngram_bits_per_byte"):
                    found[row["metric"].removeprefix("document_")] = row["value"]
        if made["stage"] == "reward_model":
            found.setdefault("reward_accuracy", []).append(made["metrics"]["heldout_accuracy"])
    return found


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--store", type=Path, default=Path(".puna"))
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT / ".pkg"))
    results = [run(seed, arguments.store, arguments.recipe) for seed in arguments.seeds]
    if arguments.json:
        steps = [list(r["accuracy"].values()) for r in results]
        rises = [b - a for values in steps for a, b in pairwise(values)]
        print(json.dumps({
            "bits_per_byte": max(r["bits_per_byte"] for r in results), "base_vs_ngram_bits": max(r["bits_per_byte"] / r["ngram_bits_per_byte"] for r in results),
            "smallest_rise": min(rises), "final_accuracy": min(values[-1] for values in steps),
            "reward_accuracy": min(min(r["reward_accuracy"]) for r in results), "seconds": max(r["seconds"] for r in results),
        }))  # fmt: skip
        return
    for r in results:
        accuracy = "  ".join(f"{step.removeprefix('evaluate_')} {value:.3f}" for step, value in r["accuracy"].items())
        print(f"seed {r['seed']}: bits/byte {r['bits_per_byte']:.3f} (n-grams {r['ngram_bits_per_byte']:.3f})  {accuracy}")
        print(f"        reward model {', '.join(f'{a:.3f}' for a in r['reward_accuracy'])}  stages {r['seconds']:.0f} s")


if __name__ == "__main__":
    main()
