"""The held-out split by its properties: shares, stability, versions of a page, small categories."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from puna.stages.contract import execute
from puna.stages.draws import uniform
from puna.stages.pretrain.split import SplitConfig, sides_of, split
from puna.storage import Artifact, PunaError, Store


def corpus(store: Store, rows: list[tuple[str, str, int]]) -> dict[str, Artifact]:
    """Return documents and their categories from (address, category, size)."""
    ids = [f"{i:032x}" for i in range(len(rows))]
    documents = store.import_table("documents", pa.table({
        "id": ids, "url": [r[0] for r in rows], "fetched_at": [datetime(2024, 1, 1, tzinfo=UTC)] * len(rows),
        "source": ["web"] * len(rows), "title": pa.array([None] * len(rows), pa.string()), "text": ["x" * r[2] for r in rows],
    }))  # fmt: skip
    return {"documents": documents, "signals": store.import_table("signals", pa.table({"id": ids, "domain": pa.array([r[1] for r in rows], pa.string())}))}


def held_out(addresses: list[str], categories: list[str], config: SplitConfig, parts: int = 1) -> NDArray[np.bool_]:
    """Return a mask of the held-out documents, with their rows in `parts` parts."""
    chance = uniform(addresses, config.seed, "heldout")
    rows = pa.table({"chance": chance, "category": categories})
    each = [rows.take(pa.array(np.arange(n, len(rows), parts))) for n in range(parts)]
    return sides_of(lambda function, *args: [function(part, *args) for part in each], config).held_out(chance)


def plain(addresses: list[str], categories: list[str], config: SplitConfig) -> list[bool]:
    """Return the same mask computed from all rows at once, directly by the rule."""
    chance = uniform(addresses, config.seed, "heldout").tolist()
    gone = set()
    for category in set(categories):
        own = sorted(c for c, name in zip(chance, categories, strict=True) if name == category)
        least = min(config.heldout_least, len(own) // 3)
        given = {c for c in own if c < config.heldout_fraction or (least and c <= own[least - 1])}
        if not set(own) <= given:
            gone |= given
    return [config.heldout_fraction > 0 and c in gone for c in chance]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.sampled_from("abc")), min_size=1, max_size=40),
    st.sampled_from([0.0, 0.1, 0.5, 0.9]), st.integers(0, 4), st.integers(1, 4), st.integers(0, 50),
)  # fmt: skip
def test_parts_decide_as_all_rows_together(rows: list[tuple[int, str]], fraction: float, least: int, parts: int, seed: int) -> None:
    config = SplitConfig(heldout_fraction=fraction, heldout_least=least, seed=seed)
    addresses, categories = [str(page) for page, _ in rows], [category for _, category in rows]
    assert held_out(addresses, categories, config, parts).tolist() == plain(addresses, categories, config)


def pages(count: int, start: int = 0) -> list[str]:
    return [f"https://x.org/{i}" for i in range(start, start + count)]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_share_is_met_and_every_category_has_some(seed: int) -> None:
    config = SplitConfig(seed=seed, heldout_fraction=0.1)
    categories = ["a"] * 4000 + ["b"] * 20 + ["c"] * 6 + ["d"] * 2
    found = held_out(pages(4028), categories, config)
    # 400 expected, standard deviation sqrt(4000 * 0.1 * 0.9) = 19.
    assert 320 < found[:4000].sum() < 480
    assert found[4000:4020].sum() >= 4 and found[4020:4026].sum() >= 2
    assert all((~found[a:b]).sum() > 0 for a, b in ((0, 4000), (4000, 4020), (4020, 4026), (4026, 4028)))
    assert not held_out(pages(100), ["a"] * 100, SplitConfig(heldout_fraction=0.0)).any()


def test_a_page_stays_on_its_side_when_the_corpus_grows() -> None:
    config = SplitConfig(heldout_fraction=0.1, heldout_least=0)
    small, large = held_out(pages(300), ["a"] * 300, config), held_out(pages(3000), ["a"] * 3000, config)
    assert (small == large[:300]).all() and small.any()
    assert not (small == held_out(pages(300), ["a"] * 300, SplitConfig(seed=1, heldout_fraction=0.1, heldout_least=0))).all()


def test_versions_of_a_page_are_on_one_side(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    versions = ["https://x.org/{}", "http://www.x.org/{}/index.html", "https://X.org/{}?utm_source=a", "https://x.org/{}#part"]
    rows = [(address.format(i), "ab"[(i + k) % 2], 10) for i in range(200) for k, address in enumerate(versions)]
    made = execute(split, SplitConfig(heldout_fraction=0.2), corpus(store, rows), store)
    sides = np.array(made.read()["split"].to_pylist()).reshape(200, len(versions))
    assert (sides == sides[:, :1]).all() and set(sides[:, 0]) == {"train", "heldout"}


def test_one_page_alone_is_trained_on() -> None:
    for address in pages(200):
        assert not held_out([address] * 9, ["a"] * 9, SplitConfig(heldout_fraction=0.5)).any()


def test_what_is_written(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    rows = [(address, "a" if i < 60 else "b", 10 if i < 60 else 30) for i, address in enumerate(pages(100))]
    made = execute(split, SplitConfig(heldout_fraction=0.1), corpus(store, rows), store)
    table = made.read().to_pylist()
    assert [row["category"] for row in table] == [row[1] for row in rows] and {row["repeats"] for row in table} == {1}
    text = {c: sum(10 if c == "a" else 30 for r in table if r["category"] == c and r["split"] == "train") for c in "ab"}
    assert {r["weight"] for r in table if r["category"] == "a"} == {text["a"] / (text["a"] + text["b"])}
    held = [i for i, row in enumerate(table) if row["split"] == "heldout"]
    assert made.manifest.metrics["heldout_documents"] == len(held)
    assert made.manifest.metrics["heldout_bytes"] == sum(rows[i][2] for i in held)
    assert "b" not in {r["category"] for r in table if r["weight"] == 0}


def test_without_signals_all_documents_are_of_one_category(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    given = corpus(store, [(address, "a", 10) for address in pages(60)])
    one = execute(split, SplitConfig(heldout_fraction=0.1), given, store).read().to_pylist()
    none = execute(split, SplitConfig(heldout_fraction=0.1), {"documents": given["documents"]}, store).read().to_pylist()
    assert none == [{**row, "category": "unknown"} for row in one] and {"train", "heldout"} == {row["split"] for row in none}


def test_kinds_are_of_any_language(tmp_path: Path) -> None:
    """Code is code in any language; another language is multilingual whatever its type; reasoning in the main language is mathematics, also
    with lines of formulas (the last two rows), which look like code."""
    store = Store.open(tmp_path)
    rows = [  # language, score of code, share of code lines, score of reasoning, domain, kind
        ("en", 0.1, 0.0, 0.2, "science", "general"), ("en", 0.2, 0.1, 0.9, "science", "mathematics_reasoning"),
        ("en", 0.8, 0.5, 0.9, "technology", "code"), ("hi", 0.1, 0.0, 0.9, "sports", "multilingual"),
        ("ja", 0.9, 0.3, 0.1, "sports", "code"), ("zxx", None, None, None, "code", "code"), ("en", None, None, None, None, "general"),
        ("und", None, 0.9, None, "history", "multilingual"), ("km", 0.9, 0.01, 0.1, "history", "multilingual"),
        ("en", 1.0, 0.4, 0.9, "science", "mathematics_reasoning"), ("ja", 1.0, 0.4, 0.9, "science", "multilingual"),
    ]  # fmt: skip
    given = corpus(store, [(address, "a", 10) for address in pages(len(rows))])
    ids = sorted(given["documents"].read()["id"].to_pylist())
    columns = list(zip(*rows, strict=True))
    languages = store.import_table("signals", pa.table({"id": ids, "language": columns[0], "script": ["Latn"] * len(rows)}))
    names = ("code_score", "code_line_fraction", "reasoning_score")
    scores = {name: pa.array(values, pa.float64()) for name, values in zip(names, columns[1:4], strict=True)}
    technical = store.import_table("signals", pa.table({"id": ids, **scores, "formulas": [2] * 9 + [3] * 2}))
    domains = store.import_table("signals", pa.table({"id": ids, "domain": pa.array(columns[4], pa.string())}))
    own = {"documents": given["documents"], "signals": [domains, languages, technical]}
    table = execute(split, SplitConfig(kinds={}), own, store).read()
    assert dict(zip(table["id"].to_pylist(), table["category"].to_pylist(), strict=True)) == dict(zip(ids, columns[5], strict=True))
    table = execute(split, SplitConfig(kinds={"language": "hi", "min_code": 0.95}), own, store).read()
    assert dict(zip(table["id"].to_pylist(), table["category"].to_pylist(), strict=True))[ids[3]] == "mathematics_reasoning"
    with pytest.raises(PunaError, match=r"signals/.* has no signal 'language'"):
        execute(split, SplitConfig(kinds={}), {**own, "signals": [domains]}, store)
    with pytest.raises(PunaError, match=r"split.kinds: there is no signal 'language'; give language, code_score, .* as domains"):
        execute(split, SplitConfig(kinds={}), {"documents": given["documents"]}, store)


def test_same_bytes_for_any_parts(tmp_path: Path) -> None:
    found = set()
    for part_rows in (7, 1000):
        store = Store.open(tmp_path / str(part_rows))
        rows = [(address, "ab"[i % 2], 10) for i, address in enumerate(pages(50))]
        found.add(execute(split, SplitConfig(), corpus(store, rows), store, part_rows=part_rows).path("mixture.parquet").read_bytes())
    assert len(found) == 1


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    given = corpus(store, [(address, "a", 10) for address in pages(9)])
    with pytest.raises(PunaError, match=r"no signal 'topic'; set split.category to one of id, domain"):
        execute(split, SplitConfig(category="topic"), given, store)
    other = corpus(store, [(address, "a", 10) for address in pages(8)])
    with pytest.raises(PunaError, match="has no signals in"):
        execute(split, SplitConfig(), {**given, "signals": other["signals"]}, store)
    with pytest.raises(PunaError, match="has no documents to hold out"):
        execute(split, SplitConfig(), corpus(store, []), store)
