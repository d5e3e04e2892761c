"""The layers of a dense decoder over pages, four loops a layer: what a step of generation computes in fp32 on a CPU.

A step of few tokens has little to multiply, and a dozen operators a layer cost more in calls than in arithmetic. Here a layer is
norm, projections, rotation, append and attention by key-value head; the output projection with the residual; norm and SwiGLU by
panels of columns; the down projection with the residual. Each is made of the routines by row that the layer's operators are made
of, so a token has the bits that it has in an exact pass of those (`exact.py`), and there is no second copy of the weights.
Projections may be in INT8 with a scale for each output; then products are in INT8, too, with the bits of `quantized_linear`.

Shapes: N tokens, D model width, F feed-forward width, H query heads, G key-value heads, R = H / G, K head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from puna.kernels.cpu.lazy import has_numba, numba_jit
from puna.kernels.cpu.loops import parts, run_rows
from puna.kernels.kv_append import append_head
from puna.kernels.linear import PANEL, products
from puna.kernels.paged_attention import PAGE, PagedPlan, attend_head, places
from puna.kernels.rms_norm import norm_row
from puna.kernels.rope import rotate_head
from puna.kernels.swiglu import swiglu_row

if has_numba():
    from puna.kernels.cpu.int8_products import AVAILABLE, products8, quantize_row, row_bytes
    from puna.kernels.cpu.vectors import LANES, add, load_first, store_first

NUMERICS = {"DenseLayer": 1, "DenseLayers": 1}


@dataclass(frozen=True, eq=False)
class DenseLayer:
    """A layer's weights, dense and on CPU; norms [D] and [K], projections [outputs, inputs]. All are fp32, or the projections INT8,
    each with its scales [outputs] fp32."""

    input_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    post_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    o_scale: Tensor | None = None
    gate_scale: Tensor | None = None
    up_scale: Tensor | None = None
    down_scale: Tensor | None = None


PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
ATTENTION: tuple[str, ...] = ("input_norm", "q", "k", "v", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm")
ATTENTION += ("q_scale", "k_scale", "v_scale", "q_sums", "k_sums", "v_sums")
FEW_TOKENS = 8  # up to so many, one call computes all layers
REST: tuple[str, ...] = ("o", "o_bias", "post_norm", "gate", "up", "down")
REST += ("o_scale", "gate_scale", "up_scale", "down_scale", "o_sums", "gate_sums", "up_sums", "down_sums")


@numba_jit
def _multiply(T: Any, N: Any, D: Any, first: Any, x: Any, x8: Any, w: Any, scales: Any, sums: Any, y: Any, y_row: Any) -> None:
    """y [T, N] = x w^T for the outputs from `first` on, in INT8 where there are scales: x8 is x by `quantize_row`."""
    if scales:
        products8(T, N, D, x8, w + first * D, scales + 4 * first, sums + 4 * first, y, y_row)
    else:
        products(T, N, D, x, 4 * D, w + 4 * first * D, y, y_row)


@numba_jit
def _to_int8(T: Any, D: Any, x: Any, to: Any) -> None:
    row = (D + 63) // 64 * 64 + 4 * LANES
    for t in range(T):
        quantize_row(D, x + 4 * t * D, to + t * row)


@numba_jit
def _add_row(width: Any, to: Any, other: Any) -> None:
    for i in range(0, width, LANES):
        store_first(to + 4 * i, add(load_first(to + 4 * i, width - i), load_first(other + 4 * i, width - i)), width - i)


@numba_jit
def _finish_head(K: Any, x: Any, bias: Any, norm: Any, eps: Any, cos: Any, sin: Any) -> None:
    """Bias, norm and rotation of one query or key, in place; address 0: none."""
    if bias:
        _add_row(K, x, bias)
    if norm:
        norm_row(K, x, 0, norm, eps, 0, x)
    rotate_head(K // 2, x, cos, sin, 1.0, x)


@numba_jit
def _attention_loop(
    part: Any, start: Any, stop: Any, N: Any, D: Any, G: Any, R: Any, K: Any, eps: Any, x: Any, weights: Any, cos: Any, sin: Any,
    k_pages: Any, v_pages: Any, k_head: Any, v_head: Any, tables: Any, W: Any, sequence: Any, position: Any,
    stretches: Any, begins: Any, window: Any, scale: Any, small: Any, small_part: Any, normed: Any, q: Any, kv: Any,
    walk: Any, packed: Any, scores: Any, out: Any,
) -> None:  # fmt: skip
    """Key-value heads start .. stop - 1 with their queries. `cos`, `sin` are tables by position."""
    input_norm, q_w, k_w, v_w, q_bias, k_bias, v_bias, q_norm, k_norm, q_scale, k_scale, v_scale, q_sums, k_sums, v_sums = weights
    h8, h, kv = small + part * small_part, normed + 4 * part * N * D, kv + 8 * part * N * K
    for n in range(N):
        norm_row(D, x + 4 * n * D, 0, input_norm, eps, 0, h + 4 * n * D)
    if q_scale:
        _to_int8(N, D, h, h8)
    wide, row = 4 * scores.shape[2], 4 * G * R * K
    for g in range(start, stop):
        keys, values = k_pages + g * k_head, v_pages + g * v_head
        _multiply(N, R * K, D, g * R * K, h, h8, q_w, q_scale, q_sums, q + 4 * g * R * K, row)
        _multiply(N, K, D, g * K, h, h8, k_w, k_scale, k_sums, kv, 8 * K)
        _multiply(N, K, D, g * K, h, h8, v_w, v_scale, v_sums, kv + 4 * K, 8 * K)
        for n in range(N):
            c, s = cos + 2 * position[n] * K, sin + 2 * position[n] * K
            for r in range(g * R, (g + 1) * R):
                _finish_head(K, q + n * row + 4 * r * K, q_bias + 4 * r * K if q_bias else 0, q_norm, eps, c, s)
            key = kv + 8 * n * K
            _finish_head(K, key, k_bias + 4 * g * K if k_bias else 0, k_norm, eps, c, s)
            if v_bias:
                _add_row(K, key + 4 * K, v_bias + 4 * g * K)
            place = tables[W * sequence[n] + position[n] // PAGE] * PAGE + position[n] % PAGE
            append_head(place, K, K, keys, values, key, key + 4 * K)
        for tile in range(len(begins) - 1):
            attend_head(
                g, tile, G, R, K, K, q, keys, values, tables, W, sequence, position, stretches, begins, window, scale,
                walk[part], packed[part].ctypes.data, scores[part].ctypes.data, wide, out,
            )  # fmt: skip


@numba_jit
def _add_product_loop(
    part: Any, start: Any, stop: Any, N: Any, outputs: Any, inputs: Any, a: Any, w: Any, scale: Any, sums: Any, bias: Any, small: Any,
    small_part: Any, scratch: Any, x: Any,
) -> None:  # fmt: skip
    """Panels start .. stop - 1 of x += a w^T + bias."""
    a8 = small + part * small_part
    if scale:
        _to_int8(N, inputs, a, a8)
    y = scratch + 4 * part * N * PANEL
    for first in range(start * PANEL, min(stop * PANEL, outputs), PANEL):
        width = min(PANEL, outputs - first)
        _multiply(N, width, inputs, first, a, a8, w, scale, sums, y, 4 * PANEL)
        for n in range(N):
            if bias:
                _add_row(width, y + 4 * n * PANEL, bias + 4 * first)
            _add_row(width, x + 4 * (n * outputs + first), y + 4 * n * PANEL)


@numba_jit
def _swiglu_loop(
    part: Any, start: Any, stop: Any, N: Any, D: Any, F: Any, eps: Any, x: Any, norm: Any, gate: Any, gate_scale: Any, gate_sums: Any,
    up: Any, up_scale: Any, up_sums: Any, small: Any, small_part: Any, normed: Any, scratch: Any, out: Any,
) -> None:  # fmt: skip
    """Panels start .. stop - 1 of out = SwiGLU of the normed x."""
    h, y = normed + 4 * part * N * D, scratch + 8 * part * N * PANEL
    for n in range(N):
        norm_row(D, x + 4 * n * D, 0, norm, eps, 0, h + 4 * n * D)
    h8 = small + part * small_part
    if gate_scale:
        _to_int8(N, D, h, h8)
    for first in range(start * PANEL, min(stop * PANEL, F), PANEL):
        width = min(PANEL, F - first)
        _multiply(N, width, D, first, h, h8, gate, gate_scale, gate_sums, y, 8 * PANEL)
        _multiply(N, width, D, first, h, h8, up, up_scale, up_sums, y + 4 * PANEL, 8 * PANEL)
        for n in range(N):
            swiglu_row(width, y + 8 * n * PANEL, y + (8 * n + 4) * PANEL, out + 4 * (n * F + first))


@numba_jit
def _norm_loop(part: Any, start: Any, stop: Any, D: Any, x: Any, norm: Any, eps: Any) -> None:
    for n in range(start, stop):
        norm_row(D, x + 4 * n * D, 0, norm, eps, 0, x + 4 * n * D)


@numba_jit
def _layers_loop(
    N: Any, D: Any, G: Any, R: Any, K: Any, eps: Any, x: Any, F: Any, weights: Any, pages: Any, windows: Any, cos: Any, sin: Any,
    tables: Any, W: Any, sequence: Any, position: Any, stretches: Any, begins: Any, scale: Any, small: Any, small_part: Any,
    normed: Any, q: Any, kv: Any, walk: Any, packed: Any, scores: Any, seen: Any, inner: Any, panel: Any,
) -> None:  # fmt: skip
    """All layers on one thread, for few tokens: a loop's call from Python takes 4 us, a sixth of its work for one token. With many
    tokens the loops are slower here than called one by one, by 8 % at 64."""
    for i in range(len(weights)):
        w, (k_pages, v_pages, k_head, v_head) = weights[i], pages[i]
        _attention_loop(
            0, 0, G, N, D, G, R, K, eps, x,
            (w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11], w[12], w[13], w[14]), cos, sin,
            k_pages, v_pages, k_head, v_head, tables, W, sequence, position, stretches, begins, windows[i], scale,
            small, small_part, normed, q, kv, walk, packed, scores, seen,
        )  # fmt: skip
        o, o_bias, norm, gate, up, down, o_scale, gate_scale, up_scale, down_scale, o_sums, gate_sums, up_sums, down_sums = (
            w[15], w[16], w[17], w[18], w[19], w[20], w[21], w[22], w[23], w[24], w[25], w[26], w[27], w[28],
        )  # fmt: skip
        _add_product_loop(0, 0, -(-D // PANEL), N, D, G * R * K, seen, o, o_scale, o_sums, o_bias, small, small_part, panel, x)
        _swiglu_loop(
            0, 0, -(-F // PANEL), N, D, F, eps, x, norm, gate, gate_scale, gate_sums, up, up_scale, up_sums, small, small_part, normed,
            panel, inner,
        )  # fmt: skip
        _add_product_loop(0, 0, -(-D // PANEL), N, D, F, inner, down, down_scale, down_sums, 0, small, small_part, panel, x)


class DenseLayers:
    """The layers with room for what stands between their loops, which is kept from step to step.

    Weights may change in place, not their places; those in INT8 do not change. ValueError where one is not dense, on CPU and of its type.
    """

    def __init__(self, layers: Sequence[DenseLayer], norm: Tensor, heads: int, groups: int, head_dim: int, eps: float) -> None:
        for layer in layers:
            for field in fields(layer):
                weight = getattr(layer, field.name)
                small = field.name in PROJECTIONS and getattr(layer, f"{field.name}_scale") is not None
                dtype = torch.int8 if small and AVAILABLE else torch.float32
                if weight is not None and not (weight.dtype == dtype and weight.is_cpu and weight.is_contiguous()):
                    raise ValueError(f"{field.name} is {weight.dtype} on {weight.device}: the loops need dense {dtype} on CPU")
        self.layers, self.norm, self.F, self.eps = list(layers), norm, len(layers[0].gate), eps
        self.G, self.R, self.K = groups, heads // groups, head_dim
        names = [field.name for field in fields(DenseLayer)]
        found = [{name: _address(getattr(layer, name)) for name in names} for layer in layers]
        self._sums = [{f"{name}_sums": _row_sums(layer, name) for name in PROJECTIONS} for layer in layers]
        for each, sums in zip(found, self._sums, strict=True):
            each |= {name: _address(one) for name, one in sums.items()}
        self._small = any(layer.q_scale is not None for layer in layers)
        self._addresses = [(tuple(each[name] for name in ATTENTION), tuple(each[name] for name in REST)) for each in found]
        self._table = np.array([[each[name] for name in (*ATTENTION, *REST)] for each in found])
        self._room: dict[str, Tensor] = {}
        self._pages: Sequence[tuple[Tensor, Tensor]] | None = None

    def _space(self, **sizes: int) -> list[int]:
        """Addresses of room for so many numbers."""
        for name, size in sizes.items():
            if name not in self._room or self._room[name].numel() < size:
                self._room[name] = torch.empty(size)
        return [self._room[name].data_ptr() for name in sizes]

    def _stores(self, pages: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[int, int, int, int]]:
        """Return the addresses of each layer's pages, which stay the same from step to step."""
        if self._pages is not pages:
            self._pages, self._found = pages, [places(*layer) for layer in pages]
        return self._found

    def __call__(
        self, x_ND: Tensor, cos: Tensor, sin: Tensor, pages: Sequence[tuple[Tensor, Tensor]], plan: PagedPlan, windows: Sequence[int | None]
    ) -> None:
        """Send embedded tokens x through all layers and the final norm, in place; their keys and values go into the pages of each layer.

        `cos`, `sin` [positions, K / 2] are tables by position id. `pages` are of `new_pages`, fp32.
        """
        (N, D), F, G, R, K = x_ND.shape, self.F, self.G, self.R, self.K
        threads, x = torch.get_num_threads(), x_ND.data_ptr()
        normed, kv, q, seen, inner, panel = self._space(
            normed=threads * N * D, kv=threads * 2 * N * K, q=N * G * R * K, seen=N * G * R * K, inner=N * F, panel=threads * 2 * N * PANEL
        )
        shape, views = (N, D, G, R, K, self.eps, x), (cos.data_ptr(), sin.data_ptr())
        small_part = N * row_bytes(max(D, F, G * R * K)) if self._small else 0
        (small,) = self._space(small=threads * small_part // 4)
        scratch = (K**-0.5, small, small_part, normed, q, kv, *plan.scratch(R, -(-K // PAGE) * PAGE), seen)
        # Vectors of a panel or head, against which waking a thread is weighed.
        work, heads = N * D * PANEL // LANES, N * K * (R + 2) * (D + PAGE * plan.tables.shape[1]) // LANES
        stores, reach = self._stores(pages), [window or 1 << 30 for window in windows]
        if N <= FEW_TOKENS and max(parts(G, heads), parts(-(-F // PANEL), 2 * work)) == 1:
            _layers_loop(*shape, F, self._table, np.array(stores), np.array(reach), *views, *plan.arrays, *scratch, inner, panel)
            _norm_loop(0, 0, N, D, x, self.norm.data_ptr(), self.eps)
            return
        for (attention, rest), store, window in zip(self._addresses, stores, reach, strict=True):
            o, o_bias, norm, gate, up, down, o_scale, gate_scale, up_scale, down_scale, o_sums, gate_sums, up_sums, down_sums = rest
            gates = (norm, gate, gate_scale, gate_sums, up, up_scale, up_sums, small, small_part, normed, panel, inner)
            run_rows(_attention_loop, G, heads, *shape, attention, *views, *store, *plan.arrays, window, *scratch)
            places_of = (small, small_part, panel, x)
            run_rows(_add_product_loop, -(-D // PANEL), work, N, D, G * R * K, seen, o, o_scale, o_sums, o_bias, *places_of)
            run_rows(_swiglu_loop, -(-F // PANEL), 2 * work, N, D, F, self.eps, x, *gates)
            run_rows(_add_product_loop, -(-D // PANEL), work, N, D, F, inner, down, down_scale, down_sums, 0, *places_of)
        run_rows(_norm_loop, N, D // LANES, D, x, self.norm.data_ptr(), self.eps)


def _row_sums(layer: DenseLayer, name: str) -> Tensor | None:
    """[outputs] sums of a projection's rows, where it is in INT8."""
    weight: Tensor = getattr(layer, name)
    return weight.sum(1, dtype=torch.int32) if weight.dtype == torch.int8 else None


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
