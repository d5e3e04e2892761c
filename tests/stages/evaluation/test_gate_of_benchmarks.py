"""The gate of a round on benchmarks: no task of the candidate may get worse by more than `max_fall`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from puna.stages.align.gate import GateConfig, gate
from puna.stages.contract import External, execute
from puna.stages.evaluation.benchmark import BenchmarkConfig, benchmark
from puna.stages.evaluation.evaluate import EvaluateConfig, evaluate
from puna.storage import Artifact, PunaError, Store
from tests.stages.evaluation.test_prompt_tasks import prompts


def test_a_candidate_that_gets_worse_on_a_benchmark_is_refused(
    store: Store, model: Callable[..., Artifact], task: Callable[..., External]
) -> None:
    choice = task(
        [{"q": f"what is {n}?", "options": ["cat", "a hat", "map"], "gold": n % 3} for n in range(12)], output_type="multiple_choice",
        doc_to_text="{{q}}", doc_to_target="gold", doc_to_choice="options",
    )  # fmt: skip
    whole = task([{"t": "a cat and a hat on a map"}, {"t": "hm"}], task="text", output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="t")
    questions = prompts(store)
    sides = {}
    for one in (model(0), model(1)):
        asked = execute(benchmark, BenchmarkConfig(), {"model": one, "tasks": [choice, whole]}, store)
        answered = execute(evaluate, EvaluateConfig(answers={"max_tokens": 8}), {"model": one, "prompts": questions}, store)
        values = {row["task"]: row["value"] for row in asked.read("task_scores").to_pylist() if row["metric"] in ("acc", "bits_per_byte")}
        sides[values["text"]] = (one, answered, asked, values)
    (policy, before, known, first), (candidate, after, found, second) = (sides[bits] for bits in sorted(sides))
    rise = (second["text"] - first["text"]) / first["text"]
    assert rise > 1e-6
    inputs = {"policy": policy, "candidate": candidate, "before": before, "after": after, "prompts": questions}
    own = {"benchmark_before": known, "benchmark_after": found}

    def reason(fall: float) -> str:
        return str(execute(gate, GateConfig(min_gain=-1, max_fall=fall), {**inputs, **own}, store).manifest.metrics["reason"])

    words = f"text (bits_per_byte) goes from {first['text']:.3f} to {second['text']:.3f}, worse by more than {rise / 2:g}"
    assert words in reason(rise / 2) and "text (bits_per_byte)" not in reason(rise * 2)
    assert ("mine (acc)" in reason(0)) == (second["mine"] < first["mine"])
    assert "text" not in str(execute(gate, GateConfig(min_gain=-1, max_fall=0), inputs, store).manifest.metrics["reason"])
    with pytest.raises(PunaError, match="give both or neither"):
        execute(gate, GateConfig(), {**inputs, "benchmark_after": found}, store)
    with pytest.raises(PunaError, match="benchmark_after, evaluation/.* is not an evaluation of model/"):
        execute(gate, GateConfig(), {**inputs, **own, "benchmark_after": known}, store)
