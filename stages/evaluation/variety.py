"""Variety of a model's answers: the share of their wording that follows no common template."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

WORD = re.compile(r"\w+")
RUN = 3
"""Words of a run."""


def variety(asked: Sequence[tuple[str, str]]) -> list[float]:
    """Return, for each (question, answer), the share of the answer's runs of three words that no other answer has, 0 to 1.

    The words of its own question are left out first, so that a template in which only these change gives 0 (cf. distinct-n, Li et al.
    2016). The answer's beginning and its end count as words. Shares depend on how many answers there are: compare equal numbers.
    """
    runs = [_runs(question, answer) for question, answer in asked]
    having = Counter(run for one in runs for run in one)
    return [sum(having[run] == 1 for run in one) / len(one) for one in runs]


def _runs(question: str, answer: str) -> set[tuple[str, ...]]:
    given = set(WORD.findall(question.lower()))
    words = ["", *(word for word in WORD.findall(answer.lower()) if word not in given), ""]
    return {tuple(words[start : start + RUN]) for start in range(max(1, len(words) - RUN + 1))}
