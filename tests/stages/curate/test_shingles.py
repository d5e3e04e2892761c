"""Normalized words and shingle hashes, compared with plain Python and the xxhash library."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.kernels.text import hashing, normal_words

xxhash = pytest.importorskip("xxhash")

# a to c map to themselves, upper case to lower case, é to e, ß to ss, Han characters to themselves as words; all else separates words
FORMS = [b" "] * 0x9FFF
FORMS[ord("é")], FORMS[ord("ß")], FORMS[0x301] = b"e", b"ss", b""
for letter in "abc":
    FORMS[ord(letter)] = FORMS[ord(letter.upper())] = letter.encode()
for point in range(0x4E00, 0x9FFF):
    FORMS[point] = f" {chr(point)} ".encode()
TABLE = normal_words.Table.of(FORMS)
texts = st.lists(st.text(alphabet="abcABCéß\u0301漢字 -\n😀\U0010ffff", max_size=60), max_size=6)


def flat(documents):
    encoded = [t.encode() for t in documents]
    return np.frombuffer(b"".join(encoded), dtype=np.uint8), np.cumsum([0, *map(len, encoded)]).astype(np.int64)


def plain(text):
    return " ".join("".join(FORMS[ord(c)].decode() if ord(c) < len(FORMS) else " " for c in text).split())


def runs(text, n):
    words = text.split()
    return [" ".join(words[i : i + n]).encode() for i in range(max(1, len(words) - n + 1))] if words else []


@given(texts, st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_normal_words_equal_plain_python(documents, skipped):
    data, offsets = flat(documents)
    skipped = min(skipped, len(documents))
    words = normal_words.normal_words(data, offsets[skipped:], TABLE)
    expected = [plain(t) for t in documents[skipped:]]
    assert words.texts() == expected
    for d, text in enumerate(expected):
        whole = text.encode()
        begins = words.begins[words.words_D1[d] : words.words_D1[d + 1]].tolist()
        assert begins == [i for i in range(len(whole)) if i == 0 or whole[i - 1] == 32]


@given(texts, st.integers(1, 7))
@settings(max_examples=100, deadline=None)
def test_shingle_hashes_are_xxh64_of_the_word_runs(documents, n):
    words = normal_words.normal_words(*flat(documents), TABLE)
    hashes, offsets = normal_words.shingle_hashes(words, n)
    for d, text in enumerate(documents):
        expected = [xxhash.xxh64_intdigest(s) for s in runs(plain(text), n)]
        assert hashes[offsets[d] : offsets[d + 1]].tolist() == expected


@pytest.mark.parametrize("size", [*range(70), 1000])
def test_slice_hashes_of_every_length(size):
    data = np.arange(size, dtype=np.uint64).astype(np.uint8)
    assert hashing.slice_hashes(data, np.array([0, size]))[0] == xxhash.xxh64_intdigest(data.tobytes())


def test_widened_shingles_tell_apart_what_the_short_ones_cannot():
    # both texts contain the pairs ab, ba, ac, ca; runs of four differ
    words = normal_words.normal_words(*flat(["a b a c a b a c a", "a b a b a c a c a"]), TABLE)
    hashes, where = normal_words.shingle_hashes(words, 2)
    first, second = hashes[: where[1]], hashes[where[1] :]
    assert set(first.tolist()) == set(second.tolist())
    wide, other = normal_words.widen(first, 2), normal_words.widen(second, 2)
    assert len(wide) == 6
    assert wide[0] == wide[4]  # "a b a c" begins at words 0 and 4
    assert len(set(wide.tolist())) == 4
    assert wide[0] in other.tolist()  # "a b a c" is also in the second text,
    assert wide[3] not in other.tolist()  # "c a b a" is not
