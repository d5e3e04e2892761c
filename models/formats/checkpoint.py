"""Checkpoints in Hugging Face's layout: config.json, model.safetensors and the tokenizer's files; GGUF files are read, too.

Checkpoints written here load in transformers, vLLM and llama.cpp's converter as models of their family. Checkpoints of these
families are read, sharded or not, in fp32, fp16, bf16 or AWQ's four bits. Nothing is ever unpickled."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from puna.models.config import ModelConfig
from puna.models.formats.families import architecture, from_disk, hub_config, parse_config, spelled_out, to_disk
from puna.models.formats.gguf.files import GgufFile
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.transformer import Head, Transformer
from puna.models.untrusted.bounds import check_sizes, read_object, weight_names

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
GGUF = ".gguf"
WRITTEN = {
    torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names of dtypes in safetensors files, in the order in which a file holds its tensors."""
DTYPES = {WRITTEN[dtype]: dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}
DERIVED = ".rotary_emb.inv_freq"  # end of names of tensors that old checkpoints hold, as Llama 2's, and that config.json determines


class Entry(NamedTuple):
    """The place of a tensor in a file: bytes begin .. end - 1."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class CheckpointError(ValueError):
    """An error for a folder or GGUF file that is not a valid checkpoint, or holds a model that this decoder cannot represent."""


@contextlib.contextmanager
def checkpoint_at(path: Path) -> Iterator[None]:
    """Convert errors raised within the context to a CheckpointError that names `path`."""
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, OSError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        message = str(error) if isinstance(error, ValueError | OSError) else repr(error)
        raise CheckpointError(message if str(path) in message else f"{path}: {message}") from error


def save(
    model: Transformer, folder: Path | str, tokenizer: Tokenizer | None = None, weights: Iterable[tuple[str, Tensor]] | None = None
) -> None:
    """Write config.json and model.safetensors, and the tokenizer beside them. Tensors keep their dtype. With a tokenizer, the configuration
    names its special tokens, and generation_config.json holds the sampling settings. `weights`: the weights by name; None: the model's."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = model.state_dict()
    left_out = {"lm_head.weight"} if model.head == "lm" and model.config.tie_word_embeddings else set()
    empty = {name: tensor.to("meta") for name, tensor in state.items() if name not in left_out}
    given = (to_disk({name: tensor}, model.config).items() for name, tensor in weights or state.items() if name not in left_out)
    write_tensors(folder / WEIGHTS, to_disk(empty, model.config), itertools.chain.from_iterable(given), {"format": "pt"})
    _write_json(folder / "config.json", _hub_config(model, tokenizer))
    if tokenizer is not None:
        tokenizer.save(folder)
        ids = {"bos_token_id": tokenizer.bos, "eos_token_id": list(tokenizer.stop_ids) or None, "pad_token_id": tokenizer.pad}
        _write_json(folder / "generation_config.json", {**tokenizer.generation, **ids})


def write_tensors(
    file: Path, empty: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file with the bytes of `save_file`, holding one tensor at a time. `empty`: a meta tensor of each tensor's dtype
    and shape, by name; `tensors`: the tensors, in any order. Raise ValueError if one is missing."""
    order = sorted(empty, key=lambda name: (list(WRITTEN).index(empty[name].dtype), name))
    ends = list(itertools.accumulate((empty[name].nbytes for name in order), initial=0))
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    for name, *place in zip(order, ends[:-1], ends[1:], strict=True):
        header[name] = {"dtype": WRITTEN[empty[name].dtype], "shape": list(empty[name].shape), "data_offsets": place}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    part, missing = file.with_name(f".{file.name}.part"), set(order)
    try:
        with part.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for name, tensor in tensors:
                out.seek(8 + len(text) + header[name]["data_offsets"][0])
                out.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
                missing.remove(name)
        if missing:
            raise ValueError(f"{file}: the tensor {min(missing)} is missing")
        os.replace(part, file)  # `tensors` may be mapped from the old file
    finally:
        part.unlink(missing_ok=True)


def load(
    path: Path | str, head: Head | None = None, dtype: torch.dtype | None = torch.float32, device: torch.device | str = "cpu"
) -> Transformer:
    """Return the model of a checkpoint (a folder in any layout of `families.py`, or a GGUF file), on `device` in `dtype`.

    Tensors are moved one by one, so that no second copy of the model is held. AWQ matrices are unpacked (`families.spelled_out`).

    `dtype=None` keeps each tensor's dtype; quantized blocks of a GGUF file are unpacked to float32. On the CPU a folder's tensors then stay
    memory-mapped, and are read on use. `head=None` takes the checkpoint's own head. A missing scalar head is initialized to zero, so that
    all rewards are equal at first. Raise CheckpointError, naming the file and the field, for anything missing, damaged or unsupported."""
    path = Path(path)
    with checkpoint_at(path):
        if path.suffix == GGUF:
            file = GgufFile(path)
            config, state = file.config, file.state(file.config, dtype, device)
        else:
            config = read_config(path)
            check_files(path)
            state = from_disk(spelled_out(_read_tensors(path, dtype, device), dtype), config)
        return build(config, state, head, path)


def load_with_tokenizer(
    path: Path | str, head: Head | None = None, dtype: torch.dtype | None = torch.float32, device: torch.device | str = "cpu"
) -> tuple[Transformer, Tokenizer]:
    """Return the model (see `load`) and its tokenizer from a folder or GGUF file; raise CheckpointError if either cannot be read."""
    path = Path(path)
    with checkpoint_at(path):
        tokenizer = GgufFile(path).tokenizer() if path.suffix == GGUF else Tokenizer.load(path)
    return load(path, head, dtype, device), tokenizer


def check_files(folder: Path) -> None:
    """Raise CheckpointError if weight files are missing or damaged, or too small for the sizes in config.json. Read only their headers."""
    tensors = sum(len(file.keys()) for _, file in weight_files(folder))
    size = sum((folder / name).stat().st_size for name in _names(folder))
    with checkpoint_at(folder):
        check_sizes(read_object(folder / "config.json"), tensors, size)


def build(config: ModelConfig, state: dict[str, Tensor], head: Head | None, path: Path) -> Transformer:
    """Return a model whose parameters are the tensors of `state`, not copies; change `state`. Raise CheckpointError if they do not fit."""
    own_head: Head = "scalar" if "score.weight" in state else "lm"
    with torch.device("meta"):
        model = Transformer(config, head or own_head)
    embedding = state.get("model.embed_tokens.weight")
    if model.head == "scalar":
        state.pop("lm_head.weight", None)
        if "score.weight" not in state:
            head_1D = torch.zeros(1, config.hidden_size)
            state["score.weight"] = head_1D if embedding is None else head_1D.to(embedding)
    else:
        state.pop("score.weight", None)
        if config.tie_word_embeddings and embedding is not None:
            state["lm_head.weight"] = embedding
        elif "lm_head.weight" not in state:
            raise CheckpointError(f"{path} has no language-model head (lm_head.weight), and its embeddings are not tied")
    _check_tensors(model, state, path)
    model.load_state_dict(state, assign=True)
    if model.head == "lm" and config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def read_config(folder: Path | str) -> ModelConfig:
    """Return the model's shape from the config.json in `folder`; raise CheckpointError if the file is missing, damaged or unsupported."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist: a model folder holds config.json and {WEIGHTS}")
    with checkpoint_at(path):
        return parse_config(read_object(path))


def _hub_config(model: Transformer, tokenizer: Tokenizer | None) -> dict[str, Any]:
    raw: dict[str, Any] = {
        **hub_config(model.config),
        "architectures": [architecture(model.config.model_type, model.head)],
        # Readers differ in where they look for the rotary base.
        "rope_theta": model.config.rope_theta,
        "torch_dtype": str(model.model.embed_tokens.weight.dtype).removeprefix("torch."),
        "bos_token_id": None if tokenizer is None else tokenizer.bos,
        "eos_token_id": None if tokenizer is None else tokenizer.eos,
        "pad_token_id": None if tokenizer is None else _padding(model.head, tokenizer),
    }
    if model.head == "scalar":
        raw |= {"num_labels": 1, "id2label": {"0": "reward"}, "label2id": {"reward": 0}}
    return raw


def _padding(head: Head, tokenizer: Tokenizer) -> int | None:
    """Return the padding token's id, None if no token fits. Reward models do not pad with stop tokens: they score the last real token."""
    if head == "lm" or tokenizer.pad not in tokenizer.stop_ids:
        return tokenizer.pad
    return min(tokenizer.special - {*tokenizer.stop_ids, tokenizer.bos}, default=None)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def weight_files(folder: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the path and the open reader of each safetensors file. Raise CheckpointError for a missing or damaged file."""
    for name in _names(folder):
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist: weights are read from safetensors only")
        try:
            with safe_open(path, "pt") as file:
                yield path, file
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged or not a safetensors file: {error}") from error


def _names(folder: Path) -> Sequence[str]:
    with checkpoint_at(folder):
        return weight_names(folder / INDEX) if (folder / INDEX).is_file() else [WEIGHTS]


def _read_tensors(folder: Path, dtype: torch.dtype | None, device: torch.device | str) -> dict[str, Tensor]:
    def place(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype if dtype and tensor.is_floating_point() else tensor.dtype)

    names = ((file, key) for _, file in weight_files(folder) for key in file.keys() if not key.endswith(DERIVED))  # noqa: SIM118  no mapping
    return {key: place(file.get_tensor(key)) for file, key in names}


def entries(path: Path) -> dict[str, Entry]:
    """Return each tensor's place in a valid safetensors file, by name. Raise ValueError for a dtype that is not in `DTYPES`."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(size))
    tensors = {}
    for name, one in header.items():
        if name == "__metadata__" or name.endswith(DERIVED):
            continue
        if one["dtype"] not in DTYPES:
            raise ValueError(f"{path}: {name} is {one['dtype']}; weights that stay on disk are {', '.join(DTYPES)}")
        begin, end = one["data_offsets"]
        tensors[name] = Entry(path, DTYPES[one["dtype"]], tuple(one["shape"]), 8 + size + begin, 8 + size + end)
    return tensors


def _check_tensors(model: Transformer, state: dict[str, Tensor], folder: Path) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    problems = [f"{name} is missing" for name in expected if name not in state]
    problems += [f"{name} is unknown" for name in state if name not in expected]
    problems += [
        f"{name} has shape {list(state[name].shape)}, config.json asks for {list(shape)}"
        for name, shape in expected.items()
        if name in state and tuple(state[name].shape) != shape
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(f"{folder}: {'; '.join(problems[:3])}{more}")
