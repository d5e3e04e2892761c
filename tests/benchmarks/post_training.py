"""One step of finetuning, preference optimization and reward modelling compared with TRL's trainers: CPU time, loss and gradient.

    OMP_NUM_THREADS=1 PYTHONPATH=.pkg python tests/benchmarks/post_training.py --json [--rounds 3]

A random Llama (256 wide, 6 layers, 8,192 tokens), fp32, one thread, the same token ids and weights for all; a step consists of making the
batch from ids, the loss and its gradient, without the optimizer. TRL runs transformers' LlamaForCausalLM with SDPA attention, without its
default gradient checkpointing and bf16, which cost a CPU time; for DPO both have the reference's log-probs precomputed. `lean` is what a
careful user writes with transformers alone: one padded batch, with the output layer only at the answers' positions. Seconds are process CPU
seconds, the minimum of all rounds, in which the engines alternate; `vs` is their ratio. Before that, every engine runs the step once in
fp64 (fp32 rounds a sum of a thousand nats in its fifth digit): differences are relative to that loss, and gradient differences are a share
of the gradient's largest element.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import numpy as np
import torch
from torch import Tensor, nn

from puna.models.config import ModelConfig
from puna.models.formats.checkpoint import load, save
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.training import objectives as o
from puna.models.transformer import Head, Transformer

SHAPE = ModelConfig(
    vocab_size=8192, hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=8, head_dim=32,
    max_position_embeddings=2048,
)  # fmt: skip
BETA = 0.1
Rows = list[tuple[list[int], list[list[int]]]]
"""Prompts with their answers, best first."""
Step = Callable[[], tuple[Tensor, nn.Module]]
"""A function that makes a batch and returns its loss and the model."""


def rows(count: int, prompt: int, answers: tuple[int, ...], spread: float, seed: int = 0) -> Rows:
    """Return rows of random ids; lengths vary by a factor of up to 1 + `spread` in either direction."""
    draw = np.random.default_rng(seed)

    def ids(length: int) -> list[int]:
        size = round(length * (1 + spread) ** draw.uniform(-1, 1))
        found: list[int] = draw.integers(300, SHAPE.vocab_size, size).tolist()
        return found

    return [(ids(prompt), [ids(length) for length in answers]) for _ in range(count)]


def targets(some: Rows) -> o.Targets:
    """Return the targets of a forest with each prompt once."""
    return o.Targets.from_answers([prompt for prompt, _ in some], [answers for _, answers in some])


def saved(folder: Path, head: Head, seed: int) -> Path:
    """Save a model with random weights, large enough for gradients of ordinary size, and a tokenizer with its special tokens."""
    made = Transformer(SHAPE, head, seed=seed)
    place = folder / f"{head}-{seed}"
    save(made, place, Tokenizer.train(["one two three"] * 3, 290))
    return place


def trl_trainer(kind: str, folder: Path, data: list[dict[str, Any]], reference: Path | None = None) -> Any:
    """Return TRL's trainer for rows that are already token ids."""
    import datasets
    import transformers
    import trl

    base = getattr(trl, f"{kind}Trainer")

    class Prepared(base):  # type: ignore[misc, valid-type]
        """TRL's trainer, except that it leaves rows of ids unchanged."""

        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset

    auto = transformers.AutoModelForSequenceClassification if kind == "Reward" else transformers.AutoModelForCausalLM
    more: dict[str, Any] = {"beta": BETA, "precompute_ref_log_probs": True} if kind == "DPO" else {}
    settings = getattr(trl, f"{kind}Config")(
        output_dir=str(folder / "out"), per_device_train_batch_size=len(data), max_length=None, use_cpu=True, bf16=False,
        gradient_checkpointing=False, report_to=[], remove_unused_columns=False, **more,
    )  # fmt: skip
    options = {"ref_model": auto.from_pretrained(reference)} if reference else {}
    return Prepared(
        model=auto.from_pretrained(folder), args=settings, train_dataset=datasets.Dataset.from_list(data),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder), **options,
    )  # fmt: skip


def theirs(trainer: Any, known: Sequence[dict[str, float]] = ()) -> Step:
    """Return a step that computes the loss of all rows in one batch, as TRL's collator makes it; `known`: each row's reference
    log-probs."""
    data = [dict(row) for row in trainer.train_dataset]
    for row, numbers in zip(data, known, strict=bool(known)):
        row.update(numbers)

    def step() -> tuple[Tensor, nn.Module]:
        loss: Tensor = trainer.compute_loss(trainer.model, trainer.data_collator(data))
        return loss, trainer.model

    return step


def sft(folder: Path, some: Rows) -> dict[str, Step]:
    """Return each engine's step of finetuning on answers."""
    place = saved(folder, "lm", 0)
    data = [{"input_ids": p + a, "labels": [-100] * len(p) + a} for p, (a,) in some]
    model = load(place)
    return {"puna": lambda: (o.Sft()(model, targets(some))[0], model), "trl": theirs(trl_trainer("SFT", place, data))}


def reward(folder: Path, some: Rows) -> dict[str, Step]:
    """Return each engine's step of a reward model on ranked answers; TRL gets each pair of a ranking as a separate row."""
    place = saved(folder, "scalar", 0)
    pairs = [(i, j) for i in range(len(some[0][1])) for j in range(i + 1, len(some[0][1]))]
    data = [{"chosen_ids": p + answers[i], "rejected_ids": p + answers[j]} for p, answers in some for i, j in pairs]
    model, ranks = load(place), torch.arange(len(some[0][1])).repeat(len(some))
    return {
        "puna": lambda: (o.Reward()(model, o.RewardBatch(targets(some), ranks))[0], model),
        "trl": theirs(trl_trainer("Reward", place, data)),
    }


def dpo(folder: Path, some: Rows) -> dict[str, Step]:
    """Return each engine's step of DPO on pairs, without a likelihood term."""
    place, other = saved(folder, "lm", 0), saved(folder, "lm", 1)
    data = [{"prompt_ids": p, "chosen_ids": c, "rejected_ids": r} for p, (c, r) in some]
    model, even = load(place), torch.arange(0, 2 * len(some), 2)
    known = o.reference_logprobs(load(other), targets(some))
    objective = o.Dpo(beta=BETA, nll_weight=0.0)
    return {
        "puna": lambda: (objective(model, o.DpoBatch(targets(some), even, even + 1, known))[0], model),
        "lean": lean_dpo(place, some, known),
        "trl": theirs(
            trl_trainer("DPO", place, data, other),
            [{"ref_chosen_logps": c, "ref_rejected_logps": r} for c, r in known.view(-1, 2).tolist()],
        ),
    }


def lean_dpo(place: Path, some: Rows, known: Tensor) -> Step:
    """Return a step with one padded batch on transformers, with the output layer only at the answers' positions."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(place)
    flat = [(prompt, answer) for prompt, answers in some for answer in answers]

    def step() -> tuple[Tensor, nn.Module]:
        longest = max(len(prompt) + len(answer) for prompt, answer in flat)
        ids = torch.tensor([p + a + [0] * (longest - len(p) - len(a)) for p, a in flat])
        sizes = torch.tensor([[len(p), len(a)] for p, a in flat])
        place = torch.arange(longest)
        asked = (place >= sizes[:, :1] - 1) & (place < sizes.sum(1, keepdim=True) - 1)
        hidden = model.model(input_ids=ids, attention_mask=(place < sizes.sum(1, keepdim=True)).long(), use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[asked])
        logprobs = -nn.functional.cross_entropy(logits, ids.roll(-1, 1)[asked], reduction="none")
        sums = torch.stack([part.sum() for part in logprobs.split(sizes[:, 1].tolist())]) - known
        return -nn.functional.logsigmoid(BETA * (sums[::2] - sums[1::2])).mean(), model

    return step


CASES: dict[str, tuple[Callable[[Path, Rows], dict[str, Step]], Rows]] = {
    "dpo_long": (dpo, rows(8, 359, (80, 84), 0.3)),
    "dpo_short": (dpo, rows(8, 65, (141, 136), 0.3)),
    "reward_ranked": (reward, rows(4, 359, (80, 82, 84), 0.3)),
    "reward_pairs": (reward, rows(8, 359, (80, 84), 0.3)),
    "sft": (sft, rows(16, 60, (60,), 2.0)),
    "sft_even": (sft, rows(16, 120, (120,), 0.0)),
}


def measured(steps: dict[str, Step], rounds: int) -> dict[str, Any]:
    """Return the seconds of each engine, and the differences of the others' loss and gradient from the first engine's."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    found: dict[str, tuple[float, dict[str, Tensor]]] = {}
    for name, step in steps.items():
        _, model = step()
        model.double()
        loss, _ = step()
        loss.backward()
        found[name] = float(loss.detach()), {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        model.float()
    for _ in range(rounds):
        for name, step in steps.items():
            started = time.process_time()
            loss, model = step()
            loss.backward()
            seconds[name].append(time.process_time() - started)
            model.zero_grad(set_to_none=True)
    loss, grads = found["puna"]
    largest = max(float(g.abs().max()) for g in grads.values())
    differences = {
        name: {
            "loss": abs(other - loss) / abs(loss),
            "gradient": max(float((g - grads[key]).abs().max()) for key, g in theirs.items()) / largest,
        }
        for name, (other, theirs) in found.items()
        if name != "puna"
    }
    least = {name: min(some) for name, some in seconds.items()}
    return {"seconds": least, "all_seconds": seconds, "loss": loss, "differences": differences} | {
        f"vs_{name}": least[name] / least["puna"] for name in steps if name != "puna"
    }


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for name in arguments.cases:
        make, some = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measured(make(Path(folder), some), arguments.rounds)
    names = {"dpo_vs_trl": ("dpo_long", "vs_trl"), "dpo_short_vs_lean": ("dpo_short", "vs_lean"), "reward_vs_trl": ("reward_ranked", "vs_trl"),
             "sft_vs_trl": ("sft", "vs_trl")}  # fmt: skip
    figures: dict[str, Any] = {key: round(results[case][which], 2) for key, (case, which) in names.items() if case in results}
    for kind in ("loss", "gradient"):
        figures[f"largest_{kind}_difference"] = max(d[kind] for r in results.values() for d in r["differences"].values())
    figures |= {"load": os.getloadavg()[0], "cases": results}
    if arguments.json:
        print(json.dumps(figures))
        return
    for name, result in results.items():
        print(
            name, {k: round(v, 3) for k, v in result["seconds"].items()}, {k: round(v, 2) for k, v in result.items() if k.startswith("vs_")}
        )
        print("   ", result["differences"])
    print(json.dumps({key: value for key, value in figures.items() if key != "cases"}, indent=1))


if __name__ == "__main__":
    main()
