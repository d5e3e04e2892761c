"""Filters on instructions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from puna.stages.align.data_quality import (
    DataQualityConfig,
    Rules,
    _duplicate_rule,
    _phrase_rule,
    _quality_rule,
    _text_rule,
    _worth,
    data_quality,
    embed,
    greedy,
    k_means,
)
from puna.stages.contract import execute
from puna.stages.conversations import dump
from puna.stages.training.train import load_model, render_conversation
from puna.storage import Artifact, Store
from puna.storage.schemas import table_schema


def row(name: str, response: str = "ok", prompt: str = "q", score: float | None = 0.0) -> dict[str, Any]:
    turns = dump([{"role": "user", "content": prompt}, {"role": "assistant", "content": response}])
    about = {"id": name, "prompt_id": name, "task": "t", "split": "train", "tools": None, "source": "s", "score": score}
    return about | {"messages": turns}


@pytest.mark.parametrize(
    ("text", "rule", "value"),
    [
        ("fine", None, None),
        (" \n", "empty", 0.0),
        ("great \U0001f600\U0001f680", "emoji", 2.0),
        ("\u2764\ufe0f", "emoji", 2.0),
        ("2 \u2212 1 = 1 \u00d7 1 \u2192 x", None, None),
        ("wow!", None, None),
        ("wow!!", "exclamation_marks", 2.0),
    ],
)
def test_text_rules(text: str, rule: str | None, value: float | None) -> None:
    verdict = _text_rule(Rules())(row("a", text))
    assert (verdict[0], verdict[1]) == (rule, value) if rule else verdict is None


def test_a_phrase_may_stay_in_its_share_and_the_best_scored_stay() -> None:
    rows = [row(f"s{i}", "I'm sorry, no", score=float(i)) for i in range(5)] + [row(f"o{i}") for i in range(95)]
    judge = _phrase_rule(rows, Rules(phrase_share=0.02))
    assert [judge(r) is None for r in rows[:5]] == [False, False, False, True, True]
    assert judge(rows[0]) == ("phrase", 5.0, 2.0, "i'm sorry")
    assert all(judge(r) is None for r in rows[5:])


def test_duplicates_keep_the_best_scored() -> None:
    rows = [row("a", "1", score=0.1), row("b", "1 ", score=0.9), row("c", "2"), row("d", "1", prompt="other")]
    judge = _duplicate_rule(rows)
    assert judge(rows[0]) == ("duplicate", None, None, "b")
    assert [judge(r) for r in rows[1:]] == [None] * 3


def test_quality_is_the_top_part_or_agreement() -> None:
    rows = [row(str(i), score=float(i)) for i in range(9)] + [row("demo", score=None)]
    judge = _quality_rule(rows, {"0": 0.5, "1": 0.49}, DataQualityConfig(reward_quantile=0.75, min_agreement=0.5))
    # numpy's quantile of 0..8 at 0.75 is 6.
    assert [judge(r) is None for r in rows] == [True, False, False, False, False, False, True, True, True, True]
    assert judge(rows[1])[:3] == ("quality", 1.0, 6.0)


def test_worth_is_quality_times_difficulty() -> None:
    rows = [row("a", score=1.0), row("b", score=2.0), row("c", score=None)]
    assert _worth(rows, {"a": 1.0, "b": 0.25}) == pytest.approx([0.5 * 1.0, 1.0 * 1.75, 1.0 * 2.0])


def test_greedy_keeps_what_resembles_nothing_kept() -> None:
    angles = np.deg2rad([0.0, 10.0, 20.0, 90.0, 95.0])
    vectors = np.stack([np.cos(angles), np.sin(angles)], 1)
    threshold = float(np.cos(np.deg2rad(15.0)))
    found = greedy(vectors, threshold)
    # 10 is near 0; 20 is near 10, which was not kept, and far enough from 0; 95 is near 90.
    assert [(i, kept) for i, kept, _ in found] == [(1, 0), (4, 3)]
    assert found[0][2] == pytest.approx(np.cos(np.deg2rad(10.0)))


def test_k_means_finds_separated_groups() -> None:
    generator = np.random.default_rng(0)
    centres = np.eye(3, 8)
    vectors = np.concatenate([c + 0.05 * generator.standard_normal((20, 8)) for c in centres]).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    best = min(
        (k_means(vectors, 3, np.random.default_rng(seed)) for seed in range(5)),
        key=lambda a: sum(len(set(a[i : i + 20].tolist())) for i in (0, 20, 40)),
    )
    assert [len(set(best[i : i + 20].tolist())) for i in (0, 20, 40)] == [1, 1, 1] and len(set(best.tolist())) == 3


def test_embeddings_are_centred_unit_vectors_whatever_the_packing(tmp_path: Path, tiny_model: Callable[..., Artifact]) -> None:
    model = tiny_model(Store.open(tmp_path))
    rows = [row(str(i), f"{i} and {i * 7}", prompt=f"say {i}") for i in range(12)]
    network, tokenizer = load_model(model, "lm")
    examples = [render_conversation(tokenizer, one)[-1] for one in rows]
    one, many = embed(examples, network, 64), embed(examples, network, 4096)
    np.testing.assert_allclose(one, many, atol=2e-5)
    np.testing.assert_allclose(np.linalg.norm(one, axis=1), 1.0, atol=1e-5)
    half = embed(examples, network.bfloat16(), 4096)  # what a GPU computes in
    assert half.dtype == np.float32
    np.testing.assert_allclose(half, many, atol=0.05)


def test_stage_accounts_for_every_row(tmp_path: Path, tiny_model: Callable[..., Artifact]) -> None:
    store = Store.open(tmp_path)
    rows = [row(f"{i:02d}", f"answer {i}", prompt=f"question {i}", score=float(i)) for i in range(20)]
    rows += [row("aa", "no!!!", score=9.0), row("bb", "", score=9.0), row("cc", "answer 19", prompt="question 19", score=1.0)]
    given = store.import_table("instructions", pa.Table.from_pylist(rows, schema=table_schema("instructions").schema))
    config = DataQualityConfig(semantic={"clusters": 2, "max_similarity": 0.999})
    made = execute(data_quality, config, {"instructions": given, "model": tiny_model(store)}, store)
    dropped = {r["id"]: r["rule"] for r in made.read("dropped").to_pylist()}
    assert made.rows() + len(dropped) == 23
    assert (dropped["aa"], dropped["bb"], dropped["cc"]) == ("exclamation_marks", "empty", "duplicate")
    kept = set(made.read()["id"].to_pylist())
    # 20 scores are left, 0..19: the 0.75 quantile is 14.25.
    assert all(dropped[f"{i:02d}"] == "quality" for i in range(15)) and kept <= {f"{i:02d}" for i in range(15, 20)}
