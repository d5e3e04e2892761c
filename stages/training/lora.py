"""Low-rank adapters (LoRA) through PEFT: injection into a model, saving, and merging into the model's weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from puna.models.training.settings import LoraSettings
from puna.stages.contract import StageRun
from puna.stages.training.settings import AdapterConfig
from puna.storage import PunaError

if TYPE_CHECKING:
    from peft import LoraConfig

    from puna.models.transformer import Transformer

ADAPTER, WEIGHTS = "adapter", "adapter_model.safetensors"
"""Folder of the adapters in a model artifact, and the file of their weights."""
INITIALIZATIONS: dict[str, bool | str] = {"zero": True, "pissa": "pissa"}  # setting `initialization` → PEFT's `init_lora_weights`


def peft_config(model: Transformer, lora: LoraSettings) -> LoraConfig:
    """Return PEFT's settings for this model. Raise PunaError for a target that the model lacks."""
    from peft import LoraConfig

    from puna.models.training.trainer import inner_matrices

    parts = {name.split(".")[-2] for name in inner_matrices(model) if name.endswith(".weight")}
    if unknown := sorted(set(lora.targets) - parts):
        raise PunaError(f"lora.targets: the model has no projection {unknown[0]}; it has {', '.join(sorted(parts))}")
    return LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=sorted(lora.targets or parts), use_rslora=lora.rslora,
        use_dora=lora.dora, init_lora_weights=INITIALIZATIONS[lora.initialization],
        modules_to_save=["score"] if model.head == "scalar" else None, bias="none",
    )  # fmt: skip


@contextmanager
def adapters(model: Transformer, config: AdapterConfig, run: StageRun) -> Iterator[dict[str, float]]:
    """Add adapters if `method` is `lora`; save (see `keeps`) and merge them after the `with` block. Yield `learning_rate_scales`.

    With 4-bit matrices, `save_model` merges the adapters instead, so that the model needs less memory until then. With `full`, yield {}."""
    from puna.models.formats.quantized import held_bytes, merge
    from puna.models.training.parallel.base import assemble

    if config.method == "full":
        yield {}
        return
    run.metric("trainable_parameters", inject(model, config.lora, run.seed("lora")))
    run.metric("weight_bytes", held_bytes(model))
    yield learning_rate_scales(model, config.lora)
    assemble(model)
    if keeps(config.lora):
        keep(model, run.folder / ADAPTER)
    if config.quantization == "none":
        merge(model)


def inject(model: Transformer, lora: LoraSettings, seed: int) -> int:
    """Add adapters to the model's projections; freeze all other weights except a scalar head. Return the number of trained parameters.

    The model's outputs do not change (with PiSSA, up to rounding: adapters start as a part of each matrix, which loses it)."""
    import torch
    from peft import inject_adapter_in_model

    settings = peft_config(model, lora)
    settings.modules_to_save = None  # PEFT copies such a module; here the head itself is trained
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # The weights of a layout come in their file's format; PEFT would round adapters to it.
        inject_adapter_in_model(settings, model.float())
    model.eval()  # otherwise dropout would change answers and measurements between training steps
    if model.head == "scalar":
        model.score.requires_grad_(True)
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def keeps(lora: LoraSettings) -> bool:
    """True if `lora.keep` asks to save adapters. PiSSA adapters are never saved, since they need the changed base matrices."""
    return lora.keep and lora.initialization == "zero"


def keep(model: Transformer, folder: Path) -> None:
    """Write the model's adapters, and a scalar head if there is one, to `folder` in PEFT's format."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    configs: Any = model.peft_config  # PEFT stores its settings there
    settings = copy.copy(configs["default"])
    state = get_peft_model_state_dict(model, adapter_name="default")
    if model.head == "scalar":
        settings.modules_to_save = ["score"]
        state |= {"score.weight": model.score.weight}
    folder.mkdir(exist_ok=True)
    save_file({f"base_model.model.{name}": tensor.detach().cpu().contiguous() for name, tensor in state.items()}, folder / WEIGHTS)
    settings.task_type = "CAUSAL_LM" if model.head == "lm" else "SEQ_CLS"
    settings.inference_mode = True
    settings.save_pretrained(str(folder))


def learning_rate_scales(model: Transformer, lora: LoraSettings) -> dict[str, float]:
    """Return parameter name → learning rate factor: `loraplus_ratio` for the matrices B (LoRA+)."""
    names = [name for name, p in model.named_parameters() if p.requires_grad and ".lora_B." in name]
    return dict.fromkeys(names, lora.loraplus_ratio)
