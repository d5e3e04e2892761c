"""Small training runs, in parallel on one thread each or, on a GPU, one after another in one process. Results survive a crash."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from puna.models.config import ModelConfig, ModelShape
from puna.models.training.settings import TrainConfig
from puna.models.training.state import read_each
from puna.stages.contract import StageRun
from puna.stages.training.token_rows import Packed
from puna.stages.training.train import divergence_named
from puna.storage import Artifact
from puna.storage.work import write_text

if TYPE_CHECKING:
    from torch import Tensor

    from puna.models.transformer import Transformer


@dataclass(frozen=True)
class Proxy:
    """A trained small model and its cost: tokens, floating-point operations, seconds."""

    model: Transformer
    tokens: int
    flops: float
    seconds: float


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread inside the `with` block, so that sums are computed in the same order on any machine or worker."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def fresh(shape: ModelConfig, seed: int) -> Transformer:
    from puna.models.transformer import Transformer

    return Transformer(shape, seed=seed)


def train_proxy(
    model: Transformer, name: str, batches: Callable[[int], Any], lengths: Callable[[int], Sequence[int]], settings: TrainConfig, seed: int,
    state: Path, moments: Mapping[str, Tensor] | None = None, z_loss: float = 0.0,
) -> Proxy:  # fmt: skip
    """Train a model in place; return it with the cost. `lengths`: step → document lengths, for the cost; `state`: folder of checkpoints.

    `moments`: the optimizer state to continue with; None: a new state. Raise PunaError if training diverges."""
    from puna.models import accounting
    from puna.models.training.loop import train
    from puna.models.training.objectives import LanguageModeling

    with divergence_named(name):
        log = train(model, LanguageModeling(z_loss), batches, settings, seed, state, state=moments)
    flops = sum(accounting.training_flops(model.config, lengths(step)) for step in range(1, settings.steps + 1))
    return Proxy(model, int(sum(row["tokens"] for row in log)), float(flops), float(sum(row["seconds"] for row in log)))


def moments_in(state: Path) -> dict[str, Tensor]:
    """Return the optimizer state at the end of a training run with checkpoints in the folder `state`."""
    return dict(read_each(state, "state.")[1])


def run_trials(
    run: StageRun, make: Callable[..., dict[str, Any]], jobs: Sequence[tuple[Any, ...]], *shared: Any, first: int = 0,
    total: int | None = None, here: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yield `make(*job, *shared, config, state)` for each job, in order, computed by the run's workers. A job starts with its trial number.

    A trial runs on one thread. Its result survives a crash, and its training resumes from `state`, a folder of checkpoints. `first`,
    `total`: number of earlier trials and of all trials, for progress. `here`: run all jobs one by one in this process (for a GPU)."""
    arguments: tuple[Any, ...] = (make, (*shared, run.config), str(run.scratch))
    results = (_trial(job, *arguments) for job in jobs) if here else run.map(_trial, list(jobs), *arguments)
    for number, result in enumerate(results, first + 1):
        run.progress(number, total or len(jobs), result["name"])
        yield result


def _trial(job: tuple[Any, ...], make: Callable[..., dict[str, Any]], shared: tuple[Any, ...], scratch: str) -> dict[str, Any]:
    with one_thread():
        return cached_object(Path(scratch) / f"trial-{job[0]}.json", lambda state: make(*job, *shared, state))


def cached_object(file: Path, make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Return the JSON object in `file`. If the file is missing, first write `make(state)` to it; `state` is a folder for checkpoints."""
    state = file.with_suffix("")
    if not file.exists():
        write_text(file, json.dumps(make(state)))
    shutil.rmtree(state, ignore_errors=True)
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def trial_row(number: int, name: str, parameters: dict[str, Any], loss: float, proxy: Proxy) -> dict[str, Any]:
    costs = {"tokens": proxy.tokens, "flops": proxy.flops, "seconds": proxy.seconds}
    return {"trial": number, "name": name, "parameters": json.dumps(parameters), "loss": loss, **costs}


@functools.lru_cache(maxsize=1)
def set_aside(tokens: Artifact, share: float, wanted: int) -> tuple[Packed, NDArray[np.bool_]]:
    """Return an artifact's packed tokens, and the mask [P] of pieces held out for measuring the loss. See `Packed.validation`."""
    packed = Packed.read(tokens)
    return packed, packed.validation(share, wanted)


def resize(shape: ModelShape, width: int) -> ModelShape:
    """Return the shape at another width, with layers, heads and feed-forward in proportion and heads about as wide. Raise ValueError if the
    shape cannot be resized."""
    share = width / shape.hidden_size
    heads = max(1, round(width / (shape.head_dim or shape.hidden_size // shape.num_attention_heads)))
    if width % (2 * heads):
        raise ValueError(f"width {width} cannot be divided into {heads} heads of an even width")
    if shape.mla is not None or shape.sliding_layers is not None:
        raise ValueError("models with mla or sliding_layers cannot be resized, because their parts have fixed sizes")
    groups = heads * shape.num_key_value_heads // shape.num_attention_heads
    moe = shape.moe and shape.moe.replace(moe_intermediate_size=max(8, 8 * round(shape.moe.moe_intermediate_size * share / 8)))
    return shape.replace(
        hidden_size=width,
        intermediate_size=max(8, 8 * round(shape.intermediate_size * share / 8)),
        # A model with one layer cannot copy (it has no induction heads), so its loss would not follow the scaling law of the other sizes.
        num_hidden_layers=max(min(2, shape.num_hidden_layers), round(shape.num_hidden_layers * share)),
        num_attention_heads=heads,
        num_key_value_heads=groups if groups and heads % groups == 0 else 1,
        head_dim=width // heads,
        moe=moe,
        # Scale the initialization by the usual 1 / sqrt(width), which preserves the scale of activations.
        initializer_range=min(1.0, shape.initializer_range * share**-0.5),
    )
