"""Text to token ids and back: a Hugging Face fast tokenizer, and which of its tokens are special.

`encode` never returns a special token. Only `encode_markup` reads special tokens, in text that a chat template rendered."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Any

import tokenizers

from puna.models.tokens.template import unescaped
from puna.models.tokens.tokenizer_trial import Trial, steps_of

MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))  # Unicode's noncharacters, which no text should hold
Span = tuple[int, int]
Encoded = tuple[list[int], list[Span]]  # ids of tokens, and each one's character span [start, stop)
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = {chr(byte): byte for byte in _PRINTED} | {chr(256 + n): byte for n, byte in enumerate(sorted({*range(256)} - {*_PRINTED}))}
"""GPT-2's characters for bytes, in which byte-level tokenizers write their tokens."""
LONG = 1 << 14  # number of characters above which a text is encoded without blocking other threads


class Vocabulary:
    """A model's tokens, with encoding and decoding of text. `special`: the ids of the special tokens."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self.backend, self._trial = backend, Trial.of(steps_of(backend))
        added_tokens = backend.get_added_tokens_decoder()
        self._special_tokens = {token.content: (id_, token) for id_, token in added_tokens.items() if token.special}
        self.special = frozenset(id_ for id_, _ in self._special_tokens.values())

    @cached_property
    def vocab_size(self) -> int:
        return max(self.backend.get_vocab().values(), default=-1) + 1

    def id_of(self, token: str | None) -> int | None:
        """Return the id of the token with this text; None if there is no such token, or `token` is None."""
        id_: int | None = None if token is None else self.backend.token_to_id(token)
        return id_

    def token(self, id_: int) -> str:
        return str(self.backend.id_to_token(id_))

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with no token added. Raise ValueError if an untrusted tokenizer fails on it or exceeds its limits."""
        ids: list[int] = self._encoding(text).ids
        return ids

    def _encoding(self, text: str, markup: bool = False) -> tokenizers.Encoding:
        if self._trial is not None:
            self._trial.check(text, markup)
        backend = self._reader if markup else self.backend
        if len(text) > LONG:  # the library lets other threads run only while it encodes a batch
            return backend.encode_batch([text], add_special_tokens=False)[0]
        return backend.encode(text, add_special_tokens=False)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, encoded in parallel, or one after another if the tokenizer is untrusted (`Trial`)."""
        if self._trial is not None:
            return [self.encode(text) for text in texts]
        return [e.ids for e in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def words(self, text: str) -> Iterator[tuple[int, ...]]:
        """Yield the ids of each word of a text; no token crosses a word boundary."""
        encoding = self._encoding(text)
        for _, word in groupby(zip(encoding.word_ids, encoding.ids, strict=True), key=itemgetter(0)):
            yield tuple(id_ for _, id_ in word)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, id_: int) -> bytes | None:
        """Return the bytes that a token decodes to after other text; None for a special token."""
        if id_ in self.special:
            return None
        before, piece = self._letter, self.token(id_)
        text = self.decode([*before, id_])[len(self.decode(before)) :]
        if "\ufffd" in text and (code := re.fullmatch("<0x([0-9A-F]{2})>", piece)):
            return bytes.fromhex(code[1])
        if "\ufffd" in text and set(piece) <= BYTES.keys():
            return bytes(BYTES[character] for character in piece)
        return text.encode()

    @cached_property
    def _letter(self) -> list[int]:
        """Return the ids of a text that any token may follow."""
        return self.encode("a")

    def token_text(self, id_: int) -> str:
        """Return the text that a token adds to other text; of a special token, the token itself."""
        spelling = self.token_bytes(id_)
        return self.token(id_) if spelling is None else spelling.decode(errors="replace")

    @cached_property
    def _reader(self) -> tokenizers.Tokenizer:
        """Return a copy of the tokenizer that reads special tokens in text."""
        reader = tokenizers.Tokenizer.from_str(self.backend.to_str())
        reader.encode_special_tokens = False
        return reader

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        """Return a pattern that matches any special token with the whitespace that it absorbs; the group that matches is the token."""
        parts = []
        for text, (_, token) in sorted(self._special_tokens.items(), key=lambda item: -len(item[0])):
            before, behind = (r"\s*" if takes else "" for takes in (token.lstrip, token.rstrip))
            parts.append(f"{before}({re.escape(text)}){behind}")
        return re.compile("|".join(parts) or "(?!)")

    @cached_property
    def _by_context(self) -> bool:
        """True if the start of a text is encoded differently from its middle, as with SentencePiece's dummy prefix."""
        alone, behind = self._letter, self.encode("\na")
        return behind[-len(alone) :] != alone

    def encode_markup(self, text: str, mark: str | None = None) -> Encoded:
        """Return the ids of a rendered conversation, with special tokens read as such, and each id's character span [start, stop). `mark`:
        the character that `guard` put into special tokens written out in messages, so that they are read as text."""
        if mark is None or mark not in text:
            encoding = self._encoding(text, markup=True)
            return encoding.ids, encoding.offsets
        ids: list[int] = []
        spans: list[Span] = []
        start = 0
        for match in self._special_pattern.finditer(text):
            self._append(text[start : match.start()], start, mark, ids, spans)
            ids.append(self._special_tokens[match[match.lastindex or 0]][0])
            spans.append(match.span())
            start = match.end()
        self._append(text[start:], start, mark, ids, spans)
        return ids, spans

    def _append(self, piece: str, start: int, mark: str, ids: list[int], spans: list[Span]) -> None:
        """Append the ids and spans of a piece of text between special tokens, without `mark`. `start`: the piece's offset."""
        indices = [index for index, character in enumerate(piece) if character != mark]
        if not indices:
            return
        plain = piece.replace(mark, "")
        place = [start + index for index in [*indices, indices[-1] + 1]]
        new_ids, offsets = self._behind(None, plain, self._encode) if ids else self._encode(plain)
        ids += new_ids
        spans += [(place[a], place[b]) for a, b in offsets]

    def _encode(self, text: str) -> Encoded:
        encoding = self._encoding(text)
        return encoding.ids, encoding.offsets

    def encode_behind(self, text: str, special: int | None = None, mark: str | None = None) -> Encoded:
        """Return the ids and character spans of markup that follows the token `special`, or follows other text if `special` is None."""
        return self._behind(special, text, lambda markup: self.encode_markup(markup, mark))

    def _behind(self, special: int | None, text: str, encode: Callable[[str], Encoded]) -> Encoded:
        """Return the ids and character spans that `encode` gives a text after the token `special`, or after other text if that is None."""
        lead = self.token(special) if special is not None else "\n" if self._by_context else ""
        lead_ids = [special] if special is not None else self.encode(lead)
        ids, spans = encode(lead + text)
        if ids[: len(lead_ids)] != lead_ids:
            return encode(text)
        size = len(lead)
        return ids[len(lead_ids) :], [(max(a - size, 0), max(b - size, 0)) for a, b in spans[len(lead_ids) :]]

    def find_special(self, text: str, among: Iterable[int]) -> tuple[int, int, int] | None:
        """Return (start, stop, id) of the first special token in a rendered text whose id is in `among`; None if there is none."""
        candidates = set(among)
        for match in self._special_pattern.finditer(text):
            start, stop = match.span(match.lastindex or 0)
            if (id_ := self._special_tokens[text[start:stop]][0]) in candidates:
                return start, stop, id_
        return None

    def special_in(self, value: Any) -> str | None:
        """Return the first special token written in a string, a list, or a dict's keys, values and JSON `arguments`, or None."""
        if isinstance(value, str):
            match = self._special_pattern.search(value)
            return None if match is None else match.group().strip()
        values = value if isinstance(value, (list, tuple)) else ()
        if isinstance(value, dict):
            values = [*value, *value.values(), unescaped(value.get("arguments"))]
        return next((token for item in values if (token := self.special_in(item)) is not None), None)

    def guard(self, value: Any) -> tuple[Any, str | None]:
        """Return `value` with a mark inside each special token that its strings write out, and the mark (None: not needed). Raise
        ValueError if the strings hold every possible mark."""
        if self.special_in(value) is None:
            return value, None
        text = json.dumps(value, ensure_ascii=False, default=str)
        mark = next((mark for mark in MARKS if mark not in text), None)
        if mark is None:
            raise ValueError("the messages hold all of the noncharacters U+FDD0 to U+FDEF: leave one out")
        return self._mark(value, mark), mark

    def _mark(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            for token in self._special_tokens:
                value = value.replace(token, token[0] + mark + token[1:])
            return value
        if isinstance(value, dict):
            if self.special_in(arguments := unescaped(value.get("arguments"))) is not None:
                value = {**value, "arguments": arguments}
            return {self._mark(key, mark): self._mark(item, mark) for key, item in value.items()}
        return [self._mark(item, mark) for item in value] if isinstance(value, (list, tuple)) else value


def with_tokens(backend: tokenizers.Tokenizer, special: Iterable[str], added: Iterable[tokenizers.AddedToken]) -> tokenizers.Tokenizer:
    """Add the `added` tokens that the tokenizer lacks, and `special` as special ones, in place, as transformers does; return it."""
    present = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for token in added if token.content not in present])
    backend.add_special_tokens(
        [tokenizers.AddedToken(token, special=True, normalized=False) for token in dict.fromkeys(special) if not present.get(token)]
    )
    return backend
