"""Preference losses from hidden states: the definition through all logits, chunks of every size, losses by hand."""

import math

import pytest
import torch

from puna.kernels import linear_preference_loss as module
from puna.kernels import output_layer
from puna.kernels.linear_preference_loss import linear_preference_loss, linear_preference_loss_reference, preference_losses

LENGTHS = [3, 2, 0, 4, 1, 5]
CHOSEN, REJECTED = [0, 3, 5, 0], [1, 2, 4, 3]
HOW = [("sigmoid", 0.3, 0.0, 0.0), ("sigmoid", 2.0, 0.1, 0.5), ("hinge", 0.3, 0.0, 0.0), ("ipo", 0.3, 0.0, 0.0)]


def pairs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    n = sum(LENGTHS)
    weights, nll = torch.rand(2, n, generator=generator, dtype=torch.float64)
    reference = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 11, (n,), generator=generator)
    return targets, weights, nll, torch.tensor(LENGTHS), torch.tensor(CHOSEN), torch.tensor(REJECTED), reference


@pytest.mark.parametrize("rows", [1, 4, 100])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_gradients(within_budget, normal, monkeypatch, rows, how, dtype):
    monkeypatch.setattr(output_layer, "CHUNK_BYTES", rows * 11 * dtype.itemsize)
    targets, weights, nll, *answers = pairs()
    ours, plain = (
        lambda x, w, f=f: f(x, w, targets, weights.to(x.dtype), nll.to(x.dtype), *answers[:3], answers[3].to(x.dtype), *how)[0]
        for f in (linear_preference_loss, linear_preference_loss_reference)
    )
    within_budget(ours, plain, (normal(15, 6), normal(11, 6, seed=1)), dtype, ulps=16)


@pytest.mark.parametrize("how", HOW)
def test_gradcheck_and_margins(normal, how):
    x, w = normal(15, 6), normal(11, 6, seed=1)
    assert torch.autograd.gradcheck(lambda x, w: linear_preference_loss(x, w, *pairs(), *how)[0], (x, w))
    torch.testing.assert_close(linear_preference_loss(x, w, *pairs(), *how)[1], linear_preference_loss_reference(x, w, *pairs(), *how)[1])


def test_losses_by_hand():
    margins = torch.tensor([0.0, 2.0], dtype=torch.float64)
    expected = [math.log(2), math.log1p(math.exp(-1.0))]
    assert preference_losses(margins, "sigmoid", 0.5).tolist() == pytest.approx(expected)
    assert preference_losses(margins, "hinge", 0.25).tolist() == [1.0, 0.5]
    assert preference_losses(margins, "ipo", 0.25).tolist() == [4.0, 0.0]
    # Smoothing mixes in the loss of the pair turned round; a target moves the point where the loss is log 2.
    assert preference_losses(margins, "sigmoid", 0.5, 0.2)[1].item() == pytest.approx(0.8 * expected[1] + 0.2 * (expected[1] + 1.0))
    assert preference_losses(margins, "sigmoid", 0.5, 0.0, 1.0)[1].item() == pytest.approx(math.log(2))


def test_groups_hold_whole_pairs():
    groups = list(module._groups(LENGTHS, list(zip(CHOSEN, REJECTED, strict=True))))
    assert groups == [(slice(0, 4), slice(0, 9), [0, 3, 1]), (slice(4, 6), slice(9, 15), [2])]


def test_refusals_and_registration(normal):
    x, w = (t.detach().float().requires_grad_() for t in (normal(15, 6), normal(11, 6, seed=1)))
    given = [t.float() if t.is_floating_point() else t for t in pairs()]
    for wrong in (("dpo", 0.1), ("sigmoid", 0.0), ("ipo", 0.1, 0.1)):
        with pytest.raises(ValueError, match="kind is one of|belong to"):
            linear_preference_loss(x, w, *given, *wrong)
    with pytest.raises(ValueError, match="for each row"):
        linear_preference_loss(x[:-1], w, *given, "sigmoid", 0.1)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    given[3:6] = [t.clone() for t in given[3:6]]
    torch.library.opcheck(module._preference_loss, (x, w, *given, "sigmoid", 0.1, 0.0, 0.0, True, True), test_utils=checks)
