"""The log of a TRL trainer as rows of ours, and the state that its training goes on from."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from puna.models.training.state import Saver, check_identity, load_state, save_state
from puna.stages.contract import StageRun
from puna.stages.training.train import CHECKPOINTS

if TYPE_CHECKING:
    from torch import Tensor


class Recorder:
    """The record of one training: a row per step, and its state, saved as `Saver` says.

    The state is tensors and JSON, as that of Puna's own loop. TRL's checkpoints are pickles, which this store does not hold.
    A callback by its methods, not by transformers' base class: every command imports the files of the stages.
    """

    def __init__(self, trainer: Any, identity: Mapping[str, Any], save_seconds: float, run: StageRun) -> None:
        self.rows: list[dict[str, float]] = []
        self._trainer, self._identity, self._run = trainer, identity, run
        self._folder = run.scratch / CHECKPOINTS
        self._saver = Saver(save_seconds, self._save)
        self._last, self._tokens = time.perf_counter(), 0.0
        self._found: tuple[dict[str, Tensor], dict[str, Any]] | None = None

    def __getattr__(self, name: str) -> Any:
        """Return a function that ignores an event without a method here."""
        if name.startswith("on_"):
            return lambda *event, **details: None
        raise AttributeError(name)

    def train(self) -> None:
        """Train to the end, from the saved state where there is one."""
        self._found = load_state(self._folder)
        steps = self._trainer.args.max_steps
        with self._saver:
            if self._found is None:
                self._trainer.train()
                return
            record = self._found[1]
            check_identity(self._folder, record, dict(self._identity))
            self.rows = record["log"]
            if record["done"] == steps:  # the trainer would take one more step
                self._load_weights()
                return
            begun = self._run.scratch / "trl" / "begun"
            begun.mkdir(parents=True, exist_ok=True)
            (begun / "trainer_state.json").write_text(json.dumps(record["state"]), encoding="utf-8")
            self._trainer._load_from_checkpoint = self._load_weights
            self._trainer.train(resume_from_checkpoint=str(begun))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore the moments and the learning rate's schedule."""
        if self._found is None:
            return
        tensors, record = self._found
        optimizer, scheduler = self._trainer.optimizer, self._trainer.lr_scheduler
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in _below("moments", tensors).items():
            index, kind = name.split(".", 1)
            moments.setdefault(int(index), {})[kind] = value
        optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
        scheduler.load_state_dict(record["schedule"])
        for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = rate

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore the random numbers of a state that was saved at the end of a pass over the rows."""
        if self._found is not None and float(state.epoch).is_integer():
            self._restore_random()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore the random numbers of a state that was saved within a pass: the skipped rows drew from them."""
        if self._found is not None:
            self._restore_random()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Add a step's row; save the state where that is due, and end the training where a signal asks for that."""
        if not logs or "loss" not in logs:
            return
        now, tokens = time.perf_counter(), float(logs.get("num_tokens", self._tokens))
        row = {
            "step": state.global_step,
            "loss": float(logs["loss"]),
            "learning_rate": float(logs["learning_rate"]),
            "gradient_norm": float(logs["grad_norm"]),
            "tokens": tokens - self._tokens,
            "seconds": now - self._last,
        }
        self.rows.append(row)
        self._last, self._tokens = now, tokens
        self._saver.stepped(state.global_step == state.max_steps)
        self._run.progress(state.global_step, state.max_steps, f"loss {row['loss']:.3f}")
        self._saver.end_if_asked()

    def _save(self) -> Path:
        from puna.models.training.loop import progress

        trainer = self._trainer
        tensors = {f"weights.{name}": value for name, value in trainer.model.named_parameters() if value.requires_grad}
        for index, moments in trainer.optimizer.state_dict()["state"].items():
            tensors |= {f"moments.{index}.{name}": value for name, value in moments.items()}
        tensors |= {f"random.{number}": value for number, value in enumerate(_random())}
        record = {
            **self._identity,
            "precision": "bf16" if trainer.args.bf16 else "fp32",
            "schedule": trainer.lr_scheduler.state_dict(),
            "state": dataclasses.asdict(trainer.state) | {"log_history": []},
            **progress("step", trainer.state.max_steps, self.rows),
        }
        return save_state(self._folder, trainer.state.global_step, tensors, record)

    def _load_weights(self, *_: Any) -> None:
        import torch

        assert self._found is not None
        weights = dict(self._trainer.model.named_parameters())
        with torch.no_grad():
            for name, value in _below("weights", self._found[0]).items():
                weights[name].copy_(value)

    def _restore_random(self) -> None:
        import torch

        assert self._found is not None
        cpu, *gpus = _below("random", self._found[0]).values()
        torch.set_rng_state(cpu)
        if gpus:
            torch.cuda.set_rng_state_all(gpus)
        self._found = None


def _random() -> list[Tensor]:
    """Return the states of the random generators, the CPU's first."""
    import torch

    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ())]


def _below(part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a part of the state, sorted by name, without the part's name."""
    return {name.partition(".")[2]: tensors[name] for name in sorted(tensors) if name.startswith(f"{part}.")}
