"""The output layer and its losses without all logits in memory, a chunk of rows at a time.

Shapes: N rows, D model width, V vocabulary, C rows of one chunk. The two functions:

- `linear_cross_entropy`: one weighted sum. Its gradient at the logits is known as soon as the
  softmax is, so the forward pass already makes dX and dW and the backward only scales them: three
  matrix products, as few as with all logits kept.
- `linear_token_logprobs`: a log-probability and an entropy per row, whose upstream gradients arrive
  later. The backward computes the chunk's logits again: four matrix products.

Softmax and the sums over chunks are in fp32 at least, dW too: accumulating dW in low precision is what
makes such kernels diverge.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from puna.kernels.linear import product

CHUNK_BYTES = 4 << 20  # one chunk's logits: about a core's share of the last-level cache


def linear_cross_entropy_reference(x_ND: Tensor, w_VD: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """sum_i weights[i] * -log softmax(x w^T)[i, targets[i]], a scalar."""
    logp = torch.log_softmax(x_ND @ w_VD.T, -1)
    return -(logp.gather(1, targets[:, None])[:, 0] * weights).sum()


def linear_token_logprobs_reference(x_ND: Tensor, w_VD: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """([N] log-probabilities of the targets, [N] entropies in nats) of softmax(x w^T / temperature)."""
    logp = torch.log_softmax(x_ND @ w_VD.T / temperature, -1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def _chunks(rows: int, vocabulary: int) -> Iterator[slice]:
    size = max(1, CHUNK_BYTES // (4 * vocabulary))
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def _wide(x: Tensor) -> Tensor:
    """fp32 at least."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND, w_VD, targets, weights, differentiate):  # type: ignore[no-untyped-def]
        weights = _wide(weights).to(_wide(x_ND).dtype)
        nll_N = weights.new_empty(len(x_ND))
        want_x, want_w = (differentiate and need for need in ctx.needs_input_grad[:2])
        dx_ND = torch.empty_like(x_ND) if want_x else None
        dw_VD = _wide(torch.zeros_like(w_VD)) if want_w else None
        for rows in _chunks(len(x_ND), len(w_VD)):
            x_CD, weight_C1, target_C1 = x_ND[rows], weights[rows, None], targets[rows, None]
            logits_CV = _wide(product(x_CD, w_VD))
            picked = logits_CV.gather(1, target_C1)[:, 0]
            peak = logits_CV.amax(1)
            if not (want_x or want_w):
                nll_N[rows] = logits_CV.logsumexp(1) - picked
                continue
            p_CV = torch.softmax(logits_CV, 1, out=logits_CV)
            # The largest probability is 1 / sum(exp(logits - peak)), so the log-sum-exp costs no second exp.
            nll_N[rows] = peak - p_CV.amax(1).log() - picked
            p_CV.scatter_add_(1, target_C1, torch.full_like(weight_C1, -1.0))
            p_CV = p_CV.to(x_ND.dtype)
            if dx_ND is not None:
                dx_ND[rows] = product(p_CV, w_VD.T) * weight_C1
            if dw_VD is not None:
                scaled_CD = (x_CD * weight_C1).to(x_ND.dtype)
                if dw_VD.dtype == x_ND.dtype:
                    dw_VD.addmm_(p_CV.T, scaled_CD)
                else:
                    dw_VD += p_CV.T @ scaled_CD
        ctx.save_for_backward(dx_ND, None if dw_VD is None else dw_VD.to(w_VD.dtype), nll_N)
        return (nll_N * weights).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        dx_ND, dw_VD, nll_N = ctx.saved_tensors
        dx = dx_ND * grad if ctx.needs_input_grad[0] else None
        dw = dw_VD * grad if ctx.needs_input_grad[1] else None
        return dx, dw, None, nll_N * grad if ctx.needs_input_grad[3] else None, None


class _LinearTokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND, w_VD, targets, temperature):  # type: ignore[no-untyped-def]
        logprobs = _wide(x_ND).new_empty(len(x_ND))
        entropies = torch.empty_like(logprobs)
        for rows in _chunks(len(x_ND), len(w_VD)):
            logp_CV = torch.log_softmax(_wide(product(x_ND[rows], w_VD)).div_(temperature), 1)
            logprobs[rows] = logp_CV.gather(1, targets[rows, None])[:, 0]
            entropies[rows] = -(logp_CV.exp() * logp_CV).sum(1)
        ctx.save_for_backward(x_ND, w_VD, targets, entropies)
        ctx.temperature = temperature
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropies):  # type: ignore[no-untyped-def]
        x_ND, w_VD, targets, entropies = ctx.saved_tensors
        dx_ND = torch.empty_like(x_ND) if ctx.needs_input_grad[0] else None
        dw_VD = _wide(torch.zeros_like(w_VD)) if ctx.needs_input_grad[1] else None
        use_entropy = bool(grad_entropies.count_nonzero())
        for rows in _chunks(len(x_ND), len(w_VD)):
            x_CD, grad_C1 = x_ND[rows], grad_logprobs[rows, None]
            z_CV = _wide(product(x_CD, w_VD)).div_(ctx.temperature)
            if use_entropy:
                # dH/dz = -p (log p + H) and dlogp/dz = onehot - p, both over the temperature.
                logp_CV = torch.log_softmax(z_CV, 1)
                slope_CV = (logp_CV + entropies[rows, None]).mul_(grad_entropies[rows, None]).add_(grad_C1)
                d_CV = logp_CV.exp_().mul_(slope_CV).neg_()
            else:
                d_CV = torch.softmax(z_CV, 1, out=z_CV).mul_(-grad_C1)
            d_CV.scatter_add_(1, targets[rows, None], grad_C1.to(d_CV.dtype))
            d_CV = d_CV.div_(ctx.temperature).to(x_ND.dtype)
            if dx_ND is not None:
                dx_ND[rows] = product(d_CV, w_VD.T)
            if dw_VD is not None:
                if dw_VD.dtype == x_ND.dtype:
                    dw_VD.addmm_(d_CV.T, x_CD)
                else:
                    dw_VD += d_CV.T @ x_CD
        return dx_ND, None if dw_VD is None else dw_VD.to(w_VD.dtype), None, None


def linear_cross_entropy(x_ND: Tensor, w_VD: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """sum_i weights[i] * -log softmax(x w^T)[i, targets[i]]: a scalar in nats, fp32 at least.

    `targets` [N] int64 in [0, V); `weights` [N] carry the denominators (1 / N each for a mean).
    """
    return _LinearCrossEntropy.apply(x_ND, w_VD, targets, weights, torch.is_grad_enabled())


def linear_token_logprobs(x_ND: Tensor, w_VD: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """([N] log-probabilities of the targets, [N] entropies in nats) of softmax(x w^T / temperature).

    Both are differentiable, in fp32 at least. `targets` [N] int64 in [0, V).
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    return _LinearTokenLogprobs.apply(x_ND, w_VD, targets, float(temperature))
