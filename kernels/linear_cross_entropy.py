"""Linear layer fused with a weighted sum of cross-entropies, without all logits in memory.

The softmax gives the gradient at the logits. So the forward pass already computes dX and dW, and the backward pass only scales them: three
matrix products, no more than with all logits in memory. See `output_layer.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from puna.kernels.cpu.lazy_jit import numba_jit, triton_jit
from puna.kernels.cpu.loops import by_rows, exp32
from puna.kernels.linear import product
from puna.kernels.operators import differentiable, fused_on_cpu, operator, wide
from puna.kernels.output_layer import LOWEST, accumulate, block_size, chunks, fake_gradients, fake_rows, gradients

if TYPE_CHECKING:
    import triton.language as tl

NUMERICS = {"linear_cross_entropy": 1}


def linear_cross_entropy_reference(x_ND: Tensor, w_VD: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Return sum_i weights[i] * -log softmax(x w^T)[i, targets[i]], a scalar."""
    logp = torch.log_softmax(x_ND @ w_VD.T, -1)
    return -(logp.gather(1, targets[:, None])[:, 0] * weights).sum()


# --- one chunk of logits: portable -----------------------------------------------------------------------
#
# These functions may overwrite their logits [C, V]; with `differentiate` they also return the loss's gradient at the logits.


@numba_jit
def _softmax_loop(part: Any, start: Any, stop: Any, logits: Any, peak: Any, targets: Any, weights: Any, nll: Any) -> None:
    """Replace each row of logits by (softmax - one-hot) * weight while the row is in the cache; add log sum e^(logits - peak) to nll."""
    for i in range(start, stop):
        row = logits[i]
        total = np.float32(0)
        for v in range(row.shape[0]):
            e = exp32(row[v] - peak[i])
            row[v] = e
            total += e
        nll[i] += np.log(total)
        scale = weights[i] / total
        for v in range(row.shape[0]):
            row[v] *= scale
        row[targets[i]] -= weights[i]


def _cross_entropy_rows(logits_CV: Tensor, targets: Tensor, weights: Tensor, differentiate: bool) -> tuple[Tensor, Tensor]:
    """Return ([C] negative log-likelihoods, [C, V] (softmax - one-hot) * weights); without `differentiate`, the second is `logits_CV`."""
    logits = logits_CV.to(wide(logits_CV.dtype))
    picked = logits.gather(1, targets[:, None])[:, 0]
    if not differentiate:
        return logits.logsumexp(1) - picked, logits_CV
    peak = logits.amax(1)
    if fused_on_cpu(logits_CV, weights):
        nll = peak - picked
        by_rows(_softmax_loop, *logits.shape, logits, peak, targets, weights, nll)
        return nll, logits
    p_CV = torch.softmax(logits, 1, out=logits)
    # The largest probability is 1 / sum(exp(logits - peak)), so the log-sum-exp costs no second exp.
    nll = peak - p_CV.amax(1).log() - picked
    p_CV.scatter_add_(1, targets[:, None], p_CV.new_full((len(targets), 1), -1.0))
    return nll, p_CV.mul_(weights[:, None]).to(logits_CV.dtype)


# --- one chunk of logits: Triton, one program to a row ---------------------------------------------------


@triton_jit
def _cross_entropy_kernel(  # type: ignore[no-untyped-def]
    logits, targets, weights, nll, V,
    GRADIENT: tl.constexpr, LOWEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    target = tl.load(targets + row)
    picked = tl.load(logits + target).to(tl.float32)
    peak = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, V, BLOCK):  # every lane has its own sum; the sums are added once, at the end
        v = first + tl.arange(0, BLOCK)
        z = tl.where(v < V, tl.load(logits + v, v < V, 0.0).to(tl.float32), LOWEST)
        higher = tl.maximum(peak, z)
        total = total * tl.exp(peak - higher) + tl.where(v < V, tl.exp(z - higher), 0.0)
        peak = higher
    top = tl.max(peak, 0)
    lse = top + tl.log(tl.sum(total * tl.exp(peak - top), 0))
    tl.store(nll + row, lse - picked)
    if GRADIENT:
        weight = tl.load(weights + row).to(tl.float32)
        for first in range(0, V, BLOCK):
            v = first + tl.arange(0, BLOCK)
            z = tl.where(v < V, tl.load(logits + v, v < V, 0.0).to(tl.float32), LOWEST)
            p = tl.exp(z - lse) - tl.where(v == target, 1.0, 0.0)
            tl.store(logits + v, (p * weight).to(logits.dtype.element_ty), v < V)


def _cross_entropy_rows_triton(logits_CV: Tensor, targets: Tensor, weights: Tensor, differentiate: bool) -> tuple[Tensor, Tensor]:
    nll = weights.new_empty(len(targets))
    block, warps = block_size(logits_CV.shape[1])
    _cross_entropy_kernel[(len(targets),)](
        logits_CV, targets, weights, nll, logits_CV.shape[1], GRADIENT=differentiate, LOWEST=LOWEST, BLOCK=block, num_warps=warps
    )
    return nll, logits_CV


# --- all chunks ------------------------------------------------------------------------------------------


def _waiting_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which dW is saved for the backward pass: fp32 for fp16 weights, as unscaled dW could overflow; else `dtype`."""
    return torch.float32 if dtype == torch.float16 else dtype


def _cross_entropy_by(rows_function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, ...]]:
    def cross_entropy(x_ND: Tensor, w_VD: Tensor, targets: Tensor, weights: Tensor, want_x: bool, want_w: bool) -> tuple[Tensor, ...]:
        high = wide(x_ND.dtype)
        weights = weights.to(high)
        scale, relative = weights.new_ones(()), weights
        if x_ND.dtype == torch.float16 and len(weights):
            # Weights are about 1 / N, and fp16 cannot hold gradients that small. So they are computed with weights divided
            # by `scale`; the backward pass multiplies them by `scale` and the loss's gradient.
            scale = weights.abs().amax().clamp_min(torch.finfo(high).tiny)
            relative = weights / scale
        nll = torch.empty_like(weights)
        dx_ND, dw_VD = gradients(x_ND, w_VD, want_x, want_w)
        for rows in chunks(len(x_ND), w_VD):
            logits_CV = product(x_ND[rows], w_VD)
            nll[rows], d_CV = rows_function(logits_CV, targets[rows], relative[rows], want_x or want_w)
            if want_x:
                dx_ND[rows] = product(d_CV, w_VD.T)
            if want_w:
                accumulate(dw_VD, d_CV, x_ND[rows])
            del logits_CV, d_CV  # else both would stay in memory beside the next chunk's tensors
        return (nll * weights).sum(), nll, dx_ND, dw_VD.to(_waiting_dtype(w_VD.dtype)), scale

    return cross_entropy


# --- façade ----------------------------------------------------------------------------------------------


def _fake_cross_entropy(x_ND: Tensor, w_VD: Tensor, targets: Tensor, weights: Tensor, want_x: bool, want_w: bool) -> tuple[Tensor, ...]:
    dx_ND, dw_VD = fake_gradients(x_ND, w_VD, want_x, want_w)
    scalar = x_ND.new_empty((), dtype=wide(x_ND.dtype))
    return scalar, *fake_rows(x_ND, 1), dx_ND, dw_VD.to(_waiting_dtype(w_VD.dtype)), torch.empty_like(scalar)


_cross_entropy = operator(
    "linear_cross_entropy(Tensor x, Tensor w, Tensor targets, Tensor weights, bool want_x, bool want_w)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _cross_entropy_by(_cross_entropy_rows), _cross_entropy_by(_cross_entropy_rows_triton), _fake_cross_entropy,
)  # fmt: skip


def _setup_cross_entropy(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)  # else autograd passes zeros as large as dX and dW to the backward pass
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])
    ctx.dtype = inputs[1].dtype


def _backward_cross_entropy(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 6
    nll, dx_ND, dw_VD, scale = ctx.saved_tensors
    need_x, need_w, _, need_weights = ctx.needs_input_grad[:4]
    factor = grad * scale
    dx = dx_ND * factor if need_x else None
    dw = (dw_VD * factor).to(ctx.dtype) if need_w else None
    return dx, dw, None, nll * grad if need_weights else None, None, None


differentiable(_cross_entropy, _backward_cross_entropy, _setup_cross_entropy)


def linear_cross_entropy(x_ND: Tensor, w_VD: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Return sum_i weights[i] * -log softmax(x w^T)[i, targets[i]], a scalar in nats, at least fp32.

    `targets` [N] int64 in [0, V); `weights` [N] include the denominator: 1 / N for a mean. Differentiable once in x, w and weights."""
    graph = torch.is_grad_enabled()
    return _cross_entropy(x_ND, w_VD, targets, weights, graph and x_ND.requires_grad, graph and w_VD.requires_grad)[0]  # type: ignore[no-any-return]
