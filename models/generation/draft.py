"""Speculative decoding: a draft, a smaller model of the same vocabulary, guesses tokens (Leviathan et al. 2023; Chen et al. 2023).

A draft has its own cache with the larger model's page numbers: a page is shared, copied, kept or released in both caches.
A guess drawn from the draft's distribution q is taken with probability min(1, p / q), where p is the larger model's. A rejected guess
is replaced by a draw from the residual max(p - q, 0). So answers have the larger model's distribution, after penalties, biases, top-k,
top-p and min-p. At temperature 0 a draft changes no token; else tokens also depend on which steps had room for guesses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from puna.kernels.exact import exact_passes
from puna.kernels.operators import wide
from puna.kernels.token_draw import invert
from puna.models.generation.engine import Engine
from puna.models.generation.sampling import DIVERGED, Draw, Drawn, RowError, cut, draw, shift_rows
from puna.models.generation.schedule import Answer
from puna.models.generation.step import Stretch, run
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.transformer import Transformer


class DraftedEngine(Engine):
    """An engine whose `draft` guesses up to `SamplingParams.speculate` tokens ahead; `limits`: see `Engine`. The draft's passes
    are never exact, because log-probs do not depend on the draft. A draft of another vocabulary raises ValueError."""

    def __init__(self, model: Transformer, draft: Transformer, tokenizer: Tokenizer | None = None, **limits: Any) -> None:
        if draft.head != "lm" or draft.config.vocab_size != model.config.vocab_size:
            raise ValueError(f"a draft needs a language-model head over the model's {model.config.vocab_size} tokens")
        self.draft = draft
        self._numbers: WeakKeyDictionary[Answer, Any] = WeakKeyDictionary()  # two random numbers per token: to draw a guess, to accept it
        self._odds: dict[Answer, list[Tensor]] = {}  # the draft's distribution for each guess of this step
        self._ready: Sequence[Answer] = ()
        self._wrong: dict[Answer, RowError] = {}  # answers of this step for which the draft failed to guess
        super().__init__(model, tokenizer, **limits)

    @property
    def models(self) -> tuple[Transformer, ...]:
        return self.model, self.draft

    def _compute(self, work: Sequence[Answer]) -> Tensor:
        """Draw the guesses with the draft, one per answer and pass; then return the larger model's hidden states. Both process prompts."""
        for answer in work:
            answer.drafted = min(answer.drafted, answer.computed)  # the last guesses may have been wrong
        starting = [answer for answer in work if answer.count > 1 or not answer.logprobs]
        if starting:
            self._follow(starting, [answer.tokens[answer.drafted : answer.computed + answer.count] for answer in starting])
        self._odds, self._wrong = {answer: [] for answer in work if answer.guess}, {}
        answers, number = list(self._odds), 0
        while answers:
            due = [[answer.guess[number - 1]] if number else answer.tokens[answer.drafted :] for answer in answers]
            logits_BV = self.draft.logits(self._follow(answers, due))
            draws = [self._guess_of(answer, number) for answer in answers]
            q_BV, errors = distribution(logits_BV, draws)
            self._wrong |= {answers[row]: error for row, error in errors.items()}
            for answer, q_V, token in zip(answers, q_BV, invert(q_BV, _uniforms(draws, q_BV)).tolist(), strict=True):
                answer.guess[number] = token
                self._odds[answer].append(q_V)
            number += 1
            answers = [answer for answer in answers if len(answer.guess) > number]
        return super()._compute(work)

    def _follow(self, answers: Sequence[Answer], due: Sequence[Sequence[int]]) -> Tensor:
        """Run the draft on each answer's `due` tokens; return the hidden state of each answer's last due token [B, D]."""
        work = [Stretch(answer.pages, answer.drafted, tokens) for answer, tokens in zip(answers, due, strict=True)]
        device, dtype = self.draft.place
        with exact_passes(dtype, device, False):
            hidden_ND = run(self.draft, self.caches[1], work, self._loops[1])
        for answer, tokens in zip(answers, due, strict=True):
            answer.drafted += len(tokens)
        return hidden_ND[torch.tensor([len(tokens) for tokens in due]).cumsum(0).to(hidden_ND.device) - 1]

    def _guess_of(self, answer: Answer, number: int) -> Draw:
        """Return the `Draw` of an answer's guess `number`, counted from 0 in this step."""
        params = answer.request.params
        if answer not in self._numbers:
            seed = [params.seed, answer.number, *answer.request.words, 1]  # for numbers independent of the answer's own draws
            self._numbers[answer] = np.random.default_rng(seed).random((params.max_tokens, 2))
        before = [*answer.own, *answer.guess[:number]] if params.shifts else ()
        return Draw(params, self._numbers[answer][len(answer.logprobs) + number, 0], answer.request.prompt, before)

    def _draw(self, ready: Sequence[Answer]) -> Drawn:
        self._ready = ready
        return super()._draw(ready)

    def _draw_tokens(self, logits_SV: Tensor, draws: Sequence[Draw]) -> Drawn:
        """Draw a token for each row of logits; in a row with a guess, accept or replace the guess."""
        rows: list[int] = []
        odds: list[tuple[int, float, Tensor]] = []  # each guess with the number that accepts it, and its distribution
        row, errors = 0, dict[int, RowError]()
        for answer in self._ready:
            if answer in self._wrong:
                errors[row] = self._wrong[answer]
            for number, q_V in enumerate(self._odds.get(answer, ())):
                rows.append(row + number)
                odds.append((answer.guess[number], self._numbers[answer][len(answer.logprobs) + number, 1], q_V))
            row += len(answer.guess) + 1
        self._odds = {}
        settled: dict[int, int] = {}
        if rows:
            some = [draws[row] for row in rows]
            guessed, numbers, q = zip(*odds, strict=True)
            (p_SV, wrong), q_SV = distribution(logits_SV[rows], some), torch.stack(q)
            errors |= {rows[number]: error for number, error in wrong.items()}
            settled = dict(zip(rows, accept_guesses(p_SV, q_SV, guessed, numbers, _uniforms(some, p_SV)).tolist(), strict=True))
        samples = draw(logits_SV, draws, settled)
        return samples._replace(errors={**errors, **samples.errors})


def accept_guesses(p_SV: Tensor, q_SV: Tensor, guesses: Sequence[int], numbers: Sequence[float], uniforms: Tensor) -> Tensor:
    """Return [S] tokens distributed as p. A guess drawn from q is accepted if its `numbers` entry in [0, 1) is below p / q. Otherwise the
    token is drawn from max(p - q, 0), by the inverse of its cumulative distribution at `uniforms`."""
    guess_S1 = torch.tensor(guesses, device=p_SV.device)[:, None]
    number_S = torch.tensor(numbers, dtype=torch.float64, device=p_SV.device)
    accepts = number_S * q_SV.gather(1, guess_S1)[:, 0].double() < p_SV.gather(1, guess_S1)[:, 0].double()
    return torch.where(accepts, guess_S1[:, 0], invert((p_SV - q_SV).clamp_min_(0.0), uniforms))


def distribution(logits_SV: Tensor, rows: Sequence[Draw]) -> tuple[Tensor, dict[int, RowError]]:
    """Return each row's distribution [S, V], at least fp32, after penalties, biases, top-k, top-p and min-p; and row number → error.

    At temperature 0 the likeliest token has probability 1. The logits of a row that fails (a NaN, or no finite entry) count as 0."""
    z_SV = logits_SV.to(wide(logits_SV.dtype), copy=True)
    scale = torch.tensor([1.0 / (row.params.temperature or 1.0) for row in rows], device=z_SV.device)
    tops = (z_SV.amax(1) * scale.to(z_SV)).tolist()
    errors = {row: RowError(DIVERGED, asked=False) for row, top in enumerate(tops) if not math.isfinite(top)}
    for row in errors:
        z_SV[row] = 0
    errors = {**shift_rows(z_SV, rows, scale), **errors}
    p_SV = torch.softmax(z_SV * scale.to(z_SV)[:, None], -1)
    cuts = [i for i, row in enumerate(rows) if row.params.cuts]
    if cuts:
        p_SV[cuts] = cut(p_SV[cuts], [rows[i].params for i in cuts])
    greedy = [i for i, row in enumerate(rows) if not row.params.temperature]
    if greedy:
        p_SV[greedy] = torch.zeros_like(z_SV[greedy]).scatter_(1, z_SV[greedy].argmax(1, keepdim=True), 1.0)
    return p_SV, errors


def _uniforms(draws: Sequence[Draw], like: Tensor) -> Tensor:
    return torch.tensor([one.uniform for one in draws], dtype=torch.float64, device=like.device)
