"""Export of a model: a folder in Hugging Face's layout, or a GGUF file, whole or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

from puna.stages.io.folders import new_folder
from puna.storage import Artifact, PunaError
from puna.storage.errors import DamagedArtifact

Format = Literal["hf", "gguf", "awq", "adapter"]
LEFT = ("manifest.json",)
"""Files of an artifact that are Puna's own; tables of its training log are left out, too."""
LAYOUT = (".json", ".safetensors", ".jinja")


def export_model(artifact: Artifact, folder: Path | str, format: Format = "hf", text: Path | None = None) -> list[Path]:
    """Write a model artifact to a new or empty folder; returns the files, sorted.

    `hf`: weights, configuration, tokenizer and chat template as transformers, vLLM and lm-eval read them. `gguf`: one file for
    llama.cpp, `NAME.gguf` after the folder. `awq`: like hf with the layers' matrices in 4 bits, by scales chosen on a text file, `text`, of
    the kind that the model will read. `adapter`: the adapters that its training kept, as PEFT reads them. PunaError where it is no
    model, is damaged, the folder holds anything, the format has no form for it, there is no text for awq, or it has no adapters.
    """
    if (format == "awq") != (text is not None):
        raise PunaError("export: awq chooses scales by a text, and nothing else does: give a text file with the format awq alone")
    if artifact.kind != "model":
        raise PunaError(f"export: {artifact.id} is of the kind {artifact.kind}; a model is wanted")
    if damage := artifact.damage():
        raise DamagedArtifact.of(artifact.id, damage)
    target = Path(folder)
    with new_folder(target) as part:
        if format == "gguf":
            _write_gguf(artifact, part / f"{target.absolute().name}.gguf")
        elif text is not None:
            _write_awq(artifact, part, text)
        elif format == "adapter":
            _copy_adapter(artifact, part)
        else:
            _copy(artifact, part)
    return sorted(path for path in target.iterdir() if path.is_file())


def _copy(artifact: Artifact, part: Path) -> None:
    for path in sorted(artifact.path().iterdir()):
        if path.suffix in LAYOUT and path.name not in LEFT:
            shutil.copyfile(path, part / path.name)


def _copy_adapter(artifact: Artifact, part: Path) -> None:
    kept = [name for name in artifact.manifest.files if name.startswith("adapter/")]
    if not kept:
        raise PunaError(
            f"export: {artifact.id}, made by {artifact.manifest.stage}, has no adapters: train it with method=lora and lora.keep=true"
        )
    for name in kept:
        shutil.copyfile(artifact.path(name), part / Path(name).name)


def _write_gguf(artifact: Artifact, file: Path) -> None:
    from puna.models.formats.checkpoint import CheckpointError, load_with_tokenizer
    from puna.models.formats.gguf.files import write

    try:
        model, tokenizer = load_with_tokenizer(artifact.path(), dtype=None)
        if model.head != "lm":
            raise ValueError("it is a reward model; llama.cpp runs language models")
        write(file, model.config, model.state_dict(), tokenizer)
    except (CheckpointError, ValueError) as error:
        raise PunaError(f"export: {artifact.id}: {error}") from error


def _write_awq(artifact: Artifact, part: Path, text: Path) -> None:
    from puna.models.formats.awq_search import stretches, write
    from puna.models.formats.checkpoint import CheckpointError, load_with_tokenizer

    try:
        model, tokenizer = load_with_tokenizer(artifact.path())
        write(model, tokenizer, stretches(tokenizer.encode(text.read_text(encoding="utf-8"))), part)
    except (OSError, UnicodeDecodeError) as error:
        raise PunaError(f"export: {text} cannot be read as text: {error}") from error
    except (CheckpointError, ValueError) as error:
        raise PunaError(f"export: {artifact.id}: {error}") from error
