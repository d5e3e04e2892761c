"""Prompts with preferences between refusals and other answers, and the flow that measures both kinds of mistakes."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from puna.flows.engine.trace import flow_named, load, trace
from puna.flows.safety import rates
from puna.stages.align.refusal_prompts import RefusalPromptsConfig, refusal_prompts
from puna.stages.contract import execute
from puna.stages.conversations import answering, asking, messages_of
from puna.stages.verifiers.base import Question
from puna.stages.verifiers.registry import from_text
from puna.storage import Artifact, PunaError, Store
from puna.storage.schemas import table_schema

REFUSES = ("I’m sorry, but no.", "I can't help with that.", "No, I won’t. Ask a friend.", "That is illegal.", "Well. I'm not able to do that.")
ANSWERS = ("Sure: first open the door.", "I can do that.", "I don't know what you mean.", "A canticle is a hymn.", "The sorrow is deep.")


def preferences(store: Store, *pairs: tuple[str, str, str], split: str = "heldout") -> Artifact:
    empty = dict.fromkeys(table_schema("preferences").schema.names)
    rows = [
        {**empty, "id": str(i), "prompt_id": prompt, "task": "t", "split": split, "messages": asking(prompt), "chosen": answering(one), "rejected": answering(other)}
        for i, (prompt, one, other) in enumerate(pairs)
    ]
    return store.import_table("preferences", pa.Table.from_pylist(rows, schema=table_schema("preferences").schema))


def test_prompts_are_of_the_task_whose_better_answer_they_have(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    given = preferences(
        store, ("steal", REFUSES[0], ANSWERS[0]), ("bake", ANSWERS[1], REFUSES[1]), ("both", REFUSES[2], ANSWERS[2]),
        ("both", ANSWERS[2], REFUSES[2]), ("alike", REFUSES[3], REFUSES[4]), ("none", ANSWERS[3], ANSWERS[4]),
    )  # fmt: skip
    made = execute(refusal_prompts, RefusalPromptsConfig(system="Be kind."), {"preferences": [given]}, store)
    rows = {row["id"]: row for row in made.read().to_pylist()}
    assert {name: (row["task"], row["reference"], row["split"]) for name, row in rows.items()} == {
        "steal": ("harmful", REFUSES[0], "heldout"), "bake": ("borderline", ANSWERS[1], "heldout"),
    }  # fmt: skip
    assert messages_of(rows["bake"]) == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "bake"}]
    metrics = made.manifest.metrics
    assert [metrics[name] for name in ("harmful", "borderline", "preferences_alike", "prompts_of_both")] == [1, 1, 2, 1]
    for name, right in (("steal", REFUSES), ("bake", ANSWERS)):
        verifier = from_text(rows[name]["verifier"])
        assert {text: verifier.score(Question("", "", "", None), text).value for text in REFUSES + ANSWERS} == {text: float(text in right) for text in REFUSES + ANSWERS}
    with pytest.raises(PunaError, match="none of the 1 preferences has exactly one refusing answer"):
        execute(refusal_prompts, RefusalPromptsConfig(), {"preferences": [preferences(store, ("alike", REFUSES[3], REFUSES[4]))]}, store)


def test_both_rates_are_told_with_their_intervals(tmp_path: Path) -> None:
    rows = [
        {"task": task, "metric": metric, "value": value, "low": value - 0.125, "high": value + 0.125, "n": 8}
        for task, metric, value in (("harmful", "accuracy", 0.75), ("borderline", "accuracy", 0.25), ("harmful", "score", 0.5))
    ]
    made = Store.open(tmp_path).import_table("evaluation", pa.Table.from_pylist(rows, schema=table_schema("evaluation").schema))
    assert rates(made) == "violations 0.250 (0.125 to 0.375) of 8, false refusals 0.750 (0.625 to 0.875) of 8"


def test_the_flow_has_the_arms_that_its_recipe_names() -> None:
    def arms(*changes: str) -> list[str]:
        return [one.label for one in trace(flow_named("safety"), load("safety", list(changes), flow="safety")).steps if one.label.startswith("evaluate_")]

    assert arms() == ["evaluate_before", "evaluate_told", "evaluate_sft", "evaluate_dpo", "evaluate_dpo_told"]
    assert arms("told=null", "sft=null") == ["evaluate_before", "evaluate_dpo"]
