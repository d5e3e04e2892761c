"""An operation that appends new tokens' keys and values to the pages of a KV cache, in one pass.

Shapes: N new tokens, G key-value heads, K width of keys, V width of values; P pages of S tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from puna.kernels.cpu.lazy_jit import Address, has_numba, strict_jit, triton_jit
from puna.kernels.cpu.loops import run_rows
from puna.kernels.operators import uses_triton
from puna.kernels.paged_attention import PAGE, paged_for_loops, places

if TYPE_CHECKING:
    import triton.language as tl
if has_numba():
    from puna.kernels.cpu.vectors import carray, load_first, pointer, store_first

NUMERICS = {"kv_append_": 1}
BLOCK = 1024  # elements of a token's keys, and of its values, that one Triton program copies


def kv_append_reference(k_PSGK: Tensor, v_PSGV: Tensor, k_NGK: Tensor, v_NGV: Tensor, places_N: Tensor) -> None:
    """Write token n's key and value into row places[n] % S of page places[n] // S."""
    S = k_PSGK.shape[1]
    for n, place in enumerate(places_N.tolist()):
        k_PSGK[place // S, place % S] = k_NGK[n]
        v_PSGV[place // S, place % S] = v_NGV[n]


# --- CPU -------------------------------------------------------------------------------------------------


@strict_jit
def append_head(place: int, K: int, V: int, k_pages: Address, v_pages: Address, k: Address, v: Address) -> None:
    """Write one token's key and value of one head into the head's pages, which `new_pages` laid out. `place`: see `kv_append_`."""
    at, row, lanes = place // PAGE, place % PAGE, (V + PAGE - 1) // PAGE * PAGE
    to, new = carray(pointer(k_pages + 4 * at * K * PAGE), (K, PAGE)), carray(pointer(k), (K,))
    for c in range(K):
        to[c, row] = new[c]
    for c in range(0, V, PAGE):
        store_first(v_pages + 4 * ((at * PAGE + row) * lanes + c), load_first(v + 4 * c, V - c), V - c)


@strict_jit
def _append_loop(
    part: int, start: int, stop: int, G: int, K: int, V: int, k_pages: Address, v_pages: Address, k_head: int, v_head: int, k: Address,
    v: Address, to: Any,
) -> None:  # fmt: skip
    for n in range(start, stop):
        for g in range(G):
            append_head(to[n], K, V, k_pages + g * k_head, v_pages + g * v_head, k + 4 * (n * G + g) * K, v + 4 * (n * G + g) * V)


def _append(k_PSGK: Tensor, v_PSGV: Tensor, k_NGK: Tensor, v_NGV: Tensor, places_N: Tensor) -> None:
    (P, S, G, K), V, to = k_PSGK.shape, v_PSGV.shape[3], places_N.numpy()
    if to.min() < 0 or to.max() >= P * S:
        raise IndexError(f"places lie in 0 to {P * S - 1}, not {to.min()} to {to.max()}")
    if paged_for_loops(k_PSGK, v_PSGV):
        k, v = (x.to(torch.float32).contiguous() for x in (k_NGK, v_NGV))
        arguments = (G, K, V, *places(k_PSGK, v_PSGV), k.data_ptr(), v.data_ptr(), to)
        run_rows(_append_loop, len(to), G * K, *arguments)
        return
    for pages, added in ((k_PSGK, k_NGK), (v_PSGV, v_NGV)):
        pages[places_N // S, places_N % S] = added.to(pages.dtype)


# --- Triton ----------------------------------------------------------------------------------------------


@triton_jit
def _append_kernel(  # type: ignore[no-untyped-def]
    k_pages, v_pages, k, v, places, tokens, k_width, v_width, k_n, v_n, BLOCK: tl.constexpr
):
    """Copy BLOCK elements of one token's keys, and of its values. Skip a token whose place is outside the pages."""
    n = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + n)
    there = (place >= 0) & (place < tokens)
    inside = (column < k_width) & there
    tl.store(k_pages + place * k_width + column, tl.load(k + n * k_n + column, inside).to(k_pages.dtype.element_ty), inside)
    inside = (column < v_width) & there
    tl.store(v_pages + place * v_width + column, tl.load(v + n * v_n + column, inside).to(v_pages.dtype.element_ty), inside)


def _append_triton(k_PSGK: Tensor, v_PSGV: Tensor, k_NGK: Tensor, v_NGV: Tensor, places_N: Tensor) -> None:
    if not (k_PSGK.is_contiguous() and v_PSGV.is_contiguous()):
        raise ValueError("pages on a GPU are written in place: they must be contiguous")
    # `flatten` returns a view if a token's heads are contiguous, as in slices of a joint projection; else a copy.
    k, v, places = k_NGK.flatten(1), v_NGV.flatten(1), places_N.contiguous()
    k, v = (x if x.stride(1) == 1 else x.contiguous() for x in (k, v))
    tokens = k_PSGK.shape[0] * k_PSGK.shape[1]
    if k.numel():
        _append_kernel[(len(k), -(-max(k.shape[1], v.shape[1]) // BLOCK))](
            k_PSGK, v_PSGV, k, v, places, tokens, k.shape[1], v.shape[1], k.stride(0), v.stride(0), BLOCK=BLOCK, num_warps=4
        )


# --- façade ----------------------------------------------------------------------------------------------


def kv_append_(k_PSGK: Tensor, v_PSGV: Tensor, k_NGK: Tensor, v_NGV: Tensor, places_N: Tensor) -> None:
    """Write N new keys and values into the pages, in place and in the pages' dtype, without autograd.

    `places` [N] int64: page number times page size plus row in the page, all different. For a place outside the pages, raise IndexError on
    a CPU; on a GPU skip the token, since an error would have to wait for the GPU. Raise ValueError for shapes that do not fit, and on a GPU
    for pages that are not contiguous."""
    shapes = (k_PSGK.shape[:3] == v_PSGV.shape[:3], k_NGK.shape == (len(places_N), *k_PSGK.shape[2:]))
    if not all(shapes) or v_NGV.shape != (len(places_N), *v_PSGV.shape[2:]):
        raise ValueError(
            f"pages {list(k_PSGK.shape)}, {list(v_PSGV.shape)}, new {list(k_NGK.shape)}, {list(v_NGV.shape)}, {len(places_N)} places:"
            " they do not fit"
        )
    if len(places_N):
        with torch.cuda.device_of(k_PSGK):
            (_append_triton if uses_triton(k_NGK) else _append)(k_PSGK, v_PSGV, k_NGK, v_NGV, places_N)
