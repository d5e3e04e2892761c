"""Mixture of experts: each token's k likeliest experts, and one product with a matrix of its own for each expert's rows.

Routing: p = softmax(logits); the k largest p are the weights, divided by their sum if asked for. Its backward spreads the
weights' gradients over the softmax. Dispatch copies each token's row to its experts, combine adds the experts' rows up
again; both gather, and sum a token's k rows in the order of its choices, so that no sum depends on a GPU's schedule as
scattering's does. Products: rows sorted by expert, offsets[e] : offsets[e + 1] are those of expert e.
On a GPU the offsets stay there: tiles that are too many in the grid stop at once, so nothing waits for the counts.

Shapes: T tokens, E experts, k of them per token, N = T k rows sorted by expert, D inputs, F outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from puna.kernels.configurations import capability, configuration
from puna.kernels.lazy import triton_jit
from puna.kernels.linear import product
from puna.kernels.operators import differentiable, operator, wide

if TYPE_CHECKING:
    import triton.language as tl


def top_k_routing_reference(logits_TE: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(weights [T, k], probabilities [T, E], chosen [T, k] int64), likeliest first, in the logits' dtype."""
    p_TE = torch.softmax(logits_TE, -1)
    weight_Tk, chosen_Tk = p_TE.topk(k, -1)
    if normalize:
        weight_Tk = weight_Tk / weight_Tk.sum(-1, keepdim=True)
    return weight_Tk, p_TE, chosen_Tk


def grouped_linear_reference(x_ND: Tensor, w_EFD: Tensor, offsets_E1: Tensor) -> Tensor:
    """[N, F]: row n times the transposed matrix of its expert."""
    cuts = offsets_E1.tolist()
    return torch.cat([x_ND[cuts[e] : cuts[e + 1]] @ w_EFD[e].T for e in range(len(w_EFD))])


def dispatch_reference(x_TD: Tensor, order_N: Tensor) -> Tensor:
    """[N, D]: the rows of the tokens whose choices `order_N` names."""
    return x_TD[order_N // (len(order_N) // len(x_TD))]


def combine_reference(y_ND: Tensor, weight_Tk: Tensor, order_N: Tensor) -> Tensor:
    """[T, D]: each token's rows, wherever they lie among those of the experts, times its weights, added up."""
    token_N = order_N // weight_Tk.shape[1]
    weighted = y_ND * weight_Tk.flatten()[order_N, None].to(y_ND.dtype)
    return y_ND.new_zeros(len(weight_Tk), y_ND.shape[1]).index_add(0, token_N, weighted)


# --- portable --------------------------------------------------------------------------------------------


def _route(logits_TE: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    return top_k_routing_reference(logits_TE.to(wide(logits_TE.dtype)), k, normalize)


def _route_backward(
    dweight_Tk: Tensor | None, dp_TE: Tensor | None, weight_Tk: Tensor, p_TE: Tensor, chosen_Tk: Tensor, normalize: bool
) -> Tensor:
    """Gradient at the logits: p (g - sum g p), with g the gradient at p from both outputs."""
    g_TE = torch.zeros_like(p_TE) if dp_TE is None else dp_TE.clone()
    if dweight_Tk is not None:
        if normalize:  # w = p / s with s the sum of the chosen: dp = (dw - sum(dw w)) / s
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


def _grouped(x_ND: Tensor, w_EFD: Tensor, offsets_E1: Tensor) -> Tensor:
    y_NF = x_ND.new_empty(len(x_ND), w_EFD.shape[1])
    cuts = offsets_E1.tolist()
    for e, w_FD in enumerate(w_EFD):
        rows = slice(cuts[e], cuts[e + 1])
        if rows.start < rows.stop:
            y_NF[rows] = product(x_ND[rows], w_FD)
    return y_NF


def _grouped_weights(dy_NF: Tensor, x_ND: Tensor, offsets_E1: Tensor) -> Tensor:
    dw_EFD = dy_NF.new_zeros(len(offsets_E1) - 1, dy_NF.shape[1], x_ND.shape[1])
    cuts = offsets_E1.tolist()
    for e, dw_FD in enumerate(dw_EFD):
        rows = slice(cuts[e], cuts[e + 1])
        if rows.start < rows.stop:
            torch.mm(dy_NF[rows].T, x_ND[rows], out=dw_FD)
    return dw_EFD


# --- Triton ----------------------------------------------------------------------------------------------


@triton_jit
def _route_kernel(logits, weights, p, chosen, experts, K: tl.constexpr, BLOCK: tl.constexpr, NORMALIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """One token: its softmax, then k times the largest that is left (the first of equals)."""
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
        tl.debug_barrier()  # one program's threads may each have written another's weights
        for i in tl.static_range(K):
            tl.store(weights + t * K + i, tl.load(weights + t * K + i) / total)


@triton_jit
def _grouped_kernel(
    x, w, offsets, firsts, owners, y, F, D, x_n, w_e, w_f, w_d,
    M: tl.constexpr, C: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """One [M, C] tile of one expert's product; `owners` and `firsts` say whose and where its rows begin."""
    expert = tl.load(owners + tl.program_id(1))
    if expert < 0:
        return
    begin = tl.load(firsts + tl.program_id(1))
    end = tl.load(offsets + expert + 1)
    n = begin + tl.arange(0, M)
    f = tl.program_id(0) * C + tl.arange(0, C)
    k = tl.arange(0, K)
    rows = x + tl.minimum(n, end - 1)[:, None] * x_n + k[None, :]
    columns = w + expert * w_e + tl.minimum(f, F - 1).to(tl.int64)[None, :] * w_f + k[:, None].to(tl.int64) * w_d
    acc = tl.zeros([M, C], tl.float32)
    for first in range(0, D, K):
        if EVEN:
            acc = tl.dot(tl.load(rows), tl.load(columns), acc, input_precision=PRECISION)
        else:
            x_MK = tl.load(rows, (first + k < D)[None, :], 0.0)
            acc = tl.dot(x_MK, tl.load(columns, (first + k < D)[:, None], 0.0), acc, input_precision=PRECISION)
        rows += K
        columns += K * w_d
    tl.store(y + n[:, None] * F + f[None, :], acc.to(y.dtype.element_ty), (n[:, None] < end) & (f[None, :] < F))


@triton_jit
def _grouped_weights_kernel(
    dy, x, offsets, dw, F, D, dy_n, x_n, M: tl.constexpr, C: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """One [M, C] tile of dw[e] = dy^T x over the rows of expert e, in order: sums do not depend on the schedule."""
    expert = tl.program_id(2).to(tl.int64)
    begin = tl.load(offsets + expert)
    end = tl.load(offsets + expert + 1)
    f = tl.program_id(1) * M + tl.arange(0, M)
    d = tl.program_id(0) * C + tl.arange(0, C)
    k = tl.arange(0, K)
    acc = tl.zeros([M, C], tl.float32)
    for first in range(begin, end, K):
        n = (first + k).to(tl.int64)
        dy_MK = tl.load(dy + n[None, :] * dy_n + f[:, None], (n[None, :] < end) & (f[:, None] < F), 0.0)
        x_KC = tl.load(x + n[:, None] * x_n + d[None, :], (n[:, None] < end) & (d[None, :] < D), 0.0)
        acc = tl.dot(dy_MK, x_KC, acc, input_precision=PRECISION)
    at = dw + expert * F * D + f.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(at, acc.to(dw.dtype.element_ty), (f[:, None] < F) & (d[None, :] < D))


def _route_triton(logits_TE: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    logits_TE = logits_TE.contiguous()
    T, E = logits_TE.shape
    weight_Tk, p_TE = (torch.empty(T, n, dtype=torch.float32, device=logits_TE.device) for n in (k, E))
    chosen_Tk = torch.empty(T, k, dtype=torch.int64, device=logits_TE.device)
    if T:
        block = max(16, 1 << (E - 1).bit_length())
        _route_kernel[(T,)](logits_TE, weight_Tk, p_TE, chosen_Tk, E, K=k, BLOCK=block, NORMALIZE=normalize, num_warps=1)
    return weight_Tk, p_TE, chosen_Tk


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest" else "tf32"


def _tiles(rows: int, offsets_E1: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """([tiles] int64 first rows, [tiles] int64 experts, -1 for tiles that are too many), as many as there could be."""
    E = len(offsets_E1) - 1
    last_E = ((offsets_E1.diff() + size - 1) // size).cumsum(0)
    tile = torch.arange(-(-rows // size) + min(E, rows), device=offsets_E1.device)
    expert = torch.searchsorted(last_E, tile, right=True)
    near = expert.clamp_max(E - 1)
    before = torch.cat([last_E.new_zeros(1), last_E])[near]
    return offsets_E1[near] + (tile - before) * size, torch.where(expert < E, expert, -1)


def _grouped_triton(x_ND: Tensor, w_EFD: Tensor, offsets_E1: Tensor) -> Tensor:
    x_ND = x_ND if x_ND.stride(1) == 1 else x_ND.contiguous()
    (N, D), F = x_ND.shape, w_EFD.shape[1]
    y_NF = torch.empty(N, F, dtype=x_ND.dtype, device=x_ND.device)
    tile = configuration("product", capability(x_ND.device), 0)
    if y_NF.numel():
        firsts, owners = _tiles(N, offsets_E1, tile.rows)
        _grouped_kernel[(-(-F // tile.columns), len(owners))](
            x_ND, w_EFD, offsets_E1, firsts, owners, y_NF, F, D, x_ND.stride(0), *w_EFD.stride(),
            M=tile.rows, C=tile.columns, K=tile.depth, PRECISION=_precision(x_ND), EVEN=D % tile.depth == 0,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return y_NF


def _grouped_weights_triton(dy_NF: Tensor, x_ND: Tensor, offsets_E1: Tensor) -> Tensor:
    dy_NF, x_ND = (z if z.stride(1) == 1 else z.contiguous() for z in (dy_NF, x_ND))
    E, F, D = len(offsets_E1) - 1, dy_NF.shape[1], x_ND.shape[1]
    dw_EFD = torch.empty(E, F, D, dtype=dy_NF.dtype, device=dy_NF.device)
    tile = configuration("product", capability(x_ND.device), 0)
    _grouped_weights_kernel[(-(-D // tile.columns), -(-F // tile.rows), E)](
        dy_NF, x_ND, offsets_E1, dw_EFD, F, D, dy_NF.stride(0), x_ND.stride(0),
        M=tile.rows, C=tile.columns, K=tile.depth, PRECISION=_precision(x_ND), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return dw_EFD


# --- façade ----------------------------------------------------------------------------------------------


def _fake_route(logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    weight, chosen = (logits.new_empty(len(logits), k, dtype=kind) for kind in (wide(logits.dtype), torch.int64))
    return weight, torch.empty_like(logits, dtype=wide(logits.dtype)), chosen


_top_k_routing = operator(
    "top_k_routing(Tensor logits, int k, bool normalize) -> (Tensor, Tensor, Tensor)", _route, _route_triton, _fake_route
)
_grouped_linear = operator(
    "grouped_linear(Tensor x, Tensor w, Tensor offsets) -> Tensor",
    _grouped, _grouped_triton, lambda x, w, offsets: x.new_empty(len(x), w.shape[1]),
)  # fmt: skip
_grouped_weight_gradient = operator(
    "grouped_linear_weights(Tensor dy, Tensor x, Tensor offsets) -> Tensor",
    _grouped_weights, _grouped_weights_triton, lambda dy, x, offsets: dy.new_empty(len(offsets) - 1, dy.shape[1], x.shape[1]),
)  # fmt: skip

_dispatch_rows = operator(
    "moe_dispatch(Tensor x, Tensor order, Tensor place) -> Tensor",
    _dispatch, _dispatch, lambda x, order, place: x.new_empty(len(order), x.shape[1]),
)  # fmt: skip
_dispatch_gradient = operator(
    "moe_dispatch_backward(Tensor dy, Tensor place, int k) -> Tensor",
    _dispatch_backward, _dispatch_backward, lambda dy, place, k: dy.new_empty(len(place) // k, dy.shape[1]),
)  # fmt: skip
_combine_rows = operator(
    "moe_combine(Tensor y, Tensor weight, Tensor order, Tensor place) -> Tensor",
    _combine, _combine, lambda y, weight, order, place: y.new_empty(len(weight), y.shape[1]),
)  # fmt: skip
_combine_gradients = operator(
    "moe_combine_backward(Tensor dy, Tensor y, Tensor weight, Tensor order, Tensor place) -> (Tensor, Tensor)",
    _combine_backward, _combine_backward, lambda dy, y, weight, order, place: (torch.empty_like(y), torch.empty_like(weight)),
)  # fmt: skip


def _setup_dispatch(ctx: Any, inputs: Any, output: Any) -> None:
    x_TD, order_N, place_N = inputs
    ctx.k = len(order_N) // max(1, len(x_TD)) or 1
    ctx.save_for_backward(place_N)


def _setup_route(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.normalize, ctx.dtype = inputs[2], inputs[0].dtype
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output)


def _backward_route(ctx: Any, dweight: Tensor | None, dp: Tensor | None, _: Any) -> tuple[Any, ...]:
    return _route_backward(dweight, dp, *ctx.saved_tensors, ctx.normalize).to(ctx.dtype), None, None


def _backward_grouped(ctx: Any, dy_NF: Tensor) -> tuple[Any, ...]:
    x_ND, w_EFD, offsets_E1 = ctx.saved_tensors
    dx = _grouped_linear(dy_NF, w_EFD.transpose(1, 2), offsets_E1) if ctx.needs_input_grad[0] else None
    dw = _grouped_weight_gradient(dy_NF, x_ND, offsets_E1).to(w_EFD.dtype) if ctx.needs_input_grad[1] else None
    return dx, dw, None


differentiable("top_k_routing", _backward_route, _setup_route)
differentiable("grouped_linear", _backward_grouped, lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
differentiable("moe_dispatch", lambda ctx, dy: (_dispatch_gradient(dy, *ctx.saved_tensors, ctx.k), None, None), _setup_dispatch)
differentiable(
    "moe_combine",
    lambda ctx, dy: (*_combine_gradients(dy, *ctx.saved_tensors), None, None),
    lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def top_k_routing(logits_TE: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(weights [T, k], probabilities [T, E], chosen [T, k] int64), likeliest first; in fp32 at least.

    Weights and probabilities are differentiable. With `normalize` a token's weights add up to one.
    """
    if not 1 <= k <= logits_TE.shape[1]:
        raise ValueError(f"k is {k}, of {logits_TE.shape[1]} experts")
    return _top_k_routing(logits_TE, k, normalize)  # type: ignore[no-any-return]


def grouped_linear(x_ND: Tensor, w_EFD: Tensor, offsets_E1: Tensor) -> Tensor:
    """[N, F]: rows offsets[e] : offsets[e + 1] of x times the transposed matrix of expert e.

    `offsets` [E + 1] int64, ascending from 0 to N, on x's device. Differentiable in x and w.
    """
    if x_ND.shape[1] != w_EFD.shape[2] or len(offsets_E1) != len(w_EFD) + 1:
        raise ValueError(f"x {list(x_ND.shape)}, w {list(w_EFD.shape)} and {len(offsets_E1)} offsets do not fit")
    return _grouped_linear(x_ND, w_EFD, offsets_E1)  # type: ignore[no-any-return]


def sort_by_expert(chosen_Tk: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(order [N], place [N], offsets [E + 1]), int64, of all tokens' choices, numbered token by token: N = T k.

    order[n] is the choice whose row is the n-th of the experts' rows, place its inverse; rows of one expert stay in the
    order of their tokens.
    """
    chosen_N = chosen_Tk.flatten()
    order_N = chosen_N.argsort(stable=True)
    place_N = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=order_N.device))
    counts_E = torch.bincount(chosen_N, minlength=experts)
    return order_N, place_N, torch.cat([counts_E.new_zeros(1), counts_E.cumsum(0)])


def dispatch(x_TD: Tensor, order_N: Tensor, place_N: Tensor) -> Tensor:
    """[N, D]: each token's row once for each of its experts, sorted by expert as `sort_by_expert` says. Differentiable in x."""
    return _dispatch_rows(x_TD, order_N, place_N)  # type: ignore[no-any-return]


def combine(y_ND: Tensor, weight_Tk: Tensor, order_N: Tensor, place_N: Tensor) -> Tensor:
    """[T, D] in y's dtype: the sum of each token's k rows times its weights. The inverse of `dispatch`; differentiable in y and weight."""
    if y_ND.shape[0] != weight_Tk.numel():
        raise ValueError(f"{len(y_ND)} rows for weights {list(weight_Tk.shape)}: each weight has one")
    return _combine_rows(y_ND, weight_Tk, order_N, place_N)  # type: ignore[no-any-return]
