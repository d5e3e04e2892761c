"""Block sizes, warps and pipeline stages of the Triton kernels that multiply matrices, per GPU generation.

The table is `configurations.json`. A row's `machine` is the GPU on which `tests/benchmarks/tune_kernels.py` measured the row. Null: the row
was chosen by hand, from the registers and shared memory that the ahead-of-time tests check."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

FILE = Path(__file__).parent / "configurations.json"


@dataclass(frozen=True)
class Configuration:
    """A launch configuration: a tile of `rows` x `columns`, `warps`, pipeline `stages`; `depth`: terms of a product summed at once.

    `descriptors`: read blocks through tensor descriptors; `specialize`: let some warps load while others compute; `library`: use torch's
    own kernel if it accepts the inputs."""

    rows: int
    columns: int
    warps: int
    stages: int
    depth: int = 0
    descriptors: bool = False
    specialize: bool = False
    library: bool = False


@dataclass(frozen=True)
class Place:
    """The key of a configuration. In attention, rows are queries, columns keys, and `width` is the largest head width, in 16-bit numbers;
    for matrix products, `width` is 0. `window`: True with a sliding window, whose mask takes registers, too. `fp32`: True for products in
    full fp32, which no tensor core computes; `width` is then in 32-bit numbers."""

    kernel: str
    capability: int
    width: int = 0
    window: bool = False
    fp32: bool = False


def in_full(x: Tensor) -> bool:
    """True if products of `x` are computed in full fp32, not in TF32 or 16 bits."""
    return x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"


@cache
def table() -> dict[Place, tuple[Configuration, str | None]]:
    """Return the table in `FILE`: each place's configuration, and the machine on which it was measured (None: chosen by hand)."""
    table = {}
    for row in json.loads(FILE.read_text(encoding="utf-8")):
        place = Place(*(row.pop(name) for name in ("kernel", "capability", "width", "window", "fp32")))
        machine = row.pop("machine")
        table[place] = (Configuration(**row), machine)
    return table


def capability(device: torch.device) -> int:
    """Return ten times the compute capability: 80, 90, 100 …; without a GPU (Triton's interpreter), the lowest in the table."""
    if device.type != "cuda":
        return min(place.capability for place in table())
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def place_of(kernel: str, capability: int, width: int = 0, window: bool = False, fp32: bool = False) -> Place:
    """Return the table's place with the newest generation up to `capability` and, among these, the smallest width of at least `width`.
    With `window`, prefer a place with a sliding window. Raise ValueError if no place fits."""
    suitable = (p for p in table() if p.kernel == kernel and p.capability <= capability and p.width >= width)
    known = [p for p in suitable if p.window <= window and p.fp32 == fp32]
    if not known:
        raise ValueError(f"{kernel} has no configuration for width {width} on compute capability {capability / 10}")
    return min(known, key=lambda p: (-p.capability, p.width, not p.window))


@cache
def configuration(kernel: str, capability: int, width: int = 0, window: bool = False, fp32: bool = False) -> Configuration:
    """Return a kernel's launch configuration: the one at `place_of` in the table. Raise ValueError if no place fits."""
    return table()[place_of(kernel, capability, width, window, fp32)][0]
