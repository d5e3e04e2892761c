"""Stage dpo with loss kto: answers labelled good or bad one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.stages.align.dpo import DpoConfig, dpo, mismatch
from puna.stages.contract import External, execute
from puna.stages.conversations import answering, asking, content_of, dump
from puna.stages.io.imports import ImportPreferencesConfig, import_preferences
from puna.stages.training.rankings import by_label
from puna.stages.training.train import Example
from puna.storage import Artifact, PunaError, Store
from puna.storage.schemas import table_schema

Tiny = Callable[..., Artifact]
FIT: dict[str, Any] = {"batch_size": 12, "schedule": {"learning_rate": 1e-3, "warmup_steps": 0.0, "shape": "constant"}}


def rows_of(store: Store, rows: list[dict[str, Any]]) -> Artifact:
    schema = table_schema("preferences").schema
    whole = [{**dict.fromkeys(schema.names), "id": f"{i:02d}", "prompt_id": f"{i:02d}", "task": "t", "split": "train", **row} for i, row in enumerate(rows)]
    return store.import_table("preferences", pa.Table.from_pylist(whole, schema=schema))


def answers(store: Store, **more: str) -> Artifact:
    """Return eight good and four bad answers."""
    return rows_of(store, [{**more, "prompt_id": f"{more}{i:02d}", "messages": asking(f"say {i}{'.' * len(more)}"), **({"chosen": answering("1")} if i % 3 else {"rejected": answering("no")})} for i in range(12)])


def test_single_answers_are_learned_from(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    given_ = {"model": tiny_model(store), "preferences": [answers(store), answers(store, split="heldout")]}
    logs = []
    for number, size in enumerate((4096, 64)):
        config = DpoConfig(loss="kto", loss_parameters={"undesirable_weight": 2.5}, nll_weight=0, training={**FIT, "epochs": 5.0, "compute": {"micro_batch_tokens": size}})
        made = execute(dpo, config, given_, Store.open(tmp_path / str(number)))
        logs.append(made.read("training_log").to_pylist())
        metrics = made.manifest.metrics
        assert (metrics["good_answers"], metrics["bad_answers"]) == (8, 4) and metrics["final_margin"] > 0.01
        # The same answers are held out: their metrics are what the next step would start with.
        assert metrics["heldout_answers"] == 12 and metrics["heldout_margin"] > metrics["final_margin"]
    # At the reference every ratio and the KL divergence are 0: the loss is half of each answer's weight.
    assert logs[0][0]["loss"] == pytest.approx((8 * 1.0 + 4 * 2.5) / 2 / 12, rel=1e-5)
    assert logs[0][-1]["chosen_reward"] > 0 > logs[0][-1]["rejected_reward"]
    assert [row["loss"] for row in logs[1]] == pytest.approx([row["loss"] for row in logs[0]], abs=1e-4)


def test_imported_labels_and_pairs_train_together_with_adapters(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    lines = [dump({"prompt": f"say {i}", "completion": "1 + 2", "label": i % 2 == 0}) for i in range(6)]
    (tmp_path / "labels.jsonl").write_text("\n".join(lines) + "\n")
    labels = execute(import_preferences, ImportPreferencesConfig(heldout_fraction=0), {"inputs": External.resolve(str(tmp_path / "labels.jsonl"))}, store)
    between = dump([{"role": "assistant", "content": "2", "rank": 1}, {"role": "assistant", "content": "3", "rank": -1}])
    ranking = {"messages": asking("say it"), "chosen": answering("1"), "rejected": answering("no"), "edited": answering("1 !"), "others": between}
    pairs = rows_of(store, [{**ranking, "level": "better"}, {**ranking, "level": "slightly_better"}])
    tiers = by_label({**ranking, "id": "x"})
    assert [[content_of(one) for one in tier] for tier in tiers] == [["1 !", "1"], ["3", "no"]]
    config = DpoConfig(loss="kto", method="lora", lora={"rank": 2}, training={**FIT, "batch_size": 4})
    made = execute(dpo, config, {"model": tiny_model(store), "preferences": [labels, pairs]}, store)
    assert (made.manifest.metrics["good_answers"], made.manifest.metrics["bad_answers"]) == (3 + 2, 3 + 2)


def test_other_losses_drop_what_compares_nothing(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    given_ = {"model": tiny_model(store), "preferences": [answers(store)]}
    with pytest.raises(PunaError, match=r"dpo: none of the 12 training preferences can be used \(12 one_sided\).*row 00: only a bad answer is known.*loss kto"):
        execute(dpo, DpoConfig(training=FIT), given_, store)
    pair = rows_of(store, [{"id": "pair", "messages": asking("say"), "chosen": answering("1"), "rejected": answering("no")}])
    given_["preferences"].append(pair)
    made = execute(dpo, DpoConfig(training=FIT), given_, store)
    assert made.manifest.metrics["preferences"] == 1 and made.manifest.metrics["dropped_one_sided"] == 12
    with pytest.raises(PunaError, match="give preferences for at least two prompts"):
        execute(dpo, DpoConfig(loss="kto", training=FIT), {**given_, "preferences": [pair]}, store)


@given(st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(1, 5), min_size=1, max_size=3)), min_size=1, max_size=8), st.integers(10, 90), st.integers(0, 9))
@settings(max_examples=60)
def test_a_prompt_meets_answers_of_others_that_fit(sizes: list[tuple[int, list[int]]], room: int, seed: int) -> None:
    examples, token = [], 0
    for prompt, lengths in sizes:
        said = []
        for length in lengths:
            token += 1
            said.append([token] * length)
        examples.append(Example([0] * prompt, said, [[True] * n for n in lengths], []))
    found = mismatch(examples, room, np.random.default_rng(seed))
    others = [[answer for k, other in enumerate(examples) if k != i for answer in other.answers] for i in range(len(examples))]
    taken = Counter(answer[0] for one in found for answer in one.answers)
    for one, example, known in zip(found, examples, others, strict=True):
        assert one.prompt == example.prompt and all(answer in known for answer in one.answers)
        assert len(one) <= room and len(one.answers) <= len(example.answers)
        if all(len(example.prompt) + sum(map(len, known)) <= room for _ in known):
            assert len(one.answers) == min(len(example.answers), len(known))
    has_room = all(len(example.prompt) + sum(map(len, known)) <= room for example, known in zip(examples, others, strict=True))
    if 2 * max(len(lengths) for _, lengths in sizes) <= token and has_room:
        assert set(taken.values()) == {1} and len(taken) == token


def test_an_option_of_pairs_is_refused_where_there_are_none() -> None:
    assert DpoConfig(loss="kto").pairs == "best_rest" and DpoConfig(pairs="best_worst").loss == "sigmoid"
    with pytest.raises(ValueError, match="loss kto compares no pairs, so pairs=best_worst would do nothing: leave pairs out"):
        DpoConfig(loss="kto", pairs="best_worst")
