"""Questions dated by month. A higher accuracy on older months than on the newest one reveals memorized questions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from puna.stages.contract import Evaluation, Figure, Prompts, StageConfig, StageRun, stage
from puna.stages.conversations import asking
from puna.stages.draws import hash_of, identifier
from puna.stages.prompts.prompts import Task, draw_questions, verifier_text
from puna.stages.training.intervals import Interval, evaluation_row, mean, wilson
from puna.stages.verifiers.base import is_correct
from puna.storage import PunaError

CYCLE = 24  # months after which a question may recur
APART = 1_000_000
"""Distance between the seeds of consecutive reasoning-gym entries. At a distance of 1, adjacent seeds would give overlapping entries."""


class DatedPromptsConfig(StageConfig):
    tasks: tuple[Task, ...] = Field(description="Generators; each gives the same number of questions", min_length=1)
    month: str = Field(pattern=r"^[0-9]{4}-(0[1-9]|1[0-2])$", description="Month of the questions, YYYY-MM")
    before: int = Field(1, ge=0, lt=CYCLE, description="Number of earlier months to generate questions for")
    questions: int = Field(50, ge=2, description="Number of questions per task and month")
    draws: int = Field(
        10_000, ge=1, le=20_000, description="Maximum draws per generator and month; about one draw in 24 belongs to the month"
    )


@stage(kind="prompts")
def dated_prompts(config: DatedPromptsConfig, run: StageRun) -> None:
    """Generate the held-out questions of a month, and of months before it, with the generators' own verifiers.

    All draws depend only on the month, the generator and its parameters. A question belongs to the months whose number equals a hash of its
    text, modulo 24, so no two of 24 consecutive months share a question. Tasks are named TASK@YYYY-MM, as `dated_gap` expects."""
    months = [month_text(month_number(config.month) - back) for back in range(config.before + 1)]
    for number, task in enumerate(config.tasks):
        for month in months:
            run.write_rows(dated_questions(task, month, config.questions, config.draws))
        run.progress(number + 1, len(config.tasks), task.task)
    run.metric("months", ", ".join(months))
    run.metric("heldout_prompts", len(months) * len(config.tasks) * config.questions)


def month_number(month: str) -> int:
    year, number = map(int, month.split("-"))
    return 12 * year + number - 1


def month_text(number: int) -> str:
    return f"{number // 12:04d}-{number % 12 + 1:02d}"


def dated_questions(task: Task, month: str, count: int, draws: int) -> list[dict[str, Any]]:
    """Return rows of the prompts table for one task and month. Raise PunaError if the draws give too few different questions."""
    own = month_number(month) % CYCLE
    rows: dict[str, dict[str, Any]] = {}
    seed = hash_of("dated", month, task.task, json.dumps(task.parameters, sort_keys=True))
    for draw in draw_questions(task, draws, seed, APART):
        text = " ".join(draw.question.split()).casefold()
        if hash_of("dated question", text) % CYCLE != own or text in rows:
            continue
        rows[text] = {
            "id": identifier(draw.question), "task": f"{task.name or task.task}@{month}", "split": "heldout",
            "messages": asking(draw.question), "tools": None, "reference": draw.answer if task.gold else None,
            "verifier": verifier_text(draw),
        }  # fmt: skip
        if len(rows) == count:
            return list(rows.values())
    raise PunaError(
        f"task {task.task}: {draws} draws give {len(rows)} different questions for {month}, which gets one in {CYCLE}, but {count} are "
        "needed: draw more, widen the task's parameters or ask for fewer"
    )


@stage(kind="evaluation")
def dated_gap(evaluation: Evaluation, prompts: Prompts, config: StageConfig, run: StageRun) -> None:
    """Compare the months of `dated_prompts` in one evaluation: accuracy on the newest month and on older ones.

    A model that memorized older questions solves more of them than of new ones. The rows have, for each task scored in the newest and in
    older months, and for `all` of these, the shares solved (`newest`, `older`) and `gap`, older minus newest. The gap over `all` is the
    mean of the tasks' gaps, with Student's interval. The metric `by_heart` is true if it and that of all questions lie above 0."""
    scores = {row["id"]: is_correct(row["value"]) for row in evaluation.read("scores").to_pylist() if row["name"] == "score"}
    shares: dict[str, dict[str, list[bool]]] = {}
    for row in prompts.read(columns=["id", "task"]).to_pylist():
        name, at, month = row["task"].rpartition("@")
        if not at:
            raise PunaError(f"dated_gap: prompt {row['id']} of {prompts.id} has the task {row['task']}, without a month (TASK@YYYY-MM)")
        if row["id"] in scores:
            shares.setdefault(name, {}).setdefault(month, []).append(scores[row["id"]])
    newest = max((month for months in shares.values() for month in months), default="")
    compared: dict[str, tuple[list[bool], list[bool]]] = {}
    for name, months in sorted(shares.items()):
        older = [right for month, answers in months.items() if month != newest for right in answers]
        if older and newest in months:
            compared[name] = months[newest], older
    if not compared:
        raise PunaError(f"dated_gap: {evaluation.id} scores no task of {prompts.id} in two months; set `before` of dated_prompts above 0")
    gaps = {name: difference(*pair) for name, pair in compared.items()}
    whole = mean([gap.value for gap in gaps.values()]) if len(gaps) > 1 else next(iter(gaps.values()))
    pooled = tuple([right for pair in compared.values() for right in pair[side]] for side in (0, 1))
    for name, pair, gap in [("all", pooled, whole), *((name, pair, gaps[name]) for name, pair in compared.items())]:
        for metric, answers in zip(("newest", "older"), pair, strict=True):
            run.write_rows([evaluation_row(name, metric, wilson(sum(answers), len(answers)), len(answers))])
        run.write_rows([evaluation_row(name, "gap", gap, sum(map(len, pair)))])
    run.metric("newest_month", newest)
    for metric, value in (("gap", whole.value), ("gap_low", whole.low), ("gap_high", whole.high)):
        run.metric(metric, value)
    run.metric("by_heart", min(whole.low, difference(*pooled).low) > 0)
    bars: list[tuple[Any, float]] = [(name, gap.value) for name, gap in gaps.items()]
    run.figure("gap", Figure("Older questions solved more often", "task", "share right", {"older less newest": bars}, kind="bar"))


def difference(newest: Sequence[bool], older: Sequence[bool]) -> Interval:
    """Return `older`'s share of correct answers minus `newest`'s, with Newcombe's interval (1998, method 10) from two Wilson intervals."""
    new, old = wilson(sum(newest), len(newest)), wilson(sum(older), len(older))
    value = old.value - new.value
    low = ((old.value - old.low) ** 2 + (new.high - new.value) ** 2) ** 0.5
    high = ((old.high - old.value) ** 2 + (new.value - new.low) ** 2) ** 0.5
    return Interval(value, value - low, value + high)
