"""The report is one well-formed page for any content of the store, and its text agrees with the tables."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from puna.flows.report import write, written_before
from puna.flows.report.alignment import _answers_plot, measurements
from puna.flows.report.funnel import PLACES, Among, characters_per_token, funnel
from puna.flows.report.run import Run
from puna.storage import PunaError, Store, runs

VOID = {"meta", "br", "hr", "link", "input", "col", "wbr"}


class Page(HTMLParser):
    """A strict reader of a page: every element must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.glued = False
        self.raw: dict[str, str] = {"style": "", "script": ""}
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.glued = tag == "wbr"
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
        elif self.glued:
            self.words[-1] += data
        else:
            self.words.append(data)
        self.glued = False

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


def test_a_run_that_made_nothing_has_the_page_of_the_run_that_did(tmp_path: Path) -> None:
    store = Store.open(tmp_path)

    def run(name: str, key: str, *, reused: bool, flow: str = "curate") -> str:
        for event in (runs.event("started", flow=flow), runs.Made("prompts", "import", "prompts", key, reused, 1.0).event(), runs.event("finished")):
            store.record(name, event)
        return name

    first = run("1-curate-a", "ab" * 32, reused=False)
    assert written_before(store, first) is None
    page = write(store, first, None)
    assert written_before(store, run("2-curate-b", "ab" * 32, reused=True)) == page
    assert written_before(store, run("3-curate-c", "ab" * 32, reused=True)) == page  # the second run has no page
    assert written_before(store, run("4-curate-d", "ab" * 32, reused=False)) is None
    assert written_before(store, run("5-pipeline-e", "ab" * 32, reused=True, flow="pipeline")) is None
    assert written_before(store, run("6-curate-f", "cd" * 32, reused=True)) is None
    page.write_text(re.sub("Puna [0-9a-f]{64}", "Puna of old", page.read_text(encoding="utf-8")), encoding="utf-8")
    assert written_before(store, "3-curate-c") is None


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
        assert level.lost_rows == 0 and level.kept == artifact.rows() == level.came - len(dropped)
        if before is not None:
            assert level.came == before.rows()
        if before is not None and before.kind == "documents":
            texts = {row["id"]: row["text"] for row in before.read(columns=["id", "text"]).to_pylist()}
            after = {row["id"]: row["text"] for row in artifact.read(columns=["id", "text"]).to_pylist()}
            for rule in level.rules:
                assert rule.characters == sum(len(texts[row["id"]]) for row in dropped if row["rule"] == rule.name)
            assert level.removed_characters == sum(len(texts[i]) - len(text) for i, text in after.items())
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


def test_key_figures(page: Page) -> None:
    text = page.text
    assert re.search(r"Documents 423 → \d+", text)
    assert "Base model, bits per byte 1.900 baselines: n-grams 2.700" in text
    assert "Reward model 84.0 % of 200 held-out pairs in the right order" in text
    chain = r"Held-out task accuracy 2.0 % 0–6 Base 34.0 % 30–38 SFT 54.0 % 50–58 Round 1 74.0 % 70–78 Round 2"
    assert chain in text and "over 300 held-out questions" in text
    assert "48 artifacts, 1 of them reused" in text


def test_what_makes_the_run_again_is_told(built: Any, tmp_path: Path) -> None:
    store, run = cut(built, tmp_path / "store", 8), "20240502T100000-curate-ffffff"
    begun = {"command": "puna run curate --set 'x=<1>'", "recipe": "mine", "changes": ["x=<1>"], "commit": "c0ffee", "versions": {"puna": "9.9"}}
    store.record(run, {"event": "started", "flow": "curate", **begun})
    for made in store.events("partial")[1:4]:
        store.record(run, made)
    said = Page(write(store, run, None).read_text(encoding="utf-8")).text
    for words in ("puna run curate --set 'x=<1>'", "mine with x=<1>", "commit c0ffee , puna 9.9", "web.warc.gz 000000000000 file:///web.warc.gz"):
        assert words in said, words
    assert "not recorded" in Page(write(store, "partial", None).read_text(encoding="utf-8")).text


def test_two_runs_are_set_side_by_side(built: Any, tmp_path: Path) -> None:
    store = cut(built, tmp_path / "store", 6)
    lines, other = store.events("partial"), "20240502T100000-pipeline-ffffff"
    changed = next(made for made in lines if made.get("step") == "url_dedup")
    for made in lines:
        # In the other run, url_dedup produced what url_filter produced here: another configuration and other rows.
        store.record(other, made | {"key": next(m for m in lines if m.get("step") == "url_filter")["key"]} if made is changed else made)
    file = write(store, other, None, compare="partial")
    assert file.name == f"partial-{other}.html"
    page = Page(file.read_text(encoding="utf-8"))
    assert "4 of 5 steps gave the same artifact" in page.text
    assert "config step: url_dedup → url_filter" in page.text
    with pytest.raises(PunaError, match="run nobody: no such run"):
        write(store, "latest", None, compare="nobody")


def test_headers_say_what_they_head(built: Any) -> None:
    html = write(built.store, "latest", None).read_text(encoding="utf-8")
    heads = re.findall(r"<th[ >][^>]*", html)
    assert len(heads) > 20 and all('scope="col"' in head for head in heads)


def test_every_part_of_the_run_has_its_place(page: Page, built: Any) -> None:
    text = page.text
    for title in ("Curation", "Corpus", "Experiments", "Pretraining", "Evaluation and alignment", "Time and memory", "Lineage"):
        assert title in text
    for words in (
        "gopher_quality.min_words", "closest to the threshold", "similarity 0.8", "Share this page", "|||EMAIL|||", "What was kept",
        "Loss against compute", "Pretraining loss", "DPO 2: loss", "Reward of sampled answers", "right answer:", "low_reward",
        "Gradient norm",
    ):  # fmt: skip
        assert words in text, words
    for key in (a.key for a in built.at.values()):
        assert key[:12] in text
    reused = [words for words in page.words if "model · reused" in words]
    assert len(reused) == 1


def test_answers_are_told_apart_by_their_model(built: Any) -> None:
    plot = _answers_plot(Run.open(built.store, built.run), "gold", "Verified score")
    steps = [f"Sample {r}" for r in (1, 2)]
    assert {name: [x for x, _ in points] for name, points in plot.series.items()} == {"policy": steps, "other model": steps}


def test_accuracies_stand_in_the_order_of_the_evaluations(built: Any) -> None:
    measured = measurements(Run.open(built.store, built.run))
    for values in measured.values():
        assert [m.step.name for m in values] in (
            ["evaluate_base"],
            ["evaluate_base", "evaluate_sft", "evaluate_round_1", "evaluate_round_2"],
        )
    assert [m.value for m in measured["all", "accuracy"]] == [0.02, 0.34, pytest.approx(0.54), 0.74]


def cut(built: Any, root: Path, keep: int) -> Store:
    """Return a store that shares the artifacts, with a run that was stopped after `keep` events."""
    store = Store.open(root)
    shutil.rmtree(root / "objects")
    (root / "objects").symlink_to(built.store.root / "objects")
    for event in built.store.events(built.run)[:keep]:
        store.record("partial", event)
    return store


@pytest.mark.parametrize("keep", [1, 2, 3, 4, 6, 9, 12, 16, 20, 24, 30, 40])
def test_a_run_that_crashed_gives_a_page(built: Any, tmp_path: Path, keep: int) -> None:
    page = Page(write(cut(built, tmp_path, keep), "latest", None).read_text(encoding="utf-8"))
    assert "This run crashed: its process ended without a message" in page.text
    assert ("No step of this run has finished yet." in page.text) == (keep == 1)
    assert keep == 1 or f"{keep - 1} artifacts" in page.text


def test_a_single_stage_on_an_artifact_from_before(built: Any, tmp_path: Path) -> None:
    store = cut(built, tmp_path, 0)
    events = built.store.events(built.run)
    for event in ({"event": "started", "flow": "select"}, next(e for e in events if e.get("step") == "select")):
        store.record("single", event)
    text = Page(write(store, "single", None).read_text(encoding="utf-8")).text
    assert "documents from outside this run" in text and "signals from outside this run" in text and "gopher_quality.min_words" in text


def test_what_is_no_longer_in_the_store_is_named(built: Any, tmp_path: Path) -> None:
    store = cut(built, tmp_path, 100)
    store.record("partial", {"step": "sft_9", "stage": "sft", "kind": "model", "key": "ab" * 32, "reused": False, "seconds": 1.0})
    text = Page(write(store, "partial", None).read_text(encoding="utf-8")).text
    assert "omitted here: sft_9 (model/abababababab)" in text


def test_what_cannot_be_done_is_said(built: Any, tmp_path: Path) -> None:
    empty = Store.open(tmp_path / "empty")
    with pytest.raises(PunaError, match="holds no run yet"):
        write(empty, "latest", None)
    with pytest.raises(PunaError, match="run nothing: no such run"):
        write(empty, "nothing", None)
    with pytest.raises(PunaError, match="is a folder"):
        write(built.store, "latest", tmp_path)
    (empty.root / "runs" / "blank.jsonl").write_text("")
    with pytest.raises(PunaError, match="its log is empty"):
        write(empty, "blank", None)


@pytest.mark.parametrize(("step", "table"), [("url_dedup", "documents"), ("line_dedup", "removed_lines")])
def test_a_damaged_table_is_no_page(built: Any, tmp_path: Path, step: str, table: str) -> None:
    shutil.copytree(built.store.root, tmp_path / "copy")
    damaged = Store.open(tmp_path / "copy")
    file = damaged.root / "objects/documents" / built.at[step].key[:2] / built.at[step].key / f"{table}.parquet"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(PunaError, match="artifact documents/.* is damaged: .*puna verify"):
        write(damaged, "latest", tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_a_record_of_another_tool_does_not_break_the_page(built: Any, tmp_path: Path) -> None:
    store = cut(built, tmp_path, 100)
    with (store.root / "runs" / "partial.jsonl").open("a") as file:
        file.write(json.dumps({"note": "unknown"}) + '\n{"step": "cut sho')
    assert "48 artifacts" in Page(write(store, "partial", None).read_text(encoding="utf-8")).text


def test_a_reused_artifact_hangs_on_the_artifact_of_the_same_content(built: Any, tmp_path: Path) -> None:
    first = type(built)(tmp_path, "first")
    row = {"id": "a", "url": "u", "fetched_at": 0, "source": "web"}
    first.add("ingest", pages=[row | {"content_type": "text/html", "charset": None, "body": b"llama"}])
    table = [row | {"title": None, "text": "llama"}]
    for step in ("extract", "url_filter", "pii"):
        # Two steps that change nothing have the same content under different keys.
        first.documents(step, table, given={"documents": first.at["documents"]} if step != "extract" else {"pages": first.at["ingest"]})
    second = type(built)(tmp_path, "second")
    second.documents("extract", table, given={"pages": first.at["ingest"]})
    assert second.at["extract"].key != first.at["extract"].key
    for step in ("url_filter", "pii"):
        event = {"step": step, "stage": step, "kind": "documents", "key": first.at[step].key, "reused": True, "seconds": 0.0}
        second.store.record("second", event)
    run = Run.open(second.store, "second")
    extract, url_filter, pii = run.steps
    assert run.inputs(url_filter) == [extract.artifact]
    assert run.inputs(pii) == [url_filter.artifact]
    assert [level.lost_rows for level in funnel(run)] == [0, 0, 0]
    text = Page(write(second.store, "second", None).read_text(encoding="utf-8")).text
    assert "pages from outside this run" in text and "documents from outside" not in text


def test_rows_that_are_lost_are_shown(built: Any, tmp_path: Path) -> None:
    b = type(built)(tmp_path)
    row = {"url": "u", "fetched_at": 0, "source": "web", "title": None, "text": "llama"}
    b.documents("extract", [{"id": str(i)} | row for i in range(5)], given={"inputs": "a.warc"})
    b.documents("select", [{"id": "1"} | row], dropped=[{"id": "2", "rule": "r", "value": None, "threshold": None, "detail": None}])
    text = Page(write(b.store, "latest", None).read_text(encoding="utf-8")).text
    assert "Rows do not add up: 5 in, 1 kept, 1 dropped." in text


@pytest.mark.parametrize("seed", range(3))
def test_three_rows_stand_for_many(seed: int) -> None:
    numbers = np.round(np.random.default_rng(seed).random(400), 2)
    rows = pa.table({"id": [f"{n:03}" for n in range(400)], "number": numbers})
    among = Among()
    for at in range(0, 400, 150):
        among.add(rows.slice(at, 150), numbers[at : at + 150])
    shown = [row["number"] for _, row in among.selection()]
    assert shown == [numbers.min(), np.sort(numbers)[200], numbers.max()]
    assert [row["id"] for _, row in among.selection()][::2] == [f"{np.flatnonzero(numbers == shown[0])[0]:03}", f"{np.flatnonzero(numbers == shown[2])[-1]:03}"]
    assert [place for place, _ in among.selection()] == list(PLACES)
    for alike in (np.full(400, 0.5), np.full(400, np.nan)):
        among = Among()
        among.add(rows, alike)
        assert [(place, row["id"]) for place, row in among.selection()] == [("", f"{n:03}") for n in range(3)]
