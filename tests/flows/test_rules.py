"""`puna rules`: good text lost and bad text caught by each rule."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from puna.flows.cli.main import app
from puna.flows.cli.rules import Annotations, Page, Tally, columns_of, evidence, read_annotated
from puna.stages.curate.extract import ExtractConfig
from puna.stages.curate.select import SelectConfig
from puna.storage import PunaError, Store

SENTENCE = "The old bridge across the river was built of grey stone in the year of the great flood."  # 18 words
# Long and whole; short; long except for the 18 words of its truth; junk of 20 words; junk of 80.
PAGES = [
    Page(f"{SENTENCE} " * 10, False, f"{SENTENCE} " * 10, type="article"),
    Page(SENTENCE, False, SENTENCE, type="forum"),
    Page(f"{SENTENCE}\n" + "menu " * 60, False, SENTENCE, type="article"),
    Page("home contact " * 10, False, good=False, type="junk"),
    Page("# home " * 80, False, good=False, type="junk"),
]
GROUPS = {name: None for name in SelectConfig.model_fields if name not in ("groups", "sql", "per_language")}


def recipe(folder: Path) -> str:
    """Write a recipe with two rules on words and one in SQL."""
    off = {name: None for name in type(SelectConfig().gopher_quality).model_fields if name[:3] in ("min", "max")}
    rules = {**GROUPS, "gopher_quality": {**off, "min_words": 50, "max_hash_ratio": 0.1}, "sql": {"few": "words < 25"}}
    file = folder / "two.yaml"
    file.write_text(f"base: null\nselect: {json.dumps(rules)}\nselect_model: null\n")
    return str(file)


def test_each_rule_is_judged_alone_and_in_its_order(tmp_path: Path) -> None:
    annotated = Annotations(PAGES, Store.open(tmp_path / "store"), ExtractConfig())
    assert annotated.good.tolist() == [180, 18, 18, 0, 0] and annotated.bad.tolist() == [0, 0, 60, 20, 80]
    found = evidence(annotated, recipe(tmp_path))
    assert found.whole["all"] == Tally(5, 216, 160) and found.whole["type=forum"] == Tally(1, 18, 0)
    rows = {row.rule: row for row in found.rows}
    assert list(rows) == ["select.gopher_quality.min_words", "select.gopher_quality.max_hash_ratio", "select.sql.few"]
    words, hashes, few = rows.values()
    assert words.condition == "words < 50" and words.alone["all"] == words.first["all"] == Tally(2, 18, 20)
    assert hashes.alone["all"] == hashes.first["all"] == Tally(1, 0, 80)
    # The rule in SQL drops nothing beyond what the first rule drops.
    assert few.alone["all"] == Tally(2, 18, 20) and few.first["all"] == Tally(0, 0, 0)
    assert found.loss() == 18 / 216 and found.loss("type=forum") == 1 and found.loss("type=article") == 0
    table = columns_of(found, "type")
    assert table[0]["good_lost"] == 18 / 216 and table[0]["bad_caught"] == 20 / 160 and table[0]["forum"] == 1
    assert table[-1]["rule"] == "all rules" and table[-1]["good_lost"] == 18 / 216
    assert table[-1]["pages"] == 3 and table[-1]["bad_caught"] == 100 / 160


def test_a_page_without_text_loses_its_truth_and_lines_cut_count(tmp_path: Path) -> None:
    long = " ".join(f"{a}{b}" for a in ("ab", "ce", "di", "fo", "gu") for b in ("me", "na", "pi", "ro", "su", "ty", "va", "ze"))
    pages = [
        Page("<html><body></body></html>", True, SENTENCE, type="article"),
        Page(f"{long}\n{SENTENCE}\n{long}", False, f"{SENTENCE} {long} {long}", type="article"),
    ]
    file = tmp_path / "lines.yaml"
    file.write_text(f"base: null\nselect: {json.dumps({**GROUPS, 'lines': {}})}\nselect_model: null\n")
    found = evidence(Annotations(pages, Store.open(tmp_path / "store"), ExtractConfig()), str(file))
    assert [(row.rule, row.first["all"]) for row in found.rows] == [("extract", Tally(1, 18, 0)), ("select.lines", Tally(0, 40, 0))]
    assert found.loss() == (18 + 40) / (18 + 98)
    # A later rule that drops the page loses only the words that are left.
    file.write_text(file.read_text().replace("select_model: null", "select_model: {sql: {rest: words > 0}, quality: null}"))
    found = evidence(Annotations(pages, Store.open(tmp_path / "store"), ExtractConfig()), str(file))
    assert [(row.alone["all"].good, row.first["all"].good) for row in found.rows[-2:]] == [(40, 40), (98, 58)] and found.loss() == 1


def test_the_command_reads_rows_and_names_what_they_lack(tmp_path: Path) -> None:
    file = tmp_path / "labelled.parquet"
    pq.write_table(pa.Table.from_pylist([page._asdict() | {"text": page.body, "html": None} for page in PAGES]), file)
    ran = CliRunner().invoke(app, ["rules", "--on", str(file), "--recipe", recipe(tmp_path), "--json"])
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["rows"][0]["rule"] == "select.gopher_quality.min_words" and told["summary"]["good_words_lost type=forum"] == 1
    for row, said in (({"truth": "x"}, "needs the field html or text"), ({"text": "x", "good": 2}, "needs the field truth .* or good .*truth is None, good is 2")):
        (bad := tmp_path / "bad.jsonl").write_text(json.dumps(row))
        with pytest.raises(PunaError, match=f"row 1 {said}"):
            read_annotated(bad)
    with pytest.raises(PunaError, match="cannot be read"):
        read_annotated(tmp_path / "nowhere.parquet")


def test_a_csv_file_says_good_in_words_and_leaves_cells_empty(tmp_path: Path) -> None:
    (file := tmp_path / "pages.csv").write_text("html,text,truth,good\n,a b,,True\n,c d,,false\n,e f,e,\n,g h,,\n")
    assert read_annotated(file) == [Page("a b", False), Page("c d", False, good=False), Page("e f", False, "e", False), Page("g h", False, "", False)]


def test_good_may_be_a_number(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", "b", "c"], "good": [1, 0, 1]}), tmp_path / "pages.parquet")
    assert [page.good for page in read_annotated(tmp_path / "pages.parquet")] == [True, False, True]


@pytest.mark.parametrize(("charset", "words"), [("koi8-r", "Старый мост через реку построен из серого камня. "), ("shift_jis", "古い橋は灰色の石で造られた。")])
def test_html_in_bytes_is_decoded_as_in_curation(tmp_path: Path, charset: str, words: str) -> None:
    body = f'<html><head><meta charset="{charset}"></head><body><main><p>{words * 9}</p></main></body></html>'.encode(charset)
    pq.write_table(pa.table({"html": [body], "truth": [words * 9]}), tmp_path / "pages.parquet")
    annotated = Annotations(read_annotated(tmp_path / "pages.parquet"), Store.open(tmp_path / "store"), ExtractConfig())
    assert annotated.good[0] >= 9 and annotated.bad[0] == 0


def test_a_file_without_a_base_inherits_from_clean(tmp_path: Path) -> None:
    (tmp_path / "pages.jsonl").write_text("".join(json.dumps({"text": page.body, "good": page.good}) + "\n" for page in PAGES))
    (tmp_path / "my.yaml").write_text("select: {gopher_quality: {min_words: 60}}\n")
    result = CliRunner().invoke(app, ["rules", "--on", str(tmp_path / "pages.jsonl"), "--recipe", str(tmp_path / "my.yaml")])
    assert "select_model.quality.min_quality" in result.stdout and "my.yaml (base: clean) on 5 pages" in result.stdout


def test_pages_of_which_none_has_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pages.jsonl").write_text('{"html": "", "good": true}\n')
    result = CliRunner().invoke(app, ["rules", "--on", str(tmp_path / "pages.jsonl")])
    assert isinstance(result.exception, PunaError) and "no text can be extracted from any of the annotated pages" in str(result.exception)


def test_rules_on_a_classifier_that_the_recipe_trains_are_named(tmp_path: Path) -> None:
    found = evidence(Annotations(PAGES, Store.open(tmp_path / "store"), ExtractConfig()), "llama3-8b")
    assert found.unjudged == ["select_model.quality.min_rank"]
