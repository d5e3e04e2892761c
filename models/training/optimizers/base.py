"""The base class of optimizers, which declare their parameters, state per weight, memory and default learning rate.

No file of this folder imports torch before an update is computed, because forms and preflight checks read the declarations."""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from puna.models.training.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from puna.models.training.settings import OptimizerSettings

Updated = tuple["Tensor", "Tensor", Mapping[str, "Tensor"]]  # a weight, its gradient and its state
SMALL = 1024  # minimum number of elements at which a state tensor is moved to a file
OPTIMIZERS: Registry[type[Optimizer]] = Registry("optimizer", "puna.optimizers")


@dataclass(frozen=True)
class Group:
    """Weights with a common learning rate and weight decay; `scale` multiplies the run's learning rate."""

    weights: Sequence[Tensor]
    scale: float = 1.0
    weight_decay: float = 0.0


class Optimizer(ABC):
    """An optimizer, which updates weights from their gradients. A subclass is registered by its `name`.

    name            the value of `optimizer.name` in a recipe
    description     a clause for the help of that setting
    state_bytes     minimum bytes of state per parameter
    learning_rate   the default peak learning rate of a schedule
    whole_matrices  True if an update needs a whole matrix of a layer; AdamW then updates all other weights

    Keyword-only parameters of `__init__` are the optimizer's own: `optimizer.parameters` of a recipe, checked by their annotations."""

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
        place = _map_to_file if settings.state_in == "file" else lambda tensor: tensor
        self.state = {
            weight: MappingProxyType({name: place(tensor) for name, tensor in self.start(weight).items()})
            for group in groups for weight in group.weights
        }  # fmt: skip

    @classmethod
    def takes(cls, weight: Tensor, **own: float) -> bool:
        """True if the optimizer can update a weight; `own`: the optimizer's own parameters."""
        return True

    @abstractmethod
    def start(self, weight: Tensor) -> dict[str, Tensor]:
        """Return a weight's state tensors before its first update, by name. Checkpoints hold them; updates change them in place."""

    @abstractmethod
    def update(self, weights: Sequence[Updated], rate: float, weight_decay: float, factor: Tensor | None) -> None:
        """Update weights and their states in place, at learning rate `rate`. `factor`: a scalar that multiplies each gradient; None: 1."""

    def step(self, rate: float, factor: Tensor | None = None) -> None:
        """Update all weights that have a gradient. `rate`: the run's learning rate, scaled by each group; `factor`: see `update`."""
        import torch

        with torch.no_grad():
            for group in self.groups:
                weights = [(weight, weight.grad, self.state[weight]) for weight in group.weights if weight.grad is not None]
                if not weights:
                    continue
                if self.settings.state_in == "memory" or weights[0][0].device.type == "cpu":
                    self.update(weights, rate * group.scale, group.weight_decay, factor)
                    continue
                for weight, gradient, state in weights:  # the CPU updates states in files, one weight at a time
                    own = weight.cpu()
                    cut = None if factor is None else factor.cpu()
                    self.update([(own, gradient.cpu(), state)], rate * group.scale, group.weight_decay, cut)
                    weight.copy_(own)


def _map_to_file(tensor: Tensor) -> Tensor:
    """Return a small tensor on the CPU, a larger one as a copy mapped to an unnamed temporary file. Raise ValueError if the disk has no
    room. This is ZeRO-Infinity's offloading (Rajbhandari et al. 2021), left to the system's page cache."""
    import torch

    if tensor.numel() < SMALL:
        return tensor.cpu()
    with tempfile.NamedTemporaryFile(prefix="puna-moments-") as file:
        try:
            if hasattr(os, "posix_fallocate"):  # macOS lacks posix_fallocate: there, a full disk ends the process at a later write
                os.posix_fallocate(file.fileno(), 0, tensor.nbytes)
        except OSError as error:
            need = f"{tensor.nbytes / 1e9:.3g} GB of an optimizer's state"
            raise ValueError(f"{tempfile.gettempdir()} has no room for {need} ({error.strerror}): set TMPDIR to another folder") from error
        mapped = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
    return mapped.copy_(tensor)
