"""AdamW (Loshchilov and Hutter 2019), and gradient clipping by the global norm. Both process many tensors in one pass.

    g = gradient * factor;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
    p = p (1 - lr weight_decay) - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)

The norm costs one read of the gradients. The update itself multiplies by the clipping factor, so that clipped gradients are never
written. Moments and arithmetic are in fp32 (fp64 for fp64 parameters); parameters and gradients may be bf16 or fp16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from puna.kernels.cpu.lazy_jit import Address, has_numba, strict_jit, triton_jit
from puna.kernels.cpu.loops import run_rows
from puna.kernels.operators import fused_on_cpu, operator, wide

if TYPE_CHECKING:
    import triton.language as tl
if has_numba():
    from puna.kernels.cpu.vectors import LANES, add, fill, fma, load_first, minus, over, root, store_first, times

NUMERICS = {"gradient_norm": 1, "adamw_": 2}
CHUNK = 1 << 16  # elements that one Triton program processes
BLOCK = 2048  # elements that a program holds at once
CPU_CHUNK = 1 << 16  # elements that one thread updates at a time


def gradient_norm_reference(gradients: Sequence[Tensor]) -> Tensor:
    return torch.stack([g.square().sum() for g in gradients]).sum().sqrt()


def adamw_reference(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], first: Sequence[Tensor], second: Sequence[Tensor],
    factor: Tensor | None, step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
) -> None:  # fmt: skip
    """Update parameters and moments in place by the formulas above, in the tensors' dtypes."""
    for p, gradient, m, v in zip(parameters, gradients, first, second, strict=True):
        g = gradient if factor is None else gradient * factor
        m.copy_(beta1 * m + (1 - beta1) * g)
        v.copy_(beta2 * v + (1 - beta2) * g.square())
        update = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps)
        p.copy_(p * (1 - lr * weight_decay) - lr * update)


# --- portable --------------------------------------------------------------------------------------------


def _norm(gradients: list[Tensor]) -> Tensor:
    return get_total_norm([g.to(wide(g.dtype)) for g in gradients])


def _adamw(
    parameters: list[Tensor], gradients: list[Tensor], first: list[Tensor], second: list[Tensor],
    factor: Tensor | None, step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
) -> None:  # fmt: skip
    if fused_on_cpu(*parameters, *gradients, *first, *second):
        numbers = (1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, (1 - beta2**step) ** 0.5, eps, -lr / (1 - beta1**step))
        constants = [1.0 if factor is None else float(factor), *numbers]
        for four in zip(parameters, gradients, first, second, strict=True):
            size = four[0].numel()
            run_rows(_adamw_loop, -(-size // CPU_CHUNK), CPU_CHUNK, size, *(t.data_ptr() for t in four), *map(np.float32, constants))
        return
    for p, gradient, m, v in zip(parameters, gradients, first, second, strict=True):
        g = gradient.to(m.dtype) if factor is None else gradient.to(m.dtype) * factor
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        divisor = v.sqrt().div_((1 - beta2**step) ** 0.5).add_(eps)
        p.copy_(p.to(m.dtype).mul(1 - lr * weight_decay).addcdiv_(m, divisor, value=-lr / (1 - beta1**step)))


@strict_jit
def _adamw_loop(
    part: int, start: int, stop: int, size: int, parameter: Address, gradient: Address, first: Address, second: Address,
    factor: float, decay: float, rate1: float, beta2: float, rate2: float, root2: float, eps: float, rate: float,
) -> None:  # fmt: skip
    """Update chunks start .. stop - 1 of a tensor, in torch's order of operations."""
    for i in range(start * CPU_CHUNK, min(stop * CPU_CHUNK, size), LANES):
        at, count = 4 * i, size - i
        g = times(load_first(gradient + at, count), fill(factor))
        m = load_first(first + at, count)
        m = fma(fill(rate1), minus(g, m), m)
        v = fma(times(fill(rate2), g), g, times(load_first(second + at, count), fill(beta2)))
        divisor = add(over(root(v), fill(root2)), fill(eps))
        p = times(load_first(parameter + at, count), fill(decay))
        store_first(first + at, m, count)
        store_first(second + at, v, count)
        store_first(parameter + at, add(p, over(times(fill(rate), m), divisor)), count)


# --- Triton ----------------------------------------------------------------------------------------------


@triton_jit
def _tensor(addresses, at, KIND: tl.constexpr, ALIGN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a pointer to the tensor whose address, a multiple of ALIGN bytes, is addresses[at]."""
    return tl.multiple_of(tl.load(addresses + at).to(tl.pointer_type(KIND)), ALIGN)


@triton_jit
def _norm_kernel(  # type: ignore[no-untyped-def]
    addresses, sizes, chunks, partial, CHUNK: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr, GRADIENT: tl.constexpr
):
    """Write the sum of squares of this program's chunk to `partial`. `chunks` [programs, 2]: index of the tensor, index of its chunk."""
    tensor = tl.load(chunks + 2 * tl.program_id(0))
    first = tl.load(chunks + 2 * tl.program_id(0) + 1) * CHUNK
    size = tl.load(sizes + tensor)
    gradient = _tensor(addresses, tensor, GRADIENT, ALIGN)
    squares = tl.zeros([BLOCK], tl.float32)
    if first + CHUNK <= size:  # a whole chunk needs no mask, so loads take 16 bytes at once
        for block in range(0, CHUNK, BLOCK):
            g = tl.load(gradient + first + block + tl.arange(0, BLOCK)).to(tl.float32)
            squares += g * g
    else:
        for block in range(0, CHUNK, BLOCK):
            at = first + block + tl.arange(0, BLOCK)
            g = tl.load(gradient + at, at < size, 0.0).to(tl.float32)
            squares += g * g
    tl.store(partial + tl.program_id(0), tl.sum(squares, 0))


@triton_jit
def _update(p, g, m, v, clipping, decay, rate, beta1, beta2, root2, eps):  # type: ignore[no-untyped-def]
    g = g.to(tl.float32) * clipping
    m += (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g * g
    return p.to(tl.float32) * decay - rate * m / (tl.sqrt(v) / root2 + eps), m, v


@triton_jit
def _update_kernel(  # type: ignore[no-untyped-def]
    addresses, sizes, chunks, factor, decay, rate, beta1, beta2, root2, eps,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr, PARAMETER: tl.constexpr, GRADIENT: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    """Update this program's chunk. rate = lr / (1 - b1^t), decay = 1 - lr weight_decay, root2 = sqrt(1 - b2^t)."""
    tensor = tl.load(chunks + 2 * tl.program_id(0))
    first = tl.load(chunks + 2 * tl.program_id(0) + 1) * CHUNK
    size = tl.load(sizes + tensor)
    parameter = _tensor(addresses, 4 * tensor, PARAMETER, ALIGN)
    gradient = _tensor(addresses, 4 * tensor + 1, GRADIENT, ALIGN)
    first_moment = _tensor(addresses, 4 * tensor + 2, tl.float32, ALIGN)
    second_moment = _tensor(addresses, 4 * tensor + 3, tl.float32, ALIGN)
    clipping = 1.0
    if CLIP:
        clipping = tl.load(factor)
    if first + CHUNK <= size:
        for block in range(0, CHUNK, BLOCK):
            at = first + block + tl.arange(0, BLOCK)
            p, g, m, v = tl.load(parameter + at), tl.load(gradient + at), tl.load(first_moment + at), tl.load(second_moment + at)
            p, m, v = _update(p, g, m, v, clipping, decay, rate, beta1, beta2, root2, eps)
            tl.store(first_moment + at, m)
            tl.store(second_moment + at, v)
            tl.store(parameter + at, p.to(PARAMETER))
    else:
        for block in range(0, CHUNK, BLOCK):
            at = first + block + tl.arange(0, BLOCK)
            inside = at < size
            p, g = tl.load(parameter + at, inside, 0.0), tl.load(gradient + at, inside, 0.0)
            m, v = tl.load(first_moment + at, inside, 0.0), tl.load(second_moment + at, inside, 0.0)
            p, m, v = _update(p, g, m, v, clipping, decay, rate, beta1, beta2, root2, eps)
            tl.store(first_moment + at, m, inside)
            tl.store(second_moment + at, v, inside)
            tl.store(parameter + at, p.to(PARAMETER), inside)


def _tables(tensors: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return (addresses [n, tensors of a row], sizes [n], chunks [programs, 2]: indices of row and chunk), int64 on the tensors' device.
    The tensors of a row have equal shapes. Raise ValueError for a tensor that is not contiguous."""
    uneven = next((x for row in tensors for x in row if not x.is_contiguous()), None)
    if uneven is not None:
        raise ValueError(f"parameters, gradients and moments must be contiguous; one of shape {list(uneven.shape)} is not")
    device = tensors[0][0].device
    sizes = torch.tensor([row[0].numel() for row in tensors])
    counts = -(-sizes // CHUNK)
    which = torch.arange(len(tensors)).repeat_interleave(counts)
    before = (counts.cumsum(0) - counts)[which]
    chunks = torch.stack([which, torch.arange(len(which)) - before], 1)
    addresses = torch.tensor([[tensor.data_ptr() for tensor in row] for row in tensors], dtype=torch.int64)
    return tuple(t.contiguous().to(device, non_blocking=True) for t in (addresses, sizes, chunks))  # type: ignore[return-value]


def _alignment(*tensors: Tensor) -> int:
    """Return 16 if all tensors are 16-byte aligned, as torch allocates them, else 1: views of larger tensors may be unaligned."""
    return 16 if all(tensor.data_ptr() % 16 == 0 for tensor in tensors) else 1


def _element(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def _norm_triton(gradients: list[Tensor]) -> Tensor:
    kinds: dict[tuple[torch.dtype, int], list[tuple[Tensor]]] = {}
    for g in gradients:
        kinds.setdefault((g.dtype, _alignment(g)), []).append((g,))
    sums = []
    for (kind, align), members in kinds.items():
        addresses, sizes, chunks = _tables(members)
        partial = torch.empty(len(chunks), dtype=torch.float32, device=chunks.device)
        if len(chunks):
            _norm_kernel[(len(chunks),)](
                addresses, sizes, chunks, partial, CHUNK=CHUNK, BLOCK=BLOCK, ALIGN=align, GRADIENT=_element(kind), num_warps=8
            )
        sums.append(partial)
    return torch.cat(sums).sum().sqrt()


def _adamw_triton(
    parameters: list[Tensor], gradients: list[Tensor], first: list[Tensor], second: list[Tensor],
    factor: Tensor | None, step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
) -> None:  # fmt: skip
    kinds: dict[tuple[torch.dtype, torch.dtype, int], list[tuple[Tensor, ...]]] = {}
    for four in zip(parameters, gradients, first, second, strict=True):
        kinds.setdefault((four[0].dtype, four[1].dtype, _alignment(*four)), []).append(four)
    numbers = (1 - lr * weight_decay, lr / (1 - beta1**step), beta1, beta2, (1 - beta2**step) ** 0.5, eps)
    for (own, kind, align), members in kinds.items():
        addresses, sizes, chunks = _tables(members)
        if len(chunks):
            _update_kernel[(len(chunks),)](
                addresses, sizes, chunks, factor if factor is not None else addresses, *numbers,
                CHUNK=CHUNK, BLOCK=BLOCK, ALIGN=align, PARAMETER=_element(own), GRADIENT=_element(kind), CLIP=factor is not None,
                num_warps=8,
            )  # fmt: skip


# --- façade ----------------------------------------------------------------------------------------------


_gradient_norm = operator(
    "gradient_norm(Tensor[] gradients) -> Tensor",
    _norm, _norm_triton, lambda gradients: gradients[0].new_empty((), dtype=wide(gradients[0].dtype)),
)  # fmt: skip
_adamw_ = operator(
    "adamw_(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] first, Tensor(c!)[] second, Tensor? factor, int step,"
    " float lr, float beta1, float beta2, float eps, float weight_decay) -> ()",
    _adamw, _adamw_triton, lambda *_: None,
)  # fmt: skip


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the global norm of gradients, a scalar in at least fp32 on their device; without gradients 0, on the CPU."""
    return _gradient_norm(list(gradients)) if gradients else torch.zeros(())


def clipping_factor(norm: Tensor, clip: float) -> Tensor:
    """Return the factor that clips gradients of this norm to `clip`, as torch's clip_grad_norm_ does. Raise ValueError if `clip` <= 0."""
    if clip <= 0:
        raise ValueError(f"clip must be positive, not {clip}")
    return (clip / (norm + 1e-6)).clamp_max(1.0)


def adamw_(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], first: Sequence[Tensor], second: Sequence[Tensor], *,
    step: int, lr: float, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.0,
    factor: Tensor | None = None,
) -> None:  # fmt: skip
    """Update all parameters in place by one step. Raise ValueError if shapes differ.

    `first`, `second`: moments in the parameters' shapes, fp32 (fp64 for fp64 parameters), zero before the first step.
    `step` counts from 1. `factor`: the scalar of `clipping_factor` that multiplies the gradients; None: 1."""
    if step < 1:
        raise ValueError(f"step counts from 1, not {step}")
    for p, g, m, v in zip(parameters, gradients, first, second, strict=True):
        if not p.shape == g.shape == m.shape == v.shape:
            raise ValueError(
                f"parameter {list(p.shape)}, gradient {list(g.shape)}, moments {list(m.shape)} and {list(v.shape)}: they must be alike"
            )
    if parameters:
        _adamw_(list(parameters), list(gradients), list(first), list(second), factor, step, lr, *betas, eps, weight_decay)
        torch.autograd.graph.increment_version(parameters)  # so that caches of results notice the change
