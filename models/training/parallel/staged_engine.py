"""Generation over pipeline stages: each rank holds the layers, keys and values of one stage; all ranks plan the same steps.

Prompts are dealt to waves (micro-batches), one per stage. A wave has its own pages and steps: while one stage computes a step of one wave,
the next stage computes a step of another. The last stage draws the tokens and sends them to the other stages."""

from __future__ import annotations

import itertools
import json
from collections.abc import Generator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from puna.models.generation.engine import Engine, Event
from puna.models.generation.pages import generation_room
from puna.models.generation.sampling import Drawn, RowError
from puna.models.generation.schedule import Answer, Request
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.training.parallel.base import Parallel
from puna.models.training.parallel.mesh import cut
from puna.models.training.parallel.pipeline import Pipelined
from puna.models.transformer import Transformer


class Wave(Engine):
    """An engine that computes one stage of the steps of one wave of prompts."""

    def __init__(self, held: Pipelined, tokenizer: Tokenizer | None, *limits: Any) -> None:
        self._mesh, self._stage, self._part = held.mesh, held.mesh.at["pipeline"], held.model
        self._last = held.mesh.size("pipeline") - 1
        self._sent: list[tuple[Any, Tensor]] = []
        super().__init__(held.model, tokenizer, *limits)

    def _compute(self, work: Sequence[Answer]) -> Tensor:
        while self._sent:
            self._sent.pop()[0].wait()
        if self._stage:
            rows = sum(answer.count + len(answer.guess) for answer in work)
            self._part.given = self._receive(self._stage - 1, rows, self.model.config.hidden_size, dtype=self.model.place[1])
        hidden_ND = super()._compute(work)
        if self._stage < self._last:
            self._send(hidden_ND, self._stage + 1)
        return hidden_ND

    def _draw(self, ready: Sequence[Answer]) -> Drawn:
        if self._stage < self._last:
            rows = sum(1 + len(answer.guess) for answer in ready)
            return Drawn([0] * rows, [0.0] * rows, {})
        samples = super()._draw(ready)
        logprobs = [float("nan") if row in samples.errors else value for row, value in enumerate(samples.logprobs)]
        words = json.dumps([(row, str(error), error.asked) for row, error in samples.errors.items()]).encode()
        for stage in range(self._last):
            self._send(torch.tensor([samples.tokens, logprobs], dtype=torch.float64), stage)
            if samples.errors:
                self._send(torch.tensor([len(words)]), stage)
                self._send(torch.frombuffer(bytearray(words), dtype=torch.uint8), stage)
        return samples

    def _end(self, ready: Sequence[Answer], drawn: Drawn | None) -> list[Event]:
        if drawn is not None and self._stage < self._last:
            tokens, logprobs = self._receive(self._last, 2, len(drawn.tokens), dtype=torch.float64).tolist()
            errors: dict[int, RowError] = {}
            if any(value != value for value in logprobs):
                size = int(self._receive(self._last, 1, dtype=torch.int64))
                failures = json.loads(bytes(self._receive(self._last, size, dtype=torch.uint8).numpy()))
                errors = {row: RowError(message, asked) for row, message, asked in failures}
            drawn = Drawn(list(map(int, tokens)), logprobs, errors)
        return super()._end(ready, drawn)

    def _send(self, values: Tensor, stage: int) -> None:
        values = values.contiguous()
        self._sent.append((dist.isend(values, self._mesh.rank("pipeline", stage)), values))

    def _receive(self, stage: int, *shape: int, dtype: torch.dtype) -> Tensor:
        values = torch.empty(shape, dtype=dtype)
        dist.recv(values, self._mesh.rank("pipeline", stage))
        return values


class StagedEngine(Wave):
    """The engine of one pipeline rank and its first wave. Waves share `sequences` and `memory`. All ranks get the same requests.
    The constructor raises ValueError for a layout with virtual stages."""

    def __init__(
        self, held: Pipelined, tokenizer: Tokenizer | None = None, sequences: int | None = None, step_tokens: int | None = None,
        memory: int | None = None, exact: bool = False,
    ) -> None:  # fmt: skip
        if held.mesh.layout.virtual_stages > 1:
            raise ValueError(f"the layout {held.mesh.layout}: generation runs one stage per process; leave virtual_stages out")
        stages, layers = held.mesh.size("pipeline"), held.model.config.num_hidden_layers
        room = generation_room(held.device, sequences, step_tokens, memory)
        # The same number of pages on each stage, whatever its number of layers.
        own = room.memory // stages * len(held.model.blocks) // cut(layers, stages)
        limits = cut(room.sequences, stages), room.step_tokens, own, exact
        super().__init__(held, tokenizer, *limits)
        self._waves = [self, *(Wave(held, tokenizer, *limits) for _ in range(stages - 1))]

    def _events(self, requests: Sequence[Request]) -> Generator[Event, None, None]:
        left, own = sum(request.params.n for request in requests), set(requests)
        steps: dict[Wave, tuple[list[Answer], Drawn | None]] = {}
        for wave in self._waves:
            wave._look()
        try:
            for request, wave in zip(requests, itertools.cycle(self._waves)):
                wave.scheduler.add(request)
            while left:
                for wave in self._waves:
                    for event in self._end_wave(wave, steps):
                        left -= event.completion is not None
                        yield event
                    wave._raise(requests, own)
                    if not wave.scheduler.idle:
                        with torch.inference_mode():
                            steps[wave] = wave._begin()
        finally:
            for wave in self._waves:  # finish the steps under way
                self._end_wave(wave, steps)
                for request in requests if left else ():
                    wave.cancel(request)

    @staticmethod
    @torch.inference_mode()
    def _end_wave(wave: Wave, begun: dict[Wave, tuple[list[Answer], Drawn | None]]) -> list[Event]:
        return wave._end(*begun.pop(wave)) if wave in begun else []


def held_engine(held: Parallel, tokenizer: Tokenizer | None = None, **limits: Any) -> Engine:
    """Return the engine of this rank's part of a model: a `StagedEngine` if the model is in pipeline stages, else an `Engine`."""
    if isinstance(held, Pipelined):
        return StagedEngine(held, tokenizer, **limits)
    return Engine(cast("Transformer", held.model), tokenizer, **limits)
