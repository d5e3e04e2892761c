"""A model, its objective and AdamW, one optimisation step at a time."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from puna.models.training.config import TrainConfig

Row = dict[str, float]
RESERVED = ("step", "loss", "learning_rate", "gradient_norm", "tokens", "seconds", "skipped")


class Updater:
    """A model, its objective and AdamW, one optimisation step at a time.

    `weights` are the trained tensors by name, fp32: the model's own parameters, or, in bf16, the
    originals that AdamW works on while the model holds rounded copies. As a context manager it gives
    a bf16 model its fp32 weights back on leaving.
    """

    def __init__(
        self, model: nn.Module, objective: Callable[..., tuple[Tensor, dict[str, Any]]], config: TrainConfig
    ) -> None:
        self.model, self.objective, self.config = model, objective, config
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ValueError("the model has no parameter that requires a gradient")
        self.device = next(iter(self.parameters.values())).device
        self.weights = self.parameters
        self._originals: list[tuple[nn.Parameter, Tensor]] = []
        if config.precision == "bf16":
            self._originals = [(p, p.data) for p in model.parameters()]
            self.weights = {name: nn.Parameter(p.data) for name, p in self.parameters.items()}
            for parameter, data in self._originals:
                parameter.data = data.to(torch.bfloat16)
        plain = undecayed(model)
        groups = [
            {
                "params": [w for name, w in self.weights.items() if (name in plain) == skip],
                "weight_decay": 0.0 if skip else config.weight_decay,
            }
            for skip in (False, True)
        ]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            fused=True,
        )

    def __enter__(self) -> Updater:
        return self

    def __exit__(self, *error: object) -> None:
        for parameter, data in self._originals:
            parameter.grad = None
            parameter.data = data

    def step(self, step: int, batch: Any, seed: int) -> Row:
        """One step on a batch or on a list of micro-batches; a step that is not finite changes nothing."""
        started = time.perf_counter()
        rate = self.config.rate(step)
        micro = list(batch) if isinstance(batch, list | tuple) else [batch]
        loss, metrics = self._accumulate(micro, _step_seed(seed, step))
        norm = self._gradient_norm()
        names = list(metrics)
        # One transfer for everything that is logged.
        values = torch.stack([loss, norm, *metrics.values()]).tolist()
        skipped = not (math.isfinite(values[0]) and math.isfinite(values[1]))
        if not skipped:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self._publish()
        self.optimizer.zero_grad(set_to_none=True)
        return {
            "step": step,
            "loss": values[0],
            "learning_rate": rate,
            "gradient_norm": values[1],
            "tokens": sum(len(part) for part in micro),
            "seconds": time.perf_counter() - started,
            "skipped": int(skipped),
            **dict(zip(names, values[2:], strict=True)),
        }

    def _accumulate(self, micro: Sequence[Any], seed: int) -> tuple[Tensor, dict[str, Tensor]]:
        if not micro:
            raise ValueError("a step needs at least one batch")
        options: dict[str, Any] = {}
        if hasattr(self.objective, "totals"):
            totals: dict[str, float] = {}
            for part in micro:
                for name, value in self.objective.totals(part).items():
                    totals[name] = totals.get(name, 0.0) + value
            options["totals"] = totals
        elif len(micro) > 1:
            raise TypeError("only an objective with totals() can split a step into micro-batches")
        loss = torch.zeros((), device=self.device)
        metrics: dict[str, Tensor] = {}
        with _seeded(seed, self.device):
            for part in micro:
                moved = part.to(self.device) if hasattr(part, "to") else part
                share, values = self.objective(self.model, moved, **options)
                share.backward()
                self._collect()
                loss = loss + share.detach().float()
                for name, share_of in values.items():
                    if name in RESERVED:
                        raise ValueError(f"metric {name!r} would hide a column of the training log")
                    number = torch.as_tensor(share_of, dtype=torch.float32, device=self.device).detach()
                    metrics[name] = metrics[name] + number if name in metrics else number
        return loss, metrics

    def _collect(self) -> None:
        """Add a bf16 model's gradients to those of the fp32 weights; in fp32 they are the same tensors."""
        for name, parameter in self.parameters.items() if self._originals else ():
            if parameter.grad is not None:
                weight, gradient = self.weights[name], parameter.grad.float()
                weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
                parameter.grad = None

    @torch.no_grad()
    def _publish(self) -> None:
        """Round the fp32 weights into a bf16 model."""
        for name, parameter in self.parameters.items() if self._originals else ():
            parameter.copy_(self.weights[name])

    def _gradient_norm(self) -> Tensor:
        parameters = list(self.weights.values())
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.config.clip is not None and gradients:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.config.clip, norm)
        return norm.to(self.device, torch.float32)

    def tensors(self) -> dict[str, Tensor]:
        """Weights and Adam's moments, by name."""
        state: dict[str, Tensor] = {}
        for name, weight in self.weights.items():
            state[f"weight.{name}"] = weight.detach()
            for key, value in self.optimizer.state.get(weight, {}).items():
                state[f"{key}.{name}"] = value
        return state

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        self.assign({name: tensors[f"weight.{name}"] for name in self.weights})
        for name, weight in self.weights.items():
            self.optimizer.state.pop(weight, None)
            moments = {
                # Copies: what was read from a file lies in memory mapped from it.
                key: tensors[f"{key}.{name}"].to(weight.device, copy=True)
                for key in ("step", "exp_avg", "exp_avg_sq")
                if f"{key}.{name}" in tensors
            }
            if moments:
                self.optimizer.state[weight] = moments

    @torch.no_grad()
    def assign(self, values: dict[str, Tensor]) -> None:
        """Overwrite weights, by name; those not named stay."""
        for name, value in values.items():
            self.weights[name].copy_(value)
        self._publish()


def undecayed(model: nn.Module) -> set[str]:
    """Names of the parameters without weight decay: vectors (norms, biases) and embeddings."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return {name for name, p in model.named_parameters() if p.ndim < 2 or id(p) in embeddings}


def _step_seed(seed: int, step: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {step}".encode()).digest()[:8], "little") >> 1


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """The default torch generators seeded inside, as they were outside (dropout of adapters uses them)."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
