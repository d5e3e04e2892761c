"""AWQ checkpoints (Lin et al. 2024) in AutoAWQ's layout, spelled out as they are read: w = (q - z) s, with z and s of the input's group.

A matrix of D inputs and N outputs is `qweight` [D, N / 8] int32 with eight 4-bit numbers each, `qzeros` [D / group, N / 8] packed alike,
and `scales` [D / group, N]. In an int32 the bits 4 i to 4 i + 3 belong to output ORDER[i] of the eight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
PARTS = ("qweight", "qzeros", "scales")


def refused(settings: Mapping[str, Any]) -> str | None:
    """Return the reason why a checkpoint's quantization_config cannot be read; None if it can."""
    wanted = {"quant_method": ("awq",), "bits": (4, None), "version": ("gemm", "GEMM", None), "zero_point": (True, None)}
    for name, supported in wanted.items():
        if settings.get(name) not in supported:
            return f"quantization_config.{name} = {settings.get(name)!r} is not read here (only {supported[0]!r})"
    return None


def unpack(packed: Tensor) -> Tensor:
    """Return [rows, 8 M] int32 numbers from 0 to 15, in the order of the outputs, of packed [rows, M] int32."""
    places = torch.tensor([ORDER.index(output) for output in range(8)], dtype=torch.int32, device=packed.device)
    return ((packed[:, :, None] >> (4 * places)) & 15).flatten(1)


def spelled_out(tensors: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return the tensors with each packed matrix unpacked to a `weight` [N, D] in `dtype` (None: the scales'). Frees the packed ones.

    ValueError, naming the tensor, where a part is missing or does not fit the others.
    """
    for name in [name for name in tensors if name.endswith(".qweight")]:
        base = name.removesuffix("qweight")
        lacking = [part for part in PARTS if f"{base}{part}" not in tensors]
        if lacking:
            raise ValueError(f"{base}{lacking[0]} is missing")
        q, zeros, scales = (tensors.pop(f"{base}{part}") for part in PARTS)
        groups, N = scales.shape
        packed = q.dtype == zeros.dtype == torch.int32 and tuple(zeros.shape) == (groups, q.shape[1])
        if not packed or 8 * q.shape[1] != N or len(q) % groups:
            raise ValueError(f"{name} {list(q.shape)} {q.dtype}, zeros {list(zeros.shape)} and scales {list(scales.shape)} do not fit")
        steps = (unpack(q).view(groups, -1, N) - unpack(zeros)[:, None]).float() * scales.float()[:, None]
        tensors[f"{base}weight"] = steps.flatten(0, 1).T.contiguous().to(dtype or scales.dtype)
    return tensors
