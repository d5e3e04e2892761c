"""Prompts and their verifiers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from puna.stages.align.instructions import InstructionsConfig, instructions
from puna.stages.contract import execute, parse
from puna.stages.conversations import messages_of, text_of
from puna.stages.prompts.prompts import PromptsConfig, Task, prompts
from puna.stages.verifiers.base import is_correct
from puna.stages.verifiers.reasoning_gym import generator
from puna.stages.verifiers.registry import from_text
from puna.stages.verifiers.scoring import question_of
from puna.storage import PunaError, Store

SUMS = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}
TASKS = [{"task": "chain_sum", "name": "sums", "parameters": SUMS}, {"task": "spell_backward", "parameters": {"max_word_len": 4}}]


def made(store: Store, **values: Any) -> list[dict[str, Any]]:
    config = parse(PromptsConfig, {"tasks": TASKS, **values}, "prompts")
    return execute(prompts, config, {}, store).read().to_pylist()


def test_no_question_twice_and_splits_share_none(tmp_path: Path) -> None:
    rows = made(Store.open(tmp_path), train=300, heldout=100, seed=3)
    questions = [text_of(messages_of(row)) for row in rows]
    assert len(set(questions)) == len(questions) == 2 * 400
    for task in ("sums", "spell_backward"):
        assert sum(r["task"] == task and r["split"] == "train" for r in rows) == 300
        assert sum(r["task"] == task and r["split"] == "heldout" for r in rows) == 100


def test_rounds_take_disjoint_slices_of_one_stream_and_share_the_heldout(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    whole = {text_of(messages_of(r)) for r in made(store, train=200, heldout=50)}
    heldout = {text_of(messages_of(r)) for r in made(store, train=0, heldout=50)}
    first = {text_of(messages_of(r)) for r in made(store, train=80, heldout=0)}
    second = {text_of(messages_of(r)) for r in made(store, train=120, heldout=0, skip=80)}
    assert not first & second and not heldout & (first | second)
    assert first | second | heldout == whole


def test_references_score_full_marks_and_wrong_answers_do_not(tmp_path: Path) -> None:
    for row in made(Store.open(tmp_path), train=40, heldout=10):
        reference = row["reference"]
        for answer, right in ((reference, True), (f" {reference}\n", True), (f"The answer is {reference}.", True), ("no", False), ("", False)):
            assert is_correct(from_text(row["verifier"]).score(question_of(row), answer).value) == right


def test_chain_sum_by_hand() -> None:
    """The references are checked by arithmetic, not only by the generator."""
    dataset = generator("chain_sum", json.dumps(SUMS), seed=5, size=50)
    for i in range(50):
        entry = dataset[i]
        expression = entry["question"].split(": ")[1].removesuffix(" =")
        total, sign = 0, 1
        for word in expression.split():
            if word in "+-":
                sign = 1 if word == "+" else -1
            else:
                total += sign * int(word)
        assert int(entry["answer"]) == total


def test_a_space_too_small_is_refused_with_its_size(tmp_path: Path) -> None:
    """Two one-digit terms with + or - give 10 * 10 * 2 questions and no more."""
    task = [{"task": "chain_sum", "parameters": {**SUMS, "max_terms": 2}}]
    with pytest.raises(PunaError, match=r"chain_sum: 5000 draws .* give 200 different questions, .*; 190 train questions are needed"):
        made(Store.open(tmp_path), tasks=task, draws=5000, train=150, skip=40, heldout=10)


def test_slices_are_samples_of_one_distribution(tmp_path: Path) -> None:
    """Half of the draws are sums of two terms, from a space of 200; in the order of drawing these would be used up first."""
    store = Store.open(tmp_path)
    tasks = [{"task": "chain_sum", "parameters": SUMS}]
    shares = []
    for skip in (0, 1500):
        rows = made(store, tasks=tasks, train=500, heldout=200, skip=skip)
        for split in ("train", "heldout"):
            short = [len(text_of(messages_of(r)).split(": ")[1].split()) == 4 for r in rows if r["split"] == split]
            shares.append(sum(short) / len(short))
    # 200 of at most 4200 questions: 4.8 %, with a standard deviation of 1.5 % at 200.
    assert max(shares) < 0.11 and max(shares) - min(shares) < 0.06


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"task": "chain_sums"}, "task 'chain_sums': reasoning-gym has no such generator; close: .*chain_sum"),
        ({"task": "chain_sum", "parameters": {"terms": 2}}, "chain_sum: no parameter 'terms'; it has .*max_terms"),
        ({"task": "codeio"}, "task codeio runs the programs of its data set in this process"),
        ({"task": "chain_sum", "parameters": {"min_terms": 9}}, "chain_sum: its parameters .* are invalid: max_terms must be"),
    ],
)
def test_wrong_tasks_are_named(tmp_path: Path, task: dict[str, Any], message: str) -> None:
    with pytest.raises(PunaError, match=message):
        made(Store.open(tmp_path), tasks=[task])


def test_configuration_is_checked() -> None:
    with pytest.raises(PunaError, match="set one of them above 0"):
        parse(PromptsConfig, {"tasks": TASKS, "train": 0, "heldout": 0}, "prompts")
    assert parse(PromptsConfig, {"tasks": TASKS}, "p").tasks[0] == Task(task="chain_sum", name="sums", parameters=SUMS)


def test_instructions_are_the_references_of_the_training_prompts(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    asked = execute(prompts, parse(PromptsConfig, {"tasks": TASKS, "train": 20, "heldout": 5}, ""), {}, store)
    rows = execute(instructions, InstructionsConfig(), {"prompts": asked}, store).read().to_pylist()
    train = {r["id"]: r for r in asked.read().to_pylist() if r["split"] == "train"}
    assert {r["prompt_id"] for r in rows} == set(train) and len(rows) == 40
    for row in rows:
        assert messages_of(row)[1:] == [{"role": "assistant", "content": train[row["prompt_id"]]["reference"]}] and row["source"] == "gold" and row["score"] is None
