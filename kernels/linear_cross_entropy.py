"""The output layer and its losses without all logits in memory, a chunk of rows at a time.

Shapes: N rows, D model width, V vocabulary, C rows of one chunk. The two functions:

- `linear_cross_entropy`: one weighted sum. Its gradient at the logits is known as soon as the
  softmax is, so the forward pass already makes dX and dW and the backward only scales them: three
  matrix products, as few as with all logits kept.
- `linear_token_logprobs`: a log-probability and an entropy per row, whose upstream gradients arrive
  later. The backward computes the chunk's logits again: four matrix products.

The products are the device's library's; what stands between them is one pass over a chunk's logits, in place.
Softmax and the sums over chunks are in fp32 at least, dW too: accumulating dW in low precision is what
makes such kernels diverge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from puna.kernels.lazy import numba_jit, triton_jit
from puna.kernels.linear import product
from puna.kernels.loops import by_rows, exp32
from puna.kernels.operators import differentiable, fused_on_cpu, operator, wide

if TYPE_CHECKING:
    import triton.language as tl

CHUNK_BYTES = 4 << 20  # one chunk's logits on CPU: about a core's share of the last-level cache
CHUNK_BYTES_GPU = 512 << 20  # on a GPU: enough rows for products at full speed
BLOCK = 4096  # logits that a Triton program holds at once
LOWEST = -3.0e38  # below every logit, and finite, so that differences are defined


def linear_cross_entropy_reference(x_ND: Tensor, w_VD: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """sum_i weights[i] * -log softmax(x w^T)[i, targets[i]], a scalar."""
    logp = torch.log_softmax(x_ND @ w_VD.T, -1)
    return -(logp.gather(1, targets[:, None])[:, 0] * weights).sum()


def linear_token_logprobs_reference(x_ND: Tensor, w_VD: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """([N] log-probabilities of the targets, [N] entropies in nats) of softmax(x w^T / temperature)."""
    logp = torch.log_softmax(x_ND @ w_VD.T / temperature, -1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


# --- one chunk of logits: portable -----------------------------------------------------------------------
#
# Each takes logits [C, V] that it may overwrite. `differentiate` also returns what stands in their place: the
# loss's gradient at the logits, in the logits' dtype.


@numba_jit
def _softmax_loop(part: Any, start: Any, stop: Any, logits: Any, peak: Any, targets: Any, weights: Any, nll: Any) -> None:
    """Rows become (softmax - one-hot) weight, while they are in the nearest cache; nll gains log sum e^(z - peak)."""
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
    """([C] negative log-likelihoods, [C, V] softmax minus one-hot, times the weights)."""
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


def _logprob_rows(logits_CV: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """([C] log-probabilities of the targets, [C] entropies, [C] log-sum-exps over the temperature)."""
    z_CV = logits_CV.to(wide(logits_CV.dtype)).div_(temperature)
    lse = z_CV.logsumexp(1)
    picked = z_CV.gather(1, targets[:, None])[:, 0]
    logp_CV = z_CV.sub_(lse[:, None])
    return picked - lse, -(logp_CV.exp() * logp_CV).sum(1), lse


def _logprob_gradient_rows(
    logits_CV: Tensor, targets: Tensor, dlogp: Tensor, dentropy: Tensor | None, entropy: Tensor, lse: Tensor, temperature: float
) -> Tensor:
    """The gradient at the logits: dlogp/dz = onehot - p and dH/dz = -p (log p + H), over the temperature."""
    logp_CV = logits_CV.to(wide(logits_CV.dtype)).div_(temperature).sub_(lse[:, None])
    if dentropy is None:
        d_CV = logp_CV.exp_().mul_(-dlogp[:, None])
    else:
        slope_CV = (logp_CV + entropy[:, None]).mul_(dentropy[:, None]).add_(dlogp[:, None])
        d_CV = logp_CV.exp_().mul_(slope_CV).neg_()
    d_CV.scatter_add_(1, targets[:, None], dlogp[:, None].to(d_CV.dtype))
    return d_CV.div_(temperature).to(logits_CV.dtype)


# --- one chunk of logits: Triton, one program to a row -----------------------------------------------------


@triton_jit
def _cross_entropy_kernel(
    logits, targets, weights, nll, V,
    GRADIENT: tl.constexpr, LOWEST: tl.constexpr, BLOCK: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    target = tl.load(targets + row)
    picked = tl.load(logits + target).to(tl.float32)
    peak = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, V, BLOCK):  # each lane keeps a sum of its own; they meet once, at the end
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


@triton_jit
def _logprob_kernel(
    logits, targets, logp, entropy, lse, V, inverse_temperature,
    LOWEST: tl.constexpr, BLOCK: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    picked = tl.load(logits + tl.load(targets + row)).to(tl.float32) * inverse_temperature
    peak = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)  # sum of e^(z - peak)
    moment = tl.zeros([BLOCK], tl.float32)  # sum of e^(z - peak) (z - peak): small terms, unlike e^z z
    for first in range(0, V, BLOCK):
        v = first + tl.arange(0, BLOCK)
        z = tl.load(logits + v, v < V, 0.0).to(tl.float32) * inverse_temperature
        z = tl.where(v < V, tl.maximum(z, LOWEST), LOWEST)
        higher = tl.maximum(peak, z)
        e = tl.where(v < V, tl.exp(z - higher), 0.0)
        decay = tl.exp(peak - higher)
        moment = (moment + total * (peak - higher)) * decay + tl.where(e > 0, e * (z - higher), 0.0)
        total = total * decay + e
        peak = higher
    top = tl.max(peak, 0)
    decay = tl.exp(peak - top)
    moments = tl.sum((moment + total * (peak - top)) * decay, 0)
    sums = tl.sum(total * decay, 0)
    logs = tl.log(sums)
    tl.store(logp + row, picked - top - logs)
    tl.store(entropy + row, logs - moments / sums)
    tl.store(lse + row, top + logs)


@triton_jit
def _logprob_gradient_kernel(
    logits, targets, dlogp, dentropy, entropy, lse, V, inverse_temperature,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    target = tl.load(targets + row)
    slope = tl.load(dlogp + row)
    base = tl.load(lse + row)
    if ENTROPY:
        weight = tl.load(dentropy + row)
        level = tl.load(entropy + row)
    for first in range(0, V, BLOCK):
        v = first + tl.arange(0, BLOCK)
        z = tl.load(logits + v, v < V, 0.0).to(tl.float32) * inverse_temperature - base
        p = tl.exp(z)
        d = tl.where(v == target, slope, 0.0) - p * slope
        if ENTROPY:
            d -= tl.where(p > 0, p * (z + level), 0.0) * weight
        tl.store(logits + v, (d * inverse_temperature).to(logits.dtype.element_ty), v < V)


def _block(V: int) -> tuple[int, int]:
    """(logits that a program holds at once, its warps)."""
    block = min(BLOCK, max(16, 1 << (V - 1).bit_length()))
    return block, max(1, min(16, block // 256))


def _cross_entropy_rows_triton(logits_CV: Tensor, targets: Tensor, weights: Tensor, differentiate: bool) -> tuple[Tensor, Tensor]:
    nll = weights.new_empty(len(targets))
    block, warps = _block(logits_CV.shape[1])
    _cross_entropy_kernel[(len(targets),)](
        logits_CV, targets, weights, nll, logits_CV.shape[1], GRADIENT=differentiate, LOWEST=LOWEST, BLOCK=block, num_warps=warps
    )
    return nll, logits_CV


def _logprob_rows_triton(logits_CV: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    logp, entropy, lse = (torch.empty(len(targets), dtype=torch.float32, device=logits_CV.device) for _ in range(3))
    block, warps = _block(logits_CV.shape[1])
    _logprob_kernel[(len(targets),)](
        logits_CV, targets, logp, entropy, lse, logits_CV.shape[1], 1.0 / temperature, LOWEST=LOWEST, BLOCK=block, num_warps=warps
    )
    return logp, entropy, lse


def _logprob_gradient_rows_triton(
    logits_CV: Tensor, targets: Tensor, dlogp: Tensor, dentropy: Tensor | None, entropy: Tensor, lse: Tensor, temperature: float
) -> Tensor:
    block, warps = _block(logits_CV.shape[1])
    _logprob_gradient_kernel[(len(targets),)](
        logits_CV, targets, dlogp, dlogp if dentropy is None else dentropy, entropy, lse, logits_CV.shape[1], 1.0 / temperature,
        ENTROPY=dentropy is not None, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return logits_CV


# --- all chunks ------------------------------------------------------------------------------------------


def _chunks(rows: int, w_VD: Tensor) -> Iterator[slice]:
    capacity = CHUNK_BYTES_GPU if w_VD.is_cuda else CHUNK_BYTES
    size = max(1, capacity // (w_VD.element_size() * len(w_VD)))
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def _accumulate(dw_VD: Tensor, d_CV: Tensor, x_CD: Tensor) -> None:
    """dw += d^T x, in dw's precision whatever that of the factors."""
    if dw_VD.dtype == x_CD.dtype:
        dw_VD.addmm_(d_CV.T, x_CD)
    elif x_CD.is_cuda:
        torch.ops.aten.addmm.dtype_out(dw_VD, d_CV.T, x_CD, dw_VD.dtype, out=dw_VD)
    else:
        dw_VD.addmm_(d_CV.T.to(dw_VD.dtype), x_CD.to(dw_VD.dtype))


def _kept(dtype: torch.dtype) -> torch.dtype:
    """What dW waits for the backward in: fp16 could not hold its sum before the scale."""
    return torch.float32 if dtype == torch.float16 else dtype


def _gradients(x_ND: Tensor, w_VD: Tensor, want_x: bool, want_w: bool) -> tuple[Tensor, Tensor]:
    """Where dX and dW are gathered; empty where they are not wanted."""
    dx_ND = torch.empty(x_ND.shape if want_x else 0, dtype=x_ND.dtype, device=x_ND.device)
    dw_VD = torch.zeros(w_VD.shape if want_w else 0, dtype=wide(w_VD.dtype), device=w_VD.device)
    return dx_ND, dw_VD


def _cross_entropy_by(rows_function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, ...]]:
    def cross_entropy(x_ND: Tensor, w_VD: Tensor, targets: Tensor, weights: Tensor, want_x: bool, want_w: bool) -> tuple[Tensor, ...]:
        high = wide(x_ND.dtype)
        weights = weights.to(high)
        scale, relative = weights.new_ones(()), weights
        if x_ND.dtype == torch.float16 and len(weights):
            # Weights are about 1 / N, and fp16 holds no gradients that small: the backward brings the scale back,
            # together with that of the loss.
            scale = weights.abs().amax().clamp_min(torch.finfo(high).tiny)
            relative = weights / scale
        nll = torch.empty_like(weights)
        dx_ND, dw_VD = _gradients(x_ND, w_VD, want_x, want_w)
        for rows in _chunks(len(x_ND), w_VD):
            logits_CV = product(x_ND[rows], w_VD)
            nll[rows], d_CV = rows_function(logits_CV, targets[rows], relative[rows], want_x or want_w)
            if want_x:
                dx_ND[rows] = product(d_CV, w_VD.T)
            if want_w:
                _accumulate(dw_VD, d_CV, x_ND[rows])
        return (nll * weights).sum(), nll, dx_ND, dw_VD.to(_kept(w_VD.dtype)), scale

    return cross_entropy


def _logprobs_by(rows_function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    def logprobs(x_ND: Tensor, w_VD: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, ...]:
        logp, entropy, lse = (torch.empty(len(x_ND), dtype=wide(x_ND.dtype), device=x_ND.device) for _ in range(3))
        for rows in _chunks(len(x_ND), w_VD):
            logp[rows], entropy[rows], lse[rows] = rows_function(product(x_ND[rows], w_VD), targets[rows], temperature)
        return logp, entropy, lse

    return logprobs


def _logprobs_backward_by(rows_function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def backward(
        x_ND: Tensor, w_VD: Tensor, targets: Tensor, dlogp: Tensor, dentropy: Tensor | None, entropy: Tensor, lse: Tensor,
        temperature: float, want_x: bool, want_w: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        dx_ND, dw_VD = _gradients(x_ND, w_VD, want_x, want_w)
        dlogp = dlogp.contiguous()
        dentropy = None if dentropy is None else dentropy.contiguous()
        for rows in _chunks(len(x_ND), w_VD):
            share = None if dentropy is None else dentropy[rows]
            logits_CV = product(x_ND[rows], w_VD)
            d_CV = rows_function(logits_CV, targets[rows], dlogp[rows], share, entropy[rows], lse[rows], temperature)
            if want_x:
                dx_ND[rows] = product(d_CV, w_VD.T)
            if want_w:
                _accumulate(dw_VD, d_CV, x_ND[rows])
        return dx_ND, dw_VD.to(w_VD.dtype)

    return backward


# --- façade ----------------------------------------------------------------------------------------------


def _fake_gradients(x_ND: Tensor, w_VD: Tensor, want_x: bool, want_w: bool) -> tuple[Tensor, Tensor]:
    return x_ND.new_empty(x_ND.shape if want_x else 0), w_VD.new_empty(w_VD.shape if want_w else 0)


def _fake_rows(x_ND: Tensor, count: int) -> list[Tensor]:
    return [x_ND.new_empty(len(x_ND), dtype=wide(x_ND.dtype)) for _ in range(count)]


def _fake_cross_entropy(x_ND: Tensor, w_VD: Tensor, targets: Tensor, weights: Tensor, want_x: bool, want_w: bool) -> tuple[Tensor, ...]:
    dx_ND, dw_VD = _fake_gradients(x_ND, w_VD, want_x, want_w)
    scalar = x_ND.new_empty((), dtype=wide(x_ND.dtype))
    return scalar, *_fake_rows(x_ND, 1), dx_ND, dw_VD.to(_kept(w_VD.dtype)), torch.empty_like(scalar)


_cross_entropy = operator(
    "linear_cross_entropy(Tensor x, Tensor w, Tensor targets, Tensor weights, bool want_x, bool want_w)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _cross_entropy_by(_cross_entropy_rows), _cross_entropy_by(_cross_entropy_rows_triton), _fake_cross_entropy,
)  # fmt: skip
_logprobs = operator(
    "linear_token_logprobs(Tensor x, Tensor w, Tensor targets, float temperature) -> (Tensor, Tensor, Tensor)",
    _logprobs_by(_logprob_rows), _logprobs_by(_logprob_rows_triton), lambda x, w, targets, temperature: tuple(_fake_rows(x, 3)),
)  # fmt: skip
_logprobs_backward = operator(
    "linear_token_logprobs_backward(Tensor x, Tensor w, Tensor targets, Tensor dlogp, Tensor? dentropy, Tensor entropy, Tensor lse,"
    " float temperature, bool want_x, bool want_w) -> (Tensor, Tensor)",
    _logprobs_backward_by(_logprob_gradient_rows), _logprobs_backward_by(_logprob_gradient_rows_triton),
    lambda x, w, targets, dlogp, dentropy, entropy, lse, temperature, *want: _fake_gradients(x, w, *want),
)  # fmt: skip


def _setup_cross_entropy(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)  # or the backward gets zeros as large as dX and dW
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


def _setup_logprobs(ctx: Any, inputs: Any, output: Any) -> None:
    x_ND, w_VD, targets, ctx.temperature = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x_ND, w_VD, targets, output[1], output[2])


def _backward_logprobs(ctx: Any, dlogp: Tensor | None, dentropy: Tensor | None, _: Any) -> tuple[Any, ...]:
    x_ND, w_VD, targets, entropy, lse = ctx.saved_tensors
    need_x, need_w = ctx.needs_input_grad[:2]
    dlogp = torch.zeros_like(lse) if dlogp is None else dlogp
    dx, dw = _logprobs_backward(x_ND, w_VD, targets, dlogp, dentropy, entropy, lse, ctx.temperature, need_x, need_w)
    return dx if need_x else None, dw if need_w else None, None, None


differentiable("linear_cross_entropy", _backward_cross_entropy, _setup_cross_entropy)
differentiable("linear_token_logprobs", _backward_logprobs, _setup_logprobs)


def linear_cross_entropy(x_ND: Tensor, w_VD: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """sum_i weights[i] * -log softmax(x w^T)[i, targets[i]]: a scalar in nats, fp32 at least.

    `targets` [N] int64 in [0, V); `weights` [N] carry the denominators (1 / N each for a mean).
    """
    graph = torch.is_grad_enabled()
    return _cross_entropy(x_ND, w_VD, targets, weights, graph and x_ND.requires_grad, graph and w_VD.requires_grad)[0]  # type: ignore[no-any-return]


def linear_token_logprobs(x_ND: Tensor, w_VD: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """([N] log-probabilities of the targets, [N] entropies in nats) of softmax(x w^T / temperature).

    Both are differentiable, in fp32 at least. `targets` [N] int64 in [0, V).
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    logp, entropy, _ = _logprobs(x_ND, w_VD, targets, float(temperature))
    return logp, entropy
