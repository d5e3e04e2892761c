"""Preference losses at values derived by hand, compared with TRL's own functions, and by name."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Annotated

import pytest
import torch
from pydantic import Field

from puna.models.training import losses as l
from puna.models.training import objectives as o
from puna.stages.training.settings import DpoConfig

KEYS = ("chosen", "rejected", "reference_chosen", "reference_rejected", "chosen_tokens", "rejected_tokens")


def pairs(*values: float) -> l.PairLogprobs:
    """Return one pair, in the order of `KEYS`, in fp64 and with gradients."""
    return l.PairLogprobs(*(torch.tensor([value], dtype=torch.float64, requires_grad=value < 0) for value in values))


def random_pairs(seed: int, count: int = 64) -> l.PairLogprobs:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 60, (2, count), generator=generator).float()
    means = -4 * torch.rand(4, count, generator=generator).clamp(min=1e-3)
    return l.PairLogprobs(means[0] * tokens[0], means[1] * tokens[1], means[2] * tokens[0], means[3] * tokens[1], tokens[0], tokens[1])


@pytest.mark.parametrize(
    ("logit", "loss", "slope"),
    [
        # -log sigmoid(0) = log 2, slope -(1 - sigmoid(0)) = -1/2
        (0.0, math.log(2.0), -0.5),
        # -log sigmoid(x) = log1p(exp(-x)); slope -1 / (1 + exp(x))
        (10.0, 4.539889921682063e-05, -4.5397868702434395e-05),
        (20.0, 2.061153620314381e-09, -2.0611536181902037e-09),
    ],
)
def test_sigmoid_at_known_logits(logit: float, loss: float, slope: float) -> None:
    # beta 0.1 and (c - rc) - (r - rr) = 10 * logit
    given = pairs(-203.0, -5.0, -203.0 - 10 * logit, -5.0, 3, 4)
    found = l.sigmoid(given, 0.1)
    found.losses.sum().backward()
    assert found.losses.item() == pytest.approx(loss, rel=1e-9)
    assert given.chosen.grad is not None and given.chosen.grad.item() == pytest.approx(0.1 * slope, rel=1e-9)


def test_the_other_losses_by_hand() -> None:
    given = pairs(-6.0, -12.0, -8.0, -9.0, 3, 4)  # ratios +2 and -3; means -2 and -3
    assert l.hinge(given, 0.1).losses.item() == pytest.approx(0.5)  # 1 - 0.1 * 5
    assert l.hinge(given, 0.3).losses.item() == 0.0
    # 2/3 + 3/4 - 1 / (2 * 0.5) = 5/12
    assert l.ipo(given, 0.5).losses.item() == pytest.approx((5 / 12) ** 2)
    # 2 * (-2 + 3) - 0.5 = 1.5
    assert l.simpo(given, 2.0, gamma=0.5).losses.item() == pytest.approx(math.log1p(math.exp(-1.5)))
    odds = math.exp(-2) / (1 - math.exp(-2)) / (math.exp(-3) / (1 - math.exp(-3)))
    assert l.orpo(given, 0.1).losses.item() == pytest.approx(0.1 * math.log1p(1 / odds))


    up, down = 1 / (1 + math.exp(-0.3 * 2)), 1 / (1 + math.exp(0.3 * 3))  # sigmoid of beta times the ratios
    both = 1 / (1 + math.exp(-0.3 * 5))
    assert l.apo_zero(given, 0.3).losses.item() == pytest.approx(1 - up + down, rel=1e-12)
    assert l.apo_down(given, 0.3).losses.item() == pytest.approx(up + 1 - both, rel=1e-12)
    assert l.sigmoid(given, 0.3, label_smoothing=0.2).losses.item() == pytest.approx(-0.8 * math.log(both) - 0.2 * math.log(1 - both), rel=1e-12)
    assert l.sigmoid_norm(given, 0.3).losses.item() == pytest.approx(math.log1p(math.exp(-0.3 * (2 / 3 + 3 / 4))), rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_robust_dpo_sees_through_flipped_labels(seed: int) -> None:
    """The mean loss over labels of which a share e is flipped equals DPO's loss on the right labels, and so does its gradient."""
    given, e = random_pairs(seed), 0.3
    both = [side.double().requires_grad_() for side in (given.chosen, given.rejected)]
    right = l.PairLogprobs(*both, given.reference_chosen, given.reference_rejected, given.chosen_tokens, given.rejected_tokens)
    flipped = l.PairLogprobs(*both[::-1], given.reference_rejected, given.reference_chosen, given.rejected_tokens, given.chosen_tokens)
    mixed = (1 - e) * l.robust(right, 0.1, label_smoothing=e).losses + e * l.robust(flipped, 0.1, label_smoothing=e).losses
    plain = l.sigmoid(right, 0.1).losses
    assert torch.allclose(mixed, plain, rtol=1e-12)
    for found, expected in zip(*(torch.autograd.grad(one.sum(), both) for one in (mixed, plain)), strict=True):
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_length_weight_takes_a_length_out_of_the_reward(seed: int) -> None:
    """The optimal policy for ``reward - weight * length`` under a KL penalty gives each pair the probability that its rewards alone
    imply."""
    generator = torch.Generator().manual_seed(seed)
    beta, weight, count = 0.7, 0.05, 6
    rewards, reference = torch.randn(count, generator=generator).double(), torch.randn(count, generator=generator).double().log_softmax(0)
    lengths = torch.randint(1, 60, (count,), generator=generator).double()
    best = (reference + (rewards - weight * lengths) / beta).log_softmax(0)
    better, worse = torch.combinations(torch.arange(count)).T
    given = l.PairLogprobs(*(values[side] for values in (best, reference, lengths) for side in (better, worse)))
    expected = -torch.nn.functional.logsigmoid(rewards[better] - rewards[worse])
    assert torch.allclose(l.sigmoid(given, beta, length_weight=weight).losses, expected, rtol=1e-9)
    assert not torch.allclose(l.sigmoid(given, beta).losses, expected, rtol=1e-2)


def test_kto_by_hand() -> None:
    ratios = torch.tensor([2.0, 2.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    good = torch.tensor([True, False, True, False])
    found = l.kto(ratios, good, 0.5, 2.0, desirable_weight=3.0, undesirable_weight=5.0)
    sigmoid = [1 / (1 + math.exp(-x)) for x in (2 * 1.5, -2 * 1.5, 2 * -1.5, -2 * -1.5)]
    assert found.tolist() == pytest.approx([w * (1 - s) for w, s in zip((3, 5, 3, 5), sigmoid, strict=True)])
    found.sum().backward()
    # d(1 - sigmoid(b x))/dx = -b s (1 - s), towards good answers and away from bad ones
    assert ratios.grad is not None
    assert ratios.grad.tolist() == pytest.approx([-f * 2 * w * s * (1 - s) for f, w, s in zip((1, -1, 1, -1), (3, 5, 3, 5), sigmoid, strict=True)])


def test_a_certain_answer_gives_finite_odds_and_gradients() -> None:
    given = l.PairLogprobs(*(torch.tensor([v], requires_grad=True) for v in (0.0, -1e4, 0.0, 0.0)), torch.ones(1), torch.ones(1))
    found = l.orpo(given, 0.1).losses.sum()
    found.backward()
    assert math.isfinite(found.item())
    assert all(torch.isfinite(side.grad).all() for side in (given.chosen, given.rejected) if side.grad is not None)


@pytest.mark.parametrize("seed", range(3))
def test_simpo_orpo_and_conservative_dpo_are_trls(seed: int) -> None:
    cpo = pytest.importorskip("trl.experimental.cpo").CPOTrainer
    orpo = pytest.importorskip("trl.experimental.orpo").ORPOTrainer
    given = random_pairs(seed)
    means = given.chosen / given.chosen_tokens, given.rejected / given.rejected_tokens
    accelerator = SimpleNamespace(device=torch.device("cpu"))
    this = SimpleNamespace(loss_type="simpo", simpo_gamma=0.7, beta=2.5, label_smoothing=0.0, alpha=0.0, accelerator=accelerator)
    assert torch.allclose(l.simpo(given, 2.5, gamma=0.7).losses, cpo.cpo_loss(this, *means)[0], atol=1e-6)
    ratios = given.chosen_ratio.double(), given.rejected_ratio.double()
    this = SimpleNamespace(loss_type="sigmoid", beta=0.05, label_smoothing=0.2, alpha=0.0, accelerator=accelerator)
    conservative = l.sigmoid(l.PairLogprobs(*ratios, *torch.zeros(2, 64), given.chosen_tokens, given.rejected_tokens), 0.05, label_smoothing=0.2)
    assert torch.allclose(conservative.losses, cpo.cpo_loss(this, *ratios)[0], rtol=1e-12)
    this = SimpleNamespace(beta=0.4, accelerator=accelerator)
    assert torch.allclose(l.orpo(given, 0.4).losses, -orpo.odds_ratio_loss(this, *means)[0], atol=1e-6)


def test_a_loss_of_ones_own_is_one_function_with_its_parameters() -> None:
    @l.preference_loss("test_margin", needs_reference=False)
    def margin(given: l.PairLogprobs, beta: float, *, distance: Annotated[float, Field(gt=0, description="Least distance")] = 2.0) -> l.PairLosses:
        return l.PairLosses(torch.relu(distance - (given.chosen - given.rejected)), given.chosen, given.rejected)

    try:
        given = pairs(-6.0, -7.0, 0.0, 0.0, 3, 4)
        for own, loss in (({}, 1.0), ({"distance": 5.0}, 4.0)):
            objective = o.Dpo(loss="test_margin", parameters=own)
            assert objective.preference.function(given, 0.1, **objective.own).losses.item() == loss
            assert DpoConfig(loss="test_margin", loss_parameters=own).reaches()[-1] == (__name__, margin.__qualname__)
        for wrong, message in (({"distance": 0}, "loss test_margin: distance: .*greater than 0"), ({"gamma": 1}, "gamma: no such field; its parameters are distance")):
            with pytest.raises(ValueError, match=message):
                DpoConfig(loss="test_margin", loss_parameters=wrong)
        with pytest.raises(ValueError, match="already, in"):
            l.preference_loss("test_margin")(l.simpo)
    finally:
        del l.LOSSES["test_margin"]
    with pytest.raises(ValueError, match="there is no preference loss test_margin; there are apo_down, apo_zero, hinge, ipo, kto, orpo, robust, sigmoid, sigmoid_norm, simpo"):
        o.Dpo(loss="test_margin")
