"""Long prompts computed by a process of their own, so that answers in the making go on meanwhile (DistServe, Zhong et al. 2024).

Both processes have the weights and the pages of keys and values in shared memory: what the other one computes it writes where this one
reads it, and a prompt that is done stands in the tree of prefixes, where its request finds it like any prompt that was asked before. One
prompt is computed at a time. A process that dies takes that prompt with it and is started anew; what it wrote was never in the tree.
"""

from __future__ import annotations

import logging
import multiprocessing
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor

from puna.kernels.exact import exact_passes
from puna.kernels.paged_attention import PAGE
from puna.models.generation.cache import Cache
from puna.models.generation.dense import loops
from puna.models.generation.engine import Engine, Event, Prompt
from puna.models.generation.sampling import RowError
from puna.models.generation.sampling_params import SamplingParams
from puna.models.generation.schedule import Request
from puna.models.generation.step import Stretch, run
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.transformer import Transformer

LONG = 256  # tokens of a prompt, as far as they are not kept, from which the other process computes it
CHUNK = 256  # tokens after which it looks whether its prompt is still wanted
PATIENCE = 0.05  # seconds that a step waits for it where there is nothing else to do


@dataclass(eq=False)
class Job:
    """A prompt that the other process computes from its token `begin` on, into these pages."""

    request: Request
    pages: list[int]
    begin: int
    wanted: bool = True

    @property
    def tokens(self) -> list[int]:
        """The prompt's whole pages."""
        return self.request.prompt[: len(self.pages) * PAGE]


class SplitEngine(Engine):
    """An engine whose submitted requests have long prompts computed by a process with `threads` threads of its own; `limits` are the
    engine's. ValueError on a GPU, whose memory is not shared, and for a model whose layers come and go."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer | None = None, threads: int = 1, **limits: Any) -> None:
        if any(parameter.device.type != "cpu" for parameter in model.parameters()):
            raise ValueError("a process for prompts shares weights and pages with this one: it needs a model on a CPU")
        come = getattr(model.model, "by_loops", None) is not None or getattr(model.model, "streamed_keys", False)
        if come or any(not list(layer.parameters()) for layer in model.model.layers):
            raise ValueError("a process for prompts needs a model whose layers all stay in memory: leave offload or this out")
        if limits.get("window") is not None:
            raise ValueError("a process for prompts computes them whole: leave the window or this out")
        self._threads, self._queue = threads, deque[Request]()
        self._job: Job | None = None
        super().__init__(model, tokenizer, **limits)
        share(model.parameters())
        self._start()

    @property
    def busy(self) -> bool:
        """True if prompts are with the other process, or wait for it."""
        return self._job is not None or bool(self._queue) or bool(self._failed)

    def submit(self, prompt: Prompt, params: SamplingParams) -> Request:
        """Queue a prompt for the next steps; a long one is computed by the other process first."""
        self._look()
        request = self._request(prompt, params)
        self.scheduler.add(request)  # refuses what does not fit
        if len(request.prompt) >= LONG:
            self.scheduler.waiting.remove(request)
            self._queue.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request; pages that the other process writes to are given back when it has stopped."""
        if request in self._queue:
            self._queue.remove(request)
        if self._job is not None and self._job.request is request and self._job.wanted:
            self._job.wanted = False
            self._send(None)
        super().cancel(request)

    def clear(self) -> None:
        """End every request, and forget all that was computed."""
        self.close()
        self._queue.clear()
        self._job = None
        super().clear()
        self._start()

    def _start_over(self) -> None:
        """Queue all answers to be computed again; a prompt with the other process waits for a new process."""
        self.close()
        job, self._job = self._job, None
        if job is not None:
            if job.wanted:
                self._queue.appendleft(job.request)
            self.scheduler.pool.release(job.pages)
        super()._start_over()
        self._start()

    def step(self) -> list[Event]:
        """Take over what was computed elsewhere, and compute what is due here."""
        if self._job is not None:
            idle = self.scheduler.idle and not self._failed
            ready = wait([self._pipe, self._process.sentinel], PATIENCE if idle else 0)
            if self._pipe in ready:
                self._take_over()
            elif ready:
                self._lost()
            elif self.scheduler.pool.available < self._reserve:  # the answers of this process need the pages
                self._send(None)
                self._queue.appendleft(self._job.request)
                self._job.wanted = False
                self._take_over()
        self._hand_over()
        return super().step()

    @property
    def _reserve(self) -> int:
        """Return the pages that a step of this process takes at most."""
        return self.scheduler.step_tokens // PAGE + 4 * self.scheduler.sequences

    def _hand_over(self) -> None:
        """Send the next prompt once there is room for its pages; one is computed here if most of it is cached, or if it leaves too
        little room beside it."""
        pool = self.scheduler.pool
        while self._queue and self._job is None:
            request = self._queue[0]
            pages, whole = pool.match(request.prompt[:-1]), (len(request.prompt) - 1) // PAGE
            begin = len(pages) * PAGE
            here = len(request.prompt) - begin < LONG or whole + self._reserve > len(pool.references)
            if here:
                self.scheduler.add(request)
            elif pool.available >= whole - len(pages) + self._reserve:
                if not self._process.is_alive():
                    self._lost()
                pages += [pool.take() for _ in range(whole - len(pages))]
                self._job = Job(self._queue.popleft(), pages, begin)
                self._send((self._job.tokens, begin, pages))
                return
            pool.release(pages)
            if not here:
                return
            self._queue.popleft()

    def _send(self, what: tuple[list[int], int, list[int]] | None) -> None:
        with suppress(OSError):  # it has died, which the next step sees
            self._pipe.send(what)

    def _take_over(self) -> None:
        """Take the prompt that was computed, or given up."""
        try:
            error = self._pipe.recv()
        except (EOFError, OSError):
            self._lost()
            return
        job, self._job = self._job, None
        assert job is not None
        if job.wanted and error is None:
            self.scheduler.pool.keep(job.tokens, job.pages)
            self.scheduler.add(job.request)
        elif job.wanted:
            self._failed.append((job.request, RowError(f"its prompt could not be computed: {error}", asked=False)))
        self.scheduler.pool.release(job.pages)

    def _lost(self) -> None:
        """Start a new process after the old one died; the prompt that it computed has failed."""
        self._process.join()
        message = f"the process that computed its prompt ended with status {self._process.exitcode}; ask again"
        logging.getLogger(__name__).warning("a prompt was lost: %s", message)
        job, self._job = self._job, None
        if job is not None:
            if job.wanted:
                self._failed.append((job.request, RowError(message, asked=False)))
            self.scheduler.pool.release(job.pages)
        self.close()
        self._start(shared=True)

    def _start(self, shared: bool = False) -> None:
        """Start the process, with the pages in memory that it shares."""
        if not shared:
            share(self.caches[0].stores, empty=True)
            self._look()
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        arguments = (self.model, self.caches[0], other, self._threads, self.exact)
        self._process = context.Process(target=_serve, args=arguments, name="puna-prefill", daemon=True)
        self._process.start()
        other.close()
        self.close = weakref.finalize(self, _end, self._process, self._pipe)


def _end(process: Any, pipe: Connection) -> None:
    pipe.close()
    process.kill()
    process.join()


def share(tensors: Iterable[Tensor], empty: bool = False) -> None:
    """Move tensors into one stretch of shared memory, where they stay the same objects; of `empty` ones, all zeros, only the shape."""
    unique = list({id(tensor): tensor for tensor in tensors}.values())
    sizes = [-(-_extent(tensor) * tensor.element_size() // 64) * 64 for tensor in unique]
    # Zeros that take memory as they are first written: torch's public share_memory_ would copy a tensor as large.
    whole = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(sum(sizes)))
    start = 0
    for tensor, size in zip(unique, sizes, strict=True):
        room = whole[start : start + size].view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), start // tensor.element_size())
        if not empty:
            room.copy_(tensor.detach())
        tensor.data = room
        start += size


def _extent(tensor: Tensor) -> int:
    """Return the number of elements from the first to the last of a tensor."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0


@torch.inference_mode()
def _serve(model: Transformer, cache: Cache, pipe: Connection, threads: int, exact: bool) -> None:
    """Run the process: read prompts, send None for each that is computed or no longer wanted, else the error."""
    torch.set_num_threads(threads)
    by_loops, weight = loops(model), model.model.embed_tokens.weight
    while True:
        try:
            job = pipe.recv()
        except (EOFError, OSError):
            return
        if job is None:  # given up when it was done
            continue
        tokens, begin, pages = job
        try:
            with exact_passes(weight.dtype, weight.device, exact):
                for first in range(begin, len(tokens), CHUNK):
                    if pipe.poll() and pipe.recv() is None:
                        break
                    chunk: Sequence[int] = tokens[first : first + CHUNK]
                    run(model, cache, [Stretch(pages[: -(-(first + len(chunk)) // PAGE)], first, chunk)], by_loops)
            pipe.send(None)
        except (OSError, EOFError):
            return
        except Exception as error:  # noqa: BLE001  told to who asked; the next prompt may be right
            pipe.send(f"{type(error).__name__}: {error}")
