"""Conversion of tokenizers from and to GGUF, by llama.cpp's rules.

`tokenizer.ggml.pre` names the pre-tokenizer: the regular expressions that split a text before merges are applied. An unknown name is an
error, because a wrong pre-tokenizer would silently give other tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from puna.models.tokens.tokenizer import Tokenizer
from puna.models.tokens.tokenizer_trial import GPT2, WORDS

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token", "seperator": "sep_token"}
"""Special tokens whose ids a GGUF file holds (it writes "seperator") → their names in Hugging Face's tokenizers."""
LONGEST = 1024  # maximum characters of a token: `_sentence_piece` tries every cut of it
MERGES = 1 << 20  # maximum merges of a SentencePiece vocabulary: tokens such as aaabbb have merges by the thousand (Gemma: 0.6 million)
LLAMA3 = WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
PRE: dict[str, tuple[tuple[str, ...], bool]] = {
    "gpt-2": ((GPT2,), False), "smollm": ((r"\p{N}", GPT2), False), "qwen2": ((WORDS,), False), "llama-bpe": ((LLAMA3,), True),
}  # fmt: skip
"""Pre-tokenizers by name: regular expressions in order of use, and `ignore_merges` (True: a word that is a token is not merged)."""
SAME = {
    **dict.fromkeys(("gpt2", "mpt", "olmo", "jais"), "gpt-2"), **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell"), "smollm"),
    **dict.fromkeys(("stablelm2", "deepseek-r1-qwen"), "qwen2"), **dict.fromkeys(("llama3", "llama-v3"), "llama-bpe"),
}  # fmt: skip
"""Other names in llama.cpp → the pre-tokenizer's name in `PRE`."""


def read_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a file's `tokenizer.*` fields. Raise ValueError for a missing field or an unsupported value."""
    if "tokenizer.ggml.tokens" not in fields:
        raise ValueError("the file holds no tokenizer (tokenizer.ggml.tokens)")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    if (longest := max(map(len, tokens), default=0)) > LONGEST:
        raise ValueError(f"tokenizer.ggml.tokens holds a token of {longest:,} characters: at most {LONGEST} are read")
    types: list[int] = fields.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    kind = fields.get("tokenizer.ggml.model")
    if kind == "gpt2":
        backend = _byte_level(fields, tokens)
    elif kind == "llama":
        backend = _sentence_piece(fields, tokens, types)
    else:
        raise ValueError(f"tokenizer.ggml.model = {kind!r} is not supported (only 'gpt2' and 'llama')")
    special = [token for token, type_ in zip(tokens, types, strict=True) if type_ in (CONTROL, UNKNOWN)]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False) for token, type_ in zip(tokens, types, strict=True) if type_ == USER])
    ids = {name: fields.get(f"tokenizer.ggml.{key}_token_id") for key, name in NAMES.items()}
    named_tokens = {name: tokens[id_] for name, id_ in ids.items() if id_ is not None and id_ < len(tokens)}
    bos = named_tokens.get("bos_token")
    if bos is not None and fields.get("tokenizer.ggml.add_bos_token", kind == "llama"):
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))])
    stops = [id_ for key in ("eos", "eot", "eom") if (id_ := fields.get(f"tokenizer.ggml.{key}_token_id")) is not None]
    return Tokenizer(backend, named_tokens, fields.get("tokenizer.chat_template"), stops, _generation(fields))


def _byte_level(fields: Mapping[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    name = fields.get("tokenizer.ggml.pre")
    alias = SAME.get(str(name), name)
    if alias not in PRE:
        raise ValueError(f"tokenizer.ggml.pre = {name!r} is not supported (only {', '.join(sorted({*PRE, *SAME}))})")
    patterns, whole_words = PRE[alias]
    merges = [tuple(merge.split(" ", 1)) for merge in fields.get("tokenizer.ggml.merges", ())]
    backend = tokenizers.Tokenizer(BPE({token: id_ for id_, token in enumerate(tokens)}, merges, ignore_merges=whole_words))
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(fields: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> tokenizers.Tokenizer:
    """Return a SentencePiece BPE tokenizer: the highest score merges first. Raise ValueError if there are more than `MERGES` merges."""
    scores: list[float] = fields["tokenizer.ggml.scores"]
    vocabulary = {token: id_ for id_, token in enumerate(tokens)}
    normal = [id_ for id_, type_ in enumerate(types) if type_ in (NORMAL, USER, UNUSED)]
    merges = []
    for id_ in sorted(normal, key=lambda id_: (-scores[id_], id_)):
        token = tokens[id_]
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        merges += [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        if len(merges) > MERGES:
            raise ValueError(f"tokenizer.ggml.tokens has more than {MERGES:,} merges, the maximum")
    unknown_id = fields.get("tokenizer.ggml.unknown_token_id")
    unknown = None if unknown_id is None else tokens[unknown_id]
    backend = tokenizers.Tokenizer(BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = fields.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def tokenizer_fields(tokenizer: Tokenizer, rows: int) -> dict[str, Any]:
    """Return a file's `tokenizer.*` fields. `rows`: rows of the embeddings. Raise ValueError if llama.cpp would tokenize differently."""
    raw = json.loads(tokenizer.backend.to_str())
    if raw["model"]["type"] != "BPE":
        raise ValueError(f"a tokenizer of the kind {raw['model']['type']} cannot be stored in GGUF")
    if tokenizer.vocab_size > rows:
        raise ValueError(f"the tokenizer has {tokenizer.vocab_size} tokens, the embeddings {rows} rows")
    added_tokens = {token["id"]: token for token in raw["added_tokens"]}
    tokens, types = [f"[PAD{id_}]" for id_ in range(rows)], [UNUSED] * rows
    for token, id_ in {**raw["model"]["vocab"], **{token["content"]: id_ for id_, token in added_tokens.items()}}.items():
        tokens[id_] = token
        types[id_] = NORMAL if id_ not in added_tokens else CONTROL if added_tokens[id_]["special"] else USER
    fields: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    merges = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in raw["model"]["merges"]]
    if (raw.get("decoder") or {}).get("type") == "ByteLevel":
        fields |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": _splitter(raw)}
        fields["tokenizer.ggml.merges"] = [" ".join(merge) for merge in merges]
    else:
        fields |= _pieces(raw, tokens, types, merges)
    for key, name in NAMES.items():
        id_ = tokenizer.id_of(tokenizer.named.get(name))
        if id_ is not None:
            fields[f"tokenizer.ggml.{key}_token_id"] = id_
    if ends := [id_ for id_ in tokenizer.stop_ids if id_ != tokenizer.eos]:
        fields["tokenizer.ggml.eot_token_id"] = ends[-1]
    fields["tokenizer.ggml.add_bos_token"] = tokenizer.bos is not None and tokenizer.backend.encode("a").ids[:1] == [tokenizer.bos]
    if tokenizer.template is not None:
        source = tokenizer.template.source
        fields["tokenizer.chat_template"] = source if isinstance(source, str) else source["default"]
    return fields


def _splitter(raw: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for a byte-level tokenizer's pre-tokenizer; raise ValueError if llama.cpp has no name for it."""
    steps = raw["pre_tokenizer"].get("pretokenizers") or [raw["pre_tokenizer"]]
    patterns: list[str] = []
    for step in steps:
        if step["type"] == "Digits" and step["individual_digits"]:
            patterns.append(r"\p{N}")
        elif step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"] and "Regex" in step["pattern"]:
            patterns.append(step["pattern"]["Regex"])
        elif step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            patterns += [GPT2] if step["use_regex"] else []
        else:
            patterns.append(step["type"])
    own = (tuple(patterns), bool(raw["model"].get("ignore_merges")))
    name = next((name for name, splitter in PRE.items() if splitter == own), None)
    normal = (raw.get("normalizer") or {}).get("type")
    if name is None or normal not in (None, "NFC"):
        splitter = f"{' then '.join(patterns)}, ignore_merges {own[1]}, normalizer {normal}"
        raise ValueError(f"llama.cpp has no name for this tokenizer's splitter ({splitter}), and another one would give other tokens")
    return name


def _pieces(raw: Mapping[str, Any], tokens: Sequence[str], types: list[int], merges: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return a SentencePiece tokenizer's fields; a piece's score falls with its first merge's rank. Set BYTE and UNKNOWN in `types`."""
    normalizer = json.dumps([raw.get("normalizer"), raw.get("pre_tokenizer")], ensure_ascii=False)
    if not raw["model"].get("byte_fallback") or '"▁"' not in normalizer:
        raise ValueError("a tokenizer that is neither byte-level nor falls back to bytes as SentencePiece does cannot be stored in GGUF")
    if '"prepend_scheme": "first"' in normalizer:
        raise ValueError("llama.cpp puts SentencePiece's blank before a text always or never, this tokenizer (prepend_scheme first) at the "
            "beginning only: it would read other tokens")  # fmt: skip
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault("".join(merge), rank)
    scores = [-float(ranks.get(token, len(merges))) for token in tokens]
    unknown = raw["model"].get("unk_token")
    for id_, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            types[id_] = BYTE
        elif token == unknown:
            types[id_] = UNKNOWN
    prefix = "Prepend" in normalizer or '"prepend_scheme": "always"' in normalizer
    return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores, "tokenizer.ggml.add_space_prefix": prefix}


SAMPLING = {
    "temperature": "general.sampling.temp", "top_p": "general.sampling.top_p", "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p", "repetition_penalty": "general.sampling.penalty_repeat",
}  # fmt: skip
"""GGUF's sampling fields, by transformers' names."""


def _generation(fields: Mapping[str, Any]) -> dict[str, Any]:
    sampling = {name: fields[field] for name, field in SAMPLING.items() if field in fields}
    return {"do_sample": True, **{name: round(value, 6) for name, value in sampling.items()}} if sampling else {}
