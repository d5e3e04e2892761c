"""Rows that the chat template refuses or that are too long: they are dropped with their reason, or the run is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from puna.stages.align.data_quality import DataQualityConfig, data_quality
from puna.stages.align.dpo import DpoConfig, dpo
from puna.stages.align.reinforcement import PpoConfig, ppo
from puna.stages.align.reward_model import RewardModelConfig, reward_model
from puna.stages.align.sample import SampleConfig, sample
from puna.stages.align.sft import SftConfig, sft
from puna.stages.contract import execute
from puna.stages.conversations import answering, asking, dump
from puna.stages.evaluation.evaluate import EvaluateConfig, evaluate
from puna.stages.verifiers.registry import to_text
from puna.storage import Artifact, PunaError, Store
from puna.storage.schemas import table_schema

Tiny = Callable[..., Artifact]
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
LONG = "1 + 2 - 3 " * 40
FIT = {"batch_size": 2, "compute": {"micro_batch_tokens": 96}}
GIVEN = {"task": "t", "split": "train", "tools": None, "source": "s", "level": "better"}
RULES = {"b-call": "chat_template", "c-long": "too_long"}


def table(store: Store, name: str, rows: list[dict[str, Any]]) -> Artifact:
    loose = pa.schema([field.with_nullable(True) for field in table_schema(name).schema])
    return store.import_table(name, table_schema(name).conform(pa.Table.from_pylist(rows, schema=loose)))


def instructions(store: Store, broken: bool = False) -> Artifact:
    asked = {"role": "user", "content": "say 1"}
    said = {"a": answer("1"), "b-call": CALL, "c-long": answer(LONG), "d": answer("2")}
    rows = [{**GIVEN, "id": name, "prompt_id": name, "messages": dump([asked, turn])} for name, turn in said.items()]
    if broken:
        rows.append({**GIVEN, "id": "e", "prompt_id": "e", "messages": "{no JSON"})
    return table(store, "instructions", rows)


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def preferences(store: Store) -> Artifact:
    """Return preferences on one prompt, whose valid rows are kept, and one preference on another prompt."""
    chosen = {"a": answering("1"), "b-call": dump(CALL), "c-long": answering(LONG), "d": answering("2 and 1")}
    rows = [
        {**GIVEN, "id": name, "prompt_id": "p", "messages": asking("say 1"), "chosen": said, "rejected": answering("no")}
        for name, said in chosen.items()
    ]
    return table(store, "preferences", [*rows, {**rows[0], "id": "q", "prompt_id": "q", "split": "heldout"}])


def check(made: Artifact) -> None:
    """Check that two rows are dropped with rule, sizes and a detail that names row, turn and reason; metrics count them."""
    dropped = {row["id"]: row for row in made.read("dropped").to_pylist()}
    assert {name: row["rule"] for name, row in dropped.items()} == RULES
    assert dropped["b-call"]["detail"].startswith("row b-call: turn 1: the template does not write its tool call")
    assert dropped["c-long"]["value"] > dropped["c-long"]["threshold"] == 96 and "has" in dropped["c-long"]["detail"]
    metrics = made.manifest.metrics
    assert metrics["dropped_chat_template"] == metrics["dropped_too_long"] == 1


@pytest.mark.parametrize("engine", ["puna", "trl"])
def test_sft_trains_on_the_others(engine: str, tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    given = {"model": tiny_model(store), "instructions": [instructions(store)]}
    made = execute(sft, SftConfig(engine=engine, training=FIT), given, store)
    check(made)
    assert made.manifest.metrics["dropped_rows"] == made.manifest.metrics["instructions"] == 2
    with pytest.raises(PunaError, match=r"sft: row b-call: turn 1: .*bad_rows=drop"):
        execute(sft, SftConfig(engine=engine, training=FIT, bad_rows="refuse"), given, store)


def test_preferences_are_dropped_one_by_one(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    given = {"model": tiny_model(store), "preferences": [preferences(store)]}
    made = execute(dpo, DpoConfig(training=FIT), given, store)
    check(made)
    assert made.manifest.metrics["preferences"] == 2
    # An answer that was truncated before its first word has no token to train on.
    blank = {"id": "z", "prompt_id": "z", "messages": asking("say 1"), "chosen": answering("1"), "rejected": answering("", False)}
    more = {**given, "preferences": [*given["preferences"], table(store, "preferences", [{**GIVEN, **blank}])]}
    for one in (execute(dpo, DpoConfig(training=FIT), more, store), execute(reward_model, RewardModelConfig(training=FIT), more, store)):
        assert one.manifest.metrics["dropped_empty"] == 1
    scorer = execute(reward_model, RewardModelConfig(training=FIT), given, store)
    check(scorer)
    assert (scorer.manifest.metrics["train_pairs"], scorer.manifest.metrics["heldout_pairs"]) == (2, 1)


def test_data_quality_drops_them_first(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    given = {"model": tiny_model(store), "instructions": instructions(store)}
    check(execute(data_quality, DataQualityConfig(micro_batch_tokens=96, semantic={"clusters": 1}), given, store))
    broken = {**given, "instructions": instructions(store, broken=True)}
    made = execute(data_quality, DataQualityConfig(micro_batch_tokens=96, semantic={"clusters": 1}), broken, store)
    assert {"e": "not_messages", **RULES}.items() <= {row["id"]: row["rule"] for row in made.read("dropped").to_pylist()}.items()


def test_ppo_asks_the_others(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    texts = {"a": "say 1", "c-long": LONG, "d": "say 2"}
    verifier = {"verifier": '{"name": "exact"}', "reference": "1"}
    rows = [{**GIVEN, **verifier, "id": name, "messages": asking(text)} for name, text in texts.items()]
    given = {"policy": tiny_model(store), "prompts": table(store, "prompts", rows)}
    sizes = {"rollouts": 1, "prompts": 2, "minibatches": 1, "answers": 2, "max_tokens": 2, "compute": {"micro_batch_tokens": 96}}
    made = execute(ppo, PpoConfig(reward="verifier", **sizes), given, store)
    ((row),) = made.read("dropped").to_pylist()
    assert (row["id"], row["rule"], row["threshold"]) == ("c-long", "too_long", 96.0)
    whole = {**sizes, "prompts": 3, "max_tokens": 2040, "answers": 2, "compute": {"micro_batch_tokens": 1 << 14}}
    with pytest.raises(PunaError, match=r"prompts can be used \(3 too_long\).*the prompt with an answer of max_tokens=2040 has 20\d\d tokens, but the model's max_position_embeddings=2048; lower max_tokens"):
        execute(ppo, PpoConfig(reward="verifier", **whole), given, store)
    with pytest.raises(PunaError, match="has 3 training prompts, 1 of them dropped"):
        execute(ppo, PpoConfig(reward="verifier", **{**sizes, "prompts": 3}), given, store)


def test_prompts_beyond_the_context_are_not_answered(tmp_path: Path, tiny_model: Tiny) -> None:
    """The model has 2048 positions; what it would write beyond them is noise. With a window, positions do not grow."""
    store = Store.open(tmp_path)
    rows = [{**GIVEN, "id": name, "messages": asking(text)} for name, text in {"a": "say 1", "b-long": "1 + 2 - 3 " * 700}.items()]
    given = {"models": tiny_model(store), "prompts": table(store, "prompts", rows)}
    made = execute(sample, SampleConfig(answers=2, max_tokens=2), given, store)
    assert {row["prompt_id"] for row in made.read().to_pylist()} == {"a"}
    assert [(row["id"], row["rule"], row["threshold"]) for row in made.read("dropped").to_pylist()] == [("b-long", "too_long", 2048.0)]
    made = execute(sample, SampleConfig(answers=1, max_tokens=2, serving={"window": 512, "sinks": 16}), given, store)
    assert made.rows() == 2 and made.rows("dropped") == 0


def test_questions_beyond_the_context_are_not_evaluated(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    texts = {"a": "say 1", "b-long": "1 + 2 - 3 " * 700}
    row = {**GIVEN, "split": "heldout", "verifier": to_text("regex", pattern="1")}
    rows = [{**row, "id": name, "messages": asking(text)} for name, text in texts.items()]
    given = {"model": tiny_model(store), "prompts": table(store, "prompts", rows)}
    made = execute(evaluate, EvaluateConfig(answers={"max_tokens": 2}), given, store)
    assert [(row["id"], row["rule"], row["threshold"]) for row in made.read("dropped").to_pylist()] == [("b-long", "too_long", 2048.0)]
    assert [row["id"] for row in made.read("scores").to_pylist()] == ["a"]
    made = execute(evaluate, EvaluateConfig(answers={"max_tokens": 2}, serving={"window": 512, "sinks": 16}), given, store)
    assert made.rows("scores") == 2 and made.rows("dropped") == 0


def test_one_clear_error_where_nothing_is_left(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    tight = {**FIT, "compute": {"micro_batch_tokens": 16}}
    given = {"model": tiny_model(store), "instructions": [instructions(store)]}
    with pytest.raises(PunaError, match=r"sft: none of the 4 training instructions can be used \(1 chat_template, 3 too_long\)\. The first: row a: "):
        execute(sft, SftConfig(training=tight), given, store)
