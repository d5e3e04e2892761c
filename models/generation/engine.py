"""The generation engine: prompts in, sampled answers with their log-probs out.

    Engine(model, tokenizer).generate(prompts, SamplingParams(n=4, temperature=0.7))

Each step is one ragged pass over the next token of every running answer and chunks of prompts (`schedule.py`, `step.py`), with keys and
values in pages (`pages.py`). Prompts and answers stay in the cache as prefixes for later requests, until their pages are needed or the
weights change.

With `exact`, log-probs of drawn tokens are bit-identical to a training forward pass in `exact_passes`. Batching, chunked prompts, pauses
and cached prefixes do not change them (see `kernels/exact.py`)."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from puna.kernels.exact import exact_passes
from puna.models import progress
from puna.models.generation.dense import loops
from puna.models.generation.pages import PagePool, generation_room
from puna.models.generation.sampling import DIVERGED, Draw, Drawn, RowError, draw
from puna.models.generation.sampling_params import SamplingParams
from puna.models.generation.schedule import Answer, Request, Scheduler
from puna.models.generation.sinks import kept_tokens
from puna.models.generation.step import Cache, Stretch, run
from puna.models.tokens.tokenizer import TextStream, Tokenizer
from puna.models.transformer import Transformer

Prompt = Sequence[int] | str
DrawnRow = tuple[int, float, RowError | None]


class _Watch(torch.autograd.Function):
    """A function that saves tensors for a backward pass that never runs: autograd refuses to return them after a change in place."""

    @staticmethod
    def forward(ctx: Any, mark: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        ctx.save_for_backward(*tensors)
        return mark.clone()


def watch(tensors: Sequence[Tensor]) -> Any:
    """Return an autograd node through which `is_unchanged` detects in-place changes of the tensors."""
    with torch.inference_mode(False), torch.enable_grad():
        return _Watch.apply(torch.zeros((), requires_grad=True), tensors).grad_fn  # type: ignore[no-untyped-call]


def is_unchanged(watched: Any) -> bool:
    """True if no tensor was changed in place since `watch` returned `watched`. Changes through `Tensor.data` go unnoticed."""
    try:
        watched.saved_tensors  # noqa: B018  # reading them is the check
    except RuntimeError:
        return False
    return True


class Completion(NamedTuple):
    """One answer: its tokens (a stop token included), their log-probs, and whether a stop token or text ended it.

    `logprobs[i]` is log softmax(logits / temperature)[tokens[i]] in nats over the whole vocabulary, before penalties, biases, masks,
    top-k, top-p and min-p. A greedy draw counts as temperature 1. `Transformer.token_logprobs` returns the same values at that temperature.
    `replies`: turns of tools or users between the model's turns (`turns.py`): start, end and messages of each. Their log-probs are 0."""

    tokens: list[int]
    logprobs: list[float]
    finished: bool
    replies: Sequence[tuple[int, int, list[dict[str, Any]]]] = ()

    @property
    def mask(self) -> list[bool]:
        """Return a flag per token: True if the model wrote the token."""
        mask = [True] * len(self.tokens)
        for begin, end, _ in self.replies:
            mask[begin:end] = [False] * (end - begin)
        return mask


class AnswerEngine(Protocol):
    """An engine that answers prompts: Puna's or vLLM's."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    def generate(
        self, prompts: Sequence[Sequence[int] | str], params: SamplingParams, progress: Callable[[int, int], None] | None = None
    ) -> list[list[Completion]]: ...


class Event(NamedTuple):
    """A drawn token of an answer; `completion` is set only with the answer's last token."""

    request: Request
    number: int
    token: int
    logprob: float
    completion: Completion | None


class Engine:
    """A generation engine for one model.

    sequences: maximum number of concurrent answers. step_tokens: maximum number of tokens per step, but at least one per running answer.
    memory: bytes of the KV cache. `generation_room` replaces a None in these three. exact: give log-probs bit-identical to training's, only
    in fp32 on a CPU. window: keep only the first `sinks` and last `window` tokens of each sequence (`sinks.py`); None: keep all.
    The constructor raises ValueError for a model without a language-model head, or for `sinks` and `window` that do not suit it."""

    caches: list[Cache]
    scheduler: Scheduler

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer | None = None, sequences: int | None = None,
        step_tokens: int | None = None, memory: int | None = None, exact: bool = False, sinks: int = 0, window: int | None = None,
    ) -> None:  # fmt: skip
        if model.head != "lm":
            raise ValueError(f"generation needs a language-model head, this model has a {model.head} head")
        self.model, self.tokenizer, self.exact, self._wanted = model, tokenizer, exact, (sequences, step_tokens, memory)
        self.kept = kept_tokens(model.config, sinks, window, exact or len(self.models) > 1)
        self._failed: list[tuple[Request, RowError]] = []
        self._weights: list[int] = []
        self._watched: Any = None
        self._places: list[tuple[torch.device, torch.dtype]] = []
        self._look()

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams],
        progress: Callable[[int, int], None] | None = None,
    ) -> list[list[Completion]]:  # fmt: skip
        """Return `n` answers to each prompt (token ids, or text that the tokenizer reads), in order; `params`: for all, or one per prompt.

        An answer's random numbers depend only on the seed, the prompt's tokens and the answer's number. So, without a draft, neither order
        nor batch changes the answer, up to rounding in matrix products (none if the engine is exact). Equal prompts in one call draw
        different answers. `progress` gets (answers done, all answers). Raise ValueError for an unusable prompt, RowError for a failure."""
        self._look()
        repeats: Counter[tuple[int, ...]] = Counter()
        completions: dict[Request, dict[int, Completion]] = {}
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        for index, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
            request = self._request(prompt, own, index)
            request.first = repeats[request.words]
            repeats[request.words] += own.n
            completions[request] = {}
        total = sum(own.n for own in each)
        with closing(self._events(list(completions))) as events:
            endings = ((event, event.completion) for event in events if event.completion is not None)
            for done, (event, completion) in enumerate(endings, 1):
                completions[event.request][event.number] = completion
                if progress is not None:
                    progress(done, total)
        return [[row[number] for number in sorted(row)] for row in completions.values()]

    def room(self, prompt: int, wanted: int) -> int:
        """Return how many of `wanted` tokens fit into the model's context after `prompt` tokens; all of them if the engine has a window."""
        return wanted if self.kept is not None else min(wanted, max(0, self.model.config.max_position_embeddings - prompt))

    def stream(self, prompt: Prompt, params: SamplingParams) -> Generator[Event, None, None]:
        """Yield an event per drawn token of the answers; closing the iterator cancels the request. Raise RowError if the request fails."""
        self._look()
        yield from self._events([self._request(prompt, params)])

    def _events(self, requests: Sequence[Request]) -> Generator[Event, None, None]:
        """Yield the tokens drawn for these requests until all their answers have ended. Closing the iterator cancels the requests. Raise
        RowError if one of them failed, which cancels the others."""
        left, own = sum(request.params.n for request in requests), set(requests)
        try:
            for request in requests:
                self.scheduler.add(request)
            while left:
                for event in self.step():
                    if event.request in own:
                        left -= event.completion is not None
                        yield event
                self._raise(requests, own)
        finally:
            for request in requests if left else ():
                self.cancel(request)

    def submit(self, prompt: Prompt, params: SamplingParams) -> Request:
        """Return the request for a prompt, queued for the next steps; raise ValueError if it cannot be used or does not fit the cache."""
        self._look()
        request = self._request(prompt, params)
        self.scheduler.add(request)
        return request

    def _request(self, prompt: Prompt, params: SamplingParams, index: int = 0) -> Request:
        """Return the request for a prompt; its answer is cut off where the model's context ends. Raise ValueError for an unusable prompt
        or stop, an unknown token, or a prompt longer than the context."""
        request, V = request_of(self.tokenizer, prompt, params, index), self.model.config.vocab_size
        if not (min(request.prompt) >= 0 and max(request.prompt) < V):
            raise ValueError(f"prompt {index} names a token that the model does not have: token ids lie in 0 to {V - 1}")
        if not self.room(len(request.prompt) - 1, 1):
            context = f"the model's context {self.model.config.max_position_embeddings}"
            raise ValueError(f"prompt {index} has {len(request.prompt)} tokens, but {context}: shorten it, or set a window")
        room = max(1, self.room(len(request.prompt), params.max_tokens))
        if room < params.max_tokens:
            request.params = replace(params, max_tokens=room)
        return request

    def take_failures(self) -> list[tuple[Request, RowError]]:
        """Return the requests that failed since the last call, with the reason. They have ended; all other requests continue."""
        failed, self._failed = self._failed, []
        return failed

    def _raise(self, requests: Sequence[Request], own: set[Request]) -> None:
        """Raise the first failure of these requests, if there is one; failures of other requests stay for `take_failures`."""
        failures = [one for one in self._failed if one[0] in own]
        self._failed = [one for one in self._failed if one[0] not in own]
        for request, error in failures[:1]:
            message = f"prompt {requests.index(request)}: {error}" if len(requests) > 1 else str(error)
            raise RowError(message, error.asked) from error

    def cancel(self, request: Request) -> None:
        """End a request; its answers stay unfinished."""
        self.scheduler.cancel(request)

    def clear(self) -> None:
        """End every request, forget failures not yet reported, and replace the caches, whose content cannot be trusted after a failure."""
        del self.caches, self.scheduler
        self._weights, self._places, self._failed = [], [], []
        self._renew()

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Run a forward pass of the scheduled tokens and draw the tokens due; return their events ([] while it only reads prompts)."""
        return self._end(*self._begin())

    def _begin(self) -> tuple[list[Answer], Drawn | None]:
        """Run one forward pass; return the answers whose next tokens are due, and the tokens drawn for them (None if no answer is due)."""
        progress.advance()
        self._renew()
        device, dtype = self.model.place
        with exact_passes(dtype, device, self.exact):
            work = self.scheduler.plan()
            if work:
                for cache in self.caches:
                    cache.copy(self.scheduler.copies)
                    if self.kept is not None and self.scheduler.turns:
                        cache.turn_back(self.kept, list(chain(*self.scheduler.turns.values())))
                self.scheduler.copies, self.scheduler.turns = [], {}
                hidden_ND, row = self._compute(work), -1
                for answer in work:
                    self.scheduler.mark_computed(answer, (hidden_ND, row + answer.count))
                    row += answer.count + len(answer.guess)
            ready = [answer for answer in work if answer.hidden is not None] + list(self.scheduler.fork())
            return ready, self._draw(ready) if ready else None

    def _draw_tokens(self, logits_SV: Tensor, draws: Sequence[Draw]) -> Drawn:
        return draw(logits_SV, draws)

    def _draw(self, ready: Sequence[Answer]) -> Drawn:
        draws: list[Draw] = []
        parts: list[tuple[Tensor, list[int]]] = []  # rows of this step, and of earlier steps whose prompts fork now
        for answer in ready:
            assert answer.hidden is not None
            (hidden_ND, row), params, begin = answer.hidden, answer.request.params, len(answer.logprobs)
            if not parts or parts[-1][0] is not hidden_ND:
                parts.append((hidden_ND, []))
            for i in range(len(answer.guess) + 1):
                before = [*answer.own, *answer.guess[:i]] if params.shifts else ()
                draws.append(Draw(params, answer.uniform(begin + i), answer.request.prompt, before))
                parts[-1][1].append(row + i)
        rows = [hidden_ND if rows == list(range(len(hidden_ND))) else hidden_ND[rows] for hidden_ND, rows in parts]
        return self._draw_tokens(self.model.logits(rows[0] if len(rows) == 1 else torch.cat(rows)), draws)

    def _end(self, ready: Sequence[Answer], drawn: Drawn | None) -> list[Event]:
        """Record the drawn tokens in their answers, cancel requests with errors, and return the events."""
        if drawn is None:
            return []
        each = zip(drawn.tokens, drawn.logprobs, map(drawn.errors.get, range(len(drawn.tokens))), strict=True)
        errors: dict[Request, RowError] = {}
        events = [event for answer in ready for event in self._take(answer, each, errors)]
        for request, error in errors.items():
            self.cancel(request)
            self._failed.append((request, error))
        if any(str(error) == DIVERGED for error in errors.values()):
            # All answers are computed again on fresh pages: non-finite numbers would spread from the old pages.
            self.scheduler.restart()
            del self.caches
            self.caches = [Cache(model, len(self.scheduler.pool.references)) for model in self.models]
        return events

    def _take(self, answer: Answer, drawn: Iterator[DrawnRow], errors: dict[Request, RowError]) -> Iterator[Event]:
        """Record the tokens drawn after an answer's last token and its guesses, up to the first wrong guess; yield the tokens' events. Put
        the error of a failed row into `errors`, and ignore the answer's later rows."""
        guess, answer.guess, answer.hidden = answer.guess, [], None
        rows = list(islice(drawn, len(guess) + 1))
        for right, (token, logprob, error) in enumerate(rows):
            if error is not None:
                errors.setdefault(answer.request, error)
                break
            answer.tokens.append(token)
            answer.logprobs.append(logprob)
            completion = self._completion(answer)
            yield Event(answer.request, answer.number, token, logprob, completion)
            if completion is not None or guess[right : right + 1] != [token]:
                break
            answer.computed += 1
        if answer.pace is not None:
            answer.pace.learn(len(guess), right)

    def _completion(self, answer: Answer) -> Completion | None:
        """Return the completion if the last token ends the answer, else None."""
        request, token = answer.request, answer.tokens[-1]
        finished = token in request.stop_ids or (bool(request.stop_texts) and self._stops(answer))
        if not finished and len(answer.logprobs) < request.params.max_tokens:
            return None
        self.scheduler.finish(answer)
        return Completion(answer.own, answer.logprobs, finished)

    def _stops(self, answer: Answer) -> bool:
        """True if the answer's text contains a stop text. Call it once per token: each call appends the last token to the decoded text."""
        assert self.tokenizer is not None
        stream = answer.stream = answer.stream or TextStream(self.tokenizer, context=answer.request.prompt)
        text = answer.tail + stream.add(answer.tokens[-1])
        answer.tail = text[-max(map(len, answer.request.stop_texts)) :]
        return any(stop in text + stream.rest for stop in answer.request.stop_texts)

    @property
    def models(self) -> tuple[Transformer, ...]:
        """Return the models that run, each with its own cache but the same page numbers; the first model draws the answers."""
        return (self.model,)

    def _compute(self, work: Sequence[Answer]) -> Tensor:
        """Run the model on the answers' next tokens and guesses; return the hidden states [N, D]."""
        tokens = [[*answer.tokens[answer.computed : answer.computed + answer.count], *answer.guess] for answer in work]
        due = [Stretch(answer.pages, answer.place, some) for answer, some in zip(work, tokens, strict=True)]
        return run(self.model, self.caches[0], due, self._loops[0])

    def _look(self) -> None:
        """Look up the models' parameters again, because their tensors may have been replaced."""
        self._parameters = [p for model in self.models for p in model.parameters()]
        self._renew()

    def _renew(self) -> None:
        """Drop the cached pages if the weights changed; allocate new caches and drop all requests if a model's device or dtype changed."""
        weights = [*map(Tensor.data_ptr, self._parameters)]
        if weights == self._weights and is_unchanged(self._watched):
            return
        places = [model.place for model in self.models]
        if self._places != places:
            self._places = places
            sequences, step_tokens, memory = generation_room(places[0][0], *self._wanted)
            pages = max(1, memory // sum(Cache(model, 1).bytes for model in self.models))
            pages = min(pages, 1 << 18)  # four million tokens: lists for a small model on a GPU would be far longer
            self.caches = [Cache(model, pages) for model in self.models]
            self.scheduler = Scheduler(PagePool(pages), sequences, step_tokens, len(self.models) > 1, self.kept)
        self.scheduler.restart()
        self._watched = watch([p for p in self._parameters if not p.is_inference()])  # inference tensors do not record changes
        self._loops, self._weights = [loops(model) for model in self.models], weights


def request_of(tokenizer: Tokenizer | None, prompt: Prompt, params: SamplingParams, index: int = 0) -> Request:
    """Return the request for a prompt. Raise ValueError if the prompt (the message names its `index`) or a stop cannot be used."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(f"prompt {index} is text and the engine has no tokenizer: give token ids")
        prompt = [*tokenizer.lead, *tokenizer.encode(prompt)]
    ids = [int(token) for token in prompt]
    if not ids:
        raise ValueError(f"prompt {index} is empty: generation needs at least one token")
    stop: Sequence[int | str] | None = tokenizer.stop_ids if params.stop is None and tokenizer is not None else params.stop
    if stop is None:
        raise ValueError("SamplingParams.stop is None and the engine has no tokenizer to name the end of turn")
    texts = tuple(one for one in stop if isinstance(one, str))
    if texts and tokenizer is None:
        raise ValueError(f"the engine has no tokenizer to find the text {texts[0]!r} in an answer: give token ids")
    words = tuple(np.frombuffer(hashlib.sha256(np.asarray(ids, dtype="<i8").tobytes()).digest(), dtype="<u4").tolist())
    return Request(ids, params, frozenset(one for one in stop if isinstance(one, int)), texts, words)
