"""Requests, errors and answers in the shape of OpenAI's API, whole or as a stream of events."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from puna.models.generation.engine import Event
from puna.models.tokens.tokenizer import TextStream, Tokenizer


class ApiError(Exception):
    """An error in OpenAI's shape."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        message = message.encode("utf-8", "backslashreplace").decode()  # it may repeat halves of surrogate pairs
        super().__init__(message)
        self.status, self.body = status, {"error": {"message": message, "type": kind, "param": param, "code": None}}


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

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

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        """Remove null fields. Raise ValueError for lone surrogates, which are no text."""
        json.dumps(values, ensure_ascii=False, default=str).encode()
        return {name: value for name, value in values.items() if value is not None} if isinstance(values, dict) else values


class CompletionRequest(Sampled):
    """A request to continue a text."""

    prompt: str | list[int] = Field(min_length=1)
    max_tokens: int = Field(16, ge=1)
    logprobs: bool | int | None = Field(None, description="Whether to tell the log-probs of the drawn tokens")


class TextPart(BaseModel):
    """A piece of a turn's text."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[TextPart] | None = None

    def turn(self) -> dict[str, Any]:
        """Return the message as a chat template takes it."""
        content = self.content if isinstance(self.content, str | None) else "".join(part.text for part in self.content)
        return {name: value for name, value in {**self.model_dump(), "content": content}.items() if value is not None}


class ChatRequest(Sampled):
    """A request for an answer in a conversation."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    tools: list[dict[str, Any]] | None = None


class Reply:
    """An answer in OpenAI's shape, as a whole or in chunks."""

    def __init__(self, kind: str, model: str, ids: list[int], texts: dict[int, TextStream], scored: Tokenizer | None) -> None:
        """`scored`: the tokenizer that spells tokens, where log-probs are asked for."""
        self.kind, self.texts, self.scored, self.prompt_tokens = kind, texts, scored, len(ids)
        prefix = "chatcmpl" if kind.startswith("chat") else "cmpl"
        self.head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self.said = dict.fromkeys(texts, "")
        self.scores: dict[int, list[tuple[int, float]]] = {number: [] for number in texts}
        self.reasons: dict[int, str] = {}

    def add(self, event: Event) -> str:
        """Take in a token; return the text that it adds."""
        new = self.texts[event.number].add(event.token, event.completion is not None)
        self.said[event.number] += new
        self.scores[event.number].append((event.token, event.logprob))
        if event.completion is not None:
            self.reasons[event.number] = "stop" if event.completion.finished else "length"
        return new

    def _scores(self, number: int, start: int = 0) -> dict[str, Any] | None:
        if self.scored is None:
            return None
        tokens = [(self.scored.decode([token]), score) for token, score in self.scores[number][start:]]
        if self.kind.startswith("chat"):
            return {"content": [{"token": text, "logprob": score, "bytes": None, "top_logprobs": []} for text, score in tokens]}
        return {"tokens": [text for text, _ in tokens], "token_logprobs": [score for _, score in tokens]}

    def _usage(self) -> dict[str, int]:
        completion = sum(map(len, self.scores.values()))
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": completion, "total_tokens": self.prompt_tokens + completion}

    def whole(self) -> dict[str, Any]:
        choices = []
        for number, text in self.said.items():
            content = {"message": {"role": "assistant", "content": text}} if self.kind.startswith("chat") else {"text": text}
            choices.append({"index": number, **content, "logprobs": self._scores(number), "finish_reason": self.reasons[number]})
        return {**self.head, "object": self.kind, "choices": choices, "usage": self._usage()}

    def line(self, event: Event) -> str:
        first = not self.scores[event.number]
        text = self.add(event)
        if self.kind.startswith("chat"):
            content: dict[str, Any] = {"delta": {**({"role": "assistant"} if first else {}), "content": text}}
        else:
            content = {"text": text}
        choice = {"index": event.number, **content, "finish_reason": self.reasons.get(event.number)}
        if self.scored is not None:
            choice["logprobs"] = self._scores(event.number, -1)
        return self._chunk(choices=[choice])

    def last(self) -> str:
        """Return the usage as the last event of a stream."""
        return self._chunk(choices=[], usage=self._usage())

    def _chunk(self, **fields: Any) -> str:
        kind = "chat.completion.chunk" if self.kind.startswith("chat") else self.kind
        return f"data: {json.dumps({**self.head, 'object': kind, **fields}, ensure_ascii=False)}\n\n"
