"""Passages by BM25, compared with the formula, document by document."""

import math
import re

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.stages import retrieve
from puna.stages.retrieve import passages


class Documents:
    """A stub of the part of an artifact that `passages` reads."""

    def __init__(self, texts):
        self.table = pa.table({"id": [f"{i:03d}" for i in range(len(texts))], "text": texts})

    def batches(self, columns, rows):
        return self.table.select(columns).to_batches(max_chunksize=2)

    def between(self, low, high, columns):
        return self.table.filter(pa.array([low <= one <= high for one in self.table["id"].to_pylist()])).select(columns)


def expected(question, texts):
    """Return (score, id) of every document with a word of the question, by the module's formula."""
    split = [re.findall(r"\w+", text.lower()) for text in texts]
    mean = sum(map(len, split)) / len(split)
    found = []
    for i, words in enumerate(split):
        score = 0.0
        for word in set(re.findall(r"\w+", question.lower())):
            n, f = sum(word in other for other in split), words.count(word)
            score += math.log(1 + (len(split) - n + 0.5) / (n + 0.5)) * f * 2.2 / (f + 1.2 * (0.25 + 0.75 * len(words) / mean)) if f else 0.0
        if score > 0:
            found.append((score, f"{i:03d}"))
    return sorted(found, key=lambda one: (-round(one[0], 9), one[1]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.sampled_from(["apple", "Apple,", "pear", "plum.", "fig"]), max_size=8).map(" ".join), min_size=1, max_size=7), st.sampled_from(["apple", "Fig and plum?", "pear pear apple", "none of them"]))
def test_scores_are_the_formulas(texts, question):
    if not any(re.findall(r"\w+", text) for text in texts):
        return
    (found,) = passages([question], Documents(texts), 3)
    known = expected(question, texts)[:3]
    assert [one.score for one in found] == pytest.approx([score for score, _ in known])
    assert {one.id for one in found} <= {name for score, name in expected(question, texts) if score >= known[-1][0] - 1e-6} if known else not found
    assert all(one.text == texts[int(one.id)].strip() for one in found)


def test_a_passage_is_the_part_of_most_weight():
    text = "nothing here at all. " * 50 + "Whales, sing; slowly! " + "and nothing again. " * 50
    (found,) = passages(["do whales sing?"], Documents([text, "whales", "sing a song"]), 3, words=4)
    whole = {one.id: one.text for one in found}
    assert "Whales, sing" in whole["000"] and len(retrieve.WORD.findall(whole["000"])) == 4
    assert whole["001"] == "whales" and whole["002"] == "sing a song"


def test_no_documents_no_passages():
    assert passages(["x"], Documents(["", "-"]), 2) == [[]]
