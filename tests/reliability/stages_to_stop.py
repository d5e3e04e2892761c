"""Stages that stop their own run once, as Ctrl-C does: in training in this process, in training in workers, or between parts of a table."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import Field

from puna.models.config import ModelConfig
from puna.models.training import state
from puna.models.training.settings import TrainConfig
from puna.stages.contract import SeededConfig, StageRun, stage
from puna.stages.training.proxy_runs import cached_object
from puna.stages.training.train import fit

SHAPE = ModelConfig(vocab_size=19, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
STEPS, STOPPED = 150, 124


class StoppedConfig(SeededConfig):
    """The folder of the marker file that records that the run was stopped."""

    folder: str = Field(description="Folder of the file `stopped`")


def stop(folder: str, process: int) -> bool:
    """Send the process of a run the signal of Ctrl-C, unless that was done before; return True if it was sent."""
    file = Path(folder) / "stopped"
    if file.exists():
        return False
    file.touch()
    os.kill(process, signal.SIGINT)
    return True


def parts_of_training(seed: int) -> tuple[Any, Any, Any]:
    """Return a small model, its batches and its settings."""

    from puna.models.training.objectives import Targets
    from puna.models.transformer import Transformer

    def batches(step: int) -> list[Targets]:
        return [Targets.from_documents(np.random.default_rng([seed, step]).integers(0, 19, (2, 5)).tolist())]

    return Transformer(SHAPE, "lm", seed=seed), batches, TrainConfig(steps=STEPS, compute={"save_seconds": 1e6})


@stage(kind="evaluation", version="1")
def stopped_training(config: StoppedConfig, run: StageRun) -> None:
    """Train in the stage's own process."""
    from puna.models.training.loop import weights_digest
    from puna.models.training.objectives import LanguageModeling

    model, batches, settings = parts_of_training(0)

    def watched(step: int) -> Any:
        if step == STOPPED:
            stop(config.folder, os.getpid())
        return batches(step)

    fit(model, LanguageModeling(), watched, settings, run)
    run.metric("digest", weights_digest(model))


@stage(kind="evaluation", version="1")
def stopped_trials(config: StoppedConfig, run: StageRun) -> None:
    """Train two small models, each in a worker."""
    jobs = [0, 1]
    rows = list(run.map(trial, jobs, config.folder, str(run.scratch), os.getpid()))
    for row in rows:
        run.metric(f"digest_{row['number']}", row["digest"])
        run.metric(f"steps_{row['number']}", row["steps"])
    run.write_rows([])


def trial(number: int, folder: str, scratch: str, driver: int) -> dict[str, Any]:
    from puna.models.training.loop import train, weights_digest
    from puna.models.training.objectives import LanguageModeling

    model, batches, settings = parts_of_training(number)
    steps = 0

    def on_step(row: dict[str, float]) -> None:
        nonlocal steps
        steps += 1
        if number == 1 and row["step"] == 20:
            until = time.monotonic() + 60
            while not Path(scratch, "trial-0.json").exists() and time.monotonic() < until:
                time.sleep(0.05)  # the other model is trained first, even if its worker is slow
            stop(folder, driver)
        if number == 1 and not Path(folder, "again").exists():
            time.sleep(0.05)  # gives the driver time to pass the signal on

    def make(state: Path) -> dict[str, Any]:
        short = settings.replace(steps=10 if number == 0 else 200)
        train(model, LanguageModeling(), batches, short, 0, state, on_step=on_step)
        return {"number": number, "digest": weights_digest(model), "steps": steps}

    return cached_object(Path(scratch) / f"trial-{number}.json", make)


@stage(kind="signals", version="1")
def stopped_parts(config: StoppedConfig, run: StageRun) -> None:
    """Write four parts; the third one stops the run."""
    run.produce(part, [0, 1, 2, 3], config.folder)


def part(number: int, folder: str) -> pa.Table:
    if number == 2:
        stop(folder, os.getpid())
    return pa.table({"id": [f"{number:032x}"]})


class Callback:
    """An object that stops the run when it is freed: Python drops the error that Ctrl-C raises there."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __del__(self) -> None:
        stop(self.folder, os.getpid())
        sum(range(1000))  # the signal is handled here


@stage(kind="signals", version="1")
def stopped_callback(config: StoppedConfig, run: StageRun) -> None:
    """Write four parts; the third one stops the run where Python drops errors."""
    run.produce(part_with_callback, [0, 1, 2, 3], config.folder)


def part_with_callback(number: int, folder: str) -> pa.Table:
    if number == 2 and not Path(folder, "stopped").exists():
        Callback(folder)
        time.sleep(20)
    return pa.table({"id": [f"{number:032x}"]})


@stage(kind="evaluation", version="1")
def stopped_call(config: StoppedConfig, run: StageRun) -> None:
    """Make one long call, which stops the run before it returns."""

    def call() -> int:
        assert stop(config.folder, os.getpid()), "the call is made again"
        time.sleep(0.2)
        return 7

    with state.Stop():
        run.metric("result", state.cached_json(run.scratch / "fit-call.json", lambda: state.interruptible(call)))
    run.write_rows([])
