"""An answer's text as its tokens come."""

from __future__ import annotations

from collections.abc import Sequence

from puna.models.tokens.tokenizer import Tokenizer


class TextStream:
    """Tokens in, the text that is certain out: no half character, nothing that may turn out to be part of a stop text."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._tokens: list[int] = []
        self._given = 0  # characters

    def add(self, token: int, last: bool = False) -> str:
        """Return the text that `token` makes certain; with `last`, all that is left before a stop text."""
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        ends = [text.find(stop) for stop in self._stop if stop in text]
        if ends:
            end = min(ends)
        elif last:
            end = len(text)
        else:
            whole = len(text.rstrip("\ufffd"))
            end = whole - max((_begun(text[:whole], stop) for stop in self._stop), default=0)
        new_text = text[self._given : max(end, self._given)]
        self._given += len(new_text)
        return new_text


def _begun(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` begin `stop`."""
    return next((size for size in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:size])), 0)
