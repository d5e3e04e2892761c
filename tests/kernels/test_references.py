"""Every operator's definition has the gradient that finite differences give, in fp64."""

import pytest
import torch

from puna.kernels.attention import ForestMask, attention_reference
from puna.kernels.grouped_linear import grouped_linear_reference
from puna.kernels.linear import linear_reference
from puna.kernels.linear_cross_entropy import linear_cross_entropy_reference
from puna.kernels.linear_token_logprobs import linear_token_logprobs_reference
from puna.kernels.moe import combine_reference, dispatch_reference, top_k_routing_reference
from puna.kernels.rms_norm import add_rms_norm_reference
from puna.kernels.rope import rope_reference, rope_table
from puna.kernels.swiglu import swiglu_reference

TARGETS = torch.tensor([2, 0, 6, 1, 1])
ORDER = torch.tensor([[1, 0], [0, 2], [1, 2], [2, 0], [1, 0]]).flatten().argsort(stable=True)

CASES = {
    "linear": (linear_reference, [(5, 4), (7, 4)]),
    "add + RMSNorm": (lambda x, r, w: add_rms_norm_reference(x, r, w, 1e-5), [(5, 8), (5, 8), (8,)]),
    "SwiGLU": (swiglu_reference, [(5, 8), (5, 8)]),
    "RoPE": (lambda x: rope_reference(x, *rope_table(torch.arange(5), 8, 1e4, torch.float64)), [(5, 2, 8)]),
    "attention": (
        lambda q, k, v: attention_reference(q, k, v, ForestMask.from_end(torch.tensor([5, 3, 3, 5, 5], dtype=torch.int32))),
        [(5, 4, 6), (5, 2, 6), (5, 2, 3)],
    ),
    "linear + cross-entropy": (
        lambda x, w, c: linear_cross_entropy_reference(x, w, TARGETS, c), [(5, 4), (7, 4), (5,)],
    ),
    "linear + log-probs": (lambda x, w: linear_token_logprobs_reference(x, w, TARGETS, 0.7), [(5, 4), (7, 4)]),
    "routing": (lambda z: top_k_routing_reference(z, 2, True)[:2], [(5, 4)]),
    "grouped linear": (lambda x, w: grouped_linear_reference(x, w, torch.tensor([0, 3, 3, 10])), [(10, 4), (3, 6, 4)]),
    "dispatch": (lambda x: dispatch_reference(x, ORDER), [(5, 4)]),
    "combine": (lambda y, w: combine_reference(y, w, ORDER), [(10, 4), (5, 2)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_gradient_of_the_definition(name, seed, normal):
    function, shapes = CASES[name]
    assert torch.autograd.gradcheck(function, tuple(normal(*shape, seed=10 * seed + i) for i, shape in enumerate(shapes)))
