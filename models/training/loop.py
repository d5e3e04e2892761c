"""One training loop for every objective.

A step's batch and learning rate are functions of the step's number, and the random generator is seeded from (seed, step). So the weights,
the optimizer's moments and the running average are the whole state, and a resumed run is bit-identical (on a GPU if `deterministic`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from puna.models.training.boxes import tensors_digest
from puna.models.training.parallel.base import Parallel, whole
from puna.models.training.parallel.mesh import Mesh
from puna.models.training.settings import ComputeSettings, TrainConfig
from puna.models.training.state import Job, Saver, check_identity, load_record
from puna.models.training.trainer import Row, Trainer, spike_limits

__all__ = ["Row", "TrainConfig", "TrainLog", "TrainingDiverged", "Trainer", "train", "weights_digest"]

TrainLog = list[Row]
Batches = Callable[[int], Any]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer dtypes by size in bytes


class TrainingDiverged(RuntimeError):
    """An error: the loss or the gradient is not finite, or spikes, for several steps in a row."""


def train(
    model: nn.Module, objective: Callable[..., tuple[Tensor, dict[str, Any]]], batches: Batches, config: TrainConfig, seed: int,
    checkpoint_dir: Path | None = None, checkpoint_every: int = 0, on_step: Callable[[Row], None] | None = None,
    rate_scales: Mapping[str, float] | None = None, state: Mapping[str, Tensor] | Path | None = None, sampled: bool = False,
    mesh: Mesh | None = None, device: torch.device | None = None,
) -> TrainLog:  # fmt: skip
    """Optimize `model` in place; return the rows of the table `training_log`, one per step.

    batches: returns a step's batch, or list of micro-batches, from the step's number (1-based); a step always has the same batch. Only
    parameters that require a gradient are trained and saved. rate_scales: factors of the learning rate by parameter name (LoRA+).
    After training, the trained weights are in fp32: the last step's, or the schedule's average. If the layout divides the model, its ranks
    hold them in pieces (`Transformer.held`); the model has whole weights only if `sampled`, while `batches` samples from it. state:
    optimizer state to start from (`Trainer.adopt`), or the folder of an earlier training run; None: a fresh start. mesh: the ranks of the
    layout; None: all processes. device: where this rank's pieces of weights are; None: the model's device.

    checkpoint_dir: folder of the run's state, saved every `checkpoint_every` steps (0: at no fixed step), by time, at the end, and before
    Ctrl-C or SIGTERM ends the run (`Saver`). A run that finds a state continues from it and calls `on_step` only for new steps. Raise
    ValueError if the state's settings, seed or initial weights differ, TrainingDiverged after `max_skipped` skipped steps in a row."""
    identity = {"config": config.identity(), "seed": seed, "rate_scales": dict(rate_scales or {})}
    average: dict[str, Tensor] = {}
    with ExitStack() as stack:
        current = config.replace(compute=as_begun(config.compute, checkpoint_dir))
        trainer = stack.enter_context(Trainer(model, objective, current, rate_scales, mesh, device))
        identity |= _adopt(trainer, state)
        first, log = _resume(checkpoint_dir, trainer, average, identity)

        def write() -> Job | None:
            assert checkpoint_dir is not None
            tensors = trainer.tensors() | {f"average.{name}": value for name, value in average.items()}
            record = {**identity, "precision": trainer.precision, **progress("step", config.steps, log)}
            # Moments in files may be larger than the memory, so they are not copied.
            return trainer.parallel.save_state(checkpoint_dir, len(log), tensors, record, config.optimizer.state_in == "memory")

        saved = write if checkpoint_dir is not None else None
        saver = stack.enter_context(Saver(config.compute.save_seconds, saved, trainer.parallel.mesh.agree))
        for step in range(first, config.steps + 1):
            limits = spike_limits(log, config.optimizer.spike_window, config.optimizer.spike_limit)
            with whole(model, trainer.parallel.dtype) if sampled else nullcontext():
                batch = batches(step)
            row = trainer.step(step, batch, seed, limits)
            log.append(row)
            check_skips(log, config.optimizer.max_skipped)
            _average(average, trainer.weights, config, row)
            if on_step is not None:  # before the step is saved: after a crash, no saved step then lacks its call of `on_step`
                on_step(row)
            saver.save_if_due(step == config.steps or bool(checkpoint_every and step % checkpoint_every == 0))
            saver.end_if_asked()
        trainer.assign(average)
    return log


def progress(unit: str, of: int, log: TrainLog) -> dict[str, Any]:
    """Return a checkpoint's log and progress: `done` of `of` steps or rollouts (`unit`), and the seconds that they took."""
    return {"unit": unit, "done": len(log), "of": of, "seconds": sum(row["seconds"] for row in log), "log": log}


def weights_digest(model: nn.Module) -> str:
    """Return a sha256 over the names, dtypes, shapes and bytes of all parameters. If ranks hold the model in pieces, all must call this."""
    with whole(model):
        return tensors_digest(dict(model.named_parameters()))


def fingerprint(parallel: Parallel, tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of the names, shapes and bits of tensors, equal in every layout; each rank reads only its own pieces. The hash is the
    sum over elements, modulo 2^64, of (bits + 1) times one random factor per dimension and index, seeded by the tensor's name."""
    total = np.zeros(1, np.int64)
    for name, tensor in tensors.items():
        piece = parallel.piece_of(name, tensor)
        if piece.counts(parallel.mesh.at):
            draw = np.random.default_rng(list(name.encode()))
            tensor = tensor.to(parallel.dtype) if name in parallel.frozen else tensor  # in bf16, all layouts round these but `shard`
            bits = tensor.detach().cpu().contiguous().view(BITS[tensor.element_size()]).numpy()
            ones = np.ones(1, np.int64)
            for (start, stop), size in zip(reversed(piece.box), reversed(piece.shape), strict=True):
                factors = (2 * draw.integers(1 << 62, size=size) + 1)[start:stop]
                bits, ones = np.einsum("...i,i->...", bits, factors), ones * factors.sum()
            total += bits + ones
    return f"{int(parallel.mesh.add_everywhere(torch.from_numpy(total))):x}"


def _adopt(trainer: Trainer, state: Mapping[str, Tensor] | Path | None) -> dict[str, str]:
    """Load `state`, if given, into the optimizers. Return the fingerprints of the initial weights and, if given, of the state."""
    prints = {"initial": fingerprint(trainer.parallel, trainer.weights | trainer.parallel.frozen)}
    if state is None:
        return prints
    moments = {name: value for name, value in trainer.tensors().items() if name.startswith("state.")}
    if isinstance(state, Path):
        checkpoint = trainer.parallel.load_state(state, moments, {})
        assert checkpoint is not None
        trainer.adopt({name: value for name, value in checkpoint[0].items() if name.startswith("state.")}, in_pieces=True)
    else:
        trainer.adopt(state)
    return prints | {"state": fingerprint(trainer.parallel, moments)}


def as_begun(compute: ComputeSettings, folder: Path | None) -> ComputeSettings:
    """Return `compute` with the precision of the checkpoint under `folder`, if there is one: `fastest` is measured at each start, so a
    resumed run could otherwise change its precision."""
    record = None if folder is None else load_record(folder)
    if record is None or "precision" not in record:
        return compute
    return compute.replace(precision=record["precision"])


def _resume(folder: Path | None, trainer: Trainer, average: dict[str, Tensor], identity: dict[str, Any]) -> tuple[int, TrainLog]:
    """Restore the newest checkpoint, if any; return the first step to compute and the rows of earlier steps."""
    own = trainer.tensors()
    averages = {f"average.{name}": weight for name, weight in trainer.weights.items()}
    state = None if folder is None else trainer.parallel.load_state(folder, own, averages)
    if state is None:
        return 1, []
    tensors, record = state
    check_identity(folder, record, identity)
    prefix = "average."
    average.update({n.removeprefix(prefix): t.clone() for n, t in tensors.items() if n.startswith(prefix)})
    trainer.restore({n: t for n, t in tensors.items() if not n.startswith(prefix)})
    return record["step"] + 1, record["log"]


def _average(average: dict[str, Tensor], weights: dict[str, nn.Parameter], config: TrainConfig, row: Row) -> None:
    """Include the weights after the step of `row` in the running average, if the schedule averages this step."""
    steps, step = config.averaged_steps(), int(row["step"])
    if step in steps:
        _include(average, weights, 1.0 / sum(one <= step for one in steps))
    if config.schedule.ema and not row["skipped"]:
        _include(average, weights, 1.0 - config.schedule.ema)


def _include(average: dict[str, Tensor], weights: dict[str, nn.Parameter], share: float) -> None:
    """Move the average by `share` towards these weights; the first call copies the weights."""
    for name, parameter in weights.items():
        value = parameter.detach()
        if name not in average:
            average[name] = value.clone()
        else:
            average[name] = average[name].to(value.device).lerp(value, share)


def check_skips(log: TrainLog, allowed: int) -> None:
    """Raise TrainingDiverged if the last `allowed` steps were all skipped."""
    recent = log[-allowed:]
    if len(recent) == allowed and all(row["skipped"] for row in recent):
        last = recent[-1]
        raise TrainingDiverged(
            f"loss or gradient was not finite, or spiked, in {allowed} steps in a row, up to step {last['step']:.0f} "
            f"(loss {last['loss']}, gradient norm {last['gradient_norm']}, learning rate "
            f"{last['learning_rate']:.3g}): lower the learning rate, warm up longer or clip harder"
        )
