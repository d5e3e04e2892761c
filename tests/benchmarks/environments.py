"""What a model learns from replies between its turns and from step rewards, compared with controls of the same budget.

    python tests/benchmarks/environments.py --seeds 1 2 3 --json
    python tests/benchmarks/environments.py --arms steps share whole --seeds 100 --rates 5e-4 1e-3 2e-3

A model of 0.2M parameters learns the form of the answers by finetuning; then GRPO trains it. No prompt is used twice, so the scores of the
last rollouts (`LAST`) are on prompts that the model has not seen.

**turns.** Each prompt hides a digit, 1 to 9. The model may ask for the digit and gets it, or answer at once. The finetuned model asks in
three of ten answers. Arms: `turns`; `deaf`, the same except that the reply to a question is "no"; `one`, a single turn (both can be right
in at most 1 of 9 answers) with twice the rollouts.

**steps.** A chain of four operations on one-digit numbers, one per line, of which the model has seen a few hundred. All arms check the same
answers with `chain`. Arms: `steps`, each line is rewarded; `share`, the answer is rewarded by its share of right lines; `whole`, the answer
is rewarded only if all lines are right. Measured: the share of answers whose lines are all right. All arms have the learning rates `RATES`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pyarrow as pa
import torch
from pydantic import Field

from puna.models.config import ModelConfig
from puna.models.formats.checkpoint import save
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.transformer import Transformer
from puna.stages.align.reinforcement import grpo
from puna.stages.align.sft import sft
from puna.stages.contract import SeededConfig, StageRun, execute, parse, stage
from puna.stages.conversations import dump
from puna.stages.verifiers.base import BoundedVerifier, Question, Score
from puna.stages.verifiers.registry import register, to_text
from puna.storage import Artifact, Store
from puna.storage.schemas import table_schema

LAST = 5
"""Number of last rollouts whose mean score is an arm's score."""
TURNS = 2
OPERATIONS = 4
Message = dict[str, str]
RATES = {"turns": 4e-4, "deaf": 4e-4, "one": 4e-4, "steps": 4e-4, "share": 4e-4, "whole": 4e-4}
ARMS: dict[str, dict[str, Any]] = {"turns": {"turns": TURNS}, "deaf": {"turns": TURNS}, "one": {}, "steps": {"credit": "steps"}, "share": {}, "whole": {}}
ROLLOUT: dict[str, Any] = {"prompts": 24, "answers": 8, "minibatches": 2, "kl_coefficient": 0.0, "unfinished_penalty": 0.0}
SIZES = {"turns": {"rollouts": 30, "max_tokens": 40}, "steps": {"rollouts": 40, "max_tokens": 48}}


class RandomConfig(SeededConfig):
    """The seed of a random model."""


@stage(kind="model", version="1")
def random_model(config: RandomConfig, run: StageRun) -> None:
    """Write a model with random weights, and a tokenizer with the words of both parts."""
    texts = ["user assistant ask no Number Work out "] * 20
    tokenizer = Tokenizer.train(texts, 330)
    sizes = ModelConfig(vocab_size=tokenizer.vocab_size, hidden_size=64, intermediate_size=176, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    save(Transformer(sizes, seed=config.seed), run.folder, tokenizer)


@register
class Ask(BoundedVerifier):
    """A verifier that scores 1 for the hidden digit, which it reveals if the model asks for it."""

    name: ClassVar[str] = "ask"

    number: int = Field(ge=1, le=9, description="The digit")
    told: bool = Field(True, description="Asking is answered")

    def reply(self, question: Question, messages: Sequence[dict[str, Any]]) -> str | None:
        """Return the digit if the model asked for it, else None."""
        if messages[-1]["content"].strip() != "ask":
            return None
        return str(self.number) if self.told else "no"

    def score(self, question: Question, answer: str) -> Score:
        """Return a score of 1 if the answer is the digit, else 0."""
        return Score(float(answer.strip() == str(self.number)))


def dialogue(draw: Random) -> list[Message]:
    """Return a dialogue; in three of ten dialogues, the model asks for the digit."""
    number, told = str(draw.randint(1, 9)), draw.random() < 0.9
    messages = [{"role": "user", "content": f"Number {draw.randrange(10**6)}"}]
    if draw.random() < 0.3:
        messages += [{"role": "assistant", "content": "ask"}, {"role": "user", "content": number if told else "no"}]
        number = number if told else str(draw.randint(1, 9))
    return [*messages, {"role": "assistant", "content": number}]


def chain(draw: Random) -> tuple[list[int], list[str], str]:
    """Return a chain's numbers, its operators and its right answer."""
    numbers, signs = [draw.randrange(1, 10) for _ in range(OPERATIONS + 1)], [draw.choice("+-") for _ in range(OPERATIONS)]
    pairs = zip(signs, numbers[1:], strict=True)
    values = accumulate(pairs, lambda value, pair: value + pair[1] if pair[0] == "+" else value - pair[1], initial=numbers[0])
    return numbers, signs, "\n".join(map(str, [*values][1:]))


def shown(numbers: Sequence[int], signs: Sequence[str]) -> str:
    return "Work out " + str(numbers[0]) + "".join(f" {sign} {number}" for sign, number in zip(signs, numbers[1:], strict=True))


def table(store: Store, kind: str, rows: Sequence[dict[str, Any]]) -> Artifact:
    schema = table_schema(kind).schema
    same = {"task": "t", "split": "train", "source": "environments.py"}
    given = [dict.fromkeys(schema.names) | same | {"id": f"{i:06d}", "prompt_id": f"{i:06d}"} | row for i, row in enumerate(rows)]
    return store.import_table(kind, pa.Table.from_pylist([{name: row[name] for name in schema.names} for row in given], schema=schema))


def lessons(part: str, seed: int) -> list[dict[str, Any]]:
    """Return conversations that teach the form of the answers: dialogues, or a few hundred chains."""
    draw, rows = Random(f"lessons-{part}-{seed}"), []
    for _ in range(20000 if part == "turns" else 400):
        if part == "turns":
            messages = dialogue(draw)
        else:
            numbers, signs, answer = chain(draw)
            messages = [{"role": "user", "content": shown(numbers, signs)}, {"role": "assistant", "content": answer}]
        rows.append({"messages": dump(messages)})
    return rows


def prompts(arm: str, seed: int, count: int) -> list[dict[str, Any]]:
    """Return distinct prompts that occur in no lesson."""
    part, seen, rows = part_of(arm), {row["messages"] for row in lessons(part_of(arm), seed)}, []
    draw = Random(f"prompts-{part}-{seed}")
    while len(rows) < count:
        if part == "turns":
            text = f"Number {draw.randrange(10**6, 10**7)}"
            verifier = to_text("ask", number=draw.randint(1, 9), told=arm != "deaf")
        else:
            numbers, signs, answer = chain(draw)
            text, verifier = shown(numbers, signs), to_text("chain", numbers=numbers, signs=signs, partial=arm == "share")
            if dump([{"role": "user", "content": text}, {"role": "assistant", "content": answer}]) in seen:
                continue
        messages = dump([{"role": "user", "content": text}])
        if messages not in seen:
            seen.add(messages)
            rows.append({"messages": messages, "verifier": verifier})
    return rows


def part_of(arm: str) -> str:
    return "turns" if arm in ("turns", "deaf", "one") else "steps"


def run(store: Store, arm: str, seed: int, rate: float) -> dict[str, float]:
    """Return an arm's score and its budget."""
    part = part_of(arm)
    base = execute(random_model, RandomConfig(seed=seed), {}, store)
    training = {"steps": 1000 if part == "turns" else 300, "batch_size": 32, "schedule": {"learning_rate": 3e-3}}
    taught = execute(sft, parse(sft.config, {"training": training, "seed": seed}, "sft"), {"model": base, "instructions": [table(store, "instructions", lessons(part, seed))]}, store)
    values = {**ROLLOUT, **SIZES[part], **ARMS[arm], "schedule": {"learning_rate": rate}, "seed": seed}
    values["rollouts"] *= TURNS if arm == "one" else 1
    started = time.process_time()
    made = execute(grpo, parse(grpo.config, values, "grpo"), {"policy": taught, "prompts": table(store, "prompts", prompts(arm, seed, values["rollouts"] * values["prompts"]))}, store)
    rows = made.read("rollouts", columns=["step", "verifier", "steps", "text"]).to_pylist()
    right = [row["verifier"] == 1.0 for row in rows if row["step"] > values["rollouts"] - LAST]
    first = [row["verifier"] == 1.0 for row in rows if row["step"] == 1]
    metrics = made.manifest.metrics
    return {"right": statistics.fmean(right), "before": statistics.fmean(first), "seconds": time.process_time() - started,
            "checks": metrics["checker_calls"], "sampled_tokens": metrics["sampled_tokens"]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", choices=[*ARMS], nargs="+", default=[*ARMS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rates", type=float, nargs="+", help="rates to search; by default those of RATES")
    parser.add_argument("--store", type=Path, help="store to keep; a new one by default")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        store, results = Store.open(given.store or Path(folder)), dict[str, list[float]]()
        for arm in given.arms:
            for rate in given.rates or [RATES[arm]]:
                for seed in given.seeds:
                    found = run(store, arm, seed, rate)
                    print(arm, rate, seed, json.dumps(found), flush=True)
                    for name, value in found.items():
                        results.setdefault(f"{arm}_{name}" + (f"_{rate:g}" if given.rates else ""), []).append(value)
    means = {name: statistics.fmean(values) for name, values in results.items()}
    print(json.dumps(means) if given.json else "\n".join(f"{name:30} {value:.4g}" for name, value in means.items()))


if __name__ == "__main__":
    main()
