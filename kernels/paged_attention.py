"""One new token per sequence against keys and values in pages, where sequences may share what came before.

Shapes: B sequences, H query heads, G key-value heads, R = H / G, K head width; P pages of S tokens, W items of
work, C partial results.

The context of a batch is a list of runs: tokens in pages that one or several neighbouring sequences see. A
prompt with many answers is one run for all of them and a short one for each, so its keys are read once for the
batch (cascade inference); runs may nest. Long runs are cut, every piece gives a partial softmax, and the pieces
of a sequence are merged by their log-sum-exps (FlashDecoding).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from puna.kernels.lazy import triton_jit
from puna.kernels.operators import operator, wide

if TYPE_CHECKING:
    import triton.language as tl

SPLIT = 1024  # tokens of one piece of a run
ROWS, TOKENS = 16, 64  # queries and keys that a program multiplies at once
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Run:
    """Sequences first .. first + count - 1 see the first `tokens` tokens of these pages."""

    first: int
    count: int
    pages: Sequence[int]
    tokens: int


@dataclass(frozen=True, eq=False)
class DecodePlan:
    """`items` [W, 6] int32: first sequence, sequences, where its pages begin in `pages`, first token, end, first
    partial result; `parts` [B, most] int32: each sequence's partial results, -1 where it has fewer."""

    items: Tensor
    pages: Tensor
    parts: Tensor

    @staticmethod
    def from_runs(runs: Sequence[Run], sequences: int, page_size: int, device: torch.device | str = "cpu") -> DecodePlan:
        """Cut the runs into items. Raises ValueError for a run that its pages cannot hold and a sequence without any."""
        items: list[tuple[int, int, int, int, int, int]] = []
        pages: list[int] = []
        slot = 0
        parts: list[list[int]] = [[] for _ in range(sequences)]
        for number, run in enumerate(runs):
            if not (run.first >= 0 and run.count >= 1 and run.first + run.count <= sequences):
                raise ValueError(f"run {number} is of sequences {run.first} to {run.first + run.count - 1}, of {sequences}")
            if not 1 <= run.tokens <= len(run.pages) * page_size:
                raise ValueError(f"run {number} has {run.tokens} tokens in {len(run.pages)} pages of {page_size}")
            for start in range(0, run.tokens, SPLIT):
                items.append((run.first, run.count, len(pages), start, min(start + SPLIT, run.tokens), slot))
                for sequence in range(run.count):
                    parts[run.first + sequence].append(slot + sequence)
                slot += run.count
            pages.extend(run.pages)
        if not all(parts):
            raise ValueError(f"sequence {parts.index([])} is in no run: it must see at least one token")
        most = max(map(len, parts), default=0)
        padded = [row + [-1] * (most - len(row)) for row in parts]
        made = (torch.tensor(items).view(-1, 6), torch.tensor(pages), torch.tensor(padded).view(sequences, most))
        return DecodePlan(*(t.to(device, torch.int32) for t in made))


def paged_attention_reference(q_BHK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor, runs: Sequence[Run]) -> Tensor:
    """softmax(q k^T / sqrt(K)) v over all tokens of a sequence's runs, one sequence at a time. Returns [B, H, K]."""
    R = q_BHK.shape[1] // k_PSGK.shape[2]
    out = []
    for sequence, q_HK in enumerate(q_BHK):
        seen = [run for run in runs if run.first <= sequence < run.first + run.count]
        k_nHK, v_nHK = (
            torch.cat([x[list(run.pages)].flatten(0, 1)[: run.tokens] for run in seen]).repeat_interleave(R, 1) for x in (k_PSGK, v_PSGK)
        )
        p_Hn = (torch.einsum("hk,nhk->hn", q_HK, k_nHK) / math.sqrt(q_HK.shape[-1])).softmax(-1)
        out.append(torch.einsum("hn,nhk->hk", p_Hn, v_nHK))
    return torch.stack(out)


# --- portable --------------------------------------------------------------------------------------------


def _attend(q_BHK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor, items: Tensor, pages: Tensor, parts: Tensor) -> Tensor:
    _, H, K = q_BHK.shape
    S, G = k_PSGK.shape[1:3]
    high = wide(q_BHK.dtype)
    partial, logs = [], []
    for first, count, at, start, stop, _ in items.tolist():
        page = pages[at + start // S : at + -(-stop // S)].long()
        cut = slice(start % S, start % S + stop - start)
        k_GnK, v_GnK = (x[page].flatten(0, 1)[cut].transpose(0, 1).to(high) for x in (k_PSGK, v_PSGK))
        q_GmK = (q_BHK[first : first + count].to(high) * K**-0.5).view(count, G, -1, K).transpose(0, 1).reshape(G, -1, K)
        scores_Gmn = torch.bmm(q_GmK, k_GnK.transpose(1, 2))
        logs.append(scores_Gmn.logsumexp(-1).view(G, count, -1).transpose(0, 1).reshape(count, H))
        out_GmK = torch.bmm(torch.softmax(scores_Gmn, -1, out=scores_Gmn), v_GnK)
        partial.append(out_GmK.view(G, count, -1, K).transpose(0, 1).reshape(count, H, K))
    outs_CHK, logs_CH = torch.cat(partial), torch.cat(logs)
    logs_BcH = logs_CH[parts.long()].masked_fill(parts[..., None] < 0, -math.inf)
    return torch.einsum("bch,bchk->bhk", logs_BcH.softmax(1), outs_CHK[parts.long()]).to(q_BHK.dtype)


# --- Triton ----------------------------------------------------------------------------------------------


@triton_jit
def _piece_kernel(  # type: ignore[no-untyped-def]
    q, k, v, items, pages, partial, logs, scale, q_token, q_head, page, token, head_stride,
    S: tl.constexpr, H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One item, one key-value head, M of its queries: (sequence, head of the group) pairs are the rows."""
    item = items + 6 * tl.program_id(0)
    group = tl.program_id(1)
    first = tl.load(item)
    count = tl.load(item + 1)
    pages += tl.load(item + 2)
    start = tl.load(item + 3)
    stop = tl.load(item + 4)
    slot = tl.load(item + 5)
    row = tl.program_id(2) * M + tl.arange(0, M)
    inside = row < count * R
    sequence = row // R
    head = group * R + row % R
    column = tl.arange(0, BLOCK)
    at = q + (first + sequence)[:, None].to(tl.int64) * q_token + head[:, None] * q_head + column[None, :]
    q_MK = tl.load(at, inside[:, None] & (column[None, :] < K), 0.0)
    k += group * head_stride
    v += group * head_stride
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BLOCK], tl.float32)
    for begin in range(start, stop, N):
        n = begin + tl.arange(0, N)
        where = tl.load(pages + n // S, n < stop, 0).to(tl.int64) * page + (n % S) * token
        seen = (n < stop)[:, None] & (column[None, :] < K)
        k_NK = tl.load(k + where[:, None] + column[None, :], seen, 0.0)
        s = tl.dot(q_MK, tl.trans(k_NK), input_precision=PRECISION) * scale
        s = tl.where((n < stop)[None, :], s, float("-inf"))  # each block has at least one token, so maxima are finite
        higher = tl.maximum(peak, tl.max(s, 1))
        p = tl.exp2(s - higher[:, None])
        decay = tl.exp2(peak - higher)
        total = total * decay + tl.sum(p, 1)
        v_NK = tl.load(v + where[:, None] + column[None, :], seen, 0.0)
        acc = tl.dot(p.to(v_NK.dtype), v_NK, acc * decay[:, None], input_precision=PRECISION)
        peak = higher
    place = (slot + sequence).to(tl.int64) * H + head
    tl.store(partial + place[:, None] * K + column[None, :], acc / total[:, None], inside[:, None] & (column[None, :] < K))
    tl.store(logs + place, peak + tl.log2(total), inside)


@triton_jit
def merge_kernel(partial, logs, parts, out, most, H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A sequence's pieces, one head, weighted by their shares of the softmax."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    peak = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK], tl.float32)
    for i in range(most):
        slot = tl.load(parts + sequence * most + i).to(tl.int64)
        log = tl.load(logs + slot * H + head, slot >= 0, float("-inf"))
        piece = tl.load(partial + (slot * H + head) * K + column, (slot >= 0) & (column < K), 0.0)
        higher = tl.maximum(peak, log)  # the first piece of a sequence exists, so this is finite
        share = tl.exp2(log - higher)
        decay = tl.exp2(peak - higher)
        total = total * decay + share
        acc = acc * decay + piece * share
        peak = higher
    tl.store(out + (sequence * H + head) * K + column, (acc / total).to(out.dtype.element_ty), column < K)


def _attend_triton(q_BHK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor, items: Tensor, pages: Tensor, parts: Tensor) -> Tensor:
    q, k, v = q_BHK.contiguous(), k_PSGK.contiguous(), v_PSGK.contiguous()
    (B, H, K), (S, G) = q.shape, k.shape[1:3]
    R = H // G
    slots = B * parts.shape[1]  # at least as many as there are: known without asking the device
    partial = torch.empty(slots, H, K, dtype=torch.float32, device=q.device)
    logs = torch.empty(slots, H, dtype=torch.float32, device=q.device)
    out = torch.empty_like(q)
    block = max(16, 1 << (K - 1).bit_length())
    exact = q.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    _piece_kernel[(len(items), G, -(-B * R // ROWS))](
        q, k, v, items, pages, partial, logs, K**-0.5 * LOG2_E, *q.stride()[:2], *k.stride()[:3],
        S=S, H=H, R=R, K=K, BLOCK=block, M=ROWS, N=TOKENS, PRECISION="ieee" if exact else "tf32", num_warps=4, num_stages=3,
    )  # fmt: skip
    merge_kernel[(B, H)](partial, logs, parts, out, parts.shape[1], H=H, K=K, BLOCK=block, num_warps=1)
    return out


# --- façade ----------------------------------------------------------------------------------------------


_paged_attention = operator(
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor items, Tensor pages, Tensor parts) -> Tensor",
    _attend, _attend_triton, lambda q, *_: q.new_empty(q.shape),
)  # fmt: skip


def paged_attention(q_BHK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor, plan: DecodePlan) -> Tensor:
    """softmax(q k^T / sqrt(K)) v over each sequence's runs, without autograd. Returns [B, H, K] in q's dtype."""
    (B, H, K), G = q_BHK.shape, k_PSGK.shape[2]
    if k_PSGK.shape != v_PSGK.shape or k_PSGK.shape[3] != K or H % G or len(plan.parts) != B:
        raise ValueError(
            f"q {list(q_BHK.shape)}, pages {list(k_PSGK.shape)}, {list(v_PSGK.shape)}, a plan of {len(plan.parts)}: they do not fit"
        )
    return _paged_attention(q_BHK, k_PSGK, v_PSGK, plan.items, plan.pages, plan.parts) if B else q_BHK
