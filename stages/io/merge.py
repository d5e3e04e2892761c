"""The stage that merges external adapters into a model's weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from puna.stages.contract import External, Model, StageConfig, StageRun, stage
from puna.stages.io.import_model import local_folder, snapshot
from puna.storage import Artifact, PunaError, errors_at

if TYPE_CHECKING:
    from puna.models.transformer import Transformer

FILES = ("adapter_config.json", "adapter_model.safetensors")


@stage(kind="model")
def merge(model: Model, adapter: External, config: StageConfig, run: StageRun) -> None:
    """Merge the adapters of a folder in PEFT's format into the model's weights, which keep their dtype.

    The folder, local or `hf://OWNER/NAME`, contains adapter_config.json and adapter_model.safetensors, as written by PEFT, TRL and stages
    with `lora.keep`. The adapter types in `models.untrusted.bounds.ADAPTERS` (LoRA, also with DoRA, LoHa, IA3, …) are accepted. Raise
    PunaError for other types, for unsafe settings, and for an unexpected or missing tensor. The model's tokenizer is kept."""
    from puna.models.formats.checkpoint import CheckpointError, load_with_tokenizer, save

    folder = _folder(adapter, run)
    with errors_at(f"{model.id} cannot be read", CheckpointError):
        network, tokenizer = load_with_tokenizer(model.path(), dtype=None)
    merged, parameters = _merge(network, folder, model, adapter.uri)
    run.metric("adapter_parameters", parameters)
    save(merged, run.folder, tokenizer)


def _folder(adapter: External, run: StageRun) -> Path:
    if adapter.uri.startswith("hf://") and not adapter.files:
        folder = snapshot("merge", adapter.uri, run.scratch / "hub", lambda names: FILES)
    else:
        folder = local_folder(adapter, run.scratch)
    for name in FILES:
        if not (folder / name).is_file():
            other = (folder / "adapter_model.bin").is_file()
            pickled = "; adapter_model.bin is a pickle, which may run code and is not read" if other else ""
            raise PunaError(f"merge: {adapter.uri} has no {name}; give the folder that PEFT's save_pretrained wrote{pickled}")
    return folder


def _merge(network: Transformer, folder: Path, model: Artifact, uri: str) -> tuple[Transformer, int]:
    """Return the network with merged adapters, and the number of their LoRA and `modules_to_save` parameters (others are not counted)."""
    from peft import PeftConfig, PeftModel
    from safetensors import SafetensorError

    from puna.models.formats.hub import PunaForCausalLM, PunaForSequenceClassification
    from puna.models.untrusted.bounds import ADAPTER_BYTES, check_adapter, read_object

    kind = PunaForCausalLM if network.head == "lm" else PunaForSequenceClassification
    try:
        twin = kind.from_transformer(network)
        check_adapter(read_object(folder / FILES[0], ADAPTER_BYTES), [name for name, _ in twin.named_modules()])
        settings = PeftConfig.from_pretrained(str(folder))
        settings.inference_mode = True
        adapted = PeftModel(twin, settings, low_cpu_mem_usage=True)
        report = adapted.load_adapter(str(folder), "default", low_cpu_mem_usage=True)
    except (ValueError, RuntimeError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        raise PunaError(f"merge: {uri} does not fit {model.id}: {str(error).strip()}") from error
    for names, what in ((report.unexpected_keys, "the model has no place for"), (report.missing_keys, "there is no")):
        if names:
            more = f", nor {len(names) - 1} more" if names[1:] else ""
            raise PunaError(f"merge: {uri} does not fit {model.id}: {what} {names[0]}{more}")
    numbers = sum(tensor.numel() for name, tensor in adapted.named_parameters() if "lora_" in name or ".modules_to_save." in name)
    return adapted.merge_and_unload(safe_merge=True).to_transformer(), numbers
