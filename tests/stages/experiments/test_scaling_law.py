"""The scaling experiment: its runs, what it reads off them, resumption."""

from __future__ import annotations

import json

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from pydantic import ValidationError

from puna.models import accounting
from puna.stages.contract import execute
from puna.stages.experiments import scaling_law as module
from puna.stages.experiments.scaling_law import ScalingLawConfig, scaling_law, shortened, shrunk
from puna.stages.pretrain.pretrain import PretrainConfig, pretrain
from puna.stages.pretrain.tokenize import TokenizeConfig, tokenize
from puna.stages.training import scaling_laws
from puna.stages.training.phase import SHAPE, Phase

MODEL = SHAPE.replace(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
PHASE = Phase(steps=40, rows_per_step=2, schedule={"learning_rate": 1e-2, "warmup_steps": 4, "anneal_steps": 10, "average": 2})
SETTINGS = ScalingLawConfig(model=MODEL, phase=PHASE, widths=(16, 24, 32, 48), validation_share=0.1, draws=200)


@pytest.fixture
def given(store, corpus):
    made = corpus([("high", 40 + 7 * (i % 5)) for i in range(60)])
    tokens = execute(tokenize, TokenizeConfig(sequence_length=32), {"documents": made["documents"], "tokenizer": made["tokenizer"]}, store)
    return {"tokens": tokens, "tokenizer": made["tokenizer"]}


def test_prediction_follows_from_the_runs(store, given) -> None:
    made = execute(scaling_law, SETTINGS, given, store)
    trials = made.read("trials").to_pylist()
    assert [json.loads(t["parameters"])["hidden_size"] for t in trials] == [16, 24, 32, 48]
    flops, losses = np.array([t["flops"] for t in trials]), np.array([t["loss"] for t in trials])
    metrics = made.manifest.metrics
    law = scaling_laws.fit_power_law(flops, losses)
    assert metrics["predicted_loss"] == pytest.approx(float(law(metrics["target_flops"])))
    assert metrics["predicted_loss_low"] <= metrics["predicted_loss"] <= metrics["predicted_loss_high"]
    found = {(row["task"], row["metric"]): row for row in made.read().to_pylist()}
    assert found["prediction", "loss"]["low"] == metrics["predicted_loss_low"]
    assert found["backtest", "predicted_loss"]["value"] == pytest.approx(float(scaling_laws.fit_power_law(flops[:-1], losses[:-1])(flops[-1])))
    # As many tokens per parameter as the target, within the tokens of one step and what rows are unevenly filled by.
    target = metrics["target_tokens"] / accounting.matrix_parameters(MODEL.complete(290, 32))
    for t in trials:
        wanted = target * json.loads(t["parameters"])["matrix_parameters"]
        assert t["tokens"] == pytest.approx(wanted, abs=PHASE.rows_per_step * 32, rel=0.1)
    # The target's cost is the cost of the run itself.
    run = execute(pretrain, PretrainConfig(model=MODEL, phases=(PHASE,), validation_share=0.1), given, store)
    assert run.manifest.metrics["flops"] == pytest.approx(metrics["target_flops"], rel=0.05)
    assert run.manifest.metrics["parameters"] == metrics["target_parameters"]


def test_trials_are_not_repeated_after_a_crash(store, given, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = module.trained, []

    def crashing(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(module, "trained", crashing)
    with pytest.raises(KeyboardInterrupt):
        execute(scaling_law, SETTINGS, given, store)
    execute(scaling_law, SETTINGS, given, store)
    assert len(calls) == 5


def test_shapes_shrink_in_proportion() -> None:
    target = SHAPE.replace(hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2)
    assert shrunk(target, 192).model_dump(exclude={"head_dim"}) == target.model_dump(exclude={"head_dim"})
    half = shrunk(target, 96)
    assert (half.intermediate_size, half.num_hidden_layers, half.num_attention_heads, half.num_key_value_heads) == (256, 2, 3, 1)
    assert half.initializer_range == pytest.approx(target.initializer_range * 2**0.5)
    for width in (32, 48, 64, 80, 96, 128):
        config = shrunk(target, width).complete(1000, 64)
        assert config.num_attention_heads * config.head_dim == width


def test_schedules_shorten_in_proportion() -> None:
    phase = Phase(steps=1000, schedule={"warmup_steps": 50, "anneal_steps": 200, "average": 5, "learning_rate": 4e-3})
    short = shortened(phase.model_copy(update={"rows_per_step": 1}), 0.1, 6e-3)
    assert (short.steps, short.schedule.warmup_steps, short.schedule.anneal_steps, short.schedule.average) == (100, 5, 20, 5)
    assert short.schedule.learning_rate == pytest.approx(6e-3)
    assert shortened(phase, 0.002, 1.0).schedule.average <= 1
    # A quarter of the tokens: half the rows, so half the steps.
    fewer = shortened(phase.model_copy(update={"rows_per_step": 8}), 0.25, 1.0)
    assert (fewer.rows_per_step, fewer.steps, fewer.schedule.warmup_steps) == (4, 500, 25)
    decays = shortened(Phase(steps=100, rows_per_step=1, schedule={"shape": "wsd", "decay_steps": 20, "warmup_steps": 10}), 0.5, 1.0)
    assert (decays.schedule.decay_steps, decays.schedule.warmup_steps) == (10, 5)


def test_wrong_widths_are_refused() -> None:
    for widths, message in (
        ((16, 24, 32, 64), "below the model's hidden_size 64"),
        ((16, 16, 24, 32), "must differ"),
        ((16, 24, 32, 33), "does not divide"),
        ((16, 24, 32), "at least 4"),
    ):
        with pytest.raises(ValidationError, match=message):
            ScalingLawConfig(model=MODEL, widths=widths)


@hypothesis.given(
    steps=st.integers(2, 60), parts=st.tuples(st.floats(0, 1), st.floats(0, 1)), rows=st.integers(1, 9), share=st.floats(0.001, 1.0),
    wsd=st.booleans(),
)  # fmt: skip
def test_a_shortened_phase_can_be_run(steps: int, parts: tuple[float, float], rows: int, share: float, wsd: bool) -> None:
    """Warm-up and annealing are rounded on their own; together they still fit."""
    warmup = int(parts[0] * (steps - 1))
    end = int(parts[1] * (steps - warmup))
    ends = {"shape": "wsd", "decay_steps": max(1, end)} if wsd else {"anneal_steps": end, "average": min(end, 3)}
    phase = Phase(steps=steps, rows_per_step=rows, schedule={"warmup_steps": warmup, **ends})
    Phase.model_validate(shortened(phase, share, 1.0).model_dump())
