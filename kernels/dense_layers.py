"""The layers of a dense decoder over a paged KV cache, in fp32 on a CPU, with four loops per layer.

In a step of few tokens, a dozen operators per layer cost more in calls than in arithmetic. Here a layer is (1) norm, projections,
rotation, append and attention by key-value head; (2) the output projection with the residual; (3) norm and SwiGLU by panels of
columns; (4) the down projection with the residual. The loops call the same row routines as the layer's operators. So results have the
bits of an exact pass (`exact.py`), and weights are not copied. Projections may be in INT8 with a scale for each output; products are then
in INT8, too, with the bits of `quantized_linear`.

A loop gets a step's numbers and addresses as a record `Step`, and those of the layers as records `LAYER`. Shapes: N tokens, D model width,
F feed-forward width, H query heads, G key-value heads, R = H / G, K head width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from puna.kernels.cpu.lazy_jit import Address, has_numba, strict_jit
from puna.kernels.cpu.loops import parts, run_rows
from puna.kernels.kv_append import append_head
from puna.kernels.linear import PANEL, products
from puna.kernels.paged_attention import PAGE, Arrays, PagedPlan, attend_head, places
from puna.kernels.rms_norm import norm_row
from puna.kernels.rope import rotate_head
from puna.kernels.swiglu import swiglu_row

if has_numba():
    from puna.kernels.cpu.int8_products import AVAILABLE, products8, quantize_row, row_bytes
    from puna.kernels.cpu.int8_products import STEP as STEP_BYTES
    from puna.kernels.cpu.vectors import LANES, add, load_first, store_first

NUMERICS = {"DenseLayer": 2, "DenseLayers": 2}


@dataclass(frozen=True, eq=False)
class DenseLayer:
    """A layer's fp32 weights, contiguous, on CPU: norms [D], [K]; projections [outputs, inputs], also INT8 with scales [outputs]."""

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


class Parts(NamedTuple):
    """Processes that share every layer's heads and inner columns (tensor parallelism). `add` sums x [N, D] over the processes, in place.
    `first`: True if this process adds its products to its input x, so that the sum has x once; the other processes add to zeros."""

    add: Callable[[Tensor], object]
    first: bool


PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
FEW_TOKENS = 8  # maximum tokens of a step whose layers one call computes
SUMS = tuple(f"{name}_sums" for name in PROJECTIONS)  # sums of the rows of INT8 projections
LAYER = np.dtype([(name, np.int64) for name in (*DenseLayer.__annotations__, *SUMS, "k_pages", "v_pages", "k_head", "v_head", "window")])
"""Record of the addresses of a layer's weights and pages, the bytes between the pages of two heads, and the layer's window in tokens."""


class Step(NamedTuple):
    """A step's shapes (see the module), and the addresses of x, rotary tables and scratch. `small_part`: bytes of `small` per thread."""

    N: int
    D: int
    F: int
    G: int
    R: int
    K: int
    eps: float
    scale: float
    x: Address
    cos: Address
    sin: Address
    small_part: int
    small: Address
    normed: Address
    kv: Address
    q: Address
    seen: Address
    inner: Address
    panel: Address


STEP = np.dtype([(name, np.float64 if kind is float else np.int64) for name, kind in get_type_hints(Step).items()])
Records = npt.NDArray[np.void]


@strict_jit
def _multiply(
    T: int, N: int, D: int, first: int, x: Address, x8: Address, w: Address, scales: Address, sums: Address, y: Address, y_row: int
) -> None:
    """Write y [T, N] = x w^T for the N outputs from `first` on. With scales, multiply in INT8; x8 is then x quantized by `quantize_row`."""
    if scales:
        products8(T, N, D, x8, w + first * D, scales + 4 * first, sums + 4 * first, y, y_row)
    else:
        products(T, N, D, x, 4 * D, w + 4 * first * D, y, y_row)


@strict_jit
def _to_int8(T: int, D: int, x: Address, to: Address) -> None:
    for t in range(T):
        quantize_row(D, x + 4 * t * D, to + t * ((D + STEP_BYTES - 1) // STEP_BYTES * STEP_BYTES + 4 * LANES))


@strict_jit
def _add_row(width: int, to: Address, other: Address) -> None:
    for i in range(0, width, LANES):
        store_first(to + 4 * i, add(load_first(to + 4 * i, width - i), load_first(other + 4 * i, width - i)), width - i)


@strict_jit
def _finish_head(K: int, x: Address, bias: Address, norm: Address, eps: float, cos: Address, sin: Address) -> None:
    """Add the bias, normalize and rotate one query or key, in place."""
    if bias:
        _add_row(K, x, bias)
    if norm:
        norm_row(K, x, 0, norm, eps, 0, x)
    rotate_head(K // 2, x, cos, sin, 1.0, x)


@strict_jit
def _attention_loop(part: int, start: int, stop: int, number: int, step: Any, layers: Any, plan: Arrays, room: Arrays) -> None:
    """Compute attention for key-value heads start .. stop - 1 of layer `number` into `seen`. `plan`: `PagedPlan.arrays`."""
    s, w = step[0], layers[number]
    tables, W, sequence, position, _, begins = plan
    walk, packed, scores = room
    N, D, G, R, K, eps = s.N, s.D, s.G, s.R, s.K, s.eps
    h8, h, kv, q = s.small + part * s.small_part, s.normed + 4 * part * N * D, s.kv + 8 * part * N * K, s.q
    q_bias, k_bias, v_bias, cos, sin = w.q_bias, w.k_bias, w.v_bias, s.cos, s.sin
    for n in range(N):
        norm_row(D, s.x + 4 * n * D, 0, w.input_norm, eps, 0, h + 4 * n * D)
    if w.q_scale:
        _to_int8(N, D, h, h8)
    wide, row = 4 * scores.shape[2], 4 * G * R * K
    for g in range(start, stop):
        keys, values = w.k_pages + g * w.k_head, w.v_pages + g * w.v_head
        _multiply(N, R * K, D, g * R * K, h, h8, w.q, w.q_scale, w.q_sums, q + 4 * g * R * K, row)
        _multiply(N, K, D, g * K, h, h8, w.k, w.k_scale, w.k_sums, kv, 8 * K)
        _multiply(N, K, D, g * K, h, h8, w.v, w.v_scale, w.v_sums, kv + 4 * K, 8 * K)
        for n in range(N):
            c, s_ = cos + 2 * position[n] * K, sin + 2 * position[n] * K
            for r in range(g * R, (g + 1) * R):
                _finish_head(K, q + n * row + 4 * r * K, q_bias + 4 * r * K if q_bias else 0, w.q_norm, eps, c, s_)
            key = kv + 8 * n * K
            _finish_head(K, key, k_bias + 4 * g * K if k_bias else 0, w.k_norm, eps, c, s_)
            if v_bias:
                _add_row(K, key + 4 * K, v_bias + 4 * g * K)
            place = tables[W * sequence[n] + position[n] // PAGE] * PAGE + position[n] % PAGE
            append_head(place, K, K, keys, values, key, key + 4 * K)
        for tile in range(len(begins) - 1):
            attend_head(
                g, tile, (G, R, K, K), q, keys, values, plan, w.window, s.scale,
                walk[part], packed[part].ctypes.data, scores[part].ctypes.data, wide, s.seen,
            )  # fmt: skip


@strict_jit
def _residual_loop(part: int, start: int, stop: int, number: int, down: bool, step: Any, layers: Any) -> None:
    """Compute the panels start .. stop - 1 of the output projection (with `down`: of the down projection), and add them to x."""
    s, layer = step[0], layers[number]
    N, outputs, a8 = s.N, s.D, s.small + part * s.small_part
    inputs, a, w, scale, sums, bias = s.G * s.R * s.K, s.seen, layer.o, layer.o_scale, layer.o_sums, layer.o_bias
    if down:
        inputs, a, w, scale, sums, bias = s.F, s.inner, layer.down, layer.down_scale, layer.down_sums, 0
    if scale:
        _to_int8(N, inputs, a, a8)
    y, x = s.panel + 4 * part * N * PANEL, s.x
    for first in range(start * PANEL, min(stop * PANEL, outputs), PANEL):
        width = min(PANEL, outputs - first)
        _multiply(N, width, inputs, first, a, a8, w, scale, sums, y, 4 * PANEL)
        for n in range(N):
            if bias:
                _add_row(width, y + 4 * n * PANEL, bias + 4 * first)
            _add_row(width, x + 4 * (n * outputs + first), y + 4 * n * PANEL)


@strict_jit
def _swiglu_loop(part: int, start: int, stop: int, number: int, step: Any, layers: Any) -> None:
    """Compute the panels start .. stop - 1 of the SwiGLU of the normalized x into `inner`."""
    s, w = step[0], layers[number]
    N, D, F, out = s.N, s.D, s.F, s.inner
    h, y, h8 = s.normed + 4 * part * N * D, s.panel + 8 * part * N * PANEL, s.small + part * s.small_part
    for n in range(N):
        norm_row(D, s.x + 4 * n * D, 0, w.post_norm, s.eps, 0, h + 4 * n * D)
    if w.gate_scale:
        _to_int8(N, D, h, h8)
    for first in range(start * PANEL, min(stop * PANEL, F), PANEL):
        width = min(PANEL, F - first)
        _multiply(N, width, D, first, h, h8, w.gate, w.gate_scale, w.gate_sums, y, 8 * PANEL)
        _multiply(N, width, D, first, h, h8, w.up, w.up_scale, w.up_sums, y + 4 * PANEL, 8 * PANEL)
        for n in range(N):
            swiglu_row(width, y + 8 * n * PANEL, y + (8 * n + 4) * PANEL, out + 4 * (n * F + first))


@strict_jit
def _norm_loop(part: int, start: int, stop: int, D: int, x: Address, norm: Address, eps: float) -> None:
    for n in range(start, stop):
        norm_row(D, x + 4 * n * D, 0, norm, eps, 0, x + 4 * n * D)


@strict_jit
def _layers_loop(step: Any, layers: Any, plan: Arrays, room: Arrays) -> None:
    """Compute all layers on one thread. This suits few tokens: calling a loop from Python costs 4 us, a sixth of the loop's time for one
    token. With many tokens, calling the loops one by one is faster: at 64 tokens, this function takes 8 % longer."""
    s = step[0]
    wide, inner = (s.D + PANEL - 1) // PANEL, (s.F + PANEL - 1) // PANEL
    for i in range(len(layers)):
        _attention_loop(0, 0, s.G, i, step, layers, plan, room)
        _residual_loop(0, 0, wide, i, False, step, layers)
        _swiglu_loop(0, 0, inner, i, step, layers)
        _residual_loop(0, 0, wide, i, True, step, layers)


class DenseLayers:
    """The layers and their scratch memory, which is kept from step to step. Weights may change in place but may not move; INT8 weights may
    not change. The constructor raises ValueError unless weights are contiguous, on CPU, in fp32 (INT8 if scaled and the CPU has VNNI)."""

    def __init__(
        self, layers: Sequence[DenseLayer], norm: Tensor | None, heads: int, groups: int, head_dim: int, eps: float,
        parts: Parts | None = None,
    ) -> None:  # fmt: skip
        for layer in layers:
            for field in fields(layer):
                weight = getattr(layer, field.name)
                small = field.name in PROJECTIONS and getattr(layer, f"{field.name}_scale") is not None
                dtype = torch.int8 if small and AVAILABLE else torch.float32
                if weight is not None and not (weight.dtype == dtype and weight.is_cpu and weight.is_contiguous()):
                    raise ValueError(f"{field.name} is {weight.dtype} on {weight.device}: the loops need dense {dtype} on CPU")
        self.layers, self.norm, self.F, self.eps = list(layers), norm, len(layers[0].gate), eps
        self.G, self.R, self.K, self.parts = groups, heads // groups, head_dim, parts
        self._small = any(layer.q_scale is not None for layer in layers)
        self._sums = [{f"{name}_sums": _row_sums(layer, name) for name in PROJECTIONS} for layer in layers]
        self._table: Records = np.zeros(len(layers), LAYER)
        for record, layer, sums in zip(self._table, layers, self._sums, strict=True):
            for name, tensor in (vars(layer) | sums).items():
                record[name] = 0 if tensor is None else tensor.data_ptr()
        self._room: dict[str, Tensor] = {}
        self._pages: Sequence[tuple[Tensor, Tensor]] | None = None

    def _space(self, **sizes: int) -> dict[str, Address]:
        """Return addresses of scratch memory by name; `sizes`: minimum numbers of fp32 values."""
        for name, size in sizes.items():
            if name not in self._room or self._room[name].numel() < size:
                self._room[name] = torch.empty(size)
        return {name: self._room[name].data_ptr() for name in sizes}

    def __call__(
        self, x_ND: Tensor, cos: Tensor, sin: Tensor, pages: Sequence[tuple[Tensor, Tensor]], plan: PagedPlan, windows: Sequence[int | None]
    ) -> None:
        """Overwrite embedded tokens x with the output of all layers and of the norm, if any; append keys and values to the layers' pages.
        `cos`, `sin` [positions, K / 2] are tables by position id. `pages` come from `new_pages`. All are fp32; x, cos, sin contiguous."""
        (N, D), F, G, R, K = x_ND.shape, self.F, self.G, self.R, self.K
        threads, x, layers = torch.get_num_threads(), x_ND.data_ptr(), self._table
        if self._pages is not pages:  # callers pass the same object in each step
            self._pages = pages
            for record, layer in zip(layers, pages, strict=True):
                record["k_pages"], record["v_pages"], record["k_head"], record["v_head"] = places(*layer)
        layers["window"] = [window or 1 << 30 for window in windows]
        small_part = N * row_bytes(max(D, F, G * R * K)) if self._small else 0
        space = self._space(
            small=threads * small_part // 4, normed=threads * N * D, kv=threads * 2 * N * K, q=N * G * R * K, seen=N * G * R * K,
            inner=N * F, panel=threads * 2 * N * PANEL,
        )  # fmt: skip
        step = np.array([Step(N, D, F, G, R, K, self.eps, K**-0.5, x, cos.data_ptr(), sin.data_ptr(), small_part, **space)], STEP)
        room = plan.scratch(R, -(-K // PAGE) * PAGE)
        # Vectors of work per panel and per head, which decide how many threads are worth waking.
        work, heads = N * D * PANEL // LANES, N * K * (R + 2) * (D + PAGE * plan.tables.shape[1]) // LANES
        if self.parts is None and N <= FEW_TOKENS and max(parts(G, heads), parts(-(-F // PANEL), 2 * work)) == 1:
            _layers_loop(step, layers, plan.arrays, room)
        else:
            for number in range(len(layers)):
                run_rows(_attention_loop, G, heads, number, step, layers, plan.arrays, room)
                self._add(x_ND, work, number, False, step, layers)
                run_rows(_swiglu_loop, -(-F // PANEL), 2 * work, number, step, layers)
                self._add(x_ND, work, number, True, step, layers)
        if self.norm is not None:
            run_rows(_norm_loop, N, D // LANES, D, x, self.norm.data_ptr(), self.eps)

    def _add(self, x_ND: Tensor, work: int, *given: Any) -> None:
        """Run `_residual_loop`, which adds to x, and sum x over the processes."""
        if self.parts is not None and not self.parts.first:
            x_ND.zero_()
        run_rows(_residual_loop, -(-x_ND.shape[1] // PANEL), work, *given)
        if self.parts is not None:
            self.parts.add(x_ND)


def _row_sums(layer: DenseLayer, name: str) -> Tensor | None:
    """Return the sums [outputs] of a projection's rows if it is in INT8, else None."""
    weight: Tensor = getattr(layer, name)
    return weight.sum(1, dtype=torch.int32) if weight.dtype == torch.int8 else None
