"""Heuristic signals compared with plain Python written from the definitions, and the stage on small corpora."""

from __future__ import annotations

import math
import re
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.kernels.text.characters import SYMBOL, TERMINAL, tables
from puna.kernels.text.words import split
from puna.stages.contract import execute
from puna.stages.curate.heuristics import HeuristicsConfig, heuristics
from puna.stages.curate.language import LanguageConfig, language
from puna.stages.curate.rules.groups import LineRules
from puna.stages.curate.select import SelectConfig, select
from puna.stages.curate.signals import divergence as divergences
from puna.stages.curate.signals.divergence import BINS, DRAWS, Corpus, Tally, expected_at
from puna.stages.curate.signals.measure import NAMES, measure
from puna.storage import Store

PIECES = ("the", "and", "of", "de", "la", "alpha", "beta.", "Gamma", "#", "...", "…", "- x", "• y", "\n", "\n\n", "\r\n", "12",
          "{", "[3]", "javascript", "cookie policy", "lorem ipsum", "end.", "What?", "\u2028", "the cat sat on the mat.", " ", "日本。")  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), max_size=60).map(" ".join) | st.lists(st.sampled_from(PIECES), max_size=60).map("".join)


def numbers(text):
    """Return the signals of one text, null as None."""
    values = measure(pa.array([text]), 5, 0.5).values[0]
    return {name: None if math.isnan(values[name]) else float(values[name]) for name in NAMES}


def has(char, bit):
    return bool(tables().flags[ord(char)] & bit)


def seen_before(pieces):
    seen, count, characters = set(), 0, 0
    for piece in pieces:
        if piece in seen:
            count += 1
            characters += len(piece)
        seen.add(piece)
    return count, characters


@settings(deadline=None)  # the first call compiles
@given(TEXTS)
def test_gopher_quality(text):
    words = split(text)
    plain = [w for w in words if not all(has(c, SYMBOL) for c in w)]
    lines = text.splitlines()
    found = numbers(text)
    assert found["words"] == len(plain)
    assert found["hash_ratio"] == text.count("#") / max(len(words), 1)
    assert found["ellipsis_ratio"] == (text.count("...") + text.count("…")) / max(len(words), 1)
    assert found["bullet_line_fraction"] == sum(x.lstrip().startswith(("•", "-")) for x in lines) / max(len(lines), 1)
    assert found["ellipsis_line_fraction"] == sum(x.rstrip().endswith(("...", "…")) for x in lines) / max(len(lines), 1)
    assert found["alphabetic_word_fraction"] == sum(any(c.isalpha() for c in w) for w in plain) / max(len(plain), 1)
    assert found["english_stop_words"] == len({"the", "be", "to", "of", "and", "that", "have", "with"} & set(words))
    assert found["stop_words"] >= max(found["english_stop_words"], len({"de", "la", "que", "el", "en", "y", "los", "por"} & set(words)))
    if found["mean_word_length"] is not None:
        assert found["mean_word_length"] == pytest.approx(sum(map(len, plain)) / max(len(plain), 1))
    assert found["characters"] == len(text)


@settings(deadline=None)  # the first call compiles
@given(TEXTS)
def test_gopher_repetition(text):
    found, size, words = numbers(text), max(len(text), 1), split(text)
    paragraphs = re.split(r"\n{2,}", text.strip())
    count, characters = seen_before(paragraphs)
    assert found["duplicate_paragraph_fraction"] == count / len(paragraphs)
    assert found["duplicate_paragraph_character_fraction"] == characters / size
    lines = re.split(r"\n+", text)
    count, characters = seen_before(lines)
    assert found["duplicate_line_fraction"] == count / len(lines)
    assert found["duplicate_line_character_fraction"] == characters / size
    for n in (2, 3, 4):
        grams = Counter(" ".join(words[i : i + n]) for i in range(len(words) - n + 1))
        top = max(grams.items(), key=lambda pair: pair[1], default=("", 0))  # the first of equals
        assert found[f"top_{n}gram_character_fraction"] == (len(top[0]) * top[1] / size if top[1] > 1 else 0)
    for n in range(5, 11):
        seen, at, characters = set(), 0, 0
        while at + n <= len(words):
            gram = "".join(words[at : at + n])
            characters += len(gram) if gram in seen else 0
            at += n if gram in seen else 1
            seen.add(gram)
        assert found[f"duplicate_{n}gram_character_fraction"] == characters / size


def c4(text, need_end):
    """Return the numbers of kept lines, lorem ipsum lines and curly bracket lines, by C4's rules in their order."""
    kept, lorem, curly = [], 0, 0
    for line in text.splitlines():
        line = line.strip()
        words = line.split()
        if any(len(w) > 1000 for w in words):
            continue
        line = re.sub(r"\[\d*]|\[edit]|\[citation needed]", "", line)
        if need_end and (not line.endswith((".", "?", "!", '"', "'")) or line.endswith("...")):
            continue
        if len(words) < 3:
            continue
        lower = line.lower()
        if "lorem ipsum" in lower:
            lorem += 1
            continue
        if "javascript" in lower:
            continue
        curly += "{" in line and not lorem
        if not any(
            p in lower for p in ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
        ):
            kept.append(line)
    return kept, lorem, curly


@settings(deadline=None)  # the first call compiles
@given(TEXTS)
def test_c4(text):
    found = numbers(text)
    for prefix, need_end in (("c4_", True), ("c4_open_", False)):
        kept, lorem, curly = c4(text, need_end)
        assert found[f"{prefix}lorem_ipsum_lines"] == lorem
        assert found[f"{prefix}curly_bracket_lines"] == curly
        if found["mean_word_length"] is None:
            assert found[f"{prefix}sentences"] is None
        elif all(split(line) for line in kept):  # the rest of a line with only citation marks may or may not count
            assert (found[f"{prefix}sentences"] == 0) == (not kept)


def test_scripts_without_spaces_have_no_word_length():
    found = numbers("多名外国专家告诉记者，合作共赢符合国际社会的利益，这是今天的消息。\n" * 3)
    assert found["mean_word_length"] is None
    assert found["c4_sentences"] is None
    assert found["short_line_fraction"] is None
    assert found["stop_words"] >= 3
    assert found["terminated_line_fraction"] == 1


def test_c4_sentences_by_hand():
    lines = ["One two three. Four five six! Seven?", "Eight nine ten", "Use of cookies is good here."]
    text = "\n".join([*lines, "A fact.[1] B stays so.[citation needed]", "short line"])
    found = numbers(text)
    # Lines 1 (three sentences) and 4 (two) end in punctuation; line 2 does not; line 3 is a policy; line 5 has two words.
    assert found["c4_sentences"] == 5
    assert found["c4_open_sentences"] == 6
    assert numbers("x" * 1001 + " a b c.")["c4_sentences"] == 0
    assert numbers("And so it goes...\n")["c4_sentences"] == 0


@settings(deadline=None)  # the first call compiles
@given(TEXTS)
def test_fineweb(text):
    found = numbers(text)
    lines = [line for line in text.split("\n") if line.strip()]
    assert found["terminated_line_fraction"] == sum(has(line[-1], TERMINAL) for line in lines) / max(len(lines), 1)
    if found["mean_word_length"] is not None:
        assert found["short_line_fraction"] == sum(len(line) <= 30 for line in lines) / max(len(lines), 1)
    assert found["lines"] == len(lines)
    assert found["newline_ratio"] == text.count("\n") / max(len(split(text)), 1)
    assert found["repeated_line_character_fraction"] == seen_before(lines)[1] / max(len(text.replace("\n", "")), 1)
    pieces = text.split("\n")
    assert found["max_line_length"] == max(map(len, pieces))
    assert found["mean_line_length"] == pytest.approx(sum(map(len, pieces)) / len(pieces))
    assert found["alphanumeric_fraction"] == sum(c.isalnum() for c in text) / max(len(text), 1)


@settings(deadline=None)  # the first call compiles
@given(TEXTS, st.integers(2, 4))
def test_ngram_coverage(text, n):
    pieces = [
        (line, re.sub(r"\d+", "0", word.lower()))
        for line, piece in enumerate(text.split("\n"))
        for word in split(piece)
        if not all(has(c, SYMBOL) for c in word)
    ]
    seen, covered = set(), set()
    for i in range(len(pieces) - n + 1):
        gram = tuple(word for _, word in pieces[i : i + n])
        if 2 * sum(any(c.isalpha() for c in word) for word in gram) < n:
            continue
        if gram in seen:
            covered |= set(range(i, i + n))
        seen.add(gram)
    made = measure(pa.array([text]), n, 0.0)
    # Splitting a line alone can differ from splitting the text if a line break is not a newline; here all are newlines.
    expected, of_line = Counter(pieces[i][0] for i in covered), Counter(line for line, _ in pieces)
    assert made.line.tolist() == sorted(of_line)
    assert made.line_words.tolist() == [of_line[line] for line in sorted(of_line)]
    assert made.line_covered.tolist() == [expected[line] for line in sorted(of_line)]
    assert made.values["ngram_coverage"][0] == len(covered) / max(len(pieces), 1)


def test_dirty_words():
    found = numbers("Porn and more PORN for grown-ups, said the councillor.")
    assert found["dirty_words"] == 2
    assert found["dirty_word_ratio"] == 2 / 10
    assert numbers("Bed bugs bite; the cock crows; Moby Dick.")["dirty_words"] == 0


def test_words_are_counted_by_document():
    texts = ["b a b, B 12 7", "", "a"]
    made = measure(pa.array(texts), 5, 0.5)
    assert made.bin_offsets.tolist() == [0, 3, 3, 4]
    # Case and digits are ignored, and bins are in the order of first occurrence; punctuation does not count.
    assert made.counts.tolist() == [3, 1, 2, 1]
    assert made.bins[1] == made.bins[3]
    assert len(set(made.bins[:3].tolist())) == 3


def divergence(corpus, text, **how):
    made = measure(pa.array([text]), 5, 0.5)
    return float(corpus.divergences(np.array([0]), made.bin_offsets, made.bins, made.counts, **how)[0])


def test_divergence_by_derivation():
    # A corpus of two words, 6 and 2 times; no singletons, so the prior of a bin is 1 / BINS, and the prior of all bins is 1.
    counts = np.zeros(BINS, np.int64)
    a, b = measure(pa.array(["a b"]), 5, 0.5).bins
    counts[a], counts[b] = 6, 2
    corpus = Corpus.of(counts)
    assert corpus.prior * BINS == 1
    # "a b" against all: p = 1/2 each, q = (6 + eps) / 9 and (2 + eps) / 9.
    q = [(6 + 1 / BINS) / 9, (2 + 1 / BINS) / 9]
    expected = 0.5 * math.log(0.5 / q[0]) + 0.5 * math.log(0.5 / q[1])
    assert divergence(corpus, "a b", inside=False) == pytest.approx(expected)
    # Without this document, 5 and 1 of 6 words are left in the corpus.
    q = [(5 + 1 / BINS) / 7, (1 + 1 / BINS) / 7]
    expected = 0.5 * math.log(0.5 / q[0]) + 0.5 * math.log(0.5 / q[1])
    assert divergence(corpus, "a b") == pytest.approx(expected)
    assert divergence(corpus, "") == 0


def test_expected_divergence_falls_with_length():
    counts = np.zeros(BINS, np.int64)
    counts[np.arange(5000) * 13] = 50_000 // np.arange(1, 5001)
    expected = Corpus.of(counts).expected_divergence(np.random.default_rng(0))
    assert (np.diff(expected) < 0).all()
    assert expected_at(np.array([10**9]), expected) == expected[-1]


@pytest.mark.parametrize("words", [1, 7, 40_000])
def test_random_texts_are_drawn_from_the_corpus(words, monkeypatch):
    """By definition: the word at position p of the corpus belongs to the first bin whose cumulative count exceeds p."""
    monkeypatch.setattr(divergences, "LENGTHS", (16, 300))
    generator = np.random.default_rng(words)
    counts = np.bincount(generator.zipf(1.2, words) % BINS * 97 % BINS, minlength=BINS)
    corpus, wanted, generator = Corpus.of(counts), [], np.random.default_rng(0)
    for length in (16, 300):
        for _ in range(DRAWS):
            places = generator.integers(words, size=length)
            bins, often = np.unique(np.searchsorted(np.cumsum(counts), places, side="right"), return_counts=True)
            share = often / length
            wanted.append(np.sum(share * np.log(share * (words + corpus.prior * BINS) / (counts[bins] + corpus.prior))))
    found = corpus.expected_divergence(np.random.default_rng(0))
    np.testing.assert_allclose(found, np.maximum(np.array(wanted), 0).reshape(2, DRAWS).mean(axis=1), rtol=1e-12)


def test_tally_adds_and_merges():
    """A tally holds at most twice as many entries as there are different bins, or a few, however many parts are added."""
    tally = Tally()
    tally.LEAST = 3
    for _ in range(50):
        tally.add(np.array([1, 7], np.uint32), np.array([2, 3]))
        assert sum(len(bins) for bins, _ in tally.pieces) <= 2 + tally.LEAST
    assert tally.words == 250
    assert tally.dense()[[1, 7]].tolist() == [100, 150]


PROSE = "The council of the town said that the bridge has to be repaired and that work will begin with the first days of spring."


def vocabulary(first, count):
    """Return words without digits, because all numbers count as one word."""
    return [first + "".join("abcdefghij"[int(d)] for d in str(n)) for n in range(count)]


def corpus_rows():
    generator = np.random.default_rng(0)
    words = [*PROSE.lower().split(), *vocabulary("word", 200)]
    rows = [(f"{n:03d}", "web", " ".join(generator.choice(words, 200))) for n in range(60)]
    rows.append(("gibberish", "web", " ".join("".join(generator.choice(list("qxzjkvw"), 7)) for _ in range(200))))
    log = "\n".join(f"2024-01-{n:02d} error {n} while opening the file of the server, trying again in {n} seconds" for n in range(1, 9))
    rows.append(("log", "web", log))
    return [*rows, ("empty", "web", "")]


def test_the_stage_finds_outliers_and_repeated_lines(tmp_path, make_documents):
    store = Store.open(tmp_path)
    config = HeuristicsConfig(min_language_words=1)
    made = execute(heuristics, config, {"documents": make_documents(store, corpus_rows())}, store)
    assert {name: set(columns) for name, columns in heuristics.tables(config).items()} == {name: set(made.columns(name)) for name in made.tables}
    rows = {row["id"]: row for row in made.read().to_pylist()}
    ordinary = [rows[f"{n:03d}"]["token_kl_excess"] for n in range(60)]
    assert rows["gibberish"]["token_kl_excess"] > max(ordinary) + 5
    assert rows["empty"]["words"] == 0
    assert rows["empty"]["token_kl"] == 0
    lines = made.read("line_signals").to_pylist()
    # The first line of the log is new; the other seven differ from it only in numbers.
    assert [(r["id"], r["line"]) for r in lines if r["ngram_coverage"] > 0.7] == [("log", n) for n in range(1, 8)]
    assert made.manifest.metrics["corpus_words"] > 10_000


def test_languages_are_compared_with_themselves(tmp_path, make_documents):
    store = Store.open(tmp_path)
    rows = [(f"{n:03d}", "web", " ".join(np.random.default_rng(n).choice(vocabulary("w", 300), 100))) for n in range(40)]
    rows += [(f"m{n:02d}", "web", " ".join(np.random.default_rng(n).choice(vocabulary("v", 300), 100))) for n in range(10)]
    table = pa.table({"id": [r[0] for r in rows], "language": ["en"] * 40 + ["fr"] * 10})
    made = {}
    for name, given_ in (("alone", {}), ("by language", {"language": store.import_table("signals", table)})):
        config = HeuristicsConfig(min_language_words=500)
        made[name] = (
            execute(heuristics, config, {"documents": make_documents(store, rows), **given_}, store).read()["token_kl_excess"].to_pylist()
        )
    # 10 of 50 texts in another language are outliers among all texts, but not among those of their language.
    assert min(made["alone"][-10:]) > max(made["alone"][:40])
    assert max(made["by language"][-10:]) < min(made["alone"][-10:])
    few = execute(
        heuristics,
        HeuristicsConfig(min_language_words=2000),
        {"documents": make_documents(store, rows), "language": store.import_table("signals", table)},
        store,
    )
    assert few.read()["token_kl"].to_pylist()[-10:] == [None] * 10


def test_all_lines_that_select_may_remove_are_reported():
    """The largest bound of the one stage is the least bound of the other."""
    assert HeuristicsConfig(line_coverage=0.5).line_coverage == LineRules(max_ngram_coverage=0.5).max_ngram_coverage
    with pytest.raises(ValueError, match="line_coverage"):
        HeuristicsConfig(line_coverage=0.51)
    with pytest.raises(ValueError, match="max_ngram_coverage"):
        LineRules(max_ngram_coverage=0.49)


def test_no_documents(tmp_path, make_documents):
    store = Store.open(tmp_path)
    assert execute(heuristics, HeuristicsConfig(), {"documents": make_documents(store, [])}, store).rows() == 0


def test_a_text_beyond_its_budget_is_dropped_as_failed(tmp_path, make_documents):
    """The result does not depend on the texts measured beside it or on its source."""
    long, text = "word and " * 200, "The cat sat on the mat, and that is that. " * 8
    for number, rows in enumerate(([("a", "web", text), ("b", "code", long)], [("b", "code", long)])):
        store = Store.open(tmp_path / str(number))
        documents = make_documents(store, rows)
        signals = execute(heuristics, HeuristicsConfig(max_text_bytes=1024), {"documents": documents}, store)
        row = signals.read().to_pylist()[-1]
        assert {name for name, value in row.items() if value is not None} == {"id", "failure"}
        kept = execute(select, SelectConfig(), {"documents": documents, "signals": [signals]}, store)
        dropped = {found["id"]: (found["rule"], found["detail"]) for found in kept.read("dropped").to_pylist()}
        assert dropped["b"] == ("failed", "heuristics: the text is longer than 1024 bytes")


def test_text_without_a_language_is_measured_and_judged_as_it_stands(tmp_path, make_documents):
    """Programs, numbers and signs alone: no stop words to count, and no reason to keep what English would not."""
    store, program = Store.open(tmp_path), "def f(x):\n    return [x + 1]\n\nfor i in range(10):\n    print(f(i))\n" * 20
    rows = [("a", "code", program), ("b", "code", "x = 1\n"), ("c", "web", "1 2 3 4 5"), ("d", "web", "!!! ??? *** ---"), ("e", "web", program)]
    given_ = {"documents": make_documents(store, rows)}
    given_["language"] = execute(language, LanguageConfig(), given_, store)
    assert set(given_["language"].read()["language"].to_pylist()) == {"zxx"}
    measured = execute(heuristics, HeuristicsConfig(), given_, store)
    assert measured.read()["stop_words"].null_count == len(rows)
    made = execute(select, SelectConfig(), {"documents": given_["documents"], "signals": [given_["language"], measured]}, store)
    dropped = {row["id"]: row["rule"] for row in made.read("dropped").to_pylist()}
    assert dropped == {"b": "code.min_words", "c": "gopher_quality.min_words", "d": "gopher_repetition.max_top_2gram", "e": "code_reasoning.max_repeated_line_characters"}
