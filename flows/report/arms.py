"""The gain of each alignment round: its policy compared with its control arms, prompt by prompt."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from puna.stages.training.intervals import Interval, paired_difference, wilson
from puna.stages.verifiers.base import is_correct
from puna.storage import Artifact, PunaError
from puna.storage.runs import Made, Sources

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
    "pick_instead": "gold + chosen + checked answers, also of the finetuned model",
    "checked": "finetuning on all distinct checked answers",
    "ranked": "finetuning on the checked answers ranked highest",
    "iterated": "the same, in several iterations of sampling and finetuning",
    "rl": "reinforcement learning",
    "half": "half checked answers, half reinforcement learning",
    "best_of_n": "finetuning on checked answers, evaluated by best of n",
    "dpo_instead": "DPO in place of RL",
    "untaught": "the round without training after DPO",
    "round": "the round",
}
"""Arm → its label, in the order of the table."""
OTHERS = tuple(name for name in NAMES if name != "round")
WITHOUT_RL = tuple(name for name in OTHERS if name not in ("rl", "half"))
CLAIMS = {
    "the round over its strongest control": ("round", OTHERS),
    "its last training": ("round", ("untaught",)),
    "RL in its place over the strongest control": ("rl", WITHOUT_RL),
    "DPO in place of RL over its strongest control": ("dpo_instead", tuple(name for name in WITHOUT_RL if name != "dpo_instead")),
    "synthetic data": ("synthetic", ("chosen", "gold", "pick_random")),
    "the reward model's pick over a random one": ("pick_reward_model", ("pick_random",)),
}
"""Claim → arm, and the controls to compare the arm with: the strongest with at least the arm's budget or, without any, the strongest."""
POLICY_STAGES = ("sft", "dpo", "grpo", "ppo", "distill")


@dataclass(frozen=True)
class Budget:
    """The resources used for an arm since the round began, summed over the ancestors of its evaluation, and over the evaluation itself if
    a search chose its answers (best of n). `labels`: number of preferences."""

    checker_calls: float = 0.0
    labels: float = 0.0
    sampled_tokens: float = 0.0
    updates: float = 0.0
    trained_answers: float = 0.0
    trained_tokens: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def answers_per_update(self) -> float:
        return self.trained_answers / self.updates if self.updates else 0.0

    def ratio(self, other: Budget) -> float:
        """Return the smallest ratio, over the resources in `LAW`, of this budget to another; infinite if the other used none of them."""
        ratios = {name: getattr(self, name) / bound for name in LAW if (bound := getattr(other, name))}
        if ratios.get("cpu_seconds", 0) >= EQUAL_CPU:
            del ratios["cpu_seconds"]
        return min(ratios.values(), default=math.inf)


LAW = ("checker_calls", "labels", "sampled_tokens", "updates", "answers_per_update", "cpu_seconds")
"""Resources that are compared. Trained tokens are not: they depend on the layout of the answers."""
EQUAL_CPU = 0.9  # the ratio from which CPU seconds are equal. Repeated on a busy machine, the same work differs by a tenth


def budget(evaluation: str, before: str, steps: Mapping[str, Artifact], sources: Mapping[str, Sources]) -> Budget | None:
    """Return the resources that an evaluation's arm used beyond those of `before`, the evaluation before the round (empty: none); None if
    unknown. `steps`: step → artifact; `sources`: step → its inputs."""
    try:
        spent = _used(evaluation, steps, sources)
        excluded = set() if "sampled_tokens" in steps[evaluation].manifest.metrics else {steps[evaluation].key}
        own = [spent[key] for key in spent.keys() - (_used(before, steps, sources).keys() if before else set()) - excluded]
        return Budget(*map(sum, zip(*map(_resources, own), strict=True)))
    except (PunaError, OSError, KeyError):
        return None


def _used(step: str, steps: Mapping[str, Artifact], sources: Mapping[str, Sources]) -> dict[str, Artifact]:
    """Return the artifacts of a step and of the steps that it depends on, by key, with the ancestors of given artifacts. The manifests do
    not tell: if two arms' models are equal, the second arm reuses an evaluation whose manifest names the first arm's model."""
    every, left = dict[str, Artifact](), [step]
    for name in left:  # the list grows during the loop
        recorded = sources.get(name) is not None  # else by an earlier version
        every |= {steps[name].key: steps[name]} if recorded else _ancestors(steps[name])
        for source, kind, key in sources.get(name) or ():
            every |= {} if source in steps else _ancestors(Artifact(kind, key, steps[name].files))
            left += [source] if source in steps and source not in left else []
    return every


def _ancestors(artifact: Artifact) -> dict[str, Artifact]:
    """Return an artifact and its ancestors, by key, without the ancestors of artifacts that are no longer in the store."""
    every, left = {artifact.key: artifact}, [artifact]
    while left:
        try:
            records = left.pop().manifest.inputs
        except (PunaError, OSError):
            continue
        for record in records:
            if record.kind != "external" and record.key not in every:
                every[record.key] = Artifact(record.kind, record.key, artifact.files)
                left.append(every[record.key])
    return every


def _resources(artifact: Artifact) -> tuple[float, ...]:
    """Return the resources that one artifact took, in the order of `Budget`. Raise KeyError if one is not recorded."""
    manifest, metrics = artifact.manifest, artifact.manifest.metrics
    trains, samples = manifest.stage in POLICY_STAGES, manifest.stage in ("sample", "grpo", "ppo")
    return (
        float(metrics["checker_calls"] if samples else metrics.get("checker_calls", 0.0)),
        float(artifact.rows() if artifact.kind == "preferences" else 0.0),
        float(metrics["sampled_tokens"] if samples else metrics.get("sampled_tokens", 0.0)),
        float(metrics.get("updates", metrics["steps"]) if trains else 0.0),
        float(metrics["trained_answers"] if trains and manifest.stage != "distill" else 0.0),
        float(metrics.get("trained_tokens", 0.0)),
        float(manifest.timings.get("cpu_seconds", 0.0)),
    )


@dataclass(frozen=True)
class Claim:
    """A gain: an arm's mean minus its strongest control's on the same prompts, with a 95 % interval. `budget_ratio`: the control's budget
    divided by the arm's (`Budget.ratio`); None if either is unknown."""

    name: str
    control: str
    metric: str
    gain: Interval
    budget_ratio: float | None

    @property
    def verdict(self) -> str:
        """Return the verdict as text. The interval of a gain is above 0; the gain is earned if the control's budget was no smaller."""
        if self.gain.low <= 0:
            return "cost" if self.gain.high < 0 else "earned nothing"
        if self.budget_ratio is None:
            return "more, budgets unknown"
        return "earned" if self.budget_ratio >= 1 else "more, for a larger budget"


@dataclass(frozen=True)
class Arms:
    """The arms of a round. `scores`: arm → metric → prompt → 1 or 0. `budgets`: arm → budget, None if it is unknown."""

    number: int
    scores: Mapping[str, Mapping[str, Mapping[str, float]]]
    budgets: Mapping[str, Budget | None]

    @property
    def metrics(self) -> list[str]:
        return [name for name in METRICS if all(name in scores for scores in self.scores.values())]

    def share(self, arm: str, metric: str) -> Interval:
        """Return the share of prompts on which an arm scores 1, with Wilson's interval."""
        values = self.scores[arm][metric]
        return wilson(round(sum(values.values())), len(values))

    def gain(self, arm: str, control: str, metric: str) -> Interval:
        return paired_difference(self.scores[arm][metric], self.scores[control][metric])

    def claims(self) -> list[Claim]:
        """Return a claim per metric and `CLAIMS` entry, over the strongest control with at least the arm's budget, else the strongest."""
        claims = []
        for name, (arm, controls) in CLAIMS.items():
            there = [control for control in controls if control in self.scores]
            if arm not in self.scores or not there:
                continue
            equal = [control for control in there if (self.ratio(control, arm) or 0) >= 1]
            for metric in self.metrics:
                strongest = max(equal or there, key=lambda one: self.share(one, metric).value)
                claims.append(Claim(name, strongest, metric, self.gain(arm, strongest, metric), self.ratio(strongest, arm)))
        return claims

    def ratio(self, control: str, arm: str) -> float | None:
        """Return the smallest ratio, over the resources in `LAW`, of the control's budget to the arm's; None if either is unknown."""
        one, other = self.budgets.get(control), self.budgets.get(arm)
        return one.ratio(other) if one and other else None


def rounds(artifacts: Iterable[tuple[str, Artifact]], made: Iterable[Made] = ()) -> list[Arms]:
    """Return the arms of each round that has control arms, the first round first. `artifacts`: pairs of step name and artifact; `made`: the
    run's log, without which budgets follow the manifests."""
    steps, sources = dict(artifacts), {one.step: one.inputs for one in made}
    by_step = {name: artifact for name, artifact in steps.items() if artifact.kind == "evaluation" and "scores" in artifact.tables}
    by_number: dict[int, dict[str, str]] = {}
    for name in by_step:
        if match := CONTROL.fullmatch(name):
            by_number.setdefault(int(match[2]), {})[match[1]] = name
    for number, arms in by_number.items():
        beside = {"round": f"evaluate_round_{number}", "before": f"evaluate_round_{number - 1}" if number > 1 else "evaluate_sft"}
        arms.update({arm: step for arm, step in beside.items() if step in by_step})
    return [
        Arms(
            number,
            {arm: scores_of(steps[arms[arm]]) for arm in [*NAMES, *sorted(set(arms) - set(NAMES))] if arm in arms},
            {arm: budget(one, arms.get("before", ""), steps, sources) for arm, one in arms.items()},
        )
        for number, arms in sorted(by_number.items())
    ]


def scores_of(evaluation: Artifact) -> dict[str, dict[str, float]]:
    """Return metric → prompt id → score of an evaluation; accuracy is 1 or 0."""
    by_metric: dict[str, dict[str, float]] = {}
    for row in evaluation.read("scores").to_pylist():
        if row["name"] == "score":
            by_metric.setdefault("accuracy", {})[row["id"]] = float(is_correct(row["value"]))
        else:
            by_metric.setdefault(row["name"], {})[row["id"]] = row["value"]
    return by_metric
