"""Batched sampling with a key-value cache; the same decoder as in training, with another `attend`.

Sequences live in the rows (*slots*) of one cache. All rows write the same column at each step: a prompt
is placed so that it ends just before the column written next, whatever its length, so a step's keys and
values are one slice, and a slot that falls free takes the next sequence at once. When the last column
is reached, the rows move back to the front.

Each prompt is computed once, in a forest with the other prompts admitted with it, for all its answers.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from puna.kernels.cached_attention import cached_attention
from puna.models.forest import Forest
from puna.models.tokenizer import Tokenizer
from puna.models.transformer import Transformer, forest_attend

PREFILL_TOKENS = 8192  # prompts computed in one forest
BLOCK = 128  # probabilities are summed in blocks of this many tokens
NUCLEUS = 128  # tokens tried first as a nucleus; a flatter distribution takes more


@dataclass(frozen=True)
class Sampling:
    """How to draw answers.

    n: answers per prompt. temperature: divides the logits; 0 takes the likeliest token. top_p: draw from
    the smallest set of likeliest tokens whose probability reaches it (nucleus sampling, Holtzman et al.
    2020). max_tokens: longest answer. stop: token ids that end an answer; None is the tokenizer's end
    of turn.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 64
    stop: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.n < 1 or self.max_tokens < 1:
            raise ValueError(f"n and max_tokens must be at least 1, not {self.n} and {self.max_tokens}")
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature must be 0 or a positive number, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], not {self.top_p}")


@dataclass(frozen=True)
class Completion:
    """One answer: its tokens (a stop token included), their log-probs, and whether it ended by itself.

    `logprobs[i]` is log softmax(logits / temperature)[tokens[i]] in nats, over the whole vocabulary also
    when `top_p` cut it, at temperature 1 when the draw was greedy: what `Transformer.token_logprobs`
    returns for the same token at the same temperature.
    """

    tokens: list[int]
    logprobs: list[float]
    finished: bool


@dataclass(eq=False)
class _Answer:
    """An answer in the making: `index` is its prompt, `uniforms` [max_tokens] its private random numbers."""

    index: int
    uniforms: np.ndarray
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _Prefix:
    """A computed prompt: keys and values [layers, p, G, K] and the last hidden state [D]."""

    keys: Tensor
    values: Tensor
    hidden: Tensor


class Engine:
    """Samples from a model, `slots` sequences at a time."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer | None = None, slots: int = 64) -> None:
        if model.head != "lm":
            raise ValueError(f"generation needs a language-model head, this model has a {model.head} head")
        if slots < 1:
            raise ValueError(f"slots must be at least 1, not {slots}")
        self.model, self.tokenizer, self.slots = model, tokenizer, slots

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seed: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[list[Completion]]:
        """`sampling.n` answers to each prompt, in the prompts' order.

        The random numbers of an answer depend on the seed, the prompt's tokens and the answer's number
        only, so neither the order of the prompts nor `slots` changes what is drawn (up to rounding in
        the matrix products). Equal prompts in one call draw different answers. `progress` gets (answers
        done, answers in all).
        """
        stop = self._stop(sampling)
        answers = _answers(prompts, sampling, seed)
        finished: dict[int, Completion] = {}
        waiting = deque(sorted((a for row in answers for a in row), key=lambda a: len(prompts[a.index])))
        total = len(waiting)
        if not total:
            return []
        batch = _Batch(self.model, prompts, sampling, min(self.slots, total), refills=total > self.slots)
        while waiting or batch.live:
            batch.admit(waiting)
            for slot, token, logprob in batch.draw():
                answer = batch.live[slot]
                answer.tokens.append(token)
                answer.logprobs.append(logprob)
                if token in stop or len(answer.tokens) == sampling.max_tokens:
                    finished[id(answer)] = Completion(answer.tokens, answer.logprobs, token in stop)
                    del batch.live[slot]
                    if progress is not None:
                        progress(len(finished), total)
            if not waiting:
                batch.shrink()
            if batch.live:
                batch.step()
        return [[finished[id(answer)] for answer in row] for row in answers]

    def _stop(self, sampling: Sampling) -> frozenset[int]:
        if sampling.stop is not None:
            return frozenset(sampling.stop)
        if self.tokenizer is None:
            raise ValueError("Sampling.stop is None and the engine has no tokenizer to name the end of turn")
        return frozenset(self.tokenizer.stop_ids)


class _Batch:
    """The slots: caches [layers, S, G, L, K], one bias [S, L] (-inf before a row's first column)."""

    def __init__(
        self,
        model: Transformer,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        slots: int,
        refills: bool,
    ) -> None:
        config, weight = model.config, model.model.embed_tokens.weight
        self.model, self.prompts, self.sampling, self.slots = model, prompts, sampling, slots
        self.device, self.dtype = weight.device, weight.dtype
        self.longest = max(len(prompt) for prompt in prompts)
        columns = self.longest + sampling.max_tokens * (2 if refills else 1)
        shape = (config.num_hidden_layers, slots, config.num_key_value_heads, columns)
        self.keys, self.values = (
            torch.zeros(*shape, width, device=self.device, dtype=self.dtype)
            for width in (config.head_dim, config.value_dim)
        )
        self.bias = torch.zeros(slots, columns, device=self.device, dtype=self.dtype)
        self.hidden = torch.zeros(slots, config.hidden_size, device=self.device, dtype=self.dtype)
        self.starts = [self.longest] * slots  # each row's first column
        self.column = self.longest  # the column written next
        self.live: dict[int, _Answer] = {}
        self.prefixes: dict[int, _Prefix] = {}
        self.tokens = [0] * slots

    def admit(self, waiting: deque[_Answer]) -> None:
        """Fill free slots, unless only few are free while others work: prompts are cheaper together."""
        free = [slot for slot in range(self.slots) if slot not in self.live]
        if not waiting or (self.live and len(free) < max(1, self.slots // 4)):
            return
        coming = [waiting.popleft() for _ in range(min(len(free), len(waiting)))]
        self._prefill(list(dict.fromkeys(a.index for a in coming if a.index not in self.prefixes)))
        rows: dict[int, list[int]] = {}
        for slot, answer in zip(free, coming, strict=False):
            self.live[slot] = answer
            rows.setdefault(answer.index, []).append(slot)
        for index, slots in rows.items():
            prefix = self.prefixes[index]
            start = self.column - prefix.keys.shape[1]
            where = torch.tensor(slots, device=self.device)
            self.keys[:, where, :, start : self.column] = prefix.keys.transpose(1, 2).unsqueeze(1)
            self.values[:, where, :, start : self.column] = prefix.values.transpose(1, 2).unsqueeze(1)
            self.hidden[where] = prefix.hidden
            self.bias[where, :start] = -math.inf
            self.bias[where, start:] = 0.0
            for slot in slots:
                self.starts[slot] = start
        # A prompt's answers wait side by side: only the next one's prompt is needed again.
        following = {waiting[0].index} if waiting else set()
        self.prefixes = {index: self.prefixes[index] for index in following & self.prefixes.keys()}

    def _prefill(self, indices: list[int]) -> None:
        """Compute prompts, many to a forest."""
        while indices:
            sizes = np.cumsum([len(self.prompts[index]) for index in indices])
            taken = max(1, int(np.searchsorted(sizes, PREFILL_TOKENS, side="right")))
            prefixes = _prefixes(
                self.model, Forest.pack([self.prompts[i] for i in indices[:taken]]).to(self.device)
            )
            self.prefixes |= dict(zip(indices[:taken], prefixes, strict=True))
            indices = indices[taken:]

    def draw(self) -> list[tuple[int, int, float]]:
        """(slot, token, log-prob) for each live slot."""
        uniforms = np.zeros(self.slots)
        for slot, answer in self.live.items():
            uniforms[slot] = answer.uniforms[len(answer.tokens)]
        tokens, logprobs = draw(
            self.model.logits(self.hidden), self.sampling, torch.from_numpy(uniforms).to(self.device)
        )
        self.tokens = tokens.tolist()
        scores = logprobs.tolist()
        return [(slot, self.tokens[slot], scores[slot]) for slot in list(self.live)]

    def step(self) -> None:
        """Feed the drawn tokens; `hidden` becomes the state after them."""
        if self.column == self.keys.shape[3]:
            self._move_back()
        column = self.column
        window = slice(min(self.starts[slot] for slot in self.live), column + 1)
        for slot in range(self.slots):
            if slot not in self.live:  # an idle row looks at its own column only
                self.starts[slot] = column
        sliding = self.model.config.windows

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.keys[layer, :, :, column] = k
            self.values[layer, :, :, column] = v
            # A row's columns are consecutive tokens of its path, so a sliding window is a slice, too.
            seen = window
            if (size := sliding[layer]) is not None:
                seen = slice(max(window.start, column + 1 - size), column + 1)
            keys, values = self.keys[layer, :, :, seen], self.values[layer, :, :, seen]
            return cached_attention(q, keys, values, self.bias[:, seen])

        tokens = torch.tensor(self.tokens, device=self.device)
        positions = column - torch.tensor(self.starts, device=self.device)
        self.hidden = self.model.model(self.model.model.embed_tokens(tokens), positions, attend)
        self.column += 1

    def _move_back(self) -> None:
        """Shift all rows so that the earliest live one starts as early as the prompts to come allow.

        A live row is younger than `max_tokens`, and the cache holds two such ages beside the longest
        prompt, so this always frees columns.
        """
        shift = min(min(self.starts[slot] for slot in self.live), self.column - self.longest)
        width = self.column - shift
        for cache in (self.keys, self.values):
            cache[:, :, :, :width] = cache[:, :, :, shift : self.column].clone()
        self.bias[:, :width] = self.bias[:, shift : self.column].clone()
        self.bias[:, width:] = 0.0
        self.starts = [max(0, start - shift) for start in self.starts]
        self.column = width

    def shrink(self) -> None:
        """With nothing left to admit, drop idle rows once half are idle."""
        if not self.live or 2 * len(self.live) > self.slots:
            return
        rows = sorted(self.live)
        where = torch.tensor(rows, device=self.device)
        self.keys, self.values = self.keys[:, where], self.values[:, where]
        self.bias, self.hidden = self.bias[where], self.hidden[where]
        self.starts = [self.starts[row] for row in rows]
        self.tokens = [self.tokens[row] for row in rows]
        self.live = {slot: self.live[row] for slot, row in enumerate(rows)}
        self.slots = len(rows)


def _prefixes(model: Transformer, forest: Forest) -> list[_Prefix]:
    """Run packed prompts through the model and keep what their answers need, one prefix each."""
    keys: list[Tensor] = []
    values: list[Tensor] = []

    inside = forest_attend(model.config, forest.mask)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys.append(k)
        values.append(v)
        return inside(layer, q, k, v)

    hidden = model.model(model.model.embed_tokens(forest.tokens), forest.positions, attend)
    k_LTGK, v_LTGK = torch.stack(keys), torch.stack(values)
    return [
        _Prefix(k_LTGK[:, start:stop], v_LTGK[:, start:stop], hidden[stop - 1])
        for start, stop, _ in forest.mask.segments
    ]


def _answers(prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> list[list[_Answer]]:
    """The answers to make, each with its own random numbers."""
    seen: Counter[bytes] = Counter()
    rows = []
    for index, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {index} is empty: generation needs at least one token")
        digest = hashlib.sha256(np.asarray(prompt, dtype="<i8").tobytes()).digest()
        words = np.frombuffer(digest, dtype="<u4").tolist()
        first = seen[digest] * sampling.n
        seen[digest] += 1
        rows.append(
            [
                _Answer(index, np.random.default_rng([seed, number, *words]).random(sampling.max_tokens))
                for number in range(first, first + sampling.n)
            ]
        )
    return rows


def draw(logits_SV: Tensor, sampling: Sampling, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row, by the inverse of the cumulative distribution at `uniforms` [S] fp64 in [0, 1).

    Returns ([S] int64 tokens, [S] log-probabilities at the sampling temperature, before `top_p`). Raises
    ValueError where a row of logits has a NaN or no finite entry.
    """
    p_SV = torch.softmax(logits_SV / (sampling.temperature or 1.0), -1)
    if bool(p_SV[:, 0].isnan().any()):
        raise ValueError("the model's logits are not finite: its weights or its training have diverged")
    if sampling.temperature == 0:
        tokens = logits_SV.argmax(-1)
    elif sampling.top_p == 1.0:
        tokens = _invert(p_SV, uniforms)
    else:
        kept_SN, order_SN = _nucleus(p_SV, sampling.top_p)
        tokens = order_SN.gather(1, _invert(kept_SN, uniforms)[:, None])[:, 0]
    return tokens, p_SV.gather(1, tokens[:, None])[:, 0].log()


def _invert(p_SV: Tensor, uniforms: Tensor) -> Tensor:
    """The first token whose cumulative probability passes `uniforms` times the total, by way of its block."""
    S, V = p_SV.shape
    blocks = torch.nn.functional.pad(p_SV, (0, -V % BLOCK)).view(S, -1, BLOCK)
    passed = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    wanted = uniforms[:, None] * passed[:, -1:]
    block = _first_above(passed, wanted)
    inside = blocks.gather(1, block[..., None].expand(S, 1, BLOCK))[:, 0].double()
    below = passed.gather(1, block) - inside.sum(-1, keepdim=True)
    return (block * BLOCK + _first_above(inside.cumsum(-1), wanted - below))[:, 0]


def _first_above(cumulative: Tensor, wanted: Tensor) -> Tensor:
    """[S, 1]: the first entry above `wanted`, and where rounding leaves none the last that adds anything."""
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(cumulative, wanted, right=True), last)


def _nucleus(p_SV: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Probabilities and tokens of each row's nucleus, likeliest first; zero beyond it."""
    size = min(NUCLEUS, p_SV.shape[-1])
    while True:
        p, order = p_SV.topk(size, sorted=True)
        before = p.cumsum(-1, dtype=torch.float64) - p
        if size == p_SV.shape[-1] or bool((before[:, -1] >= top_p).all()):
            return p * (before < top_p), order
        size = min(8 * size, p_SV.shape[-1])
