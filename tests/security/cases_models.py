"""Hostile requests and hostile model files. Each function returns how many of its attacks succeeded; none should."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from puna.models.config import ModelConfig
from puna.models.formats.checkpoint import CheckpointError, load_with_tokenizer, save
from puna.models.generation import Engine, SamplingParams
from puna.models.tokens.template import Template, TemplateError
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.transformer import Transformer
from puna.stages.contract import External, StageConfig, execute
from puna.stages.io.import_model import ImportModelConfig, import_model
from puna.stages.io.merge import merge
from puna.storage import PunaError, Store

SHAPE = ModelConfig(
    vocab_size=83,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.3,
)
HOSTILE: tuple[dict[str, Any], ...] = (
    {"temperature": 1e-9},
    {"temperature": 5e-324, "top_p": 0.5},
    {"mask": lambda _: torch.zeros(83, dtype=torch.bool)},
    {"mask": lambda _: torch.ones(5, dtype=torch.bool)},
    {"mask": lambda answer: answer[99]},
    {"logit_bias": {3: 1e308}},
    {"logit_bias": {83: 1.0}},
    {"repetition_penalty": 1e-308, "top_k": 2},
    {"top_k": 1 << 63},
)
"""Request parameters that once ended all other requests' answers."""


def computing() -> float:
    """Return the CPU seconds of this process and its ended children, so that a busy machine does not count as a successful attack."""
    return sum(os.times()[:4])


def _model() -> Transformer:
    """Return a model whose hidden states are not finite from token 82 on."""
    model = Transformer(SHAPE, seed=0)
    with torch.no_grad():
        model.model.embed_tokens.weight[82] = torch.nan
    return model


def answers_ended(model: Transformer | None = None) -> int:
    """Count hostile requests that end or change another request's answer, or delay it beyond its own steps."""
    engine = Engine(model or _model(), exact=True)
    asked, params = [5, 6, 7], SamplingParams(max_tokens=12, stop=(), seed=3)
    (expected,) = engine.generate([asked], params)
    succeeded = 0
    for prompt, hostile in [*(([1, 2], one) for one in HOSTILE), ([1, 82], {}), ([*range(40), 82], {})]:
        good = engine.submit(asked, params)
        tokens = [event.token for _ in range(3) for event in engine.step()]
        request = None
        try:
            request = engine.submit(prompt, SamplingParams(max_tokens=4, stop=(), **hostile))
            while not engine.scheduler.idle:
                tokens += [event.token for event in engine.step() if event.request is good]
        except Exception:  # noqa: BLE001  whatever a step raises ends everybody's answers
            engine.clear()
        failed = [one for one, _ in engine.take_failures()]
        succeeded += tokens != expected[0].tokens or any(one is not request for one in failed)
    return succeeded


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _gguf(fields: bytes = b"", count: int = 0, tensors: bytes = b"", tensor_count: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensor_count, count) + fields + tensors


def gguf_files() -> Iterator[tuple[str, bytes]]:
    """Yield hostile GGUF files by name: each declares far larger sizes than it holds."""
    array = _string("a") + struct.pack("<I", 9)
    yield "fields", _gguf(count=1 << 60)
    yield "tensors", _gguf(tensor_count=1 << 60)
    yield "numbers", _gguf(array + struct.pack("<IQ", 4, 1 << 60), 1)
    yield "strings", _gguf(array + struct.pack("<IQ", 8, 1 << 60), 1)
    yield "empty strings", _gguf(array + struct.pack("<IQ", 8, 1 << 22) + bytes(8 << 22), 1)
    yield "bytes", _gguf(array + struct.pack("<IQ", 0, 1 << 25) + bytes(1 << 25), 1)
    yield "nested", _gguf(array + struct.pack("<IQ", 9, 1 << 20) + bytes(1 << 21), 1)
    yield "long name", _gguf(struct.pack("<Q", 1 << 62) + bytes(64), 1)
    yield "long text", _gguf(_string("a") + struct.pack("<IQ", 8, 1 << 62), 1)
    tensor = _string("t") + struct.pack("<I", 2) + struct.pack("<QQIQ", 1 << 20, 1 << 20, 0, 0)
    yield "large tensor", _gguf(tensors=tensor, tensor_count=1)
    yield "sides", _gguf(tensors=_string("t") + struct.pack("<I", 1 << 31) + bytes(64), tensor_count=1)
    shared = b"".join(_string(f"t{i}") + struct.pack("<I", 1) + struct.pack("<QIQ", 1 << 16, 0, 0) for i in range(1000))
    yield "one for all", _gguf(tensors=shared + bytes(1 << 19), tensor_count=1000)
    shape = b"".join(_string(f"llama.{name}") + struct.pack("<II", 4, value) for name, value in (
        ("embedding_length", 8), ("block_count", 2_000_000_000), ("attention.head_count", 1), ("feed_forward_length", 8),
    ))
    shape += _string("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5)
    shape += _string("general.architecture") + struct.pack("<I", 8) + _string("llama")
    embeddings = _string("token_embd.weight") + struct.pack("<I", 2) + struct.pack("<QQIQ", 8, 2, 0, 0)
    yield "layers", _gguf(shape, 6, embeddings, 1) + bytes(256)


CONFIGS: tuple[dict[str, Any], ...] = (
    {"num_hidden_layers": 10**9},
    {"num_hidden_layers": 16_000},
    {"num_hidden_layers": 10**12, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4},
    {"num_hidden_layers": [1]},
    {"num_hidden_layers": True},
    {"hidden_size": 1 << 60, "head_dim": 8},
    {"head_dim": 1 << 40},
    {"num_attention_heads": 1 << 50, "num_key_value_heads": 1, "head_dim": 2},
    {"vocab_size": 1 << 60},
    {"intermediate_size": 1 << 60},
    {"model_type": "mixtral", "num_local_experts": 1 << 40, "num_experts_per_tok": 1},
    {"model_type": "mixtral", "num_local_experts": 40_000, "num_experts_per_tok": 1},
    {"rope_scaling": 5},
)
"""Fields of a config.json whose sizes do not fit its weights."""
OTHERS: dict[str, list[bytes]] = {
    "config.json": [b"[]", b"[" * 200_000, b"{\"hidden_size\": " + b"9" * 6000 + b"}"],
    "model.safetensors.index.json": [
        *(json.dumps({"weight_map": {"a": name}}).encode() for name in (
            "../model.safetensors", "/etc/passwd", "..", "a/../../b.safetensors", "a\0.safetensors", "pytorch_model.bin", 5,
        )),
        b"[]", b"{}", b"[" * 200_000, b"{\"weight_map\": [1]}",
    ],
    "model.safetensors": [
        struct.pack("<Q", 1 << 62), struct.pack("<Q", 99_000_000) + b"{}", struct.pack("<Q", 2) + b"[]",
        *(struct.pack("<Q", len(text)) + text for text in (
            b'{"a":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}', b'{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}',
        )),
    ],
    "tokenizer_config.json": [b"[]", b"[" * 200_000, b'{"added_tokens_decoder": {"x": {}}}', b'{"added_tokens_decoder": {"1": {}}}', b'{"added_tokens_decoder": 5}'],
    "tokenizer.json": [b"{}", b"[" * 200_000],
    "generation_config.json": [b'{"eos_token_id": ["x"]}', b'{"eos_token_id": {}}'],
}  # fmt: skip
"""Hostile contents of a model folder's other files."""


def _accepted(load: Callable[[], object], seconds: float) -> bool:
    """True unless the files are refused with a clear error within `seconds`."""
    begin = computing()
    try:
        load()
    except CheckpointError:
        return computing() - begin > seconds
    except Exception:  # noqa: BLE001  no clear error
        return True
    return True


def model_files_accepted(folder: Path, seconds: float = float("inf")) -> int:
    """Count hostile model files that are not refused with one clear error (within `seconds`, if given)."""
    tokenizer = Tokenizer.train(["to be or not to be"], 270)
    shape = ModelConfig(**{**SHAPE.model_dump(), "vocab_size": tokenizer.vocab_size})
    good = folder / "model"
    save(Transformer(shape, seed=0), good, tokenizer)
    (folder / "model.safetensors").write_bytes((good / "model.safetensors").read_bytes())
    load_with_tokenizer(good)
    attacks = [("config.json", json.dumps({**json.loads((good / "config.json").read_bytes()), **one}).encode()) for one in CONFIGS]
    attacks += [(name, content) for name, contents in OTHERS.items() for content in contents]
    read = json.loads((good / "tokenizer.json").read_bytes())
    attacks += [("tokenizer.json", json.dumps(read | one).encode()) for one in TOKENIZERS]
    succeeded = 0
    for name, content in attacks:
        before = (good / name).read_bytes() if (good / name).is_file() else None
        (good / name).write_bytes(content)
        succeeded += _accepted(lambda: load_with_tokenizer(good), seconds)
        (good / name).unlink() if before is None else (good / name).write_bytes(before)
    for name, content in gguf_files():
        path = folder / f"{name}.gguf"
        path.write_bytes(content)
        succeeded += _accepted(lambda path=path: load_with_tokenizer(path), seconds)
        path.unlink()
    load_with_tokenizer(good)
    return succeeded


_SLOW = r"(a+)+$"


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
_PART = {"Sequence": {"id": "A", "type_id": 0}}
TOKENIZERS: tuple[dict[str, Any], ...] = (
    {"decoder": _replace({"Regex": _SLOW}, "x")},
    {"decoder": {"type": "Sequence", "decoders": [_replace({"String": "a"}, "aa")] * 7}},
    {"normalizer": _replace({"Regex": _SLOW}, "x"), "added_tokens": [{**_TOKEN, "id": 300, "content": "a" * 40 + "!"}]},
    {"pre_tokenizer": _split("(" * 100_000)},
    {"added_tokens": [{**_TOKEN, "id": 300 + i, "content": f"<{i}>"} for i in range(1 << 17)]},
    {"added_tokens": [{**_TOKEN, "id": (1 << 32) - 1, "content": "<x>"}]},
    {"added_tokens": [{**_TOKEN, "id": 300, "content": "x" * (1 << 20)}]},
    {"model": {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0, "b": 1 << 31}}},
    {"model": {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##", "max_input_chars_per_word": 1 << 40, "vocab": {"a": 0}}},
    {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a" * length, 0.0] for length in range(1, 400)]}},
    {"post_processor": {"type": "TemplateProcessing", "single": [_PART] * (1 << 16), "pair": [_PART], "special_tokens": {}}},
    {"normalizer": 5}, {"added_tokens": [5]}, {"model": []}, {"pre_tokenizer": json.loads("[" * 900 + "]" * 900)},
)  # fmt: skip
"""Parts of a tokenizer.json that are refused on reading."""
TEXTS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"pre_tokenizer": _split(_SLOW)}, "a" * 40 + "!"),
    ({"pre_tokenizer": _split(r"\s+$")}, " " * 300_000 + "x"),
    ({"normalizer": _replace({"Regex": _SLOW}, "x")}, "a" * 40 + "!"),
    ({"normalizer": {"type": "Sequence", "normalizers": [_replace({"String": "a"}, "aa")] * 40}}, "a"),
    ({"normalizer": _replace({"String": "a"}, "b" * 1_000_000)}, "a" * 2000),
)
"""Parts of a tokenizer.json, and texts on which they take too long or grow too much."""


def texts_encoded(folder: Path, seconds: float = float("inf")) -> int:
    """Count texts on which an untrusted tokenizer is not stopped (within `seconds`, if given), or after which it encodes no other text."""
    Tokenizer.train(["to be or not to be"], 270).save(folder)
    good, succeeded = json.loads((folder / "tokenizer.json").read_bytes()), 0
    for change, text in TEXTS:
        (folder / "tokenizer.json").write_text(json.dumps(good | change))
        tokenizer = Tokenizer.load(folder)
        ways = (tokenizer.encode, lambda text, one=tokenizer: one.encode_batch(["to", text]), tokenizer.encode_markup)
        for encode in ways if change == TEXTS[0][0] else ways[:1]:
            begin = computing()
            try:
                encode(text)
                succeeded += 1
            except ValueError:
                succeeded += computing() - begin > seconds
        succeeded += not tokenizer.encode("be")
    return succeeded


_MODULES = ["q_proj", "v_proj"]
_NESTED = r"([a-z_.0-9]+)+X"
ADAPTERS: tuple[dict[str, Any], ...] = (
    {"r": 10**7}, {"r": 1 << 62}, {"r": -1}, {"r": "8"}, {"r": [8]}, {"r": 8, "rank_pattern": {"q_proj": 10**7}},
    {"peft_type": "LOHA", "r": 10**7}, {"peft_type": "LOKR", "decompose_both": True, "r": 10**7}, {"peft_type": "VERA", "r": 10**7},
    {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 10**12}, {"peft_type": ["LORA"]}, {"peft_type": "XLORA", "adapters": {"0": "/etc"}},
    {"target_modules": _NESTED}, {"modules_to_save": [_NESTED]}, {"rank_pattern": {_NESTED: 2}}, {"target_modules": "["},
    {"rank_pattern": {f"x{i}": 2 for i in range(10_000)}}, {"target_modules": ["x" * 10_000_000]},
    {"layer_replication": [[0, 1]] * 10_000}, {"megatron_config": {"a": 1}, "megatron_core": "megatron.evil"},
    {"init_lora_weights": "pissa_niter_1000000000"}, {"init_lora_weights": "loftq", "loftq_config": {"loftq_iter": 10**9}},
    {"init_lora_weights": {}}, {"target_modules": {}}, {"target_modules": 5},
)  # fmt: skip
"""Fields of an adapter_config.json for adapters of rank 2."""


def write_adapter(folder: Path, model: Transformer, change: dict[str, Any]) -> None:
    """Write LoRA adapters of rank 2 in PEFT's layout, with `change` applied to their configuration."""
    folder.mkdir(exist_ok=True)
    state = {}
    for name, tensor in model.state_dict().items():
        if any(module in name for module in _MODULES):
            rows, columns = tensor.shape
            place = f"base_model.model.{name.removesuffix('.weight')}"
            state |= {f"{place}.lora_A.weight": torch.ones(2, columns), f"{place}.lora_B.weight": torch.ones(rows, 2)}
    save_file(state, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 2, "target_modules": _MODULES, **change}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def adapters_merged(folder: Path, seconds: float = float("inf")) -> int:
    """Count hostile adapters that are not refused with one clear error (within `seconds`, if given)."""
    store, tokenizer = Store.open(folder / "store"), Tokenizer.train(["to be or not to be"], 270)
    shape = ModelConfig(**{**SHAPE.model_dump(), "vocab_size": tokenizer.vocab_size})
    model = Transformer(shape, seed=0)
    save(model, folder / "base", tokenizer)
    base = execute(import_model, ImportModelConfig(), {"model": External.resolve(f"model={folder / 'base'}")[0]}, store)
    succeeded = 0
    for number, change in enumerate(({}, *ADAPTERS)):
        write_adapter(folder / str(number), model, change)
        begin = computing()
        try:
            execute(merge, StageConfig(), {"model": base, "adapter": External.resolve(f"adapter={folder / str(number)}")[0]}, store)
            succeeded += number > 0
        except PunaError:
            succeeded += number == 0 or computing() - begin > seconds
    return succeeded


_LOOPS = "".join(f"{{% for {name} in range(99999) %}}" for name in "abcd") + "{% endfor %}" * 4
TEMPLATES = (
    _LOOPS,
    "{% set n = 10 %}{{ 'a' * n ** 10 }}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% set n = 9 %}{{ n ** (n ** n) }}",
    "{{ '%2000000000d' % 1 }}",
    "{% for i in range(900) %}{{ 'a' * 100000 }}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
)
"""Chat templates that loop, grow or try to leave the sandbox."""


def templates_rendered(seconds: float = float("inf")) -> int:
    """Count hostile chat templates that are rendered, are not stopped within `seconds`, or prevent the rendering of the next template."""
    succeeded = 0
    message = {"role": "user", "content": "hi"}
    for source in TEMPLATES:
        begin = computing()
        try:
            Template(source, {}).render([message], add_generation_prompt=True)
            succeeded += 1
        except TemplateError:
            succeeded += computing() - begin > seconds
        succeeded += Template("{{ messages[0].content }}", {}).render([message], add_generation_prompt=True) != "hi"
    return succeeded
