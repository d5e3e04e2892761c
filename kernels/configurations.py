"""Block sizes, warps and pipeline stages of the Triton kernels that multiply matrices, per GPU generation.

Chosen by hand from registers and shared memory, which the ahead-of-time tests check; not yet tuned on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Configuration:
    """A tile of `rows` x `columns` for `warps` warps, its loads `stages` deep; of a product, `depth` summed at once."""

    rows: int
    columns: int
    warps: int
    stages: int
    depth: int = 0


# (kernel, compute capability, largest head width) -> configuration. Attention's rows are queries, its columns keys;
# products of matrices have the width 0.
TABLE: dict[tuple[str, int, int], Configuration] = {
    ("attention_forward", 80, 64): Configuration(128, 64, 8, 3),
    ("attention_forward", 80, 128): Configuration(128, 64, 8, 3),
    ("attention_forward", 80, 256): Configuration(64, 32, 8, 2),
    ("attention_forward", 90, 64): Configuration(128, 128, 8, 3),
    ("attention_forward", 90, 128): Configuration(128, 128, 8, 2),
    ("attention_forward_window", 90, 128): Configuration(128, 64, 8, 3),  # the window's mask needs registers
    ("attention_forward", 90, 256): Configuration(128, 32, 8, 2),
    ("attention_forward", 100, 64): Configuration(128, 64, 8, 3),
    ("attention_forward", 100, 128): Configuration(128, 64, 8, 3),
    ("attention_forward", 100, 256): Configuration(128, 32, 8, 2),
    ("attention_query_gradient", 80, 64): Configuration(128, 64, 8, 2),
    ("attention_query_gradient", 80, 128): Configuration(128, 32, 8, 2),
    ("attention_query_gradient", 80, 256): Configuration(64, 32, 8, 1),
    ("attention_query_gradient", 90, 64): Configuration(128, 64, 8, 2),
    ("attention_query_gradient", 90, 128): Configuration(128, 64, 8, 2),
    ("attention_query_gradient", 90, 256): Configuration(32, 64, 8, 1),
    ("attention_query_gradient", 100, 64): Configuration(128, 64, 8, 3),
    ("attention_query_gradient", 100, 128): Configuration(128, 64, 8, 2),
    ("attention_query_gradient", 100, 256): Configuration(64, 32, 8, 1),
    ("attention_key_gradient", 80, 64): Configuration(64, 128, 8, 2),
    ("attention_key_gradient", 80, 128): Configuration(64, 64, 8, 2),
    ("attention_key_gradient", 80, 256): Configuration(32, 64, 8, 1),
    ("attention_key_gradient", 90, 64): Configuration(64, 128, 8, 2),
    ("attention_key_gradient", 90, 128): Configuration(32, 128, 8, 2),
    ("attention_key_gradient", 90, 256): Configuration(64, 32, 8, 1),
    ("attention_key_gradient", 100, 64): Configuration(64, 128, 8, 2),
    ("attention_key_gradient", 100, 128): Configuration(64, 128, 8, 2),
    ("attention_key_gradient", 100, 256): Configuration(32, 64, 8, 1),
    ("product", 80, 0): Configuration(128, 128, 8, 3, 32),
    ("product", 90, 0): Configuration(128, 128, 8, 3, 64),
    ("product", 100, 0): Configuration(128, 128, 8, 3, 64),
    ("scaled_product", 80, 0): Configuration(128, 128, 8, 3, 64),
    ("scaled_product", 90, 0): Configuration(128, 256, 8, 3, 128),
    ("scaled_product", 100, 0): Configuration(128, 256, 8, 3, 128),
}
CAPABILITIES = (100, 90, 80)


def capability(device: torch.device) -> int:
    """80, 90, 100 …; without a GPU (the interpreter) the oldest that the table knows."""
    if device.type != "cuda":
        return CAPABILITIES[-1]
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def configuration(kernel: str, capability: int, width: int, window: bool = False) -> Configuration:
    """The entry for the newest generation not newer than `capability` and the smallest width that holds `width`.

    Under a sliding `window`, an entry of its own comes before the plain one.
    """
    for known in CAPABILITIES:
        if known <= capability:
            fitting = sorted(w for name, c, w in TABLE if name == kernel and c == known and w >= width)
            if fitting:
                key = (kernel, known, fitting[0])
                return TABLE.get((f"{kernel}_window", *key[1:]), TABLE[key]) if window else TABLE[key]
    raise ValueError(f"{kernel} has no configuration for width {width} on compute capability {capability / 10}")
