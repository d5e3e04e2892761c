"""4-bit weights in AWQ's layout: bits by hand, the product, its gradient, and the error of rounding."""

import pytest
import torch

from puna.kernels import awq_linear as module
from puna.kernels.awq_linear import awq_linear, awq_linear_reference, pack_awq, quantize_awq, unpack_awq


def weights(D, N, G, seed=0):
    generator = torch.Generator().manual_seed(seed)
    levels, zeros = (torch.randint(0, 16, (rows, N), generator=generator) for rows in (D, G))
    return levels, zeros, 0.1 + torch.rand(G, N, generator=generator, dtype=torch.float64)


def test_the_layout_of_checkpoints():
    """AutoAWQ packs columns 0, 2, 4, 6, 1, 3, 5, 7 of each eight from the lowest bits up."""
    levels = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 15]])
    expected = sum(int(levels[0, column]) << 4 * place for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
    assert pack_awq(levels).tolist() == [[expected - (1 << 32)]]
    assert torch.equal(unpack_awq(pack_awq(levels)), levels.int())
    random = weights(33, 24, 3)[0]
    assert torch.equal(unpack_awq(pack_awq(random)), random.int())
    for wrong in (torch.full((1, 8), 16), torch.zeros(1, 7)):
        with pytest.raises(ValueError, match="0..15"):
            pack_awq(wrong)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_product(within_budget, normal, dtype):
    levels, zeros, scales = weights(32, 16, 4)
    spelled = (levels - zeros.repeat_interleave(8, 0)) * scales.repeat_interleave(8, 0)
    x = normal(5, 32)
    torch.testing.assert_close(awq_linear_reference(x, pack_awq(levels), pack_awq(zeros), scales), x @ spelled)
    inputs = (x, pack_awq(levels), pack_awq(zeros), scales)
    within_budget(awq_linear, awq_linear_reference, inputs, dtype)
    assert torch.autograd.gradcheck(lambda x: awq_linear(x, *inputs[1:]), (x,))


@pytest.mark.parametrize("seed", [0, 1])
def test_rounding_errs_by_half_a_step(seed):
    w = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    packed, zeros, scales = quantize_awq(w, 32)
    back = awq_linear(torch.eye(64, dtype=torch.float64), packed, zeros, scales).T
    # Half a step for the level, half for the zero point.
    assert bool(((back - w).abs() <= 1.0001 * scales.repeat_interleave(32, 0).T).all())
    assert (back - w).square().mean().sqrt() < 0.35 * scales.mean()  # evenly spread errors have 0.29
    with pytest.raises(ValueError, match="no multiple"):
        quantize_awq(w, 48)


def test_refusals_and_registration(normal):
    levels, zeros, scales = weights(32, 16, 4)
    x = normal(3, 32).detach().float().requires_grad_()
    with pytest.raises(ValueError, match="do not fit"):
        awq_linear(x[:, :16], pack_awq(levels), pack_awq(zeros), scales)
    torch.library.opcheck(module._awq_linear, (x, pack_awq(levels), pack_awq(zeros), scales.float()))
