"""The harm model: its scores compared with a second implementation, the stage's abstention, its rules, and the training."""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.flows.engine.trace import flow_named, load, trace
from puna.models.classifiers import harm as model
from puna.stages.contract import StageConfig, execute
from puna.stages.curate.harm import SIGNALS, harm
from puna.stages.curate.heuristics import HeuristicsConfig, heuristics
from puna.stages.curate.select import SelectConfig, select
from puna.storage import Store

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import train_harm as training

MASK = (1 << 64) - 1
OFF = {name: None for name, value in SelectConfig().model_dump().items() if isinstance(value, dict) and name not in ("groups", "sql")}
WORD = re.compile(r"[a-z](?:[a-z]|'(?=[a-z]))*")


def bucket(token: int) -> int:
    state = token * int(model.BASE) & MASK
    state = (state ^ state >> 32) * int(model.MIXED) & MASK
    return (state >> 40) % model.BUCKETS


def hashed(word: str) -> int:
    value = 0
    for c in word:
        value = (value * int(model.BASE) + ord(c) + 1) & MASK
    return value


def pair(first: str, second: str) -> int:
    return bucket(((hashed(first) ^ int(model.PAIR)) * int(model.BASE) + hashed(second)) & MASK)


def passages(text: str) -> list[list[str]]:
    """Return the words of a text's passages, by regular expressions."""
    result: list[list[str]] = [[]]
    for line in text.lower().split("\n"):
        if len(result[-1]) >= model.FEWEST:
            result.append([])
        for word in WORD.findall(line):
            if len(result[-1]) == model.MOST:
                result.append([])
            result[-1].append(word)
    return [words for words in result if words]


def chances(text: str, made: model.Model) -> np.ndarray:
    """Return the probabilities of a text, with one addition per word and pair."""
    rows = []
    for words in passages(text):
        tokens = [bucket(hashed(word)) for word in words] + [pair(*two) for two in pairwise(words)]
        odds = made.bias + made.weights[tokens].sum(0, dtype=np.float64) / max(len(words), model.SCALE) ** 0.5
        rows.append(1 / (1 + np.exp(-odds)))
    if not rows:
        return np.zeros(len(made.bias))
    return np.sort(rows, 0)[::-1][: -(-len(rows) // 3)].mean(0)


def by_hand(**words: float) -> model.Model:
    """Return a model whose weights for violence are those of the words."""
    weights = np.zeros((model.BUCKETS, len(model.CATEGORIES)), np.float32)
    for word, weight in words.items():
        weights[bucket(hashed(word)), 1] = weight
    return model.Model(weights, np.full(len(model.CATEGORIES), -2.0))


def scores(texts: list[str], made: model.Model) -> np.ndarray:
    return model.harm_chances(pa.chunked_array([pa.array(texts, pa.large_string())]), made)


def test_scores_of_a_model_by_hand() -> None:
    made = by_hand(knife=9.0)
    low, high = 1 / (1 + np.exp(2)), 1 / (1 + np.exp(2 - 9 / 40**0.5))
    calm, bad = ["river"] * 40, ["river"] * 39 + ["Knife"]
    found = scores(
        [" ".join(bad), "\n".join(map(" ".join, [calm, calm, bad])), "\n".join(map(" ".join, [calm] * 3 + [bad])), "", "12 %"], made
    )
    assert found[:, 1] == pytest.approx([high, high, (high + low) / 2, 0, 0])
    assert found[:3, [0, 2, 3]] == pytest.approx(low)
    # A title of one word counts as SCALE words.
    assert scores(["Knife"], made)[0, 1] == pytest.approx(1 / (1 + np.exp(2 - 9 / model.SCALE**0.5)))


texts = st.lists(st.sampled_from(["River", "knife", "it's", "o'", "12", "—", "\n", "a\nb", "\n\n"]), max_size=400).map(" ".join)


@settings(deadline=None, max_examples=60)
@given(st.lists(texts, min_size=1, max_size=4))
def test_scores_are_those_of_a_second_implementation(documents: list[str]) -> None:
    generator = np.random.default_rng(0)
    weights = generator.normal(size=(model.BUCKETS, 4)).astype(np.float32)
    made = model.Model(weights, generator.normal(size=4))
    assert scores(documents, made) == pytest.approx(np.array([chances(text, made) for text in documents]), abs=1e-6)
    assert scores(documents, made).tolist() == [scores([text], made)[0].tolist() for text in documents]


THREAT = "I will kill you and your whole family with this knife, then I will burn your house and shoot everyone who runs out of it."
RIVER = "The river rises in the hills north of the town and flows for thirty miles before it reaches the sea."
HELP = "If you think about suicide, please call a hotline or talk to a doctor. Treatment helps most people with depression."


def test_shipped_weights() -> None:
    found = scores([THREAT, RIVER, HELP], model.load())
    assert found[0, 1] > 0.8 and found[1].max() < 0.2 and found[2].max() < 0.5


def test_other_languages_are_not_scored_and_the_rule_keeps_them(tmp_path: Path, make_documents: Any) -> None:
    store = Store.open(tmp_path)
    rows = {"a": (THREAT, "en"), "b": (RIVER, "en"), "c": (THREAT, "de"), "d": (THREAT, None)}
    documents = make_documents(store, [(key, "web", text) for key, (text, _) in rows.items()])
    languages = pa.table({"id": list(rows), "language": pa.array([name for _, name in rows.values()], pa.string())})
    made = execute(harm, StageConfig(), {"documents": documents, "language": store.import_table("signals", languages)}, store)
    found = {row["id"]: [row[name] for name in SIGNALS] for row in made.read().to_pylist()}
    assert found["a"] == pytest.approx(scores([THREAT], model.load())[0], abs=1e-6)
    assert found["c"] == found["d"] == [None] * 4
    metrics = {name: value for name, value in made.manifest.metrics.items() if "scored" in name}
    assert metrics == {"scored": 2, "unscored_de": 1, "unscored_unknown": 1}
    signals = [made, execute(heuristics, HeuristicsConfig(), {"documents": documents}, store)]

    def kept(**rules: float | None) -> list[str]:
        config = SelectConfig.model_validate(OFF | {"harm": rules})
        return execute(select, config, {"documents": documents, "signals": signals}, store).read()["id"].to_pylist()

    others = {"max_hate": None, "max_sexual": None, "max_self_harm": None}
    assert kept() == kept(**others) == ["b", "c", "d"]
    assert kept(**others, max_violence=None) == ["a", "b", "c", "d"]


def test_a_recipe_line_adds_the_step_and_the_rules() -> None:
    def steps(*changes: str) -> list[str]:
        return [step.label for step in trace(flow_named("curate"), load("clean", list(changes), "curate")).steps]

    assert "harm" not in steps() and "harm" in steps("harm={}", "select_model.harm={}")


def test_training_finds_the_words_of_a_category() -> None:
    made = [
        training.Text(f"they {word} people in town {n}", (None, float(word == "stab"), None, None), "web")
        for n in range(30)
        for word in ("stab", "help")
    ]
    rows, owners = training.rows_of([text.text for text in made])
    assert rows.shape == (60, model.BUCKETS) and owners.tolist() == list(range(60))
    # 5 words and 4 pairs; a text of fewer than SCALE words counts as SCALE words.
    assert rows[0].sum() == pytest.approx(9 / model.SCALE**0.5)
    marks = np.array([text.labels[1] for text in made])
    first = np.zeros(model.BUCKETS)
    first[bucket(hashed("river"))] = 3.0
    found = training.fit(rows, marks, np.ones(60), first)
    assert found[bucket(hashed("stab"))] > 0.5 and found[bucket(hashed("help"))] < -0.5 and abs(found[bucket(hashed("people"))]) < 0.1
    # The gradient is zero: the residuals weighted by a feature equal the penalty.
    residuals = marks - 1 / (1 + np.exp(-(rows @ found[:-1] + found[-1])))
    assert found[bucket(hashed("river"))] == 3  # no text has the word
    assert rows.T @ residuals == pytest.approx(training.SHRINKAGE * (found[:-1] - first), abs=1e-3) and residuals.sum() == pytest.approx(0, abs=1e-3)
