"""Triton passes of the output layer over chunks of logits, compared with the fp64 definitions."""

import pytest
import torch

from puna.kernels import linear_token_logprobs as token_logprobs_module
from puna.kernels import output_layer
from puna.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from puna.kernels.linear_token_logprobs import linear_token_logprobs, linear_token_logprobs_reference

DTYPES = [torch.float32, torch.float16]


@pytest.fixture(params=[16, 4096])
def block(request, monkeypatch):
    """Use rows of several blocks of logits and of one block; two fp32 rows per chunk."""
    monkeypatch.setattr(output_layer, "BLOCK", request.param)
    monkeypatch.setattr(output_layer, "CHUNK_BYTES", 4 * 37 * 2)


def draw(normal, N=5, D=8, V=37, scale=1.0):
    targets = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(3))
    return normal(N, D, scale=scale), normal(V, D, seed=1), targets


@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_entropy(within_budget, normal, block, dtype):
    x, w, targets = draw(normal)
    weights = torch.rand(5, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    within_budget(
        lambda x, w, c: linear_cross_entropy(x, w, targets, c),
        lambda x, w, c: linear_cross_entropy_reference(x, w, targets, c), (x, w, weights), dtype,
    )  # fmt: skip


def test_small_weights_survive_fp16(normal):
    """With weights of 1e-6 each, as in a large batch, the gradient's relative error stays that of fp16."""
    x, w, targets = draw(normal)
    weights = torch.full((5,), 1e-6, dtype=torch.float64)
    exact = torch.autograd.grad(linear_cross_entropy_reference(x, w, targets, weights * 1e4), (x, w))
    low = [t.detach().half().requires_grad_() for t in (x, w)]
    ours = torch.autograd.grad(linear_cross_entropy(*low, targets, weights.float()) * 1e4, low)
    for gradient, expected in zip(ours, exact, strict=True):
        assert (gradient.double() - expected).abs().max() < 0.01 * expected.abs().max()


@pytest.mark.parametrize(("temperature", "dtype"), [(1.0, torch.float32), (0.7, torch.float16)])
def test_token_logprobs(within_budget, normal, block, dtype, temperature):
    x, w, targets = draw(normal)
    for pick in (slice(0, 2), slice(0, 1), slice(1, 2)):  # both, only log-probabilities, only entropies
        within_budget(
            lambda x, w, pick=pick: linear_token_logprobs(x, w, targets, temperature)[pick],
            lambda x, w, pick=pick: linear_token_logprobs_reference(x, w, targets, temperature)[pick], (x, w), dtype,
        )  # fmt: skip


def test_extreme_logits():
    """A target 400 nats below the peak, and a vocabulary entry of probability zero."""
    x, w = torch.tensor([[200.0]], requires_grad=True), torch.tensor([[1.0], [-1.0]], requires_grad=True)
    loss = linear_cross_entropy(x, w, torch.tensor([1]), torch.ones(1))
    assert loss.item() == pytest.approx(400.0)
    assert torch.autograd.grad(loss, x)[0].item() == pytest.approx(2.0)
    logits = torch.tensor([[0.0, 1.0, -torch.inf]])
    logp, entropy, _ = token_logprobs_module._logprob_rows_triton(logits, torch.tensor([1]), 1.0)
    expected = torch.distributions.Categorical(logits=torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(logp[0], expected.log_prob(torch.tensor(1)))
    torch.testing.assert_close(entropy[0], expected.entropy())
    d = token_logprobs_module._logprob_gradient_rows_triton(
        logits, torch.tensor([1]), torch.zeros(1), torch.ones(1), entropy, expected.logits.logsumexp(0)[None] + 0, 1.0
    )
    assert bool(d.isfinite().all()) and d[0, 2] == 0
