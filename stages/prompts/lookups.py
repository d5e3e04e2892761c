"""Baselines without a model: answers to held-out questions, derived only from the gold answers to training questions.

If a baseline answers a held-out question correctly, the answer follows from training data, so the question is no test of a model."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from typing import Any

import numpy as np

from puna.stages.conversations import messages_of, text_of
from puna.stages.verifiers.base import BoundedVerifier, Item, Verifier, attempt, is_correct
from puna.stages.verifiers.registry import from_json
from puna.stages.verifiers.scoring import combine, leaves, question_of
from puna.storage import PunaError

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
TOKEN = re.compile(r"\d|[^\W\d]+|[^\w\s]|_")  # pattern of a token: a digit (as in the demo's tokenizer), a run of letters, or a mark
MOST = 1_000  # maximum number of held-out questions, and of gold answers, to use
NUMBERS, WORDS, EDITS = "nearest by numbers", "nearest by words", "nearest by edits"
REPLACED, MAJORITY = "nearest by edits, differing tokens replaced", "majority by form"


@dataclass(frozen=True)
class _Text:
    """A question with its task and, if it is a training question, its gold answer."""

    task: str
    text: str
    answer: str = ""

    @cached_property
    def words(self) -> Counter[str]:
        return Counter(self.text.split())

    @cached_property
    def form(self) -> str:
        return NUMBER.sub("", self.text)

    @cached_property
    def numbers(self) -> tuple[float, ...]:
        return tuple(map(float, NUMBER.findall(self.text)))

    @cached_property
    def tokens(self) -> list[str]:
        return TOKEN.findall(self.text)


def answers_without_model(prompts: Sequence[Mapping[str, Any]], *, trusted: bool = False) -> dict[str, dict[str, float]]:
    """Return baseline → id of a held-out question → 1 if the baseline's answer is correct, else 0.

    Only the first `MOST` questions and gold answers by id are used; ties between training questions go to the first. Questions are left out
    if the verifier is faulty or, unless `trusted`, needs a separate process. Without gold answers or questions, return nothing."""
    gold = sorted((row for row in prompts if row["split"] == "train" and row["reference"]), key=lambda row: row["id"])[:MOST]
    examples = [_Text(row["task"], text_of(messages_of(row)), str(row["reference"])) for row in gold]
    heldout = sorted((row for row in prompts if row["split"] == "heldout" and row["verifier"]), key=lambda row: row["id"])[:MOST]
    questions = [(row, verifier) for row in heldout if (verifier := _checker(row, trusted)) is not None]
    texts = [_Text(row["task"], text_of(messages_of(row))) for row, _ in questions]
    if not examples or not questions:
        return {}
    distance = _Edits(examples)
    by_edits = [examples[int(np.argmin(distance(text)))] for text in texts]
    majority = _majority(examples)
    answers = {
        NUMBERS: [max(examples, key=lambda one: _close_numbers(text, one)).answer for text in texts],
        WORDS: [max(examples, key=lambda one: _shared_words(text, one)).answer for text in texts],
        EDITS: [one.answer for one in by_edits],
        REPLACED: [_replace_tokens(one, text) for one, text in zip(by_edits, texts, strict=True)],
        MAJORITY: [majority(text) for text in texts],
    }
    return {
        name: {row["id"]: _right(row, verifier, answer) for (row, verifier), answer in zip(questions, some, strict=True)}
        for name, some in answers.items()
    }


def _checker(row: Mapping[str, Any], trusted: bool) -> Verifier | None:
    """Return a prompt's verifier; None if the verifier is faulty, or may not run in this process."""
    try:
        verifier = from_json(json.loads(row["verifier"]))
    except (PunaError, ValueError):
        return None
    return verifier if trusted or all(isinstance(leaf, BoundedVerifier) for leaf in leaves(verifier)) else None


def _right(row: Mapping[str, Any], verifier: Verifier, answer: str) -> float:
    question = question_of(dict(row))
    scores = iter([attempt(Item(leaf, question, answer)) for leaf in leaves(verifier)])
    return float(is_correct(combine(verifier, lambda: next(scores)).value))


def _shared_words(one: _Text, other: _Text) -> float:
    return (common := (one.words & other.words).total()) / max(1, one.words.total() + other.words.total() - common)


def _close_numbers(one: _Text, other: _Text) -> float:
    """Return minus the sum of absolute differences between two questions' numbers; minus infinity if wordings or counts differ."""
    if one.form != other.form or len(one.numbers) != len(other.numbers):
        return -math.inf
    return -sum(abs(a - b) for a, b in zip(one.numbers, other.numbers, strict=True))


class _Edits:
    """A function that returns the Levenshtein distances, in tokens, from a question to each of the `known` questions, [n]."""

    def __init__(self, known: Sequence[_Text]) -> None:
        self._number = {token: i for i, token in enumerate(sorted({token for one in known for token in one.tokens}))}
        self._lengths = np.array([len(one.tokens) for one in known])
        self._known = np.full((len(known), int(self._lengths.max())), -1)
        for row, one in zip(self._known, known, strict=True):
            row[: len(one.tokens)] = [self._number[token] for token in one.tokens]

    def __call__(self, text: _Text) -> np.ndarray[Any, Any]:
        columns = np.arange(self._known.shape[1] + 1)
        last = np.broadcast_to(columns, (len(self._known), len(columns)))
        for token in text.tokens:
            differs = self._known != self._number.get(token, -2)
            best = np.concatenate([last[:, :1] + 1, np.minimum(last[:, 1:] + 1, last[:, :-1] + differs)], 1)
            # Each insertion adds 1 to the left neighbour, which is a running minimum after subtracting the column index.
            last = np.minimum.accumulate(best - columns, 1) + columns
        return np.take_along_axis(last, self._lengths[:, None], 1)[:, 0]


def _replace_tokens(known: _Text, text: _Text) -> str:
    """Return the answer of `known`. A token of its question that is another one in `text` is replaced in the answer, too."""
    changes: dict[str, str] = {}
    for kind, a, b, c, d in SequenceMatcher(None, known.tokens, text.tokens, autojunk=False).get_opcodes():
        if kind == "replace":
            changes |= zip(known.tokens[a:b], text.tokens[c:d], strict=False)
    return TOKEN.sub(lambda match: changes.get(match[0], match[0]), known.answer)


def _majority(known: Sequence[_Text]) -> Callable[[_Text], str]:
    """Return a function that answers a question from the known answers to questions of the same form or, without any, of the same task. It
    gives the commonest token at each position of the answers of the commonest length."""
    pieces: dict[tuple[str, str], list[list[str]]] = defaultdict(list)
    for one in known:
        split = re.findall(rf"\s+|{TOKEN.pattern}", one.answer)
        for form in (one.form, ""):
            pieces[one.task, form].append(split)
    whole = {}
    for key, answers in pieces.items():
        length = Counter(map(len, answers)).most_common(1)[0][0]
        places = zip(*(answer for answer in answers if len(answer) == length), strict=True)
        whole[key] = "".join(Counter(place).most_common(1)[0][0] for place in places)
    return lambda text: whole.get((text.task, text.form), whole.get((text.task, ""), ""))
