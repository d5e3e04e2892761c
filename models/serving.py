"""Serving settings of commands and stages, and functions that build engines."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from puna.models.settings import NO_RESULT, Settings
from puna.models.training.parallel.layout import Layout

if TYPE_CHECKING:
    import torch

    from puna.models.generation import AnswerEngine, Engine
    from puna.models.memory import Work
    from puna.models.memory.offload import Shelf
    from puna.models.tokens.tokenizer import Tokenizer
    from puna.models.training.parallel.base import Parallel
    from puna.models.transformer import Transformer

Weights = Literal["same", "int8", "fp8"]
Offload = Literal["none", "host", "disk"]
AHEAD = 4  # tokens that a draft model speculates per step by default


class ServingSettings(Settings):
    """Settings for generating a model's answers."""

    weights: Weights = Field(
        "same", description="Format of the layers' matrices: same (as stored), or 8 bits: smaller, less exact (fp8: GPUs from 8.9 on)"
    )
    engine: Literal["puna", "vllm"] = Field("puna", description="Engine that generates answers: Puna's own, or vLLM's if it is installed")
    gpu_memory: float = Field(0.9, gt=0, le=1, description="vllm: share of the GPU's memory that vLLM takes")
    speculate: int = Field(
        0, ge=0, le=64, description="Maximum tokens to guess per step, by a draft model (0: 4 tokens) or from the text so far (0: none)"
    )
    offload: Offload = Field(
        "none", description="Place of layers that do not fit into memory: disk, or (for a GPU) host memory; none: all layers must fit"
    )
    memory: float | None = Field(
        None, gt=0, description="GB for the KV cache (null: 1 on a CPU, half of a GPU's free memory); with offload, for weights, too "
        "(null: most of the free memory)",
    )  # fmt: skip
    window: int | None = Field(
        None, ge=16, multiple_of=16,
        description="Keep in the KV cache only the first `sinks` and the last tokens of a text: at least this many last tokens, at most a "
        "quarter or 16 tokens more. For texts longer than the model's context; null: keep all",
    )  # fmt: skip
    layout: Layout = Field(
        Layout(), description="Processes that hold one model together: tensor, or pipeline (stages of layers). data: number of such "
        "groups, which share the questions. Default: each process has the whole model", json_schema_extra=NO_RESULT,
    )  # fmt: skip
    sinks: int = Field(0, ge=0, multiple_of=16, description="With a window: number of first tokens that are kept, as attention sinks")

    @model_validator(mode="after")
    def _of_one_engine(self) -> ServingSettings:
        if other := self.layout.axes - {"data", "tensor", "pipeline"}:
            raise ValueError(f"layout.{min(other)}: generation supports only tensor, pipeline and data; leave {min(other)} out")
        if self.layout.virtual_stages > 1:
            raise ValueError("layout.virtual_stages: generation runs one stage per process; leave virtual_stages out")
        if self.sinks and self.window is None:
            raise ValueError(f"sinks {self.sinks}: they are used only with a window; set window, or leave sinks out")
        if self.engine == "vllm" and self.window is not None:
            raise ValueError(f"window {self.window}: vLLM supports no window; set engine puna, or leave window out")
        if self.engine == "vllm" and self.memory is not None:
            raise ValueError(f"memory {self.memory:g}: vLLM takes the share gpu_memory of the GPU's memory; leave memory out")
        if self.offload != "none" and (self.engine == "vllm" or self.weights != "same"):
            raise ValueError(f"offload {self.offload}: only Puna's engine offloads layers, unquantized; set engine puna, weights same")
        if self.engine == "vllm" and (self.speculate or self.weights == "int8"):
            raise ValueError("engine vllm does not speculate, and quantizes only to fp8: speculate must be 0, weights same or fp8")
        return self

    @property
    def window_arguments(self) -> dict[str, Any]:
        return {} if self.window is None else {"sinks": self.sinks, "window": self.window}

    def unmet(self, where: str) -> list[str]:
        return without_vllm(self.engine, f"{where}.engine")


def without_vllm(engine: str, field: str) -> list[str]:
    """Return an error message in a list if `engine` is vllm and vLLM is not installed, else an empty list. `field`: the setting's name."""
    missing = engine == "vllm" and find_spec("vllm") is None
    return [f"{field}: vLLM is not installed; pip install 'puna[vllm]', or set engine to puna"] if missing else []


def guesses(speculate: int, draft: object) -> int:
    """Return the value of `SamplingParams.speculate`: the setting, or `AHEAD` if the setting is 0 and there is a draft model."""
    return speculate or (AHEAD if draft is not None else 0)


def quantize_for(model: Transformer, weights: Weights) -> Transformer:
    """Return the model, quantized in place to `weights` (same: unchanged). Raise ValueError if the model or device prevents this."""
    from puna.models.formats.quantized import quantize

    return model if weights == "same" else quantize(model, weights)


def engine_of(
    model: Transformer, tokenizer: Tokenizer | None, weights: Weights = "same", draft: tuple[Transformer, Tokenizer] | None = None,
    draft_weights: Weights = "same", held: Parallel | None = None, **limits: Any,
) -> Engine:  # fmt: skip
    """Return the engine of a model, with its draft model if there is one; both are quantized in place. `limits`: arguments of `Engine`.
    `held`: the model under a layout; with pipeline stages, there is no quantization and no draft. Raise ValueError if tokenizers differ."""
    from puna.models.generation import Engine
    from puna.models.generation.draft import DraftedEngine
    from puna.models.training.parallel.staged_engine import held_engine

    if held is not None and held.mesh.size("pipeline") > 1:
        return held_engine(held, tokenizer, **limits)
    quantize_for(model, weights)
    if draft is None:
        return Engine(model, tokenizer, **limits)
    smaller, other = draft
    if tokenizer is None or other.backend.get_vocab() != tokenizer.backend.get_vocab():
        raise ValueError("the draft has a different tokenizer from the model: a token id would mean different texts to them")
    return DraftedEngine(model, quantize_for(smaller, draft_weights), tokenizer, **limits)


class Offloaded(NamedTuple):
    """A model with offloaded layers, its engine's limits, the chosen plan in one line, and the store of its streamed layers, if any."""

    model: Transformer
    limits: dict[str, Any]
    plan: str
    shelf: Shelf | None


def offloaded_model(
    folder: Path, place: tuple[torch.device, torch.dtype], offload: Offload, memory: float | None, work: Work,
    step_tokens: int | None = None, draft: Transformer | None = None,
) -> Offloaded:  # fmt: skip
    """Return the model in a folder, offloaded by `planner.choose` for `work`. `memory`: limit in GB, the draft included (None: most of the
    free memory). `step_tokens`: see `planner.choose`. Raise ValueError if no plan fits or `offload` does not suit the device."""
    from puna.models.memory.offload import Source, offload_layers
    from puna.models.memory.planner import Rates, Shape, choose, free_memory, measure

    device, dtype = place
    if offload == "none" or (offload == "host" and device.type != "cuda"):
        raise ValueError(f"offload = {offload!r}: on a {device.type} the model's memory is the host's; set offload to disk")
    room = free_memory(device) if memory is None else int(memory * 1e9)
    source = Source(folder, dtype)
    smaller = 0 if draft is None else sum(p.nbytes for p in draft.parameters())
    shape = Shape.of(source, device, None if draft is None else draft.config)
    choose(shape, room - smaller, Rates(1.0, 1.0, 1.0), work, step_tokens)  # raises before the measurement if nothing fits
    plan = choose(shape, room - smaller, measure(source, offload, device), work, step_tokens)
    model, shelf = offload_layers(source, offload, plan.streamed, device)
    limits = {"sequences": plan.sequences, "step_tokens": plan.step_tokens, "memory": plan.pages}
    return Offloaded(model, limits, plan.line(offload), shelf)


def vllm_engine(folder: Path, tokenizer: Tokenizer, settings: ServingSettings) -> AnswerEngine:
    from puna.models.generation.vllm import VllmEngine

    return VllmEngine(folder, tokenizer, settings.weights, settings.gpu_memory)
