"""A ladder of small runs, the law through its points, and the size that it chooses."""

from __future__ import annotations

import pytest
import yaml

from puna.models import accounting
from puna.models.config import ModelConfig
from puna.stages.contract import execute
from puna.stages.experiments import ladder as module
from puna.stages.experiments.choose_size import RECIPE, ChooseSizeConfig, choose_size
from puna.stages.experiments.ladder import LadderConfig, ladder
from puna.stages.experiments.law import LawConfig, law
from puna.stages.pretrain.pretrain import PretrainConfig
from puna.stages.pretrain.tokenize import TokenizeConfig, tokenize
from puna.stages.training.phase import SHAPE

MODEL = SHAPE.replace(hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
SETTINGS = LadderConfig(
    model=MODEL, widths=(8, 12, 16), tokens_per_parameter=1.0, multiples=(1.0, 2.0), rows=(1,), rates=(0.02,), validation_share=0.1, questions=5,
    compute={"save_seconds": 1e6},
)  # fmt: skip


@pytest.fixture
def given(store, corpus):
    made = corpus([("high", 40 + 7 * (i % 5)) for i in range(60)])
    tokens = execute(tokenize, TokenizeConfig(sequence_length=64), {"documents": made["documents"], "tokenizer": made["tokenizer"]}, store)
    return {"tokens": tokens, "tokenizer": made["tokenizer"]}


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FEWEST_STEPS", 20)


def test_from_a_ladder_to_a_size(store, given, few_steps: None) -> None:
    made = execute(ladder, SETTINGS, given, store)
    points = made.read("points").to_pylist()
    shapes = [ModelConfig.model_validate_json(point["shape"]) for point in points]
    assert [shape.hidden_size for shape in shapes] == [8, 8, 12, 12, 16, 16]
    for point, shape, multiple in zip(points, shapes, (1, 2) * 3, strict=True):
        assert point["parameters"] == accounting.matrix_parameters(shape)
        assert point["steps"] == round(multiple * point["parameters"] / 64) and point["rows"] == 1
        assert point["tokens"] == pytest.approx(multiple * point["parameters"], rel=0.15)
        assert 0 <= point["accuracy"] <= 1 and point["task_loss"] > 0
    surface = execute(law, LawConfig(draws=100), {"ladders": [made]}, store)
    chosen = execute(choose_size, ChooseSizeConfig(flops=1e9, draws=100), {"law": surface}, store)
    metrics = chosen.manifest.metrics
    assert metrics["predicted_loss_low"] <= metrics["predicted_loss"] <= metrics["predicted_loss_high"]
    assert metrics["flops"] == pytest.approx(1e9)
    recipe = yaml.safe_load(chosen.path(RECIPE).read_text())
    config = PretrainConfig(**recipe["pretrain"])
    assert config.phases[0].until == round(metrics["tokens"]) and config.phases[0].schedule.learning_rate == 0.02
    assert accounting.matrix_parameters(config.model.complete(shapes[0].vocab_size, 64)) == metrics["parameters"]
