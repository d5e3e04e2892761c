"""Requirements for training and running models: a chat template, one tokenizer, memory."""

from __future__ import annotations

import json
from typing import Any

from puna.models.config import ModelConfig
from puna.models.training.parallel.layout import CUT, Layout
from puna.models.training.rl_settings import RolloutSettings
from puna.models.training.settings import OptimizerSettings, TrainingSettings
from puna.stages.contract import Facts, StageConfig, rank_jobs
from puna.stages.executors import ranks
from puna.stages.training.settings import AdaptableConfig, AdapterConfig, SftConfig
from puna.stages.training.train import check_one_tokenizer, device
from puna.stages.training.vocabulary import tokenizer_of
from puna.storage import Artifact, PunaError

HELD_BYTES = 4  # bytes per frozen parameter
GRADIENT_BYTES = 4  # additional bytes per trained parameter, without the optimizer state
TOKENIZER = "tokenizer_config.json"


def models_of(facts: Facts, *inputs: str) -> list[Artifact]:
    models = [item.model for name in inputs for item in facts.inputs.get(name, ()) if item.model is not None]
    return list({model.key: model for model in models}.values())


def chat_template(facts: Facts, *inputs: str) -> list[str]:
    """Return an error message for each model of these inputs that has no tokenizer or no chat template."""
    results = []
    for model in models_of(facts, *inputs):
        if TOKENIZER not in model.manifest.files:
            results.append(f"{model.id} has no tokenizer; import the model again from a folder that holds its tokenizer.json")
        elif "chat_template" not in json.loads(model.path(TOKENIZER).read_bytes()):
            results.append(
                f"{model.id} has no chat template, which is needed to render conversations; import the model with one, "
                "for example --set chat_template=chatml"
            )
    return results


def documents_apart(facts: Facts, *inputs: str) -> list[str]:
    """Return an error message for each model of these inputs whose tokenizer has neither BOS nor EOS token to separate packed documents."""
    return [
        f"{model.id} has a tokenizer without bos_token and eos_token, which separate packed documents; "
        "name one in its tokenizer_config.json and import it again"
        for model in models_of(facts, *inputs)
        if not tokenizer_of(model).lead
    ]


def one_tokenizer(facts: Facts, *inputs: str) -> list[str]:
    """Return an error message if the models of these inputs encode text differently. Models without a tokenizer.json are not compared."""
    models = models_of(facts, *inputs)
    sums = [model.manifest.files.get("tokenizer.json") for model in models]
    if None in sums or len({record.sha256 for record in sums if record is not None}) < 2:
        return []
    try:
        check_one_tokenizer(models, f"{' and '.join(inputs)} must have one")
    except PunaError as error:
        return [str(error)]
    return []


def memory(
    facts: Facts, parameters: int, bytes_each: int, remedy: str, config: StageConfig | None = None,
    model: Artifact | ModelConfig | None = None, generate: int = 0, whole: bool = False, **used: object,
) -> list[str]:  # fmt: skip
    """Return an error message if the training layout in `config` is not supported (see `Layout.refusal` for `used`), or if the free memory,
    if known, is too small for `parameters` of `bytes_each` bytes in each process on this machine. Activations do not count. `model`:
    artifact or shape. `whole`: each process needs the whole weights between steps."""
    path, layout = next(rank_jobs.layouts(config)) if config is not None else ("", Layout())
    if config is not None and not (generate and layout.axes):
        layout = layout.repeated(max(1, ranks.count() - generate))
    here = min(ranks.number("LOCAL_WORLD_SIZE", 1, 1), layout.processes)
    free, needed, where = facts.available_memory_bytes, float(here * parameters * bytes_each), ""
    if layout.axes:
        from puna.models.formats.checkpoint import read_config
        from puna.models.training.parallel.estimate import Work, process_bytes

        place, shape = device().type, read_config(model.path()) if isinstance(model, Artifact) else model
        if why := layout.refusal(place, shape, **used):
            return [f"{path}: {why}"]
        where = f" in {here} processes of the layout {layout}"
        if shape is not None and layout.axes & CUT:
            work = Work(1, 1, 1, "fp32", moments=bytes_each - HELD_BYTES - GRADIENT_BYTES, whole=whole)
            needed = here * process_bytes(shape, work, layout)[0]
    if free is None or needed <= free:
        return []
    return [
        f"{parameters / 1e9:,.2f} billion parameters need at least {needed / 1e9:,.1f} GB ({bytes_each} bytes each{where}), "
        f"but only {free / 1e9:,.1f} GB of memory are free; {remedy}"
    ]


def training_memory(facts: Facts, name: str, optimizer: OptimizerSettings, method: str | None = None, **more: Any) -> list[str]:
    """Return error messages if the model of input `name` cannot be trained; see `memory`. `method`: full, lora, or None (no choice)."""
    remedy = "use a smaller model or another machine"
    if method == "full":
        remedy = f"train adapters (method=lora), or {remedy}"
    each = HELD_BYTES if method == "lora" else HELD_BYTES + GRADIENT_BYTES + optimizer.state_bytes
    models: list[tuple[Artifact | None, int]] = [(model, size(model)) for model in models_of(facts, name)]
    return [line for model, count in models or [(None, 0)] for line in memory(facts, count, each, remedy, model=model, **more)]


def other_moments(facts: Facts, name: str, file: str, optimizer: OptimizerSettings) -> list[str]:
    """Return an error message for each model of input `name` with Muon's moments (in `file`) if `optimizer` is not Muon, or vice versa."""
    from safetensors import safe_open

    complaints = []
    for model in (one for one in models_of(facts, name) if file in one.manifest.files):
        with safe_open(model.path(file), "numpy") as moments:
            muon = any(key.startswith("state.momentum.") for key in moments.keys())  # noqa: SIM118
        if muon != (optimizer.name == "muon"):
            own = "Muon's: set optimizer.name to muon" if muon else "not Muon's: set optimizer.name to that of its training"
            complaints.append(f"the moments beside {model.id} are {own}, or phases.0.optimizer to fresh")
    return complaints


def adaptable(facts: Facts, name: str, training: TrainingSettings | RolloutSettings, config: AdapterConfig) -> list[str]:
    """Return error messages if the model of input `name` cannot be trained on conversations: chat template, layout, memory, packages."""
    lora, noise = config.method == "lora", isinstance(config, SftConfig) and config.neftune_alpha
    own = {"nf4": config.quantization == "nf4", "dora": lora and config.lora.dora, "dropout": lora and config.lora.dropout}
    used = {**own, "neftune_alpha": noise, "generate": getattr(training, "generate", 0)}
    # Policies and students sample answers, mostly from whole weights with merged adapters.
    used["whole"] = name != "model" or lora or bool(facts.inputs.get("tasks"))
    trained = training_memory(facts, name, training.optimizer, config.method, config=config, **used)
    return [*chat_template(facts, name), *trained, *config.unmet()]


def training_needs(config: AdaptableConfig, facts: Facts) -> list[str]:
    """Return error messages if the input `model` cannot be trained on conversations; see `adaptable`."""
    return adaptable(facts, "model", config.training, config)


def model_template(config: object, facts: Facts) -> list[str]:
    return chat_template(facts, "model")


def size(model: Artifact) -> int:
    """Return a model's number of parameters, estimated from the size of its weight files."""
    config = json.loads(model.path("config.json").read_bytes())
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    weight_bytes = sum(record.bytes for name, record in model.manifest.files.items() if name.endswith(".safetensors") and "/" not in name)
    return weight_bytes // (2 if dtype in ("bfloat16", "float16") else 4)
