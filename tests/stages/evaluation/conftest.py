"""A small random model whose tokenizer adds BOS, and task files with their data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from puna.models.config import ModelConfig
from puna.models.formats.checkpoint import save
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.transformer import Transformer
from puna.stages.contract import External, execute
from puna.stages.io.import_model import ImportModelConfig, import_model
from puna.storage import Artifact, Store

TEXTS = [f"Question: what is {a} and {b}?\nAnswer: {a + b}\n\n" for a in range(9) for b in range(9)]


def saved(folder: Path, seed: int = 0, context: int = 256, groups: int = 1, layers: int = 2) -> Path:
    tokenizer = Tokenizer.train([*TEXTS, "grass stones cars cat dog fish water trees"], 300)
    shape = ModelConfig(
        vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=groups,
        max_position_embeddings=context, initializer_range=0.3,
    )  # fmt: skip
    save(Transformer(shape, seed=seed), folder, tokenizer)
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


@pytest.fixture
def model(tmp_path: Path, store: Store) -> Callable[..., Artifact]:
    """Return a function that makes a model artifact from a seed."""

    def make(seed: int = 0, context: int = 256, groups: int = 1, layers: int = 2) -> Artifact:
        (files,) = External.resolve(f"model={saved(tmp_path / f'model-{seed}-{context}', seed, context, groups, layers)}")
        return execute(import_model, ImportModelConfig(), {"model": files}, store)

    return make


@pytest.fixture
def task(tmp_path: Path) -> Callable[..., External]:
    """Return a function that makes a folder with a task file and its rows, as an input."""

    def make(rows: list[dict[str, Any]], train: list[dict[str, Any]] | None = None, **keys: Any) -> External:
        folder = tmp_path / f"task-{keys.get('task', 'mine')}"
        folder.mkdir(exist_ok=True)
        files = {"test": rows} | ({} if train is None else {"train": train})
        for split, content in files.items():
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
        own = {"task": "mine", "dataset_path": "json", "test_split": "test", "dataset_kwargs": {"data_files": {s: f"{s}.jsonl" for s in files}}}
        (folder / "task.yaml").write_text(yaml.safe_dump(own | keys), encoding="utf-8")
        (external,) = External.resolve(f"tasks={folder}")
        return external

    return make
