"""Everything that a GPU has to show, in one call of at most 8 minutes: correctness, rooflines, training, generation.

    PYTHONPATH=.pkg python tests/benchmarks/gpu.py > gpu.txt

Without a GPU, `TRITON_INTERPRET=1 PYTHONPATH=.pkg python tests/benchmarks/gpu.py --device cpu --small` runs the same
script, the Triton versions included, at shapes that Triton's interpreter can bear; its times mean nothing.

1. every operator against its fp64 definition; the script ends here, with status 1, if one is wrong
2. the table of `roofline.py`
3. training: a Llama-3.2-1B shape, one row of 8192 tokens, bf16 with fp32 weights: tokens/s, model FLOPs utilisation
   against the maker's dense rate, peak memory; transformers' model (SDPA, fused AdamW) where it is installed
4. generation: the same model in bf16, 64 answers of 128 tokens to 8 prompts of 512: tokens/s
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from roofline import table, verified
from roofline_cases import Machine

from puna.models import accounting
from puna.models.config import ModelConfig
from puna.models.generation import Engine, Sampling
from puna.models.training.config import TrainConfig
from puna.models.training.objectives import LanguageModeling
from puna.models.training.objectives.base import Targets
from puna.models.training.updater import Updater
from puna.models.transformer import Transformer

SECONDS = 480.0  # of the whole script
BILLION = ModelConfig(
    vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
    head_dim=64, max_position_embeddings=8192, tie_word_embeddings=True,
)  # fmt: skip
TINY = ModelConfig(
    vocab_size=200, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    head_dim=16, max_position_embeddings=64, tie_word_embeddings=True,
)  # fmt: skip


def best_seconds(step: Callable[[int], object], device: torch.device, rounds: int) -> float:
    """Shortest of `rounds` calls after two that warm up."""
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


def training(config: ModelConfig, tokens: int, device: torch.device, rounds: int) -> None:
    """Print tokens per second of a training step, ours and transformers'."""
    precision = "bf16" if device.type == "cuda" else "fp32"
    model = Transformer(config, generator=torch.Generator().manual_seed(0)).to(device)
    row = torch.randint(0, config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(1))
    with Updater(model, LanguageModeling(), TrainConfig(steps=1000, learning_rate=1e-4, precision=precision)) as updater:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        taken = best_seconds(lambda number: updater.step(number, Targets.from_documents([row]), seed=0), device, rounds)
    peak = accounting.peak_flops(device.type, precision)
    share = accounting.training_flops(config, [tokens]) / taken / peak if peak else float("nan")
    memory = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else float("nan")
    print(f"training, {precision}, one row of {tokens}: {tokens / taken:.0f} tokens/s, utilisation {share:.3f}, peak {memory:.1f} GB", flush=True)


def transformers_training(config: ModelConfig, tokens: int, device: torch.device, rounds: int) -> None:
    """The same step as transformers' users would write it: bf16 autocast over fp32 weights."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        print("# transformers is not installed: no peer for training", flush=True)
        return
    raw = config.to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    names += ("head_dim", "max_position_embeddings", "tie_word_embeddings")
    peer = LlamaForCausalLM(LlamaConfig(**{name: raw[name] for name in names}, use_cache=False, attn_implementation="sdpa")).to(device)
    optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    ids = torch.randint(0, config.vocab_size, (1, tokens), device=device)

    def step(_: int) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = peer(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    print(f"training, transformers: {tokens / best_seconds(step, device, rounds):.0f} tokens/s", flush=True)


def generation(config: ModelConfig, prompt: int, answer: int, answers: int, device: torch.device) -> None:
    """Print drawn tokens per second, prompts included in the time."""
    model = Transformer(config, generator=torch.Generator().manual_seed(0)).to(device)
    if device.type == "cuda":
        model = model.to(torch.bfloat16)
    prompts = torch.randint(0, config.vocab_size, (max(1, answers // 8), prompt), generator=torch.Generator().manual_seed(2)).tolist()
    sampling = Sampling(n=min(8, answers), max_tokens=answer, stop=())
    taken = best_seconds(lambda number: Engine(model).generate(prompts, sampling, seed=number), device, 1)
    drawn = len(prompts) * sampling.n * answer
    print(f"generation, {len(prompts) * sampling.n} answers of {answer} after {prompt}: {drawn / taken:.0f} tokens/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes, for Triton's interpreter")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here: see --help for how to check the script without one")
    started = time.perf_counter()
    torch.manual_seed(0)
    machine = Machine.of(options.device, options.small)
    device = machine.device
    if not verified(machine, options.small):
        raise SystemExit(1)
    parts: list[tuple[float, str, Callable[[], None]]] = [
        (0, "operators", lambda: table(machine, 0.0 if options.small else 1.0, [])),
        (60, "training", lambda: training(*((TINY, 48) if options.small else (BILLION, 8192)), device, 1 if options.small else 5)),
        (40, "generation", lambda: generation(*((TINY, 12, 3, 2) if options.small else (BILLION, 512, 128, 64)), device)),
        (40, "peer", lambda: transformers_training(*((TINY, 48) if options.small else (BILLION, 8192)), device, 1 if options.small else 5)),
    ]
    for needed, name, part in parts:
        spent = time.perf_counter() - started
        if spent + needed > SECONDS:
            print(f"# {name} is left out: {spent:.0f} of {SECONDS:.0f} seconds are spent", flush=True)
            continue
        part()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(f"# {time.perf_counter() - started:.0f} seconds", flush=True)


if __name__ == "__main__":
    main()
