"""The newest version of each address."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta, timezone

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.stages.contract import execute
from puna.stages.curate.url_dedup import UrlDedupConfig, url_dedup
from puna.stages.urls import normalize
from puna.storage import Store


def documents(store, rows):
    table = [
        {"id": i, "url": url, "fetched_at": datetime(2024, 1, day, tzinfo=UTC), "source": "s", "title": None, "text": i}
        for i, url, day in rows
    ]
    return store.import_table("documents", pa.Table.from_pylist(table))


SAME = "https://example.com/a/b?x=1&y=2"


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/a/b?x=1&y=2",
        "http://www.example.com:80/a/b/?y=2&x=1",
        "HTTPS://EXAMPLE.com./a/./c/../b?x=1&y=2#part",
        "https://me:secret@example.com/a/b/index.html?x=1&y=2&utm_source=news&gclid=7",
        "https://example.com/%61/b;jsessionid=ABC?x=1&y=2",
        "https://example.com/a/b?x=1&y=2#!/",
    ],
)
def test_addresses_of_one_page(url):
    assert normalize(url) == SAME


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/a/B?x=1&y=2",
        "https://example.com:8080/a/b?x=1&y=2",
        "https://m.example.com/a/b?x=1&y=2",
        "https://example.com/a/b?x=1&y=3",
        "https://example.com/a/b?x=1&y=2&sid=4",
        "https://example.com/a%2Fb?x=1&y=2",
        "https://example.com/a/b?x=1&y=2#/c",
        "https://example.com/a/b?x=1&y=2#!c",
    ],
)
def test_addresses_of_other_pages(url):
    assert normalize(url) != SAME


def test_routes_of_one_page_are_one_address():
    assert normalize("https://example.com/#/a") == normalize("http://www.example.com#/%61/") == "https://example.com/#/a"


@given(st.text(max_size=40) | st.text(max_size=30).map("https://example.com/".__add__) | st.text(max_size=30).map("https://example.com/#/".__add__))
@settings(max_examples=200, deadline=None)
def test_normalizing_again_changes_nothing(url):
    once = normalize(url)
    assert normalize(once) == once


def test_the_newest_is_kept_and_ties_go_to_the_smallest_id(tmp_path):
    store = Store.open(tmp_path)
    rows = [
        ("a", "https://x.com/1", 1),
        ("b", "http://www.x.com/1/", 3),
        ("c", "https://x.com/1?utm_source=z", 2),
        ("d", "https://x.com/2", 5),
        ("e", "https://x.com/2", 5),
        ("f", "https://x.com/3", 1),
    ]
    made = execute(url_dedup, UrlDedupConfig(), {"documents": documents(store, rows)}, store)
    assert made.read()["id"].to_pylist() == ["b", "d", "f"]
    evidence = {r["id"]: (r["kept_id"], r["cluster"], r["method"]) for r in made.read("duplicates").to_pylist()}
    assert evidence == {"a": ("b", "b", "url"), "c": ("b", "b", "url"), "e": ("d", "d", "url")}
    assert {r["id"]: r["rule"] for r in made.read("dropped").to_pylist()} == dict.fromkeys("ace", "same_url")
    plain = execute(url_dedup, UrlDedupConfig(normalize=False), {"documents": documents(store, rows)}, store)
    assert plain.read()["id"].to_pylist() == ["a", "b", "c", "d", "f"]


def test_no_documents(tmp_path):
    store = Store.open(tmp_path)
    empty = documents(store, [("a", "https://x.com/1", 1)]).read().slice(0, 0)
    made = execute(url_dedup, UrlDedupConfig(), {"documents": store.import_table("documents", empty)}, store)
    assert made.rows() == 0


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)), max_size=12))
@settings(max_examples=20, deadline=None)
def test_equal_to_a_plain_loop(tmp_path_factory, pages):
    rows = [(f"{n:02d}", f"https://x.com/{page}", day) for n, (page, day) in enumerate(pages)]
    if not rows:
        return
    store = Store.open(tmp_path_factory.mktemp("store"))
    made = execute(url_dedup, UrlDedupConfig(), {"documents": documents(store, rows)}, store, part_rows=3)
    best = {}
    for identity, url, day in rows:
        if url not in best or day > best[url][1]:
            best[url] = (identity, day)
    assert made.read()["id"].to_pylist() == sorted(identity for identity, _ in best.values())


def versions(store, rows):
    table = [{"id": i, "url": url, "fetched_at": when, "source": "s", "title": None, "text": i} for i, url, when in rows]
    return store.import_table("documents", pa.Table.from_pylist(table))


def test_newer_by_a_second_or_less_wins(tmp_path):
    store, noon = Store.open(tmp_path), datetime(2024, 1, 1, 12, tzinfo=UTC)
    rows = [
        ("a", "https://x.com/1", noon + timedelta(seconds=1)), ("b", "https://x.com/1", noon),
        ("c", "https://x.com/2", noon), ("d", "https://x.com/2", noon + timedelta(microseconds=1)),
        ("e", "https://x.com/3", datetime(2023, 12, 31, 23, 59, 59, tzinfo=UTC)), ("f", "https://x.com/3", datetime(2024, 1, 1, tzinfo=UTC)),
    ]  # fmt: skip
    made = execute(url_dedup, UrlDedupConfig(), {"documents": versions(store, rows)}, store)
    assert made.read()["id"].to_pylist() == ["a", "d", "f"]


def test_times_of_other_zones_are_instants(tmp_path):
    store = Store.open(tmp_path)
    zone = timezone(timedelta(hours=9))
    # 08:00 in a zone nine hours ahead is 23:00 UTC of the day before: older than 00:30 UTC, though its local date is later.
    early = pa.array([datetime(2024, 1, 2, 8, tzinfo=zone)], pa.timestamp("us", tz="+09:00"))
    late = pa.array([datetime(2024, 1, 2, 0, 30, tzinfo=UTC)], pa.timestamp("us", tz="UTC"))
    table = {"id": ["a", "b"], "url": ["https://x.com/1"] * 2, "source": ["s"] * 2, "title": pa.nulls(2, pa.string()), "text": ["a", "b"]}
    for first, second, kept in ((early, late, "b"), (late, early, "a")):
        times = pa.concat_arrays([first.cast(late.type), second.cast(late.type)])
        for zoned in (times, times.cast(early.type)):
            made = execute(url_dedup, UrlDedupConfig(), {"documents": store.import_table("documents", pa.table({**table, "fetched_at": zoned}))}, store)
            assert made.read()["id"].to_pylist() == [kept]


def test_equal_instants_go_to_the_smallest_id_in_any_order(tmp_path):
    noon = datetime(2024, 1, 1, 12, 0, 5, tzinfo=UTC)
    rows = [
        ("d", "https://x.com/1", noon), ("b", "http://www.x.com/1/", noon.astimezone(timezone(timedelta(hours=-5)))),
        ("c", "https://x.com/1", noon), ("a", "https://x.com/1", noon - timedelta(seconds=1)),
    ]  # fmt: skip
    digests = set()
    for number, order in enumerate(itertools.permutations(rows)):
        store = Store.open(tmp_path / str(number))
        made = execute(url_dedup, UrlDedupConfig(), {"documents": versions(store, order)}, store, part_rows=1 + number % 4)
        assert made.read()["id"].to_pylist() == ["b"]
        assert {r["kept_id"] for r in made.read("duplicates").to_pylist()} == {"b"}
        digests.add(made.data_digest)
    assert len(digests) == 1
