"""Weight averages compared with exact fractions."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from puna.models.config import ModelConfig
from puna.models.formats.checkpoint import load, save
from puna.models.training.average import average, average_checkpoints
from puna.models.transformer import Transformer

CONFIG = ModelConfig(vocab_size=19, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)


def model(seed: int) -> Transformer:
    return Transformer(CONFIG, "lm", seed=seed)


def test_average_by_hand():
    a, b = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 6.0])}
    assert average([a, b])["w"].tolist() == [2.0, 4.0]
    assert average([a, b], [3, 1])["w"].tolist() == [1.5, 3.0]
    assert average([{"w": torch.ones(1, dtype=torch.bfloat16)}] * 2)["w"].dtype == torch.bfloat16


def test_average_does_not_depend_on_order():
    generator = torch.Generator().manual_seed(0)
    states = [{"w": torch.randn(1000, generator=generator) * 10.0**k} for k in range(-2, 2)]
    weights = [0.1, 0.2, 0.3, 0.7]
    expected = average(states, weights)["w"]
    for order in itertools.permutations(range(4)):
        assert torch.equal(average([states[i] for i in order], [weights[i] for i in order])["w"], expected)


@pytest.mark.parametrize("weights", [[1.0], [-1.0, 2.0], [0.0, 0.0]])
def test_average_refuses_wrong_weights(weights: list[float]):
    with pytest.raises(ValueError, match="2 models need 2 weights"):
        average([{"w": torch.ones(1)}] * 2, weights)


def test_average_refuses_other_models():
    with pytest.raises(ValueError, match="other tensors"):
        average([{"w": torch.ones(1)}, {"v": torch.ones(1)}])
    with pytest.raises(ValueError, match="different shapes"):
        average([{"w": torch.ones(1)}, {"w": torch.ones(2)}])
    with pytest.raises(ValueError, match="at least one"):
        average([])


def test_checkpoints_of_two_formats_have_their_mean_in_the_wider_one(tmp_path: Path):
    one, other = model(0).bfloat16(), model(1)
    for made, name in ((one, "one"), (other, "other")):
        save(made, tmp_path / name)
    for order in (["one", "other"], ["other", "one"]):
        average_checkpoints([tmp_path / name for name in order], tmp_path / order[0][::-1])
        got = load(tmp_path / order[0][::-1], dtype=None).state_dict()
        assert json.loads((tmp_path / order[0][::-1] / "config.json").read_text())["torch_dtype"] == "float32"
        for name, value in other.state_dict().items():
            assert torch.equal(got[name], ((value.double() + one.state_dict()[name].double()) / 2).float())


def test_configurations_may_differ_in_either_name_of_the_dtype(tmp_path: Path):
    """Newer releases of transformers write `dtype`, older ones `torch_dtype`."""
    names = {"new": "dtype", "newer": "dtype", "old": "torch_dtype"}
    for seed, (folder, key) in enumerate(names.items()):
        save(model(seed).bfloat16() if folder == "newer" else model(seed), tmp_path / folder)
        config = json.loads((tmp_path / folder / "config.json").read_text())
        config[key] = config.pop("torch_dtype")
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
    for other in ("newer", "old"):
        average_checkpoints([tmp_path / "new", tmp_path / other], tmp_path / f"mean-{other}")
        config = json.loads((tmp_path / f"mean-{other}" / "config.json").read_text())
        assert {config[key] for key in ("dtype", "torch_dtype") if key in config} == {"float32"}
        expected = average([load(tmp_path / folder, dtype=None) for folder in ("new", other)])
        got = load(tmp_path / f"mean-{other}", dtype=None).state_dict()
        assert all(torch.equal(got[name], value) for name, value in expected.items())


def test_average_checkpoints(tmp_path: Path):
    models = [model(0), model(1), model(2)]
    folders = [tmp_path / str(i) for i in range(3)]
    for made, folder in zip(models, folders, strict=True):
        save(made, folder)
    average_checkpoints(folders, tmp_path / "mean", [2, 1, 1])
    got = load(tmp_path / "mean").state_dict()
    for name, value in average(models, [2, 1, 1]).items():
        assert torch.equal(got[name], value)
        expected = sum(
            w * m.state_dict()[name].double() for w, m in zip([0.5, 0.25, 0.25], models, strict=True)
        )
        torch.testing.assert_close(value.double(), expected, atol=1e-8, rtol=1e-6)
    save(Transformer(ModelConfig(vocab_size=19, hidden_size=16, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1), "lm", seed=0), tmp_path / "other")
    with pytest.raises(ValueError, match=r"config\.json"):
        average_checkpoints([folders[0], tmp_path / "other"], tmp_path / "bad")
    assert not (tmp_path / "bad").exists()
