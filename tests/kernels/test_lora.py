"""The linear layer with a low-rank update against its definition."""

import pytest
import torch

from puna.kernels import lora as module
from puna.kernels.lora import lora_linear, lora_linear_reference


def inputs(normal, T, D, N, R):
    w = normal(N, D, seed=1).detach()
    return normal(T, D), w, normal(R, D, seed=2), normal(N, R, seed=3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 7, 3, 2), (300, 64, 128, 8), (1, 1, 1, 1)])
def test_values_and_gradients(within_budget, normal, shape, dtype):
    ours, reference = (lambda x, w, a, b, f=f: f(x, w, a, b, 0.7) for f in (lora_linear, lora_linear_reference))
    within_budget(ours, reference, inputs(normal, *shape), dtype, ulps=16)


def test_gradcheck_and_registration(normal):
    x, w, a, b = inputs(normal, 4, 5, 6, 2)
    assert torch.autograd.gradcheck(lambda x, a, b: lora_linear(x, w, a, b, 1.5), (x, a, b))
    torch.library.opcheck(module._lora_linear, (*(t.detach().float().requires_grad_(t.requires_grad) for t in (x, w, a, b)), 0.5))


def test_leading_axes_and_only_what_is_asked(normal):
    x, w, a, b = (t.detach() for t in inputs(normal, 6, 5, 4, 2))
    assert lora_linear(x.view(2, 3, 5), w, a, b, 1.0).shape == (2, 3, 4)
    b.requires_grad_()
    (db,) = torch.autograd.grad(lora_linear(x, w, a, b, 2.0).sum(), b)
    torch.testing.assert_close(db, 2.0 * (x @ a.T).sum(0).expand(4, 2))


def test_refuses_what_does_not_fit(normal):
    x, w, a, b = inputs(normal, 4, 5, 6, 2)
    with pytest.raises(ValueError, match="do not fit"):
        lora_linear(x, w, b, a, 1.0)
    with pytest.raises(ValueError, match="requires_grad_"):
        lora_linear(x, w.clone().requires_grad_(), a, b, 1.0)
