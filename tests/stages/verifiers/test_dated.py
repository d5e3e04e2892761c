"""Dated questions: what depends on a question's month, and the difference between months."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from puna.stages.contract import Prompts, StageConfig, StageRun, execute, parse, stage
from puna.stages.conversations import messages_of, text_of
from puna.stages.prompts.months import (
    DatedPromptsConfig,
    dated_gap,
    dated_prompts,
    dated_questions,
    difference,
    month_number,
    month_text,
)
from puna.stages.prompts.prompts import Task
from puna.stages.training.intervals import evaluation_row
from puna.stages.verifiers.base import is_correct
from puna.stages.verifiers.registry import from_text
from puna.stages.verifiers.scoring import question_of
from puna.storage import PunaError, Store

TASKS = [{"task": "chain_sum", "parameters": {"min_terms": 2, "max_terms": 3}}, {"task": "spell_backward"}, {"task": "digits"}]


def texts(rows: list[dict[str, Any]]) -> list[str]:
    return [text_of(messages_of(row)) for row in rows]


def test_months_count_on_over_the_year() -> None:
    assert month_text(month_number("2026-01") - 1) == "2025-12" and month_number("2026-01") == 24312


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task["task"])
def test_no_two_of_24_months_share_a_question(task: dict[str, Any]) -> None:
    first = month_number("2025-05")
    months = [set(texts(dated_questions(Task(**task), month_text(first + i), 4, 2000))) for i in range(24)]
    assert all(len(one) == 4 for one in months)
    assert sum(len(one & other) for one, other in combinations(months, 2)) == 0


def test_a_month_is_the_same_whenever_it_is_drawn_and_its_answers_are_right(tmp_path: Path) -> None:
    def drawn(folder: str, month: str, before: int) -> list[dict[str, Any]]:
        config = parse(DatedPromptsConfig, {"tasks": TASKS, "month": month, "before": before, "questions": 5, "draws": 2000}, "dated_prompts")
        return execute(dated_prompts, config, {}, Store.open(tmp_path / folder)).read().to_pylist()

    this, beside = drawn("a", "2026-10", 0), drawn("b", "2026-11", 1)
    assert [row for row in beside if row["task"].endswith("@2026-10")] == this
    assert {row["task"] for row in beside} == {f"{task['task']}@2026-{month}" for task in TASKS for month in (10, 11)}
    assert all(is_correct(from_text(row["verifier"]).score(question_of(row), row["reference"]).value) for row in beside)


@pytest.mark.parametrize("month", ["2026-13", "2026", "26-01", "2026-1"])
def test_a_month_is_written_in_one_way(month: str) -> None:
    with pytest.raises(PunaError, match="month"):
        parse(DatedPromptsConfig, {"tasks": TASKS, "month": month}, "dated_prompts")


def test_a_task_too_poor_for_a_month_is_refused() -> None:
    with pytest.raises(PunaError, match=r"task chain_sum: 300 draws give \d different questions for 2026-11.*50 are needed"):
        dated_questions(Task(task="chain_sum", parameters={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}), "2026-11", 50, 300)


def test_the_difference_of_two_shares_is_newcombes() -> None:
    """Newcombe (1998), table II, row (a), method 10: 56/70 against 48/80 is .2 (.0524 to .3339)."""
    gap = difference([True] * 48 + [False] * 32, [True] * 56 + [False] * 14)
    assert gap == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)


@stage(kind="evaluation", version="1")
def by_heart(prompts: Prompts, config: StageConfig, run: StageRun) -> None:
    """Solve all older questions and every second new one."""
    rows = prompts.read().to_pylist()
    run.write_rows([evaluation_row("all", "score", 0.75, len(rows))])
    seen = Counter[str]()
    for row in rows:
        seen[row["task"]] += 1
        right = row["task"].endswith("@2026-10") or seen[row["task"]] % 2
        run.write_rows([{"id": row["id"], "name": "score", "value": float(right)}], "scores")


def test_what_was_learned_by_heart_shows(tmp_path: Path) -> None:
    """An evaluation with right answers to all of last month's questions, and to every second one of this month's."""
    store = Store.open(tmp_path)
    config = parse(DatedPromptsConfig, {"tasks": TASKS, "month": "2026-11", "questions": 10, "draws": 4000}, "dated_prompts")
    asked = execute(dated_prompts, config, {}, store)
    evaluation = execute(by_heart, StageConfig(), {"prompts": asked}, store)
    gap = execute(dated_gap, StageConfig(), {"evaluation": evaluation, "prompts": asked}, store)
    assert gap.manifest.metrics["gap"] == pytest.approx(0.5) and gap.manifest.metrics["by_heart"] is True
