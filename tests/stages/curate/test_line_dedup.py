"""Repeated lines, compared with a plain counter."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.kernels.text.code_lines import looks_like_code
from puna.stages.contract import execute
from puna.stages.curate.line_dedup import LineDedupConfig, line_dedup
from puna.storage import Store


def run(folder, texts, config=None, sources=None, **how):
    store = Store.open(folder)
    when = datetime(2024, 1, 1, tzinfo=UTC)
    rows = [
        {
            "id": f"{n:04d}",
            "url": f"https://x.com/{n}",
            "fetched_at": when,
            "source": sources[n] if sources else "web",
            "title": None,
            "text": t,
        }
        for n, t in enumerate(texts)
    ]
    documents = store.import_table("documents", pa.Table.from_pylist(rows))
    return execute(line_dedup, config or LineDedupConfig(min_documents=0), {"documents": documents}, store, **how)


def plain(texts, config):
    """Return the stage's result by a counter: texts by document (None: dropped), removed (document, line)."""
    out, removed = [], []
    for start in range(0, len(texts), config.bucket_documents):
        bucket = texts[start : start + config.bucket_documents]
        separator = {"line": "\n", "paragraph": "\n\n"}[config.unit]
        counts = Counter(line.strip() for text in bucket for line in text.split(separator) if line.strip())
        seen = set()
        for n, text in enumerate(bucket, start):
            kept, gone, open_ = [], 0, False
            for number, line in enumerate(text.split(separator)):
                key = line.strip()
                # A blank line is removed with the removed line before it, if no kept line or only a blank one precedes that line.
                if not key and open_ and config.unit == "line":
                    _, at, with_, value = removed[-1]
                    removed[-1] = (n, at, f"{with_}\n{line}", value)
                    continue
                first = key not in seen
                seen.add(key)
                if counts[key] > config.max_occurrences and not (config.policy == "keep_first" and first):
                    removed.append((n, number, line, float(counts[key])))
                    gone += 1
                    open_ = not (kept and kept[-1].strip())
                else:
                    kept.append(line)
                    open_ = False
            out.append(None if gone and not "".join(kept).strip() else separator.join(kept))
    return out, removed


lines = st.sampled_from(
    ["a", "b", " a", "b ", "c d", "", "", "   ", "e", "f\tg", "é", "\u00a0a\u3000", "\u2028b\x1c", "\u2003", "a\u200b", "日\x85"]
)


@given(
    st.lists(st.lists(lines, max_size=6).map("\n".join), min_size=1, max_size=10),
    st.integers(1, 4),
    st.integers(1, 6),
    st.sampled_from(["drop_all", "keep_first"]),
    st.integers(1, 5),
    st.sampled_from(["line", "line", "paragraph"]),
)
@settings(max_examples=40, deadline=None)
def test_equal_to_a_plain_counter(tmp_path_factory, texts, most, bucket, policy, part_rows, unit):
    config = LineDedupConfig(max_occurrences=most, min_documents=0, bucket_documents=bucket, policy=policy, unit=unit)
    made = run(tmp_path_factory.mktemp("store"), texts, config, part_rows=part_rows)
    expected, removed = plain(texts, config)
    assert [(int(r["id"]), r["text"]) for r in made.read().to_pylist()] == [(n, t) for n, t in enumerate(expected) if t is not None]
    found = made.read("removed_lines").to_pylist()
    assert [(int(r["id"]), r["line"], r["text"], r["value"]) for r in found] == removed
    gone = made.read("dropped").to_pylist()
    assert [int(r["id"]) for r in gone] == [n for n, t in enumerate(expected) if t is None]
    assert {r["rule"] for r in gone} <= {"line_dedup_empty"}


@pytest.mark.parametrize("seed", range(3))
def test_equal_to_a_plain_counter_on_a_larger_corpus(tmp_path, seed, monkeypatch):
    generator = np.random.default_rng(seed)
    vocabulary = [f"line {n} " + "x" * int(generator.integers(0, 90)) for n in range(400)]
    weights = 1 / np.arange(1, 401)
    texts = ["\n".join(generator.choice(vocabulary, int(generator.integers(0, 12)), p=weights / weights.sum())) for _ in range(600)]
    config = LineDedupConfig(bucket_documents=250, min_documents=0, policy=("drop_all", "keep_first")[seed % 2])
    made = run(tmp_path, texts, config, part_rows=70)
    expected, removed = plain(texts, config)
    assert [(int(r["id"]), r["text"]) for r in made.read().to_pylist()] == [(n, t) for n, t in enumerate(expected) if t is not None]
    assert [(int(r["id"]), r["line"], r["text"], r["value"]) for r in made.read("removed_lines").to_pylist()] == removed
    assert len(removed) > 500


def test_more_than_six_times_as_in_llama_3(tmp_path):
    texts = [f"Accept cookies\nstory {n}\nRead more" if n < 6 else f"Accept cookies\nstory {n}" for n in range(7)]
    made = run(tmp_path, texts)
    assert made.read()["text"].to_pylist() == [t.replace("Accept cookies\n", "") for t in texts]  # 7 times against 6


def test_code_is_neither_counted_nor_touched(tmp_path):
    texts = ["}\nreturn 0;"] * 10 + ["}\nprose"]
    made = run(tmp_path, texts, sources=["code"] * 10 + ["web"])
    assert made.read()["text"].to_pylist() == texts
    every = run(tmp_path, texts, LineDedupConfig(exempt_sources=(), min_documents=0), sources=["code"] * 10 + ["web"])
    assert every.read()["text"].to_pylist() == ["prose"]


def test_code_in_manuals_can_be_protected(tmp_path):
    texts = [f"Sign in\nUse it like this, {n}:\n>>> import puna\n    return None\n)" for n in range(9)]
    made = run(tmp_path, texts, LineDedupConfig(protect_code=True, min_documents=0))
    assert made.read()["text"].to_pylist() == [t.removeprefix("Sign in\n") for t in texts]
    fates = {row["text"]: row["detail"].rpartition("; ")[2] for row in made.read("examples").to_pylist()}
    assert fates.pop("Sign in") == "removed" and set(fates) == {">>> import puna", "return None", ")"} and set(fates.values()) == {"kept: code"}
    first = run(tmp_path, texts, LineDedupConfig(policy="keep_first", protect_code=True, min_documents=0))
    assert first.read()["text"].to_pylist() == [texts[0], *(t.removeprefix("Sign in\n") for t in texts[1:])]
    assert any(detail.endswith("limit 6; removed except the first") for detail in first.read("examples")["detail"].to_pylist())


@pytest.mark.parametrize(
    "line", [")", "});", "x = 1", "def f(x):", "import os", ">>> f(1)", "for x in y:", "return None", "</div>", "foo(bar)",
     "int count;", "NextToken (string)", "Key (string, required)"]
)
def test_lines_of_code(line):
    assert looks_like_code(line)


@pytest.mark.parametrize(
    "line", ["Read more", "See also", "© 2024 All rights reserved.", "Home > News", "5 comments", "From our editors", "Parameters:",
     "Comments (none)", "English (required)", "in small groups, so that everyone is heard;"]
)
def test_lines_of_prose(line):
    assert not looks_like_code(line)


def test_the_input_can_be_rebuilt_from_the_evidence(tmp_path):
    texts = [f"menu\n\n  body {n}  \n\nmenu\n\n\nfooter\n\nend {n}\nmenu\n" for n in range(8)]
    made = run(tmp_path, texts)
    removed = made.read("removed_lines").to_pylist()
    for row in made.read().to_pylist():
        rebuilt = row["text"].split("\n")
        for gone in sorted((r for r in removed if r["id"] == row["id"]), key=lambda r: r["line"]):
            rebuilt[gone["line"] : gone["line"]] = gone["text"].split("\n")
        assert "\n".join(rebuilt) == texts[int(row["id"])]
        assert row["text"] == f"  body {int(row['id'])}  \n\nend {int(row['id'])}\n"


def test_no_documents(tmp_path):
    store = Store.open(tmp_path)
    empty = run(tmp_path / "x", ["a"]).read().slice(0, 0)
    made = execute(line_dedup, LineDedupConfig(), {"documents": store.import_table("documents", empty)}, store)
    assert made.rows() == 0


def test_the_limit_is_a_rate_with_a_minimum():
    config = LineDedupConfig()
    # The report's 6 in 30 million documents; with more documents more occurrences; with fewer never less than 6.
    assert [config.limit(n) for n in (1, 30_000_000, 60_000_000, 300_000_000)] == [6, 6, 12, 60]


def test_few_documents_lose_no_line_and_show_what_they_would_lose(tmp_path):
    texts = [f"--force\nwhat number {n} alone says" + ("\n--verbose" if n < 7 else "") for n in range(9)] + ["--quiet\nrest"] * 6
    made = run(tmp_path, texts, LineDedupConfig(min_documents=16))
    assert made.read()["text"].to_pylist() == texts and made.rows("removed_lines") == made.rows("dropped") == 0
    shown = {row["text"]: row["detail"] for row in made.read("examples").to_pylist()}
    assert shown == {
        "--force": "9 times in 15 documents, limit 6; kept: fewer than min_documents=16",
        "--verbose": "7 times in 15 documents, limit 6; kept: fewer than min_documents=16",
    }
    assert {name: made.manifest.metrics[name] for name in ("frequent_lines", "frequent_occurrences", "spared_occurrences", "limit")} == {
        "frequent_lines": 2, "frequent_occurrences": 16, "spared_occurrences": 16, "limit": 6,
    }  # fmt: skip
    enough = run(tmp_path, texts, LineDedupConfig(min_documents=15))
    assert enough.rows("removed_lines") == 16 and enough.manifest.metrics["spared_occurrences"] == 0
    assert {row["detail"] for row in enough.read("examples").to_pylist()} == {f"{n} times in 15 documents, limit 6; removed" for n in (7, 9)}
