"""Safety of untrusted tokenizers: known steps run directly; others are first run with limits on time and memory.

A backtracking regular expression may take time that is polynomial or exponential in a text's length, and replacements may multiply the
text. A pattern does not show this in general, so a separate process first runs a tokenizer's steps on each text, without the vocabulary."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

from puna.models.untrusted import bounded_process
from puna.models.untrusted.bounded_process import SECONDS, LimitError, Process

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Llama 3's pattern, except that digits come one by one: contractions; a word, with one space or symbol before; one digit; symbols, with a
# space before and newlines after; whitespace up to the last newline; other whitespace, whose last character stays with the next word.
WORDS = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+END|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*END|"
    r"NUMBER| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KNOWN = {
    GPT2, WORDS, WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|"),
    CASED.replace("END", CONTRACTIONS + "?").replace("NUMBER", r"\p{N}{1,3}"), CASED.replace("END", "").replace("NUMBER", r"\p{N}"),
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "[一-龥\u3040-ゟ゠-ヿ]+", r"\p{N}{1,3}", r"\p{N}", r"\d", "[0-9][0-9][0-9]", "[\r\n]", r"\s+", " {2,}",
}  # fmt: skip
"""Patterns of published tokenizers that run in linear time: GPT-2, Qwen, Llama 3, GPT-4 and 4o, Tekken, DeepSeek V3."""
PLAIN = {
    "Sequence", "Prepend", "Replace", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "ByteLevel", "Split", "Digits",
    "Metaspace", "Whitespace", "WhitespaceSplit", "Punctuation", "BertNormalizer", "BertPreTokenizer", "UnicodeScripts", "Fuse",
    "ByteFallback", "BPEDecoder", "WordPiece",
}  # fmt: skip
"""Steps that take linear time, apart from their patterns."""
MEMORY = 1 << 30  # maximum bytes of memory of a trial
GROWTH, LITERAL = 64, 256  # maximum growth of a text by known steps, and maximum characters of a literal pattern


def steps_of(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """Return the steps before a tokenizer's vocabulary look-up, as in `tokenizer.json`."""
    added_tokens = [{"id": id_, **token.__getstate__()} for id_, token in sorted(backend.get_added_tokens_decoder().items())]
    parts = {"normalizer": backend.normalizer, "pre_tokenizer": backend.pre_tokenizer}
    return {"added_tokens": added_tokens, **{name: part and json.loads(part.__getstate__()) for name, part in parts.items()}}


def unknown(steps: object) -> str | None:
    """Return a description of the first step (normalizer, pre-tokenizer, decoder) not known to take linear time; None if all are."""
    growth = 1
    for step in _steps(steps):
        kind, pattern = step.get("type"), step.get("pattern")
        if kind not in PLAIN:
            return f"the step {kind!r}"
        regex, literal = (pattern.get("Regex"), pattern.get("String")) if isinstance(pattern, dict) else (None, None)
        if regex is not None and regex not in KNOWN:
            return f"the pattern {regex!r:.200}"
        if isinstance(literal, str) and len(literal) > LITERAL:
            return f"a pattern of {len(literal):,} characters"
        growth *= max(1, *(len(str(step.get(name) or "")) for name in ("content", "prepend", "replacement")))
        if growth > GROWTH:
            return f"replacements that make a text more than {GROWTH} times as long"
    return None


def _steps(part: object) -> Iterator[Mapping[str, Any]]:
    """Yield all steps in a part of `tokenizer.json`; a sequence is yielded itself, then its steps one by one."""
    if isinstance(part, list):
        for one in part:
            yield from _steps(one)
    elif isinstance(part, dict):
        yield part
        for name in ("normalizers", "pretokenizers", "decoders"):
            yield from _steps(part.get(name))


class Trial:
    """A check of an untrusted tokenizer's steps in a separate process. `why`: the step that is not known to be safe."""

    def __init__(self, steps: Mapping[str, Any], why: str) -> None:
        empty = {"type": "BPE", "vocab": {}, "merges": []}
        self._given = json.dumps({"version": "1.0", "post_processor": None, "decoder": None, "model": empty, **steps})
        self._key, self._why = hashlib.sha256(self._given.encode()).digest(), why

    @staticmethod
    def of(steps: Mapping[str, Any]) -> Trial | None:
        """Return the trial of a tokenizer's `normalizer`, `pre_tokenizer` and `added_tokens`; None if its steps are known to be safe."""
        why = unknown([steps.get("normalizer"), steps.get("pre_tokenizer")])
        return None if why is None else Trial({name: steps.get(name) for name in ("normalizer", "pre_tokenizer", "added_tokens")}, why)

    def check(self, text: str = "", markup: bool = False) -> None:
        """Raise ValueError if the steps fail on a text, or take too much time or memory. `markup`: read special tokens."""
        try:
            answer = _process.ask((text, markup), self._key, self._given, SECONDS + len(text) / 1e6)
        except LimitError as error:
            raise ValueError(f"the tokenizer exceeds a limit on a text of {len(text):,} characters: {error}; see {self._why}") from error
        if (message := answer.get("error")) is not None:
            raise ValueError(f"the tokenizer fails on a text of {len(text):,} characters: {message}; see {self._why}")


_process = Process(__name__)


def serve() -> None:
    """Run a tokenizer's steps on texts from standard input; answer only with errors (`bounded_process.py`)."""
    ready: dict[bytes, tokenizers.Tokenizer] = {}

    def answer(key: bytes, steps: Any, request: Any) -> dict[str, Any]:
        try:
            if key not in ready:
                ready[key] = tokenizers.Tokenizer.from_str(steps)
            text, markup = request
            ready[key].encode_special_tokens = not markup
            ready[key].encode(text, add_special_tokens=False)
        except MemoryError:
            raise
        except BaseException as error:  # noqa: BLE001  a panic in the library's regular expressions is no Exception
            return {"error": f"{type(error).__name__}: {error}"[:300], "known": key in ready}
        return {"known": True}

    bounded_process.serve(answer, MEMORY)
