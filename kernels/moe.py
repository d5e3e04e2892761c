"""Mixture of experts: routing of tokens to their k likeliest experts, dispatch of rows to experts, and combination of the results.

Routing: p = softmax(logits); the k largest p are the weights, with `normalize` divided by their sum. The backward pass takes the weights'
gradients through the softmax. Dispatch copies a token's row once per chosen expert; combine returns the weighted sum of a token's k rows.
Sums gather a token's k rows in the order of its choices. So they do not depend on a GPU's schedule, unlike scatter-adds.
`grouped_linear.py` computes the experts' products between dispatch and combine.

Shapes: T tokens, E experts, k experts per token, N = T k rows sorted by expert, D model width."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from puna.kernels.cpu.lazy_jit import triton_jit
from puna.kernels.operators import differentiable, operator, wide

if TYPE_CHECKING:
    import triton.language as tl

NUMERICS = {"top_k_routing": 1, "dispatch": 1, "combine": 1}
BLOCK = 1024  # columns of a row that a program holds at once


def top_k_routing_reference(logits_TE: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return (weights [T, k], probabilities [T, E], chosen experts [T, k] int64), experts likeliest first, floats in the logits' dtype."""
    p_TE = torch.softmax(logits_TE, -1)
    weight_Tk, chosen_Tk = p_TE.topk(k, -1)
    if normalize:
        weight_Tk = weight_Tk / weight_Tk.sum(-1, keepdim=True)
    return weight_Tk, p_TE, chosen_Tk


def dispatch_reference(x_TD: Tensor, order_N: Tensor) -> Tensor:
    """Return [N, D]: row n is the row of the token that made choice order_N[n]."""
    return x_TD[order_N // (len(order_N) // len(x_TD))]


def combine_reference(y_ND: Tensor, weight_Tk: Tensor, order_N: Tensor) -> Tensor:
    """Return [T, D]: the weighted sum of each token's k expert rows."""
    token_N = order_N // weight_Tk.shape[1]
    weighted = y_ND * weight_Tk.flatten()[order_N, None].to(y_ND.dtype)
    return y_ND.new_zeros(len(weight_Tk), y_ND.shape[1]).index_add(0, token_N, weighted)


def _route(logits_TE: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    return top_k_routing_reference(logits_TE.to(wide(logits_TE.dtype)), k, normalize)


def _route_backward(
    dweight_Tk: Tensor | None, dp_TE: Tensor | None, weight_Tk: Tensor, p_TE: Tensor, chosen_Tk: Tensor, normalize: bool
) -> Tensor:
    """Return the gradient at the logits, p (g - sum g p), where g adds the gradients that reach p through the weights and directly."""
    g_TE = torch.zeros_like(p_TE) if dp_TE is None else dp_TE.clone()
    if dweight_Tk is not None:
        if normalize:  # w = p / s with s the sum of the chosen p: dp = (dw - sum(dw w)) / s
            sums_T1 = p_TE.gather(1, chosen_Tk).sum(1, keepdim=True)
            dweight_Tk = (dweight_Tk - (dweight_Tk * weight_Tk).sum(1, keepdim=True)) / sums_T1
        g_TE.scatter_add_(1, chosen_Tk, dweight_Tk)
    return p_TE * (g_TE - (g_TE * p_TE).sum(1, keepdim=True))


def _dispatch(x_TD: Tensor, order_N: Tensor, place_N: Tensor) -> Tensor:
    return x_TD.index_select(0, order_N // (len(order_N) // max(1, len(x_TD)) or 1))


def _dispatch_backward(dy_ND: Tensor, place_N: Tensor, k: int) -> Tensor:
    return dy_ND.index_select(0, place_N).view(-1, k, dy_ND.shape[1]).sum(1)


def _combine(y_ND: Tensor, weight_Tk: Tensor, order_N: Tensor, place_N: Tensor) -> Tensor:
    y_TkD = y_ND.index_select(0, place_N).view(*weight_Tk.shape, y_ND.shape[1])
    return y_TkD.mul_(weight_Tk[..., None].to(y_ND.dtype)).sum(1)


def _combine_backward(dy_TD: Tensor, y_ND: Tensor, weight_Tk: Tensor, order_N: Tensor, place_N: Tensor) -> tuple[Tensor, Tensor]:
    dy_ND = dy_TD.index_select(0, order_N // weight_Tk.shape[1])
    dweight_N = (dy_ND.to(weight_Tk.dtype) * y_ND).sum(1)
    dy_ND *= weight_Tk.flatten()[order_N, None].to(dy_ND.dtype)
    return dy_ND, dweight_N[place_N].view(weight_Tk.shape)


@triton_jit
def _route_kernel(logits, weights, p, chosen, experts, K: tl.constexpr, BLOCK: tl.constexpr, NORMALIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Route one token: compute its softmax, then select k times the largest remaining entry (on a tie, the first)."""
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    z = tl.load(logits + t * experts + e, e < experts, float("-inf")).to(tl.float32)
    z = tl.exp(z - tl.max(z, 0))
    share = z / tl.sum(z, 0)
    tl.store(p + t * experts + e, share, e < experts)
    left = tl.where(e < experts, share, -1.0)
    total = 0.0
    for i in tl.static_range(K):
        best = tl.argmax(left, 0)
        top = tl.max(left, 0)
        total += top
        tl.store(chosen + t * K + i, best.to(tl.int64))
        tl.store(weights + t * K + i, top)
        left = tl.where(e == best, -1.0, left)
    if NORMALIZE:
        tl.debug_barrier()  # a thread may read weights that another thread of the program wrote
        for i in tl.static_range(K):
            tl.store(weights + t * K + i, tl.load(weights + t * K + i) / total)


@triton_jit
def _sum_kernel(rows, weights, place, out, D, K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute BLOCK columns of the sum of one token's K rows, each times its weight if WEIGHTED."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(K):
        row = tl.load(rows + tl.load(place + t * K + i) * D + d, d < D, 0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights + t * K + i).to(tl.float32)
        acc += row
    tl.store(out + t * D + d, acc.to(out.dtype.element_ty), d < D)


@triton_jit
def _combine_gradients_kernel(dy, y, weights, order, dy_rows, dweights, D, K: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute the gradient at one expert row, which is the token's gradient times the row's weight, and the gradient at this weight."""
    n = tl.program_id(0).to(tl.int64)
    choice = tl.load(order + n)
    weight = tl.load(weights + choice).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, D, BLOCK):
        d = first + tl.arange(0, BLOCK)
        gradient = tl.load(dy + choice // K * D + d, d < D, 0.0).to(tl.float32)
        total += gradient * tl.load(y + n * D + d, d < D, 0.0).to(tl.float32)
        tl.store(dy_rows + n * D + d, (gradient * weight).to(dy_rows.dtype.element_ty), d < D)
    tl.store(dweights + choice, tl.sum(total, 0).to(dweights.dtype.element_ty))


def _route_triton(logits_TE: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    logits_TE = logits_TE.contiguous()
    T, E = logits_TE.shape
    weight_Tk, p_TE = (torch.empty(T, n, dtype=torch.float32, device=logits_TE.device) for n in (k, E))
    chosen_Tk = torch.empty(T, k, dtype=torch.int64, device=logits_TE.device)
    if T:
        block = max(16, 1 << (E - 1).bit_length())
        _route_kernel[(T,)](logits_TE, weight_Tk, p_TE, chosen_Tk, E, K=k, BLOCK=block, NORMALIZE=normalize, num_warps=1)
    return weight_Tk, p_TE, chosen_Tk


def _block(D: int) -> int:
    return min(BLOCK, max(16, 1 << (D - 1).bit_length()))


def _sum_triton(rows_ND: Tensor, weight_Tk: Tensor | None, place_N: Tensor, k: int) -> Tensor:
    rows_ND = rows_ND.contiguous()
    T, D = len(place_N) // k, rows_ND.shape[1]
    out_TD = torch.empty(T, D, dtype=rows_ND.dtype, device=rows_ND.device)
    if out_TD.numel():
        weights = rows_ND if weight_Tk is None else weight_Tk.contiguous()
        block = _block(D)
        _sum_kernel[(T, -(-D // block))](
            rows_ND, weights, place_N, out_TD, D, K=k, WEIGHTED=weight_Tk is not None, BLOCK=block, num_warps=4
        )
    return out_TD


def _combine_backward_triton(dy_TD: Tensor, y_ND: Tensor, weight_Tk: Tensor, order_N: Tensor, place_N: Tensor) -> tuple[Tensor, Tensor]:
    dy_TD, y_ND, weight_Tk = dy_TD.contiguous(), y_ND.contiguous(), weight_Tk.contiguous()
    dy_ND, dweight_Tk = torch.empty_like(y_ND), torch.empty_like(weight_Tk)
    (N, D), k = y_ND.shape, weight_Tk.shape[1]
    if N:
        _combine_gradients_kernel[(N,)](dy_TD, y_ND, weight_Tk, order_N, dy_ND, dweight_Tk, D, K=k, BLOCK=_block(D), num_warps=4)
    return dy_ND, dweight_Tk


def _fake_route(logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    weight, chosen = (logits.new_empty(logits.shape[0], k, dtype=kind) for kind in (wide(logits.dtype), torch.int64))
    return weight, torch.empty_like(logits, dtype=wide(logits.dtype)), chosen


_top_k_routing = operator(
    "top_k_routing(Tensor logits, int k, bool normalize) -> (Tensor, Tensor, Tensor)", _route, _route_triton, _fake_route
)
# torch's gather is as fast as dispatch can be: it reads and writes each row once.
_dispatch_rows = operator(
    "moe_dispatch(Tensor x, Tensor order, Tensor place) -> Tensor",
    _dispatch, _dispatch, lambda x, order, place: x.new_empty(order.shape[0], x.shape[1]),
)  # fmt: skip
_dispatch_gradient = operator(
    "moe_dispatch_backward(Tensor dy, Tensor place, int k) -> Tensor",
    _dispatch_backward, lambda dy, place, k: _sum_triton(dy, None, place, k),
    lambda dy, place, k: dy.new_empty(place.shape[0] // k, dy.shape[1]),
)  # fmt: skip
_combine_rows = operator(
    "moe_combine(Tensor y, Tensor weight, Tensor order, Tensor place) -> Tensor",
    _combine, lambda y, weight, order, place: _sum_triton(y, weight, place, weight.shape[1]),
    lambda y, weight, order, place: y.new_empty(weight.shape[0], y.shape[1]),
)  # fmt: skip
_combine_gradients = operator(
    "moe_combine_backward(Tensor dy, Tensor y, Tensor weight, Tensor order, Tensor place) -> (Tensor, Tensor)",
    _combine_backward, _combine_backward_triton, lambda dy, y, weight, order, place: (torch.empty_like(y), torch.empty_like(weight)),
)  # fmt: skip


def _setup_dispatch(ctx: Any, inputs: Any, output: Any) -> None:
    x_TD, order_N, place_N = inputs
    ctx.k = order_N.shape[0] // max(1, x_TD.shape[0]) or 1
    ctx.save_for_backward(place_N)


def _setup_route(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.normalize, ctx.dtype = inputs[2], inputs[0].dtype
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output)


def _backward_route(ctx: Any, dweight: Tensor | None, dp: Tensor | None, _: Any) -> tuple[Any, ...]:
    weight, p, chosen = ctx.saved_tensors
    return _route_backward(dweight, dp, weight, p, chosen, ctx.normalize).to(ctx.dtype), None, None


differentiable(_top_k_routing, _backward_route, _setup_route)
differentiable(_dispatch_rows, lambda ctx, dy: (_dispatch_gradient(dy, *ctx.saved_tensors, ctx.k), None, None), _setup_dispatch)
differentiable(
    _combine_rows,
    lambda ctx, dy: (*_combine_gradients(dy, *ctx.saved_tensors), None, None),
    lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def top_k_routing(logits_TE: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return (weights [T, k], probabilities [T, E], chosen [T, k] int64), the first two differentiable and at least fp32. `chosen`: the k
    likeliest experts, best first. `weights`: their probabilities, over their sum if `normalize`. Raise ValueError unless 1 <= k <= E."""
    if not 1 <= k <= logits_TE.shape[1]:
        raise ValueError(f"k must be from 1 to the number of experts, {logits_TE.shape[1]}, not {k}")
    return _top_k_routing(logits_TE, k, normalize)  # type: ignore[no-any-return]


def sort_by_expert(chosen_Tk: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return int64 (order [N], place [N], offsets [E + 1]) that sort the N = T k choices, numbered token by token, by expert. order[n]: the
    choice at sorted row n; place: the inverse of order; expert e has rows offsets[e] : offsets[e + 1], in the order of their tokens."""
    chosen_N = chosen_Tk.flatten()
    order_N = chosen_N.argsort(stable=True)
    place_N = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=order_N.device))
    # Not bincount, whose length torch.compile cannot know.
    counts_E = chosen_N.new_zeros(experts).scatter_add_(0, chosen_N, torch.ones_like(chosen_N))
    return order_N, place_N, torch.cat([counts_E.new_zeros(1), counts_E.cumsum(0)])


def dispatch(x_TD: Tensor, order_N: Tensor, place_N: Tensor) -> Tensor:
    """Return [N, D]: each token's row once per chosen expert, sorted by expert with `sort_by_expert`'s result. Differentiable in x."""
    return _dispatch_rows(x_TD, order_N, place_N)  # type: ignore[no-any-return]


def combine(y_ND: Tensor, weight_Tk: Tensor, order_N: Tensor, place_N: Tensor) -> Tensor:
    """Return [T, D] in y's dtype: the weighted sum of each token's k rows. Undoes `dispatch`'s order; differentiable in y and weight.
    Raise ValueError unless y has one row per weight."""
    if y_ND.shape[0] != weight_Tk.numel():
        raise ValueError(f"{len(y_ND)} rows for weights {list(weight_Tk.shape)}: each weight has one")
    return _combine_rows(y_ND, weight_Tk, order_N, place_N)  # type: ignore[no-any-return]
