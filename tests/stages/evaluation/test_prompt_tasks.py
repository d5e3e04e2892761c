"""Prompts of an artifact as tasks: answers and scores equal those of the stage `evaluate`, question by question."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from puna.stages.contract import execute
from puna.stages.conversations import asking, dump
from puna.stages.curate.contamination import ContaminationConfig, contamination
from puna.stages.evaluation.benchmark import BenchmarkConfig, benchmark
from puna.stages.evaluation.evaluate import EvaluateConfig, evaluate
from puna.storage import Artifact, PunaError, Store
from puna.storage.schemas import table_schema

TURNS = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "hm"}, {"role": "assistant", "content": "what"}, {"role": "user", "content": "cat?"}]


def prompts(store: Store, **change: Any) -> Artifact:
    """Return eight held-out prompts of two tasks, one of them with several turns, and one training prompt."""
    verifier = json.dumps({"name": "regex", "pattern": "[a-m]"})
    rows = [
        {"id": f"{n}", "task": f"task {n % 2}", "split": "heldout" if n < 8 else "train", "tools": None, "reference": "r", "verifier": verifier,
         "messages": dump(TURNS) if n == 3 else asking(f"what is {n} and cat?")}
        for n in range(9)
    ]  # fmt: skip
    rows[5] |= change
    return store.import_table("prompts", pa.Table.from_pylist(rows, schema=table_schema("prompts").schema))


def test_scores_are_those_of_the_stage_evaluate(store: Store, model: Callable[..., Artifact]) -> None:
    asked, given = prompts(store), model(2)
    config = BenchmarkConfig(prompts="chat", max_tokens=40)
    made = execute(benchmark, config, {"model": given, "prompts": [asked]}, store)
    other = execute(evaluate, EvaluateConfig(answers={"max_tokens": 40, "examples": 9}), {"model": given, "prompts": asked}, store)
    expected = {row["id"]: row["value"] for row in other.read("scores").to_pylist()}
    scores = {row["id"]: row["value"] for row in made.read("scores").to_pylist()}
    assert scores == expected and len(scores) == 8 and 0 < sum(scores.values()) < 8
    texts = {row["id"].rpartition("-")[2]: row["text"] for row in made.read("examples").to_pylist()}
    assert texts == {row["id"].removeprefix("prompt-"): row["text"] for row in other.read("examples").to_pylist() if row["kind"] == "answer"}
    table = made.read("task_scores").to_pylist()
    assert [(row["task"], row["metric"], row["n"], row["format"]) for row in table] == [(f"task {n}", "verified", 4, "chat") for n in (0, 1)]
    plain = execute(benchmark, config.replace(prompts="plain", limit=2), {"model": given, "prompts": [asked]}, store)
    assert [row["n"] for row in plain.read("task_scores").to_pylist()] == [2, 2]
    shown = {row["id"]: row["prompt"] for row in plain.read("examples").to_pylist()}
    assert shown["task 1-3"] == "system: Be short.\n\nuser: hm\n\nassistant: what\n\nuser: cat?" and shown["task 0-0"] == "what is 0 and cat?"


def test_prompts_that_cannot_be_scored_are_refused_by_their_names(store: Store, model: Callable[..., Artifact]) -> None:
    given = model()
    for change, message in (
        ({"verifier": None}, r"task task 1: verifier: 1 of 4 prompts have no verifier, for example 5; give each one, or import them with --verifier"),
        ({"verifier": json.dumps({"name": "numerik"})}, r"prompt 5 \(task task 1\): there is no verifier 'numerik'"),
    ):
        with pytest.raises(PunaError, match=message):
            execute(benchmark, BenchmarkConfig(), {"model": given, "prompts": [prompts(store, **change)]}, store)
    with pytest.raises(PunaError, match="has no few-shot examples; leave shots out"):
        execute(benchmark, BenchmarkConfig(shots=2), {"model": given, "prompts": [prompts(store)]}, store)
    with pytest.raises(PunaError, match="give tasks or prompts"):
        execute(benchmark, BenchmarkConfig(), {"model": given}, store)


def test_the_share_that_a_model_was_trained_on_stands_beside(store: Store, model: Callable[..., Artifact]) -> None:
    text = "Seven llamas carry four bags of wool each over the pass, how many bags reach the village below?"
    asked = prompts(store, messages=asking(text))
    row = {"id": "t", "prompt_id": "t", "task": "t", "split": "train", "messages": asking(text), "tools": None, "source": "s", "score": None}
    learned = store.import_table("instructions", pa.Table.from_pylist([row], schema=table_schema("instructions").schema))
    overlaps = execute(contamination, ContaminationConfig(), {"prompts": [asked], "instructions": [learned]}, store)
    made = execute(benchmark, BenchmarkConfig(max_tokens=4), {"model": model(), "prompts": [asked], "overlaps": overlaps}, store)
    assert {row["task"]: row["contaminated"] for row in made.read("task_scores").to_pylist()} == {"task 0": 0.0, "task 1": 0.25}
