"""Tokens guessed ahead: what followed the same tokens before (prompt lookup, Saxena 2023), or what a draft draws (`draft.py`).

A step computes the guesses with the token before them. Each position of an answer has its random number, so what is drawn there does not
depend on the guess: one that was looked up is right where it is what is drawn. So answers are those without guesses, and a guess of one
token holds with its probability, which is all that speculative sampling (Leviathan et al. 2023) can accept of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

SIZES = (3, 2)  # tokens that must be the same before a guess; the longer first
LONGEST_REST = 4
UNKNOWN = -1


class Pace:
    """The number of tokens guessed for one answer: fewer after wrong guesses, none for a while if all were wrong."""

    def __init__(self, most: int) -> None:
        self.most = self.length = most
        self.rest = self._left = 0  # steps without a guess after the last failure, and how many of them are left

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return at most `most` tokens that may follow; here places for a draft's (`draft.py`)."""
        if self._left:
            self._left -= 1
            return []
        return [UNKNOWN] * min(self.length, most)

    def learn(self, guessed: int, right: int) -> None:
        """Adapt the length to the last guess, of which `right` tokens were right."""
        if guessed and not right:
            self.rest = min(2 * self.rest + 1, LONGEST_REST)
            self.length, self._left = 1, self.rest
        elif guessed:
            self.rest, self.length = 0, min(self.most, 2 * right + 1)


class Lookup(Pace):
    """Guesses from what stood before."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._seen: dict[tuple[int, ...], list[int]] = {}  # where a run of tokens ended
        self._read = 0

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        most = len(super().guess(tokens, most))
        return next(iter(self.guesses(tokens, most, 1)), []) if most else []

    def guesses(self, tokens: Sequence[int], most: int, count: int) -> list[list[int]]:
        """Return at most `count` guesses that begin differently; first the one after the longest and latest run of the same tokens."""
        for end in range(self._read, len(tokens)):  # an end that has a token after it
            for size in SIZES:
                if end >= size:
                    self._seen.setdefault(tuple(tokens[end - size : end]), []).append(end)
        self._read = len(tokens)
        ends: dict[int, int] = {}  # the end of a run, by the token after it
        for end in chain.from_iterable(reversed(self._seen.get(tuple(tokens[-size:]), ())) for size in SIZES if len(tokens) >= size):
            ends.setdefault(tokens[end], end)
            if len(ends) == count:
                break
        # Beyond the last token a guess goes on with itself.
        return [[tokens[end + i % (len(tokens) - end)] for i in range(most)] for end in ends.values()]
