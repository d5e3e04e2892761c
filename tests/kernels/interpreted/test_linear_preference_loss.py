"""Preference losses from hidden states with the Triton passes over chunks of logits."""

import pytest
import torch

from puna.kernels import output_layer
from puna.kernels.linear_preference_loss import linear_preference_loss, linear_preference_loss_reference


@pytest.mark.parametrize("rows", [2, 100])
@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_values_and_gradients(within_budget, normal, monkeypatch, rows, kind):
    monkeypatch.setattr(output_layer, "CHUNK_BYTES", rows * 37 * 4)
    monkeypatch.setattr(output_layer, "BLOCK", 16)
    generator = torch.Generator().manual_seed(0)
    targets, weights = torch.randint(0, 37, (9,), generator=generator), torch.rand(9, generator=generator, dtype=torch.float64)
    answers = torch.tensor([3, 2, 4]), torch.tensor([0, 2]), torch.tensor([1, 0]), torch.tensor([0.1, -0.2, 0.3])
    ours, plain = (
        lambda x, w, f=f: f(x, w, targets, weights.to(x.dtype), weights.to(x.dtype), *answers, kind, 0.3)[0]
        for f in (linear_preference_loss, linear_preference_loss_reference)
    )
    within_budget(ours, plain, (normal(9, 8), normal(37, 8, seed=1)), torch.float32, ulps=16)
