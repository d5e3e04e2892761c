"""Near-duplicates: recall compared with brute force, hard negatives, survivors and evidence."""

from __future__ import annotations

import itertools
import sys
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pytest

from puna.kernels.text import shingles
from puna.kernels.text.shingles import normalize
from puna.kernels.text.strings import buffers
from puna.stages.contract import execute
from puna.stages.curate.minhash_dedup import MinhashDedupConfig, minhash_dedup
from puna.storage import PunaError, Store

START = datetime(2024, 1, 1, tzinfo=UTC)


@pytest.fixture(autouse=True, params=["in memory", "by exchanges"])
def path(request, monkeypatch):
    if request.param == "by exchanges":
        monkeypatch.setattr(sys.modules[minhash_dedup.function.__module__], "AT_ONCE", 0)


def run(tmp_path, texts, config=None, sources=None, days=None, **how):
    store = Store.open(tmp_path)
    rows = [
        {
            "id": f"{n:05d}",
            "url": f"https://x.com/{n}",
            "fetched_at": START + timedelta(days=days[n] if days else 0),
            "source": sources[n] if sources else "web",
            "title": None,
            "text": text,
        }
        for n, text in enumerate(texts)
    ]
    documents = store.import_table("documents", pa.Table.from_pylist(rows))
    made = execute(minhash_dedup, config or MinhashDedupConfig(), {"documents": documents}, store, **how)
    evidence = (
        {int(r["id"]): (int(r["kept_id"]), r["similarity"]) for r in made.read("duplicates").to_pylist()}
        if "duplicates" in made.tables
        else {}
    )
    assert sorted([int(i) for i in made.read()["id"].to_pylist()] + list(evidence)) == list(range(len(texts)))
    return evidence


def words(generator, number, vocabulary=5000):
    return [f"w{n}" for n in generator.integers(0, vocabulary, number)]


def runs(text, n=5):
    parts = normalize(text).split()
    return {tuple(parts[i : i + n]) for i in range(max(1, len(parts) - n + 1))} if parts else set()


def jaccard(left, right):
    a, b = runs(left), runs(right)
    return len(a & b) / len(a | b) if a | b else 0.0


def edited(generator, base, edits):
    out = list(base)
    for place in generator.choice(len(out), edits, replace=False):
        out[place] = f"new{generator.integers(0, 10**9)}"
    return out


def test_recall_against_brute_force(tmp_path):
    generator = np.random.default_rng(0)
    texts = []
    for _ in range(150):
        base = words(generator, int(generator.integers(120, 400)))
        texts += [" ".join(base), " ".join(edited(generator, base, int(len(base) * generator.uniform(0, 0.04))))]
    pairs = [(i, j) for i, j in itertools.combinations(range(len(texts)), 2) if i // 2 == j // 2 and jaccard(texts[i], texts[j]) >= 0.8]
    assert len(pairs) > 60
    # 20 bands of 5 find a pair at J = 0.8 with probability 1 - (1 - 0.8 ** 5) ** 20 = 0.9996
    evidence = run(tmp_path, texts, MinhashDedupConfig(bands=20, rows=5))
    found = sum(i in evidence or j in evidence for i, j in pairs)
    assert found >= 0.99 * len(pairs)
    for removed, (kept, similarity) in evidence.items():
        assert similarity == pytest.approx(jaccard(texts[removed], texts[kept]))
        assert similarity >= 0.8
        assert kept not in evidence


def test_exact_copies_case_punctuation_and_accents(tmp_path):
    texts = ["Une très belle journée, n'est-ce pas? Oui, vraiment!", "une TRES belle journee n est ce pas -- oui vraiment", "autre chose"]
    assert run(tmp_path, texts) == {1: (0, 1.0)} or run(tmp_path, texts) == {0: (1, 1.0)}


def test_survivors_are_verified_themselves_never_along_a_chain(tmp_path):
    generator = np.random.default_rng(1)
    base = words(generator, 300)
    chain = [base]
    for step in range(8):  # each differs from the previous one in 4 new places: neighbours 0.88, ends far apart
        following = list(chain[-1])
        for place in range(step * 4, step * 4 + 4):
            following[place * 9 % 300] = f"s{step}-{place}"
        chain.append(following)
    texts = [" ".join(c) for c in chain]
    assert jaccard(texts[0], texts[1]) > 0.85
    assert jaccard(texts[0], texts[8]) < 0.5
    evidence = run(tmp_path, texts, MinhashDedupConfig(bands=40, rows=4))
    assert evidence
    for removed, (kept, similarity) in evidence.items():
        assert kept not in evidence
        assert similarity == pytest.approx(jaccard(texts[removed], texts[kept])) and similarity >= 0.8


def test_templates_with_a_shared_preamble_stay(tmp_path):
    generator = np.random.default_rng(2)
    licence = words(generator, 900)
    texts = [" ".join([*licence, *words(generator, 80)]) for _ in range(20)]
    assert jaccard(texts[0], texts[1]) > 0.8
    assert run(tmp_path, texts, MinhashDedupConfig(bands=40, rows=4)) == {}
    # without the limit on new passages, the shared licence would remove all but one
    assert len(run(tmp_path, texts, MinhashDedupConfig(bands=40, rows=4, max_new_words=10_000))) == 19


def test_filled_in_templates_below_the_threshold_stay(tmp_path):
    towns = [
        f"The town of T{n} lies in county C{n} and has {1000 + n * 37} inhabitants. Its mayor is M{n}. Founded in {1200 + n} by F{n}, "
        f"it is known for its P{n}. The nearest station is S{n}, from where trains go to D{n} every {n} minutes."
        for n in range(60)
    ]
    assert run(tmp_path, towns, MinhashDedupConfig(bands=40, rows=2)) == {}


@pytest.mark.parametrize(("vocabulary", "length"), [(2, 60), (2, 400), (3, 900), (4, 2500), (4, 6000), (6, 20_000)])
def test_tables_of_a_tiny_vocabulary_stay(tmp_path, vocabulary, length):
    generator = np.random.default_rng(3)
    tables = [" ".join(generator.choice([f"w{n}" for n in range(vocabulary)], length)) for _ in range(12)]
    if length >= 400:  # nearly all possible runs of five occur in both
        assert jaccard(tables[0], tables[1]) > 0.8
    assert run(tmp_path, tables) == {}
    again = run(tmp_path, [*tables, tables[0]])
    assert again == {12: (0, 1.0)}


def test_a_repetitive_document_with_edits_is_still_found(tmp_path):
    generator = np.random.default_rng(8)
    passage = words(generator, 400)
    base = [*passage * 4, *words(generator, 200)]
    assert len(runs(" ".join(base))) < 0.4 * len(base)
    texts = [" ".join(base), " ".join(edited(generator, base, 6))]
    assert jaccard(*texts) > 0.8
    assert len(run(tmp_path, texts, MinhashDedupConfig(bands=40, rows=4))) == 1


def test_long_unrelated_books_stay(tmp_path):
    generator = np.random.default_rng(4)
    ranks = 1 / np.arange(1, 2001)
    texts = [" ".join(f"w{n}" for n in generator.choice(2000, 30_000, p=ranks / ranks.sum())) for _ in range(6)]
    assert run(tmp_path, texts, MinhashDedupConfig(bands=20, rows=2)) == {}


@pytest.mark.parametrize(("survivor", "kept"), [("longest", 2), ("latest", 1)])
def test_who_survives(tmp_path, survivor, kept):
    base = [f"w{n}" for n in range(200)]
    texts = [" ".join(base), " ".join(base[:-2]), " ".join([*base, "and", "more", "words"])]
    evidence = run(tmp_path, texts, MinhashDedupConfig(survivor=survivor), days=[1, 9, 2])
    assert {k for k, _ in evidence.values()} == {kept}
    assert len(evidence) == 2


def test_the_evidence_says_by_what_the_survivor_is_preferred():
    said = {survivor: MinhashDedupConfig(survivor=survivor).detail("a", 3) for survivor in ("longest", "latest")}
    assert said["longest"] == "of a, preferred by source, then length; longest passage of its own: 3 words"
    assert said["latest"] == "of a, preferred by source, then time of fetching; longest passage of its own: 3 words"
    assert MinhashDedupConfig(prefer_sources=(), verify=False).detail("a", 0) == "of a, preferred by length; not verified"


def test_ties_go_to_the_smallest_id_and_preferred_sources_come_first(tmp_path):
    texts = [" ".join(f"w{n}" for n in range(50))] * 3
    assert {k for k, _ in run(tmp_path, texts).values()} == {0}
    assert {k for k, _ in run(tmp_path, texts, sources=["web", "web", "code"]).values()} == {2}
    config = MinhashDedupConfig(prefer_sources=())
    assert {k for k, _ in run(tmp_path, texts, config, sources=["web", "web", "code"]).values()} == {0}


def test_containment(tmp_path):
    generator = np.random.default_rng(5)
    base = words(generator, 300)
    texts = [" ".join(base), " ".join(base[:150])]
    index = {"bands": 60, "rows": 2}
    assert run(tmp_path, texts, MinhashDedupConfig(**index)) == {}
    assert run(tmp_path, texts, MinhashDedupConfig(similarity="containment", **index)) == {1: (0, 1.0)}


@pytest.mark.parametrize("text", ["", "...", "one", "one two three"])
def test_short_documents(tmp_path, text):
    evidence = run(tmp_path, [text, text, "another one"])
    assert evidence == ({} if not normalize(text) else {1: (0, 1.0)})


def test_scripts_without_spaces_are_compared_word_by_word(tmp_path):
    text = "これは文字コードの検出をテストするための日本語の文章です。川にかかる古い橋を修理するかどうかを決める予定です。"
    assert 20 < len(normalize(text).split()) < 40
    assert len(run(tmp_path, [text, text[:-3] + "。", "全く別の内容の短い文書がここにあります。"])) == 1


def test_the_best_score_survives_whatever_the_length(tmp_path):
    """Four copies, each slightly longer than the previous one; scores give another order, and a missing score ranks last."""
    base = words(np.random.default_rng(0), 300)
    texts = [" ".join(base + words(np.random.default_rng(9), n)) for n in range(4)]
    store = Store.open(tmp_path)
    rows = [
        {"id": f"{n}", "url": f"https://x.com/{n}", "fetched_at": START, "source": "web", "title": None, "text": text}
        for n, text in enumerate(texts)
    ]
    documents = store.import_table("documents", pa.Table.from_pylist(rows))

    def survivor(scores, **fields):
        signals = store.import_table("signals", pa.table({"id": [str(n) for n in range(4)], "quality": pa.array(scores, pa.float64())}))
        config = MinhashDedupConfig(survivor="best_score", **fields)
        made = execute(minhash_dedup, config, {"documents": documents, "signals": signals}, store)
        kept = made.read()["id"].to_pylist()
        assert set(made.read("duplicates")["kept_id"].to_pylist()) == set(kept)
        assert all(said.startswith(f"of {kept[0]}, preferred by source, then quality; ") for said in made.read("dropped")["detail"].to_pylist())
        return kept

    assert survivor([0.1, 0.9, 0.3, 0.2]) == ["1"]
    assert survivor([0.9, 0.1, 0.3, None]) == ["0"]
    assert survivor([None, None, 0.01, None]) == ["2"]
    assert survivor([0.5, 0.5, 0.5, 0.5]) == ["3"]  # equal scores: the longest
    assert survivor([None, None, None, None]) == ["3"]
    with pytest.raises(PunaError, match="no signal 'other'; it has quality"):
        survivor([1, 1, 1, 1], score="other")
    with pytest.raises(PunaError, match="give signals that contain the score"):
        execute(minhash_dedup, MinhashDedupConfig(survivor="best_score"), {"documents": documents}, store)


def test_the_table_of_characters_and_the_words_of_normal_texts():
    points = [chr(p) for p in range(shingles.LIMIT)]
    assert [shingles._form(c) for c in points] == [shingles.character(c).encode() for c in points]
    generator = np.random.default_rng(0)
    texts = ["", "a", *(" ".join(words(generator, int(n))) for n in generator.integers(0, 9, 20)), "", "これは b", "", "ガx日本2語 é", "ที่ดิน ของเขา",
             "one “two” 日本語が three&more", "नमस्ते दुनिया, ๆที่ดิน"]  # fmt: skip
    made = shingles.words_of(*buffers(pa.array([normalize(text) for text in texts])))
    expected = shingles.normal(*buffers(pa.array(texts)))
    assert all(np.array_equal(one, other) for one, other in zip(made, expected, strict=True))


@pytest.mark.parametrize("options", [{}, {"survivor": "latest"}, {"verify": False}, {"prefer_sources": ("books",)}])
def test_small_and_large_corpora_are_compared_alike(tmp_path, monkeypatch, options):
    generator = np.random.default_rng(5)
    texts = []
    for _ in range(60):
        base = words(generator, int(generator.integers(60, 200)))
        texts += [" ".join(edited(generator, base, int(generator.integers(0, 9)))) for _ in range(int(generator.integers(1, 5)))]
    sources = ["books" if generator.random() < 0.3 else "web" for _ in texts]
    days = generator.integers(0, 9, len(texts)).tolist()
    found = []
    for most, part in ((0, 1 << 17), (1 << 24, 1 << 17), (1 << 24, 16)):
        monkeypatch.setattr(sys.modules[minhash_dedup.function.__module__], "AT_ONCE", most)
        monkeypatch.setattr(sys.modules[minhash_dedup.function.__module__], "SHARD_ROWS", part)
        folder = tmp_path / f"{most}-{part}"
        run(folder, texts, MinhashDedupConfig(**options), sources, days)
        (made,) = [one for one in Store.open(folder).artifacts() if one.manifest.stage == "minhash_dedup"]
        found.append((made.data_digest, made.read("duplicates"), made.read("dropped"), made.manifest.metrics))
    assert found[0] == found[1] == found[2] and found[0][1].num_rows > 10


def test_no_documents_have_no_near_duplicates(tmp_path, make_documents):
    store = Store.open(tmp_path)
    made = execute(minhash_dedup, MinhashDedupConfig(), {"documents": make_documents(store, [])}, store)
    assert made.rows() == 0 and made.manifest.metrics["candidates"] == 0
