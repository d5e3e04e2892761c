"""Checkpoints in Hugging Face's layout: config.json, model.safetensors and the tokenizer's files.

What is written here loads in transformers, vLLM and llama.cpp's converter as a model of its family; what
they write is read back, sharded or not, in fp32, fp16 or bf16. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from puna.models.config import ModelConfig
from puna.models.families import architecture, from_disk, hub_config, parse_config, to_disk
from puna.models.tokenizer import Tokenizer
from puna.models.transformer import Head, Transformer

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


class CheckpointError(ValueError):
    """A folder that is no checkpoint, or one that this model cannot represent."""


def save(model: Transformer, folder: Path | str, tokenizer: Tokenizer | None = None) -> None:
    """Write config.json and model.safetensors, and the tokenizer beside them.

    Tensors keep their dtype. With a tokenizer, the configuration names its special tokens.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tied = model.head == "lm" and model.config.tie_word_embeddings
    state = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in to_disk(model.state_dict(), model.config).items()
        if not (tied and name == "lm_head.weight")
    }
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    _write_json(folder / "config.json", _hub_config(model, tokenizer))
    if tokenizer is not None:
        tokenizer.save(folder)
        stops = {"bos_token_id": tokenizer.bos, "eos_token_id": [tokenizer.eos, tokenizer.eot]}
        _write_json(folder / "generation_config.json", {**stops, "pad_token_id": tokenizer.pad})


def load(folder: Path | str, head: Head | None = None) -> Transformer:
    """Read a checkpoint of any layout in `families.py`; the model is fp32 on CPU.

    `head=None` takes the head that the checkpoint holds. A scalar head that it lacks is zero: all first
    rewards are equal, and training shapes the hidden states before it trusts any of their directions.
    Raises CheckpointError, naming the file and the field, for what is missing, damaged or not computed here.
    """
    folder = Path(folder)
    config = read_config(folder)
    try:
        state = from_disk(_read_tensors(folder), config)
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    state = {name: tensor.float() for name, tensor in state.items()}
    found: Head = "scalar" if "score.weight" in state else "lm"
    model = Transformer(config, head or found)
    if model.head == "scalar":
        state.pop("lm_head.weight", None)
        if "score.weight" not in state:
            state["score.weight"] = torch.zeros(1, config.hidden_size)
    else:
        state.pop("score.weight", None)
        if config.tie_word_embeddings and "model.embed_tokens.weight" in state:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        elif "lm_head.weight" not in state:
            raise CheckpointError(
                f"{folder} has no language-model head (lm_head.weight), and its embeddings are not tied"
            )
    _check_tensors(model, state, folder)
    model.load_state_dict(state)
    return model


def read_config(folder: Path | str) -> ModelConfig:
    """The shape of the checkpoint in `folder`, from its config.json."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist: a model folder holds config.json and {WEIGHTS}")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    try:
        return parse_config(raw)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _hub_config(model: Transformer, tokenizer: Tokenizer | None) -> dict[str, Any]:
    raw: dict[str, Any] = {
        **hub_config(model.config),
        "architectures": [architecture(model.config.model_type, model.head)],
        # Readers differ in where they look for the rotary base.
        "rope_theta": model.config.rope_theta,
        "torch_dtype": str(model.model.embed_tokens.weight.dtype).removeprefix("torch."),
        "bos_token_id": None if tokenizer is None else tokenizer.bos,
        "eos_token_id": None if tokenizer is None else tokenizer.eos,
        "pad_token_id": None if tokenizer is None else tokenizer.pad,
    }
    if model.head == "scalar":
        raw |= {"num_labels": 1, "id2label": {"0": "reward"}, "label2id": {"reward": 0}}
    return raw


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    index = folder / INDEX
    names = [WEIGHTS]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    tensors: dict[str, Tensor] = {}
    for name in names:
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist: weights are read from safetensors only")
        try:
            tensors |= load_file(path)
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged or no safetensors file: {error}") from error
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
