"""The report is one page that holds together whatever is in the store, and says what the tables say."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from puna.flows.report import write
from puna.flows.report.alignment import measurements, overall_accuracy
from puna.flows.report.funnel import characters_per_token, funnel
from puna.flows.report.run import Run
from puna.storage import PunaError, Store

VOID = {"meta", "br", "hr", "link", "input", "col"}


class Page(HTMLParser):
    """Reads a page strictly: every element must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.raw: dict[str, str] = {"style": "", "script": ""}
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment came from data: {data!r}")

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] in self.raw:
            self.raw[self.stack[-1]] += data
        else:
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


@pytest.fixture(scope="module")
def page(built: Any) -> Page:
    return Page(write(built.store, "latest", None).read_text(encoding="utf-8"))


def test_the_page_is_written_beside_the_run_or_where_asked(built: Any, tmp_path: Path) -> None:
    default = write(built.store, "latest", None)
    assert default == built.store.root / "runs" / f"{built.run}.html"
    target = tmp_path / "deep" / "report.html"
    assert write(built.store, built.run, target) == target
    assert target.read_bytes() == default.read_bytes()
    assert [f.name for f in target.parent.iterdir()] == ["report.html"]
    assert built.store.runs() == [built.run]


def test_text_of_the_web_stays_text(page: Page) -> None:
    assert page.tags["script"] == 1 and page.tags["style"] == 1 and page.tags["img"] == 0
    assert not [a for a in page.attributes if a[1].startswith("on")]
    assert '<script>alert("x")</script><img src=http://evil.example/x onerror=alert(1)>' in page.text
    assert "\x00" not in page.text and "�" in page.text
    assert "alert" not in page.raw["script"] and "evil" not in page.raw["style"]


def test_nothing_is_fetched(page: Page) -> None:
    for tag, name, value in page.attributes:
        if name in ("src", "href", "xlink:href", "action", "data", "poster", "srcset"):
            assert tag == "a" and value.startswith("#"), (tag, name, value)
        assert name != "style" or "url(" not in value
    assert not re.search(r"url\(|@import|https?:|fetch\(|XMLHttpRequest|import\(", page.raw["style"] + page.raw["script"])
    anchors = {value for _, name, value in page.attributes if name == "href"}
    names = [value for _, name, value in page.attributes if name == "id"]
    assert {f"#{n}" for n in names} >= anchors and len(names) == len(set(names))


def test_the_funnel_sums_to_the_rows(built: Any) -> None:
    run = Run.open(built.store, built.run)
    levels = funnel(run)
    assert [level.step.name for level in levels][:3] == ["ingest", "extract", "url_filter"] and len(levels) == 10
    before = None
    for level in levels:
        artifact = level.step.artifact
        dropped = artifact.read("dropped").to_pylist() if "dropped" in artifact.tables else []
        assert Counter(row["rule"] for row in dropped) == {rule.name: rule.rows for rule in level.rules}
        assert level.lost == 0 and level.kept == artifact.rows() == level.came - len(dropped)
        if before is not None:
            assert level.came == before.rows()
        if before is not None and before.kind == "documents":
            texts = {row["id"]: row["text"] for row in before.read(columns=["id", "text"]).to_pylist()}
            after = {row["id"]: row["text"] for row in artifact.read(columns=["id", "text"]).to_pylist()}
            for rule in level.rules:
                assert rule.characters == sum(len(texts[row["id"]]) for row in dropped if row["rule"] == rule.name)
            assert level.edited == sum(len(texts[i]) - len(text) for i, text in after.items())
        before = artifact


def test_examples_are_the_dropped_documents(built: Any) -> None:
    run = Run.open(built.store, built.run)
    level = next(found for found in funnel(run) if found.step.name == "select")
    texts = {row["id"]: row["text"] for row in built.at["url_dedup"].read().to_pylist()}
    for rule in level.rules:
        distances = [abs(e.decision["value"] - e.decision["threshold"]) for e in rule.examples]
        assert len(distances) == 3 and distances == sorted(distances)
        for example in rule.examples:
            assert example.decision["rule"] == rule.name
            assert example.row is not None and example.row["text"] == texts[example.decision["id"]]
        rows = [r for r in level.step.artifact.read("dropped").to_pylist() if r["rule"] == rule.name]
        assert distances[0] == min(abs(r["value"] - r["threshold"]) for r in rows)
        assert distances[2] == max(abs(r["value"] - r["threshold"]) for r in rows)


def test_characters_per_token_are_those_of_the_packed_documents(built: Any) -> None:
    texts = {row["id"]: row["text"] for row in built.at["decontaminate"].read().to_pylist()}
    copies: Counter[str] = Counter()
    tokens = 0
    for row in built.at["tokenize"].read().to_pylist():
        copies.update(row["documents"])
        tokens += sum(row["lengths"])
    expected = sum(len(texts[i]) * n for i, n in copies.items()) / tokens
    assert characters_per_token(Run.open(built.store, built.run)) == pytest.approx(expected, rel=1e-12)
