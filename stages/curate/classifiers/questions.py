"""Built-in questions about a page for a language model, by the signal that its answer becomes.

The scales add up points, an idea of FineWeb-Edu (arXiv 2406.17557, section 4); the words are our own.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["scale", "yes_no"]
Grade = Literal["judgement", "code_judgement", "reasoning_judgement"]
TEXT = "{text}"
TOP = 5  # points of the built-in scales

# What is graded, and what gives a point each.
SCALES: dict[Grade, tuple[str, tuple[str, ...]]] = {
    "judgement": ("how much a reader can learn from the web page below", (
        "It has a subject: it is more than menus, offers, notices or a list of links.",
        "It informs about this subject, even if loosely or between advertisements.",
        "Its main part hangs together, and a teacher could point pupils to it.",
        "It explains rather than claims, in good order and good language, as a textbook or an encyclopedia does.",
        "It is excellent: thorough, exact, complete in itself, without anything beside the point.",
    )),
    "code_judgement": ("how much the web page below teaches programming", (
        "Software or computing is its subject.",
        "It shows source code, commands or configuration.",
        "Prose and code belong together: the text says what the code is for.",
        "Someone could learn a language, a library or a technique from it.",
        "It is excellent: the code is complete and correct, and each step is explained.",
    )),
    "reasoning_judgement": ("how much the web page below reasons", (
        "Mathematics, a science or engineering is its subject.",
        "It states facts, quantities or formulas exactly.",
        "It draws conclusions: one statement follows from others.",
        "It works through a deduction, a proof, a calculation or a solved problem.",
        "It is excellent: every step is given and justified, so that a student could follow it alone.",
    )),
}  # fmt: skip

YES_NO: dict[Grade, str] = {
    "judgement": "Does the web page below inform and explain so well that an encyclopedia would cite it, or a teacher hand it out?",
    "code_judgement": "Does the web page below teach programming, with source code and prose that explains it?",
    "reasoning_judgement": "Does the web page below deduce something step by step in mathematics, a science or engineering?",
}


class Question(NamedTuple):
    """A prompt with one place for the page, the possible answers and the grade that each stands for.

    `start`: how the model's answer begins, before a space and one of `answers`. `chat`: ask in the model's chat format.
    """

    prompt: str
    answers: tuple[str, ...]
    values: tuple[float, ...]
    start: str
    chat: bool


def built_in(signal: Grade, kind: Kind) -> str:
    """Return the prompt for a signal."""
    page = f"The page:\n<<<\n{TEXT}\n>>>"
    if kind == "yes_no":
        return f"{YES_NO[signal]}\n\n{page}\n\nReply with Yes or No alone."
    subject, points = SCALES[signal]
    listed = "\n".join(f"- {point}" for point in points)
    start = f"Grade {subject}. Begin with 0 and add one point for each line that is true of it:\n{listed}"
    return f"{start}\n\n{page}\n\nReply with the number of points alone, one digit from 0 to {len(points)}."


def check_prompt(prompt: str) -> str:
    """Return `prompt`; ValueError unless it has one place for the page."""
    if (times := prompt.count(TEXT)) != 1:
        raise ValueError(f"a prompt has the mark {TEXT} once, where the page goes; this one has it {times} times")
    return prompt


def answers_of(kind: Kind, top: int) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Return the answers to a kind of question and their grades: 0 to `top` points, or No (0) and Yes (1)."""
    if kind == "yes_no":
        return ("No", "Yes"), (0.0, 1.0)
    return tuple(map(str, range(top + 1))), tuple(map(float, range(top + 1)))
