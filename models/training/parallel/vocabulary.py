"""Losses and log-probabilities with an output layer whose vocabulary is split over ranks: no rank has the logits of all tokens.

Ranks exchange each row's maximum and sums, never logits (Shoeybi et al. 2019, section 3). N: rows; C: a chunk's; D: width; V: own tokens.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from puna.kernels.linear import product
from puna.kernels.output_layer import chunks
from puna.models.training.parallel.collectives import add_gradients


class Share(NamedTuple):
    """A rank's part of the vocabulary: tokens from `start` on; `most`: number of tokens in the group's largest part."""

    start: int
    most: int
    group: Any

    def chunks(self, rows: int, w_VD: Tensor) -> Iterator[slice]:
        """Return the slices of rows that all ranks compute together; they are equal on ranks with different numbers of tokens."""
        return chunks(rows, w_VD[:1].expand(self.most, -1))


def _normalise(z_CV: Tensor, own: Tensor, inside: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-sum-exp [C] and the target's logit [C] over all ranks, the probabilities [C, V] of this rank, and sum(p z) [C]."""
    peak = z_CV.amax(1)
    dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
    shifted = z_CV - peak[:, None]
    e_CV = shifted.exp()
    picked = torch.where(inside, shifted.gather(1, own[:, None])[:, 0], 0.0)
    sums = torch.stack([e_CV.sum(1), picked, (e_CV * shifted).sum(1)])
    dist.all_reduce(sums, group=group)
    total, picked, weighted = sums
    return peak + total.log(), peak + picked, e_CV / total[:, None], peak + weighted / total


def _places(targets: Tensor, start: int, size: int) -> tuple[Tensor, Tensor]:
    """Return each target's row in this rank's piece of the vocabulary, and whether the target is in it."""
    own = targets - start
    inside = (own >= 0) & (own < size)
    return own.clamp(0, size - 1), inside


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND, w_VD, targets, weights, share):
        own, inside = _places(targets, share.start, len(w_VD))
        dx_ND, dw_VD, loss = torch.zeros_like(x_ND), torch.zeros_like(w_VD), x_ND.new_zeros(())
        for rows in share.chunks(len(x_ND), w_VD):
            lse, picked, p_CV, _ = _normalise(product(x_ND[rows], w_VD), own[rows], inside[rows], share.group)
            loss += ((lse - picked) * weights[rows]).sum()
            p_CV[torch.arange(len(p_CV), device=own.device), own[rows]] -= inside[rows].to(p_CV.dtype)
            d_CV = p_CV.mul_(weights[rows, None])
            dx_ND[rows] = product(d_CV, w_VD.T)
            dw_VD.addmm_(d_CV.T, x_ND[rows])
        ctx.save_for_backward(dx_ND, dw_VD)
        return loss

    @staticmethod
    def backward(ctx, grad):
        dx_ND, dw_VD = ctx.saved_tensors
        return dx_ND * grad, dw_VD * grad, None, None, None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND, w_VD, targets, temperature, share):
        own, inside = _places(targets, share.start, len(w_VD))
        logprobs, entropies = x_ND.new_empty(len(x_ND)), x_ND.new_empty(len(x_ND))
        for rows in share.chunks(len(x_ND), w_VD):
            z_CV = product(x_ND[rows], w_VD) / temperature
            lse, picked, _, mean = _normalise(z_CV, own[rows], inside[rows], share.group)
            logprobs[rows], entropies[rows] = picked - lse, lse - mean
        ctx.save_for_backward(x_ND, w_VD, own, inside)
        ctx.temperature, ctx.share = temperature, share
        return logprobs, entropies

    @staticmethod
    def backward(ctx, g_logprobs, g_entropies):
        x_ND, w_VD, own, inside = ctx.saved_tensors
        dx_ND, dw_VD = torch.zeros_like(x_ND), torch.zeros_like(w_VD)
        for rows in ctx.share.chunks(len(x_ND), w_VD):
            z_CV = product(x_ND[rows], w_VD) / ctx.temperature
            _, _, p_CV, mean = _normalise(z_CV, own[rows], inside[rows], ctx.share.group)
            # d log p(t) = one-hot - p;  d H = -p (z - sum(p z))
            d_CV = -p_CV * (g_logprobs[rows, None] + g_entropies[rows, None] * (z_CV - mean[:, None]))
            d_CV[torch.arange(len(d_CV), device=own.device), own[rows]] += g_logprobs[rows] * inside[rows]
            d_CV /= ctx.temperature
            dx_ND[rows] = product(d_CV, w_VD.T)
            dw_VD.addmm_(d_CV.T, x_ND[rows])
        return dx_ND, dw_VD, None, None, None


def cross_entropy(x_ND: Tensor, w_VD: Tensor, targets: Tensor, weights: Tensor, share: Share) -> Tensor:
    """Return `linear_cross_entropy` over the vocabulary of all ranks; x and its gradient are equal on all ranks."""
    loss: Tensor = _CrossEntropy.apply(add_gradients(x_ND, share.group), w_VD, targets, weights, share)
    return loss


def token_logprobs(x_ND: Tensor, w_VD: Tensor, targets: Tensor, temperature: float, share: Share) -> tuple[Tensor, Tensor]:
    """Return `linear_token_logprobs` over the vocabulary of all ranks; x and its gradient are equal on all ranks."""
    both: tuple[Tensor, Tensor] = _TokenLogprobs.apply(add_gradients(x_ND, share.group), w_VD, targets, temperature, share)
    return both
