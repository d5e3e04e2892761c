"""One new token per sequence against a cache of keys and values, with grouped queries.

Shapes: B sequences, H query heads, G key-value heads, R = H / G, W cached columns, K head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def cached_attention_reference(q_BHK: Tensor, k_BGWK: Tensor, v_BGWK: Tensor, bias_BW: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(K) + bias) v over the W columns. Returns [B, H, K]."""
    R = q_BHK.shape[1] // k_BGWK.shape[1]
    k_BHWK, v_BHWK = (x.repeat_interleave(R, dim=1) for x in (k_BGWK, v_BGWK))
    scores_BHW = torch.einsum("bhk,bhwk->bhw", q_BHK, k_BHWK) / math.sqrt(q_BHK.shape[-1])
    return torch.einsum("bhw,bhwk->bhk", (scores_BHW + bias_BW[:, None]).softmax(-1), v_BHWK)


def cached_attention(q_BHK: Tensor, k_BGWK: Tensor, v_BGWK: Tensor, bias_BW: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(K) + bias) v over the W columns, without autograd. Returns [B, H, K].

    The keys and values may be slices of a longer cache. `bias_BW` is 0 where sequence b may look and -inf
    where not; each sequence must see at least one column.
    """
    B, H, K = q_BHK.shape
    G = k_BGWK.shape[1]
    q = (q_BHK * K**-0.5).view(B * G, H // G, K)
    scores = torch.bmm(q, k_BGWK.flatten(0, 1).transpose(1, 2))
    scores.view(B, H, -1).add_(bias_BW[:, None])
    return torch.bmm(torch.softmax(scores, -1, out=scores), v_BGWK.flatten(0, 1)).view(B, H, -1)
