"""What a verifier is asked, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Question(NamedTuple):
    """What a verifier may know of a prompt: its id, task, the text that is answered and the gold answer, where there is one.

    `messages`: the turns of the conversation that is answered, each with role and content; none: `text` is one user message.
    """

    id: str
    task: str
    text: str
    reference: str | None
    messages: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Score:
    """How good an answer is, 0 to 1, and what a reader should know of it. `value` None: it could not be scored."""

    value: float | None
    detail: str = ""
