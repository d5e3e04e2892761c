"""Predicted and measured time and memory of training steps.

    OMP_NUM_THREADS=1 python tests/benchmarks/accounting.py [--json]

One thread, fp32. Time is process CPU time, the best of `--rounds` steps; memory is the largest sum of tensors
alive during the second step, from torch's profiler.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from puna.models import accounting
from puna.models.accounting import measured_machine
from puna.models.config import ModelConfig
from puna.models.training.loop import TrainConfig, Trainer
from puna.models.training.objectives import LanguageModeling
from puna.models.training.objectives.base import Targets
from puna.models.transformer import Transformer

SHAPES: dict[str, tuple[ModelConfig, list[int]]] = {
    "demo (1.1M, 2 x 512)": (ModelConfig(vocab_size=4096, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True), [512] * 2),
    "8.6M, 8 x 256": (ModelConfig(vocab_size=8192, hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4), [256] * 8),
    "8.6M, 1 x 2048": (ModelConfig(vocab_size=8192, hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4), [2048]),
    "30M, 4 x 256": (ModelConfig(vocab_size=16384, hidden_size=512, intermediate_size=1408, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=True), [256] * 4),
}


def trainer(config: ModelConfig, lengths: list[int], checkpointing: bool = False) -> Callable[[int], None]:
    """Return a function that runs one training step on random documents of these lengths."""
    model = Transformer(config, seed=0)
    settings = TrainConfig(steps=10_000, schedule={"learning_rate": 1e-4}, compute={"activation_checkpointing": checkpointing})
    trainer = Trainer(model, LanguageModeling(), settings)
    trainer._utilization = lambda *_: {}  # type: ignore[method-assign]  # it measures the machine

    def step(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        documents = [torch.randint(0, config.vocab_size, (n,), generator=generator) for n in lengths]
        trainer.step(number, Targets.from_documents(documents), seed=0)

    return step


def peak_of(config: ModelConfig, lengths: list[int], checkpointing: bool = False) -> int:
    """Return the largest sum of tensor bytes alive in a step after the first, including weights and moments."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        step = trainer(config, lengths, checkpointing)
        step(1)
        step(2)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    totals = [(e["ts"], e["args"]["Total Allocated"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"]
    before = min((ts, total - size) for ts, total, size in totals)[1]  # tensors of earlier work in this process
    return max(total for _, total, _ in totals) - before


def seconds_of(config: ModelConfig, lengths: list[int], rounds: int) -> float:
    """Return a step's process CPU seconds: the minimum over several steps."""
    step = trainer(config, lengths)
    best = float("inf")
    for number in range(1, rounds + 2):
        started = time.process_time()
        step(number)
        if number > 1:
            best = min(best, time.process_time() - started)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each shape")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    for name, (config, lengths) in SHAPES.items():
        machine = measured_machine(config, max(lengths), time.process_time)
        predicted = accounting.step_time(config, lengths, machine)
        seconds = seconds_of(config, lengths, options.rounds)
        figures[f"step time, predicted / measured, {name}"] = predicted.total / seconds
        peak = peak_of(config, lengths)
        figures[f"memory, predicted / measured, {name}"] = accounting.peak_bytes(config, sum(lengths)) / peak
        less = accounting.peak_bytes(config, sum(lengths), checkpointing=True) / peak_of(config, lengths, True)
        figures[f"memory, predicted / measured, {name}, checkpointing"] = less
        if not options.json:
            parts = f"{predicted.matrices:.3f} + {predicted.attention:.3f} + {predicted.memory:.3f}"
            print(f"{name}: {parts} s, measured {seconds:.3f}; {peak / 1e6:.0f} MB", flush=True)
    if options.json:
        print(json.dumps(figures))
    else:
        print("\n".join(f"{name:50s} {value:.3f}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
