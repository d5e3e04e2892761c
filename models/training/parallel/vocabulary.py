"""Losses and log-probabilities with an output layer whose vocabulary is split over ranks: no rank has the logits of all tokens.

Ranks exchange each row's maximum and sums, never logits (Shoeybi et al. 2019, § 3). N: rows; C: a chunk's; D: width; V: own tokens."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from puna.kernels.linear import product
from puna.kernels.operators import wide
from puna.kernels.output_layer import accumulate, chunks, gradients
from puna.models.training.parallel.collectives import add_gradients
from puna.models.transformer import softcap


class Share(NamedTuple):
    """A rank's part of the vocabulary: tokens from `start` on; `most`: number of tokens in the group's largest part; `cap`: of logits."""

    start: int
    most: int
    group: Any
    cap: float | None = None

    def chunks(self, rows: int, w_VD: Tensor) -> Iterator[slice]:
        """Return the slices of rows that all ranks compute together; they are equal on ranks with different numbers of tokens."""
        return chunks(rows, w_VD[:1].expand(self.most, -1))

    def logits(self, x_CD: Tensor, w_VD: Tensor) -> Tensor:
        """Return this rank's logits [C, V], capped, in fp32 or fp64."""
        return softcap(product(x_CD, w_VD).to(wide(x_CD.dtype)), self.cap)

    def uncapped(self, d_CV: Tensor, z_CV: Tensor) -> Tensor:
        """Return the gradient of the logits before the cap, from the gradient d of the capped logits z."""
        return d_CV if self.cap is None else d_CV * (1 - (z_CV / self.cap).square())


def _normalize(z_CV: Tensor, own: Tensor, inside: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
        (dx_ND, dw_VD), loss = gradients(x_ND, w_VD, True, True), weights.new_zeros(())
        for rows in share.chunks(len(x_ND), w_VD):
            z_CV = share.logits(x_ND[rows], w_VD)
            lse, picked, p_CV, _ = _normalize(z_CV, own[rows], inside[rows], share.group)
            loss += ((lse - picked) * weights[rows]).sum()
            p_CV[torch.arange(len(p_CV), device=own.device), own[rows]] -= inside[rows].to(p_CV.dtype)
            d_CV = share.uncapped(p_CV.mul_(weights[rows, None]), z_CV).to(x_ND.dtype)
            dx_ND[rows] = product(d_CV, w_VD.T)
            accumulate(dw_VD, d_CV, x_ND[rows])
        ctx.save_for_backward(dx_ND, dw_VD.to(w_VD.dtype))
        return loss

    @staticmethod
    def backward(ctx, grad):
        dx_ND, dw_VD = ctx.saved_tensors
        return dx_ND * grad, dw_VD * grad, None, None, None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND, w_VD, targets, temperature, share):
        own, inside = _places(targets, share.start, len(w_VD))
        logprobs, entropies, normalizers = torch.empty(3, len(x_ND), dtype=wide(x_ND.dtype), device=x_ND.device)
        for rows in share.chunks(len(x_ND), w_VD):
            z_CV = share.logits(x_ND[rows], w_VD) / temperature
            lse, picked, _, mean = _normalize(z_CV, own[rows], inside[rows], share.group)
            logprobs[rows], entropies[rows], normalizers[rows] = picked - lse, lse - mean, lse
        ctx.save_for_backward(x_ND, w_VD, own, inside)
        ctx.temperature, ctx.share = temperature, share
        return logprobs, entropies, normalizers

    @staticmethod
    def backward(ctx, g_logprobs, g_entropies, g_normalizers):
        x_ND, w_VD, own, inside = ctx.saved_tensors
        dx_ND, dw_VD = gradients(x_ND, w_VD, True, True)
        for rows in ctx.share.chunks(len(x_ND), w_VD):
            z_CV = ctx.share.logits(x_ND[rows], w_VD)
            y_CV = z_CV / ctx.temperature
            _, _, p_CV, mean = _normalize(y_CV, own[rows], inside[rows], ctx.share.group)
            # d log p(t) = one-hot - p;  d H = -p (y - sum(p y));  d log-sum-exp = p
            d_CV = -p_CV * ((g_logprobs - g_normalizers)[rows, None] + g_entropies[rows, None] * (y_CV - mean[:, None]))
            d_CV[torch.arange(len(d_CV), device=own.device), own[rows]] += g_logprobs[rows] * inside[rows]
            d_CV = (ctx.share.uncapped(d_CV, z_CV) / ctx.temperature).to(x_ND.dtype)
            dx_ND[rows] = product(d_CV, w_VD.T)
            accumulate(dw_VD, d_CV, x_ND[rows])
        return dx_ND, dw_VD.to(w_VD.dtype), None, None, None


def cross_entropy(x_ND: Tensor, w_VD: Tensor, targets: Tensor, weights: Tensor, share: Share) -> Tensor:
    """Return `linear_cross_entropy` over the vocabulary of all ranks; x and its gradient are equal on all ranks."""
    loss: Tensor = _CrossEntropy.apply(add_gradients(x_ND, share.group), w_VD, targets, weights, share)
    return loss


def token_logprobs(x_ND: Tensor, w_VD: Tensor, targets: Tensor, temperature: float, share: Share) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, entropies and log-sum-exps [N] over all ranks' vocabulary; x and its gradient are equal on all ranks."""
    results: tuple[Tensor, Tensor, Tensor] = _TokenLogprobs.apply(add_gradients(x_ND, share.group), w_VD, targets, temperature, share)
    return results
