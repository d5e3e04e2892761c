"""Conversion of messages and values from public data sets to Puna's format. A `Refused` error names the field."""

from __future__ import annotations

import json
import re
from typing import Any

from puna.stages.conversations import ROLES, Message

ALIASES = {
    "human": "user", "prompter": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "observation": "tool", "function": "tool", "function_response": "tool", "ipython": "tool",
}  # fmt: skip
"""Role name in data sets → Puna's role name."""
CALLS = ("function_call", "tool_call")  # roles of turns that are a tool call of the assistant, as JSON
HUMAN = re.compile(r"\n\n(Human|Assistant):")


class Refused(Exception):
    """An error for an invalid row: the field, the name of the violated rule, and the reason in words."""

    def __init__(self, field: str, rule: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field, self.rule, self.reason = field, rule, reason


def messages(value: Any, field: str) -> list[Message]:
    """Return messages in Puna's format. `value`: a message (role and content, or from and value), a list, their JSON, or an HH dialogue."""
    if isinstance(value, str):
        if HUMAN.match(value):
            return dialogue(value, field)
        value = parse(value, field)
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise Refused(field, "wrong_type", f"contains {kind_of(value)}, not a list of messages")
    if not value:
        raise Refused(field, "empty", "has no messages")
    return [message(turn, f"{field}.{number}") for number, turn in enumerate(value)]


def parse(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused(field, "wrong_type", f"contains text that is neither JSON nor a dialogue ({error})") from error


def message(turn: Any, field: str) -> Message:
    """Return a message with Puna's role names and text; a turn of `CALLS` becomes the assistant's `tool_calls`. Null values are dropped."""
    if not isinstance(turn, dict):
        raise Refused(field, "wrong_type", f"contains {kind_of(turn)}, not a message")
    names = [(a, b) for a, b in (("role", "content"), ("from", "value")) if turn.get(a) is not None]
    if len(names) != 1:
        keys = ", ".join(map(str, turn)) or "nothing"
        raise Refused(field, "no_role", f"has {'role and from' if names else 'neither role nor from'}; it has {keys}")
    ((by, content_key),) = names
    rest = {key: value for key, value in turn.items() if key not in (by, content_key) and value is not None}
    role = turn[by].strip().lower() if isinstance(turn[by], str) else turn[by]
    if role in CALLS:
        return {"role": "assistant", "content": "", "tool_calls": _calls(turn.get(content_key), field), **rest}
    role = ALIASES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        known = ", ".join((*ROLES, *ALIASES, *CALLS))
        raise Refused(f"{field}.{by}", "unknown_role", f"has the role {turn[by]!r}; the known roles are {known}")
    content = _content(turn.get(content_key), f"{field}.{content_key}", calls=bool(rest.get("tool_calls")))
    return {"role": role, "content": content, **rest}


def _content(content: Any, field: str, calls: bool) -> str:
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise Refused(field, "wrong_type", "has parts that are not text; images and sounds are not read")
        content = "".join(part["text"] for part in content)
    if content is None and calls:
        return ""
    if not isinstance(content, str):
        raise Refused(field, "wrong_type", f"contains {kind_of(content)}, not text")
    if not content.strip() and not calls:
        raise Refused(field, "empty", "is blank")
    return content


def _calls(value: Any, field: str) -> list[Message]:
    """Return a turn's tool calls. `value`: the turn's content, a call or a list of calls, as objects or as JSON text."""
    value = parse(value, field) if isinstance(value, str) else value
    calls = value if isinstance(value, list) else [value]
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise Refused(field, "wrong_type", "contains a tool call without a function's name")
    return [{"type": "function", "function": {"name": c["name"], "arguments": c.get("arguments", {})}} for c in calls]


def dialogue(text: str, field: str) -> list[Message]:
    """Return the messages of an HH-RLHF dialogue ("\\n\\nHuman:", "\\n\\nAssistant:"). Raise Refused for other text or an empty turn."""
    before, *parts = HUMAN.split(text)
    if before.strip() or not parts:
        raise Refused(field, "not_a_dialogue", f"begins with {text[:40]!r}, not with '\\n\\nHuman:'")
    results: list[Message] = []
    for number in range(0, len(parts), 2):
        role, content = ("user" if parts[number] == "Human" else "assistant"), parts[number + 1].strip()
        if not content:
            raise Refused(field, "empty", f"turn {number // 2} of {parts[number]} is blank")
        results.append({"role": role, "content": content})
    return results


def is_dialogue(value: Any) -> bool:
    return isinstance(value, str) and HUMAN.match(value) is not None


def text(value: Any, field: str) -> str:
    """Return `value` if it is non-blank text, else raise Refused."""
    if value is None:
        raise Refused(field, "missing", "is missing or null")
    if not isinstance(value, str):
        raise Refused(field, "wrong_type", f"contains {kind_of(value)}, not text")
    if not value.strip():
        raise Refused(field, "empty", "is blank")
    return value


def number(value: Any, field: str) -> float:
    """Return `value`, a finite number or the text of one, as a float; raise Refused for any other value."""
    if value is None:
        raise Refused(field, "missing", "is missing or null")
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError as error:
            raise Refused(field, "wrong_type", f"contains {value[:40]!r}, not a number") from error
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or abs(value) == float("inf"):
        raise Refused(field, "wrong_type", f"contains {kind_of(value)}, not a finite number")
    return float(value)


def truth(value: Any, field: str, numbers: bool) -> bool:
    """Return `value`, a boolean or the text of one, as a bool; with `numbers`, 1 is true and 0 false. Raise Refused for any other value."""
    words = {"true": True, "false": False, **({"1": True, "0": False} if numbers else {})}
    if value is None:
        raise Refused(field, "missing", "is missing or null")
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in words:
        return words[value.strip().lower()]
    if numbers and value in (0, 1):
        return bool(value)
    raise Refused(field, "wrong_type", f"contains {str(value)[:40]!r}, not true or false")


def kind_of(value: Any) -> str:
    names = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")
