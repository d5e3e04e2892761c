"""The word splitter, by hand and by properties that hold for every text."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.kernels.text.characters import JOINER, SEPARATOR, TERMINAL, code_points, tables
from puna.kernels.text.words import BASE, HAS_LETTER, IS_SYMBOL, join_words, split, split_codes

CASES = {
    "Hello,  world!\n": ["Hello", ",", "world", "!"],
    "don't, l’homme": ["don", "'t", ",", "l", "’homme"],
    "well-known and covid-19": ["well", "-", "known", "and", "covid-19"],
    "pi is 3.14, or 1,000,000.": ["pi", "is", "3.14", ",", "or", "1,000,000", "."],
    "the end.Next one": ["the", "end", ".", "Next", "one"],
    "U.S. and J. Smith": ["U.S.", "and", "J.", "Smith"],
    "so... and ---- so": ["so", "...", "and", "----", "so"],
    "see example.org/a?b": ["see", "example.org", "/", "a?b"],
    "foo_bar(x) __init__": ["foo_bar(x", ")", "_", "_", "init", "_", "_"],
    # Scripts without spaces: split as by ICU's dictionaries.
    "市議会は来週、川にかかる古い橋を修理する。": ["市議会", "は", "来週", "、", "川", "に", "かかる", "古い", "橋", "を", "修理", "する", "。"],
    "人人生而自由": ["人", "人生", "而", "自由"],
    "ที่ดินของเขา": ["ที่", "ดิน", "ของ", "เขา"],
    "iPhone手机2台": ["iPhone", "手机", "2", "台"],
    # Joiners belong to words; zero width spaces and Tibetan syllable marks separate words.
    "می\u200cخواهم": ["می\u200cخواهم"],
    "wood\u00adland \u200eabc\u200f": ["wood\u00adland", "abc\u200f"],
    "ភាសា\u200bខ្មែរ": ["ភាសា", "ខ្មែរ"],
    "བོད་ཡིག": ["བོད", "ཡིག"],
    " \t\n": [],
}


@pytest.mark.parametrize("text", CASES)
def test_by_hand(text):
    assert split(text) == CASES[text]


TEXTS = st.text(st.one_of(st.sampled_from("ab AB.,'-…!1 \n\t(日"), st.characters()), max_size=80)


@settings(deadline=None)  # the first call compiles
@given(TEXTS)
def test_words_are_the_text_without_white_space(text):
    flags, _ = tables()
    joined = "".join(c for c in text if not (c.isspace() or flags[ord(c)] & (JOINER | SEPARATOR)))
    assert "".join(c for word in split(text) for c in word if not flags[ord(c)] & JOINER) == joined
    assert all(word and not any(c.isspace() for c in word) for word in split(text))


@settings(deadline=None)  # the first call compiles
@given(TEXTS)
def test_hashes_are_polynomials_of_the_words(text):
    words = split_codes(code_points(text))
    for word, value, power, flags in zip(split(text), words.hash.tolist(), words.power.tolist(), words.flags.tolist(), strict=True):
        expected = 0
        for c in word:
            expected = (expected * int(BASE) + ord(c) + 1) % 2**64
        assert value == expected
        assert power == pow(int(BASE), len(word), 2**64)
        assert bool(flags & HAS_LETTER) == any(c.isalpha() for c in word)
        assert not (flags & IS_SYMBOL and flags & HAS_LETTER)


LOWER = st.text(st.one_of(st.sampled_from("aAΣσİI ÉȺ\u2126.'\n日"), st.characters(exclude_categories=["Cs"])), max_size=40)


@settings(deadline=None)  # the first call compiles
@given(st.lists(LOWER, max_size=5), st.integers(1, 30))
def test_lines_of_words_in_lower_case(texts, characters):
    expected = [" ".join(split(text[:characters].lower())) for text in texts]
    assert join_words(pa.array(["cut off", *texts], pa.string())[1:], characters).to_pylist() == expected


def test_folding_ignores_case_and_digits():
    a, b, c = (split_codes(code_points(text)).folded.tolist() for text in ("Error 17 AT 2024", "error 99999 at 1", "error x at 1"))
    assert a == b
    assert a[0] == c[0]
    assert a[1] != c[1]


def test_sentence_terminators():
    flags, _ = tables()
    assert all(flags[ord(c)] & TERMINAL for c in ".?!。？！؟।")
    assert not any(flags[ord(c)] & TERMINAL for c in ",;:…\"'”)a ")
