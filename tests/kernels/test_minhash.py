"""The MinHash kernel against datasketch, the xxhash library and brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.kernels import minhash

datasketch = pytest.importorskip("datasketch")
xxhash = pytest.importorskip("xxhash")

SCHEMES = ("affine32", "affine64", "legacy")


def flat(texts):
    encoded = [t.encode() for t in texts]
    offsets = np.cumsum([0, *map(len, encoded)]).astype(np.int64)
    return np.frombuffer(b"".join(encoded), dtype=np.uint8), offsets


def shingles(text, n):
    words = text.split()
    if not words:
        return []
    return [" ".join(words[i : i + n]).encode() for i in range(max(1, len(words) - n + 1))]


def hash32(data):
    return xxhash.xxh64_intdigest(data) & 0xFFFFFFFF


words = st.lists(st.text(alphabet="abcé漢", min_size=1, max_size=12), max_size=40).map(" ".join)


@given(st.lists(words, max_size=6), st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_shingle_hashes_are_xxh64_of_the_word_runs(texts, n):
    hashes, offsets, counts = minhash.shingle_hashes(*flat(texts), n)
    for d, text in enumerate(texts):
        expected = [xxhash.xxh64_intdigest(s) for s in shingles(text, n)]
        assert hashes[offsets[d] : offsets[d + 1]].tolist() == expected
        assert counts[d] == len(text.split())


@pytest.mark.parametrize("size", [*range(70), 1000])
def test_slice_hashes_of_every_length(size):
    data = np.arange(size, dtype=np.uint64).astype(np.uint8)
    assert minhash.slice_hashes(data, np.array([0, size]))[0] == xxhash.xxh64_intdigest(data.tobytes())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("number", "seed"), [(112, 1), (128, 7), (3, 0)])
def test_signatures_equal_datasketch(scheme, number, seed):
    texts = ["the quick brown fox jumps over the lazy dog " * 3, "two words", "", "a b c d e f g"]
    texts = [" ".join(t.split()) for t in texts]
    hashes, offsets, _ = minhash.shingle_hashes(*flat(texts), 5)
    used = hashes if scheme == "affine64" else hashes & np.uint64(0xFFFFFFFF)
    mine = minhash.signatures(used, offsets, number, seed, scheme)
    reference = minhash.signatures_reference(used, offsets, *minhash.permutations(number, seed, scheme), scheme)
    assert (mine == reference).all()
    assert mine.dtype == (np.uint32 if scheme == "affine32" else np.uint64)
    function = xxhash.xxh64_intdigest if scheme == "affine64" else hash32
    for text, row in zip(texts, mine, strict=True):
        other = datasketch.MinHash(num_perm=number, seed=seed, hashfunc=function, scheme=scheme)
        other.update_batch(shingles(text, 5))
        assert row.tolist() == other.hashvalues.tolist()


def test_signatures_of_sha1_hashes_equal_datasketch_defaults():
    text = "one two three four five six seven eight nine ten"
    hashes = np.array([datasketch.hashfunc.sha1_hash32(s) for s in shingles(text, 5)], dtype=np.uint64)
    other = datasketch.MinHash(num_perm=128)
    other.update_batch(shingles(text, 5))
    assert minhash.signatures(hashes, np.array([0, len(hashes)]), 128, 1)[0].tolist() == other.hashvalues.tolist()


@given(st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=20), min_size=1, max_size=5), st.sampled_from(SCHEMES))
@settings(max_examples=60, deadline=None)
def test_kernel_equals_reference(documents, scheme):
    mask = (1 << 64) - 1 if scheme == "affine64" else (1 << 32) - 1
    hashes = np.array([h & mask for d in documents for h in d], dtype=np.uint64)
    offsets = np.cumsum([0, *map(len, documents)]).astype(np.int64)
    mine = minhash.signatures(hashes, offsets, 24, 3, scheme)
    assert (mine == minhash.signatures_reference(hashes, offsets, *minhash.permutations(24, 3, scheme), scheme)).all()


def test_an_index_built_with_one_serves_the_other():
    base = [f"w{i}" for i in range(60)]
    texts = [" ".join(base), " ".join([*base[:-1], "changed"]), " ".join(f"x{i}" for i in range(60))]
    hashes, offsets, _ = minhash.shingle_hashes(*flat(texts), 5)
    mine = minhash.signatures(hashes & np.uint64(0xFFFFFFFF), offsets, 112, 1)
    index = datasketch.MinHashLSH(num_perm=112, params=(14, 8))
    for d, row in enumerate(mine):
        index.insert(d, datasketch.MinHash(num_perm=112, hashvalues=row, seed=1, scheme="affine32"))
    theirs = datasketch.MinHash(num_perm=112, hashfunc=hash32)
    theirs.update_batch(shingles(texts[0], 5))
    keys = minhash.band_keys(mine, 14, 8)
    own = {d for d in range(3) if (keys[d] == keys[0]).any()}
    assert set(index.query(theirs)) == own == {0, 1}


@given(st.integers(2, 12), st.integers(1, 4), st.integers(1, 3), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_components_equal_brute_force(documents, bands, values, seed):
    keys = np.random.default_rng(seed).integers(0, values * 3, (documents, bands)).astype(np.uint64)
    reach = (keys[:, None] == keys[None]).any(-1)
    for _ in range(documents):
        reach = (reach.astype(int) @ reach.astype(int)) > 0
    expected = [int(np.flatnonzero(row)[0]) for row in reach]
    assert minhash.components(keys).tolist() == expected


def test_band_keys_agree_exactly_where_rows_agree():
    signatures = np.random.default_rng(0).integers(0, 2, (40, 12)).astype(np.uint32)
    keys = minhash.band_keys(signatures, 4, 3)
    for i, j in itertools.combinations(range(40), 2):
        same = (signatures[i].reshape(4, 3) == signatures[j].reshape(4, 3)).all(1)
        assert ((keys[i] == keys[j]) == same).all()
    assert minhash.band_keys(signatures[:0], 4, 3).shape == (0, 4)


@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)), st.lists(st.integers(0, 30)))
@settings(max_examples=100, deadline=None)
def test_common_and_absent_runs(left, right, sequence):
    a, b = (np.array(sorted(s), dtype=np.uint64) for s in (left, right))
    assert minhash.common(a, b) == len(left & right)
    runs = [len(list(group)) for absent, group in itertools.groupby(v not in right for v in sequence) if absent]
    assert minhash.longest_absent_run(np.array(sequence, dtype=np.uint64), b) == max(runs, default=0)


def test_widened_shingles_tell_apart_what_the_short_ones_cannot():
    # both texts hold the pairs ab, ba, ac, ca; runs of four differ
    data, offsets = flat(["a b a c a b a c a", "a b a b a c a c a"])
    hashes, where, _ = minhash.shingle_hashes(data, offsets, 2)
    first, second = hashes[: where[1]], hashes[where[1] :]
    assert set(first.tolist()) == set(second.tolist())
    wide, other = minhash.widened(first, 2), minhash.widened(second, 2)
    assert len(wide) == 6
    assert wide[0] == wide[4]  # "a b a c" begins at words 0 and 4
    assert len(set(wide.tolist())) == 4
    assert wide[0] in other.tolist()  # "a b a c" is also in the second text,
    assert wide[3] not in other.tolist()  # "c a b a" is not


def test_a_signature_estimates_the_jaccard_similarity():
    generator = np.random.default_rng(5)
    shared = generator.integers(0, 2**32, 800, dtype=np.uint64)
    left = np.concatenate([shared, generator.integers(0, 2**32, 100, dtype=np.uint64)])
    right = np.concatenate([shared, generator.integers(0, 2**32, 100, dtype=np.uint64)])
    both = minhash.signatures(np.concatenate([left, right]), np.array([0, 900, 1800]), 2048)
    # J = 800 / 1000; the standard error of 2048 permutations is 0.009
    assert abs((both[0] == both[1]).mean() - 0.8) < 0.04
