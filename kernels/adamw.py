"""AdamW (Loshchilov and Hutter 2019) with clipping by the global norm, over many tensors in one pass.

    g = gradient min(1, clip / norm);  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
    p = p (1 - lr weight_decay) - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)

The norm is over all gradients and costs one read of them; the clipped gradient is never written. Moments are in
fp32, arithmetic too; parameters and gradients may be bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from puna.kernels.lazy import triton_jit
from puna.kernels.operators import operator

if TYPE_CHECKING:
    import triton.language as tl

CHUNK = 1 << 16  # elements of one program
BLOCK = 2048  # elements that a program holds at once
CPU_CHUNK = 1 << 16  # elements whose clipped gradient stays in a core's cache until it is used


def adamw_reference(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], first: Sequence[Tensor], second: Sequence[Tensor],
    step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, clip: float,
) -> Tensor:  # fmt: skip
    """The definition, in place and in the tensors' dtypes. Returns the norm before clipping."""
    norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt() if gradients else torch.zeros(())
    factor = (clip / norm).clamp_max(1.0) if clip else 1.0
    for p, g, m, v in zip(parameters, gradients, first, second, strict=True):
        m.copy_(beta1 * m + (1 - beta1) * (g * factor))
        v.copy_(beta2 * v + (1 - beta2) * (g * factor).square())
        update = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps)
        p.copy_(p * (1 - lr * weight_decay) - lr * update)
    return norm


# --- portable --------------------------------------------------------------------------------------------


def _adamw(
    parameters: list[Tensor], gradients: list[Tensor], first: list[Tensor], second: list[Tensor],
    step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, clip: float,
) -> Tensor:  # fmt: skip
    """torch's horizontal operators, from which this differs in no step but the clipping."""
    if not parameters:
        return torch.zeros(())
    norms = torch.stack(torch._foreach_norm([g if g.dtype == torch.float64 else g.float() for g in gradients]))
    norm = torch.linalg.vector_norm(norms)
    factor = (clip / norm).clamp_max(1.0) if clip else torch.ones_like(norm)
    every = (*parameters, *gradients, *first, *second)
    if all(t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in every):
        _fused_on_cpu(parameters, gradients, first, second, step, lr, beta1, beta2, eps, weight_decay, factor)
        return norm
    for p, g, m, v in zip(parameters, gradients, first, second, strict=True):
        clipped = g.to(m.dtype) * factor
        m.lerp_(clipped, 1 - beta1)
        v.mul_(beta2).addcmul_(clipped, clipped, value=1 - beta2)
        divisor = v.sqrt().div_((1 - beta2**step) ** 0.5).add_(eps)
        wide = p.to(m.dtype).mul(1 - lr * weight_decay).addcdiv_(m, divisor, value=-lr / (1 - beta1**step))
        p.copy_(wide)
    return norm


def _fused_on_cpu(
    parameters: list[Tensor], gradients: list[Tensor], first: list[Tensor], second: list[Tensor],
    step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, factor: Tensor,
) -> None:  # fmt: skip
    """torch's one pass over all four tensors, piece by piece, so that clipping costs no pass of its own."""
    clips, count = float(factor) != 1.0, torch.tensor(float(step))
    for tensors in zip(parameters, gradients, first, second, strict=True):
        for p, g, m, v in zip(*(t.view(-1).split(CPU_CHUNK) for t in tensors), strict=True):
            torch._fused_adamw_(
                [p], [g * factor if clips else g], [m], [v], [], [count],
                lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
            )  # fmt: skip


# --- Triton ----------------------------------------------------------------------------------------------


@triton_jit
def _norm_kernel(addresses, sizes, chunks, partial, CHUNK: tl.constexpr, BLOCK: tl.constexpr, GRADIENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum of squares of one chunk. `chunks` [programs, 2]: tensor, first element."""
    tensor = tl.load(chunks + 2 * tl.program_id(0))
    first = tl.load(chunks + 2 * tl.program_id(0) + 1)
    size = tl.load(sizes + tensor)
    gradient = tl.load(addresses + 4 * tensor + 1).to(tl.pointer_type(GRADIENT))
    squares = tl.zeros([BLOCK], tl.float32)
    for block in range(0, CHUNK, BLOCK):
        at = first + block + tl.arange(0, BLOCK)
        g = tl.load(gradient + at, at < size, 0.0).to(tl.float32)
        squares += g * g
    tl.store(partial + tl.program_id(0), tl.sum(squares, 0))


@triton_jit
def _update_kernel(
    addresses, sizes, chunks, norm, clip, decay, rate, beta1, beta2, root2, eps,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, PARAMETER: tl.constexpr, GRADIENT: tl.constexpr, CLIP: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """One chunk's step. rate = lr / (1 - b1^t), decay = 1 - lr weight_decay, root2 = sqrt(1 - b2^t)."""
    tensor = tl.load(chunks + 2 * tl.program_id(0))
    first = tl.load(chunks + 2 * tl.program_id(0) + 1)
    size = tl.load(sizes + tensor)
    parameter = tl.load(addresses + 4 * tensor).to(tl.pointer_type(PARAMETER))
    gradient = tl.load(addresses + 4 * tensor + 1).to(tl.pointer_type(GRADIENT))
    first_moment = tl.load(addresses + 4 * tensor + 2).to(tl.pointer_type(tl.float32))
    second_moment = tl.load(addresses + 4 * tensor + 3).to(tl.pointer_type(tl.float32))
    factor = 1.0
    if CLIP:
        factor = tl.minimum(clip / tl.load(norm), 1.0)
    for block in range(0, CHUNK, BLOCK):
        at = first + block + tl.arange(0, BLOCK)
        inside = at < size
        g = tl.load(gradient + at, inside, 0.0).to(tl.float32) * factor
        m = tl.load(first_moment + at, inside, 0.0)
        v = tl.load(second_moment + at, inside, 0.0)
        p = tl.load(parameter + at, inside, 0.0).to(tl.float32)
        m += (1 - beta1) * (g - m)
        v = beta2 * v + (1 - beta2) * g * g
        p = p * decay - rate * m / (tl.sqrt(v) / root2 + eps)
        tl.store(first_moment + at, m, inside)
        tl.store(second_moment + at, v, inside)
        tl.store(parameter + at, p.to(PARAMETER), inside)


def _tables(tensors: list[tuple[Tensor, Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """(addresses [n, 4], sizes [n], chunks [programs, 2]), int64 on the tensors' device."""
    device = tensors[0][0].device
    sizes = torch.tensor([four[0].numel() for four in tensors])
    counts = -(-sizes // CHUNK)
    which = torch.arange(len(tensors)).repeat_interleave(counts)
    before = (counts.cumsum(0) - counts)[which]
    chunks = torch.stack([which, (torch.arange(len(which)) - before) * CHUNK], 1)
    addresses = torch.tensor([[tensor.data_ptr() for tensor in four] for four in tensors], dtype=torch.int64)
    return tuple(t.contiguous().to(device, non_blocking=True) for t in (addresses, sizes, chunks))  # type: ignore[return-value]


def _adamw_triton(
    parameters: list[Tensor], gradients: list[Tensor], first: list[Tensor], second: list[Tensor],
    step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, clip: float,
) -> Tensor:  # fmt: skip
    import triton.language as tl

    element = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    kinds: dict[tuple[torch.dtype, torch.dtype], list[tuple[Tensor, Tensor, Tensor, Tensor]]] = {}
    for four in zip(parameters, gradients, first, second, strict=True):
        if not all(t.is_contiguous() for t in four):
            raise ValueError(f"parameters, gradients and moments must be contiguous; one of shape {list(four[0].shape)} is not")
        if four[0].numel():
            kinds.setdefault((four[0].dtype, four[1].dtype), []).append(four)
    tables = {kind: _tables(members) for kind, members in kinds.items()}
    sums = []
    for (_, kind), (addresses, sizes, chunks) in tables.items():
        partial = torch.empty(len(chunks), dtype=torch.float32, device=chunks.device)
        _norm_kernel[(len(chunks),)](addresses, sizes, chunks, partial, CHUNK=CHUNK, BLOCK=BLOCK, GRADIENT=element[kind], num_warps=8)
        sums.append(partial)
    norm = torch.cat(sums).sum().sqrt() if sums else torch.zeros((), device=parameters[0].device)
    numbers = (clip, 1 - lr * weight_decay, lr / (1 - beta1**step), beta1, beta2, (1 - beta2**step) ** 0.5, eps)
    for (own, kind), (addresses, sizes, chunks) in tables.items():
        _update_kernel[(len(chunks),)](
            addresses, sizes, chunks, norm, *numbers,
            CHUNK=CHUNK, BLOCK=BLOCK, PARAMETER=element[own], GRADIENT=element[kind], CLIP=clip > 0, num_warps=8,
        )  # fmt: skip
    return norm


# --- façade ----------------------------------------------------------------------------------------------


_adamw_ = operator(
    "adamw_(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] first, Tensor(c!)[] second, int step, float lr,"
    " float beta1, float beta2, float eps, float weight_decay, float clip) -> Tensor",
    _adamw, _adamw_triton,
    lambda parameters, *_: torch.empty((), dtype=torch.float32, device=parameters[0].device if parameters else None),
)  # fmt: skip


@torch.no_grad()
def adamw_(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], first: Sequence[Tensor], second: Sequence[Tensor],
    *, step: int, lr: float, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.0,
    clip: float | None = None,
) -> Tensor:  # fmt: skip
    """One step, in place. Returns the gradients' norm before clipping, a scalar on their device.

    `first`, `second`: moments like the parameters, fp32 (fp64 for fp64 parameters), zero before the first step.
    `step` counts from 1. `clip`: largest norm, None for no clipping. Groups with decay rates of their own take
    one call each, which clips by the group's norm.
    """
    if step < 1:
        raise ValueError(f"step counts from 1, not {step}")
    if clip is not None and clip <= 0:
        raise ValueError(f"clip must be positive, not {clip}")
    for p, g, m, v in zip(parameters, gradients, first, second, strict=True):
        if not p.shape == g.shape == m.shape == v.shape:
            raise ValueError(
                f"parameter {list(p.shape)}, gradient {list(g.shape)}, moments {list(m.shape)} and {list(v.shape)}: they must be alike"
            )
    numbers = (step, lr, *betas, eps, weight_decay, clip or 0.0)
    return _adamw_(list(parameters), list(gradients), list(first), list(second), *numbers)  # type: ignore[no-any-return]
