"""Candidates and their verification, compared with brute force."""

from __future__ import annotations

import itertools

import datasketch
import numpy as np
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.kernels import minhash
from puna.stages.curate.minhash import near_duplicates


@given(st.integers(2, 12), st.integers(1, 4), st.integers(1, 3), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_components_equal_brute_force(documents, bands, values, seed):
    keys = np.random.default_rng(seed).integers(0, values * 3, (documents, bands)).astype(np.uint64)
    reach = (keys[:, None] == keys[None]).any(-1)
    for _ in range(documents):
        reach = (reach.astype(int) @ reach.astype(int)) > 0
    expected = [int(np.flatnonzero(row)[0]) for row in reach]
    assert near_duplicates.components(keys).tolist() == expected


def test_band_keys_agree_exactly_where_rows_agree():
    signatures = np.random.default_rng(0).integers(0, 2, (40, 12)).astype(np.uint32)
    keys = near_duplicates.band_keys(signatures, 4, 3)
    for i, j in itertools.combinations(range(40), 2):
        same = (signatures[i].reshape(4, 3) == signatures[j].reshape(4, 3)).all(1)
        assert ((keys[i] == keys[j]) == same).all()
    assert near_duplicates.band_keys(signatures[:0], 4, 3).shape == (0, 4)


SHINGLES = st.lists(st.integers(0, 30) | st.sampled_from([2**63, 2**64 - 1]))  # small hashes share slots of a table


@given(st.lists(SHINGLES, min_size=2, max_size=5))
@settings(max_examples=100, deadline=None)
def test_sets_and_absent_runs(members):
    counts = np.array([len(one) for one in members])
    starts = np.cumsum(counts) - counts
    sets = near_duplicates.empty_sets(starts, counts)
    arrays = [np.array(one, dtype=np.uint64) for one in members]
    for m in (0, 1, 0, *range(2, len(members))):  # making a set again has no effect
        near_duplicates.make_set(sets, m, arrays[m])
    for m, k in itertools.permutations(range(len(members)), 2):
        left, right = set(members[m]), set(members[k])
        assert near_duplicates.distinct(arrays[m]).tolist() == sorted(left)
        assert near_duplicates.common(near_duplicates.distinct(arrays[m]), near_duplicates.distinct(arrays[k])) == len(left & right)
        assert (sets.sizes[m], near_duplicates.count_shared(sets, m, k)) == (len(left), len(left & right))
        runs = [len(list(group)) for absent, group in itertools.groupby(v not in right for v in members[m]) if absent]
        assert near_duplicates.longest_absent_run(arrays[m], sets, k) == max(runs, default=0)


def brute_force(documents, groups, signatures, criteria):
    """Compare members in order with all kept ones, using Python sets; only for texts that are not repetitive."""
    kept, out = [], []
    for m, own in enumerate(documents):
        best = None
        for k in kept:
            if not set(groups[m].tolist()) & set(groups[k].tolist()) or (signatures[m] == signatures[k]).mean() < criteria.estimate:
                continue
            left, right = set(own), set(documents[k])
            similarity = len(left & right) / (len(left) if criteria.containment else len(left | right))
            run = max((len(list(g)) for absent, g in itertools.groupby(v not in right for v in own) if absent), default=0)
            new = max(0, run - criteria.words + 1)
            if similarity < criteria.similarity[0] or new > max(criteria.new_words, criteria.new_share * (len(own) + criteria.words - 1)):
                continue
            if best is None or similarity > best[1]:
                best = (k, similarity, new)
        if best is None:
            kept.append(m)
        out.append(best or (-1, 0.0, 0))
    return out


@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([0.0, 0.5]), st.sampled_from([0, 6]))
@settings(max_examples=80, deadline=None)
def test_resolve_equals_brute_force(seed, containment, estimate, new_words):
    generator = np.random.default_rng(seed)
    bases = [generator.integers(0, 2**63, 40).astype(np.uint64) for _ in range(3)]
    documents = []
    for _ in range(14):
        one = bases[generator.integers(3)].copy()[: generator.integers(25, 41)]
        start, length = generator.integers(0, 20), generator.integers(0, 12)
        one[start : start + length] = generator.integers(0, 2**63, min(length, len(one) - start))
        documents.append(one)
    count = np.array([len(d) for d in documents])
    start = np.cumsum(count) - count
    sequence = np.concatenate(documents)
    signatures = generator.integers(0, 2, (14, 8)).astype(np.uint32)
    groups = generator.integers(0, 5, (14, 2)) + np.array([0, 5])
    levels = np.zeros(20)
    criteria = near_duplicates.Criteria(5, containment, levels + 0.6, levels, estimate, new_words, 0.05)
    found = near_duplicates.resolve(signatures, groups, count + 4, start, count, sequence, criteria)
    pairs = itertools.permutations(range(14), 2)
    company = {i for i, j in pairs if (groups[i] == groups[j]).any() and (signatures[i] == signatures[j]).mean() >= estimate}
    assert np.flatnonzero(near_duplicates.near(signatures, groups, estimate)).tolist() == sorted(company)
    expected = brute_force([d.tolist() for d in documents], groups, signatures, criteria)
    assert list(zip(found.survivor.tolist(), found.similarity.tolist(), found.new_words.tolist(), strict=True)) == expected


def test_an_index_of_datasketch_and_our_bands_agree():
    base = [f"w{i}" for i in range(60)]
    texts = [" ".join(base), " ".join([*base[:-1], "changed"]), " ".join(f"x{i}" for i in range(60))]
    hashed = [[xxhash.xxh64_intdigest(s) & 0xFFFFFFFF for s in word_runs(text, 5)] for text in texts]
    flat, offsets = np.array(list(itertools.chain(*hashed)), np.uint64), np.cumsum([0, *map(len, hashed)]).astype(np.int64)
    mine = minhash.signatures(flat, offsets, 112, 1)
    index = datasketch.MinHashLSH(num_perm=112, params=(14, 8))
    for d, row in enumerate(mine):
        index.insert(d, datasketch.MinHash(num_perm=112, hashvalues=row, seed=1, scheme="affine32"))
    theirs = datasketch.MinHash(num_perm=112, hashfunc=lambda data: xxhash.xxh64_intdigest(data) & 0xFFFFFFFF)
    theirs.update_batch(word_runs(texts[0], 5))
    keys = near_duplicates.band_keys(mine, 14, 8)
    own = {d for d in range(3) if (keys[d] == keys[0]).any()}
    assert set(index.query(theirs)) == own == {0, 1}


def test_the_stage_on_datasketch_decides_and_indexes_alike(tmp_path):
    from puna.stages.contract import execute
    from puna.stages.curate.minhash.index import signature_table
    from puna.stages.curate.minhash_dedup import MinhashDedupConfig, minhash_dedup
    from puna.storage import Store

    from .test_minhash_update import corpus, documents

    store = Store.open(tmp_path)
    made = documents(store, corpus(5))
    ours, theirs = (
        execute(minhash_dedup, MinhashDedupConfig(keep_index=True, engine=engine), {"documents": made}, store)
        for engine in ("puna", "datasketch")
    )
    assert ours.manifest.data_digest == theirs.manifest.data_digest and ours.key != theirs.key
    table, texts = signature_table(ours), {row["id"]: row["text"] for row in made.read().to_pylist()}
    told = {name.decode(): value.decode() for name, value in table.schema.metadata.items()}
    assert told == {"bands": "18", "rows": "6", "seed": "1", "scheme": "affine32"}
    index = datasketch.MinHashLSH(num_perm=18 * 6, params=(18, 6))
    for row in table.to_pylist():
        index.insert(row["id"], datasketch.MinHash(18 * 6, 1, hashvalues=row["signature"], scheme="affine32"))
    for removed in ours.read("duplicates").to_pylist():
        asked = datasketch.MinHash(num_perm=18 * 6, seed=1, hashfunc=lambda data: xxhash.xxh64_intdigest(data) & 0xFFFFFFFF)
        asked.update_batch(word_runs(texts[removed["kept_id"]], 5))
        assert {removed["id"], removed["kept_id"]} <= set(index.query(asked))
    assert "5empty" not in index.keys


def test_without_words_the_table_of_signatures_has_its_types(tmp_path):
    from puna.stages.contract import execute
    from puna.stages.curate.minhash.index import signature_table
    from puna.stages.curate.minhash_dedup import MinhashDedupConfig, minhash_dedup
    from puna.storage import Store

    from .test_minhash_update import corpus, documents

    store = Store.open(tmp_path)
    some, none = (
        signature_table(execute(minhash_dedup, MinhashDedupConfig(keep_index=True), {"documents": documents(store, texts)}, store))
        for texts in (corpus(5), corpus(5)[-1:])
    )
    assert len(none) == 0 < len(some) and none.schema == some.schema


def word_runs(text, n):
    words = text.split()
    return [" ".join(words[i : i + n]).encode() for i in range(len(words) - n + 1)]
