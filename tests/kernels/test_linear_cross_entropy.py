"""The chunked output layer compared with the plain one, in fp64 and at chunk boundaries."""

import math

import pytest
import torch

from puna.kernels import linear_cross_entropy as linear_cross_entropy_module
from puna.kernels import linear_token_logprobs as token_logprobs_module
from puna.kernels import output_layer
from puna.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from puna.kernels.linear_token_logprobs import linear_token_logprobs, linear_token_logprobs_reference


def inputs(N=11, D=5, V=7, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    x = (scale * torch.randn(N, D, dtype=dtype, generator=generator)).requires_grad_()
    w = torch.randn(V, D, dtype=dtype, generator=generator, requires_grad=True)
    targets = torch.randint(0, V, (N,), generator=generator)
    weights = torch.rand(N, dtype=dtype, generator=generator)
    return x, w, targets, weights


@pytest.fixture(params=[1, 3, 11, 100])
def chunk(request, monkeypatch):
    """Use chunks of one row, of a number that does not divide 11, of exactly all rows, and of more than all rows."""
    monkeypatch.setattr(output_layer, "CHUNK_BYTES", 4 * 7 * request.param)


def test_cross_entropy_equals_the_reference(chunk):
    x, w, targets, weights = inputs()
    ours = linear_cross_entropy(x, w, targets, weights)
    plain = linear_cross_entropy_reference(x, w, targets, weights)
    torch.testing.assert_close(ours, plain, rtol=1e-13, atol=0)
    gradients = torch.autograd.grad(3.0 * ours, (x, w))
    for gradient, expected in zip(gradients, torch.autograd.grad(3.0 * plain, (x, w)), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.0])
def test_token_logprobs_equal_the_reference(chunk, temperature):
    x, w, targets, weights = inputs()
    ours = linear_token_logprobs(x, w, targets, temperature)
    plain = linear_token_logprobs_reference(x, w, targets, temperature)
    for mine, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-13)
    for mix in ((1.0, 0.0), (0.0, 1.0), (1.0, -0.7)):
        losses = [(mix[0] * logp * weights + mix[1] * entropy * weights).sum() for logp, entropy in (ours, plain)]
        pairs = [torch.autograd.grad(loss, (x, w), retain_graph=True) for loss in losses]
        for gradient, expected in zip(*pairs, strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-13)


def test_gradcheck():
    x, w, targets, weights = inputs(4, 3, 5)
    assert torch.autograd.gradcheck(lambda x, w: linear_cross_entropy(x, w, targets, weights), (x, w))
    assert torch.autograd.gradcheck(lambda c: linear_cross_entropy(x, w, targets, c), weights.clone().requires_grad_())
    assert torch.autograd.gradcheck(lambda x, w: linear_token_logprobs(x, w, targets, 0.7), (x, w))


def test_by_hand():
    """Logits (ln 1, ln 3): p = (1/4, 3/4); -log p = ln 4; H = ln 4 - 3/4 ln 3."""
    x, w = torch.tensor([[1.0]]), torch.tensor([[0.0], [math.log(3.0)]])
    loss = linear_cross_entropy(x, w, torch.tensor([0]), torch.tensor([0.5]))
    assert loss.item() == pytest.approx(0.5 * math.log(4.0), rel=1e-6)
    logp, entropy = linear_token_logprobs(x, w, torch.tensor([1]))
    assert logp.item() == pytest.approx(math.log(0.75), rel=1e-6)
    assert entropy.item() == pytest.approx(math.log(4.0) - 0.75 * math.log(3.0), rel=1e-6)


def test_extreme_logits_stay_finite():
    """A target 400 nats below the peak: its probability is zero in fp32, its loss is not infinite."""
    x, w = torch.tensor([[200.0]], requires_grad=True), torch.tensor([[1.0], [-1.0]], requires_grad=True)
    loss = linear_cross_entropy(x, w, torch.tensor([1]), torch.ones(1))
    assert loss.item() == pytest.approx(400.0)
    assert linear_token_logprobs(x, w, torch.tensor([1]))[0].item() == pytest.approx(-400.0)
    assert torch.autograd.grad(loss, x)[0].item() == pytest.approx(2.0)


def test_gradient_only_where_asked():
    x, w, targets, weights = inputs()
    for wanted in (x, w):
        fixed = [tensor if tensor is wanted else tensor.detach() for tensor in (x, w)]
        (ours,) = torch.autograd.grad(linear_cross_entropy(*fixed, targets, weights), wanted)
        (plain,) = torch.autograd.grad(linear_cross_entropy_reference(*fixed, targets, weights), wanted)
        torch.testing.assert_close(ours, plain)
        (ours,) = torch.autograd.grad(linear_token_logprobs(*fixed, targets)[0].sum(), wanted)
        (plain,) = torch.autograd.grad(linear_token_logprobs_reference(*fixed, targets)[0].sum(), wanted)
        torch.testing.assert_close(ours, plain)
    with torch.no_grad():
        torch.testing.assert_close(
            linear_cross_entropy(x, w, targets, weights),
            linear_cross_entropy_reference(x, w, targets, weights),
        )


def test_low_precision_sums_in_fp32():
    """bf16 weights: dW over 400 chunks of one row stays as exact as one bf16 product of all rows."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 8, generator=generator).bfloat16().requires_grad_()
    w = torch.randn(16, 8, generator=generator).bfloat16().requires_grad_()
    targets, weights = torch.randint(0, 16, (400,), generator=generator), torch.full((400,), 1 / 400)
    exact = torch.autograd.grad(linear_cross_entropy_reference(x.double(), w.double(), targets, weights.double()), w)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_layer, "CHUNK_BYTES", 1)
        loss = linear_cross_entropy(x, w, targets, weights)
        (ours,) = torch.autograd.grad(loss, w)
    (plain,) = torch.autograd.grad(linear_cross_entropy_reference(x, w, targets, weights.bfloat16()), w)
    assert loss.dtype == torch.float32
    assert (ours - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-4


def test_no_rows():
    x, w, targets, weights = (tensor[:0] if i != 1 else tensor for i, tensor in enumerate(inputs()))
    loss = linear_cross_entropy(x, w, targets, weights)
    assert loss.item() == 0.0
    assert torch.autograd.grad(loss, w)[0].abs().sum() == 0
    assert [len(part) for part in linear_token_logprobs(x, w, targets)] == [0, 0]


def test_temperature_must_be_positive():
    x, w, targets, _ = inputs()
    with pytest.raises(ValueError, match="temperature must be positive"):
        linear_token_logprobs(x, w, targets, 0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_operators_are_registered_as_torch_expects(dtype):
    x, w, targets, weights = (t.detach().to(dtype) if t.is_floating_point() else t for t in inputs())
    x.requires_grad_()
    w.requires_grad_()
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(linear_cross_entropy_module._cross_entropy.dispatched, (x, w, targets, weights, True, True), test_utils=checks)
    torch.library.opcheck(token_logprobs_module._logprobs.dispatched, (x, w, targets, 0.7), test_utils=checks)


def test_fp32_on_cpu_equals_the_reference(within_budget):
    """The fused loop over the rows of a chunk."""
    x, w, targets, weights = inputs(50, 8, 40)
    within_budget(
        lambda x, w, c: linear_cross_entropy(x, w, targets, c),
        lambda x, w, c: linear_cross_entropy_reference(x, w, targets, c), (x, w, weights), torch.float32,
    )  # fmt: skip
