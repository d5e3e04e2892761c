"""With `words: dolma` and the rule sets of dolma, signals are what dolma's taggers gopher_v2 and c4_v2 give, and rules what it publishes.

dolma needs an environment of its own (`tests/benchmarks/curation_heuristics.py` compares with it live); here every value comes
from plain Python written from the definitions.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from puna.stages.contract import execute
from puna.stages.curate.heuristics import HeuristicsConfig, heuristics
from puna.stages.curate.rules.decide import fires
from puna.stages.curate.rules.groups import active_rules
from puna.stages.curate.rules.sets import DOLMA_ATTRIBUTES, RULE_SETS
from puna.stages.curate.select import SelectConfig, select
from puna.stages.curate.signals.measure import measure, names
from puna.storage import PunaError, Store

PIECES = ["the", "The", "of", "with", "have", "river", "boat.", "#tag", "a#b", "wait…", "…", "*", "-", "* item", "- item", "•", "12", "4.5",
          "{x}", "JavaScript", "javascripts", "lorem ipsum", "Lorem\u00a0ipsum", "LOREM IPSUM", "end?", 'said"', "ok!", "日本語", "é", "İ",
          "K", "\u200b", "café", "cafe\u0301", "😀", "—"]  # fmt: skip
SPACES = [" ", " ", " ", "  ", "\n", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u2028", "\x85", "\x1c", "\u3000", " \n ", ""]
TEXTS = st.lists(st.sampled_from(PIECES) | st.sampled_from(SPACES), max_size=80).map("".join) | st.text(max_size=60)
STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")

# The bounds of the Dolma corpus for Common Crawl; a document goes below the first and above the second.
CORPUS = {
    "word_count": (50, 100_000), "median_word_length": (3, 10), "symbol_to_word_ratio": (None, 0.1),
    "fraction_of_words_with_alpha_character": (0.8, None), "required_word_count": (2, None),
    "fraction_of_lines_starting_with_bullet_point": (None, 0.9), "fraction_of_lines_ending_with_ellipsis": (None, 0.3),
    "fraction_of_duplicate_lines": (None, 0.3), "fraction_of_characters_in_duplicate_lines": (None, 0.3),
    "fraction_of_characters_in_most_common_2grams": (None, 0.2), "fraction_of_characters_in_most_common_3grams": (None, 0.18),
    "fraction_of_characters_in_most_common_4grams": (None, 0.16), "fraction_of_characters_in_duplicate_5grams": (None, 0.15),
    "fraction_of_characters_in_duplicate_6grams": (None, 0.14), "fraction_of_characters_in_duplicate_7grams": (None, 0.13),
    "fraction_of_characters_in_duplicate_8grams": (None, 0.12), "fraction_of_characters_in_duplicate_9grams": (None, 0.11),
    "fraction_of_characters_in_duplicate_10grams": (None, 0.10),
}  # fmt: skip
# Its replication of C4: a document with any of these goes.
C4 = dict.fromkeys(("has_curly_brace", "has_lorem_ipsum", "has_javascript"), (None, 0))
DOLMA = set(names("dolma")) - set(names("universal"))
BOUNDS = {"dolma": CORPUS, "dolma_c4": C4}


def measured(texts):
    values = measure(pa.array(texts, pa.string()), "dolma", 5, 0.5).values
    return [{name: float(row[name]) for name in names("dolma")} for row in values]


def gopher(text):
    """Gopher's numbers by dolma's definitions, by their names there."""
    words, lines = text.split(), [""]
    for before, char in zip(["", *text], text, strict=False):
        if char != "\n":
            lines[-1] += char
        elif before != "\n":  # a run of newlines ends one line
            lines.append("")
    size, count = sum(len(word) for word in words), len(words)
    repeated = [line for line in lines if lines.count(line) > 1]
    found = {
        "word_count": count,
        "median_word_length": statistics.median([len(word) for word in words]) if words else 0,
        "symbol_to_word_ratio": sum("#" in word or "…" in word for word in words) / max(count, 1),
        "fraction_of_words_with_alpha_character": sum(any(map(str.isalpha, word)) for word in words) / max(count, 1),
        "required_word_count": sum(words.count(word) for word in STOP_WORDS),
        "fraction_of_lines_starting_with_bullet_point": sum(line[:1] in ("*", "-") for line in lines) / len(lines),
        "fraction_of_lines_ending_with_ellipsis": sum(line[-1:] == "…" for line in lines) / len(lines),
        "fraction_of_duplicate_lines": len(repeated) / len(lines),
        "fraction_of_characters_in_duplicate_lines": sum(map(len, repeated)) / max(size, 1),
    }
    for n in range(2, 11):
        grams = [tuple(words[at : at + n]) for at in range(count - n + 1)]
        times = Counter(grams)
        lengths = [sum(map(len, gram)) for gram in grams]
        if n < 5:
            # The first of the most frequent ones.
            at = min(range(len(grams)), key=lambda i: (-times[grams[i]], i), default=None)
            found[f"fraction_of_characters_in_most_common_{n}grams"] = (
                0 if at is None else times[grams[at]] * lengths[at] / max(size, 1)
            )
        else:
            again = sum(length for gram, length in zip(grams, lengths, strict=True) if times[gram] > 1)
            found[f"fraction_of_characters_in_duplicate_{n}grams"] = again / max(sum(lengths), 1)
    # An empty text has no numbers: dolma leaves them 0.
    return found if text else dict.fromkeys(found, 0)


def c4(text):
    """C4's numbers by dolma's definitions; counts of lines where it has spans or a mark on the document."""
    lines = text.lower().split("\n")
    return {
        "lines_with_no_ending_punctuation": sum(line.strip()[-1:] not in {".", "?", "!", '"'} for line in lines),
        "lines_with_too_few_words": sum(len(line.split()) < 3 for line in lines),
        **{name: sum(mark in line for line in lines) for name, mark in
           (("has_curly_brace", "{"), ("has_lorem_ipsum", "lorem ipsum"), ("has_javascript", "javascript"))},
    }  # fmt: skip


def rules(name, **given_):
    return list(active_rules(SelectConfig(rule_set=name, language=None, **given_)))


@settings(deadline=None, max_examples=300)  # the first call compiles
@given(TEXTS)
@example("")
@example("word")
@example(" \n\n\n ")
@example("\n\n")
@example("\na\r\na\r\n\nb\n")
@example("* a\n- b\n* a\n\n* c")
@example("\u3000\u2028one\u00a0two\x85three\x1ffour")
@example("a b c d e f g h i j k " * 4)
def test_signals(text):
    found, expected = measured([text])[0], gopher(text) | c4(text)
    for rule in rules("dolma") + rules("dolma_c4"):
        assert (rule.name, found[rule.drop.signal]) == (rule.name, expected[DOLMA_ATTRIBUTES[rule.name]])
    assert found["unpunctuated_lines"] == expected["lines_with_no_ending_punctuation"]
    assert found["few_word_lines"] == expected["lines_with_too_few_words"]


def test_a_text_by_hand():
    found = measured(["the cat the cat\n\nthe cat #1\n* wait…\n* wait…"])[0]
    # Words: the cat the cat the cat #1 * wait… * wait…, of 3 3 3 3 3 3 2 1 5 1 5 characters, 32 together.
    assert (found["words"], found["median_word_length"], found["english_stop_word_occurrences"]) == (11, 3, 3)
    assert (found["symbol_word_fraction"], found["alphabetic_word_fraction"]) == (3 / 11, 8 / 11)
    # Four lines, the last two alike, of 7 characters each.
    assert (found["bullet_line_fraction"], found["ellipsis_line_fraction"]) == (2 / 4, 2 / 4)
    assert (found["duplicate_line_fraction"], found["duplicate_line_character_fraction"]) == (2 / 4, 14 / 32)
    assert found["top_2gram_character_fraction"] == 3 * 6 / 32
    assert found["top_3gram_character_fraction"] == 2 * 9 / 32
    assert (found["unpunctuated_lines"], found["few_word_lines"]) == (5, 3)


def page(rnd):
    """Prose with what each rule looks for, in random doses."""
    odd, repeat, short = (rnd.random() ** 3 for _ in range(3))
    prose = ["the", "of", "and", "river", "carries", "water", "hills", "valley", "spring", "people", "boats", "slowly", "a", "1984", "—"]
    lines = []
    for _ in range(rnd.randint(0, 20)):
        if lines and rnd.random() < repeat:
            lines.append(rnd.choice(lines))
        else:
            pool = PIECES if rnd.random() < odd else prose
            words = [rnd.choice(pool) for _ in range(rnd.randint(1, 3 if rnd.random() < short else 30))]
            lines.append(rnd.choice(["", "", "", "* ", "- "]) * (rnd.random() < odd) + " ".join(words) + rnd.choice(["", ".", "…"]))
    return rnd.choice(["\n", "\n\n", "\r\n"]).join(lines) * rnd.choice([1, 1, 1, 2])


@pytest.mark.parametrize("name", BOUNDS)
def test_decisions(name):
    rnd = random.Random(name)
    texts = ["", "\n", "the of " * 60_000, *(page(rnd) for _ in range(400))]
    found = measured(texts)
    columns = {signal: [row[signal] for row in found] for signal in names("dolma")}
    table, sources = pa.table(columns), pa.chunked_array([["web"] * len(texts)])
    drops = [(DOLMA_ATTRIBUTES[rule.name], fires(rule, table, sources)) for rule in rules(name)]
    reasons = Counter()
    for number, text in enumerate(texts):
        values = gopher(text) | c4(text)
        expected = {attribute for attribute, (least, most) in BOUNDS[name].items()
                    if (least is not None and values[attribute] < least) or (most is not None and values[attribute] > most)}  # fmt: skip
        assert {attribute for attribute, gone in drops if gone[number]} == expected
        reasons.update(expected or {"kept"})
    assert set(reasons) == {*BOUNDS[name], "kept"}  # the texts meet every rule, and some pass


def test_the_sets_are_the_published_ones():
    for name, bounds in BOUNDS.items():
        given_ = {}
        for rule in rules(name):
            side = 0 if rule.drop.when == "<" else 1
            given_.setdefault(DOLMA_ATTRIBUTES[rule.name], [None, None])[side] = rule.threshold
        assert {attribute: tuple(sides) for attribute, sides in given_.items()} == bounds
        assert RULE_SETS[name]["language"].min_score == 0.5


def test_what_dolma_does_not_measure_stays():
    texts = [page(random.Random(seed)) for seed in range(40)]
    universal = measure(pa.array(texts), "universal", 5, 0.5)
    as_dolma = measure(pa.array(texts), "dolma", 5, 0.5)
    theirs = {rule.drop.signal for rule in rules("dolma") + rules("dolma_c4")}
    for name in names("universal"):
        if name not in theirs:
            assert np.array_equal(universal.values[name], as_dolma.values[name], equal_nan=True), name
    assert universal.bins.tolist() == as_dolma.bins.tolist()
    assert theirs | {"unpunctuated_lines", "few_word_lines"} >= DOLMA


def test_the_stage_and_a_rule_set_without_its_signals(tmp_path, make_documents):
    store = Store.open(tmp_path)
    prose = " ".join(f"The people of valley {n} have boats and cross the river." for n in range(12))
    documents = make_documents(store, [("a", "web", prose), ("b", "web", "Too short."), ("c", "web", prose.replace("boats", "boats…"))])
    found = {
        words: execute(heuristics, HeuristicsConfig(words=words), {"documents": documents}, store) for words in ("universal", "dolma")
    }
    assert set(found["dolma"].read().column_names) - set(found["universal"].read().column_names) == DOLMA
    config = SelectConfig(rule_set="dolma", language=None, gopher_repetition=None)
    made = execute(select, config, {"documents": documents, "signals": [found["dolma"]]}, store)
    assert made.read()["id"].to_pylist() == ["a", "c"]
    assert [(row["id"], row["rule"], row["value"]) for row in made.read("dropped").to_pylist()] == [("b", "gopher_quality.min_words", 2.0)]
    with pytest.raises(PunaError, match="'median_word_length', which no input carries"):
        execute(select, config, {"documents": documents, "signals": [found["universal"]]}, store)
