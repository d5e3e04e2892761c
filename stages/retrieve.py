"""Retrieval of passages for a question, ranked by BM25 (Robertson and Zaragoza 2009) in one pass over the documents.

A document's score is the sum over the question's distinct words of log(1 + (N - n + 1/2) / (n + 1/2)) f (k + 1) / (f + k (1 - b + b l /
L)). The word is in n of N documents, f times in this document of l words (mean L); k = 1.2 and b = 0.75."""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from puna.storage import Artifact

WORD = re.compile(r"\w+")
SATURATION, LENGTH = 1.2, 0.75
BLOCK_ROWS = 1024


class Passage(NamedTuple):
    """A part of a document that matches a question, with the document's id and score."""

    id: str
    score: float
    text: str


def passages(questions: Sequence[str], documents: Artifact, most: int, words: int = 150) -> list[list[Passage]]:
    """Return each question's passages, best first: one from each of the `most` documents with the highest scores above 0. A passage is its
    document's best run of `words` consecutive words."""
    queries = [set(_words(question)) for question in questions]
    terms = set().union(*queries)
    frequency, hits, lengths, total = Counter[str](), [], [], 0
    for batch in documents.batches(columns=["id", "text"], rows=BLOCK_ROWS):
        for identity, text in zip(batch["id"].to_pylist(), batch["text"].to_pylist(), strict=True):
            text_words = _words(text)
            total += len(text_words)
            lengths.append(len(text_words))
            times = Counter(word for word in text_words if word in terms)
            frequency.update(times.keys())
            if times:
                hits.append((identity, len(text_words), times))
    weight = {term: math.log(1 + (len(lengths) - n + 0.5) / (n + 0.5)) for term, n in frequency.items()}
    mean = total / max(1, len(lengths))

    def score(own: set[str], length: int, times: Counter[str]) -> float:
        room = SATURATION * (1 - LENGTH + LENGTH * length / mean)
        return sum(weight[term] * times[term] * (SATURATION + 1) / (times[term] + room) for term in own & times.keys())

    best = [
        heapq.nsmallest(most, ((-value, identity) for identity, length, times in hits if (value := score(own, length, times)) > 0))
        for own in queries
    ]
    texts = {identity: documents.between(identity, identity, columns=["text"])["text"][0].as_py() for row in best for _, identity in row}
    return [
        [Passage(identity, -value, _around(texts[identity], {t: weight[t] for t in own & weight.keys()}, words)) for value, identity in row]
        for own, row in zip(queries, best, strict=True)
    ]


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def _around(text: str, weight: dict[str, float], words: int) -> str:
    """Return the run of `words` consecutive words with the highest total weight, as spelled in the text. Return a shorter text whole."""
    places = [(match.start(), match.end(), weight.get(match.group().lower(), 0.0)) for match in WORD.finditer(text)]
    if len(places) <= words:
        return text.strip()
    inside = best = sum(value for _, _, value in places[:words])
    first = 0
    for start in range(1, len(places) - words + 1):
        inside += places[start + words - 1][2] - places[start - 1][2]
        if inside > best + 1e-9:
            first, best = start, inside
    return text[places[first][0] : places[first + words - 1][1]]
