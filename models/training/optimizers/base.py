"""The declaration of an optimiser: its parameters, the state of a weight, its memory, its learning rate.

No file of this folder imports torch before it computes: forms and checks before a run read the declarations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from puna.models.training.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from puna.models.training.settings import OptimizerSettings

Updated = tuple["Tensor", "Tensor", Mapping[str, "Tensor"]]
"""A weight, its gradient and its state."""
OPTIMIZERS: Registry[type[Optimizer]] = Registry("optimizer", "puna.optimizers")


@dataclass(frozen=True)
class Group:
    """Weights with one learning rate and one weight decay; `scale` multiplies the learning rate of the run."""

    weights: Sequence[Tensor]
    scale: float = 1.0
    weight_decay: float = 0.0


class Optimizer(ABC):
    """A rule by which weights follow their gradients. A subclass is registered by its `name`.

    name            the value of `optimizer.name`
    description     a clause of the form's help
    state_bytes     memory of the state in bytes per parameter, at least
    learning_rate   peak of a schedule that names none
    whole_matrices  True if an update needs a whole matrix of a layer: all other weights then have AdamW

    Keyword-only parameters of `__init__` are the optimiser's own: `optimizer.parameters` of a recipe, checked by their annotations.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    state_bytes: ClassVar[int]
    learning_rate: ClassVar[float] = 1e-3
    whole_matrices: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        OPTIMIZERS.register(cls.name, cls)

    def __init__(self, groups: Sequence[Group], settings: OptimizerSettings) -> None:
        self.groups, self.settings = groups, settings
        # Read-only mappings: a tensor that `start` does not name would be in no checkpoint.
        self.state = {weight: MappingProxyType(self.start(weight)) for group in groups for weight in group.weights}

    @classmethod
    def takes(cls, weight: Tensor, **own: float) -> bool:
        """True if the optimiser can update a weight; `own`: its own parameters."""
        return True

    @abstractmethod
    def start(self, weight: Tensor) -> dict[str, Tensor]:
        """Return a weight's state before its first update, by name: all that a checkpoint holds. Updates change it in place."""

    @abstractmethod
    def update(self, weights: Sequence[Updated], rate: float, weight_decay: float, factor: Tensor | None) -> None:
        """Update weights and their states in place; each gradient counts times the scalar `factor`."""

    def step(self, rate: float, factor: Tensor | None = None) -> None:
        """Update all weights with a gradient, at this learning rate of the run."""
        import torch

        with torch.no_grad():
            for group in self.groups:
                weights = [(weight, weight.grad, self.state[weight]) for weight in group.weights if weight.grad is not None]
                if weights:
                    self.update(weights, rate * group.scale, group.weight_decay, factor)
