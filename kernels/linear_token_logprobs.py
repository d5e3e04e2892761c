"""Linear layer fused with log-probabilities of given tokens and with entropies, without all logits in memory.

The loss's gradients at the results are known only in the backward pass, which computes each chunk's logits again: four matrix products
in all. Policy losses, rewards and distillation use these results. See `output_layer.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from puna.kernels.cpu.lazy_jit import triton_jit
from puna.kernels.linear import product
from puna.kernels.operators import differentiable, operator, wide
from puna.kernels.output_layer import LOWEST, accumulate, block_size, chunks, fake_gradients, fake_rows, gradients
from puna.kernels.token_draw import log_sum_exp, uses_loop

if TYPE_CHECKING:
    import triton.language as tl

NUMERICS = {"linear_token_logprobs": 2}


def linear_token_logprobs_reference(x_ND: Tensor, w_VD: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return ([N] log-probabilities of the targets, [N] entropies in nats) of softmax(x w^T / temperature)."""
    logp = torch.log_softmax(x_ND @ w_VD.T / temperature, -1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


# These functions may overwrite their logits [C, V].


def _logprob_rows(logits_CV: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return ([C] log-probabilities of the targets, [C] entropies, [C] log-sum-exps of logits / temperature)."""
    if uses_loop(logits_CV):  # numba's loop, which token drawing uses too
        scale = torch.full((len(logits_CV),), 1.0 / temperature)
        lse, z_CV = log_sum_exp(logits_CV, scale)[0], logits_CV.mul_(scale[:, None])
    else:
        z_CV = logits_CV.to(wide(logits_CV.dtype)).div_(temperature)
        lse = z_CV.logsumexp(1)
    picked = z_CV.gather(1, targets[:, None])[:, 0]
    logp_CV = z_CV.sub_(lse[:, None])
    return picked - lse, -(logp_CV.exp() * logp_CV).sum(1), lse


def _logprob_gradient_rows(
    logits_CV: Tensor, targets: Tensor, dlogp: Tensor, dentropy: Tensor | None, entropy: Tensor, lse: Tensor, temperature: float
) -> Tensor:
    """Return the loss's gradient at the logits, from dlogp/dz = one-hot - p and dH/dz = -p (log p + H), z = logits / temperature."""
    logp_CV = logits_CV.to(wide(logits_CV.dtype)).div_(temperature).sub_(lse[:, None])
    if dentropy is None:
        d_CV = logp_CV.exp_().mul_(-dlogp[:, None])
    else:
        slope_CV = (logp_CV + entropy[:, None]).mul_(dentropy[:, None]).add_(dlogp[:, None])
        d_CV = logp_CV.exp_().mul_(slope_CV).neg_()
    d_CV.scatter_add_(1, targets[:, None], dlogp[:, None].to(d_CV.dtype))
    return d_CV.div_(temperature).to(logits_CV.dtype)


@triton_jit
def _logprob_kernel(  # type: ignore[no-untyped-def]
    logits, targets, logp, entropy, lse, V, inverse_temperature,
    LOWEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
def _logprob_gradient_kernel(  # type: ignore[no-untyped-def]
    logits, targets, dlogp, dentropy, entropy, lse, V, inverse_temperature,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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


def _logprob_rows_triton(logits_CV: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    logp, entropy, lse = (torch.empty(len(targets), dtype=torch.float32, device=logits_CV.device) for _ in range(3))
    block, warps = block_size(logits_CV.shape[1])
    _logprob_kernel[(len(targets),)](
        logits_CV, targets, logp, entropy, lse, logits_CV.shape[1], 1.0 / temperature, LOWEST=LOWEST, BLOCK=block, num_warps=warps
    )
    return logp, entropy, lse


def _logprob_gradient_rows_triton(
    logits_CV: Tensor, targets: Tensor, dlogp: Tensor, dentropy: Tensor | None, entropy: Tensor, lse: Tensor, temperature: float
) -> Tensor:
    block, warps = block_size(logits_CV.shape[1])
    _logprob_gradient_kernel[(len(targets),)](
        logits_CV, targets, dlogp, dlogp if dentropy is None else dentropy, entropy, lse, logits_CV.shape[1], 1.0 / temperature,
        ENTROPY=dentropy is not None, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return logits_CV


def _logprobs_by(rows_function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    def logprobs(x_ND: Tensor, w_VD: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, ...]:
        logp, entropy, lse = (torch.empty(len(x_ND), dtype=wide(x_ND.dtype), device=x_ND.device) for _ in range(3))
        for rows in chunks(len(x_ND), w_VD):
            logp[rows], entropy[rows], lse[rows] = rows_function(product(x_ND[rows], w_VD), targets[rows], temperature)
        return logp, entropy, lse

    return logprobs


def _logprobs_backward_by(rows_function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def backward(
        x_ND: Tensor, w_VD: Tensor, targets: Tensor, dlogp: Tensor, dentropy: Tensor | None, entropy: Tensor, lse: Tensor,
        temperature: float, want_x: bool, want_w: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        dx_ND, dw_VD = gradients(x_ND, w_VD, want_x, want_w)
        dlogp = dlogp.contiguous()
        dentropy = None if dentropy is None else dentropy.contiguous()
        for rows in chunks(len(x_ND), w_VD):
            share = None if dentropy is None else dentropy[rows]
            logits_CV = product(x_ND[rows], w_VD)
            d_CV = rows_function(logits_CV, targets[rows], dlogp[rows], share, entropy[rows], lse[rows], temperature)
            if want_x:
                dx_ND[rows] = product(d_CV, w_VD.T)
            if want_w:
                accumulate(dw_VD, d_CV, x_ND[rows])
            del logits_CV, d_CV  # else both would stay in memory beside the next chunk's tensors
        return dx_ND, dw_VD.to(w_VD.dtype)

    return backward


_logprobs = operator(
    "linear_token_logprobs(Tensor x, Tensor w, Tensor targets, float temperature) -> (Tensor, Tensor, Tensor)",
    _logprobs_by(_logprob_rows), _logprobs_by(_logprob_rows_triton), lambda x, w, targets, temperature: tuple(fake_rows(x, 3)),
)  # fmt: skip
_logprobs_backward = operator(
    "linear_token_logprobs_backward(Tensor x, Tensor w, Tensor targets, Tensor dlogp, Tensor? dentropy, Tensor entropy, Tensor lse,"
    " float temperature, bool want_x, bool want_w) -> (Tensor, Tensor)",
    _logprobs_backward_by(_logprob_gradient_rows), _logprobs_backward_by(_logprob_gradient_rows_triton),
    lambda x, w, targets, dlogp, dentropy, entropy, lse, temperature, *want: fake_gradients(x, w, *want),
)  # fmt: skip


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


differentiable(_logprobs, _backward_logprobs, _setup_logprobs)


def linear_token_logprobs(x_ND: Tensor, w_VD: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return ([N] log-probabilities of the targets, [N] entropies in nats) of softmax(x w^T / temperature). Both are differentiable
    and at least fp32. `targets` [N] int64 in [0, V). Raise ValueError unless `temperature` > 0."""
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    logp, entropy, _ = _logprobs(x_ND, w_VD, targets, float(temperature))
    return logp, entropy
