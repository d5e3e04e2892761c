"""Preference losses by name: pure functions of summed log-probabilities, whose keyword-only parameters are settings.

Other packages register their losses with `@preference_loss("name")`, in modules named by the entry points `puna.losses`. Nothing here
imports torch before a loss is computed, because forms and preflight checks read the registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import Field

from puna.models.training.registry import Registry, own_parameters

if TYPE_CHECKING:
    from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])
Margin = Annotated[float, Field(ge=0, description="Margin between the rewards of two answers")]
Weight = Annotated[float, Field(ge=0, description="Weight of the answers with this label; raise it if they are rare")]
Flips = Annotated[float, Field(ge=0, lt=0.5, description="Assumed share of pairs with swapped labels")]
LengthWeight = Annotated[float, Field(ge=0, description="Reward, in nats, that each further token is assumed to earn by length alone")]


@dataclass(frozen=True)
class PairLogprobs:
    """The log-probabilities of M preference pairs; all tensors are [M] float32, in nats or tokens.

    chosen, rejected                        summed log-probabilities of the chosen and the rejected answers under the policy
    reference_chosen, reference_rejected    the same sums under the reference model; zeros for a loss without a reference
    chosen_tokens, rejected_tokens          number of tokens in the sums, at least 1"""

    chosen: Tensor
    rejected: Tensor
    reference_chosen: Tensor
    reference_rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor

    @property
    def chosen_ratio(self) -> Tensor:
        """Return [M]: log(policy / reference) of the chosen answers."""
        return self.chosen - self.reference_chosen

    @property
    def rejected_ratio(self) -> Tensor:
        """Return [M]: log(policy / reference) of the rejected answers."""
        return self.rejected - self.reference_rejected


@dataclass(frozen=True)
class PairLosses:
    """Losses [M] of pairs, and implicit rewards [M] of the chosen and the rejected answers, for the metrics accuracy and margin."""

    losses: Tensor
    chosen_reward: Tensor
    rejected_reward: Tensor


@dataclass(frozen=True)
class PreferenceLoss:
    """A preference loss from the registry, by name.

    function         a differentiable function. Of pairs: (`PairLogprobs`, beta, own parameters) -> `PairLosses`; of answers: (log-ratios of
                     policy over reference [A], desirable [A] bool, the estimated KL divergence, beta, own parameters) -> losses [A].
                     Keyword-only parameters are the loss's own, checked by their annotations.
    of               pairs of a better and a worse answer, or single answers labelled good or bad
    needs_reference  False if the loss needs no log-probabilities of the reference model"""

    name: str
    function: Callable[..., Any]
    of: Literal["pairs", "answers"]
    needs_reference: bool

    def own(self, given: Mapping[str, float]) -> dict[str, float]:
        return own_parameters(self.function, given, f"loss {self.name}")


LOSSES: Registry[PreferenceLoss] = Registry("preference loss", "puna.losses")


def preference_loss(name: str, *, of: Literal["pairs", "answers"] = "pairs", needs_reference: bool = True) -> Callable[[F], F]:
    """Return a decorator that registers a function as the loss `name` (see `PreferenceLoss`). It raises ValueError for a taken name."""

    def register(function: F) -> F:
        LOSSES.register(name, PreferenceLoss(name, function, of, needs_reference))
        return function

    return register


def _log_ratio_losses(losses: Callable[[Tensor], Tensor], pairs: PairLogprobs, beta: float) -> PairLosses:
    logits = beta * (pairs.chosen_ratio - pairs.rejected_ratio)
    return PairLosses(losses(logits), beta * pairs.chosen_ratio, beta * pairs.rejected_ratio)


def _minus_logsigmoid(x: Tensor) -> Tensor:
    from torch.nn.functional import logsigmoid

    return -logsigmoid(x)


def _smooth(x: Tensor, flips: float, weight: float) -> Tensor:
    """Return ``-(1 - flips) log sigmoid(x) - weight log sigmoid(-x)``."""
    return (1 - flips) * _minus_logsigmoid(x) + weight * _minus_logsigmoid(-x)


@preference_loss("sigmoid")
def sigmoid(pairs: PairLogprobs, beta: float, *, label_smoothing: Flips = 0.0, length_weight: LengthWeight = 0.0) -> PairLosses:
    """Return ``-(1 - e) log sigmoid(x) - e log sigmoid(-x)`` with
    ``x = beta * (chosen_ratio - rejected_ratio) + length_weight * (chosen_tokens - rejected_tokens)``.

    DPO (Rafailov et al. 2023); with label_smoothing e conservative DPO (Mitchell 2023); with length_weight R-DPO (Park et al. 2024), which
    subtracts a length penalty from the reward: a better answer needs a smaller margin if it is longer, a larger one if shorter."""
    longer = length_weight * (pairs.chosen_tokens - pairs.rejected_tokens)
    return _log_ratio_losses(lambda logits: _smooth(logits + longer, label_smoothing, label_smoothing), pairs, beta)


@preference_loss("robust")
def robust(pairs: PairLogprobs, beta: float, *, label_smoothing: Flips = 0.1) -> PairLosses:
    """Return ``(-(1 - e) log sigmoid(x) + e log sigmoid(-x)) / (1 - 2 e)``, e the label_smoothing (robust DPO, Chowdhury et al. 2024).

    If a share e of the labels is flipped, the expected loss is DPO's loss on the correct labels."""
    return _log_ratio_losses(lambda logits: _smooth(logits, label_smoothing, -label_smoothing) / (1 - 2 * label_smoothing), pairs, beta)


@preference_loss("sigmoid_norm")
def sigmoid_norm(pairs: PairLogprobs, beta: float) -> PairLosses:
    """Return ``-log sigmoid(beta * (chosen_ratio / chosen_tokens - rejected_ratio / rejected_tokens))``.

    Length-normalized DPO, the loss of Tülu 3 (Lambert et al. 2024, section 5.1)."""
    chosen, rejected = beta * pairs.chosen_ratio / pairs.chosen_tokens, beta * pairs.rejected_ratio / pairs.rejected_tokens
    return PairLosses(_minus_logsigmoid(chosen - rejected), chosen, rejected)


@preference_loss("apo_zero")
def apo_zero(pairs: PairLogprobs, beta: float) -> PairLosses:
    """Return ``1 - sigmoid(beta * chosen_ratio) + sigmoid(beta * rejected_ratio)`` (APO-zero, D'Oosterlinck et al. 2024, equation 7).

    For chosen answers that are better than the model's own: they become likelier, rejected ones less likely."""
    chosen, rejected = beta * pairs.chosen_ratio, beta * pairs.rejected_ratio
    return PairLosses((-chosen).sigmoid() + rejected.sigmoid(), chosen, rejected)


@preference_loss("apo_down")
def apo_down(pairs: PairLogprobs, beta: float) -> PairLosses:
    """Return ``sigmoid(beta * chosen_ratio) + 1 - sigmoid(beta * (chosen_ratio - rejected_ratio))`` (APO-down, same paper, equation 8).

    For chosen answers that are worse than the model's own: they become less likely, rejected ones still less."""
    chosen, rejected = beta * pairs.chosen_ratio, beta * pairs.rejected_ratio
    return PairLosses(chosen.sigmoid() + (rejected - chosen).sigmoid(), chosen, rejected)


@preference_loss("hinge")
def hinge(pairs: PairLogprobs, beta: float) -> PairLosses:
    """Return ``max(0, 1 - beta * (chosen_ratio - rejected_ratio))`` (SLiC, Zhao et al. 2023, in TRL's form)."""
    return _log_ratio_losses(lambda logits: (1 - logits).relu(), pairs, beta)


@preference_loss("ipo")
def ipo(pairs: PairLogprobs, beta: float) -> PairLosses:
    """Return ``(chosen_ratio / chosen_tokens - rejected_ratio / rejected_tokens - 1 / (2 beta))^2``.

    IPO (Azar et al. 2023, equation 17, with beta for tau); ratios are averaged over tokens, as in the authors' runs."""
    chosen, rejected = pairs.chosen_ratio / pairs.chosen_tokens, pairs.rejected_ratio / pairs.rejected_tokens
    return PairLosses((chosen - rejected - 1 / (2 * beta)).square(), beta * chosen, beta * rejected)


@preference_loss("simpo", needs_reference=False)
def simpo(pairs: PairLogprobs, beta: float, *, gamma: Margin = 0.5) -> PairLosses:
    """Return ``-log sigmoid(beta * (chosen / chosen_tokens - rejected / rejected_tokens) - gamma)`` (Meng et al. 2024)."""
    chosen, rejected = beta * pairs.chosen / pairs.chosen_tokens, beta * pairs.rejected / pairs.rejected_tokens
    return PairLosses(_minus_logsigmoid(chosen - rejected - gamma), chosen, rejected)


@preference_loss("orpo", needs_reference=False)
def orpo(pairs: PairLogprobs, beta: float) -> PairLosses:
    """Return ``-beta * log sigmoid(log odds(chosen) - log odds(rejected))`` (Hong et al. 2024).

    The odds are ``p / (1 - p)`` with p = exp(mean log-probability of a token). ORPO's likelihood term is the objective's NLL term."""
    chosen, rejected = pairs.chosen / pairs.chosen_tokens, pairs.rejected / pairs.rejected_tokens
    odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    return PairLosses(beta * _minus_logsigmoid(odds), beta * chosen, beta * rejected)


@preference_loss("kto", of="answers")
def kto(
    ratios: Tensor, desirable: Tensor, kl: float, beta: float, *, desirable_weight: Weight = 1.0, undesirable_weight: Weight = 1.0
) -> Tensor:
    """Return ``weight * (1 - sigmoid(beta * (ratio - kl)))`` of good answers, ``weight * (1 - sigmoid(beta * (kl - ratio)))`` of bad ones.

    KTO (Ethayarajh et al. 2024, equation 8). ratios [A] float: log of policy over reference of an answer; desirable [A] bool;
    kl: the mean log-ratio of answers to other prompts, at least 0, without a gradient. Returns losses [A]."""
    import torch

    signs = torch.where(desirable, 1.0, -1.0)
    weights = torch.where(desirable, desirable_weight, undesirable_weight)
    return weights * torch.sigmoid(-beta * signs * (ratios - kl))


def _log1mexp(x: Tensor) -> Tensor:
    """Return ``log(1 - exp(x))`` for x < 0, precise both near 0 and far below 0 (Mächler 2012); finite at 0."""
    import torch

    x = x.clamp(max=-1e-7)
    near = x > -0.6931471805599453
    # Each branch sees only arguments in its domain: a bare where() would pass NaN backwards.
    return torch.where(near, torch.log(-torch.expm1(torch.where(near, x, -0.5))), torch.log1p(-torch.exp(torch.where(near, -1.0, x))))
