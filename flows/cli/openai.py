"""An HTTP server with OpenAI's API: completions and chat, whole or as server-sent events.

If a client disconnects or a request's time is up, the request is cancelled at the engine's next step (`openai_worker.py`)."""

from __future__ import annotations

import asyncio
import hmac
import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from puna.flows.cli.openai_shapes import ApiError, ChatRequest, CompletionRequest, Reply, ResponseFormat, Sampled, whole
from puna.flows.cli.openai_worker import Worker
from puna.flows.server.guard import Bounded
from puna.models.generation import Engine, SamplingParams
from puna.models.generation.engine import Event
from puna.models.generation.grammar import Grammar, Mask
from puna.models.generation.score import Score
from puna.models.tokens.tokenizer import Tokenizer

PROMPT_TOKENS = 1 << 16  # maximum total prompt tokens of a request with several prompts, unless the model's context is longer
STOP_TEXTS = 64  # maximum stop texts of a request: after every token, the server searches for all of them
CLIENT_GONE = 499  # nginx's status for a client that disconnected; nobody receives the response


@dataclass(frozen=True)
class Limits:
    """Limits of a server. `queue`: prompts that wait or run, and answers per request; `seconds`, `body` (bytes): of one request."""

    queue: int = 256
    seconds: float = 600.0
    body: int = 1 << 20


class Answerer:
    """The request handlers of one model. `speculate`: see SamplingParams; unused if an answer must be JSON."""

    SAMPLED = ("temperature", "top_p", "top_k", "min_p", "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")

    def __init__(self, worker: Worker, tokenizer: Tokenizer, name: str, limits: Limits, speculate: int) -> None:
        self.worker, self.tokenizer, self.name, self.seconds, self.most = worker, tokenizer, name, limits.seconds, limits.queue
        self.speculate = speculate
        self._compiler = ThreadPoolExecutor(1, "schemas")  # other requests need the default threads
        self.config = worker.engine.model.config

    async def completion(self, body: CompletionRequest, request: Request) -> Response:
        """Return the response to a completion request; `echo` adds the prompts and any requested log-probs. Raise ApiError if refused."""
        n = len(body.prompt)
        if n * body.n > self.most:
            raise _refusal("prompt", f"{n} prompts with {body.n} answers each; a request may have at most {self.most} answers")
        if body.max_tokens == 0 and not body.echo:
            raise _refusal("max_tokens", "0 generates nothing: set at least 1, or set echo to get the prompt")
        if body.stream and (field := "prompt" if n > 1 else "echo" if body.echo else ""):
            raise _refusal(field, "a stream supports one prompt and no echo: leave stream out")
        top = self._alternatives(body, "logprobs", body.echo)
        prompts = [await asyncio.to_thread(self._prompt, one) if isinstance(one, str) else one for one in body.prompt]
        if n > 1 and sum(map(len, prompts)) > max(PROMPT_TOKENS, self.config.max_position_embeddings):
            raise _refusal("prompt", f"the prompts have {sum(map(len, prompts))} tokens in total, more than {PROMPT_TOKENS}")
        return await self._answer(body, request, prompts, body.max_tokens, "text_completion", top)

    def _alternatives(self, body: CompletionRequest | ChatRequest, field: str, echo: bool = False) -> int | None:
        """Return the number of likeliest tokens to report per position; None without log-probs. Raise ApiError if this is unsupported."""
        top = body.alternatives
        if body.stream and top:
            raise _refusal(field, "a stream reports the log-probs of its own tokens, without alternatives: leave stream out")
        if top is not None and self.worker.engine.kept is not None and (top or echo):
            raise _refusal(field, "this server keeps only a window of the tokens (--window): it cannot score prompts or alternatives")
        return top

    def _prompt(self, text: str) -> list[int]:
        """Return the token ids of a prompt text, with BOS if the model has one. Raise ApiError if tokenizing the text takes too long."""
        try:
            return [*self.tokenizer.lead, *self.tokenizer.encode(text)]
        except ValueError as error:
            raise ApiError(str(error), "prompt") from error

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Return the response to a chat request: the answers to its conversation, whole or streamed. Raise ApiError if refused."""
        turns, top = [message.turn() for message in body.messages], self._alternatives(body, "top_logprobs")
        tools = body.tools if body.tool_choice == "auto" else None
        names: list[Any] = [tool["function"].get("name") if isinstance(tool.get("function"), dict) else None for tool in tools or ()]
        if None in names:
            raise _refusal("tools", "each is an object with a function, which has a name")
        try:
            ids = await asyncio.to_thread(self.tokenizer.chat, turns, tools=tools)  # a slow template must not delay other requests
            if tools and ids == await asyncio.to_thread(self.tokenizer.chat, turns):
                raise ApiError("the model's chat template does not support tools", "tools")
        except ValueError as error:
            raise ApiError(str(error), "messages") from error
        longest = body.max_completion_tokens or body.max_tokens or max(1, self.worker.engine.room(len(ids), 1024))
        return await self._answer(body, request, [ids], longest, "chat.completion", top, names)

    async def _answer(
        self, body: Sampled, request: Request, prompts: list[list[int]], longest: int, kind: str, top: int | None, names: Sequence[str] = ()
    ) -> Response:
        for ids in prompts:
            texts = self._check(body, ids, longest)
        params = await self._params(body, max(1, longest), texts)
        replies = [Reply(kind, self.name, ids, body.n, self.tokenizer, top is not None, texts, names) for ids in prompts]
        if not body.stream:
            work = asyncio.ensure_future(self._all(body, replies, params, longest, top or 0))
            departure = asyncio.ensure_future(request.receive())  # after the body, only a disconnect message comes
            try:
                await asyncio.wait((work, departure), return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    return Response(status_code=CLIENT_GONE)
                replies = await work
                return await asyncio.to_thread(lambda: JSONResponse(whole(replies)))  # a million log-probs must not delay others
            finally:
                departure.cancel()
                work.cancel()
        events = self.worker.answer(prompts[0], params, self.seconds)
        first = await anext(events)  # a refusal raises here and becomes an error response, not a stream
        usage = body.stream_options is not None and body.stream_options.include_usage
        return StreamingResponse(_lines(replies[0], first, events, usage), media_type="text/event-stream")

    async def _all(self, body: Sampled, replies: list[Reply], params: SamplingParams, longest: int, top: int) -> list[Reply]:
        """Generate answers (none if `longest` is 0), then compute requested log-probs; return `replies`. A failed answer fails them all."""
        if longest:
            drawing = [asyncio.ensure_future(self._draw(reply, params)) for reply in replies]
            try:
                await asyncio.gather(*drawing)
            finally:
                for one in drawing:
                    one.cancel()
        if isinstance(body, CompletionRequest) and body.echo:
            ids, scores = [reply.ids for reply in replies], [list[Score]() for _ in replies]
            if body.alternatives is not None:
                scores = await self.worker.score(ids, top, 1.0, self.seconds)
            for reply, prompt, own in zip(replies, body.prompt, scores, strict=True):
                reply.prompt = (prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt, skip_special_tokens=True), own)
        if top and longest:  # scored anew for the alternatives; the tokens' own log-probs stay equal up to rounding
            answers = [(reply, number) for reply in replies for number in reply.drawn]
            sequences = [[*reply.ids, *reply.drawn[number]] for reply, number in answers]
            rows = await self.worker.score(sequences, top, params.temperature or 1.0, self.seconds)
            for (reply, number), row in zip(answers, rows, strict=True):
                reply.scores[number] = row[len(reply.ids) :]
        return replies

    async def _draw(self, reply: Reply, params: SamplingParams) -> None:
        async with aclosing(self.worker.answer(reply.ids, params, self.seconds)) as events:
            async for event in events:
                reply.add(event)

    def check(self, model: str) -> None:
        if model != self.name:
            raise ApiError(f"there is no model {model!r} here, only {self.name!r}", "model", 404)

    def _check(self, body: Sampled, ids: list[int], longest: int) -> list[str]:
        """Return the request's stop texts. Raise ApiError if the request does not fit the model, or its stop texts are invalid."""
        if body.model is not None:
            self.check(body.model)
        context, V = self.config.max_position_embeddings, self.config.vocab_size
        if self.worker.engine.room(len(ids), longest) < longest or (longest == 0 and len(ids) > context):
            message = f"{len(ids)} tokens of the prompt and {longest} of the answer exceed the model's context of {context}"
            raise ApiError(message, "max_tokens")
        if not all(0 <= token < V for token in (*ids, *body.logit_bias)):
            field = "logit_bias" if all(0 <= token < V for token in ids) else "prompt"
            raise ApiError(f"token ids lie in 0 to {V - 1}", field)
        texts = [body.stop] if isinstance(body.stop, str) else body.stop or []
        if not all(texts):
            raise ApiError("a stop text must not be empty", "stop")
        if len(texts) > STOP_TEXTS:
            raise _refusal("stop", f"{len(texts)} texts; a request may have {STOP_TEXTS}")
        return texts

    async def _params(self, body: Sampled, longest: int, texts: list[str]) -> SamplingParams:
        """Return a request's sampling parameters; the model's own settings fill its missing fields. Raise ApiError for a wrong value."""
        seed = uuid.uuid4().int >> 96 if body.seed is None else body.seed
        options = {field: getattr(body, field) for field in self.SAMPLED if field in body.model_fields_set}
        mask = await self._mask(body.response_format)
        try:
            return SamplingParams(
                **{**self.tokenizer.sampling, **options}, max_tokens=longest, seed=seed, stop=(*self.tokenizer.stop_ids, *texts), mask=mask,
                speculate=self.speculate if mask is None else 0,
            )  # fmt: skip
        except ValueError as error:
            raise ApiError(str(error)) from error

    @cached_property
    def _grammar(self) -> Grammar:
        return Grammar(self.tokenizer, self.config.vocab_size)

    async def _mask(self, format: ResponseFormat | None) -> Mask | None:
        """Return a response format's token mask; None for plain text. Raise ApiError if its schema is invalid or slow to compile."""
        if format is None or format.type == "text":
            return None
        schema, loop = None if format.json_schema is None else format.json_schema.schema_, asyncio.get_running_loop()
        try:
            return await asyncio.wait_for(loop.run_in_executor(self._compiler, lambda: self._grammar.schema(schema)), self.seconds)
        except TimeoutError:
            raise ApiError(f"the schema was not compiled in {self.seconds:g} seconds", status=408) from None
        except ValueError as error:
            raise ApiError(str(error), "response_format") from error


def _refusal(field: str, message: str) -> ApiError:
    return ApiError(f"{field}: {message}", field)


async def _lines(reply: Reply, first: Event, events: AsyncGenerator[Event, None], usage: bool) -> AsyncIterator[str]:
    """Yield a reply, or its error, as server-sent events; the last is [DONE]. `usage`: send token counts just before it."""
    try:
        yield reply.line(first)
        async for event in events:
            yield reply.line(event)
    except ApiError as error:
        yield f"data: {json.dumps(error.body)}\n\n"
    finally:
        await events.aclose()
    if usage:
        yield reply.last()
    yield "data: [DONE]\n\n"


def _error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse(error.body, error.status, headers)


def _tell_errors(app: FastAPI) -> None:
    """Register handlers that return every error in OpenAI's format."""

    @app.exception_handler(ApiError)
    async def on_api_error(_: Request, error: ApiError) -> Response:
        return _error_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        field = None if first["type"] == "json_invalid" else ".".join(str(part) for part in first["loc"][1:]) or None
        return _error_response(ApiError(f"{field or 'body'}: {first['msg']}", field))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        return _error_response(ApiError(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code), error.headers)

    @app.exception_handler(RecursionError)
    async def on_deep_body(_: Request, error: Exception) -> Response:
        return _error_response(ApiError("the body is nested too deeply"))

    @app.exception_handler(Exception)
    async def on_failure(_: Request, error: Exception) -> Response:
        return _error_response(ApiError(f"the server failed: {type(error).__name__}", status=500))


def application(engine: Engine, name: str, limits: Limits = Limits(), key: str | None = None, speculate: int = 0) -> FastAPI:
    """Return the HTTP application of one model. `speculate`: see SamplingParams; not for JSON. Raise ValueError without a tokenizer."""
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise ValueError("a server needs a model with its tokenizer")
    worker = Worker(engine)
    answerer = Answerer(worker, tokenizer, name, limits, speculate)

    @asynccontextmanager
    async def running(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await asyncio.to_thread(worker.stop)

    app = FastAPI(title="Puna", lifespan=running, docs_url=None, redoc_url=None, openapi_url=None)
    _tell_errors(app)
    app.add_middleware(Bounded, limit=limits.body, refusal=lambda status, words: _error_response(ApiError(words, status=status)))
    _check_requests(app, worker, limits, key)
    _tell_state(app, worker)

    own = {"id": name, "object": "model", "created": 0, "owned_by": "puna"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [own]}

    @app.get("/v1/models/{asked:path}")
    async def model(asked: str) -> dict[str, Any]:
        answerer.check(asked)
        return own

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await answerer.completion(body, request)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await answerer.chat(body, request)

    return app


def _check_requests(app: FastAPI, worker: Worker, limits: Limits, key: str | None) -> None:
    """Add a middleware that refuses requests to /v1/ without the key, if set, and POST requests while `limits.queue` prompts are active."""

    @app.middleware("http")
    async def guard(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        try:
            if key is not None and request.url.path.startswith("/v1/"):
                scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
                if scheme.lower() != "bearer" or not hmac.compare_digest(credentials.strip().encode(), key.encode()):
                    raise ApiError("the key is missing or wrong: send Authorization: Bearer KEY", status=401)
            if request.method == "POST" and worker.active >= limits.queue:
                raise ApiError(f"{worker.active} requests are active, the maximum: try again later", status=429)
        except ApiError as error:
            return _error_response(error)
        return await go_on(request)


def _tell_state(app: FastAPI, worker: Worker) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        pool = worker.engine.scheduler.pool
        values = {
            **{f"puna_{count}_total": value for count, value in worker.counts.items()}, "puna_active_requests": worker.active,
            "puna_pages": len(pool.references), "puna_pages_in_use": len(pool.references) - pool.available,
        }  # fmt: skip
        return PlainTextResponse("".join(f"{name} {value}\n" for name, value in values.items()))
