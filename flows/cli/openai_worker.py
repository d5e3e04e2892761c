"""The engine thread of the HTTP server. Requests reach the thread through a queue; generated tokens go back to the event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable

from puna.flows.cli.openai_shapes import ApiError
from puna.models.generation import Engine, SamplingParams
from puna.models.generation.engine import Event
from puna.models.generation.schedule import Request as Asked
from puna.models.generation.score import Score, Scoring


class Worker:
    """The thread that runs the engine, with methods for the event loop to submit requests to it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.active = 0  # number of prompts and scorings that wait or run
        self.counts = {"requests": 0, "prompt_tokens": 0, "generated_tokens": 0, "scored_tokens": 0, "cancelled": 0}
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tell: dict[int, Callable[[Event | ApiError], object]] = {}
        self._scorings: deque[tuple[Scoring, Callable[[ApiError | None], object]]] = deque()
        self._thread = threading.Thread(target=self._run, name="puna-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._orders.put(None)
        self._thread.join()

    async def answer(self, ids: list[int], params: SamplingParams, seconds: float) -> AsyncGenerator[Event, None]:
        """Submit a request; yield an event per token. Closing the generator cancels the request. Raise ApiError on failure or timeout."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event | ApiError] = asyncio.Queue()
        submitted: list[Asked] = []
        self.active += 1
        self.counts["requests"] += 1
        self.counts["prompt_tokens"] += len(ids)

        def begin() -> None:
            try:
                submitted.append(self.engine.submit(ids, params))
                self._tell[id(submitted[0])] = lambda event: loop.call_soon_threadsafe(events.put_nowait, event)
            except ValueError as error:
                loop.call_soon_threadsafe(events.put_nowait, ApiError(str(error)))

        def end() -> None:
            if submitted and self._tell.pop(id(submitted[0]), None) is not None:
                self.engine.cancel(submitted[0])
                self.counts["cancelled"] += left > 0

        self._orders.put(begin)
        left, until = params.n, time.monotonic() + seconds
        try:
            while left:
                event = await asyncio.wait_for(events.get(), until - time.monotonic())
                if isinstance(event, ApiError):
                    raise event
                left -= event.completion is not None
                self.counts["generated_tokens"] += 1
                yield event
        except TimeoutError:
            raise ApiError(f"the answer was not finished in {seconds:g} seconds", status=408) from None
        finally:
            self.active -= 1
            self._orders.put(end)

    async def score(self, prompts: list[list[int]], top: int, temperature: float, seconds: float) -> list[list[Score]]:
        """Return the scores of each prompt's tokens, computed between engine steps. Raise ApiError on failure or after `seconds`."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[list[list[Score]]] = loop.create_future()
        scoring = Scoring(self.engine, prompts, top, temperature)

        def end(failure: ApiError | None) -> None:
            if not result.done():
                result.set_result(scoring.scores) if failure is None else result.set_exception(failure)

        self.active += 1
        self.counts["scored_tokens"] += sum(map(len, prompts))
        self._orders.put(lambda: self._scorings.append((scoring, lambda failure: loop.call_soon_threadsafe(end, failure))))
        try:
            return await asyncio.wait_for(result, seconds)
        except TimeoutError:
            raise ApiError(f"the prompts were not scored in {seconds:g} seconds", status=408) from None
        finally:
            self.active -= 1
            self._orders.put(lambda: self._drop(scoring))

    def _drop(self, scoring: Scoring) -> None:
        self._scorings = deque(one for one in self._scorings if one[0] is not scoring)

    def _score(self) -> None:
        """Compute one pass of the first scoring request in the queue, and append the request again if it is unfinished."""
        scoring, tell = self._scorings.popleft()
        try:
            if scoring.step():
                tell(None)
            else:
                self._scorings.append((scoring, tell))
        except Exception as error:  # noqa: BLE001  ends only its own request
            tell(ApiError(f"the prompts could not be scored: {error}", status=500))

    def _run(self) -> None:
        while True:
            while not self._orders.empty() or (self.engine.scheduler.idle and not self._scorings):
                order = self._orders.get()
                if order is None:
                    return
                order()
            if self._scorings:
                self._score()
            try:
                events = self.engine.step()
            except Exception as error:  # noqa: BLE001  an error in a step ends its requests, not the server
                self._fail(error)
                continue
            for event in events:
                if (tell := self._tell.get(id(event.request))) is not None:
                    tell(event)
            for request, failure in self.engine.take_failures():
                if (tell := self._tell.pop(id(request), None)) is not None:
                    tell(ApiError(str(failure), status=400 if failure.asked else 500))

    def _fail(self, error: Exception) -> None:
        for tell in self._tell.values():
            tell(ApiError(f"the engine failed: {error}", status=500))
        self._tell.clear()
        self.engine.clear()
