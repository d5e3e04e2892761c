"""Answers of groups of ranks that share one model: they equal those of one process."""

from __future__ import annotations

import math
from typing import Any

import pytest

from puna.models.serving import ServingSettings
from puna.models.training.parallel.layout import Layout
from puna.stages.evaluation.benchmark import BenchmarkConfig

from .conftest import Run

EQUAL = 1e-5
"""Maximum difference of a token's log-prob in nats."""


def check(ranks: Run, layout: dict[str, int], **given: Any) -> list[dict[str, Any]]:
    """Compare each rank's answers with those of one process; with pipeline stages of whole matrices, the bits are equal."""
    one, all_ = ranks.alone("answered", **given), ranks("answered", math.prod(layout.values()), layout=layout, **given)
    assert len({finished for row in one["answers"] for *_, finished in row}) == 2, "some end by themselves"
    for own in all_:
        for row, expected in zip(own["answers"], one["answers"], strict=True):
            for (tokens, logprobs, finished), (right, values, ends) in zip(row, expected, strict=True):
                assert tokens == right and finished == ends
                assert logprobs == (values if "tensor" not in layout else pytest.approx(values, abs=EQUAL, rel=0))
    return all_


@pytest.mark.parametrize("by_loops", [True, False], ids=["loops", "operators"])
@pytest.mark.parametrize("variant", ["plain", "tied", "biases", "window", "capped"])
def test_tensor(ranks: Run, variant: str, by_loops: bool) -> None:
    for own in check(ranks, {"tensor": 2}, variant=variant, by_loops=by_loops):
        assert own["cache"] == 0.5 and own["weights"] < 0.51, "each rank has its own heads"


@pytest.mark.parametrize("by_loops", [True, False], ids=["loops", "operators"])
@pytest.mark.parametrize("variant", ["plain", "tied", "biases", "window", "capped"])
def test_pipeline(ranks: Run, variant: str, by_loops: bool) -> None:
    """Of three layers, the first stage has two."""
    first, second = check(ranks, {"pipeline": 2}, variant=variant, by_loops=by_loops)
    assert (first["cache"], second["cache"]) == pytest.approx((2 / 3, 1 / 3)) and max(first["weights"], second["weights"]) < 0.7


@pytest.mark.parametrize("layout, variant", [({"tensor": 2}, "parallel_block"), ({"pipeline": 2}, "parallel_block"), ({"pipeline": 2}, "mla")], ids=str)
def test_models_that_no_loops_compute(ranks: Run, layout: dict[str, int], variant: str) -> None:
    check(ranks, layout, variant=variant, by_loops=False)


@pytest.mark.parametrize("layout", [{"pipeline": 4}, {"data": 2, "tensor": 2}, {"data": 2, "pipeline": 2}, {"pipeline": 2, "tensor": 2}, {"data": 2, "pipeline": 2, "tensor": 2}], ids=str)
def test_four_ranks_and_eight(ranks: Run, layout: dict[str, int]) -> None:
    check(ranks, layout, layers=4)


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"pipeline": 2}], ids=str)
@pytest.mark.parametrize("params", [
    {"speculate": 4, "temperature": 0.0, "max_tokens": 24}, {"top_p": 0.8, "presence_penalty": 0.5, "logit_bias": [[1, 2.0]]},
], ids=["guesses", "cuts"])  # fmt: skip
def test_ways_of_drawing(ranks: Run, layout: dict[str, int], params: dict[str, Any]) -> None:
    check(ranks, layout, params=params)


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"pipeline": 2}], ids=str)
def test_what_cannot_be_drawn_is_the_same_error_on_all_ranks_and_the_engine_goes_on(ranks: Run, layout: dict[str, int]) -> None:
    for own in ranks("answered", 2, layout=layout, params={"logit_bias": [[37, 1.0]]}):
        assert "logit_bias names token 37: token ids lie in 0 to 36" in own["error"] and own["asked"] and own["later"] == 3


@pytest.mark.parametrize("layout, variant, problem", [
    ({"tensor": 2}, "moe", "layout.tensor = 2: a model with experts or latent attention"), ({"pipeline": 2}, "moe", "a model with experts"),
    ({"pipeline": 4}, "plain", "the model has 3 layers only"),
    ({"pipeline": 2, "virtual_stages": 2}, "plain", "pipeline 2 (virtual_stages 2): generation runs one stage per process"),
], ids=str)  # fmt: skip
def test_models_that_no_test_proves_are_refused(ranks: Run, layout: dict[str, int], variant: str, problem: str) -> None:
    for own in ranks("answered", Layout(**layout).processes, layout=layout, variant=variant, layers=3 + ("virtual_stages" in layout)):
        assert problem in own["error"]


def test_layouts_that_answer_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="layout.shard: generation supports only tensor, pipeline and data"):
        ServingSettings(layout={"shard": 2})
    with pytest.raises(ValueError, match="layout.virtual_stages: generation runs one stage per process; leave virtual_stages out"):
        ServingSettings(layout={"pipeline": 2, "virtual_stages": 2})
    with pytest.raises(ValueError, match="layout pipeline 2: pipeline stages can generate but not compute likelihoods"):
        BenchmarkConfig(serving={"layout": {"pipeline": 2}})
