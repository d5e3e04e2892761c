"""The gain of each round of alignment: its policy beside its control arms, prompt by prompt."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from puna.stages.training.intervals import Interval, paired, wilson
from puna.stages.verifiers.base import is_correct
from puna.storage import Artifact

CONTROL = re.compile(r"control_(\w+)_(\d+)")
METRICS = {"accuracy": "right", "liked": "right and liked"}
NAMES = {
    "before": "before the round",
    "gold": "gold answers only",
    "chosen": "gold + chosen answers",
    "synthetic": "gold + chosen + synthetic data",
    "pick_reward_model": "gold + chosen + reward model's pick",
    "pick_random": "gold + chosen + random pick",
    "pick_majority": "gold + chosen + majority",
    "pick_verifier": "gold + chosen + checked answers",
    "pick_instead": "and checked answers of the finetuned model",
    "dpo_instead": "DPO in place of RL",
    "no_rl": "the round without RL",
    "no_dpo": "the round without DPO",
    "no_reward_model": "the round without reward model in RL",
    "round": "the round",
}
"""Arms in the order of the table."""
FINETUNED = (
    "before", "gold", "chosen", "synthetic", "pick_random", "pick_majority", "pick_verifier", "pick_instead", "pick_reward_model",
)  # fmt: skip
WITHOUT_RL = (*FINETUNED, "dpo_instead", "no_rl")
CLAIMS = {
    "the round over its strongest control": ("round", WITHOUT_RL),
    "RL on the taste over its strongest control": ("round", (*WITHOUT_RL, "no_reward_model")),
    "RL": ("round", ("no_rl",)),
    "the reward model in RL": ("round", ("no_reward_model",)),
    "DPO before RL": ("round", ("no_dpo",)),
    "DPO in place of RL over its strongest control": ("dpo_instead", (*FINETUNED, "no_rl")),
    "synthetic data": ("synthetic", ("chosen", "gold", "pick_random")),
    "the reward model's pick over a random one": ("pick_reward_model", ("pick_random",)),
}  # fmt: skip
"""What is claimed: an arm, and the controls of which the strongest counts."""


@dataclass(frozen=True)
class Claim:
    """A gain: the arm's mean less that of the strongest control on the same prompts, with its 95 % interval."""

    name: str
    arm: str
    control: str
    metric: str
    gain: Interval

    @property
    def verdict(self) -> str:
        """Return the verdict in words: no gain where the interval holds 0."""
        return "earned" if self.gain.low > 0 else "cost" if self.gain.high < 0 else "earned nothing"


@dataclass(frozen=True)
class Arms:
    """The arms of a round; `scores` by arm and metric: 1 or 0 per prompt."""

    number: int
    scores: Mapping[str, Mapping[str, Mapping[str, float]]]

    @property
    def metrics(self) -> list[str]:
        """Return the metrics that every arm has."""
        return [name for name in METRICS if all(name in scores for scores in self.scores.values())]

    def share(self, arm: str, metric: str) -> Interval:
        """Return an arm's share of prompts with Wilson's interval."""
        values = self.scores[arm][metric]
        return wilson(round(sum(values.values())), len(values))

    def gain(self, arm: str, control: str, metric: str) -> Interval:
        """Return the gain of an arm over another on the same prompts."""
        return paired(self.scores[arm][metric], self.scores[control][metric])

    def claims(self) -> list[Claim]:
        """Return the claims whose arms exist, for each metric."""
        claims = []
        for name, (arm, controls) in CLAIMS.items():
            there = [control for control in controls if control in self.scores]
            if arm not in self.scores or not there:
                continue
            for metric in self.metrics:
                strongest = max(there, key=lambda one: self.share(one, metric).value)
                claims.append(Claim(name, arm, strongest, metric, self.gain(arm, strongest, metric)))
        return claims


def rounds(evaluations: Iterable[tuple[str, Artifact]]) -> list[Arms]:
    """Return the rounds with control arms among evaluations by step name, in order."""
    by_step = {name: artifact for name, artifact in evaluations if "scores" in artifact.tables}
    by_number: dict[int, dict[str, Artifact]] = {}
    for name, artifact in by_step.items():
        if match := CONTROL.fullmatch(name):
            by_number.setdefault(int(match[2]), {})[match[1]] = artifact
    for number, arms in by_number.items():
        beside = {"round": f"evaluate_round_{number}", "before": f"evaluate_round_{number - 1}" if number > 1 else "evaluate_sft"}
        arms.update({arm: by_step[step] for arm, step in beside.items() if step in by_step})
    return [
        Arms(number, {arm: _scores(arms[arm]) for arm in [*NAMES, *sorted(set(arms) - set(NAMES))] if arm in arms})
        for number, arms in sorted(by_number.items())
    ]


def _scores(evaluation: Artifact) -> dict[str, dict[str, float]]:
    by_metric: dict[str, dict[str, float]] = {}
    for row in evaluation.read("scores").to_pylist():
        if row["name"] == "score":
            by_metric.setdefault("accuracy", {})[row["id"]] = float(is_correct(row["value"]))
        else:
            by_metric.setdefault(row["name"], {})[row["id"]] = row["value"]
    return by_metric
