"""On-policy distillation: the student's distribution approaches the teacher's; a teacher with another tokenizer is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from puna.models.config import ModelConfig
from puna.models.formats.checkpoint import load, save
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.training.objectives import Distill, Targets
from puna.models.transformer import Transformer
from puna.stages.align.distill import DistillConfig, distill
from puna.stages.contract import SeededConfig, StageRun, execute, stage
from puna.stages.conversations import asking, prompt_ids
from puna.storage import Artifact, PunaError, Store
from puna.storage.schemas import table_schema

Tiny = Callable[..., Artifact]


def asked(store: Store, count: int = 8) -> Artifact:
    rows = [
        {"id": f"{i:02d}", "task": "t", "split": "train", "messages": asking(f"say {i}"), "tools": None, "reference": None, "verifier": None}
        for i in range(count)
    ]  # fmt: skip
    return store.import_table("prompts", pa.Table.from_pylist(rows, schema=table_schema("prompts").schema))


def training(rate: float) -> dict[str, object]:
    return {"steps": 40, "batch_size": 4, "schedule": {"learning_rate": rate, "warmup_steps": 0}}


def settings(**more: object) -> DistillConfig:
    return DistillConfig(**{"answers": 4, "max_tokens": 4, "training": training(1e-2), **more})


def distance(student: Artifact, teacher: Artifact, prompts: Artifact) -> float:
    """Return the mean over prompts of KL(student || teacher) for the first token of an answer."""
    tokenizer = Tokenizer.load(student.path())
    ids = [prompt_ids(tokenizer, row) for row in prompts.read().to_pylist()]
    batch = Targets.from_answers(ids, [[[0]] for _ in ids])
    with torch.no_grad():
        return Distill(load(teacher.path()))(load(student.path()), batch)[0].item()


@pytest.mark.parametrize(("method", "beta", "rate"), [("full", 1.0, 1e-2), ("full", 0.0, 1e-2), ("lora", 1.0, 3e-2)])
def test_the_student_comes_to_say_what_the_teacher_says(tmp_path: Path, tiny_model: Tiny, method: str, beta: float, rate: float) -> None:
    store = Store.open(tmp_path)
    student, teacher, prompts = tiny_model(store, 0), tiny_model(store, 1), asked(store)
    config = settings(beta=beta, method=method, training=training(rate))
    made = execute(distill, config, {"student": student, "teacher": teacher, "prompts": prompts}, store)
    # Adapters leave the embeddings, which are also this model's output layer, unchanged.
    assert distance(made, teacher, prompts) < (0.5 if method == "full" else 0.75) * distance(student, teacher, prompts)
    metrics = made.manifest.metrics
    assert metrics["final_loss"] < 0.7 * metrics["first_loss"] and metrics["prompts"] == 8


def test_a_student_that_is_its_teacher_has_nothing_to_learn(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    model = tiny_model(store)
    still = {"steps": 2, "batch_size": 4, "schedule": {"learning_rate": 1e-2}, "optimizer": {"weight_decay": 0, "epsilon": 1e-2}}
    made = execute(distill, settings(training=still), {"student": model, "teacher": model, "prompts": asked(store)}, store)
    log = made.read("training_log").to_pylist()
    assert all(abs(row["loss"]) < 1e-5 and row["gradient_norm"] < 1e-4 for row in log)
    before, after = load(model.path()).state_dict(), load(made.path()).state_dict()
    assert max(float((before[name] - after[name]).abs().max()) for name in before) < 1e-3


@stage(kind="model", version="1")
def stranger(config: SeededConfig, run: StageRun) -> None:
    """Write a model with another tokenizer."""
    tokenizer = Tokenizer.train(["quite other words, again and again " * 5], 290)
    sizes = ModelConfig(vocab_size=tokenizer.vocab_size, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    save(Transformer(sizes, seed=0), run.folder, tokenizer)


def test_what_cannot_be_distilled_is_refused(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    model, prompts = tiny_model(store), asked(store)
    other = execute(stranger, SeededConfig(), {}, store)
    with pytest.raises(PunaError, match=f"{model.id} and {other.id} have different tokenizers"):
        execute(distill, settings(), {"student": model, "teacher": other, "prompts": prompts}, store)
    with pytest.raises(ValueError, match="cannot hold 1024 answers of 4 tokens and a prompt"):
        settings(answers=1024)
    with pytest.raises(ValueError, match=r"set training\.schedule\.ema and average to 0"):
        settings(training={"schedule": {"ema": 0.9}})
