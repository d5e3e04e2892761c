"""A search for settings of RL and of finetuning on checked answers, the same for both: all arms share one finetuned model and reward model.

    python tests/benchmarks/alignment_rates.py --store STORE --seeds 101 102 --arm "rl grpo_equal.schedule.learning_rate=0.002" --arm ranked

Use seeds that are never reported. An arm is a kind and changes to the recipe: `rl`; `checked` and `ranked` finetuning (`most=N`: answers
per prompt); `iterated` (`parts=N`); `half`, finetuning and then RL. Prints one line of JSON per arm: shares of right and of liked answers,
CPU seconds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import alignment  # the benchmark beside this one

from puna.flows.engine.recipe import read_values
from puna.flows.rounds import part_of
from puna.stages.align.average import average
from puna.stages.align.reinforcement import grpo
from puna.stages.align.rejection_sample import RejectionSampleConfig, rejection_sample
from puna.stages.align.sample import sample
from puna.stages.align.sft import sft
from puna.stages.contract.config import parse
from puna.stages.contract.execute import execute
from puna.stages.evaluation.evaluate import evaluate
from puna.storage import Artifact, Store

SHARED = ("rounds=1", "controls=false", "grpo=null", "sft_again=null")


class Round:
    """A round of one seed, up to its last training step."""

    def __init__(self, store: Path, seed: int, model: str, changes: Sequence[str]) -> None:
        self.made = alignment.run(seed, store, model, (*SHARED, *changes))
        self.store, self.seed, self.changes = Store.open(store), seed, changes

    def make(
        self, stage: Any, field: str, changes: Sequence[str], given: dict[str, Any], share: tuple[str, int, int] = ("seed", 1, 1)
    ) -> Artifact:  # fmt: skip
        """Return the artifact of a stage with the recipe's settings and `changes`. `share`: see `part_of`, as in the recipe's own arms."""
        values = {**(read_values("demo", [*self.changes, *changes])[0].get(field) or {}), "seed": self.seed}
        config = parse(stage.config, {k: v for k, v in values.items() if k in stage.config.model_fields}, field)
        return execute(stage, config if share[2] == 1 else part_of(*share, config), given, self.store)

    def tuned(self, model: Artifact, changes: Sequence[str], ranked: bool, most: int, part: int, parts: int) -> list[Artifact]:
        """Return the artifacts of part number `part` of finetuning on checked answers; the model is the last one."""
        made = self.made
        prompts = made["prompts_1"]
        asked = self.make(sample, "sample_equal", changes, {"models": [model], "prompts": prompts}, ("answers", part, parts))
        picking = RejectionSampleConfig(pick="reward_model" if ranked else "verifier", correct=ranked, most=most, seed=self.seed)
        reward = {"reward_model": [made["reward_model_1"]]} if ranked else {}
        picked = execute(rejection_sample, picking, {"answers": asked, "prompts": prompts, **reward}, self.store)
        data = {"model": model, "instructions": [made["instructions"], picked]}
        return [asked, picked, self.make(sft, "sft_equal", changes, data, ("steps", part, parts))]

    def reinforced(self, policy: Artifact, changes: Sequence[str], part: int = 1, parts: int = 1) -> Artifact:
        """Return the policy after part number `part` of the RL training."""
        given = {"policy": policy, "reward_model": [self.made["reward_model_1"]], "prompts": self.made["prompts_1"]}
        return self.make(grpo, "grpo_equal", changes, given, ("rollouts", part, parts))

    def arm(self, kind: str, words: Sequence[str]) -> dict[str, Any]:
        """Return an arm's measurements."""
        own = dict(word.split("=") for word in words if word.startswith(("most=", "parts=")))
        changes = [word for word in words if not word.startswith(("most=", "parts="))]
        most, parts, model, steps = int(own.get("most", 4)), int(own.get("parts", 3)), self.made["sft_1"], []
        if kind in ("checked", "ranked"):
            steps = self.tuned(model, changes, kind == "ranked", most if kind == "ranked" else 1000, 1, 1)
        elif kind == "iterated":
            for part in range(1, parts + 1):
                steps += self.tuned(steps[-1] if steps else model, changes, True, most, part, parts)
        elif kind == "half":
            steps = self.tuned(model, changes, bool(own), most if own else 1000, 1, 2)
        if kind in ("rl", "half"):
            steps.append(self.reinforced(steps[-1] if steps else model, changes, *((2, 2) if kind == "half" else (1, 1))))
        search = {"prompts": self.made["development"], "reward_model": [self.made["reward_model_1"]]}
        policy = self.make(average, "average", changes, {"models": [self.made["sft_first"], steps[-1]], **search}) if steps else model
        measured = self.make(evaluate, "evaluate", (), {"model": policy, "prompts": self.made["prompts"]})
        rows = {row["metric"]: round(row["value"], 4) for row in measured.read().to_pylist() if row["task"] == "all"}
        weight = policy.manifest.metrics.get("weight_2") if steps else None
        seconds = sum(one.manifest.timings["cpu_seconds"] for one in steps)
        return {"right": rows.get("accuracy"), "liked": rows.get("liked"), "cpu_seconds": round(seconds, 1), "trained_weight": weight}


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--model", default="base@latest")
    parser.add_argument("--arm", action="append", default=[], dest="arms", help="KIND [FIELD=VALUE …]")
    parser.add_argument("--set", action="append", default=[], help="FIELD=VALUE of the recipe, for the round and every arm")
    given = parser.parse_args()
    for seed in given.seeds:
        one = Round(given.store, seed, given.model, given.set)
        for arm in given.arms:
            kind, *words = arm.split()
            print(json.dumps({"seed": seed, "arm": arm, **one.arm(kind, words)}), flush=True)


if __name__ == "__main__":
    main()
