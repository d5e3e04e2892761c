"""Products by groups of rows, compared with their definition."""

import pytest
import torch

from puna.kernels import grouped_linear as module
from puna.kernels.grouped_linear import grouped_linear, grouped_linear_reference

OFFSETS = [[0, 3, 3, 10], [0, 0, 0, 10], [0, 10, 10, 10], [0, 1, 2, 10]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offsets", OFFSETS)
def test_grouped_linear(within_budget, normal, offsets, dtype):
    inputs = (normal(10, 6), normal(3, 4, 6, seed=1), torch.tensor(offsets))
    within_budget(grouped_linear, grouped_linear_reference, inputs, dtype, ulps=8)
    assert torch.autograd.gradcheck(lambda x, w: grouped_linear(x, w, inputs[2]), inputs[:2])


def test_registered_as_torch_expects(normal):
    x, w = (t.detach().float().requires_grad_() for t in (normal(10, 6), normal(3, 4, 6, seed=1)))
    torch.library.opcheck(module._grouped_linear.dispatched, (x, w, torch.tensor(OFFSETS[0])))
    with pytest.raises(ValueError, match="do not fit"):
        grouped_linear(x, w, torch.tensor([0, 10]))
