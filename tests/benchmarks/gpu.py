"""All GPU measurements, in one call of at most 8 minutes: correctness, rooflines, training, generation.

    PYTHONPATH=.pkg python tests/benchmarks/gpu.py --json gpu.json > gpu.txt

Without a GPU, `TRITON_INTERPRET=1 PYTHONPATH=.pkg python tests/benchmarks/gpu.py --device cpu --small` runs the same script, Triton
versions included, at shapes small enough for Triton's interpreter; its times mean nothing.

1. every operator against its fp64 definition; if one is wrong, the script ends here with status 1
2. training: a Llama-3.2-1B shape, steps of 4 rows of 8192 tokens, bf16 with fp32 weights: tokens/s, model FLOPs utilization relative to the
   data sheet's dense bf16 rate, peak memory; the same with the layers' matrices in FP8, and with activation checkpointing
3. the training step of transformers' model (SDPA, autocast, fused AdamW), if transformers is installed
4. generation: the same model in bf16, 64 answers of 128 tokens to 8 prompts of 512: tokens/s; and transformers' `generate`
5. the table of `roofline.py`, with SDPA, varlen, torch.compile and, if installed, Liger-Kernel
6. each goal and the measured value
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from roofline import Line, table, verified
from roofline_cases import Machine

from puna.models import accounting
from puna.models.config import ModelConfig
from puna.models.generation import Engine, SamplingParams
from puna.models.training.objectives import LanguageModeling
from puna.models.training.objectives.base import Targets
from puna.models.training.settings import TrainConfig
from puna.models.training.trainer import Trainer
from puna.models.transformer import Transformer

SECONDS = 480.0  # time limit of the whole script
# The goal of each figure: a minimum or, with True, a maximum.
GOALS: dict[str, tuple[float, bool]] = {
    "add + RMSNorm forward: ceiling": (0.9, False),
    "add + RMSNorm backward: ceiling": (0.85, False),
    "RMSNorm of heads backward: ceiling": (0.85, False),
    "SwiGLU forward: ceiling": (0.9, False),
    "SwiGLU backward: ceiling": (0.9, False),
    "linear + cross-entropy: ms": (75, True),
    "linear + cross-entropy: GB beyond dW": (0.6, True),
    "attention, one document forward: TFLOP/s": (520, False),
    "attention, one document backward: TFLOP/s": (400, False),
    "attention forward: packed over one document": (0.9, False),
    "attention backward: packed over one document": (0.9, False),
    "AdamW with clipping forward: ceiling": (0.9, False),
    "fp8 linear forward: ratio": (1.6, False),
    "plain utilization": (0.5, False),
}
BILLION = ModelConfig(
    vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
    head_dim=64, max_position_embeddings=8192, tie_word_embeddings=True,
)  # fmt: skip
TINY = ModelConfig(
    vocab_size=200, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    head_dim=16, max_position_embeddings=64, tie_word_embeddings=True,
)  # fmt: skip


def best_seconds(step: Callable[[int], object], device: torch.device, rounds: int) -> float:
    """Return the shortest time of `rounds` calls, after two warm-up calls."""
    best = float("inf")
    for number in range(1, rounds + 3):
        _finish(device)
        started = time.perf_counter()
        step(number)
        _finish(device)
        if number > 2:
            best = min(best, time.perf_counter() - started)
    return best


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _computed(settings: TrainConfig, **changes: object) -> TrainConfig:
    """Return the settings with changed fields of `compute`, validated."""
    fields = settings.model_dump()
    return TrainConfig.model_validate(fields | {"compute": fields["compute"] | changes})


def training(config: ModelConfig, rows: int, tokens: int, device: torch.device, rounds: int, figures: dict[str, float]) -> None:
    """Print tokens per second of a training step on packed rows, in bf16 (on CPU fp32), and with checkpointing."""
    precision: Literal["fp32", "bf16"] = "bf16" if device.type == "cuda" else "fp32"
    model = Transformer(config, seed=0).to(device)
    generator = torch.Generator().manual_seed(1)
    batch = [Targets.from_documents([torch.randint(0, config.vocab_size, (tokens,), generator=generator)]) for _ in range(rows)]
    peak = accounting.peak_flops(device.type, precision)
    flops = accounting.training_flops(config, [tokens] * rows)
    plain = TrainConfig(steps=1000, schedule={"learning_rate": 1e-4}, compute={"precision": precision})
    ways = {"plain": plain, "checkpointing": _computed(plain, activation_checkpointing=True)}
    for name, settings in ways.items():
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        with Trainer(model, LanguageModeling(), settings) as trainer:
            taken = best_seconds(partial(trainer.step, batch=batch, seed=0), device, rounds)
        share = flops / taken / peak if peak else math.nan
        memory = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else math.nan
        figures[f"{name} tokens/s"], figures[f"{name} utilization"] = rows * tokens / taken, share
        print(
            f"training, {precision}, {name}, {rows} rows of {tokens}: {rows * tokens / taken:.0f} tokens/s,"
            f" utilization {share:.3f}, peak {memory:.1f} GB", flush=True,
        )  # fmt: skip


def judge(machine: Machine, lines: list[Line], figures: dict[str, float]) -> list[dict[str, object]]:
    """Print and return each goal, the measured value, and whether the goal is met; goals are for an H200."""
    by_name = {line.op: line for line in lines}
    found = dict(figures)
    for line in lines:
        found[f"{line.op}: ceiling"] = line.ceiling
        found[f"{line.op}: ratio"] = line.ratio
        found[f"{line.op}: TFLOP/s"] = line.gigaflops / line.milliseconds
    for phase in ("forward", "backward"):
        one, packed = (found.get(f"attention, {kind} {phase}: TFLOP/s", math.nan) for kind in ("one document", "packed"))
        found[f"attention {phase}: packed over one document"] = packed / one
    if step := by_name.get("linear + cross-entropy, step forward"):
        found["linear + cross-entropy: ms"] = step.milliseconds
        # On top of dW in fp32, in which gradients are summed.
        found["linear + cross-entropy: GB beyond dW"] = step.peak_gigabytes - 4 * machine.V * machine.D / 1e9
    goals: list[dict[str, object]] = []
    for name, (goal, most) in GOALS.items():
        value = found.get(name, math.nan)
        verdict = "not measured" if math.isnan(value) else "reached" if (value <= goal if most else value >= goal) else "MISSED"
        print(f"goal: {name} {'<=' if most else '>='} {goal:g}: {value:.3g}, {verdict}", flush=True)
        goals.append({"name": name, "at_most" if most else "at_least": goal, "value": value, "verdict": verdict})
    return goals


def transformers_model(config: ModelConfig, device: torch.device) -> Any:
    """Return transformers' model of the same shape with random weights; None if transformers is not installed."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        print("# transformers is not installed: no peer for training and generation", flush=True)
        return None
    raw = config.model_dump()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    names += ("head_dim", "max_position_embeddings", "tie_word_embeddings")
    return LlamaForCausalLM(LlamaConfig(**{name: raw[name] for name in names}, attn_implementation="sdpa")).to(device)


def transformers_training(
    config: ModelConfig, rows: int, tokens: int, device: torch.device, rounds: int, figures: dict[str, float]
) -> None:
    """Measure the same step as users of transformers would write it: bf16 autocast over fp32 weights."""
    if (peer := transformers_model(config, device)) is None:
        return
    optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    ids = torch.randint(0, config.vocab_size, (1, tokens), device=device)

    def step(_: int) -> None:
        for _ in range(rows):
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = peer(input_ids=ids, labels=ids, use_cache=False).loss / rows
            loss.backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    figures["transformers tokens/s"] = rows * tokens / best_seconds(step, device, rounds)
    print(f"training, transformers: {figures['transformers tokens/s']:.0f} tokens/s", flush=True)


def generation(
    config: ModelConfig, prompt: int, answer: int, answers: int, device: torch.device, figures: dict[str, float]
) -> None:
    """Print drawn tokens per second; the time includes the prompts."""
    model = Transformer(config, seed=0).to(device)
    if device.type == "cuda":
        model = model.to(torch.bfloat16)
    prompts = torch.randint(0, config.vocab_size, (max(1, answers // 8), prompt), generator=torch.Generator().manual_seed(2)).tolist()
    params = SamplingParams(n=min(8, answers), max_tokens=answer, stop=())
    taken = best_seconds(lambda number: Engine(model, memory=8 << 30).generate(prompts, replace(params, seed=number)), device, 1)
    figures["generation tokens/s"] = len(prompts) * params.n * answer / taken
    print(
        f"generation, {len(prompts) * params.n} answers of {answer} after {prompt}: {figures['generation tokens/s']:.0f} tokens/s",
        flush=True,
    )


def transformers_generation(
    config: ModelConfig, prompt: int, answer: int, answers: int, device: torch.device, figures: dict[str, float]
) -> None:
    """Measure the same answers with transformers' `generate`, all rows in one batch."""
    if (peer := transformers_model(config, device)) is None:
        return
    peer = peer.to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    ids = torch.randint(0, config.vocab_size, (answers, prompt), device=device)

    def step(_: int) -> None:
        peer.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, min_new_tokens=answer, max_new_tokens=answer, pad_token_id=0)

    figures["transformers generation tokens/s"] = answers * answer / best_seconds(step, device, 1)
    print(f"generation, transformers: {figures['transformers generation tokens/s']:.0f} tokens/s", flush=True)


def write(file: Path, machine: Machine, lines: list[Line], figures: dict[str, float], goals: list[dict[str, object]]) -> None:
    """Write everything measured as one JSON object; missing measurements are null."""

    def known(row: Mapping[str, object]) -> dict[str, object]:
        return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in row.items()}

    name = torch.cuda.get_device_name() if machine.device.type == "cuda" else "cpu"
    whole = {"device": name, "torch": torch.__version__, "figures": known(figures)}
    whole |= {"operators": [known(asdict(line)) for line in lines], "goals": [known(goal) for goal in goals]}
    file.write_text(json.dumps(whole, indent=1, allow_nan=False), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes, for Triton's interpreter")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures, the table and the goals there, too")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here: see --help for how to check the script without one")
    started = time.perf_counter()
    torch.manual_seed(0)
    machine = Machine.of(options.device, options.small)
    device = machine.device
    if not verified(machine, options.small):
        raise SystemExit(1)
    lines: list[Line] = []
    figures: dict[str, float] = {}
    model, rounds = ((TINY, 1, 48), 1) if options.small else ((BILLION, 4, 8192), 5)
    answers = (12, 3, 2) if options.small else (512, 128, 64)
    parts: list[tuple[float, str, Callable[[], object]]] = [
        (0, "training", lambda: training(*model, device, rounds, figures)),
        (40, "transformers' training", lambda: transformers_training(*model, device, rounds, figures)),
        (40, "generation", lambda: generation(model[0], *answers, device, figures)),
        (40, "transformers' generation", lambda: transformers_generation(model[0], *answers, device, figures)),
        (0, "operators", lambda: lines.extend(table(machine, 0.0 if options.small else 0.4, [], until=started + SECONDS - 30))),
    ]
    for needed, name, part in parts:
        spent = time.perf_counter() - started
        if spent + needed > SECONDS:
            print(f"# {name} is left out: {spent:.0f} of {SECONDS:.0f} seconds are spent", flush=True)
            continue
        part()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    goals = judge(machine, lines, figures)
    if options.json:
        write(options.json, machine, lines, figures, goals)
    print(f"# {time.perf_counter() - started:.0f} seconds", flush=True)


if __name__ == "__main__":
    main()
