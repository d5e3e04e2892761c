"""Puna's GRPO compared with TRL's GRPO, or with Puna's PPO, on the demo's base model: gains in right answers for equal CPU seconds.

    puna run pipeline --recipe demo --store STORE --set rounds=0        # a base model, once
    python tests/benchmarks/alignment_trl.py --store STORE --seeds 101 --rates 4e-4 1e-3
    python tests/benchmarks/alignment_trl.py --store STORE --seeds 1 2 3 --json
    python tests/benchmarks/alignment_trl.py --store STORE --peer ppo --seeds 1 2 3 --json

Both start from one finetuned model and use the same prompts, checker, optimizer (AdamW), thread count (1), rollouts and updates. TRL trains
until it has used the CPU seconds of Puna's whole stage; TRL's start-up and saving are not counted. The learning rates of both are searched
in the same way on a seed that is not reported. PPO has the same rollouts, updates and rewards but no limit of CPU seconds; its critic
starts as the policy with a zero head. Measured: right greedy answers to the held-out questions, by question.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import alignment  # the benchmarks beside this one
import known_trl

from puna.flows.engine.recipe import read_values
from puna.flows.report.arms import scores_of
from puna.stages.align.instructions import instructions
from puna.stages.align.reinforcement import grpo, ppo
from puna.stages.align.sft import sft
from puna.stages.contract import External, execute, parse
from puna.stages.evaluation.evaluate import evaluate
from puna.stages.io.import_model import import_model
from puna.stages.prompts.prompts import prompts
from puna.stages.training.intervals import paired_difference
from puna.storage import Artifact, Store

RATES = {"puna": 4e-4, "trl": 4e-4, "ppo": 2e-4}
ROLLOUT: dict[str, Any] = {
    "rollouts": 20, "prompts": 32, "answers": 8, "epochs": 1, "minibatches": 2, "max_tokens": 16, "kl_coefficient": 0.0,
    "optimizer": {"weight_decay": 0.0, "beta2": 0.999},
}  # fmt: skip


class Seed:
    """The common start of a seed's two arms: prompts of the demo, and the model finetuned on their gold answers.

    start: the seed of prompts and model, if several seeds share these and differ only in the draws of reinforcement learning.
    """

    def __init__(self, store: Store, base: Artifact, start: int, seed: int) -> None:
        self.store, self.start, self.seed, self.recipe = store, start, start, read_values("demo", [])[0]
        self.tasks = self.make(prompts, self.recipe["prompts"], {})
        gold = self.make(instructions, {}, {"prompts": self.tasks})
        self.policy = self.make(sft, self.recipe["sft_first"], {"model": base, "instructions": [gold]})
        asked = self.recipe["prompts"] | {"train": self.recipe["round_prompts"], "skip": self.recipe["prompts"]["train"], "heldout": 0}
        self.asked = self.make(prompts, asked | {"references": False}, {})
        self.seed = seed

    def make(self, stage: Any, values: dict[str, Any], given: dict[str, Any]) -> Artifact:
        """Return the artifact of a stage, with this seed if the stage is random."""
        seeded = values | ({"seed": self.seed} if "seed" in stage.config.model_fields else {})
        return execute(stage, parse(stage.config, seeded, stage.name), given, self.store)

    def right(self, model: Artifact) -> dict[str, float]:
        """Return, for each held-out question, 1 if the greedy answer is right, else 0."""
        made = execute(
            evaluate, parse(evaluate.config, self.recipe["evaluate"], "evaluate"), {"model": model, "prompts": self.tasks}, self.store
        )
        return scores_of(made)["accuracy"]

    def puna(self, rate: float, stage: Any = grpo) -> Artifact:
        values = ROLLOUT | {"reward": "verifier", "schedule": {"learning_rate": rate}}
        return self.make(stage, values, {"policy": self.policy, "prompts": self.asked})

    def trl(self, rate: float, seconds: float, folder: Path) -> tuple[Artifact, dict[str, Any]]:
        """Return TRL's model and the budget that it used."""
        settings = parse(grpo.config, ROLLOUT | {"schedule": {"learning_rate": rate}}, "grpo")
        own = folder / f"trl-{self.seed}-{rate:g}-{seconds:.0f}"
        if not (own / "used.json").is_file():
            rows = self.asked.read().to_pylist()
            used = known_trl.train_grpo(self.policy.path(), rows, settings, seconds, self.seed, own, bf16=False)
            (own / "used.json").write_text(json.dumps(used), encoding="utf-8")
        model = self.make(import_model, {}, {"model": External.resolve(f"model={own.absolute()}")[0]})
        return model, json.loads((own / "used.json").read_text(encoding="utf-8"))


def measured(one: Seed, rates: dict[str, float], folder: Path, peer: str) -> dict[str, Any]:
    """Return the scores of a seed's arms and the budgets that they used."""
    ours = one.puna(rates["puna"])
    took = {"puna": budget(ours)}
    log = None
    if peer == "ppo":
        theirs = one.puna(rates["ppo"], ppo)
        took["ppo"] = budget(theirs)
    else:
        theirs, used = one.trl(rates["trl"], took["puna"]["cpu_seconds"], folder)
        log, took["trl"] = used["log"], {name: used[name] for name in took["puna"]}
    models = {"before": one.policy, "puna": ours, peer: theirs}
    return {"seed": one.seed, "start": one.start, "took": took, "scores": {name: one.right(model) for name, model in models.items()}, "log": log}


def budget(model: Artifact) -> dict[str, float]:
    """Return the budget that the training of a model used."""
    counts = {name: float(model.manifest.metrics[name]) for name in ("updates", "checker_calls", "sampled_tokens")}
    return counts | {"cpu_seconds": float(model.manifest.timings["cpu_seconds"])}


def figures(seeds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of all seeds, with intervals over their questions."""
    answers: dict[str, dict[str, list[float]]] = {name: {} for name in seeds[0]["scores"]}
    for one, name in ((one, name) for one in seeds for name in answers):
        for key, value in one["scores"][name].items():
            answers[name].setdefault(f"{one['start']}/{key}", []).append(value)
    # Seeds with a common start have the same questions, so each question counts once, by its mean.
    pooled = {name: {key: statistics.fmean(values) for key, values in some.items()} for name, some in answers.items()}
    found: dict[str, Any] = {"seeds_reported": [one["seed"] for one in seeds]}
    peer = next(name for name in answers if name not in ("before", "puna"))
    pairs = (("puna_gain", "puna", "before"), (f"{peer}_gain", peer, "before"), (f"puna_over_{peer}", "puna", peer))
    for name, arm, other in pairs:
        gain = paired_difference(pooled[arm], pooled[other])
        found |= {name: gain.value, f"{name}_low": gain.low, f"{name}_high": gain.high}
        found[f"{name}_by_seed"] = [paired_difference(one["scores"][arm], one["scores"][other]).value for one in seeds]
    found |= {f"right_{name}": statistics.fmean(values.values()) for name, values in pooled.items()}
    for arm in ("puna", peer):
        found |= {f"{arm}_{name}": statistics.fmean(one["took"][arm][name] for one in seeds) for name in seeds[0]["took"][arm]}
    if peer == "trl":
        found["vs_trl_grpo_equal_cpu"] = found["puna_gain"] / found["trl_gain"] if found["trl_gain"] > 0 else None
    if peer == "ppo":
        found = {name.replace("puna", "grpo"): value for name, value in found.items()}
    return found | {"load": os.getloadavg()[0]}


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--model", default="base@latest")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=alignment.drawn(alignment.datetime.date.today(), 3), help="default: three of the day"
    )
    parser.add_argument("--start", type=int, help="seed of the questions and of the finetuned model of all seeds; default: each seed's own")
    parser.add_argument("--rates", type=float, nargs="+", default=[], help="rates to search, of both arms")
    parser.add_argument("--peer", choices=("trl", "ppo"), default="trl", help="the other arm")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    store, folder = Store.open(given.store), given.store.parent / f"{given.store.name}-trl"
    base, seeds = store.resolve(given.model), []
    for number in given.seeds:
        one = Seed(store, base, number if given.start is None else given.start, number)
        for rates in [dict.fromkeys(RATES, rate) for rate in given.rates] or [RATES]:
            seeds.append(measured(one, rates, folder, given.peer))
            shares = {name: round(statistics.fmean(values.values()), 4) for name, values in seeds[-1]["scores"].items()}
            print(json.dumps({"seed": number, "rates": rates, **shares, "took": seeds[-1]["took"]}), flush=True)
    if not given.rates:
        print(json.dumps(figures(seeds), indent=None if given.json else 1))


if __name__ == "__main__":
    main()
