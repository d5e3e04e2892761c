"""The input and output of a verifier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Question(NamedTuple):
    """The part of a prompt that a verifier sees: its id, task, text and gold answer, if there is one.

    `messages`: the turns of the conversation, each with role and content; none: `text` is one user message.
    """

    id: str
    task: str
    text: str
    reference: str | None
    messages: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Score:
    """The quality of an answer, 0 to 1, and a note for readers. `value` None: it could not be scored."""

    value: float | None
    detail: str = ""
