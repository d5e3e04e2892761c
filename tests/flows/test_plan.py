"""`puna plan` against the accounting of the same model, by hand."""

import json

import pytest
from typer.testing import CliRunner

from puna.flows import recipe as recipes
from puna.flows.cli import app
from puna.flows.plan import costs
from puna.models import accounting
from puna.storage import PunaError


def test_the_plan_is_the_sum_of_its_phases():
    recipe = recipes.load("demo")
    found = costs(recipe, "H100", 1)
    config = recipe.pretrain.model.model(recipe.tokenizer.vocab_size, recipe.tokenize.sequence_length)
    assert found["parameters"] == accounting.parameters(config).total
    step = [recipe.tokenize.sequence_length] * recipe.pretrain.phases[0].rows_per_step
    phase = found["phases"][0]
    assert phase["tokens"] == sum(step) * recipe.pretrain.phases[0].steps
    assert phase["flops"] == accounting.training_flops(config, step) * recipe.pretrain.phases[0].steps
    assert found["seconds"] == sum(p["seconds"] for p in found["phases"])
    eight = costs(recipe, "H100", 8)
    assert eight["seconds"] == pytest.approx(found["seconds"] / 8)
    assert eight["state_bytes"] == found["state_bytes"] // 8
    with pytest.raises(PunaError, match="there are no rates of 'TPU'"):
        costs(recipe, "TPU", 1)
    with pytest.raises(PunaError, match="--gpus needs --gpu"):
        costs(recipe, None, 2)


def test_the_command_prints_json_and_text():
    result = CliRunner().invoke(app, ["plan", "--gpu", "A100", "--json", "--set", "pretrain.phases=[{steps: 70}]"])
    assert json.loads(result.output)["phases"][0]["steps"] == 70
    text = CliRunner().invoke(app, ["plan", "--gpu", "A100"]).output
    assert "phase initial" in text and "arithmetic_intensity" in text
