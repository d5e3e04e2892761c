"""Training speed compared with transformers on the same weights, and kernels compared with torch's.

    OMP_NUM_THREADS=1 python tests/benchmarks/model.py --json

One thread, fp32, process CPU time; Puna and transformers alternate, and the best of `--rounds` counts. A training step is zero_grad,
forward, loss, backward, clipping to norm 1 and fused AdamW, on 8 sequences of 256 tokens: 6 layers, width 256, 8 query and 4 key-value
heads, feed-forward 704, vocabulary 8192.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

from puna.models import accounting
from puna.models.config import ModelConfig
from puna.models.training.loop import TrainConfig, Trainer
from puna.models.training.objectives import LanguageModeling
from puna.models.training.objectives.base import Targets
from puna.models.transformer import Transformer

SHAPE = ModelConfig(
    vocab_size=8192,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    max_position_embeddings=256,
)
BATCH, LENGTH = 8, 256


def documents(step: int) -> torch.Tensor:
    """Return the batch of a step, token ids [BATCH, LENGTH]."""
    return torch.randint(0, SHAPE.vocab_size, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def ours() -> Callable[[int], None]:
    """Return a function that runs one step of the training loop; batches, including masks, are made as in training."""
    model = Transformer(SHAPE, seed=0)
    trainer = Trainer(model, LanguageModeling(), TrainConfig(steps=10_000, schedule={"learning_rate": 1e-4}))

    def step(number: int) -> None:
        trainer.step(number, Targets.from_documents(list(documents(number))), seed=0)

    return step


def theirs() -> Callable[[int], None]:
    """Return a function that runs the same step with transformers' LlamaForCausalLM (SDPA attention), written as its users would."""
    from transformers import LlamaConfig, LlamaForCausalLM

    raw = SHAPE.model_dump()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim", "max_position_embeddings")
    config = LlamaConfig(**{name: raw[name] for name in names}, use_cache=False, attn_implementation="sdpa")
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(number: int) -> None:
        ids = documents(number)
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def training(rounds: int) -> dict[str, float]:
    """Return the tokens per core-second of both, and Puna's share of this core's rate of matrix products."""
    steps = {"ours": ours(), "theirs": theirs()}
    best = dict.fromkeys(steps, float("inf"))
    for number in range(1, rounds + 2):
        for name, step in steps.items():
            started = time.process_time()
            step(number)
            if number > 1:  # the first step allocates buffers and optimizer state
                best[name] = min(best[name], time.process_time() - started)
    tokens = BATCH * LENGTH
    flops = accounting.training_flops(SHAPE, [LENGTH] * BATCH)
    return {
        "train_tok_core_s": tokens / best["ours"],
        "transformers_tok_core_s": tokens / best["theirs"],
        "train_vs_transformers": best["theirs"] / best["ours"],
        "train_mfu": flops / best["ours"] / accounting.matrix_rate(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--rounds", type=int, default=8, help="timed steps of each; the best counts")
    parser.add_argument("--only", choices=["train", "kernels"], help="measure one half")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    if options.only != "kernels":
        figures |= training(options.rounds)
    if options.only != "train":
        from model_kernels import figures as kernel_figures

        figures |= kernel_figures()
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:28s} {value:.4g}")


if __name__ == "__main__":
    main()
