"""The gate of an alignment round: measurements, or a person, decide if the candidate replaces the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from puna.stages.contract import Evaluation, Figure, Kind, Prompts, StageConfig, StageRun, stage
from puna.stages.contract.declaration import Reads
from puna.stages.evaluation.comparison import differences, scores_of
from puna.stages.evaluation.task_file import LOWER
from puna.stages.training.intervals import Interval, evaluation_row, mean
from puna.storage import Artifact, PunaError


class ApprovalConfig(StageConfig):
    by: str = Field(min_length=1, description="Name of the person who decides")
    approved: bool = Field(True, description="Replace the policy with the candidate")
    reason: str = Field("", description="Reason for the decision")


@stage(kind="evaluation")
def approval(gate: Evaluation, config: ApprovalConfig, run: StageRun) -> None:
    """Record a person's decision on the candidate of `gate`. The web page of rounds or the next run of the flow `round` acts on it."""
    if gate.manifest.stage != "gate":
        raise PunaError(f"approval: {gate.id} was made by {gate.manifest.stage}; give the artifact of a round's gate")
    run.write_rows([evaluation_row("all", "approved", float(config.approved), 1)])
    reason = f"{'approved' if config.approved else 'refused'} by {config.by}{': ' + config.reason if config.reason else ''}"
    run.metric("verdict", "passed" if config.approved else "refused")
    run.metric("reason", reason)


Weighed = Annotated[Artifact, Kind("model"), Reads(("config.json",))]
"""An input model of which only config.json is read; its identity matters, its weights are not loaded."""
ALL = "all"
SCORES = "scores"


class GateConfig(StageConfig):
    metric: str = Field("score", min_length=1, description="Name of the per-prompt score to compare")
    min_gain: float = Field(0.0, ge=-1, le=1, description="Bound that the 95 % interval of the mean gain over all prompts must lie above")
    max_fall: float = Field(0.05, ge=0, le=1, description="Maximum drop of a task's mean score, or relative increase of bits or perplexity")
    decision: Literal["measured", "person"] = Field("measured", description="measured: the bounds decide; person: an approval decides")


class Comparison(NamedTuple):
    """A paired comparison of two models on a task's prompts: mean scores, and the gain from `before` to `after` with its interval."""

    task: str
    before: Interval
    after: Interval
    gain: Interval
    prompts: int


def compare(before: Mapping[str, float], after: Mapping[str, float], tasks: Mapping[str, str]) -> list[Comparison]:
    """Return paired comparisons of two models' scores: over all prompts, then per task. All arguments are keyed by prompt id.

    Only prompts with both scores count. The interval is Student's t on the paired differences, so differences in difficulty between prompts
    do not widen it. Raise ValueError for fewer than two pairs."""
    pairs = sorted(before.keys() & after.keys())
    if len(pairs) < 2:
        raise ValueError(f"a paired comparison needs at least two prompts that both models answered, not {len(pairs)}")
    comparisons = []
    for task in [ALL, *sorted({tasks[key] for key in pairs})]:
        members = [key for key in pairs if task in (ALL, tasks[key])]
        first, second = [before[key] for key in members], [after[key] for key in members]
        gain = mean([b - a for a, b in zip(first, second, strict=True)])
        comparisons.append(Comparison(task, mean(first), mean(second), gain, len(members)))
    return comparisons


def objections(comparisons: Sequence[Comparison], min_gain: float, max_fall: float) -> list[str]:
    """Return one clause per bound that a candidate misses; an empty list if it passes. `comparisons`: the first covers all prompts."""
    whole, *tasks = comparisons
    objected = []
    if not whole.gain.low > min_gain:
        objected.append(f"its gain of {_with_interval(whole.gain)} over {whole.prompts} prompts is not above {min_gain:g}")
    objected += [
        f"{one.task} falls from {one.before.value:.3f} to {one.after.value:.3f}, more than {max_fall:g}"
        for one in tasks
        if one.gain.value < -max_fall
    ]
    return objected


def benchmark_objections(before: Artifact, after: Artifact, max_fall: float) -> list[str]:
    """Return one clause per task whose main metric got worse by more than `max_fall`. Raise PunaError if the tasks differ."""
    rows, remarks = differences(scores_of([before]), scores_of([after]))
    if remarks:
        raise PunaError(f"gate: {before.id} and {after.id}: {'; '.join(remarks)}")
    objected = []
    for row in rows:
        worse = (row.other - row.one) / row.one if row.metric in LOWER else row.one - row.other
        if worse > max_fall:
            objected.append(f"{row.task} ({row.metric}) goes from {row.one:.3f} to {row.other:.3f}, worse by more than {max_fall:g}")
    return objected


@stage(kind="evaluation")
def gate(
    policy: Weighed, candidate: Weighed, before: Evaluation, after: Evaluation, prompts: Prompts, benchmark_before: Evaluation | None,
    benchmark_after: Evaluation | None, config: GateConfig, run: StageRun,
) -> None:  # fmt: skip
    """Compare a candidate with the policy, prompt by prompt, on held-out prompts, and decide if the candidate may replace the policy.

    `before` and `after` are the evaluations of the policy and the candidate, with one score per prompt in `prompts`. If only one of the two
    answers to a prompt could be scored, the other counts as 0. `benchmark_before` and `benchmark_after` evaluate both models on the same
    task files; no task's main metric may get worse by more than `max_fall`. Metrics: `verdict` (passed, refused, or waits for a person's
    `approval`) and `reason`. The rows have `before`, `after` and `gain` over `all` prompts and per task."""
    if (benchmark_before is None) != (benchmark_after is None):
        raise PunaError("gate: benchmark_before and benchmark_after are compared with each other; give both or neither")
    for model, evaluation, name in (
        (policy, before, "before"), (candidate, after, "after"),
        (policy, benchmark_before, "benchmark_before"), (candidate, benchmark_after, "benchmark_after"),
    ):  # fmt: skip
        if evaluation is not None and not any(i.kind == "model" and i.data_digest == model.data_digest for i in evaluation.manifest.inputs):
            raise PunaError(f"gate: {name}, {evaluation.id}, is not an evaluation of {model.id}")
    tasks = {row["id"]: row["task"] for row in prompts.read(columns=["id", "task"]).to_pylist()}
    first, second = (_scores(evaluation, tasks, config.metric) for evaluation in (before, after))
    first, second = ({key: some.get(key, 0.0) for key in first.keys() | second.keys()} for some in (first, second))
    try:
        comparisons = compare(first, second, tasks)
    except ValueError as error:
        raise PunaError(f"gate: {error}; raise prompts_per_task of the evaluation") from error
    overall = comparisons[0].gain
    objected = objections(comparisons, config.min_gain, config.max_fall)
    if benchmark_before is not None and benchmark_after is not None:
        objected += benchmark_objections(benchmark_before, benchmark_after, config.max_fall)
    gained = f"{_with_interval(overall)} over {comparisons[0].prompts} prompts"
    run.write_rows(
        [
            evaluation_row(one.task, name, interval, one.prompts)
            for one in comparisons
            for name, interval in (("before", one.before), ("after", one.after), ("gain", one.gain))
        ]
    )
    run.metric("verdict", "waits" if config.decision == "person" else "refused" if objected else "passed")
    run.metric("reason", "; ".join(objected) or f"its gain is {gained}, and no task falls by more than {config.max_fall:g}")
    for name, value in (("gain", overall.value), ("gain_low", overall.low), ("gain_high", overall.high)):
        run.metric(name, value)
    bars: list[tuple[Any, float]] = [(one.task, one.gain.value) for one in comparisons]
    run.figure("gain", Figure(title="Gain over the policy", x="task", y="score", kind="bar", series={"gain": bars}))


def _scores(evaluation: Artifact, tasks: Mapping[str, str], metric: str) -> dict[str, float]:
    """Return prompt id → score in `metric`. Raise PunaError if there are no such scores, or if scored prompts are missing from `tasks`."""
    rows = evaluation.read(SCORES).to_pylist() if SCORES in evaluation.tables else []
    comparisons = {row["id"]: float(row["value"]) for row in rows if row["name"] == metric}
    if not comparisons:
        there = ", ".join(sorted({row["name"] for row in rows})) or "none"
        raise PunaError(f"gate: {evaluation.id} has no per-prompt scores {metric} (it has: {there}); run `evaluate` on prompts first")
    if strange := sorted(comparisons.keys() - tasks.keys()):
        raise PunaError(f"gate: {evaluation.id} scores {len(strange)} prompts that are not in the given prompts, for example {strange[0]}")
    return comparisons


def _with_interval(comparisons: Interval) -> str:
    return f"{comparisons.value:+.3f} ({comparisons.low:+.3f} to {comparisons.high:+.3f})"
