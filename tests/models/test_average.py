"""Weight averages against arithmetic done in fractions."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from puna.models.config import ModelConfig
from puna.models.formats.checkpoint import load, save
from puna.models.training.average import average, average_checkpoints
from puna.models.transformer import Transformer

CONFIG = ModelConfig(vocab_size=19, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)


def model(seed: int) -> Transformer:
    return Transformer(CONFIG, "lm", torch.Generator().manual_seed(seed))


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


def test_slerp_by_hand():
    # A right angle: a quarter of the way is an angle of 22.5 degrees, and lengths mix with the same coefficients.
    a, b = {"w": torch.tensor([[2.0, 0.0]])}, {"w": torch.tensor([[0.0, 4.0]])}
    got = average([a, b], [3, 1], "slerp")["w"]
    expected = torch.tensor([[2 * math.sin(math.pi * 3 / 8), 4 * math.sin(math.pi / 8)]])
    torch.testing.assert_close(got, expected)
    # Between unit vectors it stays on the sphere, where the mean is shorter; ends are the models; the same and opposite directions
    # have no arc.
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        x, y = (v / v.norm() for v in torch.randn(2, 7, generator=generator, dtype=torch.float64))
        middle = average([{"w": x}, {"w": y}], None, "slerp")["w"]
        torch.testing.assert_close(middle.norm(), torch.tensor(1.0, dtype=torch.float64))
        torch.testing.assert_close(middle, (x + y) / (x + y).norm())
        assert torch.equal(middle, average([{"w": y}, {"w": x}], None, "slerp")["w"])
        torch.testing.assert_close(average([{"w": x}, {"w": y}], [1, 0], "slerp")["w"], x)
        torch.testing.assert_close(average([{"w": x}, {"w": 3 * x}], None, "slerp")["w"], 2 * x)
    assert average([{"w": torch.zeros(2)}, {"w": torch.ones(2)}], None, "slerp")["w"].tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match="slerp averages two models, not 3"):
        average([a, a, b], None, "slerp")


def ties_by_loops(base: list[float], models: list[list[float]], weights: list[float], density: float) -> list[float]:
    """The paper's three steps, element by element: trim, elect a sign, mean of those that agree."""
    count = math.ceil(density * len(base))
    kept = []
    for model in models:
        difference = [x - b for x, b in zip(model, base, strict=True)]
        border = sorted(map(abs, difference), reverse=True)[count - 1]
        kept.append([d if abs(d) >= border else 0.0 for d in difference])
    found = []
    for at, b in enumerate(base):
        total = sum(w * k[at] for w, k in zip(weights, kept, strict=True))
        agree = [(w, k[at]) for w, k in zip(weights, kept, strict=True) if k[at] * total > 0]
        found.append(b + (sum(w * v for w, v in agree) / sum(w for w, _ in agree) if agree else 0.0))
    return found


@pytest.mark.parametrize("density", [0.2, 0.5, 1.0])
def test_ties_against_loops(density: float):
    generator = torch.Generator().manual_seed(int(10 * density))
    base, *models = torch.randn(4, 11, generator=generator, dtype=torch.float64)
    weights = [0.5, 0.3, 0.2]
    got = average([{"w": m} for m in models], weights, "ties", base={"w": base}, density=density)["w"]
    expected = ties_by_loops(base.tolist(), [m.tolist() for m in models], weights, density)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))
    order = [2, 0, 1]
    turned = average([{"w": models[i]} for i in order], [weights[i] for i in order], "ties", base={"w": base}, density=density)
    assert torch.equal(turned["w"], got)


def test_ties_by_hand_and_what_it_needs():
    base = {"w": torch.zeros(4)}
    one, other = {"w": torch.tensor([4.0, -1.0, 2.0, 0.5])}, {"w": torch.tensor([2.0, 3.0, -1.0, 0.0])}
    assert average([one, other], None, "ties", base=base, density=1.0)["w"].tolist() == [3.0, 3.0, 2.0, 0.5]
    assert average([one, other], None, "ties", base=base, density=0.25)["w"].tolist() == [4.0, 3.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="ties needs the base"):
        average([one, other], None, "ties")
    with pytest.raises(ValueError, match="linear takes no base"):
        average([one, other], base=base)
    with pytest.raises(ValueError, match="the base has other tensors"):
        average([one, other], None, "ties", base={"v": torch.zeros(4)})


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
    for method, base in (("slerp", None), ("ties", folders[2])):
        average_checkpoints(folders[:2], tmp_path / method, [2, 1], method, base=base)
        got = load(tmp_path / method).state_dict()
        for name, value in average(models[:2], [2, 1], method, base=base and models[2]).items():
            assert torch.equal(got[name], value)
    save(Transformer(ModelConfig(vocab_size=19, hidden_size=16, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1), "lm", torch.Generator()), tmp_path / "other")
    with pytest.raises(ValueError, match=r"config\.json"):
        average_checkpoints([folders[0], tmp_path / "other"], tmp_path / "bad")
    assert not (tmp_path / "bad").exists()
