"""The low-rank update inside the large product's tile, Triton's version."""

import pytest
import torch

from puna.kernels import lora as module
from puna.kernels.configurations import Configuration
from puna.kernels.lora import lora_linear, lora_linear_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(5, 7, 3, 2), (37, 64, 40, 17)])
def test_values_and_gradients(within_budget, normal, monkeypatch, shape, dtype):
    monkeypatch.setattr(module, "configuration", lambda *_: Configuration(16, 16, 4, 1, 32))
    T, D, N, R = shape
    inputs = (normal(T, D), normal(N, D, seed=1).detach(), normal(R, D, seed=2), normal(N, R, seed=3))
    ours, reference = (lambda x, w, a, b, f=f: f(x, w, a, b, 0.7) for f in (lora_linear, lora_linear_reference))
    within_budget(ours, reference, inputs, dtype, ulps=16)
