"""A setting with a planted preference: a tiny model that answers with random words, prompts whose verifier prefers some words, and a
recipe.

Only the verifier knows the preference: it produces the preference pairs and scores the answers.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import yaml

from puna.models.config import ModelConfig
from puna.models.formats.checkpoint import save
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.transformer import Transformer
from puna.stages.align.sft import sft
from puna.stages.contract import SeededConfig, StageRun, execute, parse, stage
from puna.stages.conversations import asking, dump, messages_of
from puna.stages.training.settings import SftConfig
from puna.stages.verifiers.base import BoundedVerifier, Question, Score
from puna.stages.verifiers.registry import register, to_text
from puna.storage import Artifact, Store
from puna.storage.schemas import table_schema

SWEET = ("a", "b", "c", "d")
OTHER = ("m", "n", "o", "p", "q", "r", "s", "t")
WORDS = 4


@register
class Planted(BoundedVerifier):
    """The share of sweet words in an answer of four words; missing and surplus words count as not sweet."""

    name: ClassVar[str] = "planted"

    def score(self, question: Question, answer: str) -> Score:
        """Return a score from 0 to 1."""
        words = answer.split()
        return Score(sum(word in SWEET for word in words) / max(WORDS, len(words)))


class PlantedConfig(SeededConfig):
    """The seed of a planted model."""


@stage(kind="model", version="1")
def planted_model(config: PlantedConfig, run: StageRun) -> None:
    """Write a model with random weights, and a tokenizer that knows the words."""
    words = " ".join([*SWEET, *OTHER])
    tokenizer = Tokenizer.train([f"user assistant say something about number 0 1 2 3 4 5 6 7 8 9 {words} {words} "] * 9, 400)
    sizes = ModelConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.1,
    )  # fmt: skip
    save(Transformer(sizes, seed=config.seed), run.folder, tokenizer)


def pool(store: Store, train: int, heldout: int, first: int = 0) -> Artifact:
    """Return prompts of two tasks."""
    rows = [
        {"id": f"{task}{n:06d}", "task": task, "split": "heldout" if n < first + heldout else "train", "tools": None, "reference": None,
         "messages": asking(f"say something about number {'two' if task == 'b' else 'one'} {n}"), "verifier": to_text("planted")}
        for task in "ab" for n in range(first, first + train + heldout)
    ]  # fmt: skip
    return store.import_table("prompts", pa.Table.from_pylist(rows, schema=table_schema("prompts").schema))


def demonstrations(store: Store, count: int, seed: int) -> Artifact:
    """Return answers of four words, drawn uniformly."""
    draw = random.Random(seed)
    rows = [
        {"id": f"d{n:06d}", "prompt_id": f"d{n:06d}", "task": "a", "split": "train", "tools": None, "source": "gold", "score": None,
         "messages": dump([*messages_of({"id": "", "messages": asking(f"say something about number {n}")}),
                           {"role": "assistant", "content": " ".join(draw.choices([*SWEET, *OTHER], k=WORDS))}])}
        for n in range(count)
    ]  # fmt: skip
    return store.import_table("instructions", pa.Table.from_pylist(rows, schema=table_schema("instructions").schema))


def start(store: Store, seed: int = 0, count: int = 256, epochs: float = 8.0) -> Artifact:
    """Return a model finetuned to answer with four words."""
    model = execute(planted_model, PlantedConfig(seed=seed), {}, store)
    training = {"batch_size": 16, "epochs": epochs, "schedule": {"learning_rate": 0.01, "warmup_steps": 0.1}}
    config = parse(SftConfig, {"training": training, "seed": seed}, "sft")
    return execute(sft, config, {"model": model, "instructions": [demonstrations(store, count, seed)]}, store)


def recipe(folder: Path, **changes: Any) -> str:
    """Write a recipe with small steps, in which `changes` override fields; return its path."""
    training = {"batch_size": 16, "epochs": 1, "schedule": {"learning_rate": 0.003, "warmup_steps": 0.1}}
    answers = {"prompts_per_task": 100, "temperature": 1.0, "max_tokens": 16}
    values: dict[str, Any] = {
        "name": "planted", "from_pretrained": 0, "round_prompts": 20, "development": {"count": 10},
        "prompts": {"tasks": [{"task": "chain_sum"}], "train": 1, "heldout": 1},
        "sample": {"answers": 8, "max_tokens": 16, "temperature": 1.0}, "preferences": {"pairs_per_prompt": 4, "thresholds": {"better": 0.2, "slightly_better": 0.1}},
        "data_quality": {"reward_quantile": 0.5, "semantic": {"clusters": 2, "max_similarity": 1.0}},
        "reward_model": {"training": {**training, "epochs": 4}}, "dpo": {"training": training}, "ppo": None,
        "sft": {"training": {**training, "schedule": {"learning_rate": 0.001}}},
        "average": {"search": {"steps": 2, "max_tokens": 16, "temperature": 1.0}}, "evaluate": {"answers": answers},
    }  # fmt: skip
    for name, value in changes.items():
        values[name] = {**values[name], **value} if isinstance(values.get(name), dict) and isinstance(value, dict) else value
    file = folder / "planted.yaml"
    file.write_text(yaml.safe_dump(values))
    return str(file)
