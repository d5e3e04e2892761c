"""Calibration compared with sums over the bins by their definition, and the share of questions that a model was trained on."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import pyarrow as pa
import pytest

from puna.stages.contract import External, Instructions, Model, StageConfig, StageRun, execute, stage
from puna.stages.conversations import dump
from puna.stages.curate.contamination import ContaminationConfig, contamination
from puna.stages.evaluation.benchmark import BenchmarkConfig, benchmark
from puna.stages.evaluation.calibration import bins, calibration_error, confidence
from puna.storage import Artifact, Store, catalog
from puna.storage.schemas import table_schema
from tests.stages.evaluation.test_benchmark import CHOICE, ROWS, nats, numbers, opened


def brute_force(confidences: Sequence[float], right: Sequence[float]) -> float:
    """Guo et al. (2017), equation 3, with a pass over all questions for each of ten bins."""
    total = 0.0
    for number in range(10):
        low, high = Fraction(number, 10), Fraction(number + 1, 10)
        members = [at for at, sure in enumerate(confidences) if low <= Fraction(sure) < high or (number == 9 and sure == 1)]
        if members:
            accuracy = sum(right[at] for at in members) / len(members)
            total += len(members) / len(right) * abs(accuracy - sum(confidences[at] for at in members) / len(members))
    return total


def test_calibration_error_is_the_definitions() -> None:
    draw = random.Random(3)
    for size in (1, 7, 400):
        confidences = [draw.choice((draw.random(), 1.0, 0.0, 0.25)) for _ in range(size)]
        right = [float(draw.random() < sure) for sure in confidences]
        assert calibration_error(confidences, right) == pytest.approx(brute_force(confidences, right), abs=1e-12)
        assert sum(one.n for one in bins(confidences, right)) == size
    assert calibration_error([], []) is None
    assert calibration_error([1.0, 1.0, 0.5, 0.5], [1.0, 1.0, 1.0, 0.0]) == 0 and calibration_error([1.0, 1.0], [0.0, 1.0]) == 0.5


def test_confidence_is_a_softmax_that_does_not_overflow() -> None:
    assert confidence([math.log(0.2), math.log(0.6)]) == pytest.approx(0.75) and confidence([-5000.0, -5000.0]) == 0.5


def test_the_stage_reports_it_of_the_options_probabilities(store: Store, model: Callable[..., Artifact], task: Callable[..., External]) -> None:
    given = model()
    made = execute(benchmark, BenchmarkConfig(), {"model": given, "tasks": [task(ROWS, **CHOICE)]}, store)
    expected, right = [], []
    for row in ROWS:
        sums = [nats(*opened(given), f"Question: {row['q']}\nAnswer:", f" {option}") for option in row["options"]]
        expected.append(max(math.exp(value) for value in sums) / sum(math.exp(value) for value in sums))
        right.append(float(sums.index(max(sums)) == row["right"]))
    rows = numbers(made)
    assert rows["mine", "acc"]["calibration_error"] == pytest.approx(brute_force(expected, right), abs=1e-5)
    assert rows["mine", "acc_norm"]["calibration_error"] is None  # divided by its length, a likelihood is not a probability
    kept = [row["value"] for row in made.read("scores").to_pylist() if row["name"] == "mine/acc:confidence"]
    assert sorted(kept) == pytest.approx(sorted(expected), abs=1e-6)


@stage(kind="model", version="1")
def left_as_it_was(model: Model, instructions: list[Instructions], config: StageConfig, run: StageRun) -> None:
    """Stand in for finetuning: copy the starting model."""
    for file in Path(model.path()).iterdir():
        if file.is_file() and file.suffix in (".json", ".safetensors") and file.name != "manifest.json":
            (run.folder / file.name).write_bytes(file.read_bytes())


def test_numbers_of_the_clean_part_stand_beside_the_whole(store: Store, model: Callable[..., Artifact], task: Callable[..., External]) -> None:
    """The third question and its answer were trained on, the first is in a held-out row; the shortest question is too short to match."""
    places = (" on the slope behind the village", "", " by the old bridge over the river")
    rows = [{**row, "q": row["q"].rstrip("?") + (f"{place} in the high grassland of the Andes?" if place else "?")} for row, place in zip(ROWS, places, strict=True)]
    said = [(f"Question: {rows[at]['q']}", split) for at, split in ((2, "train"), (0, "heldout"))]
    turns = [
        {"id": text, "prompt_id": text, "task": "t", "split": split, "tools": None, "source": "s", "score": None,
         "messages": dump([{"role": "user", "content": text}, {"role": "assistant", "content": "So."}])}
        for text, split in said
    ]  # fmt: skip
    instructions = store.import_table("instructions", pa.Table.from_pylist(turns, schema=table_schema("instructions").schema))
    given = execute(left_as_it_was, StageConfig(), {"model": model(), "instructions": [instructions]}, store)
    tasks = task(rows, **CHOICE, task="mine")
    overlaps = execute(contamination, ContaminationConfig(), {"prompts": None, "tasks": [tasks], "model": given}, store)
    asked = {"model": given, "tasks": [tasks]}
    plain, made = (execute(benchmark, BenchmarkConfig(options="best"), asked | more, store) for more in ({}, {"overlaps": overlaps}))
    for (name, metric), row in numbers(made).items():
        single = {one["id"]: one["value"] for one in made.read("scores").to_pylist() if one["name"] == f"{name}/{metric}"}
        (gone,) = [one["id"] for one in overlaps.read("scores").to_pylist()]
        rest = [value for key, value in single.items() if key != gone]
        assert len(rest) == 2 and row["contaminated"] == pytest.approx(1 / 3) and row["clean"] == pytest.approx(sum(rest) / 2)
        assert (numbers(plain)[name, metric]["contaminated"], numbers(plain)[name, metric]["clean"]) == (None, None)
        assert row["value"] == numbers(plain)[name, metric]["value"]
    shown = catalog.query(store, "select contaminated from leaderboard where task = 'mine' and metric = 'acc' and contaminated > 0").to_pylist()
    assert [row["contaminated"] for row in shown] == pytest.approx([1 / 3])
