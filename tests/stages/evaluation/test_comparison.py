"""Comparison of two models: Student's t and Holm's correction compared with scipy and by hand; the view `leaderboard`."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from scipy.stats import binomtest, ttest_rel

from puna.stages.contract import External, execute
from puna.stages.evaluation.benchmark import BenchmarkConfig, benchmark
from puna.stages.evaluation.comparison import Difference, differences, evaluations_of, holm, scores_of
from puna.stages.training.intervals import Interval
from puna.storage import Artifact, PunaError, Store, catalog
from tests.stages.evaluation.test_benchmark import CHOICE

draw = random.Random(1)
WORDS = ["cow", "dog", "fish", "tree", "stone", "car", "grass", "water"]
ROWS = [{"q": f"what is {' '.join(draw.sample(WORDS, 3))}?", "options": draw.sample(WORDS, 3), "right": draw.randrange(3)} for _ in range(40)]


def asked(store: Store, model: Artifact, *tasks: External, **config: Any) -> Artifact:
    return execute(benchmark, BenchmarkConfig(**config), {"model": model, "tasks": list(tasks)}, store)


def test_differences_are_paired(store: Store, model: Callable[..., Artifact], task: Callable[..., External]) -> None:
    one, other = model(0), model(1)
    tasks = (task(ROWS, **CHOICE), task([{"t": " ".join(row["options"] * 4)} for row in ROWS], task="texts", output_type="loglikelihood_rolling", doc_to_target="t"))
    made = [asked(store, given, *tasks) for given in (one, other)]
    every = [Artifact(entry["kind"], entry["key"], store.files) for entry in store.entries()]
    rows, remarks = differences(*(scores_of(evaluations_of(given, every)) for given in (one, other)))
    assert not remarks and [(row.task, row.metric) for row in rows] == [("mine", "acc"), ("texts", "bits_per_byte")]
    scores = [{row["id"]: row["value"] for row in artifact.read("scores").to_pylist() if row["name"] == "mine/acc"} for artifact in made]
    keys = sorted(scores[0])
    expected = ttest_rel([scores[1][key] for key in keys], [scores[0][key] for key in keys])
    low, high = expected.confidence_interval(0.95)
    assert rows[0].p == pytest.approx(expected.pvalue, abs=1e-9) and rows[0].n == 40
    assert rows[0].difference == pytest.approx((sum(scores[1].values()) / 40 - sum(scores[0].values()) / 40, low, high))
    bits = [next(row["value"] for row in artifact.read().to_pylist() if row["metric"] == "bits_per_byte") for artifact in made]
    assert (rows[1].one, rows[1].other) == pytest.approx(tuple(bits)) and rows[1].difference.value == pytest.approx(bits[1] - bits[0])
    assert rows[0].holm == min(1.0, 2 * rows[0].p) or rows[1].holm == min(1.0, 2 * rows[1].p)

    table = catalog.query(store, "select * from leaderboard where task = 'mine' and metric = 'acc' order by rank").to_pylist()
    best = max(sum(one.values()) / 40 for one in scores)
    assert [row["value"] for row in table] == sorted((sum(one.values()) / 40 for one in scores), reverse=True)
    assert table[0]["behind"] == 0 and table[1]["behind"] == pytest.approx(table[1]["value"] - best)
    assert table[1]["error"] == pytest.approx((high - low) / 2 / 2.0227, rel=1e-3)  # Student's 97.5 % point of 39 degrees


def test_what_was_asked_otherwise_is_not_compared(store: Store, model: Callable[..., Artifact], task: Callable[..., External]) -> None:
    one, tasks = model(0), task(ROWS, **CHOICE)
    plain, letters, few = asked(store, one, tasks), asked(store, one, tasks, options="letters"), asked(store, one, tasks, limit=1)
    rows, remarks = differences(scores_of([plain]), scores_of([letters]))
    assert not rows and remarks == ["mine: format plain, cloze and plain, letters"]
    assert differences(scores_of([plain]), scores_of([few]))[1] == ["mine: fewer than two questions in common"]
    with pytest.raises(PunaError, match="has not been evaluated on any task; run `puna evaluate"):
        evaluations_of(model(3), [plain])


@pytest.mark.parametrize("gain", [1.0, -1.0, 0.3])
def test_equal_differences_are_as_sure_as_their_number(gain: float) -> None:
    """A model that is better in each of n questions by the same amount: the sign test, p = 2 / 2^n, as scipy computes it."""
    for n in (2, 3, 5, 6, 40):
        about = {"content": "c", "version": "", "shots": 0, "format": "plain"}
        one, other = ({"t": {"acc": (about, {f"{i}": (value, 1.0) for i in range(n)})}} for value in (0.1, 0.1 + gain))
        ((row,), _) = differences(one, other)
        exact = binomtest(n, n)
        assert row.p == pytest.approx(exact.pvalue) and row.difference.value == pytest.approx(gain)
        ends = sorted(gain * (2 * share - 1) for share in exact.proportion_ci(0.95))
        assert (row.difference.low, row.difference.high) == pytest.approx(tuple(ends))
        assert (row.difference.low <= 0 <= row.difference.high) == (row.p > 0.05)


def test_holm() -> None:
    rows = [Difference("t", "m", 0, 0, Interval(0, 0, 0), 2, p) for p in (0.04, 0.01, 0.03, 0.005)]
    # 4 x .005, 3 x .01, 2 x .03, then at least as much: Holm (1979).
    assert [row.holm for row in holm(rows)] == pytest.approx([0.06, 0.03, 0.06, 0.02])


def test_tasks_of_two_versions_are_not_compared(store: Store, model: Callable[..., Artifact], task: Callable[..., External]) -> None:
    made = [asked(store, model(seed), task(ROWS[:4], metadata={"version": seed + 1.0}, **CHOICE)) for seed in (0, 1)]
    rows, remarks = differences(*(scores_of([one]) for one in made))
    assert rows == [] and remarks == ["mine: its task file or data differ; evaluate both models on the same file; version 1.0 and 2.0"]
