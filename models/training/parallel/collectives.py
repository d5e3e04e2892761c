"""Exchanges between ranks as differentiable functions.

Outside a parallel model, all tensors and gradients are equal on all ranks of a group. Each function states, for forward and backward, what
its input is: a partial sum, a piece of the rows, or the whole tensor. Of T rows over p ranks, a piece has `cut(T, p)`, with padding."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from puna.models.training.parallel.mesh import cut

# torch 2.13 warns of the older names on each rank; torch 2.10 has only those.
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _sum(x: Tensor, group: Any) -> Tensor:
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


def _gather(x: Tensor, rows: int, group: Any) -> Tensor:
    out = x.new_empty(len(x) * dist.get_world_size(group), *x.shape[1:])
    gather_single(out, x.contiguous(), group=group)
    return out[:rows]


def padded(x: Tensor, p: int) -> Tensor:
    """Return rows x, with rows of zeros up to a multiple of p; contiguous."""
    rows = p * cut(len(x), p)
    return x.contiguous() if rows == len(x) else torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


def _scatter(x: Tensor, group: Any) -> Tensor:
    p = dist.get_world_size(group)
    x = padded(x, p)
    out = x.new_empty(len(x) // p, *x.shape[1:])
    scatter_single(out, x, group=group)
    return out


def own_rows(x: Tensor, group: Any) -> Tensor:
    """Return this rank's piece of the rows x [T, ...], padded with zeros; without a group, x."""
    if group is None:
        return x
    p = dist.get_world_size(group)
    return padded(x, p).chunk(p)[dist.get_rank(group)].contiguous()


class _AddParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return _sum(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _AddGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return _sum(grad, ctx.group), None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows, group, partial):
        ctx.group, ctx.partial, ctx.size = group, partial, len(x) * dist.get_world_size(group)
        return _gather(x, rows, group)

    @staticmethod
    def backward(ctx, grad):
        if len(grad) < ctx.size:
            grad = torch.cat([grad, grad.new_zeros(ctx.size - len(grad), *grad.shape[1:])])
        return (_scatter if ctx.partial else own_rows)(grad, ctx.group), None, None, None


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.rows = group, len(x)
        return _scatter(x, group)

    @staticmethod
    def backward(ctx, grad):
        return _gather(grad, ctx.rows, ctx.group), None


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, receive, group):
        ctx.send, ctx.receive, ctx.group = send, receive, group
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return _ExchangeRows.apply(grad, ctx.receive, ctx.send, ctx.group), None, None, None


def add_parts(x: Tensor, group: Any) -> Tensor:
    """Return the all-reduced sum of the ranks' partial sums x; the gradient, equal on all ranks, passes unchanged."""
    return x if group is None else _AddParts.apply(x, group)


def add_gradients(x: Tensor, group: Any) -> Tensor:
    """Return x, which is equal on all ranks; the backward pass all-reduces the ranks' partial gradients."""
    return x if group is None else _AddGradients.apply(x, group)


def gather_rows(x: Tensor, rows: int, group: Any, *, partial: bool) -> Tensor:
    """Return the first `rows` rows of all ranks' pieces x; without a group, x. partial: True if the ranks' gradients are partial sums."""
    return x if group is None else _GatherRows.apply(x, rows, group, partial)


def scatter_rows(x: Tensor, group: Any) -> Tensor:
    """Return this rank's rows of the sum of all ranks' x [T, ...] (reduce-scatter), zero-padded; the backward pass all-gathers."""
    return x if group is None else _ScatterRows.apply(x, group)


def exchange_rows(x: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
    """Return the rows received in an all-to-all exchange, by sending rank. Of x, the first send[0] rows go to rank 0, and so on."""
    rows: Tensor = _ExchangeRows.apply(x, send, receive, group)
    return rows


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return x; its gradient is multiplied by `factor`."""
    return x if factor == 1 else _ScaleGradient.apply(x, factor)
