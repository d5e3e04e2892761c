"""Triton versions of the products by groups: tiles computed on the device, groups without rows, partial tiles."""

import pytest
import torch

from puna.kernels import grouped_linear as module
from puna.kernels.configurations import Configuration
from puna.kernels.grouped_linear import grouped_linear, grouped_linear_reference

FP32, FP16 = torch.float32, torch.float16


@pytest.mark.parametrize(
    ("offsets", "dtype"), [([0, 20, 20, 37], FP32), ([0, 20, 20, 37], FP16), ([0, 0, 0, 37], FP32), ([0, 16, 32, 37], FP16), ([0, 1, 2, 37], FP32)]
)
def test_grouped_linear(within_budget, normal, monkeypatch, offsets, dtype):
    monkeypatch.setattr(module, "configuration", lambda *_: Configuration(16, 16, 4, 1, 16))
    inputs = (normal(37, 20), normal(3, 18, 20, seed=1), torch.tensor(offsets))
    within_budget(grouped_linear, grouped_linear_reference, inputs, dtype, ulps=8)


@pytest.mark.parametrize("offsets", [[0, 5], [0, 0, 4, 4, 9], [0, 16, 16, 33]])
def test_every_row_is_in_one_tile(offsets):
    firsts, owners = module._tiles(offsets[-1], torch.tensor(offsets), 8)
    seen = [
        (int(e), row) for first, e in zip(firsts.tolist(), owners.tolist(), strict=True) if e >= 0
        for row in range(first, min(first + 8, offsets[e + 1]))
    ]  # fmt: skip
    assert seen == [(e, row) for e in range(len(offsets) - 1) for row in range(offsets[e], offsets[e + 1])]


@pytest.mark.parametrize("offsets", [[0, 20, 20, 37], [0, 0, 5, 37]])
def test_the_librarys_product(within_budget, normal, monkeypatch, offsets):
    """torch's own product, which takes groups of any number of rows, runs on a CPU, too."""
    asked = []
    monkeypatch.setattr(module, "configuration", lambda name, *_: asked.append(name) or Configuration(16, 16, 4, 1, 16, library=True))
    monkeypatch.setattr(module, "_library_takes", lambda *factors: all(x.dtype == torch.bfloat16 for x in factors))
    monkeypatch.setattr(module, "_grouped_kernel", None)
    monkeypatch.setattr(module, "_grouped_weights_kernel", None)
    inputs = (normal(37, 24), normal(3, 16, 24, seed=1), torch.tensor(offsets))
    within_budget(grouped_linear, grouped_linear_reference, inputs, torch.bfloat16)
    assert {"grouped_linear", "grouped_weights"} == set(asked)


def test_the_library_is_asked_only_where_it_takes_the_numbers(monkeypatch, normal):
    """On a CPU, and for widths that are not multiples of 16 bytes, the kernel runs although the table prefers the library."""
    monkeypatch.setattr(module, "configuration", lambda *_: Configuration(16, 16, 4, 1, 16, library=True))
    monkeypatch.setattr(module, "_library", None)
    offsets = torch.tensor([0, 20, 37])
    for D, everything in ((24, False), (20, True)):
        monkeypatch.setattr(module, "_library_takes", lambda *_, answer=everything: answer)
        x, w = normal(37, D).float().detach(), normal(2, 16, D, seed=1).float().detach()
        torch.testing.assert_close(grouped_linear(x, w, offsets), grouped_linear_reference(x, w, offsets))
