"""Import of a model: a safetensors or GGUF checkpoint of a known family, with its tokenizer and chat template."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator

from puna.stages.contract import External, StageConfig, StageRun, stage
from puna.storage import PunaError, errors_at

if TYPE_CHECKING:
    from puna.models.tokens.tokenizer import Tokenizer
    from puna.models.transformer import Transformer


def local_folder(files: External, scratch: Path) -> Path:
    """Return the path of a single local file, else the folder of the files. If any file is remote, copy all to a folder in `scratch`."""
    places = {file.name: file.local() for file in files.files}
    if len(places) == 1 and (only := next(iter(places.values()))) is not None:
        return only
    if None not in places.values():
        name, place = next(iter(places.items()))
        return Path(str(place).removesuffix(name))
    for file in files.files:
        target = scratch / "fetched" / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        with file.open() as source, target.open("wb") as out:
            shutil.copyfileobj(source, out)
    return scratch / "fetched"


def snapshot(stage: str, uri: str, target: Path, patterns: Callable[[list[str]], tuple[str, ...]]) -> Path:
    """Download the files of `hf://OWNER/NAME@COMMIT` that match `patterns(all file names)` to `target`; return the folder. Raise PunaError
    on failure; `stage` begins the message."""
    import httpx
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    repository, _, commit = uri.removeprefix("hf://").partition("@")
    try:
        names = [file.rfilename for file in HfApi().model_info(repository, revision=commit).siblings or []]
        return Path(snapshot_download(repository, revision=commit, allow_patterns=list(patterns(names)), local_dir=target))
    except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise PunaError(f"{stage}: {uri}: the model cannot be downloaded from the hub ({reason})") from error


NEEDED = ("*.json", "*.safetensors", "*.jinja", "additional_chat_templates/*")  # patterns of the files to fetch from the hub


class ImportModelConfig(StageConfig):
    dtype: Literal["stored", "float32", "bfloat16", "float16"] = Field(
        "stored", description="Number format of the imported weights; stored: the checkpoint's, float32 for GGUF's quantized blocks"
    )
    chat_template: str | None = Field(None, description="Name (llama3, chatml), Jinja file or text of a template; else the checkpoint's")

    @field_validator("chat_template")
    @classmethod
    def _read(cls, value: str | None) -> str | None:
        """Return the template's text, which is part of the artifact's key. `value`: name, file or text."""
        if value is None or "{" in value:
            return value
        from puna.models.tokens.template import TEMPLATES

        if value in TEMPLATES:
            return TEMPLATES[value]
        if not Path(value).is_file():
            raise ValueError(f"{value!r} is neither a chat template's name ({', '.join(TEMPLATES)}) nor a file")
        return Path(value).read_text(encoding="utf-8")


@stage(kind="model")
def import_model(model: External, config: ImportModelConfig, run: StageRun) -> None:
    """Import a model from a checkpoint: a folder in Hugging Face format, a GGUF file, or `hf://OWNER/NAME[@REVISION]`.

    The family, all tensors' names and shapes, and the vocabulary size are checked first. A chat template must end answers in a stop token.
    The metrics describe the model. The sampling settings of generation_config.json are kept."""
    import torch

    from puna.models.formats.checkpoint import CheckpointError, load_with_tokenizer, save
    from puna.models.tokens.tokenizer import TemplateError

    path = _local(model, run.scratch)
    with errors_at(f"import_model: {model.uri}", CheckpointError):
        network, tokenizer = load_with_tokenizer(path, dtype=None if config.dtype == "stored" else getattr(torch, config.dtype))
    if config.chat_template is not None:
        with errors_at("import_model.chat_template", TemplateError):
            tokenizer = tokenizer.with_template(config.chat_template)
    _check(network, tokenizer, model.uri)
    for name, value in _description(network, tokenizer, path).items():
        run.metric(name, value)
    save(network, run.folder, tokenizer)


def _check(network: Transformer, tokenizer: Tokenizer, uri: str) -> None:
    from puna.models.tokens.chat import PROBE, ChatError

    rows = network.config.vocab_size
    if tokenizer.vocab_size > rows:
        sizes = f"the tokenizer has {tokenizer.vocab_size} tokens, the embeddings {rows} rows: {tokenizer.token(rows)!r} has none"
        raise PunaError(f"import_model: {uri}: {sizes}; use the tokenizer that the model was trained with")
    if tokenizer.template is None:
        return
    try:
        tokenizer.chat(PROBE[:1])
        tokenizer.render(PROBE[:2])
    except ChatError as error:
        message = f"the chat template does not fit the tokenizer: {error}; give another chat_template"
        raise PunaError(f"import_model: {uri}: {message}") from error


def _description(network: Transformer, tokenizer: Tokenizer, path: Path) -> dict[str, float | int | str]:
    from puna.models.tokens.tokenizer_files import SAMPLING

    shape, sampling = network.config, ("do_sample", "max_new_tokens", *SAMPLING)
    ids = {"bos": tokenizer.bos, "eos": tokenizer.eos}
    special = {name: "none" if id_ is None else tokenizer.token(id_) for name, id_ in ids.items()}
    return {
        "family": shape.model_type, "format": "gguf" if path.suffix == ".gguf" else "safetensors", "head": network.head,
        "parameters": sum(parameter.numel() for parameter in network.parameters()), "layers": shape.num_hidden_layers,
        "hidden_size": shape.hidden_size, "context": shape.max_position_embeddings,
        "dtype": str(network.model.embed_tokens.weight.dtype).removeprefix("torch."), "tokens": tokenizer.vocab_size,
        "embedding_rows": shape.vocab_size, **special,
        "stop_tokens": " ".join(tokenizer.token(id_) for id_ in tokenizer.stop_ids) or "none",
        "sampling": " ".join(f"{name}={value}" for name, value in sorted(tokenizer.generation.items()) if name in sampling) or "none",
        "chat_template": "none" if tokenizer.template is None else "there",
    }  # fmt: skip


def _local(model: External, scratch: Path) -> Path:
    def needed(names: list[str]) -> tuple[str, ...]:
        return NEEDED if any(name.endswith(".safetensors") for name in names) else (*NEEDED, "*.gguf")

    if model.uri.startswith("hf://") and not model.files:
        return _gguf_file(snapshot("import_model", model.uri, scratch / "hub", needed), model.uri)
    if len(model.files) == 1 and not model.files[0].name.endswith(".gguf"):
        raise PunaError(f"import_model: {model.uri}: give the model's folder with its configuration and tokenizer, or a GGUF file")
    return _gguf_file(local_folder(model, scratch), model.uri)


def _gguf_file(path: Path, uri: str) -> Path:
    if path.suffix == ".gguf" or (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) != 1:
        message = f"{len(files)} GGUF files ({', '.join(file.name for file in files[:3])}): name one" if files else "no GGUF file"
        raise PunaError(f"import_model: {uri} has no config.json of a Hugging Face model, and {message}")
    return files[0]
