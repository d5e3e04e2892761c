"""Preference losses by name: pure functions of summed log-probabilities, which other packages may add to.

A package registers its own with `@preference_loss("name")`; the entry-point group `puna.losses` has it imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class PairLogprobs:
    """M preference pairs; all tensors are [M] float32, in nats or tokens.

    chosen, rejected       summed log-probabilities of the two answers under the policy
    reference_chosen, reference_rejected    the same under the reference; zeros for a loss without one
    chosen_tokens, rejected_tokens          tokens that those sums count, at least 1
    """

    chosen: Tensor
    rejected: Tensor
    reference_chosen: Tensor
    reference_rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor

    @property
    def chosen_ratio(self) -> Tensor:
        """[M] log of policy over reference."""
        return self.chosen - self.reference_chosen

    @property
    def rejected_ratio(self) -> Tensor:
        """[M] log of policy over reference."""
        return self.rejected - self.reference_rejected


@dataclass(frozen=True)
class PairLosses:
    """Losses [M] of pairs, and the implicit rewards [M] of their answers, by which accuracy and margin are told."""

    losses: Tensor
    chosen_reward: Tensor
    rejected_reward: Tensor


PairFunction = Callable[[PairLogprobs, float, float], PairLosses]
"""(log-probabilities, beta, gamma) -> losses; differentiable."""


@dataclass(frozen=True)
class PreferenceLoss:
    """A loss by its name; one without a reference needs no pass of the reference model."""

    name: str
    function: PairFunction
    needs_reference: bool


REGISTRY: dict[str, PreferenceLoss] = {}


def preference_loss(name: str, *, needs_reference: bool = True) -> Callable[[PairFunction], PairFunction]:
    """Register a function as the loss `name`; ValueError where there is one of that name already."""

    def register(function: PairFunction) -> PairFunction:
        known = REGISTRY.get(name)
        if known is not None and known.function.__qualname__ + known.function.__module__ != function.__qualname__ + function.__module__:
            raise ValueError(f"there is a preference loss {name!r} already, in {known.function.__module__}")
        REGISTRY[name] = PreferenceLoss(name, function, needs_reference)
        return function

    return register


def _log_ratio_losses(losses: Callable[[Tensor], Tensor], pairs: PairLogprobs, beta: float) -> PairLosses:
    logits = beta * (pairs.chosen_ratio - pairs.rejected_ratio)
    return PairLosses(losses(logits), beta * pairs.chosen_ratio, beta * pairs.rejected_ratio)


@preference_loss("sigmoid")
def sigmoid(pairs: PairLogprobs, beta: float, gamma: float) -> PairLosses:
    """``-log sigmoid(beta * (chosen_ratio - rejected_ratio))`` (DPO, Rafailov et al. 2023)."""
    return _log_ratio_losses(lambda logits: -F.logsigmoid(logits), pairs, beta)


@preference_loss("hinge")
def hinge(pairs: PairLogprobs, beta: float, gamma: float) -> PairLosses:
    """``max(0, 1 - beta * (chosen_ratio - rejected_ratio))`` (SLiC, Zhao et al. 2023, as TRL has it)."""
    return _log_ratio_losses(lambda logits: torch.relu(1 - logits), pairs, beta)


@preference_loss("ipo")
def ipo(pairs: PairLogprobs, beta: float, gamma: float) -> PairLosses:
    """``(chosen_ratio / chosen_tokens - rejected_ratio / rejected_tokens - 1 / (2 beta))^2``.

    IPO (Azar et al. 2023, equation 17, beta its tau), ratios averaged over tokens as its authors run it.
    """
    chosen, rejected = pairs.chosen_ratio / pairs.chosen_tokens, pairs.rejected_ratio / pairs.rejected_tokens
    return PairLosses((chosen - rejected - 1 / (2 * beta)).square(), beta * chosen, beta * rejected)


@preference_loss("simpo", needs_reference=False)
def simpo(pairs: PairLogprobs, beta: float, gamma: float) -> PairLosses:
    """``-log sigmoid(beta * (chosen / chosen_tokens - rejected / rejected_tokens) - gamma)`` (Meng et al. 2024)."""
    chosen, rejected = beta * pairs.chosen / pairs.chosen_tokens, beta * pairs.rejected / pairs.rejected_tokens
    return PairLosses(-F.logsigmoid(chosen - rejected - gamma), chosen, rejected)


@preference_loss("orpo", needs_reference=False)
def orpo(pairs: PairLogprobs, beta: float, gamma: float) -> PairLosses:
    """``-beta * log sigmoid(log odds(chosen) - log odds(rejected))`` (Hong et al. 2024).

    The odds ``p / (1 - p)`` are of p = exp(mean log-probability of a token). ORPO's likelihood term is the objective's.
    """
    chosen, rejected = pairs.chosen / pairs.chosen_tokens, pairs.rejected / pairs.rejected_tokens
    odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    return PairLosses(-beta * F.logsigmoid(odds), beta * chosen, beta * rejected)


def kto(
    ratios: Tensor, desirable: Tensor, kl: float, beta: float, desirable_weight: float = 1.0, undesirable_weight: float = 1.0
) -> Tensor:
    """``weight * (1 - sigmoid(beta * (ratio - kl)))`` of a good answer, ``weight * (1 - sigmoid(beta * (kl - ratio)))`` of a bad one.

    KTO (Ethayarajh et al. 2024, equation 8). ratios [A] float: log of policy over reference of an answer; desirable [A] bool;
    kl: at least 0, the mean ratio of answers to other prompts, which passes no gradient -> losses [A].
    """
    signs = torch.where(desirable, 1.0, -1.0)
    weights = torch.where(desirable, desirable_weight, undesirable_weight)
    return weights * torch.sigmoid(-beta * signs * (ratios - kl))


def _log1mexp(x: Tensor) -> Tensor:
    """``log(1 - exp(x))`` for x < 0, without loss of digits near 0 and far from it (Mächler 2012); finite at 0."""
    x = x.clamp(max=-1e-7)
    near = x > -0.6931471805599453
    # Each branch sees only arguments that it can take: where() alone would pass NaN backwards.
    return torch.where(near, torch.log(-torch.expm1(torch.where(near, x, -0.5))), torch.log1p(-torch.exp(torch.where(near, -1.0, x))))
