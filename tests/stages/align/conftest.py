"""A tiny random model with a tokenizer, as a committed artifact; one thread for small matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from puna.models.config import ModelConfig
from puna.models.formats.checkpoint import save
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.transformer import Transformer
from puna.stages.contract import SeededConfig, StageRun, execute, stage
from puna.storage import Artifact, Store

TEXT = "state the final answer to the following problem 1 + 2 - 3 user assistant question say and "


class TinyConfig(SeededConfig):
    """The seed of a tiny model."""


@stage(kind="model", version="1")
def tiny(config: TinyConfig, run: StageRun) -> None:
    """Write random weights with a large deviation, so that the model's outputs differ clearly."""
    tokenizer = Tokenizer.train([TEXT * 3], 300)
    sizes = ModelConfig(vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.1)
    save(Transformer(sizes, seed=config.seed), run.folder, tokenizer)


@pytest.fixture
def tiny_model() -> Callable[..., Artifact]:
    """Return `tiny_model(store, seed)`, which makes a committed model."""
    return lambda store, seed=0: execute(tiny, TinyConfig(seed=seed), {}, store)


@pytest.fixture
def killed_and_resumed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Artifact, Artifact]]:
    """Return `killed_and_resumed(stage, config, given, stores, when)`: the artifact of an uninterrupted run in the first store, and that of
    a run in the second store that is killed when `when(done, note)` is true of its progress, and resumed on a machine so busy that bf16 is
    not faster."""

    def run(stage: Callable[..., Artifact], config: SeededConfig, given: dict[str, Any], stores: list[Store], when: Callable[[float, str], bool]) -> tuple[Artifact, Artifact]:
        class Killer:
            def progress(self, stage: str, done: float, total: float, note: str) -> None:
                if when(done, note):
                    raise KeyboardInterrupt

        monkeypatch.setattr("puna.models.accounting.bf16_pays", lambda: True)
        whole = execute(stage, config, given, stores[0])
        with pytest.raises(KeyboardInterrupt):
            execute(stage, config, given, stores[1], listener=Killer())
        monkeypatch.setattr("puna.models.accounting.bf16_pays", lambda: False)
        return whole, execute(stage, config, given, stores[1])

    return run


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, on which small matrices are fastest."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
