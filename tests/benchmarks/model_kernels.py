"""CPU kernels compared with torch's own operators in the same run.

    OMP_NUM_THREADS=1 PYTHONPATH=.pkg python tests/benchmarks/model_kernels.py

One thread, fp32, process CPU time, best of several; Puna and torch alternate.

    packed_vs_dense      time of torch's SDPA under a dense mask over Puna's attention, forward and backward: 8 documents
                         in 2048 tokens, 8 query and 4 key-value heads of 32; Puna's time includes making the mask's tiles
    linear_ce_vs_torch   time of torch.nn.functional.linear_cross_entropy (before 2.13: cross_entropy of the product) over
                         Puna's linear + cross-entropy, forward and backward: 2048 rows, width 256, vocabulary 8192
    rmsnorm_gb_s         add + RMSNorm, forward: bytes read and written (4 arrays) over time, 2048 rows of 1024
    swiglu_gb_s          SwiGLU, forward: 3 arrays, same shape
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from puna.kernels.attention import ForestMask, attention
from puna.kernels.linear_cross_entropy import linear_cross_entropy
from puna.kernels.rms_norm import add_rms_norm
from puna.kernels.swiglu import swiglu


def seconds(*functions: Callable[[], object], rounds: int = 7) -> list[float]:
    """Return the minimum process CPU seconds of each function; the functions alternate."""
    best = [float("inf")] * len(functions)
    for turn in range(rounds + 1):
        for index, function in enumerate(functions):
            started = time.process_time()
            function()
            if turn:  # the first call compiles and allocates
                best[index] = min(best[index], time.process_time() - started)
    return best


def packed_attention() -> dict[str, float]:
    T, H, G, K, documents = 2048, 8, 4, 32, 8
    q, k, v = (torch.randn(T, heads, K, requires_grad=True) for heads in (H, G, G))
    upstream = torch.randn(T, H, K)
    size = T // documents
    end = ((torch.arange(T) // size + 1) * size).to(torch.int32)
    dense = ForestMask.from_end(end).dense()

    def ours() -> object:
        return torch.autograd.grad(attention(q, k, v, ForestMask.from_end(end)), (q, k, v), upstream)

    def theirs() -> object:
        out = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=dense, enable_gqa=True)
        return torch.autograd.grad(out, (q, k, v), upstream.transpose(0, 1)[None])

    mine, other = seconds(ours, theirs)
    return {"packed_vs_dense": other / mine, "packed_ms": 1e3 * mine, "dense_sdpa_ms": 1e3 * other}


def linear_ce() -> dict[str, float]:
    N, D, V = 2048, 256, 8192
    x = torch.randn(N, D, requires_grad=True)
    w = (0.02 * torch.randn(V, D)).requires_grad_()
    targets, weights = torch.randint(0, V, (N,)), torch.full((N,), 1 / N)
    fused = getattr(F, "linear_cross_entropy", lambda x, w, targets: F.cross_entropy(F.linear(x, w), targets))
    mine, other = seconds(
        lambda: torch.autograd.grad(linear_cross_entropy(x, w, targets, weights), (x, w)),
        lambda: torch.autograd.grad(fused(x, w, targets), (x, w)),
    )
    return {"linear_ce_vs_torch": other / mine, "linear_ce_ms": 1e3 * mine, "torch_linear_ce_ms": 1e3 * other}


@torch.no_grad()
def bandwidths() -> dict[str, float]:
    rows, width = 2048, 1024
    x, y, weight = torch.randn(rows, width), torch.randn(rows, width), torch.ones(width)

    def plain_norm() -> object:
        total = x + y
        return F.rms_norm(total, (width,), weight, 1e-5), total

    sum_ = torch.empty_like(x)
    norm, torch_norm, gate, torch_gate, triad = seconds(
        lambda: add_rms_norm(x, y, weight, 1e-5), plain_norm, lambda: swiglu(x, y), lambda: F.silu(x) * y,
        lambda: torch.add(x, y, out=sum_), rounds=30,
    )  # fmt: skip
    array = 4 * rows * width / 1e9
    return {
        "rmsnorm_gb_s": 4 * array / norm, "torch_rmsnorm_gb_s": 4 * array / torch_norm,
        "swiglu_gb_s": 3 * array / gate, "torch_swiglu_gb_s": 3 * array / torch_gate,
        "triad_gb_s": 3 * array / triad,
    }  # fmt: skip


def figures() -> dict[str, float]:
    """Return all figures by name; a ratio is how many times faster Puna is than torch."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return packed_attention() | linear_ce() | bandwidths()


if __name__ == "__main__":
    print(json.dumps(figures()))
