"""New tokens' keys and values into pages, in place: both in one pass.

Shapes: N new tokens, G key-value heads, K head width; P pages of S tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from puna.kernels.lazy import triton_jit
from puna.kernels.operators import operator

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 1024  # numbers of a token that a program copies


def kv_append_reference(k_PSGK: Tensor, v_PSGK: Tensor, k_NGK: Tensor, v_NGK: Tensor, places_N: Tensor) -> None:
    """Token n into row places[n] % S of page places[n] // S."""
    S = k_PSGK.shape[1]
    for n, place in enumerate(places_N.tolist()):
        k_PSGK[place // S, place % S] = k_NGK[n]
        v_PSGK[place // S, place % S] = v_NGK[n]


# --- portable --------------------------------------------------------------------------------------------


def _append(k_PSGK: Tensor, v_PSGK: Tensor, k_NGK: Tensor, v_NGK: Tensor, places_N: Tensor) -> None:
    for pages, new in ((k_PSGK, k_NGK), (v_PSGK, v_NGK)):
        pages.view(-1, *pages.shape[2:]).index_copy_(0, places_N, new.to(pages.dtype))


# --- Triton ----------------------------------------------------------------------------------------------


@triton_jit
def _append_kernel(k_pages, v_pages, k, v, places, tokens, width, k_n, v_n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """BLOCK numbers of one token's keys and values."""
    n = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + n)
    inside = (column < width) & (place >= 0) & (place < tokens)
    at = place * width + column
    tl.store(k_pages + at, tl.load(k + n * k_n + column, inside).to(k_pages.dtype.element_ty), inside)
    tl.store(v_pages + at, tl.load(v + n * v_n + column, inside).to(v_pages.dtype.element_ty), inside)


def _append_triton(k_PSGK: Tensor, v_PSGK: Tensor, k_NGK: Tensor, v_NGK: Tensor, places_N: Tensor) -> None:
    # A view where the heads lie together, as in slices of a joint projection; else a copy.
    k, v, places = k_NGK.flatten(1), v_NGK.flatten(1), places_N.contiguous()
    k, v = (x if x.stride(1) == 1 else x.contiguous() for x in (k, v))
    N, width = k.shape
    tokens = k_PSGK.shape[0] * k_PSGK.shape[1]
    if k.numel():
        _append_kernel[(N, -(-width // BLOCK))](
            k_PSGK, v_PSGK, k, v, places, tokens, width, k.stride(0), v.stride(0), BLOCK=BLOCK, num_warps=4
        )


# --- façade ----------------------------------------------------------------------------------------------


_kv_append_ = operator(
    "kv_append_(Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor k, Tensor v, Tensor places) -> ()",
    _append, _append_triton, lambda *_: None,
)  # fmt: skip


def kv_append_(k_PSGK: Tensor, v_PSGK: Tensor, k_NGK: Tensor, v_NGK: Tensor, places_N: Tensor) -> None:
    """Write N new keys and values into the pages, in place and in the pages' dtype, without autograd.

    `places` [N] int64: page times page size plus row, all different. One that is in no page raises IndexError on
    CPU; a GPU, which the check would have to wait for, writes nothing there. Raises ValueError for shapes that do
    not fit and pages that are not contiguous.
    """
    if not k_PSGK.shape == v_PSGK.shape or not k_NGK.shape == v_NGK.shape == (len(places_N), *k_PSGK.shape[2:]):
        raise ValueError(
            f"pages {list(k_PSGK.shape)}, {list(v_PSGK.shape)}, new {list(k_NGK.shape)}, {list(v_NGK.shape)}, {len(places_N)} places:"
            " they do not fit"
        )
    if not (k_PSGK.is_contiguous() and v_PSGK.is_contiguous()):
        raise ValueError("pages are written in place: they must be contiguous")
    _kv_append_(k_PSGK, v_PSGK, k_NGK, v_NGK, places_N)
