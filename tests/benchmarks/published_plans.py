"""Published training runs compared with the estimates of `puna plan`: tokens per second, or FLOP/s, of one GPU.

Sources: Llama 3 report, table 4 (H100); Narayanan et al. 2021, table 1 (A100, recomputation counted); torchtitan's tables of December 2024
(H100 of 500 W with 2.4 TB/s); and Puna's own run on one H200. `REACHED` is fitted to the first row of Llama 3 and used unchanged for the
A100 rows; torchtitan's rows have a separate factor and a separate speed of 8-bit products, each fitted to one row. Fitted rows do not
count.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from puna.models.accounting import GPUS, forward_flops
from puna.models.config import ModelConfig
from puna.models.training.parallel.estimate import REACHED, Estimate, Work, estimate
from puna.models.training.parallel.layout import AXES, Layout

TITAN_REACHED, TITAN_FP8 = 0.55, 1.42
TITAN = GPUS["H100"]._replace(memory=96e9, bandwidth=2.4e12)
MEGATRON = (
    (24, 24, 2304, 1, 1, 32, 512, 137), (30, 32, 3072, 2, 1, 64, 512, 138), (36, 32, 4096, 4, 1, 128, 512, 142),
    (40, 48, 6144, 8, 1, 256, 1024, 135), (48, 64, 8192, 8, 2, 512, 1536, 138), (60, 80, 10240, 8, 4, 1024, 1792, 140),
    (80, 96, 12288, 8, 8, 1536, 2304, 148), (96, 128, 16384, 8, 16, 1920, 2160, 155), (105, 128, 20480, 8, 35, 2520, 2520, 163),
    (128, 160, 25600, 8, 64, 3072, 3072, 163),
)  # fmt: skip
"""Layers, heads, width, tensor, pipeline, GPUs, rows per step, TFLOP/s per GPU."""


def utilization(one: Estimate) -> float:
    """Return the MFU (0 to 1) of an H100 that trains the 405B model: its FLOP/s over the data sheet's."""
    return 3 * forward_flops(LARGE, (one.work.length,)) / one.work.length * one.tokens_per_second / GPUS["H100"].flops


def layout(**sizes: int) -> Layout:
    """Return a layout, even one that Puna cannot run."""
    return Layout.model_construct(**{name: sizes.get(name, 1) for name in (*AXES, "virtual_stages")})


def llama(width: int, inner: int, layers: int, heads: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=128_256, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=8, rope_theta=500_000.0, tie_word_embeddings=False,
    )  # fmt: skip


SMALL, MIDDLE, LARGE = llama(4096, 14336, 32, 32), llama(8192, 28672, 80, 64), llama(16384, 53248, 126, 128)


def llama_rows() -> list[tuple[str, float, float, bool]]:
    """Return (name, estimate, published value, True if fitted) of the 405B model's MFU with 16 pipeline stages of 8 virtual stages each."""
    rows = []
    for data, context, length, rows_each, published in ((64, 1, 8192, 32, 0.43), (128, 1, 8192, 16, 0.41), (8, 16, 131_072, 16, 0.38)):
        work = Work(rows_each * data, length, length)
        one = estimate(LARGE, work, layout(shard=data, tensor=8, context=context, pipeline=16, virtual_stages=8), GPUS["H100"])
        rows.append((f"llama3 405B, data {data}, context {context}", utilization(one), published, not rows))
    return rows


def megatron_rows() -> list[tuple[str, float, float, bool]]:
    """Return the same for GPT models of 1.7 to 1,008 billion parameters, in TFLOP/s including recomputation; micro-batch sizes are
    guesses."""
    rows = []
    for layers, heads, width, tensor, pipeline, gpus, batch, published in MEGATRON:
        config = ModelConfig(
            vocab_size=51_200, hidden_size=width, intermediate_size=8 * width // 3, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads, tie_word_embeddings=True,
        )  # fmt: skip
        work = Work(batch, 2048, 2048 * (4 if pipeline == 1 else 1), checkpointing=True)
        own = layout(data=gpus // (tensor * pipeline), tensor=tensor, pipeline=pipeline)
        one = estimate(config, work, own, GPUS["A100"])
        reached = 4 * forward_flops(config, (2048,)) / 2048 * one.tokens_per_second / 1e12
        rows.append((f"megatron {layers} x {width}", reached, published, False))
    return rows


def titan(config: ModelConfig, length: int, rows: int, micro: int, factor: float = TITAN_FP8, **more: Any) -> Estimate:
    """Return the estimate for a row of torchtitan's table; `rows`, `micro`: rows of a data-parallel rank per step and per micro-batch."""
    sizes = {name: more.pop(name) for name in (*AXES, "virtual_stages") if name in more}
    work = Work(rows * sizes.get("shard", 1), length, micro * length, checkpointing=True, matrix_factor=factor)
    one = estimate(config, replace(work, **more), layout(**sizes), TITAN, TITAN_REACHED)
    return replace(one, transfers=0.0) if config is LARGE else one  # torchtitan's AsyncTP hides the transfers


def titan_rows() -> list[tuple[str, float, float, bool]]:
    """Return the same for torchtitan's runs with torch.compile, in tokens per second. Its pipelines have as many micro-batches as
    stages."""
    plain = {"checkpointing": False}
    rows = [
        ("8B, shard 8, bf16", titan(SMALL, 8192, 2, 2, 1.0, shard=8, **plain), 6667, True),
        ("8B, shard 128, bf16", titan(SMALL, 8192, 2, 2, 1.0, shard=128, **plain), 6514, False),
        ("8B, shard 8", titan(SMALL, 8192, 2, 2, shard=8, **plain), 8532, True),
        ("8B, shard 128", titan(SMALL, 8192, 2, 2, shard=128, **plain), 8380, False),
        ("70B, shard 32, tensor 8", titan(MIDDLE, 8192, 16, 16, shard=32, tensor=8), 829, False),
        ("405B, 1F1B", titan(LARGE, 8192, 32, 4, shard=8, tensor=8, pipeline=8), 100, False),
        ("405B, interleaved", titan(LARGE, 8192, 32, 4, shard=8, tensor=8, pipeline=8, virtual_stages=2), 128, False),
    ]
    for context, small, large in ((1, 3890, 76), (2, 2540, 47), (4, 1071, 31), (8, 548, 16)):
        own = {"shard": 8 // context, "context": context}
        rows.append((f"8B, context {context}", titan(SMALL, 32_768 * context, 1, 1, **own), small, False))
        rows.append((f"405B, context {context}", titan(LARGE, 32_768 * context, 8, 1, tensor=8, pipeline=8, **own), large, False))
    return [(f"torchtitan {name}", one.tokens_per_second, published, fitted) for name, one, published, fitted in rows]


def own_rows() -> list[tuple[str, float, float, bool]]:
    """Return the same for Puna's training of 1.2 billion parameters on one H200, 4 rows of 8,192 tokens (gpu.py, 27 November 2026)."""
    config = llama(2048, 8192, 16, 32).replace(tie_word_embeddings=True)
    rows = []
    for checkpointing, measured in ((False, 49_834), (True, 40_319)):
        one = estimate(config, Work(4, 8192, 8192, checkpointing=checkpointing), layout(), GPUS["H200"])
        rows.append((f"puna 1.2B, H200{', layers computed twice' if checkpointing else ''}", one.tokens_per_second, measured, False))
    return rows


def compare() -> dict[str, Any]:
    """Return the median error over all rows that were not used for fitting, their number, and each row's estimate over the published
    value."""
    rows = [*llama_rows(), *megatron_rows(), *titan_rows(), *own_rows()]
    errors = [abs(value / published - 1) for _, value, published, fitted in rows if not fitted]
    return {
        "plan_error_published": statistics.median(errors), "plan_rows": len(errors), "plan_reached": REACHED,
        "plan_ratios": {name: round(value / published, 3) for name, value, published, _ in rows},
    }  # fmt: skip


if __name__ == "__main__":
    import json

    print(json.dumps(compare(), indent=1))
