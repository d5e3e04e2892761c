"""`puna clean`: fields are detected, choices are printed, and files hold the kept and the dropped records."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from puna.flows.cli.clean import clean, look
from puna.flows.cli.main import app
from puna.flows.engine.inputs import column_changes
from puna.flows.engine.trace import load
from puna.stages.contract import External, execute
from puna.stages.curate.ingest import IngestConfig, ingest
from puna.stages.io.imports import ImportDocumentsConfig, import_documents
from puna.stages.reading.field_detection import fields_of, sniff
from puna.storage import PunaError, Store

WORDS = ["the", "people", "of", "the", "high", "plain", "have", "kept", "their", "llamas", "and", "alpacas", "for", "as", "long", "as", "anyone", "can", "say", "and", "that", "is", "a", "long", "time"]


def prose(number: int) -> str:
    lines = [" ".join([*WORDS[n:], *WORDS[:n], f"number{number}x{n}"]) + "." for n in range(12)]
    return "\n\n".join(lines[number % 5 :] + lines[: number % 5])


@pytest.mark.parametrize(
    ("row", "page", "html", "url"),
    [
        ({"text": "a page", "url": "https://x.org"}, "text", False, "url"),
        ({"id": "0017", "content": "a page", "link": "https://x.org"}, "content", False, "link"),
        ({"raw_html": "<html><body>x</body></html>", "text": "x"}, "raw_html", True, None),
        ({"payload": "<!DOCTYPE html><p>a long page without a usual name for its field", "uri": "http://a.b"}, "payload", True, "uri"),
        ({"meta": {"raw": "<div>" + "x" * 60, "source_url": "http://a.b"}}, "meta.raw", True, "meta.source_url"),
        ({"lang": "en", "story": "once " * 20, "home": "https://" + "x" * 300}, "story", False, None),
    ],
)
def test_the_fields_of_rows(row: dict, page: str, html: bool, url: str | None) -> None:
    from puna.stages.reading.field_detection import flat

    found = fields_of([dict(flat(row))] * 3, "rows")
    assert (found.page, found.html, found.url) == (page, html, url)


@pytest.mark.parametrize("name", ["url", "link"])
def test_pages_without_an_address_are_kept(tmp_path: Path, name: str) -> None:
    """A null address; or no address field in rows after the sampled ones, or in any row if the field has its usual name."""
    rows = [{"text": prose(n), name: f"https://x.org/{n}" if n % 3 else None} for n in range(60)]
    rows += [{"text": prose(n)} for n in range(60, 64)] if name == "url" else []
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    choices = look(External.resolve(str(file)), [], ())
    assert any(f"URL in {name}" in line for line in choices.said)
    config = load("clean", choices.changes, "curate", "clean").one("ingest", ingest, IngestConfig)
    pages = execute(ingest, config, {"inputs": External.resolve(str(file))}, Store.open(tmp_path / "store"))
    assert pages.rows() == len(rows) and "https://x.org/1" in pages.read()["url"].to_pylist()


@pytest.mark.parametrize("encoding", ["shift_jis", "euc_jp", "utf-8"])
def test_languages_are_told_whatever_the_encoding_of_a_page(tmp_path: Path, encoding: str) -> None:
    text = "この港は千九百二年に開かれ、今では毎年多くの船が訪れる。町の人々は魚を捕り、市場で売って暮らしている。" * 3
    html = f'<html><head><meta charset="{encoding}"><title>港</title></head><body><article><p>{text}</p></article></body></html>'
    (tmp_path / "harbour.html").write_bytes(html.encode(encoding))
    said = look(External.resolve(str(tmp_path / "harbour.html")), [], ()).said
    assert said[0].startswith("harbour.html: 1 file, ") and any(line.startswith("languages of 1 sampled pages: ja 100%") for line in said)


def test_an_address_that_rows_lack_is_not_used(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": prose(n)} | ({"link": "https://x.org"} if n else {})) + "\n" for n in range(9)))
    found = sniff(External.resolve(str(file))[0])
    assert found is not None and (found.page, found.url) == ("text", None)


def test_rows_without_text_name_their_fields(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1, "b": "x"}\n')
    with pytest.raises(PunaError, match=r"no field is surely the page; fields with text are b \(mean 1 characters\)\. Name one with --columns"):
        sniff(External.resolve(str(file))[0])
    file.write_text('{"a": 1, "b": ""}\n')
    with pytest.raises(PunaError, match=r"no field contains text; the fields are a, b$"):
        sniff(External.resolve(str(file))[0])
    (tmp_path / "page.html").write_text("<p>x")
    assert sniff(External.resolve(str(tmp_path / "page.html"))[0]) is None


def test_files_whose_text_is_in_another_field_are_named(tmp_path: Path) -> None:
    for name, field, count in (("a.json", "text", 1), ("b.json", "text", 1), ("c.jsonl", "content", 9)):
        (tmp_path / name).write_text("\n".join(json.dumps({field: prose(n)}) for n in range(count)))
    found = sniff(External.resolve(str(tmp_path))[0])
    assert found is not None and (found.page, found.others) == ("content", ("text (a.json)",))
    assert any("other files have text in text (a.json)" in line for line in look(External.resolve(str(tmp_path)), [], ()).said)


def test_columns_of_all_inputs_and_of_one() -> None:
    changes = column_changes(["html=raw_html,url=link", "news:text=a.b"], "ingest")
    config = load("clean", changes, "curate").one("ingest", ingest, IngestConfig)
    assert (config.columns_of("web").body, config.columns_of("web").url, config.columns_of("web").content_type) == ("raw_html", "link", "text/html")
    assert (config.columns_of("news").body, config.columns_of("news").url, config.columns_of("news").content_type) == ("a.b", "link", "text/plain")
    for wrong in ("raw_html", "picture=x", "html="):
        with pytest.raises(PunaError, match="write "):
            column_changes([wrong], "ingest")


def test_pages_of_ones_own_become_clean_files(tmp_path: Path) -> None:
    rows = tmp_path / "mine.jsonl"
    lines = [{"link": f"https://x.org/{n}", "meta": {"body": prose(n)}, "crawl_ts": "2024-05-01" if n else None} for n in range(6)] + [{"link": "https://x.org/short", "meta": {"body": "Too short."}}]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    said: list[str] = []
    store = Store.open(tmp_path / "store")
    # The pages share their words on purpose, so the stages that remove near-duplicates and repeated lines are left out.
    changes = ["minhash_dedup=null", "line_dedup=null", "select.gopher_repetition=null", "select.divergence=null", "select.ngram_coverage=null"]
    made = clean([str(rows)], tmp_path / "out", store, changes=changes, workers=1, say=said.append, quiet=True)
    assert any("meta.body is read as plain text; URL in link, date in crawl_ts" in line for line in said) and any("en 100%" in line for line in said)
    kept = [json.loads(line) for line in made.documents.read_text().splitlines()]
    dropped = [json.loads(line) for line in made.dropped.read_text().splitlines()]
    assert made.documents == tmp_path / "out" / "documents.jsonl" and made.kept == len(kept) and len(kept) + len(dropped) == made.pages == 7
    assert {row["url"] for row in kept} == {f"https://x.org/{n}" for n in range(6)} and {row["language"] for row in kept} == {"en"}
    assert {row["url"][-1]: row["fetched_at"] for row in kept} == {"0": None} | {str(n): "2024-05-01 00:00:00+00:00" for n in range(1, 6)}
    assert made.rules == {f"select.{dropped[0]['rule']}": 1}
    assert dropped[0]["step"] == "select" and dropped[0]["url"] == "https://x.org/short" and dropped[0]["source"] == "mine" and "<html" in made.report.read_text()
    again = clean([str(rows)], tmp_path / "more" / "all.parquet", store, changes=changes, workers=1, say=said.append, quiet=True)
    assert pq.read_table(again.documents).column("text").to_pylist() == [row["text"] for row in kept]
    assert sorted(file.name for file in (tmp_path / "more").iterdir()) == ["all.dropped.jsonl", "all.parquet", "all.report.html"]


def test_a_file_with_one_rule_lies_on_the_recipe_of_cleaning(tmp_path: Path) -> None:
    pages, mine = tmp_path / "pages.jsonl", tmp_path / "mine.yaml"
    pages.write_text("".join(json.dumps({"story": prose(n), "note": f"{n} " * 20}) + "\n" for n in range(3)))
    mine.write_text("select: {gopher_quality: {min_words: 2000}, gopher_repetition: null}\nminhash_dedup: null\ningest: {inputs: {pages: {text: story}}}")
    said: list[str] = []
    made = clean([str(pages)], tmp_path / "out", Store.open(tmp_path / "store"), recipe=str(mine), workers=1, say=said.append, quiet=True)
    assert (made.kept, made.rules) == (0, {"select.gopher_quality.min_words": 3})
    assert not any("is read as" in line for line in said)  # the recipe says which field is the page


def test_files_without_pages_are_told_apart_from_pages_that_rules_drop(tmp_path: Path) -> None:
    """Metadata files beside pages, in any order: field detection uses the files with text; input rows are kept, dropped or not pages."""
    folder = tmp_path / "mixed"
    (folder / "a").mkdir(parents=True)
    for n in range(6):
        (folder / "a" / f"package{n}.json").write_text(json.dumps({"name": f"p{n}", "version": "1.0", "description": "a short one"}, indent=2))
    (folder / "a.png").write_bytes(b"\x89PNG")
    (folder / "pages.json").write_text(json.dumps([{"content": prose(n)} for n in range(3)], indent=2))
    (folder / "short.json").write_text(json.dumps({"content": "too short"}, indent=2))
    (folder / "wrong.json").write_text('{\n "content" 1\n}')
    said: list[str] = []
    changes = ["minhash_dedup=null", "line_dedup=null", "select.gopher_repetition=null", "select.divergence=null", "select.ngram_coverage=null"]
    store = Store.open(tmp_path / "store")
    made = clean([str(folder)], tmp_path / "out", store, changes=changes, workers=1, say=said.append, quiet=True)
    assert any("content is read as plain text" in line for line in said)
    assert (made.kept, made.no_page, made.pages) == (3, {"not_a_page": 7}, 5)
    assert sum(made.rules.values()) == made.pages - made.kept == 2 and made.rules["ingest.malformed_record"] == 1
    assert made.files_without_page.startswith("7 files contain no page at all: 6 .json (a/package0.json, row 1: no text in a field 'content'; it has name, version")
    assert len(made.dropped.read_text().splitlines()) == 2 + 7
    report = made.report.read_text()
    assert "7 more records hold no page; 7 files contain no page at all: 6 .json" in report and "Rows do not add up" not in report


def test_wrong_places_and_inputs_are_named(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    with pytest.raises(PunaError, match="name a folder, or a file that ends in"):
        clean(["x.jsonl"], tmp_path / "out.csv", store)
    (tmp_path / "file").touch()
    with pytest.raises(PunaError, match=r"out\.jsonl: cannot be written, since .*file is a file"):
        clean(["x.jsonl"], tmp_path / "file" / "out.jsonl", store)
    with pytest.raises(PunaError, match="no such file or folder"):
        clean([str(tmp_path / "nothing")], tmp_path / "out", store)
    (tmp_path / "empty.jsonl").write_text('{"text": "  "}\n')
    with pytest.raises(PunaError, match="no field contains text|contains text"):
        clean([str(tmp_path / "empty.jsonl")], tmp_path / "out", store)
    for name, text, message in (("wide", '[{"text": "x"}]', "wide.json, row 1: is UTF-16"), ("nested", "\ufeff[[{}]]", "row 1: is a list")):
        (tmp_path / f"{name}.json").write_text(text, encoding="utf-16" if name == "wide" else "utf-8")
        with pytest.raises(PunaError, match=message):
            clean([str(tmp_path / f"{name}.json")], tmp_path / "out", store)
    assert not (tmp_path / "out").exists()


def test_a_page_beyond_the_limit_is_named_where_it_is_the_only_one(tmp_path: Path) -> None:
    page = tmp_path / "large.html"
    page.write_text("<html><body>" + "<p>A page of many words.</p>" * 100 + "</body></html>")
    with pytest.raises(PunaError, match=r"contains text \(body_too_large: .*large\.html.*ingest\.max_body_bytes is the limit"):
        clean([str(page)], tmp_path / "out", Store.open(tmp_path / "store"), changes=("ingest.max_body_bytes=1024",))



def test_imported_documents_are_cleaned_beside_pages(tmp_path: Path) -> None:
    """Rows without addresses become separate documents; NAME=ARTIFACT sets their source."""
    store, said = Store.open(tmp_path / "store"), list[str]()
    rows, pages = tmp_path / "rows.csv", tmp_path / "web.jsonl"
    rows.write_text("text\n" + "".join(f'"{prose(n)}"\n' for n in range(3)))
    pages.write_text(json.dumps({"text": prose(3), "url": "https://x.org/3"}) + "\n")
    documents = execute(import_documents, ImportDocumentsConfig(), {"inputs": External.resolve(str(rows))}, store)
    store.set_alias("rows@latest", documents)
    changes = ["minhash_dedup=null", "line_dedup=null", "select.gopher_repetition=null", "select.divergence=null", "select.ngram_coverage=null"]

    made = clean(["wikipedia=rows@latest", str(pages)], tmp_path / "out", store, changes=changes, workers=1, say=said.append, quiet=True)
    kept = [json.loads(line) for line in made.documents.read_text().splitlines()]
    assert made.pages == made.kept == len(kept) == 4 and f"{documents.id}: 3 documents" in said
    assert {row["source"]: row["url"] for row in kept if row["source"] == "web"} == {"web": "https://x.org/3"}
    assert {row["url"] for row in kept if row["source"] == "wikipedia"} == {f"file:///rows/rows.csv/{n}" for n in (1, 2, 3)}


def test_pages_of_which_none_is_kept_give_a_report_and_the_reasons(tmp_path: Path) -> None:
    file, out = tmp_path / "short.jsonl", tmp_path / "out"
    file.write_text('{"url": "https://a.org/1", "text": "too short"}\n')
    found = clean([str(file)], out, Store.open(tmp_path / "store"), workers=1, quiet=True)
    assert (found.kept, found.pages, found.documents.read_text()) == (0, 1, "")
    assert [json.loads(line)["rule"] for line in found.dropped.read_text().splitlines()] == ["gopher_quality.min_words"]
    rows = pq.read_table(clean([str(file)], tmp_path / "none.parquet", Store.open(tmp_path / "store"), workers=1, quiet=True).documents)
    assert rows.num_rows == 0 and {"id", "url", "text", "language"} <= set(rows.column_names)
    assert found.report.stat().st_size > 10_000


@pytest.mark.parametrize("words", [("clean", "pages.jsonl", "-o", "out", "--store", "store"), ("rules", "--on", "pages.jsonl")])
def test_a_module_of_ones_own_is_imported_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [*words, "--module", "none.py"])
    assert "--module none.py: no such file" in str(done.exception) and not (tmp_path / "store").exists()
