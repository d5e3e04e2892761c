"""The MinHash kernel against datasketch, the xxhash library and brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.kernels import minhash

datasketch = pytest.importorskip("datasketch")
xxhash = pytest.importorskip("xxhash")


def shingles(text, n):
    words = text.split()
    if not words:
        return []
    return [" ".join(words[i : i + n]).encode() for i in range(max(1, len(words) - n + 1))]


def hash32(data):
    return xxhash.xxh64_intdigest(data) & 0xFFFFFFFF


def hashed(texts, n=5):
    """Return XXH64 of the shingles of all texts, and their offsets."""
    found = [[xxhash.xxh64_intdigest(s) for s in shingles(t, n)] for t in texts]
    return np.array([h for f in found for h in f], dtype=np.uint64), np.cumsum([0, *map(len, found)]).astype(np.int64)


@pytest.mark.parametrize(("number", "seed"), [(112, 1), (128, 7), (3, 0)])
def test_signatures_equal_datasketch(number, seed):
    texts = ["the quick brown fox jumps over the lazy dog " * 3, "two words", "", "a b c d e f g"]
    texts = [" ".join(t.split()) for t in texts]
    hashes, offsets = hashed(texts)
    mine = minhash.signatures(hashes, offsets, number, seed)
    reference = minhash.signatures_reference(hashes, offsets, *minhash.permutations(number, seed))
    assert (mine == reference).all()
    assert mine.dtype == np.uint32
    for text, row in zip(texts, mine, strict=True):
        other = datasketch.MinHash(num_perm=number, seed=seed, hashfunc=hash32, scheme="affine32")
        other.update_batch(shingles(text, 5))
        assert row.tolist() == other.hashvalues.tolist()


def test_signatures_of_sha1_hashes_equal_datasketch_defaults():
    text = "one two three four five six seven eight nine ten"
    hashes = np.array([datasketch.hashfunc.sha1_hash32(s) for s in shingles(text, 5)], dtype=np.uint64)
    other = datasketch.MinHash(num_perm=128)
    other.update_batch(shingles(text, 5))
    assert minhash.signatures(hashes, np.array([0, len(hashes)]), 128, 1)[0].tolist() == other.hashvalues.tolist()


@given(st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=20), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_kernel_equals_reference(documents):
    hashes = np.array([h for d in documents for h in d], dtype=np.uint64)
    offsets = np.cumsum([0, *map(len, documents)]).astype(np.int64)
    mine = minhash.signatures(hashes, offsets, 24, 3)
    assert (mine == minhash.signatures_reference(hashes, offsets, *minhash.permutations(24, 3))).all()


def test_a_signature_estimates_the_jaccard_similarity():
    generator = np.random.default_rng(5)
    shared = generator.integers(0, 2**32, 800, dtype=np.uint64)
    left = np.concatenate([shared, generator.integers(0, 2**32, 100, dtype=np.uint64)])
    right = np.concatenate([shared, generator.integers(0, 2**32, 100, dtype=np.uint64)])
    both = minhash.signatures(np.concatenate([left, right]), np.array([0, 900, 1800]), 2048)
    # J = 800 / 1000; the standard error of 2048 permutations is 0.009
    assert abs((both[0] == both[1]).mean() - 0.8) < 0.04
