"""Conversations as stored in tables: JSON text of messages in the usual format of chat datasets.

A message is an object with `role` (system, user, assistant, tool) and `content`, and optionally `reasoning_content`, `tool_calls`,
`tool_call_id` and `name`; other keys are kept. Messages are stored as JSON text because arguments of tools have no common type. In DuckDB,
read them with `messages->>'$[0].content'` and `chosen->>'content'`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from puna.storage import PunaError

Level = Literal["significantly_better", "better", "slightly_better", "marginally_better"]
LEVELS: tuple[Level, ...] = ("significantly_better", "better", "slightly_better", "marginally_better")  # clearest first

if TYPE_CHECKING:
    from puna.models.tokens.tokenizer import Tokenizer

Message = dict[str, Any]  # one turn


class BadRow(PunaError):
    """An error for a row that gives no usable example. `rule`: short name of the reason; `text`: message with row and reason."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(text)
        self.rule = rule

    def __reduce__(self) -> tuple[type[BadRow], tuple[str, str]]:
        return type(self), (self.rule, str(self))


ROLES = ("system", "user", "assistant", "tool")


def dump(value: Any) -> str:
    """Return the JSON text of a message, or of a list of messages or tools; keys keep their order."""
    return json.dumps(value, ensure_ascii=False)


def asking(text: str) -> str:
    """Return the JSON text of a conversation with one user message, `text`."""
    return dump([{"role": "user", "content": text}])


def answering(text: str, finished: bool = True) -> str:
    """Return the JSON text of an answer: one assistant message, marked with `finished` false if it was truncated."""
    return dump({"role": "assistant", "content": text} | ({} if finished else {"finished": False}))


def messages_of(row: Mapping[str, Any]) -> list[Message]:
    """Return the messages of a row of prompts, preferences or instructions. Raise BadRow if the column contains something else."""
    return _parse(row, "messages", list)


def tools_of(row: Mapping[str, Any]) -> list[Message] | None:
    """Return the tools of a row's conversation, or None if the column is null. Raise BadRow if it contains something else."""
    return None if row["tools"] is None else _parse(row, "tools", list)


def message_of(row: Mapping[str, Any], column: str) -> Message | None:
    """Return the answer in a column (chosen, rejected, edited), or None if the column is null. Raise BadRow if it is not a message."""
    return None if row[column] is None else _parse(row, column, dict)[0]


def others_of(row: Mapping[str, Any]) -> list[Message]:
    """Return a preference's additional answers (column `others`), each with its `rank`."""
    return [] if row["others"] is None else _parse(row, "others", list)


def _parse(row: Mapping[str, Any], column: str, kind: type) -> list[Message]:
    """Return the messages in a column: a list, or a single message if `kind` is dict. Raise BadRow for anything else."""
    try:
        value = json.loads(row[column])
    except ValueError as error:
        raise BadRow("not_messages", f"row {row['id']}: column {column} is not JSON text ({error})") from error
    turns = value if isinstance(value, list) else [value]
    if not isinstance(value, kind) or not turns or not all(isinstance(turn, dict) for turn in turns):
        name = "messages" if kind is list else "a message"
        raise BadRow("not_messages", f"row {row['id']}: column {column} contains {row[column][:80]!r}, not {name}")
    return turns


def content_of(message: Message) -> str:
    """Return the text of a message, with its text parts concatenated; empty if it has no text."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def as_text(messages: Sequence[Message]) -> str:
    """Return messages as readable text: the content of a single user message, else every message with its role."""
    if len(messages) == 1 and messages[0].get("role") == "user":
        return content_of(messages[0])
    return "\n\n".join(f"{message.get('role')}: {_turn_text(message)}" for message in messages)


def _turn_text(message: Message) -> str:
    calls = message.get("tool_calls")
    parts = [str(message.get("reasoning_content") or ""), content_of(message), dump(calls) if calls else ""]
    return "\n".join(part for part in parts if part)


def text_of(messages: Sequence[Message]) -> str:
    """Return the contents of the messages, joined by newlines, without roles, for search and comparison."""
    return "\n".join(content_of(message) for message in messages)


def answer_texts(messages: Sequence[Message]) -> list[str]:
    return [content_of(message) for message in messages if message.get("role") == "assistant"]


@contextlib.contextmanager
def rendering(row: Mapping[str, Any]) -> Iterator[None]:
    """Turn a chat template's error inside the `with` block into a BadRow that names the row."""
    from puna.models.tokens.chat import ChatError
    from puna.models.tokens.template import TemplateError

    try:
        yield
    except (ChatError, TemplateError) as error:
        raise BadRow("chat_template", f"row {row['id']}: {error}") from error


def prompt_ids(tokenizer: Tokenizer, row: Mapping[str, Any]) -> list[int]:
    """Return the token ids of a prompt, up to where the answer begins. Raise BadRow if it cannot be rendered."""
    with rendering(row):
        ids: list[int] = tokenizer.chat(messages_of(row), tools=tools_of(row))
    return ids


def answer_text(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return the decoded text of an answer's tokens, without special tokens."""
    return str(tokenizer.decode(tokens, skip_special_tokens=True))
