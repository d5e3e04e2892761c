"""Reading and writing GGUF files through the package `gguf`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from puna.models.bounds import check_sizes
from puna.models.config import ModelConfig
from puna.models.formats.families import parse_config
from puna.models.formats.gguf.header import check_header
from puna.models.formats.gguf.layout import config_fields, from_state, raw_config, to_state
from puna.models.formats.gguf.vocabulary import SAMPLING, read_tokenizer, tokenizer_fields
from puna.models.tokens.tokenizer import Tokenizer

FIELDS = {
    "block_count": "num_hidden_layers", "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
    "expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size",
}  # fmt: skip
"""GGUF's fields of sizes, and their names on the hub."""
FILE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}
"""`general.file_type` of a file whose matrices have this dtype."""


class GgufFile:
    """A file that is open for reading: its shape, tokenizer and tensors. ValueError for what is damaged or not computed here."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        check_header(path)
        try:
            self._reader = GGUFReader(path)
        except (ValueError, LookupError, OSError) as error:
            raise ValueError(f"is no GGUF file, or a damaged one: {error}") from error
        self.fields = {name: field.contents() for name, field in self._reader.fields.items()}
        prefix = f"{self.fields.get('general.architecture')}."
        self._shape = {name.removeprefix(prefix): value for name, value in self.fields.items()}
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._size = path.stat().st_size

    @property
    def config(self) -> ModelConfig:
        """The shape of the model."""
        check_sizes({hub: self._shape.get(name) for name, hub in FIELDS.items()}, len(self._tensors), self._size)
        frequencies = self._tensor("rope_freqs.weight") if "rope_freqs.weight" in self._tensors else None
        if "token_embd.weight" not in self._tensors:
            raise ValueError("the file lacks the tensor token_embd.weight")
        rows = int(self._tensors["token_embd.weight"].shape[1])
        raw = raw_config(self._shape, self._tensors, rows, frequencies)
        biased = "blk.0.attn_q.bias" in self._tensors
        if biased != (raw["model_type"] == "qwen2"):
            biases = "with" if biased else "without"
            raise ValueError(f"attention {biases} biases is not supported in a model of the family {raw['model_type']}")
        return parse_config(raw)

    @property
    def quantized(self) -> bool:
        """True if matrices are stored in blocks of few bits, which are unpacked."""
        return any(tensor.tensor_type.name not in ("F32", "F16", "BF16") for tensor in self._tensors.values())

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer with its chat template."""
        return read_tokenizer(self.fields)

    def state(self, config: ModelConfig, dtype: torch.dtype | None, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Return the decoder's state on `device` in `dtype`; None: the file's own, unpacked blocks in float32."""

        def placed(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype or tensor.dtype)

        return to_state({name: placed(self._tensor(name)) for name in self._tensors}, config)

    def _tensor(self, name: str) -> Tensor:
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        kind = tensor.tensor_type.name
        if kind in ("F32", "F16"):
            return torch.from_numpy(tensor.data.copy())
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
        return values.bfloat16() if kind == "BF16" else values


def write(path: Path, config: ModelConfig, state: Mapping[str, Tensor], tokenizer: Tokenizer) -> None:
    """Write a language model as a GGUF file. Matrices keep their dtype, vectors are float32.

    ValueError where the shape or the tokenizer has no form in GGUF; nothing is written then.
    """
    import gguf

    architecture, shape, frequencies = config_fields(config)
    words = tokenizer_fields(tokenizer, config.vocab_size)
    tensors = from_state(state, config)
    if frequencies is not None:
        tensors["rope_freqs.weight"] = frequencies
    dtype = state["model.embed_tokens.weight"].dtype
    if dtype not in FILE_TYPES:
        raise ValueError(f"weights of {dtype} have no form in GGUF")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_file_type(FILE_TYPES[dtype])
    for name, value in {**{f"{architecture}.{name}": value for name, value in shape.items()}, **words}.items():
        _add(writer, name, value)
    for name, value in tokenizer.generation.items() if tokenizer.generation.get("do_sample") else ():
        if name == "top_k":
            writer.add_int32(SAMPLING[name], value)  # not `_add`: llama.cpp reads it signed
        elif name in SAMPLING:
            writer.add_float32(SAMPLING[name], float(value))
    for name, tensor in tensors.items():
        values = tensor.detach().cpu()
        if values.ndim == 1:
            writer.add_tensor(name, values.float().numpy())
        elif values.dtype == torch.bfloat16:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(name, gguf.quants.quantize(values.float().contiguous().numpy(), kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, name: str, value: Any) -> None:
    """Add a field by its Python type; numbers are unsigned, as llama.cpp reads sizes and ids."""
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)
