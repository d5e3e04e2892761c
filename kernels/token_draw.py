"""Log-sum-exp of rows of logits, and one token per row, sampled by the inverse of the cumulative distribution.

Shapes: C rows, V vocabulary. The exponentials are summed once, in blocks; a draw walks over the blocks' sums and computes
one block's exponentials again. On CPU, training in fp32 uses the same loop, so equal logits give equal log-probabilities, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from puna.kernels.cpu.lazy_jit import Address, has_numba, strict_jit
from puna.kernels.cpu.loops import run_rows
from puna.kernels.operators import uses_triton

if has_numba():
    from puna.kernels.cpu.vectors import add, carray, exp, fill, fma, higher, load, pointer
    from puna.kernels.cpu.vectors import peak as peak_of
    from puna.kernels.cpu.vectors import total as total_of

NUMERICS = {"token_draw": 2}

LANES, BLOCK = 16, 128  # elements of a vector; tokens of a block, whose probabilities are summed together
LIKELIEST = -1.0  # in place of a uniform number: take the likeliest token (on a tie, the first)


def token_draw_reference(logits_CV: Tensor, scale_C: Tensor, uniforms_C: Tensor) -> Tensor:
    """Return, per row, the first token whose cumulative probability of softmax(logits * scale) exceeds `uniforms`; LIKELIEST: argmax."""
    p_CV = torch.softmax(logits_CV.double() * scale_C.double()[:, None], -1).cumsum(-1)
    drawn = (p_CV <= uniforms_C[:, None] * p_CV[:, -1:]).sum(-1)
    return torch.where(uniforms_C == LIKELIEST, logits_CV.argmax(-1), drawn)


# --- CPU -------------------------------------------------------------------------------------------------


@strict_jit
def _sum_loop(part: int, start: int, stop: int, V: int, logits: Address, scale: Any, peaks: Any, lse: Any, blocks: Any) -> None:
    """Fill rows of `peaks` [C] (largest logits), `lse` [C], and `blocks` [C, ceil(V / 128)] (block sums of e^((logit - peak) scale))."""
    for row in range(start, stop):
        at, turn = logits + 4 * row * V, scale[row]
        z, whole = carray(pointer(at), (V,)), V // LANES * LANES
        tops = fill(z[0])
        for i in range(0, whole, LANES):
            tops = higher(load(at + 4 * i), tops)
        peak = peak_of(tops)
        for i in range(whole, V):
            peak = max(peak, z[i])
        steep, base, total = fill(turn), fill(-peak * turn), 0.0
        for block in range(blocks.shape[1]):
            first, last = block * BLOCK, min((block + 1) * BLOCK, V)
            sums = fill(np.float32(0))
            for i in range(first, last - LANES + 1, LANES):
                sums = add(exp(fma(load(at + 4 * i), steep, base)), sums)
            inside = total_of(sums)
            for i in range(last // LANES * LANES, last):
                inside += _power(z[i], peak, turn)
            blocks[row, block] = inside
            total += inside
        peaks[row], lse[row] = peak, peak * turn + np.float32(np.log(total))


@strict_jit
def _power(z: Any, peak: Any, scale: Any) -> Any:
    x = (z - peak) * scale
    return np.float32(0) if x < np.float32(-87) else np.float32(np.exp(x))


@strict_jit
def _draw_loop(
    part: int, start: int, stop: int, V: int, logits: Address, scale: Any, peaks: Any, lse: Any, blocks: Any, uniforms: Any, tokens: Any
) -> None:
    _sum_loop(part, start, stop, V, logits, scale, peaks, lse, blocks)
    for row in range(start, stop):
        if not np.isfinite(lse[row]):
            continue
        z, peak = carray(pointer(logits + 4 * row * V), (V,)), peaks[row]
        if uniforms[row] == LIKELIEST:
            found = 0
            while z[found] != peak:
                found += 1
            tokens[row] = found
            continue
        total = 0.0
        for block in range(blocks.shape[1]):
            total += blocks[row, block]
        wanted, block = uniforms[row] * total, 0
        last = blocks.shape[1] - 1
        while blocks[row, last] == 0:  # if rounding leaves no block above, take the last with a positive sum
            last -= 1
        while block < last and wanted >= blocks[row, block]:
            wanted -= blocks[row, block]
            block += 1
        first, end = block * BLOCK, min((block + 1) * BLOCK, V)
        found, below = -1, 0.0
        for i in range(first, end):
            e = _power(z[i], peak, scale[row])
            if e > 0:
                found = i
                below += e
                if below > wanted:
                    break
        tokens[row] = found


def log_sum_exp(logits_CV: Tensor, scale_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ([C] log-sum-exps of logits * scale, [C] peaks, [C, blocks] sums of e^((logit - peak) scale)), fp32; needs `uses_loop`."""
    C, V = logits_CV.shape
    peaks, lse = torch.empty(C), torch.empty(C)
    blocks = torch.empty(C, -(-V // BLOCK))
    arrays = [t.numpy() for t in (scale_C, peaks, lse, blocks)]
    run_rows(_sum_loop, C, V, V, logits_CV.data_ptr(), *arrays)
    return lse, peaks, blocks


def uses_loop(logits_CV: Tensor) -> bool:
    """True if numba's loops can take these logits: contiguous fp32 on CPU, with numba installed, outside Triton's interpreter."""
    whole = logits_CV.dtype == torch.float32 and logits_CV.is_cpu and logits_CV.is_contiguous()
    return whole and has_numba() and not uses_triton(logits_CV)


# --- portable --------------------------------------------------------------------------------------------


def _portable(logits_CV: Tensor, scale_C: Tensor, uniforms_C: Tensor) -> tuple[Tensor, Tensor]:
    z_CV = logits_CV.to(torch.float64 if logits_CV.dtype == torch.float64 else torch.float32) * scale_C[:, None].to(logits_CV.device)
    lse = z_CV.logsumexp(1)
    uniforms = uniforms_C.to(logits_CV.device)
    drawn = invert((z_CV - lse[:, None]).exp_(), uniforms.clamp(min=0.0))
    return torch.where(uniforms == LIKELIEST, z_CV.argmax(1), drawn), lse


def invert(p_CV: Tensor, uniforms_C: Tensor) -> Tensor:
    """Return, per row, the first entry whose cumulative weight exceeds the row's uniform number times the row's total weight."""
    C, V = p_CV.shape  # a row with a NaN gives any entry
    blocks = torch.nn.functional.pad(p_CV, (0, -V % BLOCK)).view(C, -1, BLOCK)
    passed = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    targets = uniforms_C[:, None] * passed[:, -1:]
    block = _first_above(passed, targets)
    inside = blocks.gather(1, block[..., None].expand(C, 1, BLOCK))[:, 0].double()
    below = passed.gather(1, block) - inside.sum(-1, keepdim=True)
    return (block * BLOCK + _first_above(inside.cumsum(-1), targets - below))[:, 0].clamp_(max=V - 1)


def _first_above(cumulative: Tensor, wanted: Tensor) -> Tensor:
    """Return [C, 1]: the index of the first entry above `wanted`; if rounding leaves none, of the last entry with a positive weight."""
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(cumulative, wanted, right=True), last).clamp_(max=cumulative.shape[-1] - 1)


# --- façade ----------------------------------------------------------------------------------------------


def token_draw(logits_CV: Tensor, scale_C: Tensor, uniforms_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return ([C] int64 tokens of softmax(logits * scale), [C] log-sum-exps of logits * scale), without autograd.

    `scale` [C], fp32 on CPU: one over the temperature. `uniforms` [C], fp64 on CPU: numbers in [0, 1), or LIKELIEST for the row's
    likeliest token. If a row's log-sum-exp is not finite, the row's token is arbitrary."""
    if not uses_loop(logits_CV):
        return _portable(logits_CV, scale_C, uniforms_C)
    C, V = logits_CV.shape
    tokens, lse = torch.zeros(C, dtype=torch.int64), torch.empty(C)
    peaks, blocks = np.empty(C, np.float32), np.empty((C, -(-V // BLOCK)), np.float32)
    arguments = (V, logits_CV.data_ptr(), scale_C.numpy(), peaks, lse.numpy(), blocks, uniforms_C.numpy(), tokens.numpy())
    run_rows(_draw_loop, C, V, *arguments)
    return tokens, lse
