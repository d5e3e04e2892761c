"""Reading and writing of GGUF files by the package `gguf`. Before reading, each length in the header is checked against the file."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from puna.models.config import ModelConfig
from puna.models.formats.families import parse_config
from puna.models.formats.gguf.layout import EXPERT_FIELDS, FIELDS, config_fields, from_state, raw_config, to_state
from puna.models.formats.gguf.vocabulary import SAMPLING, read_tokenizer, tokenizer_fields
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.untrusted.bounds import check_sizes

FILE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}  # `general.file_type` of a file whose matrices have this dtype
ELEMENTS = 1 << 21  # maximum elements of all arrays: two million, enough for half a million tokens with their merges, scores and types
DIMENSIONS = 4
DAMAGED = "is not a GGUF file, or a damaged one"
SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of each type of number
STRING, ARRAY = 8, 9


class GgufFile:
    """A GGUF file open for reading: its shape, tokenizer and tensors. The constructor raises ValueError if the file cannot be read."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        check_header(path)
        try:
            self._reader = GGUFReader(path)
        except (ValueError, LookupError, OSError) as error:
            raise ValueError(f"{DAMAGED}: {error}") from error
        self.fields = {name: field.contents() for name, field in self._reader.fields.items()}
        prefix = f"{self.fields.get('general.architecture')}."
        self._shape = {name.removeprefix(prefix): value for name, value in self.fields.items()}
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._size = path.stat().st_size

    @property
    def config(self) -> ModelConfig:
        check_sizes({hub: self._shape.get(name) for name, hub in (FIELDS | EXPERT_FIELDS).items()}, len(self._tensors), self._size)
        frequencies = self._tensor("rope_freqs.weight") if "rope_freqs.weight" in self._tensors else None
        if "token_embd.weight" not in self._tensors:
            raise ValueError("the file lacks the tensor token_embd.weight")
        raw = raw_config(self._shape, self._tensors, int(self._tensors["token_embd.weight"].shape[1]), frequencies)
        biased = "blk.0.attn_q.bias" in self._tensors
        if biased != (raw["model_type"] == "qwen2"):
            biases = "with" if biased else "without"
            raise ValueError(f"attention {biases} biases is not supported in a model of the family {raw['model_type']}")
        return parse_config(raw)

    def tokenizer(self) -> Tokenizer:
        return read_tokenizer(self.fields)

    def state(self, config: ModelConfig, dtype: torch.dtype | None, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Return the decoder's state dict on `device` in `dtype` (None: each tensor's own; quantized blocks become float32)."""

        def place(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype or tensor.dtype)

        return to_state({name: place(self._tensor(name)) for name in self._tensors}, config)

    def _tensor(self, name: str) -> Tensor:
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        kind = tensor.tensor_type.name
        if kind in ("F32", "F16"):
            return torch.from_numpy(tensor.data.copy())
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
        return values.bfloat16() if kind == "BF16" else values


def write(path: Path, config: ModelConfig, state: Mapping[str, Tensor], tokenizer: Tokenizer) -> None:
    """Write a language model as a GGUF file. Raise ValueError, and write nothing, if GGUF cannot store its shape, dtype or tokenizer."""
    import gguf

    architecture, shape, frequencies = config_fields(config)
    words = tokenizer_fields(tokenizer, config.vocab_size)
    tensors = from_state(state, config)
    if frequencies is not None:
        tensors["rope_freqs.weight"] = frequencies
    dtype = state["model.embed_tokens.weight"].dtype
    if dtype not in FILE_TYPES:
        raise ValueError(f"weights of {dtype} cannot be stored in GGUF")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_file_type(FILE_TYPES[dtype])
    # llama.cpp reads sizes and ids as unsigned.
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for name, value in {**{f"{architecture}.{name}": value for name, value in shape.items()}, **words}.items():
        add.get(type(value), writer.add_array)(name, value)
    for name, value in tokenizer.generation.items() if tokenizer.generation.get("do_sample") else ():
        if name == "top_k":
            writer.add_int32(SAMPLING[name], value)  # llama.cpp reads `top_k` as signed
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


def check_header(path: Path) -> None:
    """Raise ValueError if the file is not GGUF, or its header claims more fields, text, elements, tensors or data than the file has."""
    size = path.stat().st_size
    if size < 24:
        raise ValueError(f"{DAMAGED}: it has {size} bytes")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        _Walk(data).check()


class _Walk:
    """A reader of a GGUF file's header that checks every size that the header claims."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at, self.elements, self.alignment = data, 4, 0, 32
        self.order = "<" if struct.unpack_from("<I", data, 4)[0] & 0xFFFF else ">"

    def check(self) -> None:
        if self.data[:4] != b"GGUF":
            raise ValueError("is not a GGUF file: it does not begin with GGUF")
        self.number("I")
        tensors, fields = self.number("Q"), self.number("Q")
        self.room(13 * fields, f"{fields:,} fields")
        self.room(32 * tensors, f"{tensors:,} tensors")
        for _ in range(fields):
            name = self.text("a field's name")
            kind = self.number("I")
            begin = self.at
            self.value(kind, name)
            if name == "general.alignment" and kind == 4:
                (self.alignment,) = struct.unpack_from(f"{self.order}I", self.data, begin)
        self.tensors(tensors)

    def tensors(self, count: int) -> None:
        """Raise ValueError unless each tensor has 1 to 4 dimensions and lies in the file, and all together are no larger than the file."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        claims: list[tuple[str, int, int]] = []
        for _ in range(count):
            name, sides = self.text("a tensor's name"), self.number("I")
            if not 1 <= sides <= DIMENSIONS:
                raise ValueError(f"{DAMAGED}: the tensor {name[:80]!r} has {sides:,} dimensions")
            shape = [self.number("Q") for _ in range(sides)]
            kind, offset = self.number("I"), self.number("Q")
            block, width = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            claims.append((name, offset, math.prod(shape) * width // block))
        begin, whole = -(-self.at // max(self.alignment, 1)) * self.alignment, len(self.data)
        for name, offset, size in claims:
            if begin + offset + size > whole:
                raise ValueError(f"{DAMAGED}: the tensor {name[:80]!r} claims {size:,} bytes, the file has {whole:,}")
        if (total := sum(size for _, _, size in claims)) > whole:
            raise ValueError(f"{DAMAGED}: its tensors claim {total:,} bytes in all, the file has {whole:,}")

    def value(self, kind: int, name: str) -> None:
        """Skip a field's value; raise ValueError if its type is not supported, or its size exceeds the file or `ELEMENTS`."""
        if kind == STRING:
            self.skip(self.number("Q"), name)
        elif kind in SCALARS:
            self.skip(SCALARS[kind], name)
        elif kind == ARRAY:
            inner, count = self.number("I"), self.number("Q")
            self.elements += count
            self.room(count * (8 if inner == STRING else SCALARS.get(inner, 1)), f"{name[:80]!r} with {count:,} elements")
            if self.elements > ELEMENTS:
                raise ValueError(f"the arrays up to {name[:80]!r} have {self.elements:,} elements: at most {ELEMENTS:,} are read")
            if inner in SCALARS:
                self.skip(SCALARS[inner] * count, name)
            elif inner == STRING:
                for _ in range(count):
                    self.skip(self.number("Q"), name)
            else:
                raise ValueError(f"{name[:80]!r} is an array of type {inner}, which is not supported")
        else:
            raise ValueError(f"{DAMAGED}: {name[:80]!r} is of the unknown type {kind}")

    def number(self, form: str) -> int:
        begin = self.at
        self.skip(struct.calcsize(f"={form}"), "the header")
        value: int = struct.unpack_from(f"{self.order}{form}", self.data, begin)[0]
        return value

    def text(self, what: str) -> str:
        size = self.number("Q")
        self.skip(size, what)
        return self.data[self.at - size : self.at].decode("utf-8", "replace")

    def skip(self, size: int, what: str) -> None:
        self.room(size, what[:80])
        self.at += size

    def room(self, size: int, what: str) -> None:
        if size > len(self.data) - self.at:
            raise ValueError(f"{DAMAGED}: {what} claims {size:,} bytes, the file has {len(self.data) - self.at:,} more")
