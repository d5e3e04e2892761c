"""Scheduling of the tokens of each step: continuous batching with chunked prefill (Yu et al. 2022; Agrawal et al. 2023).

A request's prompt is computed once, by its first answer; its other answers begin after the prompt, on the same pages. If too few pages
are free, the youngest answer gives its pages back and waits. Later it is recomputed (Kwon et al. 2023), except for prefixes in the tree.

Further tokens are speculated. A guess is a token that followed the same tokens before (prompt lookup, Saxena 2023), or a token drawn by a
draft (see `draft.py`). A step computes the guesses with the token before them. Each position of an answer has its own random number. A
looked-up guess is accepted if it equals the token drawn with that number, so guesses change no answer. The probability of acceptance is the
model's probability of the token, as in speculative sampling (Leviathan et al. 2023)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from torch import Tensor

from puna.kernels.paged_attention import PAGE
from puna.models.generation.pages import OutOfPages, PagePool
from puna.models.generation.sampling_params import SamplingParams
from puna.models.generation.sinks import Kept
from puna.models.tokens.tokenizer import TextStream

UNIFORMS = 256  # random numbers that are drawn together
SIZES = (3, 2)  # lengths of the n-grams that a lookup searches for, the longest first
LONGEST_REST = 4  # maximum steps without guesses after wrong guesses
UNKNOWN = -1  # stands for a token that a draft will guess
Hidden = tuple[Tensor, int]  # hidden states [N, D] of a step, and the row of an answer's last token; the rows of its guesses follow


class Pace:
    """The number of tokens to speculate per step for one answer: fewer after wrong guesses, none for a while if all were wrong."""

    def __init__(self, most: int) -> None:
        self.most = self.length = most
        self.rest = self._left = 0  # steps without a guess after the last failure, and how many of them are left

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return at most `most` guesses of the next tokens; here placeholders for a draft's guesses (`draft.py`)."""
        if self._left:
            self._left -= 1
            return []
        return [UNKNOWN] * min(self.length, most)

    def learn(self, guessed: int, right: int) -> None:
        """Adapt the number of guesses to the last step, in which `right` of `guessed` tokens were right."""
        if guessed and not right:
            self.rest = min(2 * self.rest + 1, LONGEST_REST)
            self.length, self._left = 1, self.rest
        elif guessed:
            self.rest, self.length = 0, min(self.most, 2 * right + 1)


class Lookup(Pace):
    """A `Pace` whose guesses come from prompt lookup: the tokens that followed the same tokens earlier."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._seen: dict[tuple[int, ...], int] = {}  # the latest end of each n-gram
        self._read = 0

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return up to `most` tokens that followed the latest earlier occurrence of the last 3 (else 2) tokens; repeat them if too few."""
        most = len(super().guess(tokens, most))
        if not most:
            return []
        for end in range(self._read, len(tokens)):  # ends that have a token after them
            for size in SIZES:
                if end >= size:
                    self._seen[tuple(tokens[end - size : end])] = end
        self._read = len(tokens)
        ends = (self._seen.get(tuple(tokens[-size:])) for size in SIZES if len(tokens) >= size)
        last = next((end for end in ends if end is not None), None)
        return [] if last is None else [tokens[last + i % (len(tokens) - last)] for i in range(most)]


@dataclass(eq=False)
class Answer:
    """An unfinished answer. `tokens`: prompt and answer. `pages`: the cache pages of the first `computed` tokens, without dropped ones."""

    request: Request
    number: int
    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    fallen: int = 0  # number of computed tokens that were dropped from the cache, after the sinks
    sliding: bool = False  # True while pages are copied so that tokens can be dropped
    room: int = 0  # number of tokens for which `pages` are known to be unshared
    hidden: Hidden | None = None  # the hidden state of the last token, once computed
    count: int = 0  # number of the next tokens that this step computes
    guess: list[int] = field(default_factory=list)  # guesses of the tokens after those `count`, computed in the same step
    pace: Pace | None = None  # chooses the number of guesses
    drafted: int = 1 << 62  # number of computed tokens that a draft has computed, too
    logprobs: list[float] = field(default_factory=list)
    stream: TextStream | None = None  # the decoder of the answer, if it has stop texts
    tail: str = ""  # the end of its text, in which a stop text may begin
    _uniforms: list[float] = field(default_factory=list)

    @property
    def own(self) -> list[int]:
        """Return the answer's tokens, without the prompt's."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def place(self) -> int:
        """Return the position in the cache of the next token to compute."""
        return self.computed - self.fallen

    @cached_property
    def _random(self) -> np.random.Generator:
        return np.random.default_rng([self.request.params.seed, self.number, *self.request.words])

    def uniform(self, number: int) -> float:
        """Return the random number in [0, 1) for token `number` of the answer; numbers are drawn as needed: `max_tokens` may be large."""
        while number >= len(self._uniforms):
            self._uniforms += self._random.random(UNIFORMS).tolist()
        return self._uniforms[number]


@dataclass(eq=False)
class Request:
    """A prompt with its parameters. `begun`: number of answers that have started; `first`: the number of the first answer; `leading`: True
    while an answer computes the prompt; `trunk`: the computed prompt's pages and last hidden state, kept until all answers have started."""

    prompt: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    stop_texts: tuple[str, ...]
    words: tuple[int, ...]  # the digest of the prompt's tokens
    first: int = 0
    begun: int = 0
    leading: bool = False
    trunk: tuple[list[int], Hidden] | None = None


class Scheduler:
    """Waiting requests, running answers, and their pages. `drafted`: guesses come from a draft. `kept`: tokens that the cache keeps."""

    def __init__(self, pool: PagePool, sequences: int, step_tokens: int, drafted: bool = False, kept: Kept | None = None) -> None:
        self.pool, self.sequences, self.step_tokens, self.drafted, self.kept = pool, sequences, step_tokens, drafted, kept
        self.waiting: list[Request] = []  # by priority, then age
        self.paused: list[Answer] = []  # preempted, the oldest first
        self.running: list[Answer] = []  # the oldest first
        self.copies: list[tuple[int, int]] = []  # pages to copy before the next step
        self.turns: dict[Answer, list[int]] = {}  # pages whose keys are rotated back after these copies
        self.preemptions = 0

    def add(self, request: Request) -> None:
        """Queue a request. Raise ValueError if a whole answer would not fit into the cache."""
        # One page more: a trunk's last page stays while its first answer writes to a copy; so does a shared page that is rotated.
        tokens = len(request.prompt) + request.params.max_tokens
        pages = -(-self._cached_tokens(tokens) // PAGE) + (request.params.n > 1 or self._cached_tokens(tokens) < tokens)
        if pages > len(self.pool.references):
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens with max_tokens={request.params.max_tokens} needs {pages} pages of {PAGE}"
                f" tokens, the cache has {len(self.pool.references)}: give the engine more memory, or ask for fewer tokens"
            )
        self.waiting.append(request)
        self.waiting.sort(key=lambda r: r.params.priority)

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.paused or self.running)

    def plan(self) -> list[Answer]:
        """Return the next step's work: the next token and guesses of each decoding answer, then chunks of prompts, up to `step_tokens`."""
        budget, work = self.step_tokens, []
        for answer in list(self.running):
            if not answer.pages or answer.hidden is not None:  # preempted by an earlier answer, or computed and only to be drawn from
                continue
            left = self._room_left(answer)
            answer.count = min(len(answer.tokens) - answer.computed, max(budget, 1), left)
            answer.guess = self._guess(answer, min(budget, left) - answer.count) if answer.request.params.speculate else []
            if answer.place + answer.count + len(answer.guess) <= answer.room or self._make_room(answer):
                work.append(answer)
                budget -= answer.count + len(answer.guess)
        work = [answer for answer in work if answer.pages]
        while budget > 0 and len(self.running) < self.sequences and (admitted := self._admit()) is not None:
            admitted.count = min(len(admitted.tokens) - admitted.computed, budget, self._room_left(admitted))
            if not self._make_room(admitted):
                break
            work.append(admitted)
            budget -= admitted.count
        return work

    def fork(self) -> Iterator[Answer]:
        """Yield new answers to computed prompts while there is room, each with the hidden state of the prompt's last token."""
        for request in list(self.waiting):
            while request.trunk is not None and len(self.running) < self.sequences:
                if self.running and self.pool.available < len(self.running) + 1:
                    return
                pages, hidden = request.trunk
                self.pool.share(pages)
                answer = self._begin(request)
                answer.pages, answer.computed, answer.hidden = list(pages), len(request.prompt), hidden
                answer.fallen = 0 if self.kept is None else self.kept.dropped_tokens(answer.computed)
                yield answer

    def mark_computed(self, answer: Answer, hidden: Hidden) -> None:
        """Record that a step computed `answer.count` tokens of an answer. Once all its tokens are computed, the next can be drawn."""
        request = answer.request
        answer.computed += answer.count
        if answer.computed < len(answer.tokens):
            return
        answer.hidden = hidden
        if answer.logprobs and answer.count == 1:
            return
        self._keep(answer)
        if not answer.logprobs:
            request.leading = False
            if request in self.waiting:
                self.pool.share(answer.pages)
                request.trunk, answer.room = (list(answer.pages), hidden), 0

    def finish(self, answer: Answer) -> None:
        """Release an ended answer's slot and pages; whole pages stay in the tree until needed, unless some of its tokens were dropped."""
        self.running.remove(answer)
        self._give_back(answer)

    def restart(self) -> None:
        """Forget all computed pages; running answers are computed again from their tokens."""
        for answer in self.running[::-1]:
            self._pause(answer)
        for request in self.waiting:
            self._drop_trunk(request)
        self.copies, self.turns = [], {}
        self.pool.forget()

    def cancel(self, request: Request) -> None:
        """End a request, whether its answers wait, run or are paused."""
        if request in self.waiting:
            self.waiting.remove(request)
        self._drop_trunk(request)
        for place in (self.running, self.paused):
            for answer in [answer for answer in place if answer.request is request]:
                place.remove(answer)
                self._give_back(answer)

    def _admit(self) -> Answer | None:
        """Return the next answer that must be computed, a paused one first; None if there is none, or too few pages are free."""
        paused = self.paused[0] if self.paused else None
        request = paused.request if paused else next((r for r in self.waiting if r.trunk is None and not r.leading), None)
        if request is None:
            return None
        tokens = paused.tokens if paused else request.prompt
        pages = self.pool.match(tokens[:-1])  # the last token is always computed, for its hidden state
        need = -(-self._cached_tokens(len(tokens) + 1) // PAGE) - len(pages)
        if self.running and self.pool.available < need + len(self.running):  # leave a page per running answer
            self.pool.release(pages)
            return None
        if paused:
            answer = self.paused.pop(0)
            self.running.append(answer)
        else:
            answer, request.leading = self._begin(request), True
        answer.pages, answer.computed = pages, len(pages) * PAGE
        return answer

    def _begin(self, request: Request) -> Answer:
        answer = Answer(request, request.first + request.begun, list(request.prompt))
        self.running.append(answer)
        request.begun += 1
        if request.begun == request.params.n:
            self.waiting.remove(request)
            self._drop_trunk(request)
        return answer

    def _drop_trunk(self, request: Request) -> None:
        if request.trunk is not None:
            self.pool.release(request.trunk[0])
            request.trunk = None

    def _make_room(self, answer: Answer) -> bool:
        """True if the answer gets pages for its due tokens. If too few are free, pause the youngest answers, finally this one."""
        while answer not in self.paused:
            try:
                if self.kept is not None:
                    self._slide(answer, self.kept)
                index, end = answer.place // PAGE, answer.place + answer.count + len(answer.guess)
                if index < len(answer.pages) and answer.place % PAGE and (copy := self.pool.writable(answer.pages, index)):
                    self.copies.append(copy)
                while len(answer.pages) * PAGE < end:
                    answer.pages.append(self.pool.take())
                answer.room = len(answer.pages) * PAGE
                return True
            except OutOfPages:
                if len(self.running) > 1:
                    self._pause(self.running[-1])
                else:  # alone, and a whole answer fits: prompts kept for later answers hold the missing pages
                    for request in self.waiting:
                        self._drop_trunk(request)
        return False

    def _guess(self, answer: Answer, most: int) -> list[int]:
        """Return up to `most` guesses after an answer's last token; none if earlier tokens are left to compute, or few pages are free."""
        params = answer.request.params
        if not answer.logprobs or len(answer.tokens) - answer.computed > 1:
            return []
        if answer.pace is None:
            answer.pace = (Pace if self.drafted else Lookup)(params.speculate)
        most = min(most, params.max_tokens - len(answer.logprobs) - 1)
        return answer.pace.guess(answer.tokens, most) if most > 0 and self.pool.available > 2 * len(self.running) else []

    def _pause(self, answer: Answer) -> None:
        self.running.remove(answer)
        self._give_back(answer)
        answer.hidden, answer.guess = None, []
        self.preemptions += 1
        self.paused.insert(0, answer)

    def _give_back(self, answer: Answer) -> None:
        self._keep(answer)
        self.turns.pop(answer, None)
        # Copies into pages that are given back are no longer needed.
        self.copies = [copy for copy in self.copies if copy[1] not in answer.pages]
        self.pool.release(answer.pages)
        answer.pages, answer.computed, answer.fallen, answer.sliding, answer.room = [], 0, 0, False, 0

    def _keep(self, answer: Answer) -> None:
        """Put the answer's pages into the tree, unless some of its tokens were dropped."""
        if not answer.fallen and not answer.sliding:
            self.pool.keep(answer.tokens[: answer.computed], answer.pages)

    def _cached_tokens(self, tokens: int) -> int:
        """Return how many of a sequence's `tokens` tokens the cache holds."""
        return tokens if self.kept is None else min(tokens, self.kept.room)

    def _room_left(self, answer: Answer) -> int:
        """Return the number of tokens that an answer may compute before the cache drops more of its pages."""
        return 1 << 62 if self.kept is None else self.kept.room - answer.place or self.kept.step

    def _slide(self, answer: Answer, kept: Kept) -> None:
        """Drop the first pages after the sinks if the cache is full; then unshare later pages and queue their keys for rotation."""
        if answer.place < kept.room:
            return
        first, end, answer.sliding = kept.sinks // PAGE, (kept.sinks + kept.step) // PAGE, True
        for index in reversed(range(end, len(answer.pages))):  # leaves of the tree before their parents
            if copy := self.pool.writable(answer.pages, index):
                self.copies.append(copy)
        self.pool.release(answer.pages[first:end])
        del answer.pages[first:end]
        answer.fallen, answer.sliding, self.turns[answer] = answer.fallen + kept.step, False, answer.pages[first:]
