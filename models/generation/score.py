"""Log-probs of given tokens, in passes between the engine's steps.

Prompts with a common prefix share the prefix's computation: in sorted order, a prompt continues from the previous prompt's cached keys and
values. Such a group is a lane; lanes that fit into `step_tokens` together run side by side in ragged passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from puna.kernels.exact import exact_passes
from puna.kernels.paged_attention import PAGE
from puna.models.generation.dense import loops
from puna.models.generation.engine import Engine
from puna.models.generation.sampling import DIVERGED, RowError
from puna.models.generation.step import Cache, Stretch, run

BLOCK = 256  # the number of tokens whose logits are in memory at once
Lane = list[tuple[int, int]]  # prompts (indices), each with the number of leading tokens shared with the lane's previous prompt


class Score(NamedTuple):
    """A token's log-prob in nats given the tokens before it (None for the first), and the likeliest tokens with their log-probs."""

    logprob: float | None
    top: list[tuple[int, float]]


class Scoring:
    """Prompts to be scored. After the last `step`, `scores[i]` holds a Score per token of prompt i. top: number of likeliest tokens in a
    Score. temperature: the divisor of the logits. `step` raises RowError if logits are not finite."""

    def __init__(self, engine: Engine, prompts: Sequence[list[int]], top: int = 0, temperature: float = 1.0) -> None:
        self.engine, self.prompts, self.top, self.temperature = engine, prompts, top, temperature
        self.scores: list[list[Score]] = [[Score(None, [])] for _ in prompts]
        self._loops, self._passes = loops(engine.model), self._run()

    def step(self) -> bool:
        """Compute the next pass and return False; if all prompts are already scored, only return True."""
        device, dtype = self.engine.model.place
        with torch.inference_mode(), exact_passes(dtype, device, self.engine.exact):
            return next(self._passes, True)

    def _run(self) -> Iterator[bool]:
        """Score all lanes; yield False after each pass."""
        longest, beside = self.engine.scheduler.step_tokens, list[Lane]()
        for lane in self._lanes():
            if beside and sum(self._length(one) for one in (*beside, lane)) > longest:
                yield from self._run_lanes(beside, longest)
                beside = []
            beside.append(lane)
        if beside:
            yield from self._run_lanes(beside, longest)

    def _lanes(self) -> list[Lane]:
        """Return the lanes: in sorted order, a prompt joins the previous one's lane if both share a prefix of at least half its tokens."""
        lanes: list[Lane] = []
        before: list[int] = []
        for number in sorted(range(len(self.prompts)), key=self.prompts.__getitem__):
            prompt = self.prompts[number]
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, prompt, strict=False)))
            if 2 * shared < len(prompt) or not lanes:
                lanes.append([(number, 0)])
            else:
                lanes[-1].append((number, shared))
            before = prompt
        return lanes

    def _length(self, lane: Lane) -> int:
        return max(len(self.prompts[number]) for number, _ in lane)

    def _run_lanes(self, lanes: Sequence[Lane], longest: int) -> Iterator[bool]:
        """Score lanes side by side, prompt by prompt; yield False after each pass. A pass computes at most `longest` tokens of a prompt."""
        counts = [-(-self._length(lane) // PAGE) for lane in lanes]
        pages = [range(sum(counts[:k]), sum(counts[: k + 1])) for k in range(len(lanes))]
        cache, states = Cache(self.engine.model, sum(counts)), dict[int, Tensor]()  # states [T, D] of each lane's tokens so far
        for turn in range(max(map(len, lanes))):
            due = {k: lane[turn] for k, lane in enumerate(lanes) if turn < len(lane)}
            for k, (number, shared) in due.items():
                if turn:
                    self.scores[number] = self.scores[lanes[k][turn - 1][0]][:shared]
            for first in range(0, max(len(self.prompts[number]) - shared for number, shared in due.values()), longest):
                parts = {k: self.prompts[number][shared + first :][:longest] for k, (number, shared) in due.items()}
                places = {k: due[k][1] + first for k, tokens in parts.items() if tokens}
                work = [Stretch(pages[k][: -(-(at + len(parts[k])) // PAGE)], at, parts[k]) for k, at in places.items()]
                hidden_ND = run(self.engine.model, cache, work, self._loops)
                for (k, at), new_TD in zip(places.items(), hidden_ND.split([len(one.tokens) for one in work]), strict=True):
                    states[k] = torch.cat([states[k][:at], new_TD]) if at else new_TD
                    begin = max(at, 1)
                    self.scores[due[k][0]] += self._score(states[k][begin - 1 : -1], parts[k][begin - at :])
                yield False

    def _score(self, hidden_ND: Tensor, tokens: list[int]) -> Iterator[Score]:
        for first in range(0, len(tokens), BLOCK):
            block = slice(first, first + BLOCK)
            logprobs_NV = torch.log_softmax(self.engine.model.logits(hidden_ND[block]).float() / self.temperature, -1)
            chosen_N = logprobs_NV.gather(1, torch.tensor(tokens[block], device=logprobs_NV.device)[:, None])[:, 0]
            if not chosen_N.isfinite().all():
                raise RowError(DIVERGED, asked=False)
            values_NK, tokens_NK = logprobs_NV.topk(min(self.top, logprobs_NV.shape[1]))
            tops = [list(zip(*row, strict=True)) for row in zip(tokens_NK.tolist(), values_NK.tolist(), strict=True)]
            yield from map(Score, chosen_N.tolist(), tops)
