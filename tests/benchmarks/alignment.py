"""The demo's alignment beside its control arms, over several seeds: what each round and each part of it earns.

    puna run pipeline --recipe demo --store STORE --set rounds=0        # a base model, once
    python tests/benchmarks/alignment.py --store STORE --model base@latest --seeds 1 2 3 --json

Each figure is of right answers (`accuracy`) and of those that are right and liked (`liked`), which the recipe is for.

Each seed draws other prompts, other held-out structures and other answers; the base model is one. With --json: the smallest gains
over the seeds, their means and standard errors over seeds, and every arm's share by seed. Runs are resumed; CPU seconds are those that
the stages took when they were made.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / ".pkg"))

from puna.flows.report import arms  # noqa: E402
from puna.flows.report.arms import METRICS  # noqa: E402
from puna.stages.training.intervals import paired  # noqa: E402
from puna.storage import Artifact, Store  # noqa: E402

ROUND, TASTE = "the round over its strongest control", "RL on the taste over its strongest control"
PICK = "the reward model's pick over a random one"


def run(seed: int, store: Path, model: str, recipe: str) -> dict[str, Any]:
    """The arms of one seed's rounds, their claims, and the CPU seconds of its stages."""
    command = [
        sys.executable, "-m", "puna.flows.cli.main", "run", "align", "--recipe", recipe, "--store", str(store), "--input", model, "--json",
        "--set", f"seed={seed}",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT / ".pkg")}, stdout=subprocess.PIPE, text=True, check=True
    )
    opened = Store.open(store)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    made = {line["step"]: opened.resolve(line["id"]) for line in lines if "step" in line}
    return measured(seed, made)


def measured(seed: int, made: dict[str, Artifact]) -> dict[str, Any]:
    """The figures of one seed, of its artifacts by step."""
    rounds = arms.rounds((step, artifact) for step, artifact in made.items() if artifact.kind == "evaluation")
    found: dict[str, Any] = {"seed": seed, "rounds": []}
    for one in rounds:
        shares = {arm: {metric: round(one.share(arm, metric).value, 4) for metric in one.metrics} for arm in one.scores}
        claims = [{"what": c.name, "metric": c.metric, "control": c.control, "gain": c.gain, "verdict": c.verdict} for c in one.claims()]
        found["rounds"].append({"number": one.number, "arms": shares, "claims": claims})
    if len(rounds) > 1:
        first, second = rounds[0].scores["round"], rounds[1].scores["round"]
        found["second_round"] = {metric: paired(second[metric], first[metric]) for metric in rounds[1].metrics}
    spent = {artifact.key: (step, float(artifact.manifest.timings.get("cpu_seconds", 0.0))) for step, artifact in made.items()}
    found["cpu_seconds"] = sum(seconds for _, seconds in spent.values())
    found["cpu_seconds_by_step"] = {step: round(seconds, 1) for step, seconds in spent.values()}
    return found


def gains(results: list[dict[str, Any]], what: str, number: int) -> dict[str, Any]:
    """A claim's gain in round `number` by metric: the smallest over seeds, the mean, its standard error over seeds, all of them."""
    claims = [claim for result in results for one in result["rounds"] if one["number"] == number for claim in one["claims"]]
    return {metric: summary([c["gain"][0] for c in claims if c["what"] == what and c["metric"] == metric]) for metric in METRICS}


def summary(values: list[float]) -> dict[str, Any]:
    """Smallest, mean and standard error of values."""
    if not values:
        return {}
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return {"smallest": min(values), "mean": statistics.fmean(values), "standard_error": error, "seeds": values}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--model", default="base@latest")
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = [run(seed, arguments.store, arguments.model, arguments.recipe) for seed in arguments.seeds]
    second = [result["second_round"] for result in results if "second_round" in result]
    figures = {
        "round_gain_over_best_control": gains(results, ROUND, 1),
        "second_round_over_best_control": gains(results, ROUND, 2),
        "preference_stage_gain": {number: gains(results, TASTE, number) for number in (1, 2)},
        "second_round_gain": {metric: summary([one[metric].value for one in second]) for metric in METRICS if second},
        "rm_pick_over_random_pick": {number: gains(results, PICK, number) for number in (1, 2)},
        "cpu_seconds": max(result["cpu_seconds"] for result in results),
        "seeds": results,
    }
    if arguments.json:
        print(json.dumps(figures))
        return
    for result in results:
        for one in result["rounds"]:
            print(f"seed {result['seed']}, round {one['number']}")
            for arm, shares in one["arms"].items():
                print(f"  {arms.NAMES.get(arm, arm):40s}" + "".join(f"  {metric} {value:.3f}" for metric, value in shares.items()))
            for claim in one["claims"]:
                value, low, high = claim["gain"]
                said = f"{value:+.3f} ({low:+.3f} to {high:+.3f})"
                print(f"  {claim['what']}, {claim['metric']}: {said} over {claim['control']}: {claim['verdict']}")
    print(json.dumps({name: value for name, value in figures.items() if name != "seeds"}, indent=1))


if __name__ == "__main__":
    main()
