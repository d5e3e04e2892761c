"""Products by groups, Triton's versions: tiles found on the device, groups without rows, cut tiles."""

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
