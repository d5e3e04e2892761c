"""A client for models behind OpenAI-compatible endpoints, local or remote. Failed requests are retried, and all replies are stored."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import random
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from multiprocessing import TimeoutError
from multiprocessing.pool import ThreadPool
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pydantic import Field, JsonValue

from puna.models import progress
from puna.models.settings import NO_RESULT
from puna.stages.contract import StageConfig, StageRun
from puna.storage import PunaError

EXCHANGES = "exchanges"
REFUSED = frozenset((400, 413, 422))  # HTTP statuses by which a server rejects a request because of its content
PASSING = frozenset((408, 409, 425, 429))  # HTTP statuses, in addition to 5xx, after which a request is retried
LONGEST_WAIT = 120.0  # maximum seconds between two tries
REPLY_BYTES = 16 << 20
LOOK = 0.2  # seconds between looks for a signal while a reply is awaited
THOUGHT = re.compile(r"^.*</think>", re.DOTALL)


class EndpointConfig(StageConfig):
    """A model on an HTTP server with OpenAI's chat completions API."""

    base_url: str = Field(pattern=r"^https?://[^\s?#@]+$", description="Address of the server, up to /v1")
    model: str = Field(min_length=1, description="Name of the model on the server")
    key: str | None = Field(
        None, pattern="^[A-Z][A-Z0-9_]*$", description="Name of the environment variable that holds the API key; null: send no key",
        json_schema_extra=NO_RESULT,
    )  # fmt: skip
    fields: dict[str, JsonValue] = Field(default_factory=dict, description="Additional fields of each request; null leaves a field out")
    seconds: float = Field(120.0, gt=0, le=3600, description="Timeout of a request, in seconds", json_schema_extra=NO_RESULT)
    retries: int = Field(6, ge=0, le=100, description="Maximum number of retries of a failed request", json_schema_extra=NO_RESULT)
    pause: float = Field(1.0, gt=0, le=60, description="Seconds before the first retry, doubled each time", json_schema_extra=NO_RESULT)
    at_once: int = Field(4, ge=1, le=256, description="Maximum number of concurrent requests", json_schema_extra=NO_RESULT)

    @property
    def name(self) -> str:
        """Return the name of the model and its host, for tables."""
        return f"{self.model} at {urlsplit(self.base_url).netloc}"

    def unmet(self, where: str) -> list[str]:
        """Return a message if the API key's environment variable is not set, else an empty list."""
        missing = self.key is not None and not os.environ.get(self.key)
        return [f"{where}.key: the environment variable {self.key} is not set; set it to the API key of {self.base_url}"] if missing else []


class Reply(NamedTuple):
    """A server's reply. `finished`: False if truncated or refused. `refused`: the reason of a refusal (then `text` is empty), or empty."""

    text: str
    finished: bool
    refused: str = ""

    @property
    def final(self) -> str:
        """Return the stripped text after the model's reasoning, which ends with `</think>`; without reasoning, the whole text."""
        return THOUGHT.sub("", self.text).strip()


class _Unmoved(urllib.request.HTTPRedirectHandler):
    """A handler that rejects redirects, since they would send the key to another host."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class Endpoint:
    """A client of one endpoint within a stage. Requests and replies are saved in the run's scratch folder, so a resumed run sends only
    unanswered requests. `write` copies all exchanges to the side table `exchanges`. The constructor raises PunaError without an API key."""

    def __init__(self, config: EndpointConfig, run: StageRun) -> None:
        if unmet := config.unmet("endpoint"):
            raise PunaError(unmet[0])
        self.config, self._run, self._lock = config, run, threading.Lock()
        self._key = "" if config.key is None else os.environ[config.key]
        self._file = run.scratch / "exchanges.jsonl"
        self._opener = urllib.request.build_opener(_Unmoved)
        self._replies = {id_: Reply(row["answer"], row["finished"], row["refused"]) for id_, row in self._exchanges().items()}

    def ask(self, bodies: Sequence[Mapping[str, Any]], note: str = "answers") -> list[Reply]:
        """Return a reply per request. A request has `messages` and other OpenAI fields; equal requests share a reply. `note` names the
        replies in the progress. Raise PunaError if the server gives no reply, or one in another format."""
        requests, replies = [self._whole(body) for body in bodies], self._replies
        missing = {id_: request for request in requests if (id_ := self._id(request)) not in replies}
        stop = threading.Event()
        with ThreadPool(min(self.config.at_once, len(missing)) or 1) as pool:  # its threads are daemons: no interrupt waits for a reply
            results = pool.imap_unordered(lambda one: self._stored_reply(*one, stop), missing.items())
            try:
                for number in range(1, len(missing) + 1):
                    progress.advance((1 + self.config.retries) * (self.config.seconds + LONGEST_WAIT))
                    while True:
                        with contextlib.suppress(TimeoutError):
                            id_, reply = results.next(LOOK)
                            break
                        progress.leave()  # a signal may wait
                    replies[id_] = reply
                    self._run.progress(number, len(missing), f"{note} of {self.config.name}")
            except Exception:
                pool.close()
                stop.set()
                pool.join()  # replies that are on their way are stored
                raise
            finally:
                stop.set()
        return [replies[self._id(request)] for request in requests]

    def _whole(self, body: Mapping[str, Any]) -> dict[str, Any]:
        fields = {"model": self.config.model, **body, **self.config.fields}
        return {name: value for name, value in fields.items() if value is not None}

    def _id(self, request: Mapping[str, Any]) -> str:
        return hashlib.sha256(json.dumps([self.config.base_url, request], sort_keys=True).encode()).hexdigest()[:32]

    def _answer(self, request: dict[str, Any], stop: threading.Event) -> Reply:
        """Return the server's reply or refusal, retrying with exponential backoff until `stop`. Raise PunaError if it fails for good."""
        failure = ""
        for number in range(0 if stop.is_set() else self.config.retries + 1):
            wait = min(LONGEST_WAIT, self.config.pause * 2**number) * random.uniform(0.5, 1.0)
            try:
                return self._once(request)
            except urllib.error.HTTPError as error:
                failure = f"status {error.code}: {self._safe(_body(error))}"
                if error.code in REFUSED:
                    return Reply("", False, failure)
                if error.code not in PASSING and error.code < 500:
                    break
                after = error.headers.get("retry-after", "")
                wait = min(LONGEST_WAIT, float(after)) if after.isdigit() else wait
            except (OSError, http.client.HTTPException) as error:
                failure = self._safe(f"{type(error).__name__}: {error}")
            if number < self.config.retries and stop.wait(wait):
                break
        raise PunaError(f"endpoint {self.config.base_url}: {self.config.model} gives no answer ({failure}); check server, key and model")

    def _once(self, request: dict[str, Any]) -> Reply:
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {self._key}"} if self._key else {})}
        url = f"{self.config.base_url.rstrip('/')}/chat/completions"
        http_request = urllib.request.Request(url, json.dumps(request).encode(), headers)
        with self._opener.open(http_request, timeout=self.config.seconds) as reply:
            data = reply.read(REPLY_BYTES)
        try:
            choice = json.loads(data)["choices"][0]
            return Reply(str(choice["message"].get("content") or ""), choice.get("finish_reason") != "length")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            reply_text = self._safe(data[:200].decode(errors="replace"))
            raise PunaError(f"endpoint {self.config.base_url}: its reply is not in OpenAI's format ({error!r}): {reply_text}") from error

    def _safe(self, text: str) -> str:
        """Return a message on one line without the key, truncated to 500 characters."""
        return " ".join((text.replace(self._key, "…") if self._key else text).split())[:500]

    def _stored_reply(self, id_: str, request: dict[str, Any], stop: threading.Event) -> tuple[str, Reply]:
        """Request a reply, append both to the file of exchanges, and return the id and the reply."""
        reply = self._answer(request, stop)
        row = {"id": id_, "endpoint": self.config.base_url, "request": json.dumps(request, ensure_ascii=False, sort_keys=True),
               "answer": reply.text, "finished": reply.finished, "refused": reply.refused}  # fmt: skip
        with self._lock, self._file.open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps(row))  # start with a line break: the previous line may be incomplete after a crash
        return id_, reply

    def _exchanges(self) -> dict[str, dict[str, Any]]:
        """Return the exchanges on disk by id, ignoring incomplete lines."""
        rows: dict[str, dict[str, Any]] = {}
        for line in self._file.read_text(encoding="utf-8").splitlines() if self._file.exists() else ():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            rows[row["id"]] = row
        return rows

    def write(self) -> None:
        """Write this run's exchanges, if any, to the table `exchanges`, and their number as a metric."""
        rows = list(self._exchanges().values())
        if rows:
            self._run.write_rows(rows, EXCHANGES)
        self._run.metric("exchanges", len(rows))


def grade_of(text: str, top: int) -> float | None:
    """Return the first number in a judge's reply; None if it is missing or not from 0 to `top`."""
    number = re.search(r"(?:(?<!\w)-)?\d+(?:\.\d+)?", text)
    return float(number.group()) if number is not None and 0 <= float(number.group()) <= top else None


def _body(error: urllib.error.HTTPError) -> str:
    """Return the beginning of an error's body; empty if the connection fails before it can be read."""
    try:
        return error.read(2000).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return ""
