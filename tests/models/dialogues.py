"""Chat templates of six families with small tokenizers of their kinds, and generated conversations."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

from puna.models.tokens.tokenizer import LLAMA3, Tokenizer
from puna.models.tokens.tokenizer_trial import WORDS

LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}"
    "{% else %}{% set rest = messages %}{% set system = false %}{% endif %}"
    "{% for message in rest %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] if loop.first and system else message['content'] %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + '[/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
TEXTS = [
    "The quick brown fox doesn't jump over 12345 lazy dogs. What is the capital of Peru? It is Lima, I think.",
    "Él niño comió una manzana; où est la bibliothèque? 量子 コンピュータ 🙂🙂 — tabs\tand  spaces \r\n end",
    "def f(x):\n    return {'a': x + 1}\n\n\nprint(f(41)) user assistant system model tool",
] * 20


def shipped(name: str) -> str | None:
    """Return a template that TRL ships; None without TRL."""
    found = find_spec("trl")
    folders = [] if found is None else list(found.submodule_search_locations or [])
    paths = [Path(folder) / "chat_templates" / f"{name}.jinja" for folder in folders]
    return next((path.read_text(encoding="utf-8") for path in paths if path.is_file()), None)


@dataclass(frozen=True)
class Family:
    """A kind of tokenizer: `kind` (byte-level or SentencePiece), special tokens, the named ones among them, and the template."""

    kind: str
    special: tuple[str, ...]
    named: dict[str, str]
    template: str
    stops: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    system: bool = True


QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
HEADERS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")


@cache
def families() -> dict[str, Family]:
    """Return the families whose templates are available: two are written here, the others come with TRL."""
    marks = ("<unk>", "<s>", "</s>")
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    found = {
        "llama2": Family("blanks", marks, named, LLAMA2),
        "mistral": Family("blanks_first", (*marks, "[INST]", "[/INST]"), named, MISTRAL, system=False),
        "llama3": Family("bytes", HEADERS, {"bos_token": HEADERS[0], "eos_token": HEADERS[4]}, LLAMA3),
    }
    thinking = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    more = {
        "llama3_1": Family("bytes", HEADERS, {"bos_token": HEADERS[0], "eos_token": HEADERS[4]}, "llama3_1"),
        "qwen2_5": Family("bytes", QWEN, {"eos_token": QWEN[2], "pad_token": QWEN[0]}, "qwen2_5", plain=thinking[2:4]),
        "qwen3": Family("bytes", QWEN, {"eos_token": QWEN[2], "pad_token": QWEN[0]}, "qwen3", plain=thinking),
        "gemma": Family(
            "blanks_replaced", ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
            {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}, "gemma", system=False,
        ),
        "phi3": Family(
            "blanks", ("<unk>", "<s>", "<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"),
            {"bos_token": "<s>", "eos_token": "<|endoftext|>", "unk_token": "<unk>"}, "phi3", stops=("<|end|>",),
        ),
    }  # fmt: skip
    for name, family in more.items():
        if text := shipped(family.template):
            found[name] = Family(**{**vars(family), "template": text})
    return found


@cache
def made(name: str) -> Tokenizer:
    """Return the family's tokenizer, trained on a few lines."""
    family = families()[name]
    backend = tokenizers.Tokenizer(BPE(unk_token=None if family.kind == "bytes" else family.special[0], byte_fallback=family.kind != "bytes"))
    alphabet: list[str] = []
    if family.kind == "bytes":
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(WORDS), behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if family.kind == "blanks":
            backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
            steps.append(decoders.Strip(" ", 1, 0))
        elif family.kind == "blanks_first":
            backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", split=False)
            steps.append(decoders.Strip(" ", 1, 0))
        else:
            backend.normalizer = normalizers.Replace(" ", "▁")
        backend.decoder = decoders.Sequence(steps)
    bytes_ = [] if family.kind == "bytes" else [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=[*family.special, *bytes_], initial_alphabet=sorted(alphabet), show_progress=False, max_token_length=12
    )
    backend.train_from_iterator((" " + word for text in TEXTS for word in text.split(" ")) if bytes_ else TEXTS, trainer=trainer)
    backend = _without_flags(backend, bytes_)
    backend.add_tokens([tokenizers.AddedToken(token, special=False, normalized=False) for token in family.plain])
    return Tokenizer(backend, family.named, family.template, [backend.token_to_id(token) for token in family.stops])


def _without_flags(backend: tokenizers.Tokenizer, tokens: list[str]) -> tokenizers.Tokenizer:
    """Return the tokenizer with `tokens` as plain members of the vocabulary, not special ones."""
    import json

    raw = json.loads(backend.to_str())
    raw["added_tokens"] = [token for token in raw["added_tokens"] if token["content"] not in set(tokens)]
    return tokenizers.Tokenizer.from_str(json.dumps(raw))


PIECES = ["Lima", " ", "\n", "\n\n", "  ", "12", "é", "🙂", "it's", "a b", "?", "量子", "<", "|", "[", "x=1", "\t", "…", "½", "'", '"', "\\"]


def text(rng: random.Random, edges: bool = True) -> str:
    """Return a short text; with `edges` it may begin and end with spaces."""
    middle = "".join(rng.choice(PIECES) for _ in range(rng.randint(0, 8)))
    whole = rng.choice(["", " ", "\n", "\n "]) + "Ok" + middle + rng.choice(["", " ", "\n"]) if edges else "Ok" + middle
    return whole


def conversation(rng: random.Random, system: bool = True, edges: bool = True) -> list[dict[str, Any]]:
    """Return one to four exchanges, optionally after a system turn, ending with an answer."""
    turns: list[dict[str, Any]] = [{"role": "system", "content": text(rng, edges)}] if system and rng.random() < 0.4 else []
    for _ in range(rng.randint(1, 4)):
        turns += [{"role": role, "content": text(rng, edges)} for role in ("user", "assistant")]
    return turns
