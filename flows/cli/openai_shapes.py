"""Requests, errors and answers in the format of OpenAI's API, whole or as a stream of events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, StrictInt, model_validator

from puna.models.generation.engine import Event
from puna.models.generation.score import Score
from puna.models.tokens.tokenizer import TextStream, Tokenizer
from puna.stages.verifiers.tools import CALL

ERRORS = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error", 500: "server_error"}
"""HTTP status → type of the error in OpenAI's format. The type for other statuses is invalid_request_error."""
CALL_TAG = "<tool_call>"  # the beginning of a tool call in an answer, see `CALL`


class ApiError(Exception):
    """An error with an HTTP status and a body in OpenAI's format. `param`: the request's field that is wrong."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        message = message.encode("utf-8", "backslashreplace").decode()  # the message may repeat lone surrogates of the request
        super().__init__(message)
        kind = ERRORS.get(status, "invalid_request_error")
        self.status, self.body = status, {"error": {"message": message, "type": kind, "param": param, "code": None}}


class StreamOptions(BaseModel, extra="forbid"):
    include_usage: bool = False


class JsonSchema(BaseModel, extra="forbid"):
    name: str = Field("answer", description="Ignored")
    description: str | None = Field(None, description="Ignored")
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="Ignored: an answer always follows its schema")


class ResponseFormat(BaseModel, extra="forbid"):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _whole(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is required with the type json_schema, and forbidden otherwise")
        return self


class Sampled(BaseModel, extra="forbid"):
    """The fields shared by completion and chat requests."""

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
    user: str | None = Field(None, description="Ignored")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        """Return the fields that are not null. Raise ValueError for lone surrogates, which are not text."""
        json.dumps(values, ensure_ascii=False, default=str).encode()
        return {name: value for name, value in values.items() if value is not None} if isinstance(values, dict) else values


def _as_list(prompt: Any) -> Any:
    """Return prompts as a list; a single text or list of token ids becomes a list of one."""
    alone = isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt) and all(type(one) is int for one in prompt))
    return [prompt] if alone else prompt


class CompletionRequest(Sampled):
    prompt: Annotated[list[Annotated[str | list[StrictInt], Field(min_length=1)]], Field(min_length=1), BeforeValidator(_as_list)]
    max_tokens: int = Field(16, ge=0, description="0: generate nothing, only echo the prompts")
    echo: bool = Field(False, description="Repeat the prompt before each answer")
    logprobs: bool | int | None = Field(None, ge=0, le=20, description="Alternatives to report per position; 0 or true: none")

    @property
    def alternatives(self) -> int | None:
        """Return the number of likeliest tokens to report at each position; None without log-probs."""
        return None if self.logprobs is None or self.logprobs is False else 0 if self.logprobs is True else self.logprobs


class TextPart(BaseModel, extra="forbid"):
    type: Literal["text"]
    text: str


class Message(BaseModel, extra="allow"):
    role: str
    content: str | list[TextPart] | None = None

    def turn(self) -> dict[str, Any]:
        """Return the message as a dict for the chat template: text parts joined, null fields removed."""
        content = self.content if isinstance(self.content, str | None) else "".join(part.text for part in self.content)
        return {name: value for name, value in {**self.model_dump(), "content": content}.items() if value is not None}


class ChatRequest(Sampled):
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = Field(False, description="Report the log-probs of the answer's tokens")
    top_logprobs: int | None = Field(None, ge=0, le=20, description="Number of likeliest tokens per position; needs logprobs: true")
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] = Field("auto", description="none: the model is not told of the tools")

    @property
    def alternatives(self) -> int | None:
        """Return the number of likeliest tokens per position; None without log-probs. Raise ApiError if only `top_logprobs` is set."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError("top_logprobs: needs logprobs: true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


@dataclass
class Offsets:
    """Character offsets of the tokens' texts. Tokens that share one character start at its offset; special tokens have no text."""

    stream: TextStream
    places: list[int] = field(default_factory=list)
    length: int = 0

    def add(self, token: int) -> None:
        self.places.append(self.length)
        self.length += len(self.stream.add(token))


class Reply:
    """The answers to one prompt in OpenAI's format, as a whole or in chunks."""

    def __init__(
        self, kind: str, model: str, ids: list[int], n: int, tokenizer: Tokenizer, scored: bool, stops: list[str], tools: Sequence[str]
    ) -> None:  # fmt: skip
        """Prepare `n` empty answers. `scored`: True if log-probs are requested; `stops`: stop texts; `tools`: names of functions."""
        self.kind, self.ids, self.stops, self.tools, self.scored = kind, ids, stops, tools, tokenizer if scored else None
        behind = () if kind.startswith("chat") else ids  # a completion continues its prompt's text, a chat's answer begins one
        texts = self.texts = {i: TextStream(tokenizer, [*stops, CALL_TAG] if tools else stops, behind) for i in range(n)}
        self.given = dict.fromkeys(texts, 0)  # number of characters that a stream has brought
        prefix = "chatcmpl" if kind.startswith("chat") else "cmpl"
        self.head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self.said = dict.fromkeys(texts, "")
        self.scores: dict[int, list[Score]] = {number: [] for number in texts}
        self.drawn: dict[int, list[int]] = {number: [] for number in texts}
        self.reasons = dict.fromkeys(texts, "length")
        self.prompt: tuple[str, list[Score]] | None = None  # with echo: the prompt's text and scores, which precede each answer
        self.offsets: dict[int, Offsets] = {}
        if scored and not kind.startswith("chat"):
            prompt = Offsets(TextStream(tokenizer))
            for token in ids:
                prompt.add(token)
            self.offsets = {i: Offsets(TextStream(tokenizer, context=ids), [*prompt.places], prompt.length) for i in texts}

    def add(self, event: Event) -> None:
        self.said[event.number] += self.texts[event.number].add(event.token, event.completion is not None)
        self.drawn[event.number].append(event.token)
        self.scores[event.number].append(Score(event.logprob, []))
        if self.offsets:
            self.offsets[event.number].add(event.token)
        if event.completion is not None and event.completion.finished:
            self.reasons[event.number] = "stop"

    def _ended(self, number: int) -> tuple[str, list[dict[str, Any]]]:
        """Return an ended answer's text, and its tool calls in OpenAI's format: none if it was cut off or names an unknown tool."""
        if not self.tools:
            return self.said[number], []
        whole = self.said[number] + self.texts[number].rest
        whole = whole[: min((at for stop in self.stops if (at := whole.find(stop)) >= 0), default=None)]
        try:
            calls = [json.loads(call) for call in CALL.findall(whole) or [whole] if self.reasons[number] == "stop"]
            named = [(call["name"], call["arguments"] if "arguments" in call else call["parameters"]) for call in calls]
        except (ValueError, LookupError, TypeError, RecursionError):
            named = []
        if not all(name in self.tools and isinstance(arguments, dict) for name, arguments in named):
            named = []
        functions = [{"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)} for name, arguments in named]
        rows = [{"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function} for function in functions]
        return whole[: max(0, whole.find(CALL_TAG))] if rows else whole, rows

    def _scores(self, number: int, start: int = 0) -> dict[str, Any] | None:
        """Return an answer's log-probs from token `start` on; None if not requested. With echo, the prompt's tokens come first."""
        if self.scored is None:
            return None
        tokens, scores = self.drawn[number], self.scores[number]
        if self.kind.startswith("chat"):
            content = [
                {**self._token_row(token, score.logprob), "top_logprobs": [self._token_row(*top) for top in score.top]}
                for token, score in zip(tokens[start:], scores[start:], strict=True)
            ]
            return {"content": content, "refusal": None}
        if self.prompt is not None:
            tokens, scores = [*self.ids, *tokens], [*self.prompt[1], *scores]
        tokens, scores = tokens[start:], scores[start:]
        return {
            "tokens": [self.scored.token_text(token) for token in tokens],
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": [self._top(*pair) for pair in zip(tokens, scores, strict=True)] if any(one.top for one in scores) else None,
            "text_offset": self.offsets[number].places[-len(tokens) :],
        }

    def _token_row(self, token: int, logprob: float | None) -> dict[str, Any]:
        """Return a chat token's text, log-prob and bytes; a special token has no bytes."""
        assert self.scored is not None
        spelling = self.scored.token_bytes(token)
        return {"token": self.scored.token_text(token), "logprob": logprob, "bytes": None if spelling is None else list(spelling)}

    def _top(self, token: int, score: Score) -> dict[str, float] | None:
        """Return text → log-prob of the likeliest tokens and the token itself (for equal texts, the highest); None without a log-prob."""
        if score.logprob is None or self.scored is None:
            return None
        top: dict[str, float] = {}
        for other, logprob in [*score.top, (token, score.logprob)]:
            top.setdefault(self.scored.token_text(other), logprob)
        return top

    def usage(self) -> dict[str, int]:
        completion = sum(map(len, self.drawn.values()))
        return {"prompt_tokens": len(self.ids), "completion_tokens": completion, "total_tokens": len(self.ids) + completion}

    def choices(self, first: int = 0) -> list[dict[str, Any]]:
        choices = []
        for number in self.said:
            text, calls = self._ended(number)
            text = text if self.prompt is None else self.prompt[0] + text
            message = {"role": "assistant", "content": text} | ({"content": text or None, "tool_calls": calls} if calls else {})
            content = {"message": message} if self.kind.startswith("chat") else {"text": text}
            reason = "tool_calls" if calls else self.reasons[number]
            choices.append({"index": first + number, **content, "logprobs": self._scores(number), "finish_reason": reason})
        return choices

    def line(self, event: Event) -> str:
        """Add an event's token to its answer. Return a stream's chunk with the text that became final, at the end with the tool calls."""
        number, calls = event.number, list[dict[str, Any]]()
        delta: dict[str, Any] = {} if self.drawn[number] else {"role": "assistant"}
        self.add(event)
        text, reason = self.said[number], None if event.completion is None else self.reasons[number]
        if reason is not None:
            text, calls = self._ended(number)
            reason = "tool_calls" if calls else reason
        elif self.tools and text.lstrip()[:1] in ("", "{"):  # the whole answer may be a call
            text = ""
        text, self.given[number] = text[self.given[number] :], max(self.given[number], len(text))
        delta |= {"content": text} | ({"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]} if calls else {})
        content = {"delta": delta} if self.kind.startswith("chat") else {"text": text}
        choice = {"index": number, **content, "finish_reason": reason}
        if self.scored is not None:
            choice["logprobs"] = self._scores(number, len(self.drawn[number]) - 1)
        return self._chunk(choices=[choice])

    def last(self) -> str:
        return self._chunk(choices=[], usage=self.usage())

    def _chunk(self, **fields: Any) -> str:
        kind = "chat.completion.chunk" if self.kind.startswith("chat") else self.kind
        # In ASCII, because many clients also split lines at U+0085 and U+2028.
        return f"data: {json.dumps({**self.head, 'object': kind, **fields})}\n\n"


def whole(replies: Sequence[Reply]) -> dict[str, Any]:
    """Return the response to a request: the answers to all its prompts, in order, and the token usage."""
    choices = [choice for number, reply in enumerate(replies) for choice in reply.choices(number * len(reply.texts))]
    usages = [reply.usage() for reply in replies]
    usage = {name: sum(one[name] for one in usages) for name in usages[0]}
    return {**replies[0].head, "object": replies[0].kind, "choices": choices, "usage": usage}
