"""The demo's alignment round compared with control arms of at least the same budget, on seeds drawn from the date.

    puna run pipeline --recipe demo --store STORE --set rounds=0        # a base model, once
    python tests/benchmarks/alignment.py --store STORE --model base@latest --seeds 5 --json

Each seed draws different prompts, held-out digits and answers; all seeds share one base model. Every seed that is run is reported. Gains
are paired differences over the held-out questions of all seeds, with 95 % intervals over these questions. They do not hold for other seeds,
which differ more than questions do: the interval of a gain's mean over seeds is its `over_seeds`. A control has at least as many checker
calls, labels, sampled tokens, updates and trained answers as the round.

`lookup_right_max`: the most right answers that repeating one gold answer gives, without a model. `budget_ratio_min`: smallest ratio of a
control's budget to the round's. `round_over_before`, `round_over_equal_checks`, `round_over_equal_cpu`: gain in right answers of the round
over the policy that it starts from, over the strongest control, and over the strongest arm with as many CPU seconds.
`taste_over_equal_checks`: gain in answers that are right and liked, over the strongest finetuning on checked answers, whether or not the
same reward model ranks these. `round_over_rl_METRIC`: gain over reinforcement learning alone, in right answers (`accuracy`) and in right and
liked ones (`liked`). `second_round_gain_METRIC`: gain of the second round over the first; `gates_passed`: the gates that accepted it.
`ARM_METRIC`: an arm's share of right, or right and liked, answers, by seed.

Runs are resumed. CPU seconds were recorded when the stages ran: compare only arms that ran on one machine under the same load.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / ".pkg"))

from puna.flows.report import arms  # noqa: E402
from puna.flows.report.arms import Arms  # noqa: E402
from puna.stages.prompts.lookups import EDITS, NUMBERS, WORDS, answers_without_model  # noqa: E402
from puna.stages.training.intervals import mean, paired_difference  # noqa: E402
from puna.storage import Artifact, Store  # noqa: E402

FINETUNED = ("checked", "ranked", "iterated", "best_of_n")
CONTROLS = (*FINETUNED, "rl", "half")
Choice = Callable[[Arms], str | None]


def drawn(day: datetime.date, count: int) -> list[int]:
    """Return the first `count` seeds of a day."""
    random = Random(day.isoformat())
    return [random.randrange(1_000_000) for _ in range(count)]


def run(seed: int, store: Path, model: str, changes: Sequence[str]) -> dict[str, Artifact]:
    """Run the flow `align` of the demo with a seed; return its artifacts by step."""
    command = [
        sys.executable, "-m", "puna.flows.cli.main", "run", "align", "--recipe", "demo", "--store", str(store), "--input", model, "--json",
        "--workers", "1", *(word for change in (f"seed={seed}", *changes) for word in ("--set", change)),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".pkg")}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    opened = Store.open(store)
    return {line["step"]: opened.resolve(line["id"]) for line in lines if "step" in line}


def strongest(metric: str, names: Sequence[str], fits: Callable[[Arms, str], bool]) -> Choice:
    """Return a function that names the strongest arm of a round that `fits` accepts; None if there is none."""

    def chosen(one: Arms) -> str | None:
        there = [name for name in names if name in one.scores and fits(one, name)]
        return max(there, key=lambda name: one.share(name, metric).value, default=None)

    return chosen


def gain(rounds: Mapping[int, Arms], metric: str, choice: Choice) -> dict[str, Any] | None:
    """Return the round's gain over the chosen arms, over the questions of all seeds and by seed; None if no arm fits."""
    chosen = {seed: (one, name) for seed, one in rounds.items() if (name := choice(one)) is not None}
    if not chosen:
        return None
    ours = {f"{seed}/{key}": value for seed, (one, _) in chosen.items() for key, value in one.scores["round"][metric].items()}
    theirs = {f"{seed}/{key}": value for seed, (one, name) in chosen.items() for key, value in one.scores[name][metric].items()}
    by_seed = {seed: {"over": name, "gain": list(one.gain("round", name, metric))} for seed, (one, name) in chosen.items()}
    over_seeds = {"over_seeds": list(mean([one["gain"][0] for one in by_seed.values()])), "seeds": by_seed}
    return dict(zip(("value", "low", "high"), paired_difference(ours, theirs), strict=True)) | over_seeds


def equal(one: Arms, name: str) -> bool:
    return (one.ratio(name, "round") or 0) >= 1


def as_many_seconds(one: Arms, name: str) -> bool:
    other, own = one.budgets[name], one.budgets["round"]
    return other is not None and own is not None and other.cpu_seconds >= arms.EQUAL_CPU * own.cpu_seconds


def figures(made: Mapping[int, Mapping[str, Artifact]]) -> dict[str, Any]:
    """Return the figures of all seeds. `made`: seed → step → artifact."""
    rounds = {seed: arms.rounds(steps.items()) for seed, steps in made.items()}
    first = {seed: found[0] for seed, found in rounds.items()}
    without = {seed: answers_without_model(steps["prompts"].read().to_pylist()) for seed, steps in made.items()}
    ratios = [one.ratio(name, "round") or 0.0 for one in first.values() for name in CONTROLS if name in one.scores]
    others = [name for name in arms.NAMES if name not in ("round", "before")]
    names = {"round": "evaluate_round_2", "first": "evaluate_round_1"}
    second = {
        seed: Arms(2, {name: arms.scores_of(steps[step]) for name, step in names.items()}, {})
        for seed, steps in made.items() if names["round"] in steps
    }  # fmt: skip
    gains = {
        "round_over_before": gain(first, "accuracy", lambda _: "before"),
        "round_over_equal_cpu": gain(first, "accuracy", strongest("accuracy", others, as_many_seconds)),
        "round_over_equal_checks": gain(first, "accuracy", strongest("accuracy", CONTROLS, equal)),
        "taste_over_equal_checks": gain(first, "liked", strongest("liked", FINETUNED, equal)),
        **{f"round_over_rl_{metric}": gain(first, metric, strongest(metric, ["rl"], equal)) for metric in arms.METRICS},
        **{f"second_round_gain_{metric}": gain(second, metric, lambda _: "first") for metric in arms.METRICS},
    }
    gates = {seed: str(steps["gate_2"].manifest.metrics["verdict"]) for seed, steps in made.items() if "gate_2" in steps}
    return {
        "lookup_right_max": max(sum(rows[name].values()) / len(rows[name]) for rows in without.values() for name in (NUMBERS, WORDS, EDITS)),
        "budget_ratio_min": min(ratios, default=None),
        **{name: one and {field: value for field, value in one.items() if field != "seeds"} for name, one in gains.items()},
        "by_seed": {name: one["seeds"] for name, one in gains.items() if one},
        **{f"{name}_{metric}": [one.share(name, metric).value for one in first.values() if name in one.scores] for name in arms.NAMES for metric in arms.METRICS},
        "second_round_gates": gates,
        "gates": len(gates),
        "gates_passed": list(gates.values()).count("passed"),
        "seeds_reported": list(made),
        "without_model": {seed: {name: sum(row.values()) / len(row) for name, row in rows.items()} for seed, rows in without.items()},
        "arms": {seed: [table(one) for one in found] for seed, found in rounds.items()},
        "load": os.getloadavg()[0],
    }


def table(one: Arms) -> dict[str, Any]:
    """Return each arm's shares and budget."""
    return {
        name: {metric: round(one.share(name, metric).value, 4) for metric in one.metrics}
        | ({"budget": vars(budget) | {"answers_per_update": budget.answers_per_update}} if (budget := one.budgets.get(name)) else {})
        for name in one.scores
    }


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds of the day")
    parser.add_argument("--day", type=datetime.date.fromisoformat, default=datetime.date.today(), help="YYYY-MM-DD; default: today")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--model", default="base@latest")
    parser.add_argument("--set", action="append", default=[], help="FIELD=VALUE of the recipe, such as more_controls=true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    result = figures({seed: run(seed, given.store, given.model, given.set) for seed in drawn(given.day, given.seeds)})
    print(json.dumps(result, indent=None if given.json else 1))


if __name__ == "__main__":
    main()
