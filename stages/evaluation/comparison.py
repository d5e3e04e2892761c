"""Comparison of two models, question by question, with intervals and Holm's correction over the tasks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from puna.stages.training.intervals import Interval, ratio, student, within
from puna.storage import Artifact, PunaError

MAIN = ("verified", "acc", "bits_per_byte")
"""Main metrics of tasks, in order of preference. A task without any of them uses its alphabetically first metric."""
SURE = 0.05  # significance level
TABLE = "task_scores"
SAME = ("version", "shots", "format")  # columns of `task_scores` that must be equal, like `content`, for two models to be comparable
Values = dict[str, tuple[float, float]]
"""Question id → (value, weight)."""
Measured = dict[str, dict[str, tuple[dict[str, Any], Values]]]
"""Task → metric → (row of `task_scores` plus its artifact's key as `evaluation`, the questions' values)."""


@dataclass(frozen=True)
class Difference:
    """The difference between two models in a metric, `other` minus `one`, over the `n` questions that both answered. `p`: two-sided p-value
    of Student's t (of the sign test if all differences are equal); `holm`: `p` after Holm's correction (1979) for the number of rows.
    Perplexities are compared by their logarithms."""

    task: str
    metric: str
    one: float
    other: float
    difference: Interval
    n: int
    p: float
    holm: float = 1.0


def evaluations_of(artifact: Artifact, artifacts: Iterable[Artifact]) -> list[Artifact]:
    """Return a model's benchmark evaluations in `artifacts`, newest first; if `artifact` is itself an evaluation, only that. Raise
    PunaError if there is none."""
    if artifact.kind == "evaluation" and TABLE in artifact.tables:
        return [artifact]
    if artifact.kind != "model":
        raise PunaError(f"{artifact.id} is neither a model nor the evaluation of a benchmark")
    own = [
        one for one in artifacts
        if one.kind == "evaluation" and TABLE in one.tables
        and any(i.kind == "model" and i.name == "model" and i.data_digest == artifact.data_digest for i in one.manifest.inputs)
    ]  # fmt: skip
    if not own:
        raise PunaError(f"{artifact.id} has not been evaluated on any task; run `puna evaluate {artifact.id} --tasks FILE`")
    return sorted(own, key=lambda one: one.manifest.created_at, reverse=True)


def main_metric(metrics: Iterable[str]) -> str:
    return min(metrics, key=lambda name: (MAIN.index(name) if name in MAIN else len(MAIN), name))


def differences(one: Measured, other: Measured, every: bool = False) -> tuple[list[Difference], list[str]]:
    """Return the differences of two models in their main metrics (`every`: all metrics), and remarks on tasks that are not comparable."""
    rows: list[Difference] = []
    remarks: list[str] = []
    tasks = sorted(one.keys() & other.keys())
    for task in tasks:
        metrics = sorted(one[task].keys() & other[task].keys())
        for metric in metrics if every else [main_metric(metrics)] if metrics else []:
            (about, values), (about_other, others) = one[task][metric], other[task][metric]
            unlike = [f"{name} {about[name]} and {about_other[name]}" for name in SAME if about[name] != about_other[name]]
            if about["content"] != about_other["content"]:
                unlike.insert(0, "its task file or data differ; evaluate both models on the same file")
            if unlike or len(values.keys() & others.keys()) < 2:
                remarks.append(f"{task}: {'; '.join(unlike) or 'fewer than two questions in common'}")
                break
            rows.append(_difference(task, metric, values, others))
    if lonely := sorted(one.keys() ^ other.keys()):
        remarks.append(f"only one of the two was evaluated on {', '.join(lonely)}")
    return holm(rows), remarks


def scores_of(evaluations: Sequence[Artifact]) -> Measured:
    """Return the measurements of each task, taken from the first evaluation that has it."""
    results: Measured = {}
    for evaluation in evaluations:
        own: Measured = {}
        single: dict[str, dict[str, float]] = {}
        for row in evaluation.read("scores").to_pylist():
            single.setdefault(row["name"], {})[row["id"]] = row["value"]
        rows = evaluation.read(TABLE).to_pylist()
        for row in rows:
            name, halves = f"{row['task']}/{row['metric']}", row["task"].rpartition(":")
            if halves[0] and any(another["task"] == halves[0] for another in rows):
                continue  # one of two formats; the better one has a row under the task's own name
            weights = single.get(f"{name}:weight", {})
            scale = 1 / math.log(2) if row["metric"] == "bits_per_byte" else 1.0
            values = {key: (value * scale, weights.get(key, 1.0)) for key, value in single.get(name, {}).items()}
            own.setdefault(row["task"], {})[row["metric"]] = ({**row, "evaluation": evaluation.key}, values)
        results = own | results
    return results


def _difference(task: str, metric: str, values: Values, others: Values) -> Difference:
    both = sorted(values.keys() & others.keys())
    weights = [values[key][1] for key in both]
    interval = ratio([others[key][0] - values[key][0] for key in both], weights)
    value, half, freedom = interval.value, interval.high - interval.value, len(both) - 1
    if half > 1e-9 * abs(value):
        p = 1 - within(math.atan(abs(value) / half * student(freedom) / math.sqrt(freedom)), freedom)
    else:  # All questions differ equally, so Student's t has no variance to go by: the exact sign test and its interval.
        p, end = 2.0**-freedom if value else 1.0, value * (2 * (SURE / 2) ** (1 / len(both)) - 1)
        interval = Interval(value, min(end, value), max(end, value))
    means = [sum(some[key][0] for key in both) / sum(weights) for some in (values, others)]
    return Difference(task, metric, means[0], means[1], interval, len(both), max(0.0, p))


def holm(rows: Sequence[Difference]) -> list[Difference]:
    """Return the rows with `holm`, the smallest familywise error rate at which each row's difference is significant."""
    least, corrected = 0.0, {}
    for place, number in enumerate(sorted(range(len(rows)), key=lambda i: rows[i].p)):
        least = max(least, min(1.0, (len(rows) - place) * rows[number].p))
        corrected[number] = least
    return [replace(row, holm=corrected[number]) for number, row in enumerate(rows)]
