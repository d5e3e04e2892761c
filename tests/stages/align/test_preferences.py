"""Preference pairs from gold scores."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from puna.stages.align.preferences import (
    LEVELS,
    PreferencesConfig,
    Thresholds,
    closeness,
    draw_pairs,
    edit_distance,
    judge,
    preferences,
)
from puna.stages.contract import execute, parse
from puna.stages.conversations import asking, message_of
from puna.storage import PunaError, Store

CONFIG = PreferencesConfig(noise=0.0, gold_weight=0.6)
PROMPT = {"id": "p", "task": "chain_sum", "messages": asking("1 + 11 ="), "tools": None, "reference": "12"}


def answer(text: str, gold: float, model: str = "A", finished: bool = True, sample: int = 0) -> dict[str, Any]:
    name = f"{model}-{sample}-{text}"
    return {"id": name, "text": text, "gold": gold, "model": model, "finished": finished, "sample": sample}


def sides(row: dict[str, Any]) -> tuple[str | None, ...]:
    """Return the texts of chosen, rejected and edited answers."""
    found = [message_of(row, side) for side in ("chosen", "rejected", "edited")]
    return tuple(None if message is None else message["content"] for message in found)


def slow_distance(a: str, b: str) -> int:
    """Return Levenshtein's distance by its recursive definition."""

    @cache
    def distance(i: int, j: int) -> int:
        if not i or not j:
            return i + j
        return min(
            distance(i - 1, j) + 1, distance(i, j - 1) + 1, distance(i - 1, j - 1) + (a[i - 1] != b[j - 1])
        )

    return distance(len(a), len(b))


@given(st.text("ab1", max_size=7), st.text("ab1", max_size=7))
def test_edit_distance_is_its_definition(a: str, b: str) -> None:
    assert edit_distance(a, b) == slow_distance(a, b) == edit_distance(b, a)
    assert 0.0 <= closeness(a, b) <= 1.0 and (closeness(a, b) == 1.0) == (a == b)


@pytest.mark.parametrize(
    ("first", "second", "margin", "level", "edited"),
    [
        # right (quality 1) against an answer with nothing in common (0)
        (("12", 1.0), ("99", 0.0), 1.0, "significantly_better", None),
        # right against one digit wrong (0.4 * 0.5)
        (("12", 1.0), ("13", 0.0), 0.8, "significantly_better", None),
        # a part mark of 0.5 and closeness 2/4 (0.3 + 0.2) against nothing: improvable, so an edit is added
        (("1234", 0.5), ("99", 0.0), 0.5, "better", "12"),
        # closeness 1/2 against 0, no marks
        (("13", 0.0), ("99", 0.0), 0.2, "slightly_better", "12"),
        # closeness 1/3 against 1/4: similar
        (("144", 0.0), ("1444", 0.0), 0.4 / 3 - 0.1, None, None),
        # closeness 1/3 against 0
        (("144", 0.0), ("99", 0.0), 0.4 / 3, "marginally_better", "12"),
    ],
)
def test_levels_and_edits(
    first: tuple[str, float], second: tuple[str, float], margin: float, level: str | None, edited: str | None
) -> None:
    for one, two in itertools.permutations([answer(*first), answer(*second, model="B")]):
        row, rule, found = judge(PROMPT, one, two, CONFIG, 0.0)
        assert found == pytest.approx(margin)
        if level is None:
            assert rule == "similar"
            continue
        assert rule is None
        assert (*sides(row), row["level"]) == (first[0], second[0], edited, level)
        assert (row["chosen_model"], row["rejected_model"]) == ("A", "B")


def test_noise_can_turn_a_preference_around() -> None:
    right, wrong = answer("12", 1.0), answer("13", 0.0, "B")
    row, _, margin = judge(PROMPT, right, wrong, PreferencesConfig(noise=1.0), -2.0)
    assert sides(row) == ("13", "12", None) and margin == pytest.approx(1.2)


def test_identical_and_unfinished_pairs_are_dropped() -> None:
    assert judge(PROMPT, answer(" 12", 1.0), answer("12", 1.0, "B"), CONFIG, 9.0)[1] == "identical"
    assert judge(PROMPT, answer("12", 1.0), answer("12345", 0.4, "B", finished=False), CONFIG, 0.0)[1] == "unfinished"


def test_an_answer_that_was_cut_off_counts_as_wrong_where_told() -> None:
    config = PreferencesConfig(noise=0.0, unfinished="wrong")
    right, wrong, cut = answer("12", 1.0), answer("99", 0.0), answer("12 and", 1.0, "B", finished=False)
    for one, two in itertools.permutations([right, cut]):
        row, rule, margin = judge(PROMPT, one, two, config, 0.0)
        # 0.6 + 0.4 against closeness of 2 / 6 alone
        assert rule is None and margin == pytest.approx(1 - 0.4 / 3) and sides(row) == ("12", "12 and", None)
        assert [message_of(row, side).get("finished") for side in ("chosen", "rejected")] == [None, False]
    # Closeness 0 against 1 / 3: the truncated answer would be chosen.
    assert judge(PROMPT, wrong, cut, config, 0.0)[1] == "unfinished"
    assert judge(PROMPT, cut, answer("9", 0.0, finished=False), config, 0.0)[1] == "unfinished"


@given(
    st.dictionaries(st.sampled_from("ABC"), st.integers(1, 6), min_size=1), st.integers(1, 8), st.integers(0, 9)
)
def test_pairs_are_of_two_models_and_use_no_answer_twice(counts: dict[str, int], most: int, seed: int) -> None:
    answers = [answer("x", 0.0, model, sample=i) for model, n in counts.items() for i in range(n)]
    pairs = list(draw_pairs(answers, np.random.default_rng(seed), most))
    used = Counter(a["id"] for pair in pairs for a in pair)
    assert not used or max(used.values()) == 1
    total, largest = sum(counts.values()), max(counts.values())
    if len(counts) > 1:
        assert all(a["model"] != b["model"] for a, b in pairs)
        # The largest matching between groups: at most all answers but one, unless one group is larger than the others together.
        assert len(pairs) == min(most, total // 2, total - largest)
    else:
        assert len(pairs) == min(most, total // 2)
    shuffled = list(draw_pairs(answers[::-1], np.random.default_rng(seed), most))
    assert [(a["id"], b["id"]) for a, b in shuffled] == [(a["id"], b["id"]) for a, b in pairs]


def test_thresholds_must_fall() -> None:
    with pytest.raises(PunaError, match="thresholds must decrease from significantly_better to marginally_better"):
        parse(PreferencesConfig, {"thresholds": {"better": 0.9}}, "preferences")
    assert [Thresholds().level(m) for m in (0.7, 0.6, 0.4, 0.2, 0.05, 0.01)] == [
        LEVELS[0], LEVELS[0], LEVELS[1], LEVELS[2], LEVELS[3], None,
    ]  # fmt: skip


def tables(store: Store, texts: dict[str, list[tuple[str, float]]]) -> dict[str, Any]:
    """Return prompts 0..n-1 with reference 12, and each model's answers to all of them."""
    count = len(next(iter(texts.values())))
    asked = [
        {"id": f"{i:032x}", "task": "t", "split": "train", "messages": asking(f"q{i}"), "tools": None, "reference": "12",
         "verifier": '{"name": "exact"}'} for i in range(count)
    ]
    rows = [
        {"id": f"{model}{i}", "prompt_id": f"{i:032x}", "sample": 0, "model": model, "text": text, "tokens": [1], "logprobs": [0.0],
         "finished": True, "score": None, "gold": gold}
        for model, answers in texts.items() for i, (text, gold) in enumerate(answers)
    ]  # fmt: skip
    from puna.storage.schemas import table_schema

    return {
        "prompts": store.import_table("prompts", pa.Table.from_pylist(asked, schema=table_schema("prompts").schema)),
        "answers": store.import_table("answers", pa.Table.from_pylist(rows, schema=table_schema("answers").schema)),
    }


def test_stage_counts_pairs_and_splits_by_prompt(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    good, bad, near = [("12", 1.0)] * 100, [("99", 0.0)] * 100, [("13", 0.0)] * 100
    inputs = tables(store, {"A": good, "B": bad, "C": near})
    config = PreferencesConfig(noise=0.0, pairs_per_prompt=3, heldout_fraction=0.3, seed=1)
    made = execute(preferences, config, inputs, store)
    rows = made.read().to_pylist()
    # Three answers of three models give one disjoint pair.
    assert made.rows() == 100 and made.rows("dropped") == 0
    assert {sides(r)[:2] for r in rows} <= {("12", "99"), ("12", "13"), ("13", "99")}
    assert all((edited == "12") == (chosen == "13") for chosen, _, edited in map(sides, rows))
    share = sum(r["split"] == "heldout" for r in rows) / 100
    assert 0.1 < share < 0.5
    again = execute(preferences, config.model_copy(update={"noise": 0.01}), inputs, store).read().to_pylist()
    assert {r["prompt_id"]: r["split"] for r in again} == {r["prompt_id"]: r["split"] for r in rows}


def test_stage_drops_similar_pairs_with_their_margin(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    inputs = tables(store, {"A": [("12", 1.0), ("144", 0.0)], "B": [("12", 1.0), ("1444", 0.0)]})
    made = execute(preferences, PreferencesConfig(noise=0.0), inputs, store)
    dropped = {r["rule"]: r for r in made.read("dropped").to_pylist()}
    assert made.rows() == 0 and set(dropped) == {"identical", "similar"}
    assert dropped["similar"]["value"] == pytest.approx(0.4 / 3 - 0.1) and dropped["similar"]["threshold"] == 0.05


def test_answers_to_other_prompts_are_refused(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    one = tables(store, {"A": [("1", 0.0), ("2", 0.0)]})
    two = tables(store, {"A": [("1", 0.0)]})
    with pytest.raises(PunaError, match="answer A1: its prompt 0+1 is not in"):
        execute(preferences, CONFIG, {"answers": one["answers"], "prompts": two["prompts"]}, store)


def test_an_edit_is_never_the_rejected_answer() -> None:
    """A wrong annotation ranks a wrong answer above the right one: the reference cannot be both the edit and the rejected answer."""
    prompt = {"id": "p", "task": "t", "messages": asking("?"), "tools": None, "reference": "42"}
    right, wrong = answer("42 ", 1.0, "A"), answer("17", 0.0, "B")
    config = PreferencesConfig(noise=5.0)
    row, rule, _ = judge(prompt, right, wrong, config, -1.0)
    assert rule is None and sides(row) == ("17", "42", None)
    row, rule, _ = judge(prompt, answer("41", 0.0, "A"), wrong, config, -1.0)
    assert sides(row) == ("17", "41", "42")
