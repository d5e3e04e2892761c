"""The layout of a training run: the numbers of processes over which its batch, weights, layers and tokens are split.

Nothing here imports torch, because forms and preflight checks read this module."""

from __future__ import annotations

import math
from itertools import combinations
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from puna.models.settings import Settings

if TYPE_CHECKING:
    from puna.models.config import ModelConfig

AXES = ("pipeline", "data", "shard", "expert", "context", "tensor")  # the outermost first; ranks on the last are neighbours
READERS = ("data", "shard", "expert")  # axes along which ranks have different micro-batches
DENSE = ("pipeline", "data", "shard", "context", "tensor")  # axes that divide models without experts
PROVED = frozenset(frozenset(axes) for count in (1, 2, 3) for axes in (*combinations(DENSE, count), *combinations(READERS, count)))
"""Sets of axes with sizes above 1 whose results `tests/parallel` compares with one process."""
CUT = frozenset(AXES) - {"data"}
BUCKET = 1 << 23  # elements at which a bucket of tensors is full: few large exchanges are faster than many small ones
UNPROVED = {"nf4": CUT, "dora": frozenset({"tensor"}), "dropout": frozenset(AXES), "neftune_alpha": frozenset(AXES)}
"""Setting → the axes with which no test proves it."""
OFF = {"nf4": "lora.quantization to none", "dora": "lora.dora to false", "dropout": "lora.dropout to 0"}  # what leaves it out; else 0


class Layout(Settings):
    """Numbers of processes along each axis; their product is the total number. Results differ from one process's only by rounding."""

    data: int = Field(1, ge=1, le=65_536, description="Copies of the model, each with its own micro-batches of a step")
    shard: int = Field(
        1, ge=1, le=65_536, description="Processes, each with its own micro-batches, that divide weights, gradients and optimizer state"
    )
    tensor: int = Field(1, ge=1, le=64, description="Processes over which matrices, vocabulary, and activations between blocks are split")
    pipeline: int = Field(1, ge=1, le=1024, description="Stages of consecutive layers, which micro-batches pass one after the other")
    virtual_stages: int = Field(
        1, ge=1, le=64, description="Pipeline stages per process; more stages shorten the pipeline's bubble and send more activations"
    )
    context: int = Field(1, ge=1, le=1024, description="Processes over which the tokens of each micro-batch are dealt by attention cost")
    expert: int = Field(1, ge=1, le=1024, description="Processes, each with its own micro-batches, that divide each layer's experts")

    def size(self, axis: str) -> int:
        return int(getattr(self, axis))

    @property
    def processes(self) -> int:
        return math.prod(self.size(axis) for axis in AXES)

    @property
    def stages(self) -> int:
        return self.pipeline * self.virtual_stages

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(axis for axis in AXES if self.size(axis) > 1)

    @property
    def readers(self) -> int:
        """Return the number of data-parallel ranks: processes, or groups of processes, that have their own micro-batches."""
        return math.prod(self.size(axis) for axis in READERS)

    def parts(self, config: ModelConfig) -> Layout | None:
        """Return this layout if it splits a model for inference; None if each rank has the whole model or the layout does not fit it."""
        return None if self.misfit(config) or not self.axes & CUT else self

    @model_validator(mode="after")
    def _is_proved(self) -> Layout:
        if self.pipeline == 1 < self.virtual_stages:
            raise ValueError(f"layout.virtual_stages = {self.virtual_stages}: only a pipeline has stages; set layout.pipeline, too")
        if why := self._unproved():
            raise ValueError(why)
        return self

    def _unproved(self) -> str | None:
        if not self.axes or self.axes in PROVED:
            return None
        able = f"choose up to three of {', '.join(DENSE)}, or of {', '.join(READERS)}"
        return f"no test proves the layout {self} equal to one process: {able}"

    @property
    def repeats(self) -> bool:
        """True if several copies of this layout, along `data`, are proved, too."""
        return self.axes | {"data"} in PROVED

    def repeated(self, processes: int) -> Layout:
        """Return this layout with `data` multiplied to fill `processes` processes; unchanged if it cannot be repeated as often."""
        times, rest = divmod(processes, self.processes)
        return self if rest or not self.repeats else self.model_copy(update={"data": self.data * times})

    def misfit(self, config: ModelConfig) -> str | None:
        """Return the reason why a model's shape does not fit this layout; None if it fits."""
        for axis in sorted(self.axes):
            parts = self.stages if axis == "pipeline" else self.size(axis)
            if axis in _PROBLEMS and (problem := _PROBLEMS[axis](config, parts)):
                return f"layout.{axis} = {self.size(axis)}: {problem}"
        return None

    def refusal(self, device: str, config: ModelConfig | None = None, **used: object) -> str | None:
        """Return why this layout must not train, or None. `config`: the model's shape; `used`: values of the `UNPROVED` settings."""
        if problem := self._unproved() or (config and self.misfit(config)):
            return problem
        if self.context > 1 and device != "cpu":
            return "layout.context is proved only on CPUs: attention on a GPU cannot compute only some tokens of a forest yet"
        name = next((name for name, value in used.items() if value and self.axes & UNPROVED[name]), None)
        other = "use one process" if name and len(UNPROVED[name]) == len(AXES) else "change the layout"
        return name and f"the layout {self} is proved only without {name}: set {OFF.get(name, f'{name} to 0')}, or {other}"

    def __str__(self) -> str:
        sizes = " x ".join(f"{axis} {self.size(axis)}" for axis in AXES if self.size(axis) > 1) or "one process"
        return sizes if self.virtual_stages == 1 else f"{sizes} (virtual_stages {self.virtual_stages})"


def _tensor(config: ModelConfig, size: int) -> str | None:
    if config.moe is not None or config.mla is not None:
        return "a model with experts or latent attention cannot be split by matrices; choose another axis"
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if (count := getattr(config, name)) % size:
            return f"{name} is {count}, which it must divide"
    step = -(-config.vocab_size // size)
    return None if config.vocab_size > (size - 1) * step else f"the vocabulary has {config.vocab_size} tokens only; choose a smaller size"


def _context(config: ModelConfig, size: int) -> str | None:
    return "a model with experts has a loss over all tokens of a micro-batch; choose data, shard or expert" if config.moe else None


def _pipeline(config: ModelConfig, stages: int) -> str | None:
    if config.moe is not None:
        return "a model with experts has a loss in each layer, which stages do not add up; choose data, shard or expert"
    layers = config.num_hidden_layers
    return None if layers >= stages else f"the model has {layers} layers only; set pipeline x virtual_stages to that or less"


def _expert(config: ModelConfig, size: int) -> str | None:
    if config.moe is None:
        return "the model has no experts; choose another axis"
    return f"the model has {config.moe.num_experts} experts, which it must divide" if config.moe.num_experts % size else None


_PROBLEMS = {"expert": _expert, "context": _context, "tensor": _tensor, "pipeline": _pipeline}
