"""Block sizes, warps and pipeline stages of the Triton kernels that multiply matrices, per GPU generation.

The table is `configurations.json`. A row's `machine` is the GPU on which `tests/benchmarks/tune_kernels.py` measured it, or null if it was
chosen by hand, from the registers and shared memory that the ahead-of-time tests check.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

FILE = Path(__file__).parent / "configurations.json"


@dataclass(frozen=True)
class Configuration:
    """A launch configuration: a tile of `rows` x `columns`, `warps`, pipeline `stages`; `depth`: terms of a product summed at once.

    `descriptors`: blocks are read through tensor descriptors; `specialize`: some warps load while others compute; `library`: torch's own
    kernel is used if it takes the inputs.
    """

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
    """The key of a configuration. In attention, rows are queries, columns keys, and `width` the largest head width, in 16-bit numbers;
    matrix products have the width 0. `window`: with a sliding window, whose mask takes registers too. `fp32`: products in full fp32, which
    no tensor core computes; `width` is then in 32-bit numbers."""

    kernel: str
    capability: int
    width: int = 0
    window: bool = False
    fp32: bool = False


@cache
def table() -> dict[Place, tuple[Configuration, str | None]]:
    """Return the table in the repository: each place's configuration and the machine that it was measured on."""
    table = {}
    for row in json.loads(FILE.read_text(encoding="utf-8")):
        place = Place(*(row.pop(name) for name in ("kernel", "capability", "width", "window", "fp32")))
        machine = row.pop("machine")
        table[place] = (Configuration(**row), machine)
    return table


def capability(device: torch.device) -> int:
    """Return the compute capability as 80, 90, 100 …; without a GPU (the interpreter) the oldest generation in the table."""
    if device.type != "cuda":
        return min(place.capability for place in table())
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def place_of(kernel: str, capability: int, width: int = 0, window: bool = False, fp32: bool = False) -> Place:
    """Return the table's place for the newest generation up to `capability`, then for the smallest width of at least `width`. With a
    sliding `window`, prefer a windowed place. Raise ValueError if there is none."""
    suitable = (p for p in table() if p.kernel == kernel and p.capability <= capability and p.width >= width)
    known = [p for p in suitable if p.window <= window and p.fp32 == fp32]
    if not known:
        raise ValueError(f"{kernel} has no configuration for width {width} on compute capability {capability / 10}")
    return min(known, key=lambda p: (-p.capability, p.width, not p.window))


@cache
def configuration(kernel: str, capability: int, width: int = 0, window: bool = False, fp32: bool = False) -> Configuration:
    """Return a kernel's launch configuration. Raise ValueError if the table has none for the place."""
    return table()[place_of(kernel, capability, width, window, fp32)][0]
