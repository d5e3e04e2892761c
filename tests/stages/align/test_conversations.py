"""Conversations in the tables: several turns, rankings with ties, answers without a counterpart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from puna.models.tokens.tokenizer import Tokenizer
from puna.stages.align.reward_model import RewardModelConfig, collate, reward_model
from puna.stages.align.sft import SftConfig, read_instructions, sft
from puna.stages.contract import execute
from puna.stages.conversations import answering, as_text, asking, content_of, dump, messages_of, text_of
from puna.stages.training.bad_rows import BadRows, Limit
from puna.stages.training.rankings import by_tier, pairs_of, read_preferences, render_ranked
from puna.stages.training.train import render_conversation
from puna.storage import Artifact, PunaError, Store
from puna.storage.catalog import query
from puna.storage.schemas import table_schema

Tiny = Callable[..., Artifact]
DIALOGUE = [
    {"role": "system", "content": "say and"},
    {"role": "user", "content": "1 + 2"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "and 3 - 1"},
    {"role": "assistant", "content": "2 and 2"},
]


def table(store: Store, name: str, rows: list[dict[str, Any]]) -> Artifact:
    loose = pa.schema([field.with_nullable(True) for field in table_schema(name).schema])
    return store.import_table(name, table_schema(name).conform(pa.Table.from_pylist(rows, schema=loose)))


def instruction(name: str, messages: list[dict[str, Any]], split: str = "train") -> dict[str, Any]:
    return {"id": name, "prompt_id": name, "task": "t", "split": split, "messages": dump(messages), "source": "s"}


def preference(name: str, prompt: str, **fields: Any) -> dict[str, Any]:
    return {"id": name, "prompt_id": prompt, "task": "t", "split": "train", "messages": asking(f"say {prompt}"), **fields}


RANKED = {
    "chosen": answering("1 1"),
    "rejected": answering("no no"),
    "others": dump(
        [{"role": "assistant", "content": text, "rank": rank} for text, rank in (("2", 2), ("1", 0), ("no", -1), ("3", 1), ("and", 1))]
    ),
}


def test_every_turn_of_the_assistant_is_learned_and_nothing_else(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    tokenizer = Tokenizer.load(tiny_model(store).path())
    (example,) = render_conversation(tokenizer, instruction("a", DIALOGUE) | {"tools": None})
    ids, mask = example.prompt + example.answers[0], [False] * len(example.prompt) + example.masks[0]
    assert ids == tokenizer.chat(DIALOGUE, add_generation_prompt=False)
    # The trained tokens are two spans: the two answers, each with the token that ends its turn.
    runs: list[list[int]] = []
    for at, learned in enumerate(mask):
        if learned and (not at or not mask[at - 1]):
            runs.append([])
        if learned:
            runs[-1].append(ids[at])
    assert [tokenizer.decode(run) for run in runs] == ["3<|eot_id|>", "2 and 2<|eot_id|>"]
    with pytest.raises(PunaError, match="row b: .*no turn has the role assistant"):
        render_conversation(tokenizer, instruction("b", DIALOGUE[:2]) | {"tools": None})


def test_both_engines_learn_the_same_turns(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    data = table(store, "instructions", [instruction(f"{i}", [*DIALOGUE[: 3 + 2 * (i % 2)]]) for i in range(8)])
    fit = {"epochs": 2.0, "batch_size": 8, "schedule": {"warmup_steps": 0, "shape": "constant"}}
    losses = []
    for engine in ("puna", "trl"):
        made = execute(sft, SftConfig(engine=engine, training=fit), {"model": tiny_model(store), "instructions": [data]}, store)
        losses.append([row["loss"] for row in made.read("training_log").to_pylist()])
    assert losses[1] == pytest.approx(losses[0], rel=2e-3) and len(losses[0]) == 2


def test_held_out_conversations_are_not_learned_from(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    data = table(store, "instructions", [instruction("a", DIALOGUE), instruction("b", DIALOGUE, "heldout")])
    assert [row["id"] for row in read_instructions([data])] == ["a"]
    with pytest.raises(PunaError, match="no training instructions"):
        read_instructions([table(store, "instructions", [instruction("b", DIALOGUE, "heldout")])])


def test_what_the_chat_format_would_leave_out_is_refused(tmp_path: Path, tiny_model: Tiny) -> None:
    tokenizer = Tokenizer.load(tiny_model(Store.open(tmp_path)).path())
    called = [*DIALOGUE[:2], {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}]
    with pytest.raises(PunaError, match="row a: turn 2: "):
        render_conversation(tokenizer, instruction("a", called) | {"tools": None})


def test_a_ranking_is_one_group_of_tiers(tmp_path: Path, tiny_model: Tiny) -> None:
    """0 ranks equal to chosen, -1 equal to rejected, and the answers between them follow their rank."""
    store = Store.open(tmp_path)
    data = table(store, "preferences", [preference("a", "p", edited=answering("1 2 3"), **RANKED), preference("b", "q", **RANKED)])
    rows = read_preferences([data], ["better"])
    assert [[content_of(m) for m in tier] for tier in by_tier(rows[0])] == [["1 2 3"], ["1 1", "1"], ["3", "and"], ["2"], ["no", "no no"]]
    tokenizer = Tokenizer.load(tiny_model(store).path())
    first, second = (one.example for one in render_ranked(tokenizer, rows, Limit(4096, "row"), BadRows(RewardModelConfig(), "test")))
    assert second.groups == [[[0, 1], [2, 3], [4], [5, 6]]]
    assert set(pairs_of(second, "best_worst")) == {(b, w) for b in (0, 1) for w in (5, 6)}
    assert set(pairs_of(second, "best_rest")) == {(b, w) for b in (0, 1) for w in (2, 3, 4, 5, 6)}
    batch = collate([first, second])
    assert batch.rank.tolist() == [0, 1, 1, 2, 2, 3, 4, 4, 0, 0, 1, 1, 2, 3, 3]
    assert batch.targets.prompt.tolist() == [0] * 8 + [1] * 7


def test_an_answer_that_was_cut_off_does_not_end(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    tokenizer = Tokenizer.load(tiny_model(store).path())
    data = table(store, "preferences", [preference("a", "p", chosen=answering("1 1"), rejected=answering("no no", finished=False))])
    (one,) = render_ranked(tokenizer, read_preferences([data], None), Limit(4096, "row"), BadRows(RewardModelConfig(), "test"))
    chosen, rejected = one.example.answers
    assert chosen[-1] in tokenizer.stop_ids and not set(rejected) & set(tokenizer.stop_ids)
    assert [tokenizer.decode(ids).strip() for ids in (chosen[:-1], rejected)] == ["1 1", "no no"]
    # Only an answer's end is masked.
    assert one.example.masks == [[True] * (len(chosen) - 1) + [False], [True] * len(rejected)]


def test_a_reward_model_orders_rankings_of_any_length(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    rows = [preference(f"{i}", f"{i}", **(RANKED if i % 2 else {**RANKED, "others": None})) for i in range(8)]
    rows.append(preference("one", "one", chosen=answering("1")))
    rows.append(preference("two", "two", rejected=answering("no")))
    given = {"model": tiny_model(store), "preferences": [table(store, "preferences", rows)]}
    made = execute(reward_model, RewardModelConfig(training={"epochs": 20.0, "batch_size": 8, "schedule": {"learning_rate": 3e-3}}), given, store)
    # Rows with only one side compare nothing; those without a level are used at any requested level.
    assert {row["id"]: row["rule"] for row in made.read("dropped").to_pylist()} == {"one": "one_sided", "two": "one_sided"}
    assert made.manifest.metrics["train_pairs"] == 8 and made.manifest.metrics["train_accuracy"] == 1.0


def test_conversations_are_read_by_sql_and_by_people(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    table(store, "instructions", [instruction("a", DIALOGUE)])
    table(store, "preferences", [preference("b", "p", **RANKED)])
    found = query(store, "select messages->>'$[1].content' as asked, messages->>'$[#-1].role' as last from instructions").to_pylist()
    assert found == [{"asked": "1 + 2", "last": "assistant"}]
    assert query(store, "select chosen->>'content' as said from preferences").to_pylist() == [{"said": "1 1"}]
    assert as_text(DIALOGUE[1:2]) == "1 + 2" and as_text(DIALOGUE[1:3]) == "user: 1 + 2\n\nassistant: 3"
    assert text_of(DIALOGUE[1:3]) == "1 + 2\n3"
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    assert json.dumps(call["tool_calls"]) in as_text([call])


@pytest.mark.parametrize("text", ["no JSON", "{}", "[]", '["a"]', "3"])
def test_a_column_that_holds_no_messages_is_named(text: str) -> None:
    with pytest.raises(PunaError, match="row x: column messages"):
        messages_of({"id": "x", "messages": text})
