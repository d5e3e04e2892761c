"""Baselines without a model: each one's answer, and a check that on no recipe's tasks is the nearest gold answer usually right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from puna.flows.engine.trace import flow_named, load, trace
from puna.stages.contract import execute
from puna.stages.prompts.lookups import EDITS, MAJORITY, NUMBERS, REPLACED, WORDS, answers_without_model
from puna.stages.prompts.prompts import PromptsConfig, prompts
from puna.storage import Store

RECIPES = sorted(p.stem for p in Path(__file__).parents[2].glob("flows/recipes/*.yaml") if (yaml.safe_load(p.read_text()).get("prompts") or {}))
MOST = 0.2
"""Maximum share of held-out questions that a repeated gold answer may answer."""


def question(name: str, text: str, reference: str, split: str = "train", verifier: str = "exact") -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"id": name, "task": "t", "split": split, "messages": json.dumps(messages), "reference": reference, "verifier": json.dumps({"name": verifier})}


def test_what_each_row_without_a_model_answers() -> None:
    """By numbers c is nearest (1 + 81; a is worded differently), by words b and c tie, by tokens a and c (two edits): the first of a tie
    counts.

    Between a and the question, 5 becomes 6 and "now" becomes 0. For b and c, which are worded alike, no token is more frequent.
    """
    gold = [question("a", "turn 5 and 9 now", "9 5"), question("b", "turn 5 and 8", "8 5"), question("c", "turn 7 and 9", "9 7")]
    answers = {NUMBERS: "9 7", WORDS: "8 5", EDITS: "9 5", REPLACED: "9 6", MAJORITY: "8 5"}
    for right in answers.values():
        found = answers_without_model([*gold, question("h", "turn 6 and 90", right, "heldout")])
        assert found == {name: {"h": float(answer == right)} for name, answer in answers.items()}


def test_nothing_without_gold_answers_or_checkers() -> None:
    gold, held = question("a", "add 3 and 4", "7"), question("b", "add 3 and 4 now", "7", "heldout")
    assert answers_without_model([held]) == answers_without_model([gold]) == {}
    assert answers_without_model([gold, {**held, "verifier": json.dumps({"name": "no_such_verifier"})}]) == {}


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_gold_answer_of_a_recipe_is_right_for_a_held_out_question(recipe: str, tmp_path: Path) -> None:
    """Every task gets as many gold answers as the recipe gives some tasks; tasks with long answers get few, to keep the test short."""
    (config,) = (step.config for step in trace(flow_named("align"), load(recipe, flow="align")).steps if step.label == "prompts")
    assert isinstance(config, PromptsConfig)
    tasks = tuple(task.model_copy(update={"gold": True}) for task in config.tasks)
    size = {"train": min(config.train, 100), "heldout": min(config.heldout, 60), "draws": min(config.draws, 2000)}
    made = execute(prompts, config.model_copy(update={"tasks": tasks, **size}), {}, Store.open(tmp_path))
    asked = made.read().to_pylist()
    rows = answers_without_model(asked, trusted=True)
    for task in tasks:
        held = [row["id"] for row in asked if row["task"] == (task.name or task.task) and row["split"] == "heldout"]
        shares = {name: sum(rows[name][one] for one in held) / len(held) for name in (NUMBERS, WORDS, EDITS)}
        assert len(held) == size["heldout"] and max(shares.values()) <= MOST, (task.task, shares)
