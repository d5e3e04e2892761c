"""An HTTP server in the shape of OpenAI's: completions and chat, whole or as a stream of events.

One thread runs the engine; requests reach it through a queue, tokens come back to the event loop. A client that goes away, or
whose time is up, has its request cancelled at the next step.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import queue
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator

from puna.models.generation import Engine, SamplingParams
from puna.models.generation.engine import Event
from puna.models.generation.schedule import Request as Asked
from puna.models.generation.text import TextStream
from puna.models.grammar import Grammar, Mask
from puna.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Limits:
    """Bounds of a server: requests at once, seconds of one request, bytes of its body."""

    queue: int = 256
    seconds: float = 600.0
    body: int = 1 << 20


class ApiError(Exception):
    """What a client is told in OpenAI's shape."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.body = status, {"error": {"message": message, "type": kind, "param": param, "code": None}}


class StreamOptions(BaseModel):
    """What a stream tells besides."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


class JsonSchema(BaseModel):
    """The form of an answer."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field("answer", description="Of the client; not looked at")
    description: str | None = Field(None, description="Of the client; not looked at")
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="An answer is always held to its schema")


class ResponseFormat(BaseModel):
    """Text, any JSON object, or JSON of a schema."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _whole(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema stands with the type json_schema, and only there")
        return self


class Sampled(BaseModel):
    """The fields that both kinds of request have."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    temperature: float = Field(1.0, ge=0, le=10)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    n: int = Field(1, ge=1, le=128)
    seed: int | None = Field(None, ge=0)
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    presence_penalty: float = Field(0.0, ge=-10, le=10)
    frequency_penalty: float = Field(0.0, ge=-10, le=10)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    logit_bias: dict[int, float] = Field(default_factory=dict)
    user: str | None = Field(None, description="Of the client; not looked at")


class CompletionRequest(Sampled):
    """Go on from a text."""

    prompt: str | list[int] = Field(min_length=1)
    max_tokens: int = Field(16, ge=1)
    logprobs: bool | int | None = Field(None, description="Whether to tell the log-probs of the drawn tokens")


class TextPart(BaseModel):
    """A piece of a turn's text."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[TextPart] | None = None

    def turn(self) -> dict[str, Any]:
        """As a chat template takes it."""
        content = self.content if isinstance(self.content, str | None) else "".join(part.text for part in self.content)
        return {name: value for name, value in {**self.model_dump(), "content": content}.items() if value is not None}


class ChatRequest(Sampled):
    """Answer a conversation."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    tools: list[dict[str, Any]] | None = None


class Worker:
    """The thread that runs the engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.active = 0  # requests that wait or are answered
        self.counts = {"requests": 0, "prompt_tokens": 0, "generated_tokens": 0, "cancelled": 0}
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tell: dict[int, Callable[[Event | ApiError], object]] = {}
        self._thread = threading.Thread(target=self._run, name="puna-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._orders.put(None)
        self._thread.join()

    async def answer(self, ids: list[int], params: SamplingParams, seconds: float) -> AsyncIterator[Event]:
        """The request's tokens as they come. ApiError where the engine refuses it or its time is up."""
        loop = asyncio.get_running_loop()
        found: asyncio.Queue[Event | ApiError] = asyncio.Queue()
        asked: list[Asked] = []
        self.active += 1
        self.counts["requests"] += 1
        self.counts["prompt_tokens"] += len(ids)

        def begin() -> None:
            try:
                asked.append(self.engine.submit(ids, params))
                self._tell[id(asked[0])] = lambda event: loop.call_soon_threadsafe(found.put_nowait, event)
            except ValueError as error:
                refused = ApiError(400, "invalid_request_error", str(error))
                loop.call_soon_threadsafe(found.put_nowait, refused)

        def end() -> None:
            if asked and self._tell.pop(id(asked[0]), None) is not None:
                self.engine.cancel(asked[0])
                self.counts["cancelled"] += left > 0

        self._orders.put(begin)
        left, until = params.n, time.monotonic() + seconds
        try:
            while left:
                event = await asyncio.wait_for(found.get(), until - time.monotonic())
                if isinstance(event, ApiError):
                    raise event
                left -= event.completion is not None
                self.counts["generated_tokens"] += 1
                yield event
        except TimeoutError:
            raise ApiError(408, "timeout_error", f"the answer was not done in {seconds:g} seconds") from None
        finally:
            self.active -= 1
            self._orders.put(end)

    def _run(self) -> None:
        while True:
            while not self._orders.empty() or self.engine.scheduler.idle:
                order = self._orders.get()
                if order is None:
                    return
                order()
            try:
                events = self.engine.step()
            except Exception as error:  # noqa: BLE001  what breaks a step ends the requests that were in it, not the server
                self._fail(error)
                continue
            for event in events:
                if (tell := self._tell.get(id(event.request))) is not None:
                    tell(event)

    def _fail(self, error: Exception) -> None:
        for tell in self._tell.values():
            tell(ApiError(500, "server_error", f"the engine failed: {error}"))
        self._tell.clear()
        self.engine.clear()


def application(engine: Engine, name: str, limits: Limits = Limits(), key: str | None = None, speculate: int = 0) -> FastAPI:
    """The server of one model; `speculate` as in SamplingParams, for answers of free form."""
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise ValueError("a server needs a model with its tokenizer")
    worker = Worker(engine)

    @cache
    def grammar() -> Grammar:
        return Grammar(tokenizer, engine.model.config.vocab_size)

    def form(asked: ResponseFormat | None) -> Mask | None:
        if asked is None or asked.type == "text":
            return None
        return grammar().schema(None if asked.json_schema is None else asked.json_schema.schema_)

    @asynccontextmanager
    async def running(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await asyncio.to_thread(worker.stop)

    app = FastAPI(title="Puna", lifespan=running, docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(ApiError)
    async def told(_: Request, error: ApiError) -> Response:
        return JSONResponse(error.body, error.status)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:]) or None
        return await told(_, ApiError(400, "invalid_request_error", f"{field or 'body'}: {first['msg']}", field))

    @app.middleware("http")
    async def guard(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        try:
            if key is not None and request.url.path.startswith("/v1/"):
                given = request.headers.get("authorization", "").removeprefix("Bearer ")
                if not hmac.compare_digest(given.encode(), key.encode()):
                    raise ApiError(401, "authentication_error", "the key is missing or wrong: send Authorization: Bearer KEY")
            length = request.headers.get("content-length")
            if request.method == "POST" and (length is None or not length.isdigit() or int(length) > limits.body):
                raise ApiError(413, "invalid_request_error", f"the body must say its length, of at most {limits.body} bytes")
            if request.method == "POST" and worker.active >= limits.queue:
                raise ApiError(429, "rate_limit_error", f"{worker.active} requests are at work, as many as may be: try again later")
        except ApiError as error:
            return await told(request, error)
        return await go_on(request)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        pool = engine.scheduler.pool
        values = {
            **{f"puna_{count}_total": value for count, value in worker.counts.items()},
            "puna_active_requests": worker.active,
            "puna_pages": len(pool.references),
            "puna_pages_in_use": len(pool.references) - pool.available,
        }
        return PlainTextResponse("".join(f"{name} {value}\n" for name, value in values.items()))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "puna"}]}

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest) -> Response:
        ids = [*tokenizer.lead, *tokenizer.encode(body.prompt)] if isinstance(body.prompt, str) else body.prompt
        return await answered(body, ids, body.max_tokens, "text_completion", body.logprobs not in (None, False))

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest) -> Response:
        try:
            ids = tokenizer.chat([message.turn() for message in body.messages], tools=body.tools)
        except ValueError as error:
            raise ApiError(400, "invalid_request_error", str(error), "messages") from error
        room = engine.model.config.max_position_embeddings - len(ids)
        longest = body.max_completion_tokens or body.max_tokens or max(1, min(room, 1024))
        return await answered(body, ids, longest, "chat.completion", body.logprobs)

    async def answered(body: Sampled, ids: list[int], longest: int, kind: str, logprobs: bool) -> Response:
        if body.model not in (None, name):
            raise ApiError(404, "invalid_request_error", f"there is no model {body.model!r} here, only {name!r}", "model")
        context, V = engine.model.config.max_position_embeddings, engine.model.config.vocab_size
        if len(ids) + longest > context:
            told = f"{len(ids)} tokens of the prompt and {longest} of the answer exceed the model's context of {context}"
            raise ApiError(400, "invalid_request_error", told, "max_tokens")
        if not all(0 <= token < V for token in (*ids, *body.logit_bias)):
            raise ApiError(400, "invalid_request_error", f"token ids lie in 0 to {V - 1}")
        texts = [body.stop] if isinstance(body.stop, str) else body.stop or []
        if not all(texts):
            raise ApiError(400, "invalid_request_error", "a stop text must not be empty", "stop")
        same = ("temperature", "top_p", "top_k", "min_p", "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
        seed = uuid.uuid4().int >> 96 if body.seed is None else body.seed
        given = {**tokenizer.sampling, **{field: getattr(body, field) for field in same if field in body.model_fields_set}}
        try:
            mask = await asyncio.to_thread(form, body.response_format)
        except ValueError as error:
            raise ApiError(400, "invalid_request_error", str(error), "response_format") from error
        stop: tuple[int | str, ...] = (*tokenizer.stop_ids, *texts)
        ahead = speculate if mask is None else 0
        params = SamplingParams(**given, max_tokens=longest, seed=seed, stop=stop, mask=mask, speculate=ahead)
        events = worker.answer(ids, params, limits.seconds)
        reply = Reply(kind, name, ids, {i: TextStream(tokenizer, texts) for i in range(body.n)}, tokenizer if logprobs else None)
        if not body.stream:
            async for event in events:
                reply.add(event)
            return JSONResponse(reply.whole())
        first = await anext(events)  # what is refused is told as an error, not in a stream

        async def lines() -> AsyncIterator[str]:
            yield reply.line(first)
            try:
                async for event in events:
                    yield reply.line(event)
            except ApiError as error:
                yield f"data: {json.dumps(error.body)}\n\n"
            finally:
                await events.aclose()  # type: ignore[attr-defined]
            if body.stream_options is not None and body.stream_options.include_usage:
                yield reply.last()
            yield "data: [DONE]\n\n"

        return StreamingResponse(lines(), media_type="text/event-stream")

    return app


class Reply:
    """An answer in OpenAI's shape, as a whole or in chunks."""

    def __init__(self, kind: str, model: str, ids: list[int], texts: dict[int, TextStream], scored: Tokenizer | None) -> None:
        """`scored`: tells the tokens with their log-probs, where these are asked for."""
        self.kind, self.texts, self.scored, self.prompt_tokens = kind, texts, scored, len(ids)
        prefix = "chatcmpl" if kind.startswith("chat") else "cmpl"
        self.head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self.said = dict.fromkeys(texts, "")
        self.scores: dict[int, list[tuple[int, float]]] = {number: [] for number in texts}
        self.reasons: dict[int, str] = {}

    def add(self, event: Event) -> str:
        """Take a token in; the text that it brings."""
        new = self.texts[event.number].add(event.token, event.completion is not None)
        self.said[event.number] += new
        self.scores[event.number].append((event.token, event.logprob))
        if event.completion is not None:
            self.reasons[event.number] = "stop" if event.completion.finished else "length"
        return new

    def _scores(self, number: int, start: int = 0) -> dict[str, Any] | None:
        if self.scored is None:
            return None
        shown = [(self.scored.decode([token]), score) for token, score in self.scores[number][start:]]
        if self.kind.startswith("chat"):
            return {"content": [{"token": text, "logprob": score, "bytes": None, "top_logprobs": []} for text, score in shown]}
        return {"tokens": [text for text, _ in shown], "token_logprobs": [score for _, score in shown]}

    def _usage(self) -> dict[str, int]:
        made = sum(map(len, self.scores.values()))
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": made, "total_tokens": self.prompt_tokens + made}

    def whole(self) -> dict[str, Any]:
        choices = []
        for number, text in self.said.items():
            shown = {"message": {"role": "assistant", "content": text}} if self.kind.startswith("chat") else {"text": text}
            choices.append({"index": number, **shown, "logprobs": self._scores(number), "finish_reason": self.reasons[number]})
        return {**self.head, "object": self.kind, "choices": choices, "usage": self._usage()}

    def line(self, event: Event) -> str:
        """One token as a server-sent event."""
        first = not self.scores[event.number]
        text = self.add(event)
        if self.kind.startswith("chat"):
            shown: dict[str, Any] = {"delta": {**({"role": "assistant"} if first else {}), "content": text}}
        else:
            shown = {"text": text}
        choice = {"index": event.number, **shown, "finish_reason": self.reasons.get(event.number)}
        if self.scored is not None:
            choice["logprobs"] = self._scores(event.number, -1)
        return self._chunk(choices=[choice])

    def last(self) -> str:
        """What was used, as the last event of a stream."""
        return self._chunk(choices=[], usage=self._usage())

    def _chunk(self, **fields: Any) -> str:
        kind = "chat.completion.chunk" if self.kind.startswith("chat") else self.kind
        return f"data: {json.dumps({**self.head, 'object': kind, **fields}, ensure_ascii=False)}\n\n"
