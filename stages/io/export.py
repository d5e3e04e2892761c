"""Atomic export of tables (to files that DuckDB and Hugging Face's `datasets` load) and of models."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from puna.stages.conversations import message_of, messages_of, others_of, tools_of
from puna.storage import Artifact, PunaError, errors_at
from puna.storage.errors import DamagedArtifact

Row = dict[str, Any]
SIDES = ("chosen", "rejected", "edited")
Format = Literal["hf", "gguf", "awq", "adapter"]
LAYOUT = (".json", ".safetensors", ".jinja")  # suffixes of the model files that Hugging Face reads


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `target`, or is removed after an error. Raise PunaError unless `target` is new or empty."""
    target = target.absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise PunaError(f"export: {target} already exists and is not empty; give a new folder")
    part = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.part"
    try:
        with errors_at(f"export: {target}", OSError):
            part.mkdir(parents=True)
            yield part
            if target.exists():
                target.rmdir()
            os.replace(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def export_data(artifact: Artifact, folder: Path | str, format: Literal["parquet", "jsonl"] = "parquet") -> Path:
    """Write an artifact's main table to one file in `folder`, atomically; return the file's path.

    Parquet has the columns as stored. JSON Lines have conversations as lists of messages: `messages` for instructions, `prompt` for
    prompts. Preferences have `prompt`, `chosen`, `rejected`, `edited` and `others`, if known; a single answer without an edit is
    `completion`, with a boolean `label`. Raise PunaError without a table, for bytes in JSON, or if `folder` has files."""
    if artifact.kind not in artifact.tables:
        raise PunaError(f"{artifact.id} has no table to export; models are exported by export_model")
    wrong = [field.name for field in artifact.schema() if pa.types.is_binary(field.type)]
    if format == "jsonl" and wrong:
        raise PunaError(f"{artifact.id}: the column {wrong[0]} contains bytes, which JSON cannot store; export it as parquet")
    with new_folder(Path(folder)) as part:
        (_parquet if format == "parquet" else _jsonl)(artifact, part / f"{artifact.kind}.{format}")
    return Path(folder) / f"{artifact.kind}.{format}"


def _parquet(artifact: Artifact, file: Path) -> None:
    with pq.ParquetWriter(file, artifact.schema(), compression="zstd") as writer:
        for batch in artifact.batches():
            writer.write_batch(batch)


def _jsonl(artifact: Artifact, file: Path) -> None:
    shape: Callable[[Row], Row] = SHAPES.get(artifact.kind, dict)
    with file.open("w", encoding="utf-8") as out:
        for batch in artifact.batches(rows=1024):
            for row in map(shape, batch.to_pylist()):
                out.write(json.dumps(row, ensure_ascii=False, default=datetime.isoformat) + "\n")
        out.flush()
        os.fsync(out.fileno())


def _rest(row: Row) -> Row:
    skipped, tools = ("messages", "tools", "others", *SIDES), tools_of(row)
    return ({"tools": tools} if tools else {}) | {name: v for name, v in row.items() if name not in skipped and v is not None}


def _preference(row: Row) -> Row:
    sides: Row = {side: [message] for side in SIDES if (message := message_of(row, side)) is not None}
    if ("chosen" in sides) != ("rejected" in sides) and "edited" not in sides:
        ((side, answer),) = sides.items()
        sides = {"completion": answer, "label": side == "chosen"}
    others = {"others": others_of(row)} if row["others"] is not None else {}
    return {"prompt": messages_of(row), **sides, **others, **_rest(row)}


SHAPES: dict[str, Callable[[Row], Row]] = {
    "instructions": lambda row: {"messages": messages_of(row), **_rest(row)},
    "prompts": lambda row: {"prompt": messages_of(row), **_rest(row)},
    "preferences": _preference,
}


def export_model(artifact: Artifact, folder: Path | str, format: Format = "hf", text: Path | None = None) -> list[Path]:
    """Write a model artifact to a new or empty folder; return the sorted paths of its files.

    `hf`: weights, configuration, tokenizer and chat template for transformers, vLLM and lm-eval. `gguf`: one file for llama.cpp, named
    after the folder. `awq`: like hf, with 4-bit matrices whose scales are calibrated on the file `text`, which should resemble the model's
    inputs; other formats take no `text`. `adapter`: the LoRA adapters that training saved (`lora.keep`), in PEFT's format. Raise PunaError
    if the artifact does not fit the format or is damaged, if `text` cannot be read, or if `folder` has files."""
    if (format == "awq") != (text is not None):
        raise PunaError("export: awq, and no other format, needs a text to calibrate its scales; give a text file only with format awq")
    if artifact.kind != "model":
        raise PunaError(f"export: {artifact.id} is of the kind {artifact.kind}; give a model")
    if damage := artifact.damage():
        raise DamagedArtifact.of(artifact.id, damage)
    if json.loads((artifact.path() / "config.json").read_text(encoding="utf-8")).get("reward_pooling", "last") != "last":
        reward = f"its reward is a mean over the answer's tokens, which the format {format} cannot represent"
        raise PunaError(f"export: {artifact.id}: {reward}; train it with pooling=last")
    target = Path(folder)
    with new_folder(target) as part:
        if format in ("gguf", "awq"):
            _convert(artifact, part, f"{target.absolute().name}.gguf", text)
        elif format == "adapter":
            names = [name for name in artifact.manifest.files if name.startswith("adapter/")]
            if not names:
                maker = f"{artifact.id}, made by {artifact.manifest.stage},"
                raise PunaError(f"export: {maker} has no adapters: train it with method=lora and lora.keep=true")
            for name in names:
                shutil.copyfile(artifact.path(name), part / Path(name).name)
        else:
            for path in artifact.path().iterdir():
                if path.suffix in LAYOUT and path.name != "manifest.json":
                    shutil.copyfile(path, part / path.name)
    return sorted(path for path in target.iterdir() if path.is_file())


def _convert(artifact: Artifact, part: Path, name: str, text: Path | None) -> None:
    """Write to the folder `part` the GGUF file `name` or, with a calibration text, the files of AWQ's format."""
    from puna.models.formats import awq_search
    from puna.models.formats.checkpoint import CheckpointError, load_with_tokenizer
    from puna.models.formats.gguf import files as gguf

    with errors_at(f"export: {text} cannot be read as text", OSError, UnicodeDecodeError):
        content = text.read_text(encoding="utf-8") if text is not None else None
    with errors_at(f"export: {artifact.id}", CheckpointError, ValueError):
        if content is not None:
            model, tokenizer = load_with_tokenizer(artifact.path())
            awq_search.write(model, tokenizer, awq_search.stretches(tokenizer.encode(content)), part)
            return
        model, tokenizer = load_with_tokenizer(artifact.path(), dtype=None)
        if model.head != "lm":
            raise ValueError("it is a reward model; llama.cpp runs language models")
        gguf.write(part / name, model.config, model.state_dict(), tokenizer)
