"""Filters on instructions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest

from puna.stages.align import data_quality as quality_of
from puna.stages.align.data_quality import (
    DataQualityConfig,
    Rules,
    _draw_rule,
    _duplicate_rule,
    _phrase_rule,
    _quality_rule,
    _report_difficulty,
    _text_rule,
    _worth,
    data_quality,
    embed,
    greedy,
    k_means,
)
from puna.stages.contract import Figure, StageRun, execute
from puna.stages.conversations import dump
from puna.stages.training.train import load_model, render_conversation
from puna.stages.verifiers.judge import Graded
from puna.storage import Artifact, Store
from puna.storage.schemas import table_schema


def row(name: str, response: str = "ok", prompt: str = "q", score: float | None = 0.0) -> dict[str, Any]:
    turns = dump([{"role": "user", "content": prompt}, {"role": "assistant", "content": response}])
    about = {"id": name, "prompt_id": name, "task": "t", "split": "train", "tools": None, "source": "s", "score": score}
    return about | {"messages": turns}


class Noted:
    """A recorder of what a stage reports."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.figures: dict[str, Figure] = {}

    def metric(self, name: str, value: float) -> None:
        self.metrics[name] = value

    def figure(self, name: str, figure: Figure) -> None:
        self.figures[name] = figure


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


@pytest.mark.parametrize("phrase", ["i'm sorry", "I'm Sorry", "i’m sorry"])
def test_a_phrase_is_found_in_any_case_and_with_either_apostrophe(phrase: str) -> None:
    judge = _phrase_rule(rows := [row("a", "I’m sorry, no"), row("b", "I'M SORRY"), row("c")], Rules(phrases=(phrase,), phrase_share=0))
    assert [judge(one) is None for one in rows] == [False, False, True]
    with pytest.raises(ValueError, match="at least 1 character"):
        Rules(phrases=("",))


def test_conversations_with_other_tools_are_no_duplicates() -> None:
    judge = _duplicate_rule(rows := [row("a"), row("b") | {"tools": '[{"name": "search"}]'}, row("c")])
    assert [judge(one) is None for one in rows] == [True, True, False]


def test_duplicates_keep_the_best_scored() -> None:
    rows = [row("a", "1", score=0.1), row("b", "1 ", score=0.9), row("c", "2"), row("d", "1", prompt="other")]
    judge = _duplicate_rule(rows)
    assert judge(rows[0]) == ("duplicate", None, None, "b")
    assert [judge(r) for r in rows[1:]] == [None] * 3


def test_quality_is_the_top_part_or_agreement() -> None:
    rows = [row(str(i), score=float(i)) for i in range(9)] + [row("demo", score=None)]
    config = DataQualityConfig(reward_quantile=0.75, min_agreement=0.5)
    judge = _quality_rule(rows, {"0": 0.5, "1": 0.49}, None, config, cast(StageRun, Noted()))
    # numpy's quantile of 0..8 at 0.75 is 6.
    assert [judge(r) is None for r in rows] == [True, False, False, False, False, False, True, True, True, True]
    assert judge(rows[1])[:3] == ("quality", 1.0, 6.0)


def test_quality_is_the_top_part_or_the_judges_full_score() -> None:
    names = ["both", "reward", "judge", "neither", "unread", "demo_full", "demo_less", "demo_unread"]
    scores = [3.0, 4.0, 1.0, 0.0, 2.0, None, None, None]
    rows = [row(name, score=score) for name, score in zip(names, scores, strict=True)]
    quality = {name: 1.0 if name in ("both", "judge", "demo_full") else 0.5 for name in names if not name.endswith("unread")}
    run, full = Noted(), {"both", "judge", "demo_full"}
    agreement = dict.fromkeys(names, 1.0)  # a judge replaces the agreement
    judge = _quality_rule(rows, agreement, Graded(quality, full, {}, []), DataQualityConfig(reward_quantile=0.75), cast(StageRun, run))
    # numpy's quantile of 0..4 at 0.75 is 3.
    assert {r["id"] for r in rows if judge(r) is None} == {"both", "reward", "judge", "demo_full", "demo_unread"}
    assert judge(rows[3])[:4] == ("quality", 0.0, 3.0, "judge 0.50: ok") and judge(rows[6])[1] is None
    assert run.metrics == {"reward_and_judge": 1, "reward_only": 1, "judge_only": 1, "neither": 1}


def test_rows_are_drawn_with_weights_and_without_replacement() -> None:
    worth = {"a": 1.0, "b": 2.0, "c": 5.0, "d": 0.0}
    rows, runs = [row(name) for name in worth], 3000
    counts: Counter[str] = Counter()
    for seed in range(runs):
        judge = _draw_rule(rows, worth, DataQualityConfig(keep=2, seed=seed))
        kept = [r["id"] for r in rows if judge(r) is None]
        assert len(kept) == 2
        counts.update(kept)
    # The probability of being among two, by definition: drawn first, or second after each other one.
    wanted = {}
    for one in "abc":
        first = worth[one] / 8.0
        wanted[one] = first + sum(worth[other] / 8.0 * worth[one] / (8.0 - worth[other]) for other in "abc" if other != one)
        assert abs(counts[one] / runs - wanted[one]) < 4 * (wanted[one] * (1 - wanted[one]) / runs) ** 0.5
    assert sum(wanted.values()) == pytest.approx(2.0) and counts["d"] == 0
    assert _draw_rule(rows, worth, DataQualityConfig(keep=3))(rows[3]) == ("not_drawn", 0.0, None, None)
    assert all(_draw_rule(rows, worth, DataQualityConfig(keep=keep))(r) is None for keep in (4, None) for r in rows)


def test_what_is_kept_is_counted_by_difficulty() -> None:
    run = Noted()
    difficulty = {"a": 0.0, "b": 0.33, "c": 0.34, "d": 0.66, "e": 0.67, "f": 1.0}
    rows = [row(name) for name in [*difficulty, "unknown"]]
    _report_difficulty(rows, [rows[0], rows[2], rows[6]], difficulty, cast(StageRun, run))
    given, kept = {"given_easy": 2, "given_medium": 2, "given_hard": 2}, {"kept_easy": 1, "kept_medium": 1, "kept_hard": 0}
    assert run.metrics == {**given, **kept}
    assert run.figures["difficulty"].series == {
        "given": [("easy", 2.0), ("medium", 2.0), ("hard", 2.0)], "kept": [("easy", 1.0), ("medium", 1.0), ("hard", 0.0)],
    }  # fmt: skip


def test_worth_is_quality_times_difficulty() -> None:
    rows = [row("a", score=1.0), row("b", score=2.0), row("c", score=None)]
    assert _worth(rows, {"a": 0.0, "b": 0.75}, None) == pytest.approx({"a": 0.5 * 1.0, "b": 1.0 * 1.75, "c": 1.0 * 2.0})
    grades = Graded({"a": 0.75, "b": 0.5, "c": 0.25}, set(), {}, [])
    # The larger of the reward's rank and the judge's share of points; "c" has only the judge's.
    assert _worth(rows, {"a": 0.0, "b": 0.75, "c": 0.5}, grades) == pytest.approx({"a": 0.75, "b": 1.75, "c": 0.25 * 1.5})


def test_greedy_keeps_what_resembles_nothing_kept() -> None:
    angles = np.deg2rad([0.0, 10.0, 20.0, 90.0, 95.0])
    vectors = np.stack([np.cos(angles), np.sin(angles)], 1)
    threshold = float(np.cos(np.deg2rad(15.0)))
    found = greedy(vectors, threshold)
    # 10 is near 0; 20 is near 10, which was dropped, and far enough from 0; 95 is near 90.
    assert [(i, kept) for i, kept, _ in found] == [(1, 0), (4, 3)]
    assert found[0][2] == pytest.approx(np.cos(np.deg2rad(10.0)))


def test_greedy_is_what_comparing_one_with_all_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(5)
    vectors = generator.standard_normal((160, 6))
    vectors = np.concatenate([vectors, vectors[:90] + 0.1 * generator.standard_normal((90, 6))])[generator.permutation(250)]
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    kept: list[int] = []
    wanted: list[tuple[int, int]] = []
    for i, vector in enumerate(vectors.astype(np.float64)):
        cosines = {j: float(vector @ vectors[j].astype(np.float64)) for j in kept}
        assert all(abs(cosine - 0.95) > 1e-6 for cosine in cosines.values())  # no tie that depends on rounding
        nearest = max(cosines, key=lambda j: cosines[j], default=-1)
        if nearest >= 0 and cosines[nearest] >= 0.95:
            wanted.append((i, nearest))
        else:
            kept.append(i)
    assert 50 < len(wanted) < 150
    for block, held in ((256, 8192), (64, 33), (1, 1), (7, 1000)):
        monkeypatch.setattr(quality_of, "BLOCK", block)
        monkeypatch.setattr(quality_of, "HELD", held)
        assert [(i, nearest) for i, nearest, _ in greedy(vectors, 0.95)] == wanted


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
    half = embed(examples, network.bfloat16(), 4096)  # as computed on a GPU
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
