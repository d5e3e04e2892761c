"""Small training runs, one per worker and one thread each, whose results survive a crash."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from puna.stages.training.train import divergence_named
from puna.storage.work import write_text

if TYPE_CHECKING:
    from puna.models.config import ModelConfig
    from puna.models.training.settings import TrainConfig
    from puna.models.transformer import Transformer


@dataclass(frozen=True)
class Proxy:
    """A trained small model, and what it took: tokens, floating-point operations, seconds."""

    model: Transformer
    tokens: int
    flops: float
    seconds: float


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread, so that sums add up in the same order on any machine or worker."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def trained(
    shape: ModelConfig,
    batches: Callable[[int], Any],
    lengths: Callable[[int], Sequence[int]],
    settings: TrainConfig,
    seed: int,
    state: Path,
) -> Proxy:
    """Train a model of this shape. `lengths` gives a step's document lengths, for the cost; `state` is the folder of checkpoints."""
    import torch

    from puna.models import accounting
    from puna.models.training.loop import train
    from puna.models.training.objectives import LanguageModeling
    from puna.models.transformer import Transformer

    model = Transformer(shape, generator=torch.Generator().manual_seed(seed))
    with divergence_named(f"a small run of width {shape.hidden_size}"):
        log = train(model, LanguageModeling(), batches, settings, seed, state)
    flops = sum(accounting.training_flops(shape, lengths(step)) for step in range(1, settings.steps + 1))
    return Proxy(model, int(sum(row["tokens"] for row in log)), float(flops), sum(row["seconds"] for row in log))


def remembered(file: Path, make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Return the JSON object in `file`; make and write it first if it is missing. `make` gets a folder for training state."""
    state = file.with_suffix("")
    if not file.exists():
        write_text(file, json.dumps(make(state)))
    shutil.rmtree(state, ignore_errors=True)
    found: dict[str, Any] = json.loads(file.read_text())
    return found
