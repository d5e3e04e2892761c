"""Structured output: llguidance turns a JSON schema into a mask of the tokens that may come next."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from puna.models.tokens.tokenizer import Tokenizer
from puna.models.untrusted.bounds import check_grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

STATES = 1024  # maximum token sequences whose parser state is kept; other states are recomputed from the first token
# The layout of json.dumps: if white space were free, a weak model might write nothing else.
LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammar:
    """A factory of token masks for JSON schemas. `size`: the model's vocabulary. A tokenizer without a stop token raises ValueError."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        from llguidance import LLTokenizer

        if not tokenizer.stop_ids:
            raise ValueError("the tokenizer has no stop token, so an answer that must fit a schema could not end")
        self.size = size
        self.tokens = LLTokenizer(tokenizer.backend.to_str(), n_vocab=size, eos_token=list(tokenizer.stop_ids))

    def schema(self, schema: Mapping[str, Any] | None) -> Mask:
        """Return the mask of a JSON schema (None: any JSON object). Raise ValueError if the schema is invalid or cannot be enforced."""
        from llguidance import LLMatcher

        if schema is not None and not isinstance(schema, Mapping):
            raise ValueError(f"a JSON schema is an object, not {type(schema).__name__}")
        grammar = LLMatcher.grammar_from_json_schema(json.dumps({"type": "object"} if schema is None else schema), defaults=LAYOUT)
        check_grammar(grammar)
        mask = Mask(LLMatcher(self.tokens, grammar), self.size)
        mask(())  # the first call may take seconds, too long for an engine's step
        return mask


class Mask:
    """A function from an answer's tokens to the tokens that may follow, for `SamplingParams.mask`."""

    def __init__(self, start: LLMatcher, size: int) -> None:
        self.size, self._start = size, start
        self._reached: dict[tuple[int, ...], LLMatcher] = {}

    def __call__(self, answer: Sequence[int]) -> Tensor:
        """Return a mask of the tokens that may follow `answer`, bool [V] on the CPU; raise ValueError if `answer` breaks the schema."""
        tokens = tuple(answer)
        state = self._reached.pop(tokens[:-1], None) if tokens else None
        if state is None or not state.consume_token(tokens[-1]):
            state = self._start.deep_copy()
            state.consume_tokens(list(tokens))
        if state.is_error():
            raise ValueError(f"the answer {list(tokens)} does not fit its schema: {state.get_error()}")
        words = np.frombuffer(state.compute_bitmask(), dtype=np.uint8)
        if len(self._reached) >= STATES:
            self._reached.pop(next(iter(self._reached)))
        self._reached[tokens] = state
        return torch.from_numpy(np.unpackbits(words, bitorder="little")[: self.size].astype(bool))
