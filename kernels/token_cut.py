"""Rows of probabilities cut to the likeliest tokens: top-k, then top-p, then min-p.

Shapes: S rows, V vocabulary, N candidate tokens. The likeliest tokens are tried first; a distribution too flat for them takes more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from puna.kernels.token_draw import invert

NUCLEUS = 128  # tokens tried first


class Cuts(Protocol):
    """The limits on a row's candidates: a number of tokens (0: all), a share of the probability, a ratio to the likeliest."""

    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...


def cut_draw(z_SV: Tensor, scale: Tensor, uniforms: Tensor, cuts: Sequence[Cuts]) -> Tensor:
    """Return [S] int64: a token of softmax(z * scale) after the cuts, by the inverse of the cumulative distribution, likeliest first.
    `scale` and `uniforms` in [0, 1) are [S]; they may be on CPU whatever z's device."""
    kept_SN, order_SN = _kept(torch.softmax(z_SV * scale.to(z_SV)[:, None], -1), cuts)
    return order_SN.gather(1, invert(kept_SN, uniforms.to(z_SV.device))[:, None])[:, 0]


def cut(p_SV: Tensor, cuts: Sequence[Cuts]) -> Tensor:
    """Return [S, V] in p's dtype: the distribution that the cuts leave."""
    kept_SN, order_SN = _kept(p_SV, cuts)
    whole = kept_SN.sum(-1, keepdim=True)
    return torch.zeros_like(p_SV).scatter_(1, order_SN, (kept_SN / whole).to(p_SV))


def _kept(p_SV: Tensor, cuts: Sequence[Cuts]) -> tuple[Tensor, Tensor]:
    """Return probabilities and ids of the tokens that each row keeps, likeliest first; zero beyond them."""
    limits = zip(*((row.top_k, row.top_p, row.min_p) for row in cuts), strict=True)
    top_k, top_p, min_p = (torch.tensor(limit, device=p_SV.device)[:, None] for limit in limits)
    V = p_SV.shape[-1]
    top_k = torch.where(top_k == 0, V, top_k)
    size = min(NUCLEUS, V)
    while True:
        p, order = p_SV.topk(size, sorted=True)
        p = p.double() * (torch.arange(size, device=p.device) < top_k)
        before = p.cumsum(-1) - p
        whole = torch.where(top_k < size, p.sum(-1, keepdim=True), 1.0)
        inside = (before < top_p * whole) & (p >= min_p * p[:, :1])
        if size == V or not bool(inside[:, -1].any()):
            return p * inside, order
        size = min(8 * size, V)
